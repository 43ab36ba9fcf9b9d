"""The grammar of ASTRA-sim 1.0 text workloads, by ``initialize_workload`` of its ``Workload.cc``.

Words are separated by any white space. Policy, what the policy needs to know, number of layers; then of each
layer its name, a reserved number, time, collective and size of the forward, input-gradient and
weight-gradient phases, the time of an update, and in customised workloads the layer's own policy. Times are
cycles, sizes bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
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


# --- Parallelism policies of ASTRA-sim 1.0: whom the collectives of each phase concern.
#
# Source: ``decode_involved_dimensions`` of ``astra-sim/workload/Workload.cc`` in release 1.0. There a policy
# switches dimensions of the network on and off; dimension 0 is the innermost, whose ranks are neighbours.


class ParallelismPolicy(Enum):
    """The first word of a file."""

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
"""Policies that state how many ranks share one copy of the model."""


class Role(Enum):
    """The ranks that take part in a collective."""

    NOBODY = auto()
    """The collective is not run, whatever the file says."""
    WORLD = auto()
    INNER = auto()
    """Neighbours: the ranks of dimension 0, or of one copy of the model where the policy states its size."""
    OUTER = auto()
    """Ranks at the same place in each inner group."""


class LayerRoles(NamedTuple):
    """Who takes part in the collectives of a layer."""

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
"""What each policy runs; the layers of a customised workload each name one of these."""


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
"""Up to here floats hold every integer."""
_CERTAIN, _LIKELY, _NO = 95, 30, 0
_HINT = "https://github.com/astra-sim/astra-sim/tree/ASTRA-sim-1.0/inputs/workload describes the format"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a layer; ``kind`` is None where no collective follows."""

    cycles: int
    kind: CollectiveKind | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer. ``policy`` is its own, where it has one; ``line`` is where it stands (from 1)."""

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
    """A parsed file. ``model_ranks`` share one copy of the model (-1: not stated); ``last_bottom_layer`` is
    the one that joins the embedding (-1: not stated). ``checkpoints`` are layers whose input is kept,
    ``initiates`` those before whose backward pass the layers from the checkpoint on run forward again.
    ``rest`` counts words behind the last layer.
    """

    policy: ParallelismPolicy
    layers: tuple[Layer, ...]
    model_ranks: int = -1
    last_bottom_layer: int = -1
    checkpoints: frozenset[int] = frozenset()
    initiates: frozenset[int] = frozenset()
    rest: int = 0


def score(data: bytes) -> int:
    """0 (no) .. 100 (certain), by the first words."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    words = data[:4096].split(maxsplit=200)
    if not words or words[0].decode("ascii", "replace") not in ParallelismPolicy.__members__:
        return _NO
    second = data.partition(b"\n")[2].split(maxsplit=1)
    return _CERTAIN if second and second[0].isdigit() else _LIKELY


class _Words:
    """The words of a text in order, each with its line."""

    def __init__(self, text: str, path: str) -> None:
        self._words = self._split(text)
        self._path = path
        self.line = 1

    @staticmethod
    def _split(text: str) -> Iterator[tuple[int, str]]:
        for line, content in enumerate(text.split("\n"), 1):
            yield from ((line, word) for word in content.split())

    def word(self, what: str) -> str:
        """The next word, which should be ``what``."""
        found = next(self._words, None)
        if found is None:
            self.fail(f"{what} expected, and the file ends")
        self.line = found[0]
        return found[1]

    def number(self, what: str, low: int = 0) -> int:
        """The next word as a whole number."""
        word = self.word(what)
        digits = word.removeprefix("-") if low < 0 else word
        if not (digits.isascii() and digits.isdigit() and len(digits) < 17 and int(digits) <= _LARGEST):
            self.fail(f"{what} expected (a whole number up to 2**53), not {word[:40]!r}")
        return int(word)

    def label(self, expected: str) -> None:
        """The next word, which only says what follows."""
        word = self.word(expected)
        if word != expected:
            self.unsupported(
                f"{word[:40]!r} stands where ASTRA-sim 1.0 has {expected!r}",
                "headers with more settings are those of SimAI, another format",
            )

    def rest(self) -> int:
        """How many words are left."""
        return sum(1 for _ in self._words)

    def fail(self, message: str) -> NoReturn:
        raise FormatError(message, path=self._path, position=f"line {self.line}", hint=_HINT)

    def unsupported(self, message: str, hint: str) -> NoReturn:
        raise UnsupportedError(message, path=self._path, position=f"line {self.line}", hint=hint)


