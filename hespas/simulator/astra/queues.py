"""Chunks of collectives on one rank: each goes through its phases, and each phase through a queue of its
dimension, of which so many chunks run at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from hespas.simulator.astra.configuration import SystemConfig
from hespas.simulator.astra.events import Timers
from hespas.simulator.astra.mailbox import tag_of_stream
from hespas.simulator.astra.phases import Machine, PhaseStart
from hespas.simulator.astra.plans import FIRST_QUEUES, LAST_QUEUES, CollectivePlan, PhasePlan
from hespas.simulator.astra.shared import Shared

__all__ = ["GROUP_STREAMS", "RankQueues"]

GROUP_STREAMS = 1_000_000
"""Numbers of chunks that each process group has for its own."""

_GROUP_DELAY_NS = 10
"""The endpoint delay within a group smaller than the world, whatever the configuration says."""

_GIGA = 1_000_000_000


@dataclass(slots=True)
class _Open:
    """A collective under way: ``left`` chunks to end."""

    plan: CollectivePlan
    left: int
    done: Callable[[], None]


class _Stream:
    """A chunk: ``phases`` are those still before it, the next one last."""

    __slots__ = ("machine", "number", "open", "phases", "queue")

    def __init__(self, number: int, opened: _Open, phases: list[tuple[PhasePlan, int, bool, int]]) -> None:
        self.number, self.open, self.phases = number, opened, phases
        self.queue = -1
        self.machine: Machine | None = None


class _Allocator:
    """Which queue of a dimension the next phase takes: all in turn, or those of the first or second half."""

    __slots__ = ("_any", "_count", "_first", "_last", "_low", "_trees")

    def __init__(self, low: int, count: int) -> None:
        self._low, self._count = low, count
        self._any = self._first = self._trees = 0
        self._last = count // 2

    def next(self, queues: int) -> tuple[int, bool]:
        """The queue, and whether messages go clockwise."""
        if queues == FIRST_QUEUES:
            taken, self._first = self._first, self._first + 1
            if self._first >= self._count // 2:
                self._first = 0
            return self._low + taken, True
        if queues == LAST_QUEUES:
            taken, self._last = self._last, self._last + 1
            if self._last >= self._count:
                self._last = self._count // 2
            return self._low + taken, False
        taken, self._any = self._any, (self._any + 1) % self._count
        return self._low + taken, not (self._count > 1 and taken >= self._count // 2)

    def next_tree(self) -> int:
        """How many trees this dimension had before."""
        self._trees += 1
        return self._trees - 1


class RankQueues:
    """The queues of one rank, ``queues_per_dimension`` of each dimension of the network."""

    __slots__ = (
        "_allocators", "_delay_ns", "_memory_bytes_per_s", "_most", "_queues", "_rank", "_running",
        "_shared", "_timers",
    )  # fmt: skip

    def __init__(self, rank: int, shared: Shared, timers: Timers) -> None:
        planner, queues_per_dimension = shared.planner, shared.queues_per_dim
        system: SystemConfig = planner.system
        dimensions = len(planner.network.npus)
        self._rank, self._shared, self._timers = rank, shared, timers
        self._most = ceil(system.active_chunks_per_dimension / queues_per_dimension)
        self._allocators = [
            _Allocator(dimension * queues_per_dimension, queues_per_dimension)
            for dimension in range(dimensions)
        ]
        self._queues: list[list[_Stream]] = [[] for _ in range(dimensions * queues_per_dimension)]
        self._running = [0] * len(self._queues)
        self._delay_ns = system.endpoint_delay_ns
        self._memory_bytes_per_s = (system.local_memory_gb_per_s or 0.0) * _GIGA

    def open(self, plan: CollectivePlan, first_stream: int, done: Callable[[], None]) -> None:
        """Start a collective whose chunks count from ``first_stream``; ``done`` when all have ended."""
        opened = _Open(plan, plan.streams, done)
        for number in range(first_stream, first_stream + plan.streams):
            phases: list[tuple[PhasePlan, int, bool, int]] = []
            for phase in plan.phases:
                allocator = self._allocators[phase.dimension]
                queue, clockwise = allocator.next(phase.queues)
                tree = allocator.next_tree() if phase.algorithm.family == "tree" else 0
                phases.append((phase, queue, clockwise, tree))
            self._proceed(_Stream(number, opened, phases[::-1]))

    def _proceed(self, stream: _Stream) -> None:
        """A chunk leaves its queue, if it is in one, and enters that of its next phase, if there is one."""
        before = stream.queue
        if not stream.phases:
            self._count(stream.open)
        if before >= 0:
            self._queues[before].remove(stream)
        if not stream.phases:
            self._running[before] -= 1
            self._fill(before)
            return
        phase, stream.queue, clockwise, tree = stream.phases.pop()
        stream.machine = self._shared.machines(self._phase_start(stream, phase, clockwise, tree))
        self._queues[stream.queue].append(stream)
        if before >= 0:
            self._running[before] -= 1
            self._fill(before)
        self._fill(stream.queue)

    def _count(self, opened: _Open) -> None:
        opened.left -= 1
        if not opened.left:
            opened.done()

    def _fill(self, queue: int) -> None:
        """Start chunks that wait while fewer than allowed are running; those that run stand first."""
        streams = self._queues[queue]
        place = self._running[queue]
        while place < len(streams) and self._running[queue] < self._most:
            machine = streams[place].machine
            assert machine is not None, "a chunk in a queue has a phase"
            machine.start()
            self._running[queue] += 1
            place += 1

    def _phase_start(self, stream: _Stream, phase: PhasePlan, clockwise: bool, tree: int) -> PhaseStart:
        group = stream.open.plan.group
        ring: Sequence[int] = self._shared.planner.line(self._rank, phase) if group is None else group
        return PhaseStart(
            plan=phase,
            rank=self._rank,
            ring=ring,
            place=ring.index(self._rank),
            tag=tag_of_stream(stream.number),
            is_clockwise=clockwise,
            in_group=group is not None,
            tree=tree,
            delay_ns=self._delay_ns if group is None else _GROUP_DELAY_NS,
            memory_bytes_per_s=self._memory_bytes_per_s,
            timers=self._timers,
            mailbox=self._shared.mailbox,
            rest=tuple(queue for _, queue, _, _ in reversed(stream.phases)),
            done=lambda: self._proceed(stream),
        )
