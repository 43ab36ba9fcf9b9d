"""Arrow layout of an op graph, ``hespas.op-graph-arrow/1``, and its files as typed NumPy columns.

An uncompressed Arrow IPC *file* (https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format) with one
record batch, of one row, per rank class. A column of the graph is one list-typed field, so every array of
the graph is one contiguous buffer of the file and is used without a copy::

    table = pyarrow.ipc.open_file(pyarrow.memory_map("step.opgraph")).read_all()
    table["flops"][0].as_py(), table["data_deps"][0], table["strings"][0]

* ``name`` is the class's name, ``nodes`` its number of nodes.
* A node column (``flops``) is ``large_list<T>``; a list of one item applies to every node (``id`` is always
  complete).
* A ragged column (``data_deps``, ``types.dims``) is ``large_list<large_list<T>>``; a node column without rows
  means that all rows are empty. Dependencies are node numbers.
* ``strings``, ``extra.value`` and ``attachments.*`` are ``large_list<large_binary>``; text is UTF-8 in which
  lone surrogates are encoded too. ``*_row`` columns, ``label``, ``key``, ``reduction`` and ``encoding`` are
  rows of ``strings``, whose row 0 is empty.
* ``group_sets`` and ``permutations`` hold each entry as the JSON format spells it.
* Columns of a side table are called ``table.column`` and have one item per row of that table.
* The schema's metadata has ``schema`` (this version), ``hespas_version`` and ``workload``: a JSON object
  with ``name``, ``metadata`` and ``rank_class`` (runs of ``[class, number of ranks]``; class -1: not in the
  file).

Codes are defined in :mod:`hespas.graph.opgraph` and :data:`hespas.graph.DTYPES`; -1 and NaN are unknown.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hespas.converters.op_graph.document import FIELD_NAMES, Count, Row
from hespas.files.streams import read_bytes
from hespas.graph import CollectiveTable, ContractionTable, P2pTable
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.graph.opgraph import NODE_DTYPES

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "ARROW_SCHEMA_ID",
    "COLUMNS",
    "NODE_FIELDS",
    "RAGGED_NODE_COLUMNS",
    "TABLE_DTYPES",
    "ArrowColumns",
    "ArrowHeader",
    "ArrowSource",
    "BinaryColumn",
    "ColumnSpec",
    "FieldShape",
    "RaggedColumn",
    "save_arrow",
]

ARROW_SCHEMA_ID = "hespas.op-graph-arrow/1"


class FieldShape(Enum):
    """Shape of a field in the Arrow file: one value, a list, or bytes per row."""

    TEXT = "large_binary"
    COUNT = "int64"
    FLAT = "large_list<T>"
    RAGGED = "large_list<large_list<T>>"
    BINARY = "large_list<large_binary>"


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """Field of the Arrow schema of an op graph. ``dtype`` is the NumPy type of its items, or bytes."""

    name: str
    shape: FieldShape
    dtype: type[np.generic] = np.uint8


class ArrowHeader(Struct, kw_only=True, forbid_unknown_fields=True):
    """Properties of the whole job, the entry ``workload`` in the metadata of the Arrow schema."""

    name: str
    metadata: dict[str, str]
    rank_class: tuple[tuple[Row, Count], ...]


TABLE_DTYPES: dict[str, Mapping[str, type[np.generic]]] = {
    "collectives": CollectiveTable.DTYPES,
    "p2p": {**P2pTable.DTYPES, "host": np.uint8},
    "contractions": ContractionTable.DTYPES,
    "regions": {"parent": np.int32, "kind": np.uint8, "trips": np.float64, "label": np.int32},
    "carried": {"region": np.int32, "producer": np.int32, "consumer": np.int32},
    "extra": {"node": np.int32, "key": np.int32, "tag": np.int16},
    "types": {"dtype": np.int16, "bytes": np.float64, "bounded": np.uint8, "encoding": np.int32},
}
"""Flat columns of each side table; all columns of a table have the same length."""

NODE_FIELDS = {FIELD_NAMES.get(column, column): column for column in NODE_DTYPES}
"""Node columns of the graph by their field names in the file."""

RAGGED_NODE_COLUMNS = ("data_deps", "control_deps", "operands", "results")

_LATER: Mapping[str, tuple[str, type[np.generic], int]] = {
    "contractions.window": ("contractions.node", ContractionTable.DTYPES["window"], 1)
}
"""Flat columns that files of Hespas 0.1.0 do not have: a column of equal length, the type, and the value that
such files imply.
"""

COLUMNS: tuple[ColumnSpec, ...] = (
    ColumnSpec("name", FieldShape.TEXT),
    ColumnSpec("nodes", FieldShape.COUNT, np.int64),
    *(ColumnSpec(name, FieldShape.FLAT, NODE_DTYPES[column]) for name, column in NODE_FIELDS.items()),
    *(ColumnSpec(name, FieldShape.RAGGED, np.int32) for name in RAGGED_NODE_COLUMNS),
    *(
        ColumnSpec(f"{table}.{name}", FieldShape.FLAT, dtype)
        for table, columns in TABLE_DTYPES.items()
        for name, dtype in columns.items()
        if f"{table}.{name}" not in _LATER
    ),
    ColumnSpec("types.dims", FieldShape.RAGGED, np.int64),
    ColumnSpec("extra.value", FieldShape.BINARY),
    ColumnSpec("strings", FieldShape.BINARY),
    ColumnSpec("group_sets", FieldShape.BINARY),
    ColumnSpec("permutations", FieldShape.BINARY),
    ColumnSpec("attachments.name", FieldShape.BINARY),
    ColumnSpec("attachments.content", FieldShape.BINARY),
    *(ColumnSpec(name, FieldShape.FLAT, dtype) for name, (_, dtype, _) in _LATER.items()),
)
"""All fields in file order."""

_SHOWN_CHARACTERS = 120


@dataclass(frozen=True, slots=True, eq=False)
class RaggedColumn:
    """Column of lists: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``; offsets start at 0."""

    offsets: IntArray
    values: NDArray[np.generic]


@dataclass(frozen=True, slots=True, eq=False)
class BinaryColumn:
    """Column of bytes: item ``i`` is ``data[offsets[i]:offsets[i + 1]]``; offsets start at 0."""

    offsets: IntArray
    data: bytes | memoryview[int]

    @classmethod
    def from_items(cls, items: Iterable[bytes]) -> BinaryColumn:
        """Return a column of the concatenated items."""
        listed = list(items)
        offsets = np.zeros(len(listed) + 1, np.int64)
        np.cumsum([len(item) for item in listed], out=offsets[1:])
        return cls(offsets, b"".join(listed))

    def items(self) -> list[bytes]:
        """Return copies of all items."""
        bounds: list[int] = self.offsets.tolist()
        return [bytes(self.data[start:end]) for start, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True, eq=False)
class ArrowColumns:
    """Columns of one rank class by field name, grouped by their shapes in :data:`COLUMNS`."""

    texts: dict[str, bytes] = field(default_factory=dict[str, bytes])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    flat: dict[str, NDArray[np.generic]] = field(default_factory=dict[str, NDArray[np.generic]])
    ragged: dict[str, RaggedColumn] = field(default_factory=dict[str, RaggedColumn])
    binary: dict[str, BinaryColumn] = field(default_factory=dict[str, BinaryColumn])


def _field_type(spec: ColumnSpec) -> pa.DataType:
    import pyarrow as arrow

    items = arrow.from_numpy_dtype(np.dtype(spec.dtype))
    match spec.shape:
        case FieldShape.TEXT:
            return arrow.large_binary()
        case FieldShape.COUNT:
            return arrow.int64()
        case FieldShape.FLAT:
            return arrow.large_list(items)
        case FieldShape.RAGGED:
            return arrow.large_list(arrow.large_list(items))
        case FieldShape.BINARY:
            return arrow.large_list(arrow.large_binary())


def _schema(metadata: Mapping[str, str]) -> pa.Schema:
    import pyarrow as arrow

    fields = [arrow.field(spec.name, _field_type(spec), nullable=False) for spec in COLUMNS]
    own: dict[str | bytes, str | bytes] = {key: text for key, text in metadata.items()}  # noqa: C416
    return arrow.schema(fields, metadata=own)


def save_arrow(path: Path, metadata: Mapping[str, str], classes: Iterable[ArrowColumns]) -> None:
    """Write one record batch per class. Raises ``OSError`` for a failed write."""
    import pyarrow as arrow
    from pyarrow import ipc

    encoded_path = cast("str", os.fsencode(path))  # pyarrow rejects text paths that are not UTF-8
    schema, batches = _schema(metadata), cast("Any", arrow.RecordBatch)
    with arrow.OSFile(encoded_path, "wb") as sink, ipc.new_file(sink, schema) as opened:
        writer = cast("Any", opened)
        for columns in classes:
            arrays = [_array(spec, columns) for spec in COLUMNS]
            writer.write_batch(batches.from_arrays(arrays, schema=schema))


def _array(spec: ColumnSpec, columns: ArrowColumns) -> pa.Array[Any]:
    """Return a column as an Arrow array that shares its memory."""
    match spec.shape:
        case FieldShape.TEXT:
            return _binary_array(BinaryColumn.from_items([columns.texts[spec.name]]))
        case FieldShape.COUNT:
            return _flat_array(np.array([columns.counts[spec.name]]), spec)
        case FieldShape.FLAT:
            return _one_list(_flat_array(columns.flat[spec.name], spec))
        case FieldShape.RAGGED:
            ragged = columns.ragged[spec.name]
            return _one_list(_lists(ragged.offsets, _flat_array(ragged.values, spec)))
        case FieldShape.BINARY:
            return _one_list(_binary_array(columns.binary[spec.name]))


def _flat_array(values: NDArray[np.generic], spec: ColumnSpec) -> pa.Array[Any]:
    import pyarrow as arrow

    items = np.ascontiguousarray(values, spec.dtype)
    item_type = arrow.from_numpy_dtype(np.dtype(spec.dtype))
    return arrow.Array.from_buffers(item_type, len(items), [None, arrow.py_buffer(items.data)])


def _lists(offsets: IntArray, items: pa.Array[Any]) -> pa.Array[Any]:
    import pyarrow as arrow

    bounds = arrow.py_buffer(np.ascontiguousarray(offsets, np.int64).data)
    list_type = arrow.large_list(items.type)
    return arrow.Array.from_buffers(list_type, len(offsets) - 1, [None, bounds], children=[items])


def _binary_array(binary: BinaryColumn) -> pa.Array[Any]:
    import pyarrow as arrow

    bounds = arrow.py_buffer(np.ascontiguousarray(binary.offsets, np.int64).data)
    buffers = [None, bounds, arrow.py_buffer(binary.data)]
    return arrow.Array.from_buffers(arrow.large_binary(), len(binary.offsets) - 1, buffers)


def _one_list(items: pa.Array[Any]) -> pa.Array[Any]:
    return _lists(np.array([0, len(items)], np.int64), items)


class ArrowSource:
    """Open Arrow file of an op graph. The file is read into memory, and its arrays refer to these bytes.

    The file is not mapped: if another program truncated a mapped file, access to the lost part would end the
    process (SIGBUS). Raises ``FormatError`` if the file is damaged or has other fields.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Read the file, gzipped or not and of at most ``max_bytes``, and check its schema."""
        import pyarrow as arrow
        from pyarrow import ipc

        self._path = str(path)
        buffer = arrow.py_buffer(read_bytes(path, max_bytes))
        _check_footer(memoryview(buffer).cast("B"), self._path)
        try:
            self._reader = ipc.open_file(buffer)
            self._schema = self._reader.schema
            self._names = self._schema.names
            self.metadata: dict[bytes, bytes] = self._schema.metadata or {}
        except MemoryError:  # Arrow's own MemoryError is an ArrowException, too
            raise
        except (arrow.ArrowException, OSError, ValueError) as error:
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
        """Check that the file has exactly the fields of the layout, or those of its first version."""
        expected = _schema({})
        if self._names == expected.names[: -len(_LATER)]:
            for position in range(len(expected.names) - 1, len(self._names) - 1, -1):
                expected = expected.remove(position)
        if self._names != expected.names:
            unlike = sorted(set(self._names) ^ set(expected.names))[:3]
            shown = ", ".join(name[:_SHOWN_CHARACTERS] for name in unlike) or "their order"
            raise self._unlike(f"fields differ from the layout: {shown}", "field names")
        for name, actual, wanted in zip(expected.names, self._schema.types, expected.types, strict=True):
            if actual != wanted:
                shown = str(actual)[:_SHOWN_CHARACTERS]
                raise self._unlike(f"expected {wanted}, found {shown}", f"field {name!r}")

    def _unlike(self, message: str, position: str) -> FormatError:
        return FormatError(
            message, path=self._path, position=position, hint="write the file again from its source"
        )

    @property
    def num_classes(self) -> int:
        """Number of record batches, one per class."""
        return self._reader.num_record_batches

    def classes(self) -> Iterator[ArrowColumns]:
        """Yield the columns of each class."""
        from pyarrow import ArrowException

        for index in range(self._reader.num_record_batches):
            try:
                batch = self._reader.get_batch(index)
                batch.validate(full=True)
            except MemoryError:  # Arrow's own MemoryError is an ArrowException, too
                raise
            except (ArrowException, OSError) as error:
                raise self._broken(error) from error
            if batch.num_rows != 1:
                message = f"record batch {index} has {batch.num_rows} rows, expected 1"
                raise self._unlike(message, "field 'name'")
            columns = ArrowColumns()
            for column, spec in enumerate(COLUMNS[: len(self._names)]):
                self._add_column(columns, spec, self._full(cast("Any", batch).column(column), spec))
            for name, (other, dtype, value) in _LATER.items():
                columns.flat.setdefault(name, np.full(len(columns.flat[other]), value, dtype))
            yield columns

    def _add_column(self, columns: ArrowColumns, spec: ColumnSpec, array: pa.Array[Any]) -> None:
        match spec.shape:
            case FieldShape.TEXT:
                columns.texts[spec.name] = _binary(array).items()[0]
            case FieldShape.COUNT:
                columns.counts[spec.name] = int(_flat(array, spec.dtype)[0])
            case FieldShape.FLAT:
                columns.flat[spec.name] = _flat(self._items(array, spec), spec.dtype)
            case FieldShape.RAGGED:
                lists = self._items(array, spec)
                offsets = _offsets(lists)
                values = _flat(self._full(_values(lists), spec), spec.dtype)
                columns.ragged[spec.name] = RaggedColumn(
                    _from_zero(offsets), values[int(offsets[0]) : int(offsets[-1])]
                )
            case FieldShape.BINARY:
                columns.binary[spec.name] = _binary(self._items(array, spec))

    def _full(self, array: pa.Array[Any], spec: ColumnSpec) -> pa.Array[Any]:
        if array.null_count:
            raise self._unlike(
                f"the field has {array.null_count} nulls, expected none", f"field {spec.name!r}"
            )
        return array

    def _items(self, array: pa.Array[Any], spec: ColumnSpec) -> pa.Array[Any]:
        """Return the items of a field that has one list per class. The list must contain all items of the
        array.
        """
        first, last = _offsets(array).tolist()
        items = _values(array)
        if (first, last) != (0, len(items)):
            raise self._unlike("the field has items outside of its list", f"field {spec.name!r}")
        return self._full(items, spec)


class _ArrowLists(Protocol):
    """Protocol that describes ``pyarrow.LargeListArray`` to type checkers, because its stubs lack the element
    type of its values.
    """

    @property
    def values(self) -> pa.Array[Any]: ...


def _values(lists: pa.Array[Any]) -> pa.Array[Any]:
    """Return the items of all lists of an array, concatenated."""
    return cast("_ArrowLists", lists).values


def _offsets(array: pa.Array[Any]) -> IntArray:
    """Return the offsets of a list or binary array, shape ``(len + 1,)``."""
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.zeros(len(array) + 1, np.int64)
    return np.frombuffer(memoryview(buffer), np.int64, len(array) + 1, array.offset * 8)


def _from_zero(offsets: IntArray) -> IntArray:
    return offsets - offsets[0] if len(offsets) and offsets[0] else offsets


def _flat(array: pa.Array[Any], dtype: type[np.generic]) -> NDArray[np.generic]:
    buffer = array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(memoryview(buffer), dtype, len(array), array.offset * np.dtype(dtype).itemsize)


def _binary(array: pa.Array[Any]) -> BinaryColumn:
    offsets = _offsets(array)
    buffer = array.buffers()[2]
    data = b"" if buffer is None else memoryview(buffer).cast("B")
    return BinaryColumn(_from_zero(offsets), data[int(offsets[0]) : int(offsets[-1])])


_MAGIC = b"ARROW1"
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_BATCH_COMPRESSION = 3
_BLOCK = struct.Struct("<qi4xq")
"""Offset in the file, bytes of metadata, bytes of the body."""


def _check_footer(data: memoryview[int], path: str) -> None:
    """Check that the file has a footer, no dictionaries and no compressed record batch.

    Reads only a few fields of the footer's flatbuffer, before anything is decompressed. Layout of an IPC file
    and its tables: https://github.com/apache/arrow/blob/main/format/File.fbs and Message.fbs. Raises
    ``FormatError`` for a broken or truncated file and ``UnsupportedError`` for compressed buffers.
    """
    if len(data) < 2 * len(_MAGIC) + 6 or bytes(data[-len(_MAGIC) :]) != _MAGIC:
        raise FormatError(
            "the Arrow file ends early", path=path, position=f"byte {len(data)}", hint="copy the file again"
        )
    try:
        (length,) = struct.unpack_from("<i", data, len(data) - len(_MAGIC) - 4)
        start = len(data) - len(_MAGIC) - 4 - length
        if length <= 0 or start < 0:
            raise ValueError("the footer length is out of range")
        footer = data[start : start + length]
        root = _indirect(footer, 0)
        if _vector(footer, root, _FOOTER_DICTIONARIES)[1]:
            raise ValueError("the file has dictionaries, which op graphs never have")
        position, count = _vector(footer, root, _FOOTER_BATCHES)
        if count * _BLOCK.size > length:
            raise ValueError("the footer is too short for its number of record batches")
        compressed = any(
            _is_compressed(data, *_BLOCK.unpack_from(footer, position + index * _BLOCK.size)[:2])
            for index in range(count)
        )
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


def _is_compressed(data: memoryview[int], offset: int, length: int) -> bool:
    """Return True if a record batch, given by offset and length of its message, has compressed buffers."""
    if offset < 0 or length < 8 or offset + length > len(data):
        raise ValueError("a record batch is outside of the file")
    block = data[offset : offset + length]
    (marker,) = struct.unpack_from("<I", block, 0)
    message = block[8:] if marker == 0xFFFFFFFF else block[4:]
    header = _field(message, _indirect(message, 0), _MESSAGE_HEADER)
    if not header:
        raise ValueError("the message of a record batch has no header")
    return _field(message, _indirect(message, header), _BATCH_COMPRESSION) != 0


def _indirect(data: memoryview[int], position: int) -> int:
    (step,) = struct.unpack_from("<I", data, position)
    return position + int(step)


def _field(data: memoryview[int], table: int, number: int) -> int:
    """Return the position of field ``number`` of a flatbuffer table, 0 if it is absent."""
    (back,) = struct.unpack_from("<i", data, table)
    vtable = table - int(back)
    if vtable < 0:
        raise ValueError("the field table (vtable) is before the start of the data")
    (size,) = struct.unpack_from("<H", data, vtable)
    entry = 4 + 2 * number
    if entry + 2 > size:
        return 0
    (step,) = struct.unpack_from("<H", data, vtable + entry)
    return table + int(step) if step else 0


def _vector(data: memoryview[int], table: int, number: int) -> tuple[int, int]:
    """Return the position of the items of a vector in a flatbuffer table, and their number."""
    field = _field(data, table, number)
    if not field:
        return 0, 0
    position = _indirect(data, field)
    (count,) = struct.unpack_from("<I", data, position)
    return position + 4, int(count)
