"""A whole job: rank classes, and which rank runs which.

SPMD ranks (or all ranks of one pipeline stage) run the same graph and differ in group membership and peers
only, which group sets and permutations give symbolically. 65,536 ranks therefore cost what one costs, plus
one small integer a rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.errors import InvariantError
from hespas.graph.groups import GroupSet
from hespas.graph.opgraph import OpGraph

__all__ = ["Workload"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """Graphs of the rank classes and the class of each rank, shape ``(ranks,)``.

    ``metadata`` holds what the source says about the job as text (``format``, ``num_partitions``, ...).
    """

    name: str
    classes: tuple[OpGraph, ...]
    rank_class: SmallIntArray
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Check that every rank has a class."""
        if not self.classes:
            raise InvariantError(f"workload {self.name!r} has no rank class")
        if len(self.rank_class) == 0:
            raise InvariantError(f"workload {self.name!r} has no rank")
        distinct = self.rank_class[:1] if self.rank_class.strides == (0,) else self.rank_class
        if int(distinct.min()) < 0 or int(distinct.max()) >= len(self.classes):
            raise InvariantError(f"workload {self.name!r}: a rank has no class")

    @classmethod
    def spmd(cls, graph: OpGraph, num_ranks: int, metadata: Mapping[str, str] | None = None) -> Workload:
        """``num_ranks`` ranks that all run ``graph``."""
        ranks = np.broadcast_to(np.int32(0), (num_ranks,))
        return cls(name=graph.name, classes=(graph,), rank_class=ranks, metadata=metadata or {})

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.rank_class)

    def graph_of(self, rank: int) -> OpGraph:
        """The graph that a rank runs."""
        return self.classes[int(self.rank_class[rank])]

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
