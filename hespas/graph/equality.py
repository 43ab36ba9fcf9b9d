"""Equality of graphs and workloads: comparison column by column, and checksums of content."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Protocol, cast

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

__all__ = ["COMPARED_COLUMNS", "Difference", "content_key", "graphs_equal", "workloads_equal"]


_TEXT_COLUMNS = frozenset({"name_row", "op_row", "source_row", "framework_row"})

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
"""The columns of a graph by the names that differences have."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``count`` rows of ``column`` differ, the first is ``first_row`` (-1 where lengths differ)."""

    column: str
    count: int
    first_row: int

    def __str__(self) -> str:
        if self.first_row < 0:
            return f"{self.column}: {self.count} rows more or fewer"
        return f"{self.column}: {self.count} rows differ, the first is row {self.first_row}"


@dataclass(frozen=True, slots=True)
class _Canonical:
    """For each table of two graphs: row -> common number, one array a graph; the last entry is for row -1."""

    left: dict[str, IntArray]
    right: dict[str, IntArray]

    @classmethod
    def of(cls, a: OpGraph, b: OpGraph) -> _Canonical:
        left, right = dict[str, IntArray](), dict[str, IntArray]()
        for name, keys in _table_keys(a, b).items():
            seen: dict[Hashable, int] = {}
            for target, entries in zip((left, right), keys, strict=True):
                target[name] = np.array([*(seen.setdefault(key, len(seen)) for key in entries), -1], np.int64)
        return cls(left, right)


def _table_keys(a: OpGraph, b: OpGraph) -> dict[str, tuple[Iterable[Hashable], Iterable[Hashable]]]:
    return {
        "strings": (a.strings, b.strings),
        "types": (_type_keys(a), _type_keys(b)),
        "group_sets": (a.group_sets, b.group_sets),
        "permutations": (a.permutations, b.permutations),
    }


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


def _compare(column: str, a: NDArray[np.generic], b: NDArray[np.generic]) -> Iterator[Difference]:
    if len(a) != len(b):
        yield Difference(column, abs(len(a) - len(b)), -1)
        return
    same = a == b
    if a.dtype.kind == "f" and b.dtype.kind == "f":
        same |= np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64))
    wrong = np.flatnonzero(~same)
    if len(wrong):
        yield Difference(column, len(wrong), int(wrong[0]))


def _compare_csr(
    column: str, a: RaggedArray, b: RaggedArray, rows: tuple[IntArray, IntArray] | None = None
) -> Iterator[Difference]:
    """Rows that differ in length or in a value; ``rows`` translates values to common numbers."""
    unlike = np.flatnonzero(a.lengths != b.lengths)
    if len(unlike):
        yield Difference(column, len(unlike), int(unlike[0]))
        return
    left, right = (a.values, b.values) if rows is None else (rows[0][a.values], rows[1][b.values])
    wrong = np.unique(a.row_ids[left != right])
    if len(wrong):
        yield Difference(column, len(wrong), int(wrong[0]))


def _compare_nodes(a: OpGraph, b: OpGraph, canonical: _Canonical) -> Iterator[Difference]:
    left, right = canonical.left, canonical.right
    for name in NODE_COLUMNS:
        one, two = getattr(a, name), getattr(b, name)
        if name in _TEXT_COLUMNS:
            one, two = left["strings"][one], right["strings"][two]
        yield from _compare(name, one, two)
    for name in ("data_deps", "control_deps"):
        yield from _compare_csr(name, getattr(a, name), getattr(b, name))
    for name in ("operands", "results"):
        yield from _compare_csr(name, getattr(a, name), getattr(b, name), (left["types"], right["types"]))


def _compare_tables(a: OpGraph, b: OpGraph, canonical: _Canonical) -> Iterator[Difference]:
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


def graphs_equal(a: OpGraph, b: OpGraph) -> list[Difference]:
    """What differs, empty where the graphs say the same. O(nodes + strings) time and memory.

    Graphs of different length differ in ``nodes`` and are compared no further.
    """
    if len(a) != len(b):
        return [Difference("nodes", abs(len(a) - len(b)), -1)]
    canonical = _Canonical.of(a, b)
    found = [*_compare_nodes(a, b, canonical), *_compare_tables(a, b, canonical)]
    if a.name != b.name:
        found.append(Difference("name", 1, 0))
    names = [name for name in {*a.attachments, *b.attachments} if not _same_attachment(a, b, name)]
    if names:
        found.append(Difference("attachments", len(names), 0))
    return found


def _same_attachment(a: OpGraph, b: OpGraph, name: str) -> bool:
    return name in a.attachments and name in b.attachments and a.attachments[name] == b.attachments[name]


def workloads_equal(a: Workload, b: Workload) -> list[Difference]:
    """What differs between two workloads; columns of class ``i`` are called ``classes[i].column``."""
    found = list(_compare("rank_class", a.rank_class, b.rank_class))
    if a.name != b.name:
        found.append(Difference("name", 1, 0))
    unlike = [key for key in {*a.metadata, *b.metadata} if a.metadata.get(key) != b.metadata.get(key)]
    if unlike:
        found.append(Difference("metadata", len(unlike), 0))
    if len(a.classes) != len(b.classes):
        return [*found, Difference("classes", abs(len(a.classes) - len(b.classes)), -1)]
    for index, (one, two) in enumerate(zip(a.classes, b.classes, strict=True)):
        found += [
            Difference(f"classes[{index}].{entry.column}", entry.count, entry.first_row)
            for entry in graphs_equal(one, two)
        ]
    return found


_DIGEST_BYTES = 8


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...


def content_key(*values: object) -> str:
    """16 hexadecimal digits of frozen dataclasses, arrays, tuples, mappings, texts and numbers. O(bytes).

    Fields that do not take part in comparisons are left out. Raises ``TypeError`` for other types.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES)
    waiting = list(reversed(values))
    while waiting:
        waiting += reversed(_parts(waiting.pop(), digest))
    return digest.hexdigest()


def _parts(value: object, digest: _Digest) -> list[object]:
    """Add what a value is itself; returns what it consists of."""
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
            parts = [getattr(value, each.name) for each in fields(value) if each.compare]
        case _:
            raise TypeError(f"no checksum of a {type(value).__name__}")
    return parts
