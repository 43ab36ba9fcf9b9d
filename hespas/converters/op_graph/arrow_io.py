"""Arrow files as typed NumPy columns and back, without copies; layout in :mod:`.arrow_layout`."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hespas.converters.op_graph.arrow_layout import COLUMNS, ColumnSpec, Shape
from hespas.files.streams import read_bytes
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UnsupportedError

__all__ = ["ArrowColumns", "ArrowSource", "Binary", "Ragged", "load_arrow", "save_arrow"]

# The only module that imports pyarrow, and the part of its interface that is used here, typed.
#
# pyarrow is imported when a file is read or written, never before.


class _ArrowType(Protocol):
    """``pyarrow.DataType``."""

    @property
    def id(self) -> int:
        """The code of the type."""
        ...


class _ArrowBuffer(Protocol):
    """``pyarrow.Buffer``: memory that lives as long as anything made from it."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class _ArrowArray(Protocol):
    """``pyarrow.Array``; ``values`` exists on lists only."""

    @property
    def type(self) -> _ArrowType:
        """What the items are."""
        ...

    @property
    def offset(self) -> int:
        """Where in the buffers the first item stands."""
        ...

    @property
    def null_count(self) -> int:
        """Missing items."""
        ...

    @property
    def values(self) -> _ArrowArray:
        """The items of all lists."""
        ...

    def buffers(self) -> list[_ArrowBuffer | None]:
        """Validity, then offsets or data, then those of the children."""
        ...

    def __len__(self) -> int: ...


class _ArrowSchema(Protocol):
    """``pyarrow.Schema``."""

    @property
    def metadata(self) -> dict[bytes, bytes] | None:
        """What the file says of itself."""
        ...

    @property
    def names(self) -> list[str]:
        """Field names in order."""
        ...

    @property
    def types(self) -> list[_ArrowType]:
        """Field types in order."""
        ...


class _ArrowBatch(Protocol):
    """``pyarrow.RecordBatch``."""

    @property
    def num_rows(self) -> int:
        """Rows."""
        ...

    def column(self, i: int, /) -> _ArrowArray:
        """One column."""
        ...

    def validate(self, *, full: bool) -> None:
        """Check offsets and buffer sizes; raises ``ArrowException``."""
        ...


class _ArrowReader(Protocol):
    """``pyarrow.ipc.RecordBatchFileReader``."""

    @property
    def schema(self) -> _ArrowSchema:
        """Fields and metadata."""
        ...

    @property
    def num_record_batches(self) -> int:
        """Record batches in the file."""
        ...

    def get_batch(self, i: int, /) -> _ArrowBatch:
        """One record batch, referring to the file's memory."""
        ...


class _ArrowWriter(Protocol):
    """``pyarrow.ipc.RecordBatchFileWriter``."""

    def write_batch(self, batch: _ArrowBatch, /) -> None:
        """Append a record batch."""
        ...


class _ArrayFactory(Protocol):
    def from_buffers(
        self,
        type: _ArrowType,  # noqa: A002 - pyarrow's name
        length: int,
        buffers: list[_ArrowBuffer | None],
        *,
        children: list[_ArrowArray] | None = None,
    ) -> _ArrowArray: ...


class _BatchFactory(Protocol):
    def from_arrays(self, arrays: list[_ArrowArray], *, schema: _ArrowSchema) -> _ArrowBatch: ...


class _Ipc(Protocol):
    def new_file(self, sink: object, schema: _ArrowSchema) -> AbstractContextManager[_ArrowWriter]: ...

    def open_file(self, source: _ArrowBuffer) -> _ArrowReader: ...


class _Arrow(Protocol):
    """The module ``pyarrow``."""

    @property
    def ArrowException(self) -> type[Exception]:  # noqa: N802 - pyarrow's name
        """What pyarrow raises for a malformed file."""
        ...

    @property
    def Array(self) -> _ArrayFactory:  # noqa: N802 - pyarrow's name
        """Makes arrays of buffers."""
        ...

    @property
    def RecordBatch(self) -> _BatchFactory:  # noqa: N802 - pyarrow's name
        """Makes record batches of arrays."""
        ...

    @property
    def ipc(self) -> _Ipc:
        """Reads and writes files."""
        ...

    def int64(self) -> _ArrowType:
        """64-bit integers."""
        ...

    def large_binary(self) -> _ArrowType:
        """Byte strings with 64-bit offsets."""
        ...

    def large_list(self, items: _ArrowType, /) -> _ArrowType:
        """Lists with 64-bit offsets."""
        ...

    def from_numpy_dtype(self, dtype: object, /) -> _ArrowType:
        """The type of NumPy items."""
        ...

    def field(self, name: str, type: _ArrowType, *, nullable: bool) -> object:  # noqa: A002 - pyarrow's name
        """A field of a schema."""
        ...

    def schema(self, fields: Sequence[object], *, metadata: Mapping[str, str] | None) -> _ArrowSchema:
        """A schema."""
        ...

    def py_buffer(self, data: bytes | memoryview[int] | NDArray[np.generic]) -> _ArrowBuffer:
        """A buffer over memory of ours."""
        ...

    def OSFile(self, path: bytes, mode: str) -> AbstractContextManager[object]:  # noqa: N802 - pyarrow's name
        """A file to write."""
        ...


