"""Grammar and parallelism policies of ASTRA-sim 1.0 text workloads.

The grammar follows ``initialize_workload`` of ``Workload.cc``. Words are separated by white space. A file has
the policy, the settings of the policy and the number of layers. Each layer has its name, a reserved number,
the time, collective and size of the forward, input-gradient and weight-gradient phases, the time of an
update, and in customised workloads a policy of its own. Times are cycles, sizes bytes.

A policy selects the dimensions of the network over which the collectives of each phase run
(``decode_involved_dimensions`` of ``astra-sim/workload/Workload.cc`` in release 1.0). Dimension 0 is the
innermost; its ranks are neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import CollectiveKind, StridedGroups
from hespas.graph.errors import FormatError, UnsupportedError, UsageError

__all__ = [
    "ROLES",
    "TRANSFORMERS",
    "Layer",
    "LayerRoles",
    "ParallelGroups",
    "ParallelismPolicy",
    "Phase",
    "Role",
    "TextWorkload",
    "parse",
    "score",
]


class ParallelismPolicy(Enum):
    """Parallelism policy of a text workload of ASTRA-sim, the first word of the file."""

    DATA = "DATA"
    MODEL = "MODEL"
    HYBRID_DATA_MODEL = "HYBRID_DATA_MODEL"
    HYBRID_MODEL_DATA = "HYBRID_MODEL_DATA"
    HYBRID_DLRM = "HYBRID_DLRM"
    HYBRID_DLRM_ENHANCED = "HYBRID_DLRM_ENHANCED"
    HYBRID_TRANSFORMER = "HYBRID_TRANSFORMER"
    HYBRID_TRANSFORMER_FWD_IN_BCKWD = "HYBRID_TRANSFORMER_FWD_IN_BCKWD"
    HYBRID_CUSTOMIZED = "HYBRID_CUSTOMIZED"
    DISTRIBUTED_INFERENCE = "DISTRIBUTED_INFERENCE"
    MICRO = "MICRO"


TRANSFORMERS = frozenset(
    {ParallelismPolicy.HYBRID_TRANSFORMER, ParallelismPolicy.HYBRID_TRANSFORMER_FWD_IN_BCKWD}
)
"""Policies whose files state the number of ranks per copy of the model."""


class Role(Enum):
    """Set of ranks that take part in a collective of an ASTRA-sim workload."""

    NOBODY = auto()
    """The collective is not run, even if the file has one."""
    WORLD = auto()
    INNER = auto()
    """Neighbours: the ranks of dimension 0, or of one copy of the model if the policy has its size."""
    OUTER = auto()
    """Ranks with the same index in each inner group."""


class LayerRoles(NamedTuple):
    """Sets of ranks (roles) that take part in the collectives of a layer: of its forward pass, of its input
    gradient and of its weight gradient.
    """

    forward: Role
    input_grad: Role
    weight_grad: Role


_DATA_PARALLEL = LayerRoles(Role.NOBODY, Role.NOBODY, Role.WORLD)
_MODEL_PARALLEL = LayerRoles(Role.WORLD, Role.WORLD, Role.NOBODY)
_MODEL_INSIDE = LayerRoles(Role.INNER, Role.INNER, Role.OUTER)

ROLES: MappingProxyType[ParallelismPolicy, LayerRoles] = MappingProxyType(
    {
        ParallelismPolicy.DATA: _DATA_PARALLEL,
        ParallelismPolicy.HYBRID_DLRM: _DATA_PARALLEL,
        ParallelismPolicy.HYBRID_DLRM_ENHANCED: _DATA_PARALLEL,
        ParallelismPolicy.MICRO: _DATA_PARALLEL,
        ParallelismPolicy.MODEL: _MODEL_PARALLEL,
        ParallelismPolicy.DISTRIBUTED_INFERENCE: _MODEL_PARALLEL,
        ParallelismPolicy.HYBRID_DATA_MODEL: _MODEL_INSIDE,
        ParallelismPolicy.HYBRID_MODEL_DATA: LayerRoles(Role.OUTER, Role.OUTER, Role.INNER),
        ParallelismPolicy.HYBRID_TRANSFORMER: _MODEL_INSIDE,
        ParallelismPolicy.HYBRID_TRANSFORMER_FWD_IN_BCKWD: _MODEL_INSIDE,
    }
)
"""Roles by policy; each layer of a customised workload names one of these policies."""


_COLLECTIVES: dict[str, CollectiveKind | None] = {
    "NONE": None,
    "ALLREDUCE": CollectiveKind.ALL_REDUCE,
    "ALLGATHER": CollectiveKind.ALL_GATHER,
    "ALLTOALL": CollectiveKind.ALL_TO_ALL,
    "REDUCESCATTER": CollectiveKind.REDUCE_SCATTER,
}
_COMBINED = "ALLREDUCEALLTOALL"
_MODEL_GROUP, _CHECKPOINTS, _INITIATES = "model_parallel_NPU_group:", "checkpoints:", "checkpoint_initiates:"
_LARGEST = 1 << 53
"""Largest integer up to which floats are exact."""
_CERTAIN, _LIKELY, _NO = 95, 30, 0
_HINT = "https://github.com/astra-sim/astra-sim/tree/ASTRA-sim-1.0/inputs/workload describes the format"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a layer: a computation of ``cycles``, followed by a collective. ``kind`` is the kind of
    the collective (None: the phase has none), and ``size_bytes`` its size.
    """

    cycles: int
    kind: CollectiveKind | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """Layer of a text workload, with its three phases. ``policy`` is a policy that only applies to this layer
    (None: the policy of the file). ``line`` is its line number in the file (from 1).
    """

    name: str
    line: int
    reserved: int
    forward: Phase
    input_grad: Phase
    weight_grad: Phase
    update_cycles: int
    policy: ParallelismPolicy | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkload:
    """Parsed text workload of ASTRA-sim.

    ``model_ranks`` ranks share one copy of the model (-1: not stated). ``last_bottom_layer`` is the number of
    the layer that joins the embedding (-1: not stated). ``checkpoints`` has the numbers of layers whose input
    is saved. ``initiates`` has the numbers of layers before whose backward pass the layers from the last
    checkpoint on run forward again. ``rest`` counts words after the last layer.
    """

    policy: ParallelismPolicy
    layers: tuple[Layer, ...]
    model_ranks: int = -1
    last_bottom_layer: int = -1
    checkpoints: frozenset[int] = frozenset()
    initiates: frozenset[int] = frozenset()
    rest: int = 0


