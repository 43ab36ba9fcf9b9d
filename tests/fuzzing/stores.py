"""Databases, columnar files, arrays and bytecode to trees of fields and back."""

from __future__ import annotations

import io
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from tests.fuzzing.documents import text_of
from tests.fuzzing.trees import Group, Node, Scalar

__all__ = [
    "decode_arrays",
    "decode_arrow",
    "decode_bytecode",
    "decode_database",
    "decode_parquet",
    "encode_arrays",
    "encode_arrow",
    "encode_bytecode",
    "encode_database",
    "encode_parquet",
]

_MOST_ROWS = 5_000
_PAGE_BYTES = 512
"""The least that SQLite knows: an empty table takes a page."""


def _name(node: Node) -> str:
    return text_of(node).replace("\0", "").encode("utf-8", "replace").decode()[:500]


def _parts(node: Node) -> list[Node]:
    return node.parts if isinstance(node, Group) else [node]


# --- SQLite: tables of columns and rows, views as they are spelled


def decode_database(data: bytes) -> Group:
    """All tables of a database, and its views."""
    found = Group("database")
    with sqlite3.connect(":memory:") as base:
        base.deserialize(data)
        listed = base.execute(
            "SELECT name, type, sql FROM sqlite_master"
            " WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite_%'"
        ).fetchall()
        for name, kind, sql in cast("list[tuple[str, str, str]]", listed):
            found.parts.append(Group("view", [sql]) if kind == "view" else _table(base, name))
    base.close()
    return found


def _table(base: sqlite3.Connection, name: str) -> Group:
    columns = cast("list[tuple[Scalar, ...]]", base.execute(f'PRAGMA table_info("{name}")').fetchall())
    rows = cast("list[tuple[Scalar, ...]]", base.execute(f'SELECT * FROM "{name}"').fetchall())
    return Group(
        "table",
        [
            name,
            Group("columns", [Group("column", [column[1], column[2]]) for column in columns]),
            Group("rows", [Group("row", [*row]) for row in rows]),
        ],
    )


def encode_database(tree: Group) -> bytes:
    """A database of the tables, without what SQLite itself does not take (two columns of a name)."""
    base = sqlite3.connect(":memory:")
    base.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    for part in tree.parts:
        try:
            _put_part(base, part)
        except (sqlite3.Error, UnicodeEncodeError, OverflowError):
            continue
    base.commit()
    anything = base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    # A database of nothing is a file of nothing, which SQLite opens but does not serialize.
    data = base.serialize() if anything else b""
    base.close()
    return data


def _put_part(base: sqlite3.Connection, part: Node) -> None:
    if isinstance(part, Group) and part.kind == "table" and len(part.parts) > 1:
        columns = [_parts(column) for column in _parts(part.parts[1])]
        names = [_name(column[0] if column else "") for column in columns]
        types = [_name(column[1] if len(column) > 1 else "") for column in columns]
        quoted = [name.replace('"', '""') for name in names]
        table = _name(part.parts[0]).replace('"', '""')
        declared = ", ".join(
            f'"{name}" {kind if kind.isidentifier() else ""}'
            for name, kind in zip(quoted, types, strict=True)
        )
        base.execute(f'CREATE TABLE "{table}" ({declared})')
        rows = _parts(part.parts[2])[:_MOST_ROWS] if len(part.parts) > 2 else []
        marks = ", ".join("?" * len(names))
        base.executemany(f'INSERT INTO "{table}" VALUES ({marks})', [_row(row, len(names)) for row in rows])
    elif isinstance(part, Group) and part.kind == "view":
        base.execute(text_of(part))


def _row(row: Node, width: int) -> list[Scalar]:
    cells = [_cell(part) for part in _parts(row)]
    return (cells + [None] * width)[:width]


def _cell(node: Node) -> Scalar:
    if isinstance(node, Group):
        return text_of(node).encode("utf-8", "replace").decode()
    if isinstance(node, str):
        return node.encode("utf-8", "replace").decode()
    if isinstance(node, int) and not -(2**63) <= node < 2**63:
        return float(node) if abs(node) < 2**1000 else str(node)
    return node


# --- Arrow and Parquet: columns of cells, which may be lists


class _Array(Protocol):
    type: object

    def __len__(self) -> int: ...
    def to_pylist(self) -> list[object]: ...


class _Schema(Protocol):
    metadata: Mapping[bytes, bytes] | None


class _Table(Protocol):
    schema: _Schema
    column_names: list[str]
    columns: list[_Array]


class _File(Protocol):
    def read_all(self) -> _Table: ...


class _Writer(Protocol):
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def write_table(self, table: _Table) -> None: ...


class _Tables(Protocol):
    def from_arrays(self, arrays: list[_Array], schema: object) -> _Table: ...


class _Ipc(Protocol):
    def open_file(self, source: object) -> _File: ...
    def new_file(self, sink: io.BytesIO, schema: _Schema) -> _Writer: ...


