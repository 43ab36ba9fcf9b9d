"""A whole job: rank classes, and which rank runs which.

SPMD ranks (or all ranks of one pipeline stage) run the same graph and differ in group membership and peers
only, which group sets and permutations give symbolically. 65,536 ranks therefore cost what one costs, plus
one small integer a rank.

A workload has the size of its job also where only some of the ranks were read (one trace of a set): the
others are :data:`ABSENT`. Groups and peers name ranks of the job, so they mean the same whoever is there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import IntArray, RaggedArray, SmallIntArray
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.errors import InvariantError, short_repr
from hespas.graph.groups import GroupSet
from hespas.graph.opgraph import (
    NODE_COLUMNS,
    CollectiveTable,
    ContractionTable,
    ExtraTable,
    OpGraph,
    P2pTable,
)

__all__ = [
    "ABSENT",
    "COMPARED_COLUMNS",
    "ESTIMATED_ON",
    "GUESSED_VALUES",
    "PROGRAM_BYTES",
    "WHOLE_JOB",
    "Difference",
    "Workload",
    "graphs_equal",
    "workloads_equal",
]

ABSENT = -1
"""The class of a rank of the job whose program is not here."""

WHOLE_JOB = "whole_job_parts"
"""Key of the metadata of a sharded program that nobody partitioned: shapes and costs of (some of) its
operations are those of the whole job, which splits them into as many parts.
"""

ESTIMATED_ON = "estimated_on"
"""Key of the metadata of a workload whose durations are estimates: the name of the device they are for."""

GUESSED_VALUES = "guessed_values"
"""Key of the metadata of a captured program that read values from tensors without data: how many. Loops and
branches that depend on them ended by a guess.
"""

PROGRAM_BYTES = "program_bytes"
"""Key of the metadata of a program whose parameters and results are not nodes: their bytes and those of
parameters over which results are written, three numbers with spaces. A fourth number is the peak memory of a
rank, where the program's generator accounts for what no node makes (gathered weights, working space, buffers
of libraries). Rank classes are separated by semicolons.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """Graphs of the rank classes, and of each rank of the job the class (or :data:`ABSENT`), ``(ranks,)``.

    ``metadata`` holds what the source says about the job as text (``format``, ``num_partitions``, ...).
    """

    name: str
    classes: tuple[OpGraph, ...]
    rank_class: SmallIntArray
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Check that every class is one that is here, and that some rank has one."""
        if not self.classes:
            raise InvariantError(f"workload {self.name!r} has no rank class")
        if len(self.rank_class) == 0:
            raise InvariantError(f"workload {self.name!r} has no rank")
        distinct = self.rank_class[:1] if self._is_constant else self.rank_class
        low, high = int(distinct.min()), int(distinct.max())
        if low < ABSENT or high >= len(self.classes):
            raise InvariantError(f"workload {self.name!r}: a rank has no class")
        if high == ABSENT:
            raise InvariantError(f"workload {self.name!r}: no rank of the job is here")

    def __repr__(self) -> str:
        counts = ((self.num_ranks, "rank", "s"), (len(self.classes), "class", "es"))
        told = [f"{count:,} {noun}{'' if count == 1 else plural}" for count, noun, plural in counts]
        return short_repr(self, self.name, *told, f"{sum(map(len, self.classes)):,} ops")

    @classmethod
    def spmd(cls, graph: OpGraph, num_ranks: int, metadata: Mapping[str, str] | None = None) -> Workload:
        """``num_ranks`` ranks that all run ``graph``."""
        ranks = np.broadcast_to(np.int32(0), (num_ranks,))
        return cls(name=graph.name, classes=(graph,), rank_class=ranks, metadata=metadata or {})

    @property
    def _is_constant(self) -> bool:
        """Whether all ranks run one class, by the form of the column."""
        return self.rank_class.strides == (0,)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, here or not."""
        return len(self.rank_class)

    @property
    def present(self) -> IntArray:
        """The ranks that are here, ascending."""
        return np.flatnonzero(self.rank_class != ABSENT).astype(np.int64, copy=False)

    @property
    def num_available(self) -> int:
        """Number of ranks whose rank class is in this workload."""
        return sum(self.class_sizes)

    num_present = RenamedAttribute("num_available")

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the job are here."""
        return self.num_available == self.num_ranks

    @property
    def class_sizes(self) -> tuple[int, ...]:
        """How many ranks run each class."""
        return self.sizes_within(range(self.num_ranks))

    def sizes_within(self, ranks: range) -> tuple[int, ...]:
        """How many of ``ranks``, which follow each other, run each class."""
        chosen = self.rank_class[ranks.start : ranks.stop]
        if self._is_constant:
            shared = int(self.rank_class[0])
            return tuple(len(chosen) if row == shared else 0 for row in range(len(self.classes)))
        counts = np.bincount(chosen[chosen != ABSENT], minlength=len(self.classes))
        return tuple(counts.tolist())

    def graph_of(self, rank: int) -> OpGraph:
        """The graph that a rank runs, which must be here."""
        index = int(self.rank_class[rank])
        if index == ABSENT:
            raise InvariantError(f"workload {self.name!r}: rank {rank} is not here")
        return self.classes[index]

    def by_rank(self, values: IntArray) -> IntArray:
        """Return the value of each rank by its class (``values`` of shape ``(classes + 1,)``, the last for
        :data:`ABSENT`); a view of one where all ranks run one class.
        """
        if self._is_constant:
            return np.broadcast_to(values[int(self.rank_class[0])], (self.num_ranks,))
        return values[self.rank_class]

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each class, -1 where no rank runs it."""
        if self._is_constant:
            return tuple(0 if row == self.rank_class[0] else -1 for row in range(len(self.classes)))
        classes, firsts = np.unique(self.rank_class, return_index=True)
        found: dict[int, int] = dict(zip(classes.tolist(), firsts.tolist(), strict=True))
        return tuple(found.get(row, -1) for row in range(len(self.classes)))

    def ranks_of(self, index: int) -> IntArray:
        """The ranks of one class, ascending."""
        return np.flatnonzero(self.rank_class == index).astype(np.int64, copy=False)

    @property
    def group_sets(self) -> tuple[GroupSet, ...]:
        """The distinct group sets of all classes, in order of first use."""
        return tuple(dict.fromkeys(groups for graph in self.classes for groups in graph.group_sets))

    @property
    def nbytes(self) -> int:
        """Memory the graphs take, in bytes."""
        return sum(graph.nbytes for graph in self.classes)


# --- Whether two graphs say the same, column by column: what a round trip has to keep.
#
# Rows of string, type, group-set and permutation tables are compared by what they stand for, not by number,
# so a reader may intern in another order. NaN equals NaN: unknown stays unknown.

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
