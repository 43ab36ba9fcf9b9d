"""Arrow files as typed NumPy columns and back, without copies; layout in :mod:`.arrow_layout`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hespas.converters.op_graph.arrow_binding import (
    Arrow,
    ArrowArray,
    ArrowBatch,
    ArrowBuffer,
    ArrowSchema,
    ArrowType,
    load_arrow,
)
from hespas.converters.op_graph.arrow_footer import check_footer
from hespas.converters.op_graph.arrow_layout import COLUMNS, ColumnSpec, Shape
from hespas.files.source import read_bytes
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError

__all__ = ["ArrowColumns", "ArrowSource", "Binary", "Ragged", "save_arrow"]

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


def _field_type(arrow: Arrow, spec: ColumnSpec) -> ArrowType:
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


def _schema(arrow: Arrow, metadata: Mapping[str, str] | None) -> ArrowSchema:
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

    arrow: Arrow

    def column(self, spec: ColumnSpec, columns: ArrowColumns) -> ArrowArray:
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

    def _flat(self, values: NDArray[np.generic], spec: ColumnSpec) -> ArrowArray:
        items = np.ascontiguousarray(values, spec.dtype)
        item_type = self.arrow.from_numpy_dtype(np.dtype(spec.dtype))
        return self.arrow.Array.from_buffers(item_type, len(items), [None, self.arrow.py_buffer(items)])

    def _lists(self, offsets: IntArray, items: ArrowArray) -> ArrowArray:
        bounds = self.arrow.py_buffer(np.ascontiguousarray(offsets, np.int64))
        list_type = self.arrow.large_list(items.type)
        return self.arrow.Array.from_buffers(list_type, len(offsets) - 1, [None, bounds], children=[items])

    def _binary(self, binary: Binary) -> ArrowArray:
        bounds = self.arrow.py_buffer(np.ascontiguousarray(binary.offsets, np.int64))
        buffers: list[ArrowBuffer | None] = [None, bounds, self.arrow.py_buffer(binary.data)]
        return self.arrow.Array.from_buffers(self.arrow.large_binary(), len(binary.offsets) - 1, buffers)

    def _one_list(self, items: ArrowArray) -> ArrowArray:
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
        check_footer(memoryview(buffer).cast("B"), self._path)
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

    def _columns(self, batch: ArrowBatch) -> ArrowColumns:
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

    def _full(self, array: ArrowArray, spec: ColumnSpec) -> ArrowArray:
        if array.null_count:
            raise self._unlike("nulls", f"field {spec.name!r}")
        return array

    def _items(self, array: ArrowArray, spec: ColumnSpec) -> ArrowArray:
        """The items of the one list of a field; it must span its child."""
        first, last = _offsets(array).tolist()
        if (first, last) != (0, len(array.values)):
            raise self._unlike("items outside its list", f"field {spec.name!r}")
        return self._full(array.values, spec)

    def _ragged(self, array: ArrowArray, spec: ColumnSpec) -> Ragged:
        offsets = _offsets(array)
        values = _flat(self._full(array.values, spec), spec.dtype)
        return Ragged(_from_zero(offsets), values[int(offsets[0]) : int(offsets[-1])])


def _offsets(array: ArrowArray) -> IntArray:
    """The offsets of a list or binary array, shape ``(len + 1,)``."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    return np.frombuffer(memoryview(buffer), np.int64, len(array) + 1, array.offset * 8)


def _from_zero(offsets: IntArray) -> IntArray:
    return offsets - offsets[0] if len(offsets) and offsets[0] else offsets


def _flat(array: ArrowArray, dtype: type[np.generic]) -> NDArray[np.generic]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(memoryview(buffer), dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _binary(array: ArrowArray) -> Binary:
    offsets = _offsets(array)
    buffer = array.buffers()[2]
    data = b"" if buffer is None else memoryview(buffer).cast("B")
    return Binary(_from_zero(offsets), data[int(offsets[0]) : int(offsets[-1])])
