"""Workload: the graphs of a job's rank classes, the class of each rank, and facts in its metadata.

SPMD ranks (or all ranks of one pipeline stage) run the same graph. They differ only in group membership and
peers, which group sets and permutations describe symbolically. 65,536 ranks therefore cost as much as one,
plus one small integer per rank.

A workload has the size of its job even if only some of the ranks were read (one trace of a set): the others
are :data:`ABSENT`. Groups and peers refer to ranks of the job, so their meaning does not depend on the
available ranks. Facts of a step travel as one text in the metadata, because simulators need them after a
round trip through a file.
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
    "RECORDED_STEPS",
    "STEP_FACTS",
    "WHOLE_JOB",
    "Launch",
    "StepFacts",
    "StepKind",
    "StepPhase",
    "Workload",
    "of_own_ranks",
    "step_facts",
]


ABSENT = -1
"""Class of a rank of the job without a graph in the workload."""

RECORDED_STEPS = "measured/steps.json"
"""Name of the document in the attachments of a graph that describes the recorded steps."""

WHOLE_JOB = "whole_job_parts"
"""Metadata key of a sharded program that was not partitioned; the value is the number of parts.

Shapes and costs of some or all of its operations describe the whole job, not one part.
"""

ESTIMATED_ON = "estimated_on"
"""Metadata key of a workload with estimated durations: the name of the estimated device."""

GUESSED_VALUES = "guessed_values"
"""Metadata key of a captured program that read values from tensors without data: the number of such values.
Trip counts and branches that depend on them are guesses.
"""

PROGRAM_BYTES = "program_bytes"
"""Metadata key of a program whose parameters and results are not nodes: bytes of parameters, of results, and
of parameters that results overwrite, separated by spaces. An optional fourth number is the peak memory of a
rank, if the generator accounts for memory that no node allocates (gathered weights, workspace). A fifth
number is the memory that the device must have, with the context of the GPU and buffers of libraries. Rank
classes are separated by semicolons.
"""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """Job: the graphs of its rank classes, and ``rank_class``, the class of each rank (or :data:`ABSENT`),
    shape ``(ranks,)``.

    ``metadata`` has facts about the job from its source, as text (``format``, ``num_partitions``, ...).
    """

    name: str
    classes: tuple[OpGraph, ...]
    rank_class: SmallIntArray
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        """Check that every class exists, and that at least one rank has one."""
        if not self.classes:
            raise InvariantError(f"workload {self.name!r} has no rank class")
        if len(self.rank_class) == 0:
            raise InvariantError(f"workload {self.name!r} has no rank")
        distinct = self.rank_class[:1] if self._is_constant else self.rank_class
        low, high = int(distinct.min()), int(distinct.max())
        if low < ABSENT or high >= len(self.classes):
            raise InvariantError(f"workload {self.name!r}: a rank has no class")
        if high == ABSENT:
            raise InvariantError(f"workload {self.name!r}: no rank of the job has a graph")

    def __repr__(self) -> str:
        counts = ((self.num_ranks, "rank", "s"), (len(self.classes), "class", "es"))
        parts = [f"{count:,} {noun}{'' if count == 1 else plural}" for count, noun, plural in counts]
        return short_repr(self, self.name, *parts, f"{sum(map(len, self.classes)):,} ops")

    @classmethod
    def spmd(cls, graph: OpGraph, num_ranks: int, metadata: Mapping[str, str] | None = None) -> Workload:
        """Return a workload of ``num_ranks`` ranks that all run ``graph``."""
        ranks = np.broadcast_to(np.int32(0), (num_ranks,))
        return cls(name=graph.name, classes=(graph,), rank_class=ranks, metadata=metadata or {})

    @property
    def _is_constant(self) -> bool:
        """Return True if the column of rank classes has stride 0: all ranks run one class."""
        return self.rank_class.strides == (0,)

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job, available or not."""
        return len(self.rank_class)

    @property
    def present(self) -> IntArray:
        """The available ranks, ascending."""
        return np.flatnonzero(self.rank_class != ABSENT).astype(np.int64, copy=False)

    @property
    def num_available(self) -> int:
        """Number of ranks whose rank class is in this workload."""
        return sum(self.class_sizes)

    num_present = RenamedAttribute("num_available")

    @property
    def is_complete(self) -> bool:
        """True if all ranks of the job are available."""
        return self.num_available == self.num_ranks

    @property
    def class_sizes(self) -> tuple[int, ...]:
        """Return the number of ranks of each class."""
        return self.sizes_within(range(self.num_ranks))

    def sizes_within(self, ranks: range) -> tuple[int, ...]:
        """Return, for each class, how many of its ranks are in ``ranks``."""
        chosen = self.rank_class[ranks.start : ranks.stop]
        if self._is_constant:
            shared = int(self.rank_class[0])
            return tuple(len(chosen) if row == shared else 0 for row in range(len(self.classes)))
        counts = np.bincount(chosen[chosen != ABSENT], minlength=len(self.classes))
        return tuple(counts.tolist())

    def graph_of(self, rank: int) -> OpGraph:
        """Return the graph of an available rank."""
        index = int(self.rank_class[rank])
        if index == ABSENT:
            raise InvariantError(f"workload {self.name!r}: rank {rank} has no graph")
        return self.classes[index]

    def by_rank(self, values: IntArray) -> IntArray:
        """Return for each rank the entry of ``values`` of its rank class.

        ``values`` has shape ``(classes + 1,)``; its last entry is for :data:`ABSENT` ranks. If all ranks run
        one class, the result is a view of one value.
        """
        if self._is_constant:
            return np.broadcast_to(values[int(self.rank_class[0])], (self.num_ranks,))
        return values[self.rank_class]

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each class, -1 for a class without ranks."""
        if self._is_constant:
            return tuple(0 if row == self.rank_class[0] else -1 for row in range(len(self.classes)))
        firsts = np.full(len(self.classes) + 1, -1, np.int64)  # the last is for ABSENT
        # The last assignment to an index holds, so that a descending order leaves the first rank.
        firsts[self.rank_class[::-1]] = np.arange(self.num_ranks - 1, -1, -1)
        return tuple(firsts[:-1].tolist())

    def ranks_of(self, index: int) -> IntArray:
        """Return the ranks of one class, ascending."""
        return np.flatnonzero(self.rank_class == index).astype(np.int64, copy=False)

    @property
    def group_sets(self) -> tuple[GroupSet, ...]:
        """Distinct group sets of all classes, in order of first use."""
        return tuple(dict.fromkeys(groups for graph in self.classes for groups in graph.group_sets))

    @property
    def program_bytes(self) -> tuple[str, ...]:
        """Text of each rank class in the metadata entry :data:`PROGRAM_BYTES`; empty texts if it does not
        list every class.
        """
        texts = self.metadata.get(PROGRAM_BYTES, "").split(";")
        return tuple(texts) if len(texts) == len(self.classes) else ("",) * len(self.classes)

    @property
    def nbytes(self) -> int:
        """Memory of the graphs in bytes."""
        return sum(graph.nbytes for graph in self.classes)


_PLAIN = "+:/,"
"""Characters that values contain unencoded, in addition to letters, digits and ``-._~``."""

STEP_FACTS = "step_facts"
"""Metadata key of the text of :class:`StepFacts`."""

StepKind = Literal["training", "serving", "eager", "vision", "recommendation"]
"""Kinds of generated steps: training and serving of language models, models that PyTorch runs one operator at
a time, vision models, and training of recommendation models.
"""

StepPhase = Literal["training", "inference", "prefill", "decode", "mixed", "speculative", "disaggregated"]
"""Phases of steps: training; a forward pass without a cache of keys; prompts, new tokens, both in one batch,
new tokens with drafts, and both on separate ranks of a server of language models.
"""

Launch = Literal["kernels", "partial-graphs", "whole"]
"""Ways to launch work: one kernel at a time, partly as CUDA graphs, or the step as a whole (one CUDA graph,
or one XLA program).
"""

LAUNCHES: tuple[Launch, ...] = get_args(Launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """Facts of a step that its graph does not state; NaN and empty texts are unknown.

    ``model_flops`` is the total of all ranks, as publications count it. ``tokens`` is the number of tokens
    that the step processes on ``ranks`` ranks (0: unknown). ``dtype`` is the element type of the matmuls in
    linear layers. ``reads_counts`` is True if the host reads the number of tokens per expert before it
    launches the matmuls of experts. ``separate_experts`` is the number of experts of a rank whose matmuls and
    conversions are launched one expert at a time (0: as one kernel). ``library`` names the fused attention.
    ``compiled`` is False if elementwise work is not fused. ``power_w`` (power limit) and ``bandwidth``
    (relative to the device file) describe a board that differs from the file of ``device``, and apply to that
    board only, as does ``capacity_bytes`` (its memory). ``framework`` is the framework whose kernels the step
    has.
    """

    kind: StepKind
    model_flops: float = nan
    tokens: float = nan
    ranks: int = 0
    dtype: str = ""
    launch: Launch = "whole"
    reads_counts: bool = False
    separate_experts: int = 0
    library: str = ""
    compiled: bool = True
    device: str = ""
    power_w: float = 0.0
    bandwidth: float = 1.0
    capacity_bytes: float = nan
    framework: str = ""
    phase: StepPhase | Literal[""] = ""

    def text(self) -> str:
        """Return the known facts as ``name=value`` pairs; values are percent-encoded, so they contain no
        spaces.
        """
        values = {entry.name: quote(str(getattr(self, entry.name)), safe=_PLAIN) for entry in fields(self)}
        return " ".join(f"{name}={value}" for name, value in values.items() if value not in {"", "nan"})

    def metadata(self) -> dict[str, str]:
        """Return the metadata entry of a workload with these facts."""
        return {STEP_FACTS: self.text()}


def step_facts(metadata: Mapping[str, str]) -> StepFacts | None:
    """Return the facts in the metadata of a workload, None without them. Unreadable values are unknown."""
    pairs = (part.partition("=") for part in metadata.get(STEP_FACTS, "").split())
    texts = {name: unquote(value) for name, _, value in pairs}
    kind = next((name for name in get_args(StepKind) if name == texts.get("kind")), None)
    if kind is None:
        return None
    launches: dict[str, Launch] = {launch: launch for launch in LAUNCHES}
    return StepFacts(
        kind=kind,
        model_flops=_number(texts.get("model_flops", ""), nan),
        tokens=_number(texts.get("tokens", ""), nan),
        ranks=int(_number(texts.get("ranks", ""), 0.0)),
        dtype=texts.get("dtype", ""),
        launch=launches.get(texts.get("launch", ""), "whole"),
        reads_counts=texts.get("reads_counts") == "True",
        separate_experts=int(_number(texts.get("separate_experts", ""), 0.0)),
        library=texts.get("library", ""),
        compiled=texts.get("compiled", "True") == "True",
        device=texts.get("device", ""),
        power_w=_number(texts.get("power_w", ""), 0.0),
        bandwidth=_number(texts.get("bandwidth", ""), 1.0),
        capacity_bytes=_number(texts.get("capacity_bytes", ""), nan),
        framework=texts.get("framework", ""),
        phase=next((phase for phase in get_args(StepPhase) if phase == texts.get("phase")), ""),
    )


def _number(text: str, otherwise: float) -> float:
    """Return the number that a text states, if it is above 0, else ``otherwise``."""
    try:
        value = float(text)
    except ValueError:
        return otherwise
    return value if isfinite(value) and value > 0 else otherwise


_SENDS, _RECEIVES, _BOTH = range(3)


def of_own_ranks(workload: Workload, number: int, graph: OpGraph) -> OpGraph:
    """Return ``graph``, the program of rank class ``number``, with only the groups and peers of the ranks of
    this class.

    The time of a message or a collective depends only on the links between the participating ranks, but group
    sets and permutations include all ranks of the job. O(ranks x sets).
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
    used, key_of_row = np.unique(key, return_inverse=True)
    has_peers = used >= 0
    codes: list[int] = used[has_peers].tolist()
    permutations = tuple(_pairs_with(graph.permutations[code // 3], ranks, code % 3) for code in codes)
    row = np.where(has_peers, np.cumsum(has_peers) - 1, -1)[key_of_row].astype(table.permutation.dtype)
    return replace(
        graph,
        group_sets=tuple(_groups_with(groups, ranks) for groups in graph.group_sets),
        permutations=permutations,
        p2p=replace(table, permutation=row),
    )


def _groups_with(groups: GroupSet, ranks: IntArray) -> GroupSet:
    """Return the groups that contain one of ``ranks``; all groups if none does."""
    own = np.unique(groups.groups_of(ranks))
    own = own[own >= 0]
    if not len(own) or len(own) == groups.num_groups:
        return groups
    rows = [groups.members(group).tolist() for group in own.tolist()]
    if len({len(row) for row in rows}) > 1:
        return ExplicitGroups(tuple(map(tuple, rows)), groups.communicator)
    return replace(compress_groups(np.array(rows, np.int64)), communicator=groups.communicator)


def _pairs_with(permutation: Permutation, ranks: IntArray, side: int) -> Permutation:
    """Return the pairs of a permutation in which one of ``ranks`` is the sender, the receiver, or either.

    ``side`` selects the role: ``_SENDS``, ``_RECEIVES`` or ``_BOTH``.
    """
    pairs: set[tuple[int, int]] = set()
    if side != _RECEIVES:
        pairs.update(zip(ranks.tolist(), permutation.targets_of(ranks).tolist(), strict=True))
    if side != _SENDS:
        pairs.update(zip(permutation.sources_of(ranks).tolist(), ranks.tolist(), strict=True))
    own = tuple(sorted(pair for pair in pairs if min(pair) >= 0))
    return replace(permutation, digit=(1, 1), shift=0, wraps=True, pairs=own)