def score(data: bytes) -> int:
    """Return the confidence, from 0 (no) to 100 (certain), that the first words of a file are those of a text
    workload.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    words = data[:4096].split(maxsplit=200)
    if not words or words[0].decode("ascii", "replace") not in ParallelismPolicy.__members__:
        return _NO
    second = data.partition(b"\n")[2].split(maxsplit=1)
    return _CERTAIN if second and second[0].isdigit() else _LIKELY


class _Words:
    """Iterator over the words of a text workload. It keeps the current line for error messages."""

    def __init__(self, text: str, path: str) -> None:
        lines = enumerate(text.split("\n"), 1)
        self._words = ((line, word) for line, content in lines for word in content.split())
        self._path = path
        self.line = 1

    def word(self, what: str) -> str:
        """Read the next word; ``what`` describes it in the error at the end of the file."""
        entry = next(self._words, None)
        if entry is None:
            self.fail(f"{what} expected, but the file ends")
        self.line = entry[0]
        return entry[1]

    def number(self, what: str, low: int = 0) -> int:
        """Read the next word as a whole number."""
        word = self.word(what)
        digits = word.removeprefix("-") if low < 0 else word
        if not (digits.isascii() and digits.isdigit() and len(digits) < 17 and int(digits) <= _LARGEST):
            self.fail(f"{what} expected (a whole number up to 2**53), not {word[:40]!r}")
        return int(word)

    def label(self, expected: str) -> None:
        """Read the next word, which must be the label ``expected``."""
        word = self.word(expected)
        if word != expected:
            self.unsupported(
                f"{word[:40]!r} instead of {expected!r} of ASTRA-sim 1.0",
                "a header with more settings belongs to SimAI, another format",
            )

    def rest(self) -> int:
        """Count the remaining words."""
        return sum(1 for _ in self._words)

    def fail(self, message: str) -> NoReturn:
        raise FormatError(message, path=self._path, position=f"line {self.line}", hint=_HINT)

    def unsupported(self, message: str, hint: str) -> NoReturn:
        raise UnsupportedError(message, path=self._path, position=f"line {self.line}", hint=hint)


def parse(text: str, path: str) -> TextWorkload:
    """Parse a text workload of ASTRA-sim 1.0. Raises :class:`FormatError` and :class:`UnsupportedError` with
    the line.
    """
    words = _Words(text, path)
    policy = _policy(words, "a parallelism policy")
    model_ranks, last_bottom = -1, -1
    checkpoints: frozenset[int] = frozenset()
    initiates: frozenset[int] = frozenset()
    if policy in TRANSFORMERS:
        words.label(_MODEL_GROUP)
        model_ranks = words.number("the number of ranks of one copy of the model")
        if model_ranks < 1:
            words.fail("a copy of the model needs at least one rank")
    if policy is ParallelismPolicy.HYBRID_TRANSFORMER_FWD_IN_BCKWD:
        words.label(_CHECKPOINTS)
        checkpoints = _layer_numbers(words)
        words.label(_INITIATES)
        initiates = _layer_numbers(words)
    if policy in {ParallelismPolicy.HYBRID_DLRM, ParallelismPolicy.HYBRID_DLRM_ENHANCED}:
        last_bottom = words.number("the number of the last bottom layer")
    count = words.number("the number of layers")
    if not count:
        words.fail("a workload has at least one layer")
    for number in (last_bottom, *checkpoints, *initiates):
        if number >= count:
            words.fail(f"the first line names layer {number}, but the last layer is {count - 1}")
    # Check that each layer that starts a second forward pass has a checkpoint of its own before it.
    start, saved = -1, sorted(checkpoints)
    for number in sorted(initiates):
        index = bisect_left(saved, number)
        if number in checkpoints or not index or saved[index - 1] <= start:
            words.fail(
                f"layer {number} starts a second forward pass without a checkpoint of its own before it"
            )
        start = number
    layers = [_layer(words, policy) for _ in range(count)]
    return TextWorkload(
        policy=policy,
        layers=tuple(layers),
        model_ranks=model_ranks,
        last_bottom_layer=last_bottom,
        checkpoints=checkpoints,
        initiates=initiates,
        rest=words.rest(),
    )


def _policy(words: _Words, what: str) -> ParallelismPolicy:
    word = words.word(what)
    policy = ParallelismPolicy.__members__.get(word)
    if policy is None:
        words.fail(f"{what} expected, not {word[:40]!r}; one of: {', '.join(ParallelismPolicy.__members__)}")
    return policy


def _layer_numbers(words: _Words) -> frozenset[int]:
    count = words.number("the number of layers that follow")
    return frozenset([words.number("the number of a layer") for _ in range(count)])


def _layer(words: _Words, policy: ParallelismPolicy) -> Layer:
    name = words.word("the name of a layer")
    line = words.line
    reserved = words.number("the reserved number", low=-1)
    forward = _phase(words, "forward")
    input_grad = _phase(words, "input-gradient")
    weight_grad = _phase(words, "weight-gradient")
    update = words.number("the cycles of an update")
    own: ParallelismPolicy | None = None
    if policy is ParallelismPolicy.HYBRID_CUSTOMIZED:
        own = _policy(words, "the policy of the layer")
        if own not in ROLES or own in TRANSFORMERS:
            words.unsupported(
                f"{own.value} is not a policy of a single layer",
                "use a policy that defines the groups by itself, such as DATA, MODEL or HYBRID_DATA_MODEL",
            )
    return Layer(name, line, reserved, forward, input_grad, weight_grad, update, own)


def _phase(words: _Words, name: str) -> Phase:
    cycles = words.number(f"the cycles of the {name} phase")
    word = words.word(f"the collective of the {name} phase")
    if word not in _COLLECTIVES:
        if word == _COMBINED:
            words.unsupported(f"{word} is not supported by any simulator", "use ALLREDUCE or ALLTOALL")
        if word.partition("_")[0] in _COLLECTIVES:
            words.unsupported(
                f"{word[:40]!r} is not a collective of ASTRA-sim 1.0", "it belongs to SimAI's format"
            )
        listed = ", ".join(_COLLECTIVES)
        words.fail(f"the collective of the {name} phase expected, not {word[:40]!r}; one of: {listed}")
    return Phase(cycles, _COLLECTIVES[word], words.number(f"the bytes of the {name} collective"))


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """Group set of each role (the parallelism that a collective serves). ``num_ranks`` comes from the user if
    ``is_stated``. Otherwise it is the smallest number of ranks that the file allows. ``sets`` lacks roles
    whose groups depend on the network.
    """

    num_ranks: int
    is_stated: bool
    sets: dict[Role, StridedGroups] = field(default_factory=dict[Role, StridedGroups])

    @classmethod
    def of(cls, text: TextWorkload, num_devices: int | None, path: str) -> ParallelGroups:
        """Build the groups of a workload over ``num_devices`` ranks (None: unknown).

        If the policy states the number of ranks that share a copy of the model, these ranks have consecutive
        numbers. Raises :class:`UsageError` if that number does not divide the number of ranks, or if
        ``num_devices`` is above 2**24. Raises :class:`UnsupportedError` if more than 2**24 ranks share a
        copy.
        """
        sharded = text.policy in TRANSFORMERS
        inner = text.model_ranks if sharded else 1
        count = num_devices or inner
        if num_devices is not None and num_devices > MAX_DEVICES:
            raise UsageError(f"{num_devices:,} devices requested", hint=f"use 1 to {MAX_DEVICES:,}")
        if inner > MAX_DEVICES:
            raise UnsupportedError(
                f"a copy of the model on {inner:,} ranks (limit {MAX_DEVICES:,})",
                path=path,
                position="line 1",
                hint="state the model_parallel_NPU_group of one job",
            )
        if count % inner:
            raise UsageError(
                f"{count:,} ranks cannot be split into the workload's groups of {inner:,}",
                path=path,
                hint=f"make `num_devices` a multiple of {inner:,}",
            )
        groups = cls(count, num_devices is not None)
        if num_devices is not None:
            groups.sets[Role.WORLD] = StridedGroups.all_ranks(count)
        if sharded:
            groups.sets[Role.INNER] = StridedGroups(((count // inner, inner),), ((inner, 1),))
        if sharded and num_devices is not None:
            groups.sets[Role.OUTER] = StridedGroups(((inner, 1),), ((count // inner, inner),))
        return groups

    def is_alone(self, role: Role) -> bool:
        """Return True if each group of this role is known to have one rank."""
        groups = self.sets.get(role)
        return (groups is not None and groups.group_size == 1) or (self.is_stated and self.num_ranks == 1)