def load_arrow() -> _Arrow:
    """The module pyarrow, imported now."""
    return cast("_Arrow", import_module("pyarrow"))


_SHOWN_CHARACTERS = 120


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Row ``i`` is ``values[offsets[i]:offsets[i + 1]]``; offsets start at 0."""

    offsets: IntArray
    values: NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class Binary:
    """Item ``i`` is ``data[offsets[i]:offsets[i + 1]]``; offsets start at 0."""

    offsets: IntArray
    data: bytes | memoryview[int]

    @classmethod
    def from_items(cls, items: Iterable[bytes]) -> Binary:
        """Items laid end to end."""
        listed = list(items)
        offsets = np.zeros(len(listed) + 1, np.int64)
        np.cumsum([len(item) for item in listed], out=offsets[1:])
        return cls(offsets, b"".join(listed))

    def items(self) -> list[bytes]:
        """All items, copied."""
        bounds: list[int] = self.offsets.tolist()
        return [bytes(self.data[start:end]) for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True, eq=False)
class ArrowColumns:
    """The fields of one class by name, shaped as :data:`COLUMNS` says."""

    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    flat: dict[str, NDArray[np.generic]] = field(default_factory=dict[str, NDArray[np.generic]])
    ragged: dict[str, Ragged] = field(default_factory=dict[str, Ragged])
    binary: dict[str, Binary] = field(default_factory=dict[str, Binary])


def _field_type(arrow: _Arrow, spec: ColumnSpec) -> _ArrowType:
    items = arrow.from_numpy_dtype(np.dtype(spec.dtype))
    match spec.shape:
        case Shape.TEXT:
            return arrow.large_binary()
        case Shape.COUNT:
            return arrow.int64()
        case Shape.FLAT:
            return arrow.large_list(items)
        case Shape.RAGGED:
            return arrow.large_list(arrow.large_list(items))
        case Shape.BINARY:
            return arrow.large_list(arrow.large_binary())


def _schema(arrow: _Arrow, metadata: Mapping[str, str] | None) -> _ArrowSchema:
    fields = [arrow.field(spec.name, _field_type(arrow, spec), nullable=False) for spec in COLUMNS]
    return arrow.schema(fields, metadata=metadata)


def save_arrow(path: Path, metadata: Mapping[str, str], classes: Iterable[ArrowColumns]) -> None:
    """Write one record batch per class. Raises ``OSError`` where the disk refuses."""
    arrow = load_arrow()
    schema = _schema(arrow, metadata)
    maker = _ArrayMaker(arrow)
    with arrow.OSFile(os.fsencode(path), "wb") as sink, arrow.ipc.new_file(sink, schema) as writer:
        for columns in classes:
            arrays = [maker.column(spec, columns) for spec in COLUMNS]
            writer.write_batch(arrow.RecordBatch.from_arrays(arrays, schema=schema))


@dataclass(frozen=True, slots=True)
class _ArrayMaker:
    """Arrow arrays over NumPy memory."""

    arrow: _Arrow

    def column(self, spec: ColumnSpec, columns: ArrowColumns) -> _ArrowArray:
        match spec.shape:
            case Shape.TEXT:
                return self._binary(Binary.from_items([columns.texts[spec.name]]))
            case Shape.COUNT:
                return self._flat(np.array([columns.counts[spec.name]]), spec)
            case Shape.FLAT:
                return self._one_list(self._flat(columns.flat[spec.name], spec))
            case Shape.RAGGED:
                ragged = columns.ragged[spec.name]
                return self._one_list(self._lists(ragged.offsets, self._flat(ragged.values, spec)))
            case Shape.BINARY:
                return self._one_list(self._binary(columns.binary[spec.name]))

    def _flat(self, values: NDArray[np.generic], spec: ColumnSpec) -> _ArrowArray:
        items = np.ascontiguousarray(values, spec.dtype)
        item_type = self.arrow.from_numpy_dtype(np.dtype(spec.dtype))
        return self.arrow.Array.from_buffers(item_type, len(items), [None, self.arrow.py_buffer(items)])

    def _lists(self, offsets: IntArray, items: _ArrowArray) -> _ArrowArray:
        bounds = self.arrow.py_buffer(np.ascontiguousarray(offsets, np.int64))
        list_type = self.arrow.large_list(items.type)
        return self.arrow.Array.from_buffers(list_type, len(offsets) - 1, [None, bounds], children=[items])

    def _binary(self, binary: Binary) -> _ArrowArray:
        bounds = self.arrow.py_buffer(np.ascontiguousarray(binary.offsets, np.int64))
        buffers: list[_ArrowBuffer | None] = [None, bounds, self.arrow.py_buffer(binary.data)]
        return self.arrow.Array.from_buffers(self.arrow.large_binary(), len(binary.offsets) - 1, buffers)

    def _one_list(self, items: _ArrowArray) -> _ArrowArray:
        return self._lists(np.array([0, len(items)], np.int64), items)


class ArrowSource:
    """An open file. The arrays it gives refer to its bytes, which are read, not mapped: where another
    program cuts a mapped file, touching what is gone ends the process (SIGBUS).

    Raises ``FormatError`` where the file is broken or has other fields.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Read the file, gzipped or not and of at most ``max_bytes``, and check its schema."""
        self._path = str(path)
        self._arrow = load_arrow()
        buffer = self._arrow.py_buffer(read_bytes(path, max_bytes))
        _check_footer(memoryview(buffer).cast("B"), self._path)
        try:
            self._reader = self._arrow.ipc.open_file(buffer)
            self._schema = self._reader.schema
            self._names = self._schema.names
            self.metadata: dict[bytes, bytes] = self._schema.metadata or {}
        except MemoryError:  # Arrow's is one of its own errors, too
            raise
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> FormatError:
        first_line = (str(error).splitlines() or [""])[0][:200]
        return FormatError(
            f"broken Arrow file: {first_line}",
            path=self._path,
            position="footer or schema metadata",
            hint="copy the file again",
        )

    def check_fields(self) -> None:
        """Check that the file has exactly the fields of the layout."""
        expected = _schema(self._arrow, None)
        if self._names != expected.names:
            unlike = sorted(set(self._names) ^ set(expected.names))[:3]
            shown = ", ".join(name[:_SHOWN_CHARACTERS] for name in unlike) or "their order"
            raise self._unlike(f"fields differ from the layout: {shown}", "field names")
        for name, found, wanted in zip(expected.names, self._schema.types, expected.types, strict=True):
            if found != wanted:
                shown = str(found)[:_SHOWN_CHARACTERS]
                raise self._unlike(f"expected {wanted}, found {shown}", f"field {name!r}")

    def _unlike(self, message: str, position: str) -> FormatError:
        return FormatError(
            message, path=self._path, position=position, hint="write the file again from its source"
        )

    @property
    def num_classes(self) -> int:
        """Record batches, one per class."""
        return self._reader.num_record_batches

    def classes(self) -> Iterator[ArrowColumns]:
        """The columns of each class."""
        for index in range(self._reader.num_record_batches):
            try:
                batch = self._reader.get_batch(index)
                batch.validate(full=True)
            except MemoryError:  # Arrow's is one of its own errors, too
                raise
            except (self._arrow.ArrowException, OSError) as error:
                raise self._broken(error) from error
            if batch.num_rows != 1:
                message = f"record batch {index} has {batch.num_rows} rows, expected 1"
                raise self._unlike(message, "field 'name'")
            yield self._columns(batch)

    def _columns(self, batch: _ArrowBatch) -> ArrowColumns:
        columns = ArrowColumns()
        for index, spec in enumerate(COLUMNS):
            array = self._full(batch.column(index), spec)
            match spec.shape:
                case Shape.TEXT:
                    columns.texts[spec.name] = _binary(array).items()[0]
                case Shape.COUNT:
                    columns.counts[spec.name] = int(_flat(array, spec.dtype)[0])
                case Shape.FLAT:
                    columns.flat[spec.name] = _flat(self._items(array, spec), spec.dtype)
                case Shape.RAGGED:
                    columns.ragged[spec.name] = self._ragged(self._items(array, spec), spec)
                case Shape.BINARY:
                    columns.binary[spec.name] = _binary(self._items(array, spec))
        return columns

    def _full(self, array: _ArrowArray, spec: ColumnSpec) -> _ArrowArray:
        if array.null_count:
            raise self._unlike("nulls", f"field {spec.name!r}")
        return array

    def _items(self, array: _ArrowArray, spec: ColumnSpec) -> _ArrowArray:
        """The items of the one list of a field; it must span its child."""
        first, last = _offsets(array).tolist()
        if (first, last) != (0, len(array.values)):
            raise self._unlike("items outside its list", f"field {spec.name!r}")
        return self._full(array.values, spec)

    def _ragged(self, array: _ArrowArray, spec: ColumnSpec) -> Ragged:
        offsets = _offsets(array)
        values = _flat(self._full(array.values, spec), spec.dtype)
        return Ragged(_from_zero(offsets), values[int(offsets[0]) : int(offsets[-1])])


def _offsets(array: _ArrowArray) -> IntArray:
    """The offsets of a list or binary array, shape ``(len + 1,)``."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    return np.frombuffer(memoryview(buffer), np.int64, len(array) + 1, array.offset * 8)