def parse(text: str, path: str) -> TextWorkload:
    """Parse a file. Raises :class:`FormatError` and :class:`UnsupportedError` naming the line."""
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
            words.fail(f"the first line names layer {number}, and the last one is {count - 1}")
    _check_checkpoints(words, checkpoints, initiates)
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
    found = ParallelismPolicy.__members__.get(word)
    if found is None:
        words.fail(f"{what} expected, not {word[:40]!r}; one of: {', '.join(ParallelismPolicy.__members__)}")
    return found


def _layer_numbers(words: _Words) -> frozenset[int]:
    count = words.number("how many layers follow")
    found: set[int] = set()
    for _ in range(count):
        found.add(words.number("the number of a layer"))
    return frozenset(found)


def _check_checkpoints(words: _Words, checkpoints: frozenset[int], initiates: frozenset[int]) -> None:
    """Each layer that starts a second forward pass has a checkpoint of its own before it."""
    start, kept = -1, sorted(checkpoints)
    for number in sorted(initiates):
        place = bisect_left(kept, number)
        if number in checkpoints or not place or kept[place - 1] <= start:
            words.fail(f"layer {number} starts a second forward pass, and no checkpoint before it is its own")
        start = number


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
                f"{own.value} is no policy of a single layer",
                "name one that says all about its groups, such as DATA, MODEL or HYBRID_DATA_MODEL",
            )
    return Layer(name, line, reserved, forward, input_grad, weight_grad, update, own)


def _phase(words: _Words, name: str) -> Phase:
    cycles = words.number(f"the cycles of the {name} phase")
    word = words.word(f"the collective of the {name} phase")
    if word not in _COLLECTIVES:
        if word == _COMBINED:
            words.unsupported(f"no simulator runs {word}", "state ALLREDUCE or ALLTOALL")
        if word.partition("_")[0] in _COLLECTIVES:
            words.unsupported(
                f"{word[:40]!r} is no collective of ASTRA-sim 1.0", "it is one of SimAI's format"
            )
        known = ", ".join(_COLLECTIVES)
        words.fail(f"the collective of the {name} phase expected, not {word[:40]!r}; one of: {known}")
    return Phase(cycles, _COLLECTIVES[word], words.number(f"the bytes of the {name} collective"))


# --- Who takes part in the collectives of a text workload, as far as the file and the number of ranks say.


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """The group set of each role. ``num_ranks`` is stated by the user where ``is_stated``, else the fewest
    that the file allows. ``sets`` lacks roles that depend on the network.
    """

    num_ranks: int
    is_stated: bool
    sets: dict[Role, StridedGroups] = field(default_factory=dict[Role, StridedGroups])

    @classmethod
    def of(cls, text: TextWorkload, num_devices: int | None, path: str) -> ParallelGroups:
        """Groups of a workload over ``num_devices`` ranks (None: not known).

        Where the policy states the size of a copy of the model, its ranks are neighbours. Raises
        :class:`UsageError` where that size does not divide the number of ranks, and for a number of ranks
        past 2**24; :class:`UnsupportedError` where the file states that many.
        """
        sharded = text.policy in TRANSFORMERS
        inner = text.model_ranks if sharded else 1
        count = num_devices or inner
        if num_devices is not None and num_devices > MAX_DEVICES:
            raise UsageError(f"{num_devices:,} devices asked for", hint=f"1 to {MAX_DEVICES:,}")
        if inner > MAX_DEVICES:
            raise UnsupportedError(
                f"a copy of the model on {inner:,} ranks (limit {MAX_DEVICES:,})",
                path=path,
                position="line 1",
                hint="state the model_parallel_NPU_group of one job",
            )
        if count % inner:
            raise UsageError(
                f"{count:,} ranks cannot be split into groups of {inner:,}, which the workload states",
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
        """Whether a collective of this role surely has one member only."""
        found = self.sets.get(role)
        return (found is not None and found.group_size == 1) or (self.is_stated and self.num_ranks == 1)
