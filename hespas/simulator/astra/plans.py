"""How ASTRA-sim runs a collective: chunks, each of them a stream of phases, one phase per network dimension.

A rank is a mixed-radix number over the dimensions, dimension 0 fastest; its line in a dimension are the ranks
that differ in that coordinate only. A group smaller than the world is one ring of its own, in file order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from hespas.graph import CollectiveKind
from hespas.graph.errors import UnsupportedError
from hespas.simulator.astra.configuration import IMPLEMENTATION_KEYS, NetworkConfig, SystemConfig

__all__ = [
    "EVERY_DIMENSION",
    "FIRST_QUEUES",
    "LAST_QUEUES",
    "Algorithm",
    "CollectivePlan",
    "PhasePlan",
    "Planner",
    "collective_name",
]

EVERY_DIMENSION: tuple[bool, ...] = (True,) * 4
"""The dimensions of a collective that states none; ASTRA-sim knows four then."""

_ANY_QUEUE, FIRST_QUEUES, LAST_QUEUES = range(3)
"""Which queues of its dimension a phase takes in turn: all, the first half, or the second half of them."""

_ALGORITHM = re.compile(
    r"(?P<tree>doubleBinaryTree)|(?P<ring>ring|oneRing)|(?P<halving>halvingDoubling|oneHalvingDoubling)"
    r"|(?:direct|oneDirect)(?P<window>\d*)"
)
_LONGEST_WINDOW = 5
"""Digits of a window that ASTRA-sim reads."""


def collective_name(kind: CollectiveKind) -> str:
    """``all-reduce``, as configuration files spell it."""
    return kind.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """``family`` is ``ring``, ``direct``, ``halving`` or ``tree``; ``window`` bounds the messages that
    ``direct`` has in flight (0: all peers at once); ``flat`` takes all dimensions for one ring.
    """

    family: str
    window: int = 0
    flat: bool = False

    @classmethod
    def named(cls, text: str, path: str, key: str) -> Algorithm:
        """The algorithm that a configuration file names. Raises ``UnsupportedError`` for an unknown one."""
        match = _ALGORITHM.fullmatch(text)
        if match is None or len(match["window"] or "") > _LONGEST_WINDOW or match["window"] == "0":
            raise UnsupportedError(
                f"the algorithm {text!r} is unknown", path=path, position=key,
                hint="ring, direct, directK, halvingDoubling, oneRing, oneDirect, oneDirectK, "
                "oneHalvingDoubling or doubleBinaryTree",
            )  # fmt: skip
        flat = text.startswith("one")
        if match["tree"]:
            return cls("tree")
        if match["ring"]:
            return cls("ring", flat=flat)
        if match["halving"]:
            return cls("halving", flat=flat)
        return cls("direct", int(match["window"] or 0), flat)


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """One phase of a chunk: ``size`` bytes go in, ``output`` come out. ``dimension`` says whose queues and,
    without a group, which line of ranks it runs on.
    """

    kind: CollectiveKind
    algorithm: Algorithm
    dimension: int
    ranks: int
    size: int
    queues: int = _ANY_QUEUE

    @property
    def output(self) -> int:
        """Bytes that the next phase starts from."""
        if self.algorithm.family == "tree":
            return self.size
        if self.kind is CollectiveKind.REDUCE_SCATTER:
            return self.size // self.ranks
        return self.size * self.ranks if self.kind is CollectiveKind.ALL_GATHER else self.size


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """``streams`` chunks go through ``phases``. ``group`` are the ranks of a group smaller than the world."""

    kind: CollectiveKind
    streams: int
    phases: tuple[PhasePlan, ...]
    group: tuple[int, ...] | None


@dataclass(slots=True)
class Planner:
    """Plans of collectives on one system; equal ones are made once."""

    system: SystemConfig
    network: NetworkConfig
    _algorithms: dict[CollectiveKind, tuple[Algorithm, ...]] = field(
        default_factory=dict[CollectiveKind, tuple[Algorithm, ...]]
    )
    _plans: dict[tuple[object, ...], CollectivePlan] = field(
        default_factory=dict[tuple[object, ...], CollectivePlan]
    )

    def plan(
        self,
        kind: CollectiveKind,
        size: int,
        group: tuple[int, ...] | None,
        involved: tuple[bool, ...] | None = None,
    ) -> CollectivePlan:
        """The plan of a collective of ``size`` bytes per rank, in the sense that Chakra gives them.

        ``group``: its ranks in ring order, None for all. ``involved``: the dimensions it is restricted to.
        Raises ``UnsupportedError`` for what ASTRA-sim would crash on or never end.
        """
        if group is not None and len(group) == self.network.num_ranks:
            group, involved = None, (True,) * len(self.network.npus)
        key = (kind, size, len(group) if group is not None else 0, involved)
        found = self._plans.get(key)
        if found is None:
            found = self._made(kind, size, group, involved)
            self._plans[key] = found
        return found if found.group is group else CollectivePlan(kind, found.streams, found.phases, group)

    def check_files(self) -> None:
        """Check the configured algorithms, used or not. ASTRA-sim reads all of them before it starts.

        Raises ``UnsupportedError`` for an unknown algorithm and for more of them than dimensions.
        """
        for kind, names in self.system.implementations.items():
            key = IMPLEMENTATION_KEYS[kind]
            for name in names:
                Algorithm.named(name, self.system.path, key)
            if len(names) > len(self.network.npus):
                raise UnsupportedError(
                    f"{key} has {len(names)} names, and the network {len(self.network.npus)} dimensions",
                    code="ET026", path=self.system.path, position=key,
                    hint="one name per dimension, or a single one that begins with 'one'",
                )  # fmt: skip

    @property
    def _is_local(self) -> bool:
        return self.system.optimization == "localBWAware"

    def _made(
        self,
        kind: CollectiveKind,
        size: int,
        group: tuple[int, ...] | None,
        involved: tuple[bool, ...] | None,
    ) -> CollectivePlan:
        algorithms = self._implementation(kind)
        streams, chunk = self._chunks(kind, size)
        if group is not None:
            phases = self._of_group(kind, algorithms, len(group), chunk)
        else:
            phases = self._of_world(kind, algorithms, chunk, involved)
        if not phases:
            raise UnsupportedError(
                f"{collective_name(kind)} of one rank: ASTRA-sim never ends it",
                code="ET019", hint="leave collectives of one rank out of the trace",
            )  # fmt: skip
        return CollectivePlan(kind, streams, phases, group)

    def _implementation(self, kind: CollectiveKind) -> tuple[Algorithm, ...]:
        known = self._algorithms.get(kind)
        if known is not None:
            return known
        path = self.system.path
        if kind not in IMPLEMENTATION_KEYS:
            raise UnsupportedError(
                f"ASTRA-sim has no {collective_name(kind)}",
                hint="write it as all-reduce, all-gather, reduce-scatter, all-to-all or broadcast",
            )
        key = IMPLEMENTATION_KEYS[kind]
        if kind in self.system.custom:
            raise UnsupportedError(
                f"a custom {collective_name(kind)} is not modelled", path=path, position=f"{key}-custom",
                hint="take the line out to use the native implementation",
            )  # fmt: skip
        names = self.system.implementations.get(kind, ())
        if not names:
            raise UnsupportedError(
                f"the workload has an {collective_name(kind)}, and no implementation of it is stated",
                code="ET026", path=path, position=key, hint=f'add "{key}": ["ring"], a name per dimension',
            )  # fmt: skip
        found = self._algorithms[kind] = tuple(Algorithm.named(name, path, key) for name in names)
        return found

    def _chunks(self, kind: CollectiveKind, size: int) -> tuple[int, int]:
        """How many streams, and bytes of each: a remainder is a whole one more."""
        splits = self.system.dataset_splits
        if splits is None:
            raise UnsupportedError(
                "preferred-dataset-splits is missing, without which ASTRA-sim crashes",
                code="ET026", path=self.system.path, position="preferred-dataset-splits",
                hint='add "preferred-dataset-splits": 4',
            )  # fmt: skip
        chunk = size // splits
        if kind is not CollectiveKind.ALL_GATHER and self.network.num_ranks > chunk:
            return splits, self.network.num_ranks
        if not chunk:
            raise UnsupportedError(
                f"an all-gather of {size} bytes is cut into {splits} empty chunks: ASTRA-sim never ends",
                code="ET013", hint="state fewer preferred-dataset-splits, or gather more at once",
            )  # fmt: skip
        return -(-size // chunk), chunk

    def _of_group(
        self, kind: CollectiveKind, algorithms: tuple[Algorithm, ...], ranks: int, chunk: int
    ) -> tuple[PhasePlan, ...]:
        """One ring; where several dimensions state algorithms, it is run as a ring whatever they are."""
        algorithm = algorithms[0] if len(algorithms) == 1 else Algorithm("ring")
        if ranks < 2:
            return ()
        if algorithm.family == "tree":
            raise UnsupportedError(
                f"{collective_name(kind)} of a group by doubleBinaryTree: ASTRA-sim crashes",
                code="ET025", path=self.system.path, position=IMPLEMENTATION_KEYS[kind],
                hint="state another algorithm, such as ring",
            )  # fmt: skip
        ((step, dim, queues),) = _order(kind, [0], self._is_local)
        phase = PhasePlan(step, algorithm, dim, ranks, chunk, queues)
        self._check(phase)
        return (phase,)

    def _of_world(
        self,
        kind: CollectiveKind,
        algorithms: tuple[Algorithm, ...],
        chunk: int,
        involved: tuple[bool, ...] | None,
    ) -> tuple[PhasePlan, ...]:
        sizes = self._extents(algorithms)
        if algorithms[len(sizes) - 1].family == "tree" and len(sizes) < len(self.network.npus):
            raise UnsupportedError(
                f"doubleBinaryTree is the last of {len(sizes)} algorithms, and the network has "
                f"{len(self.network.npus)} dimensions: ASTRA-sim crashes",
                code="ET025", path=self.system.path, position=IMPLEMENTATION_KEYS[kind],
                hint="one name per dimension",
            )  # fmt: skip
        stated = EVERY_DIMENSION if involved is None else involved
        if len(stated) < len(sizes):
            raise UnsupportedError(
                f"{len(stated)} dimensions are involved, and the network has {len(sizes)}",
                code="ET032", hint="state involved_dim on every collective, an entry per dimension",
            )  # fmt: skip
        active = [dim for dim, size in enumerate(sizes) if size > 1 and stated[dim]]
        phases: list[PhasePlan] = []
        for step, dim, queues in _order(kind, active, self._is_local):
            size = phases[-1].output if phases else chunk
            phases.append(PhasePlan(step, algorithms[dim], dim, sizes[dim], size, queues))
            self._check(phases[-1])
        return tuple(phases)

    def _extents(self, algorithms: Sequence[Algorithm]) -> list[int]:
        """Return the ranks of each dimension that has an algorithm. A flat one spans all ranks and is the
        last.
        """
        extents: list[int] = []
        for algorithm, size in zip(algorithms, self.network.npus, strict=False):
            if algorithm.flat:
                return [*extents, self.network.num_ranks]
            extents.append(size)
        return extents

    def _check(self, phase: PhasePlan) -> None:
        family, what = phase.algorithm.family, collective_name(phase.kind)
        fault = ""
        if family == "tree" and phase.ranks & (phase.ranks - 1):
            fault = f"{what} needs a power of two for it, and there are {phase.ranks:,} ranks"
        elif family == "halving" and phase.kind is CollectiveKind.ALL_TO_ALL:
            fault = f"{what} is not implemented by it"
        if fault:
            raise UnsupportedError(
                f"{ {'halving': 'halvingDoubling', 'tree': 'doubleBinaryTree'}[family] }: {fault}",
                code="ET025", path=self.system.path, hint="state another algorithm, such as ring",
            )  # fmt: skip

    def line(self, rank: int, phase: PhasePlan) -> Sequence[int]:
        """The ranks that a rank meets in a phase of all ranks, in order of their coordinate."""
        if phase.algorithm.flat:
            return range(self.network.num_ranks)
        stride = prod(self.network.npus[: phase.dimension])
        start = rank - rank // stride % phase.ranks * stride
        return range(start, start + phase.ranks * stride, stride)


def _order(kind: CollectiveKind, active: Sequence[int], local: bool) -> list[tuple[CollectiveKind, int, int]]:
    """What is done in which dimension, on which of its queues."""
    if kind is CollectiveKind.ALL_REDUCE and local:
        *inner, last = active or (-1,)
        scattered = [(CollectiveKind.REDUCE_SCATTER, dim, FIRST_QUEUES) for dim in inner]
        gathered = [(CollectiveKind.ALL_GATHER, dim, LAST_QUEUES) for dim in reversed(inner)]
        return [*scattered, (kind, last, FIRST_QUEUES), *gathered] if active else []
    order = reversed(active) if kind is CollectiveKind.ALL_GATHER else active
    return [(kind, dim, _ANY_QUEUE) for dim in order]
