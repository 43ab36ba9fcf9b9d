"""Plans of collectives in ASTRA-sim. A collective is divided into chunks. Each chunk is a stream of phases,
one phase per network dimension.

A rank is a mixed-radix number over the dimensions; dimension 0 varies fastest. The line of a rank in a
dimension consists of the ranks that differ only in that coordinate. A group smaller than the world is a
separate ring, in the order of its file.
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
"""Dimensions of a collective that states none; ASTRA-sim assumes four."""

_ANY_QUEUE, FIRST_QUEUES, LAST_QUEUES = range(3)
"""Queues of its dimension that a phase uses in turn: all, the first half, or the second half."""

_ALGORITHM = re.compile(
    r"(?P<tree>doubleBinaryTree)|(?P<ring>ring|oneRing)|(?P<halving>halvingDoubling|oneHalvingDoubling)"
    r"|(?:direct|oneDirect)(?P<window>\d*)"
)
_LONGEST_WINDOW = 5
"""Maximum number of digits of a window."""


def collective_name(kind: CollectiveKind) -> str:
    """Return the name in configuration files, such as ``all-reduce``."""
    return kind.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Algorithm of a collective in one network dimension.

    ``family`` is ``ring``, ``direct``, ``halving`` or ``tree``. ``window`` is the maximum number of messages
    in flight for ``direct`` (0: one to each peer at once). ``flat`` is True for an algorithm that treats all
    dimensions together as one ring.
    """

    family: str
    window: int = 0
    flat: bool = False

    @classmethod
    def named(cls, text: str, path: str, key: str) -> Algorithm:
        """Return the algorithm with the name ``text`` in a configuration file. Raises ``UnsupportedError``
        for an unknown name.
        """
        match = _ALGORITHM.fullmatch(text)
        if match is None or len(match["window"] or "") > _LONGEST_WINDOW or match["window"] == "0":
            raise UnsupportedError(
                f"the algorithm {text!r} is unknown", path=path, position=key,
                hint="use ring, direct, directK, halvingDoubling, oneRing, oneDirect, oneDirectK, "
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
    """Phase of a chunk in one network dimension, with an input of ``size`` bytes.

    The phase runs in the queues of ``dimension``. In a collective of all ranks, each rank runs the phase with
    the ``ranks`` ranks that differ from it only in this dimension.
    """

    kind: CollectiveKind
    algorithm: Algorithm
    dimension: int
    ranks: int
    size: int
    queues: int = _ANY_QUEUE

    @property
    def output(self) -> int:
        """Return the bytes of the phase's result, which are the input of the next phase."""
        if self.algorithm.family == "tree":
            return self.size
        if self.kind is CollectiveKind.REDUCE_SCATTER:
            return self.size // self.ranks
        return self.size * self.ranks if self.kind is CollectiveKind.ALL_GATHER else self.size


@dataclass(frozen=True, slots=True)
class CollectivePlan:
    """Plan of a collective. It is split into ``streams`` chunks, and each chunk runs all ``phases`` in order.
    ``group`` lists the ranks if the group is smaller than all ranks.
    """

    kind: CollectiveKind
    streams: int
    phases: tuple[PhasePlan, ...]
    group: tuple[int, ...] | None


@dataclass(slots=True)
class Planner:
    """Planner of collectives on one system: the phases that each chunk runs. Plans for equal arguments are
    cached.
    """

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
        """Return the plan of a collective of ``size`` bytes per rank, as Chakra counts them.

        ``group`` lists the ranks of the group in ring order (None: all ranks). ``involved`` has one flag per
        network dimension: True if the collective runs in it (None: in all dimensions). Raises
        ``UnsupportedError`` for collectives on which ASTRA-sim would crash or never end.
        """
        if group is not None and len(group) == self.network.num_ranks:
            group, involved = None, (True,) * len(self.network.npus)
        key = (kind, size, len(group) if group is not None else 0, involved)
        plan = self._plans.get(key)
        if plan is None:
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
            plan = CollectivePlan(kind, streams, phases, group)
            self._plans[key] = plan
        return plan if plan.group is group else CollectivePlan(kind, plan.streams, plan.phases, group)

    def check_files(self) -> None:
        """Check all configured algorithms, including unused ones, because ASTRA-sim reads all of them before
        it starts.

        Raises ``UnsupportedError`` for an unknown algorithm and for more algorithms than dimensions.
        """
        for kind, names in self.system.implementations.items():
            key = IMPLEMENTATION_KEYS[kind]
            for name in names:
                Algorithm.named(name, self.system.path, key)
            if len(names) > len(self.network.npus):
                raise UnsupportedError(
                    f"{key} has {len(names)} names, but the network has {len(self.network.npus)} dimensions",
                    code="ET026", path=self.system.path, position=key,
                    hint="state one name per dimension, or a single one that begins with 'one'",
                )  # fmt: skip

    @property
    def _is_local(self) -> bool:
        return self.system.optimization == "localBWAware"

    def _implementation(self, kind: CollectiveKind) -> tuple[Algorithm, ...]:
        cached = self._algorithms.get(kind)
        if cached is not None:
            return cached
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
                f"the workload has an {collective_name(kind)} without a configured implementation",
                code="ET026", path=path, position=key, hint=f'add "{key}": ["ring"], a name per dimension',
            )  # fmt: skip
        algorithms = self._algorithms[kind] = tuple(Algorithm.named(name, path, key) for name in names)
        return algorithms

    def _chunks(self, kind: CollectiveKind, size: int) -> tuple[int, int]:
        """Return the number of streams (chunks) and the bytes of each. A remainder adds a stream of full
        size.
        """
        splits = self.system.dataset_splits
        if splits is None:
            raise UnsupportedError(
                "preferred-dataset-splits is missing: ASTRA-sim would crash",
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
        """Return the phases of a collective in a group: one phase over all its ranks, or none for a single
        rank. If several dimensions have an algorithm, ASTRA-sim uses the ring algorithm.
        """
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
                f"doubleBinaryTree is the last of {len(sizes)} algorithms, but the network has "
                f"{len(self.network.npus)} dimensions: ASTRA-sim crashes",
                code="ET025", path=self.system.path, position=IMPLEMENTATION_KEYS[kind],
                hint="state one name per dimension",
            )  # fmt: skip
        wanted = EVERY_DIMENSION if involved is None else involved
        if len(wanted) < len(sizes):
            raise UnsupportedError(
                f"{len(wanted)} dimensions are involved, but the network has {len(sizes)}",
                code="ET032", hint="state involved_dim on every collective, an entry per dimension",
            )  # fmt: skip
        active = [dim for dim, size in enumerate(sizes) if size > 1 and wanted[dim]]
        phases: list[PhasePlan] = []
        for step, dim, queues in _order(kind, active, self._is_local):
            size = phases[-1].output if phases else chunk
            phases.append(PhasePlan(step, algorithms[dim], dim, sizes[dim], size, queues))
            self._check(phases[-1])
        return tuple(phases)

    def _extents(self, algorithms: Sequence[Algorithm]) -> list[int]:
        """Return the number of ranks in each dimension for which an algorithm is configured. A flat algorithm
        (such as oneRing) spans all ranks and is the last one.
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
            fault = f"{what} needs a power of two of ranks, got {phase.ranks:,}"
        elif family == "halving" and phase.kind is CollectiveKind.ALL_TO_ALL:
            fault = f"{what} is not implemented"
        if fault:
            raise UnsupportedError(
                f"{ {'halving': 'halvingDoubling', 'tree': 'doubleBinaryTree'}[family] }: {fault}",
                code="ET025", path=self.system.path, hint="state another algorithm, such as ring",
            )  # fmt: skip

    def line(self, rank: int, phase: PhasePlan) -> Sequence[int]:
        """Return the ranks that take part in a phase together with ``rank``, in order of their coordinate."""
        if phase.algorithm.flat:
            return range(self.network.num_ranks)
        stride = prod(self.network.npus[: phase.dimension])
        start = rank - rank // stride % phase.ranks * stride
        return range(start, start + phase.ranks * stride, stride)


def _order(kind: CollectiveKind, active: Sequence[int], local: bool) -> list[tuple[CollectiveKind, int, int]]:
    """Return the kind, the dimension and the queues of each phase of a collective."""
    if kind is CollectiveKind.ALL_REDUCE and local:
        *inner, last = active or (-1,)
        scattered = [(CollectiveKind.REDUCE_SCATTER, dim, FIRST_QUEUES) for dim in inner]
        gathered = [(CollectiveKind.ALL_GATHER, dim, LAST_QUEUES) for dim in reversed(inner)]
        return [*scattered, (kind, last, FIRST_QUEUES), *gathered] if active else []
    order = reversed(active) if kind is CollectiveKind.ALL_GATHER else active
    return [(kind, dim, _ANY_QUEUE) for dim in order]