class _Arrow(Protocol):
    """The part of pyarrow that is used here."""

    ArrowException: type[Exception]
    Table: _Tables
    ipc: _Ipc

    def array(self, values: Iterable[object], type: object = None) -> _Array: ...  # noqa: A002 # pyarrow's word
    def nulls(self, size: int, type: object) -> _Array: ...  # noqa: A002 # pyarrow's word
    def concat_arrays(self, arrays: list[_Array]) -> _Array: ...
    def type_for_alias(self, name: str) -> object: ...
    def field(self, name: str, type: object) -> object: ...  # noqa: A002 # pyarrow's word
    def schema(self, fields: list[object], metadata: Mapping[bytes, bytes]) -> object: ...
    def BufferReader(self, data: bytes) -> object: ...  # noqa: N802 # pyarrow's word


class _Parquet(Protocol):
    def read_table(self, source: object) -> _Table: ...
    def write_table(self, table: _Table, where: io.BytesIO) -> None: ...


def _arrow() -> _Arrow:
    return cast("_Arrow", import_module("pyarrow"))


def _parquet() -> _Parquet:
    return cast("_Parquet", import_module("pyarrow.parquet"))


_TYPES: dict[str, object] = {}
"""The types of columns that were met, by their spelling: not all have an alias."""


def _columns(table: _Table) -> Group:
    """Columns with name, type and cells; the facts of the schema."""
    _TYPES.update({str(column.type): column.type for column in table.columns})
    facts = (table.schema.metadata or {}).items()
    found = Group("table", [Group("metadata", [Group("fact", [key, fact]) for key, fact in facts])])
    for name, column in zip(table.column_names, table.columns, strict=True):
        cells = [_from_cell(cell) for cell in column.to_pylist()]
        found.parts.append(Group("column", [name, str(column.type), Group("cells", cells)]))
    return found


def _from_cell(cell: object) -> Node:
    if isinstance(cell, list):
        return Group("cells", [_from_cell(part) for part in cast("list[object]", cell)])
    if isinstance(cell, Mapping):
        pairs = cast("Mapping[str, object]", cell).items()
        return Group("struct", [Group("pair", [key, _from_cell(value)]) for key, value in pairs])
    return cast("Scalar", cell)


def _to_cell(node: Node) -> object:
    if isinstance(node, Group) and node.kind == "struct":
        return {text_of(_parts(pair)[0]): _to_cell(_parts(pair)[-1]) for pair in node.parts if _parts(pair)}
    if isinstance(node, Group):
        return [_to_cell(part) for part in node.parts]
    return node


def _built(tree: Group) -> _Table:
    """A table of the columns. Cells that their type does not take get the type that fits, or are texts."""
    arrow = _arrow()
    names: list[str] = []
    arrays: list[_Array] = []
    facts: dict[bytes, bytes] = {}
    for part in tree.parts:
        if isinstance(part, Group) and part.kind == "metadata":
            pairs = [[*_parts(fact), b"", b""] for fact in part.parts]
            facts |= {_octets(pair[0]): _octets(pair[1]) for pair in pairs}
            continue
        name, kind, cells = ([*_parts(part), None, None, None])[:3]
        names.append(_name(name))
        held = [_to_cell(cell) for cell in _parts(cells)]
        arrays.append(_array(held, text_of(kind)))
    rows = max((len(array) for array in arrays), default=0)
    padded = [arrow.concat_arrays([each, arrow.nulls(rows - len(each), each.type)]) for each in arrays]
    fields = [arrow.field(name, array.type) for name, array in zip(names, padded, strict=True)]
    return arrow.Table.from_arrays(padded, schema=arrow.schema(fields, facts))


def _octets(node: Node) -> bytes:
    return node if isinstance(node, bytes) else text_of(node).encode("utf-8", "replace")


def _array(cells: list[object], kind: str) -> _Array:
    arrow, known = _arrow(), _TYPES.get(kind)
    tries: list[Callable[[], _Array]] = [
        lambda: arrow.array(cells, known if known is not None else arrow.type_for_alias(kind)),
        lambda: arrow.array(cells),
    ]
    for attempt in tries:
        try:
            return attempt()
        except (arrow.ArrowException, ValueError, TypeError, OverflowError, UnicodeEncodeError):
            continue
    return arrow.array([None if cell is None else _octets(str(cell)).decode() for cell in cells])


def decode_arrow(data: bytes) -> Group:
    """An Arrow file."""
    arrow = _arrow()
    return _columns(arrow.ipc.open_file(arrow.BufferReader(data)).read_all())


def encode_arrow(tree: Group) -> bytes:
    """An Arrow file of the columns."""
    table, out = _built(tree), io.BytesIO()
    with _arrow().ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def decode_parquet(data: bytes) -> Group:
    """A Parquet file."""
    return _columns(_parquet().read_table(_arrow().BufferReader(data)))


