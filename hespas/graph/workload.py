"""A whole job: rank classes, and which rank runs which.

SPMD ranks (or all ranks of one pipeline stage) run the same graph and differ in group membership and peers
only, which group sets and permutations give symbolically. 65,536 ranks therefore cost what one costs, plus
one small integer a rank.

A workload has the size of its job also where only some of the ranks were read (one trace of a set): the
others are :data:`ABSENT`. Groups and peers name ranks of the job, so they mean the same whoever is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.errors import InvariantError, short_repr
from hespas.graph.groups import GroupSet
from hespas.graph.opgraph import OpGraph

__all__ = ["ABSENT", "WHOLE_JOB", "Workload"]

ABSENT = -1
"""The class of a rank of the job whose program is not here."""

WHOLE_JOB = "whole_job_parts"
"""Key of the metadata of a sharded program that nobody partitioned: shapes and costs of (some of) its
operations are those of the whole job, which splits them into as many parts.
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
        """Whether all ranks run one class, told without a look at them."""
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
    def num_present(self) -> int:
        """Number of ranks that are here."""
        return sum(self.class_sizes)

    @property
    def is_complete(self) -> bool:
        """Whether all ranks of the job are here."""
        return self.num_present == self.num_ranks

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
