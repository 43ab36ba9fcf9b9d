"""Equality of graphs and workloads: comparison column by column, and checksums of content.

Rows of string, type, group-set and permutation tables are compared by content, not by number, so a reader may
intern in another order. NaN equals NaN: unknown stays unknown. A checksum is equal for equal content in any
process.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import IntArray, RaggedArray
from hespas.graph.opgraph import (
    NODE_COLUMNS,
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    OpGraph,
    P2pTable,
)
from hespas.graph.workload import Workload

__all__ = ["COMPARED_COLUMNS", "GraphDifference", "content_key", "graphs_equal", "workloads_equal"]


_TEXT_COLUMNS = frozenset({"name_id", "op_id", "source_id", "framework_id"})

_TABLES: dict[str, tuple[str, ...]] = {
    "collectives": tuple(CollectiveTable.DTYPES),
    "p2p": tuple(P2pTable.DTYPES),
    "contractions": tuple(ContractionTable.DTYPES),
    "regions": (
        "parent",
        "kind",
        "trips",
        "label",
        "carried_region",
        "carried_producer",
        "carried_consumer",
    ),
    "extra": ("node", "key", "tag"),
}

_ROW_KINDS = {
    "reduction": "strings",
    "label": "strings",
    "key": "strings",
    "group_set": "group_sets",
    "permutation": "permutations",
}

COMPARED_COLUMNS: tuple[str, ...] = (
    "name",
    *NODE_COLUMNS,
    "data_deps",
    "control_deps",
    "operands",
    "results",
    *(f"{table}.{column}" for table, columns in _TABLES.items() for column in columns),
    "extra.value",
    "attachments",
)
"""Columns of a graph, by the names that differences use."""


@dataclass(frozen=True, slots=True)
class GraphDifference:
    """Difference of one column: ``count`` rows differ, and ``first_row`` is the first of them.

    If the columns differ in length, ``count`` is the difference and ``first_row`` is -1.
    """

    column: str
    count: int
    first_row: int

    def __str__(self) -> str:
        if self.first_row < 0:
            return f"{self.column}: {self.count} rows more or fewer"
        return f"{self.column}: {self.count} rows differ, the first is row {self.first_row}"


@dataclass(frozen=True, slots=True)
class _CommonNumbers:
    """Common numbers for the rows of two graphs' tables (strings, types, ...): rows with equal content get
    the same number.

    ``left`` and ``right`` map the name of a table to an array with the number of each row. Its additional
    last entry, -1, is for row -1.
    """

    left: dict[str, IntArray]
    right: dict[str, IntArray]

    @classmethod
    def of(cls, a: OpGraph, b: OpGraph) -> _CommonNumbers:
        left, right = dict[str, IntArray](), dict[str, IntArray]()
        keys_of: dict[str, tuple[Iterable[Hashable], Iterable[Hashable]]] = {
            "strings": (a.strings, b.strings),
            "types": (_type_keys(a), _type_keys(b)),
            "group_sets": (a.group_sets, b.group_sets),
            "permutations": (a.permutations, b.permutations),
        }
        for name, keys in keys_of.items():
            seen: dict[Hashable, int] = {}
            for target, entries in zip((left, right), keys, strict=True):
                target[name] = np.array([*(seen.setdefault(key, len(seen)) for key in entries), -1], np.int64)
        return cls(left, right)


def _type_keys(graph: OpGraph) -> Iterator[Hashable]:
    types = graph.types
    for row in range(len(types)):
        size = float(types.bytes[row])
        yield (
            int(types.dtype[row]),
            types.shape(row),
            None if np.isnan(size) else size,
            bool(types.bounded[row]),
            graph.strings[int(types.encoding[row])],
        )


def _compare(column: str, a: NDArray[np.generic], b: NDArray[np.generic]) -> Iterator[GraphDifference]:
    if len(a) != len(b):
        yield GraphDifference(column, abs(len(a) - len(b)), -1)
        return
    same = a == b
    if a.dtype.kind == "f" and b.dtype.kind == "f":
        same |= np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    differing = np.flatnonzero(~same)
    if len(differing):
        yield GraphDifference(column, len(differing), int(differing[0]))


def _compare_ragged(
    column: str, a: RaggedArray, b: RaggedArray, rows: tuple[IntArray, IntArray] | None = None
) -> Iterator[GraphDifference]:
    """Yield a difference if rows of ``a`` and ``b`` differ in length or in a value.

    If values are row numbers of a table, ``rows`` converts the values of each side to common numbers first
    (see :class:`_CommonNumbers`).
    """
    differing = np.flatnonzero(a.lengths != b.lengths)
    if len(differing):
        yield GraphDifference(column, len(differing), int(differing[0]))
        return
    left, right = (a.values, b.values) if rows is None else (rows[0][a.values], rows[1][b.values])
    differing = np.unique(a.row_ids[left != right])
    if len(differing):
        yield GraphDifference(column, len(differing), int(differing[0]))


def _compare_tables(a: OpGraph, b: OpGraph, canonical: _CommonNumbers) -> Iterator[GraphDifference]:
    for table, columns in _TABLES.items():
        one, two = getattr(a, table), getattr(b, table)
        for column in columns:
            left, right = getattr(one, column), getattr(two, column)
            kind = _ROW_KINDS.get(column)
            if kind:
                left, right = canonical.left[kind][left], canonical.right[kind][right]
            yield from _compare(f"{table}.{column}", left, right)
    if len(a.extra) == len(b.extra):
        yield from _compare("extra.value", _values(a.extra), _values(b.extra))


def _values(extra: ExtraTable) -> NDArray[np.object_]:
    column = np.empty(len(extra), np.object_)
    for row in range(len(extra)):
        column[row] = extra.value(row)
    return column


def graphs_equal(a: OpGraph, b: OpGraph) -> list[GraphDifference]:
    """Return the differences of two graphs, empty if they are equal. O(nodes + strings) time and memory.

    Graphs of different length differ in ``nodes`` and are not compared further.
    """
    if len(a) != len(b):
        return [GraphDifference("nodes", abs(len(a) - len(b)), -1)]
    canonical = _CommonNumbers.of(a, b)
    left, right = canonical.left, canonical.right
    differences: list[GraphDifference] = []
    for name in NODE_COLUMNS:
        one, two = getattr(a, name), getattr(b, name)
        if name in _TEXT_COLUMNS:
            one, two = left["strings"][one], right["strings"][two]
        differences += _compare(name, one, two)
    for name in ("data_deps", "control_deps"):
        differences += _compare_ragged(name, getattr(a, name), getattr(b, name))
    types = (left["types"], right["types"])
    for name in ("operands", "results"):
        differences += _compare_ragged(name, getattr(a, name), getattr(b, name), types)
    differences += _compare_tables(a, b, canonical)
    if a.name != b.name:
        differences.append(GraphDifference("name", 1, 0))
    unequal = [
        name
        for name in {*a.attachments, *b.attachments}
        if a.attachments.get(name) != b.attachments.get(name)
    ]
    if unequal:
        differences.append(GraphDifference("attachments", len(unequal), 0))
    return differences


def workloads_equal(a: Workload, b: Workload) -> list[GraphDifference]:
    """Return the differences of two workloads; columns of class ``i`` are called ``classes[i].column``."""
    differences = list(_compare("rank_class", a.rank_class, b.rank_class))
    if a.name != b.name:
        differences.append(GraphDifference("name", 1, 0))
    keys = [key for key in {*a.metadata, *b.metadata} if a.metadata.get(key) != b.metadata.get(key)]
    if keys:
        differences.append(GraphDifference("metadata", len(keys), 0))
    if len(a.classes) != len(b.classes):
        return [*differences, GraphDifference("classes", abs(len(a.classes) - len(b.classes)), -1)]
    for index, (one, two) in enumerate(zip(a.classes, b.classes, strict=True)):
        differences += [
            GraphDifference(f"classes[{index}].{entry.column}", entry.count, entry.first_row)
            for entry in graphs_equal(one, two)
        ]
    return differences


_DIGEST_BYTES = 8


def content_key(*values: object) -> str:
    """Return a checksum of the content of values, as 16 hexadecimal digits. O(bytes).

    Values are frozen dataclasses, arrays, tuples, mappings, texts and numbers. Fields of dataclasses that
    comparisons ignore are ignored. Raises ``TypeError`` for other types.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    pending = list(reversed(values))
    while pending:
        value = pending.pop()
        parts: list[object] = []
        match value:
            case np.ndarray():
                array = cast("NDArray[np.generic]", value)
                digest.update(f"array {array.dtype.str} {array.shape}\n".encode())
                digest.update(np.ascontiguousarray(array).tobytes())
            case bytes():
                digest.update(b"bytes %d\n" % len(value))
                digest.update(value)
            case memoryview():
                parts = [bytes(cast("memoryview[int]", value))]
            case str():
                parts = [value.encode("utf-8", "surrogatepass")]
            case bool() | int() | float() | None:
                digest.update(f"{type(value).__name__} {value!r}\n".encode())
            case np.generic():
                parts = [value.item()]
            case tuple() | list():
                parts = list(cast("list[object]", value))
                digest.update(b"row %d\n" % len(parts))
            case Mapping():
                rows = sorted(cast("Mapping[str, object]", value).items())
                digest.update(b"map %d\n" % len(rows))
                parts = [part for row in rows for part in row]
            case _ if is_dataclass(value):
                digest.update(f"{type(value).__name__}\n".encode())
                parts = [getattr(value, entry.name) for entry in fields(value) if entry.compare]
            case _:
                raise TypeError(f"values of type {type(value).__name__} have no checksum")
        pending += reversed(parts)
    return digest.hexdigest()