def encode_parquet(tree: Group) -> bytes:
    """A Parquet file of the columns."""
    out = io.BytesIO()
    _parquet().write_table(_built(tree), out)
    return out.getvalue()


# --- arrays of NumPy in a ZIP file


def decode_arrays(data: bytes) -> Group:
    """Arrays with name, type, shape and items."""
    with np.load(io.BytesIO(data), allow_pickle=False) as held:
        arrays = {name: cast("NDArray[np.generic]", held[name]) for name in held.files}
    return Group("arrays", [_shown(name, array) for name, array in arrays.items()])


def _shown(name: str, array: NDArray[np.generic]) -> Group:
    items = cast("list[Scalar]", array.reshape(-1).tolist())
    return Group("array", [name, array.dtype.str, Group("shape", [*array.shape]), Group("cells", [*items])])


def encode_arrays(tree: Group) -> bytes:
    """The arrays that NumPy can make of the parts of a tree."""
    arrays: dict[str, Any] = {}
    for part in tree.parts:
        name, kind, shape, cells = ([*_parts(part), None, None, None, None])[:4]
        array = _numbers(
            [text_of(cell) if isinstance(cell, Group) else cell for cell in _parts(cells)], text_of(kind)
        )
        sizes = [size for size in _parts(shape) if isinstance(size, int) and 0 <= size < 1 << 20]
        fitting = array.reshape(sizes) if math.prod(sizes) == array.size else array
        arrays[_name(name).replace("/", "_") or "x"] = fitting
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


def _numbers(cells: list[Scalar], kind: str) -> NDArray[np.generic]:
    with np.errstate(all="ignore"):
        try:
            given = np.array(cells)
            kind = kind if given.dtype.kind in "iufb" else ""
            array = cast("NDArray[np.generic]", given.astype(kind or "U"))
        except (TypeError, ValueError, OverflowError, SyntaxError):  # the type may be any text
            texts = [text_of(cell)[:50].replace("\0", "") for cell in cells]
            array = cast("NDArray[np.generic]", np.array(texts))
    return array if array.dtype.kind in "iufbUS" else array.astype("U")


# --- bytecode of MLIR: sections of numbers

_MAGIC = b"ML\xefR"
_ALIGNED, _PADDING = 0x80, 0xCB


def decode_bytecode(data: bytes) -> Group:
    """Version and producer, then sections, each a list of numbers; what follows the last number is bytes.

    https://mlir.llvm.org/docs/BytecodeFormat
    """
    if not data.startswith(_MAGIC):
        raise ValueError("no bytecode")
    version, at = _prefixed(data, 4)
    end = data.index(b"\0", at)
    found, at = Group("bytecode", [version, data[at:end]]), end + 1
    while at < len(data):
        kind = data[at]
        size, at = _prefixed(data, at + 1)
        alignment = 1
        if kind & _ALIGNED:
            alignment, at = _prefixed(data, at)
            while data[at] == _PADDING:
                at += 1
        found.parts.append(Group("section", [kind & 127, alignment, _section(data[at : at + size])]))
        at += size
    return found


def _section(content: bytes) -> Group:
    numbers, at = Group("numbers"), 0
    while at < len(content):
        try:
            value, after = _prefixed(content, at)
        except IndexError:
            numbers.parts.append(content[at:])
            break
        spelled = content[at:after]
        numbers.parts.append(value if _number(value) == spelled else spelled)
        at = after
    return numbers


def _prefixed(data: bytes, at: int) -> tuple[int, int]:
    """A number whose first byte says by its low zeros how many follow."""
    first = data[at]
    size = 9 if first == 0 else (first & -first).bit_length()
    if at + size > len(data):
        raise IndexError(at)
    if size == 9:
        return int.from_bytes(data[at + 1 : at + 9], "little"), at + 9
    return int.from_bytes(data[at : at + size], "little") >> size, at + size


def encode_bytecode(tree: Group) -> bytes:
    """Sections with their lengths."""
    version, producer, *sections = ([*tree.parts, None, None])[: max(2, len(tree.parts))]
    out = bytearray(_MAGIC + _number(version) + _octets(producer).replace(b"\0", b"") + b"\0")
    for section in sections:
        kind, alignment, content = ([*_parts(section), None, None, None])[:3]
        body = b"".join(map(_number, _parts(content)))
        power = alignment if isinstance(alignment, int) and alignment in {2, 4, 8, 16, 32} else 1
        code = kind % 128 if isinstance(kind, int) else 0
        out.append(code | (_ALIGNED if power > 1 else 0))
        out += _number(len(body))
        if power > 1:
            out += _number(power)
            out += bytes([_PADDING]) * (-len(out) % power)
        out += body
    return bytes(out)


def _number(value: Node) -> bytes:
    if not isinstance(value, int):
        return _octets(value)
    value %= 1 << 64
    size = max(1, -(-value.bit_length() // 7))
    if size > 8:
        return b"\0" + value.to_bytes(8, "little")
    return (value << size | 1 << size - 1).to_bytes(size, "little")