def _from_zero(offsets: IntArray) -> IntArray:
    return offsets - offsets[0] if len(offsets) and offsets[0] else offsets


def _flat(array: _ArrowArray, dtype: type[np.generic]) -> NDArray[np.generic]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(memoryview(buffer), dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _binary(array: _ArrowArray) -> Binary:
    offsets = _offsets(array)
    buffer = array.buffers()[2]
    data = b"" if buffer is None else memoryview(buffer).cast("B")
    return Binary(_from_zero(offsets), data[int(offsets[0]) : int(offsets[-1])])


# Refuses Arrow files that would be decompressed into memory, before anything is.
#
# Reads the few fields of the footer's flatbuffer that say so. Layout of an IPC file and its tables:
# https://github.com/apache/arrow/blob/main/format/File.fbs and Message.fbs.

_MAGIC = b"ARROW1"
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_BATCH_COMPRESSION = 3
_BLOCK = struct.Struct("<qi4xq")
"""Offset in the file, bytes of metadata, bytes of the body."""


def _check_footer(data: memoryview[int], path: str) -> None:
    """Check that the file ends as one, has no dictionaries, and that no record batch is compressed.

    Raises ``FormatError`` for a broken or cut file and ``UnsupportedError`` for compressed buffers.
    """
    if len(data) < 2 * len(_MAGIC) + 6 or bytes(data[-len(_MAGIC) :]) != _MAGIC:
        raise FormatError(
            "the Arrow file ends early", path=path, position=f"byte {len(data)}", hint="copy the file again"
        )
    try:
        compressed = _any_compressed(data)
    except (struct.error, IndexError, ValueError) as error:
        raise FormatError(
            "the Arrow footer is broken",
            path=path,
            position=f"footer, before byte {len(data)}",
            hint="copy the file again",
        ) from error
    if compressed:
        raise UnsupportedError(
            "the Arrow file is compressed, so it cannot be memory-mapped",
            path=path,
            hint="write it with compression=None",
        )


def _any_compressed(data: memoryview[int]) -> bool:
    (length,) = struct.unpack_from("<i", data, len(data) - len(_MAGIC) - 4)
    start = len(data) - len(_MAGIC) - 4 - length
    if length <= 0 or start < 0:
        raise ValueError("footer length")
    footer = data[start : start + length]
    root = _indirect(footer, 0)
    if _vector(footer, root, _FOOTER_DICTIONARIES)[1]:
        raise ValueError("dictionaries")
    position, count = _vector(footer, root, _FOOTER_BATCHES)
    if count * _BLOCK.size > length:
        raise ValueError("record batches")
    return any(
        _is_compressed(data, *_BLOCK.unpack_from(footer, position + index * _BLOCK.size)[:2])
        for index in range(count)
    )


def _is_compressed(data: memoryview[int], offset: int, length: int) -> bool:
    """Whether the record batch of one block says that its buffers are compressed."""
    if offset < 0 or length < 8 or offset + length > len(data):
        raise ValueError("block")
    block = data[offset : offset + length]
    (marker,) = struct.unpack_from("<I", block, 0)
    message = block[8:] if marker == 0xFFFFFFFF else block[4:]
    header = _field(message, _indirect(message, 0), _MESSAGE_HEADER)
    if not header:
        raise ValueError("message")
    return _field(message, _indirect(message, header), _BATCH_COMPRESSION) != 0


def _indirect(data: memoryview[int], position: int) -> int:
    (step,) = struct.unpack_from("<I", data, position)
    return position + int(step)


def _field(data: memoryview[int], table: int, number: int) -> int:
    """Where field ``number`` of a table stands, 0 where it is absent."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - int(back)
    if vtable < 0:
        raise ValueError("vtable")
    (size,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (step,) = struct.unpack_from("<H", data, vtable + entry)
    return table + int(step) if step else 0


def _vector(data: memoryview[int], table: int, number: int) -> tuple[int, int]:
    """Where the items of a vector field start, and how many there are."""
    field = _field(data, table, number)
    if not field:
        return 0, 0
    position = _indirect(data, field)
    (count,) = struct.unpack_from("<I", data, position)
    return position + 4, int(count)
