"""A whole job: rank classes, and which rank runs which.

SPMD ranks (or all ranks of one pipeline stage) run the same graph and differ in group membership and peers
only, which group sets and permutations give symbolically. 65,536 ranks therefore cost what one costs, plus
one small integer a rank.

A workload has the size of its job also where only some of the ranks were read (one trace of a set): the
others are :data:`ABSENT`. Groups and peers name ranks of the job, so they mean the same whoever is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isfinite, nan
from typing import Literal, get_args
from urllib.parse import quote, unquote

import numpy as np

from hespas.graph.columns import IntArray, SmallIntArray
from hespas.graph.deprecation import RenamedAttribute
from hespas.graph.errors import InvariantError, short_repr
from hespas.graph.groups import ExplicitGroups, GroupSet, Permutation, compress_groups
from hespas.graph.opgraph import (
    NodeKind,
    OpGraph,
)

__all__ = [
    "ABSENT",
    "ESTIMATED_ON",
    "GUESSED_VALUES",
    "LAUNCHES",
    "PROGRAM_BYTES",
    "STEP_FACTS",
    "WHOLE_JOB",
    "Launch",
    "StepFacts",
    "StepKind",
    "Workload",
    "of_own_ranks",
    "step_facts",
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


_PLAIN = "+:/,"
"""Characters that values keep beside letters, digits and ``-._~``."""

STEP_FACTS = "step_facts"
"""Key of the metadata of a workload that holds the text of :class:`StepFacts`."""

StepKind = Literal["training", "serving", "eager", "vision", "recommendation"]
"""Kinds of generated steps: of language models in training and in serving, of models that PyTorch runs one
operator at a time, of vision models and of recommendation models in training.
"""

Launch = Literal["kernels", "partial-graphs", "whole"]
"""Ways to launch work: one kernel at a time, part of them as CUDA graphs, or the step as a whole (one
CUDA graph, or one program of XLA).
"""

LAUNCHES: tuple[Launch, ...] = get_args(Launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts of a step; NaN and empty texts are unknown.

    ``model_flops`` are those of all ranks, as publishers count them; ``tokens`` is how many the step
    processes, on ``ranks`` ranks (0: unknown). ``dtype`` is the element type of the products of linear
    layers. ``reads_counts``: the host reads how many tokens reach each expert before it launches the products
    of experts. ``library`` names the fused attention, ``compiled`` is False where nothing fuses elementwise
    work. ``power_w`` and ``bandwidth`` (over that of the device file) are those of a board that differs from
    ``device``, and hold for it only.
    """

    kind: StepKind
    model_flops: float = nan
    tokens: float = nan
    ranks: int = 0
    dtype: str = ""
    launch: Launch = "whole"
    reads_counts: bool = False
    library: str = ""
    compiled: bool = True
    device: str = ""
    power_w: float = 0.0
    bandwidth: float = 1.0

    def text(self) -> str:
        """Return the facts as ``name=value`` pairs, without those that are unknown; values are
        percent-encoded, so that they hold no spaces.
        """
        stated = {each.name: quote(str(getattr(self, each.name)), safe=_PLAIN) for each in fields(self)}
        return " ".join(f"{name}={value}" for name, value in stated.items() if value not in {"", "nan"})

    def metadata(self) -> dict[str, str]:
        """Return the entry for the metadata of a workload."""
        return {STEP_FACTS: self.text()}


def step_facts(metadata: Mapping[str, str]) -> StepFacts | None:
    """Return the facts that the metadata of a workload states; None without them.

    Values that are not readable count as unknown.
    """
    pairs = (part.partition("=") for part in metadata.get(STEP_FACTS, "").split())
    stated = {name: unquote(value) for name, _, value in pairs}
    kind = next((each for each in get_args(StepKind) if each == stated.get("kind")), None)
    if kind is None:
        return None
    launches: dict[str, Launch] = {launch: launch for launch in LAUNCHES}
    return StepFacts(
        kind=kind,
        model_flops=_number(stated.get("model_flops", ""), nan),
        tokens=_number(stated.get("tokens", ""), nan),
        ranks=int(_number(stated.get("ranks", ""), 0.0)),
        dtype=stated.get("dtype", ""),
        launch=launches.get(stated.get("launch", ""), "whole"),
        reads_counts=stated.get("reads_counts") == "True",
        library=stated.get("library", ""),
        compiled=stated.get("compiled", "True") == "True",
        device=stated.get("device", ""),
        power_w=_number(stated.get("power_w", ""), 0.0),
        bandwidth=_number(stated.get("bandwidth", ""), 1.0),
    )


def _number(text: str, otherwise: float) -> float:
    """Return a number above 0, else ``otherwise``."""
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return value if isfinite(value) and value > 0 else otherwise


_SENDS, _RECEIVES, _BOTH = range(3)


def of_own_ranks(workload: Workload, number: int, graph: OpGraph) -> OpGraph:
    """Return ``graph``, the program of rank class ``number``, with the groups and peers of its ranks only.

    Group sets and permutations span the whole job. The time of a message or a collective depends on the links
    between the ranks that take part in it, not on those of other rank classes. O(ranks x sets).
    """
    if len(workload.classes) == 1:
        return graph
    ranks = workload.ranks_of(number)
    table = graph.p2p
    kind = graph.kind[table.node]
    side = np.full(len(table), _BOTH, np.int64)
    side[kind == int(NodeKind.SEND)] = _SENDS
    side[kind == int(NodeKind.RECV)] = _RECEIVES
    key = np.where(table.permutation >= 0, table.permutation.astype(np.int64) * 3 + side, -1)
    used, place = np.unique(key, return_inverse=True)
    stated = used >= 0
    codes: list[int] = used[stated].tolist()
    permutations = tuple(_own_pairs(graph.permutations[code // 3], ranks, code % 3) for code in codes)
    row = np.where(stated, np.cumsum(stated) - 1, -1)[place].astype(table.permutation.dtype)
    return replace(
        graph,
        group_sets=tuple(_own_groups(groups, ranks) for groups in graph.group_sets),
        permutations=permutations,
        p2p=replace(table, permutation=row),
    )


def _own_groups(groups: GroupSet, ranks: IntArray) -> GroupSet:
    """Return the groups that hold one of ``ranks``; all groups where none does."""
    own = np.unique(groups.groups_of(ranks))
    own = own[own >= 0]
    if not len(own) or len(own) == groups.num_groups:
        return groups
    rows = [groups.members(group).tolist() for group in own.tolist()]
    if len({len(row) for row in rows}) > 1:
        return ExplicitGroups(tuple(map(tuple, rows)), groups.communicator)
    return replace(compress_groups(np.array(rows, np.int64)), communicator=groups.communicator)


def _own_pairs(permutation: Permutation, ranks: IntArray, side: int) -> Permutation:
    """Return the pairs in which one of ``ranks`` sends, receives or does either."""
    pairs: set[tuple[int, int]] = set()
    if side != _RECEIVES:
        pairs.update(zip(ranks.tolist(), permutation.targets_of(ranks).tolist(), strict=True))
    if side != _SENDS:
        pairs.update(zip(permutation.sources_of(ranks).tolist(), ranks.tolist(), strict=True))
    own = tuple(sorted(pair for pair in pairs if min(pair) >= 0))
    return replace(permutation, digit=(1, 1), shift=0, wraps=True, pairs=own)
