"""Simulation of ranks: running nodes, the queues of their collectives, and the run of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil

from hespas.graph import CollectiveKind
from hespas.graph.columns import IntArray
from hespas.graph.errors import UnsupportedError
from hespas.simulator.astra.configuration import AstraOptions, SystemConfig
from hespas.simulator.astra.events import NEVER, EventQueue, IssuingRank, Slot, Timers
from hespas.simulator.astra.network import (
    AwareNetwork,
    Mailbox,
    MessageKey,
    MessageNetwork,
    RemoteMemory,
    UnawareNetwork,
    tag_of_stream,
)
from hespas.simulator.astra.phases import PhaseMachine, PhaseMachineFactory, PhaseStart, machine_of
from hespas.simulator.astra.plans import FIRST_QUEUES, LAST_QUEUES, CollectivePlan, PhasePlan, Planner
from hespas.simulator.astra.traces import Action, RankTrace

__all__ = [
    "GROUP_STREAMS",
    "AstraRank",
    "AstraRun",
    "IssuedCollective",
    "RankQueues",
    "RankRun",
    "RunContext",
    "run_all",
]


@dataclass(frozen=True, slots=True, eq=False)
class RankRun:
    """Start and end times of the nodes of one rank [ns], in ascending order of node ids. ``cause`` is the
    position of the node whose end allowed a node to be issued (``NEVER``: issued at the start of the run).
    """

    trace: RankTrace
    start_ns: Sequence[int]
    end_ns: Sequence[int]
    cause: Sequence[int]
    finish_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class AstraRun:
    """Result of a simulation in ASTRA-sim mode: the runs of the simulated ranks. ``shown_by`` has one entry
    per rank of the job: the index in ``ranks`` of the run that represents it.
    """

    ranks: Sequence[RankRun]
    shown_by: IntArray


@dataclass(frozen=True, slots=True)
class RunContext:
    """Objects that are common to all ranks of a run: event queue, mailbox, remote memory, and the planner of
    collectives. ``machines`` is a function that returns the state machine of a phase.
    """

    queue: EventQueue
    mailbox: Mailbox
    memory: RemoteMemory
    planner: Planner
    queues_per_dim: int
    machines: PhaseMachineFactory = machine_of


GROUP_STREAMS = 1_000_000
"""Number of chunk ids reserved for each process group."""

_GROUP_DELAY_NS = 10
"""Endpoint delay within a group smaller than the world, independent of the configuration."""

_GIGA = 1_000_000_000


@dataclass(slots=True)
class _OpenCollective:
    """Collective that is running, with ``left`` unfinished chunks."""

    plan: CollectivePlan
    left: int
    done: Callable[[], None]


class _ChunkStream:
    """Chunk of a collective. ``phases`` lists its remaining phases; the next phase is last."""

    __slots__ = ("machine", "number", "open", "phases", "queue")

    def __init__(
        self, number: int, opened: _OpenCollective, phases: list[tuple[PhasePlan, int, bool, int]]
    ) -> None:
        self.number, self.open, self.phases = number, opened, phases
        self.queue = -1
        self.machine: PhaseMachine | None = None


class _QueueAllocator:
    """Round-robin assignment of phases to the queues of one dimension. A phase may use all queues, or only
    the first or second half of them.
    """

    __slots__ = ("_any", "_count", "_first", "_last", "_low", "_trees")

    def __init__(self, low: int, count: int) -> None:
        self._low, self._count = low, count
        self._any = self._first = self._trees = 0
        self._last = count // 2

    def next(self, queues: int) -> tuple[int, bool]:
        """Return the queue for the next phase, and True if its messages go clockwise."""
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

    def advanced_as(self, other: _QueueAllocator) -> None:
        """Copy the state of another allocator, so that assignment continues after it."""
        self._any, self._first, self._last = other._any, other._first, other._last
        self._trees = other._trees

    def next_tree(self) -> int:
        """Return how many trees this dimension has had so far, and count one more."""
        self._trees += 1
        return self._trees - 1


class RankQueues:
    """Queues of one rank, ``queues_per_dimension`` for each network dimension.

    Each chunk of a collective runs its phases one after the other. Each phase runs in a queue of its
    dimension, which runs a limited number of chunks at a time.
    """

    __slots__ = (
        "_allocators",
        "_context",
        "_delay_ns",
        "_memory_bytes_per_s",
        "_most",
        "_queues",
        "_rank",
        "_running",
        "_timers",
    )  # fmt: skip

    def __init__(self, rank: int, context: RunContext, timers: Timers) -> None:
        planner, queues_per_dimension = context.planner, context.queues_per_dim
        system: SystemConfig = planner.system
        dimensions = len(planner.network.npus)
        self._rank, self._context, self._timers = rank, context, timers
        self._most = ceil(system.active_chunks_per_dimension / queues_per_dimension)
        self._allocators = [
            _QueueAllocator(dimension * queues_per_dimension, queues_per_dimension)
            for dimension in range(dimensions)
        ]
        self._queues: list[list[_ChunkStream]] = [[] for _ in range(dimensions * queues_per_dimension)]
        self._running = [0] * len(self._queues)
        self._delay_ns = system.endpoint_delay_ns
        self._memory_bytes_per_s = (system.local_memory_gb_per_s or 0.0) * _GIGA

    @property
    def are_empty(self) -> bool:
        """Return True if no chunk waits or runs in a queue."""
        return not any(self._queues)

    def advance_as(self, other: RankQueues) -> None:
        """Copy the state of the queues of a rank that behaves alike, so that this rank continues after the
        same chunks.
        """
        for allocator, before in zip(self._allocators, other._allocators, strict=True):
            allocator.advanced_as(before)

    def open(self, plan: CollectivePlan, first_stream: int, done: Callable[[], None]) -> None:
        """Start a collective on this rank's queues. Its chunks are numbered from ``first_stream``; ``done``
        is called when all of them have ended.
        """
        opened = _OpenCollective(plan, plan.streams, done)
        for number in range(first_stream, first_stream + plan.streams):
            phases: list[tuple[PhasePlan, int, bool, int]] = []
            for phase in plan.phases:
                allocator = self._allocators[phase.dimension]
                queue, clockwise = allocator.next(phase.queues)
                tree = allocator.next_tree() if phase.algorithm.family == "tree" else 0
                phases.append((phase, queue, clockwise, tree))
            self._proceed(_ChunkStream(number, opened, phases[::-1]))

    def _proceed(self, stream: _ChunkStream) -> None:
        """Move a chunk to the queue of its next phase, and remove it from its current queue. After the last
        phase the chunk ends.
        """
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
        group = stream.open.plan.group
        ring: Sequence[int] = self._context.planner.line(self._rank, phase) if group is None else group
        stream.machine = self._context.machines(
            PhaseStart(
                plan=phase,
                rank=self._rank,
                ring=ring,
                position=ring.index(self._rank),
                tag=tag_of_stream(stream.number),
                is_clockwise=clockwise,
                in_group=group is not None,
                tree=tree,
                delay_ns=self._delay_ns if group is None else _GROUP_DELAY_NS,
                memory_bytes_per_s=self._memory_bytes_per_s,
                timers=self._timers,
                mailbox=self._context.mailbox,
                rest=tuple(queue for _, queue, _, _ in reversed(stream.phases)),
                done=lambda: self._proceed(stream),
            )
        )
        self._queues[stream.queue].append(stream)
        if before >= 0:
            self._running[before] -= 1
            self._fill(before)
        self._fill(stream.queue)

    def _count(self, opened: _OpenCollective) -> None:
        opened.left -= 1
        if not opened.left:
            opened.done()

    def _fill(self, queue: int) -> None:
        """Start chunks that wait in a queue, up to the allowed number of running chunks."""
        streams = self._queues[queue]
        position = self._running[queue]
        while position < len(streams) and self._running[queue] < self._most:
            machine = streams[position].machine
            assert machine is not None, "a chunk in a queue has a phase"
            machine.start()
            self._running[queue] += 1
            position += 1


_SHOWN = 3


@dataclass(frozen=True, slots=True)
class IssuedCollective:
    """Collective that a node has issued: its plan, the number of its group (0: all ranks), and the number of
    its first chunk.
    """

    position: int
    plan: CollectivePlan
    group: int
    first_stream: int


class AstraRank(IssuingRank):
    """State of one rank during the simulation. Times are ``NEVER`` until the event happens. ``cause`` is the
    node whose end allowed a node to start.

    ``stops`` lists collectives that the rank must not start (see :mod:`hespas.simulator.astra.lockstep`).
    When the first of them is issued, ``stopped`` is set to its position.
    """

    __slots__ = (
        "_context",
        "_counters",
        "_flying",
        "_skipped",
        "_stops",
        "_timers",
        "_trigger",
        "cause",
        "end_ns",
        "ended",
        "finish_ns",
        "issued",
        "queues",
        "start_ns",
        "stopped",
        "trace",
    )  # fmt: skip

    def __init__(
        self,
        trace: RankTrace,
        context: RunContext,
        timers: Timers | None = None,
        stops: Collection[int] = (),
    ) -> None:
        columns = trace.trace
        super().__init__(columns.slot, columns.waiting, columns.bounds, columns.targets)
        self.trace, self._context, self._stops, self.stopped = trace, context, stops, NEVER
        self._timers = timers or Timers(context.queue)
        self.queues = RankQueues(trace.rank, context, self._timers)
        nodes = len(columns)
        self._skipped: list[int] = []
        self._flying = 0
        self._counters: dict[int, int] = {}
        self._trigger = NEVER
        self.ended = 0
        self.issued: list[IssuedCollective] = []
        self.start_ns, self.end_ns, self.cause = [NEVER] * nodes, [NEVER] * nodes, [NEVER] * nodes
        self.finish_ns = NEVER

    def begin(self) -> None:
        """Issue the nodes without dependencies."""
        super().begin()
        if self._context.queue.is_due:
            shown = [self.trace.trace.label(position) for position in self.flying()[:_SHOWN]]
            raise UnsupportedError(
                f"rank {self.trace.rank} starts with an event of 0 ns ({', '.join(shown)}), on which "
                "ASTRA-sim's event queue aborts", code="ET035",
                hint="add a computation of 1 ns or more before it, or raise the latency or the "
                "endpoint-delay that is 0",
            )  # fmt: skip
        self._check_finish(is_caught=False)

    @property
    def waits_alone(self) -> bool:
        """Return True if the rank has ended, or if it has stopped and nothing else happens on it: no other
        node runs, is ready, or has ended since then.
        """
        if self.stopped == NEVER:
            return self.ended == len(self.trace.trace)
        is_idle = self._flying == 1 and not any(self._ready) and self.queues.are_empty
        return is_idle and max(self.end_ns) <= self.start_ns[self.stopped]

    def continued(self, trace: RankTrace, context: RunContext, timers: Timers) -> AstraRank:
        """Return another rank of the same class in the current state of this rank. The new rank then starts
        the collective at which this rank stopped. Only allowed if this rank :attr:`waits_alone`.
        """
        rank = AstraRank(trace, context, timers)
        rank.queues.advance_as(self.queues)
        rank._waiting, rank._busy, rank._flying = self._waiting.copy(), self._busy.copy(), self._flying
        rank._counters, rank._trigger, rank.ended = self._counters.copy(), self._trigger, self.ended
        rank.issued, rank.finish_ns = self.issued.copy(), self.finish_ns
        rank.start_ns, rank.end_ns, rank.cause = self.start_ns.copy(), self.end_ns.copy(), self.cause.copy()
        if self.stopped != NEVER:
            context.queue.enter(self.start_ns[self.stopped], rank._open_at, self.stopped)
        return rank

    def _open_at(self, position: object) -> None:
        assert isinstance(position, int), "entered with the position of a collective"
        self._open(position)

    def result(self) -> RankRun:
        """Return the times of the rank's nodes."""
        return RankRun(self.trace, self.start_ns, self.end_ns, self.cause, self.finish_ns)

    def ready(self) -> list[int]:
        """Return the positions of nodes that wait only for a slot, ascending."""
        return sorted(position for heap in self._ready for position in heap)

    def flying(self) -> list[int]:
        """Return the positions of nodes that were issued and have not ended, ascending."""
        return [
            position
            for position, start in enumerate(self.start_ns)
            if start != NEVER and self.end_ns[position] == NEVER
        ]

    def _end(self, position: int, *, is_caught: bool = True) -> None:
        """End a node, and issue nodes that waited for the node or for its slot.

        ``is_caught`` is True if a timer of the rank ends the node. ASTRA-sim catches an error at this point
        and continues.
        """
        self._trigger = position
        self._close(position)
        self._issue_ready()
        self._check_finish(is_caught=is_caught)

    def _close(self, position: int) -> None:
        self._busy[self._slot[position]] = False
        self._flying -= 1
        self.ended += 1
        self.end_ns[position] = self._context.queue.now_ns
        self._release(position)

    def _issue_ready(self) -> None:
        """Issue all ready nodes, then end the issued nodes that ASTRA-sim skips. Nodes that become ready by
        these ends are issued when the next node ends.
        """
        before, self._skipped = self._skipped, []  # a node that ends at once issues nodes in between
        super()._issue_ready()
        skipped, self._skipped = self._skipped, before
        for position in skipped:
            self._flying += 1
            busy_before = self._busy[self._slot[position]]
            self._close(position)
            self._busy[self._slot[position]] = busy_before

    def _issue(self, position: int, slot: int) -> None:
        context, trace = self._context, self.trace.trace
        self.start_ns[position] = context.queue.now_ns
        action = trace.action[position]
        if action == Action.SKIP:
            self._skipped.append(position)
            return
        self._busy[slot] = slot != Slot.RECEIVE
        self._flying += 1
        self.cause[position] = self._trigger
        if action == Action.WAIT:
            self._timers.after(trace.delay_ns[position], self._end_any, position)
        elif action == Action.COLLECTIVE:
            self._open(position)
        elif action == Action.MEMORY:
            size = trace.memory_bytes[position]
            context.memory.access(self.trace.rank, self._timers, size, self._end_any, position)
        else:
            message, peer, rank = trace.messages[position], self.trace.peers[position], self.trace.rank
            if action == Action.SEND:
                context.mailbox.send((message.tag, rank, peer, message.size), self._end_message, position)
            else:
                context.mailbox.receive((message.tag, peer, rank, message.size), self._end_message, position)

    def _end_any(self, position: object) -> None:
        assert isinstance(position, int), "callbacks of nodes have their position"
        self._end(position)

    def _end_message(self, position: object) -> None:
        assert isinstance(position, int), "callbacks of nodes have their position"
        self._end(position, is_caught=False)

    def _open(self, position: int) -> None:
        """Start the collective of the node at ``position``, unless it is one of the stops.

        Chunks are numbered separately for each group. The counter for collectives of all ranks also counts
        the chunks of groups.
        """
        if position in self._stops:
            self.stopped = position
            return
        trace = self.trace.trace
        collective = trace.collectives[position]
        if collective.kind is CollectiveKind.BROADCAST:
            self._timers.after(trace.delay_ns[position], self._end_any, position)
            return
        number, group = self.trace.groups.get(collective.row, (0, None))
        plan = self._context.planner.plan(
            collective.kind, collective.size, group if number else None, collective.involved
        )
        base = number * GROUP_STREAMS
        first = base + self._counters.get(number, 0)
        for counted in {0, number}:
            self._counters[counted] = self._counters.get(counted, 0) + plan.streams
        self.issued.append(IssuedCollective(position, plan, number, first))
        done: Callable[[], None] = partial(self._end, position)
        self.queues.open(plan, first, done)

    def _check_finish(self, *, is_caught: bool) -> None:
        """Record the end of the rank if none of its nodes is running or ready. Raises ``UnsupportedError`` if
        ASTRA-sim would abort all ranks at this point.
        """
        if self.finish_ns != NEVER or self._flying or any(self._ready):
            return
        self.finish_ns = self._context.queue.now_ns
        if not is_caught and not self.trace.trace.is_summed:
            raise UnsupportedError(
                f"rank {self.trace.rank} ends with a message and has nodes of the CPU, of remote memory or "
                "without type: ASTRA-sim cannot sum up their times and ends all ranks", code="ET034",
                hint="end the rank with a computation",
            )  # fmt: skip


def run_all(traces: Sequence[RankTrace], options: AstraOptions) -> tuple[list[AstraRank], list[MessageKey]]:
    """Run all ranks from time 0 until no event is left. Ranks that deadlock are returned unfinished.

    Also return the keys of messages that were never received.
    """
    queue = EventQueue()
    wires: MessageNetwork = (AwareNetwork if options.backend == "aware" else UnawareNetwork)(
        options.network, queue
    )
    mailbox = Mailbox(wires, queue)
    shared = RunContext(
        queue=queue,
        mailbox=mailbox,
        memory=RemoteMemory(options.memory),
        planner=Planner(options.system, options.network),
        queues_per_dim=options.queues_per_dim,
    )
    ranks = [AstraRank(trace, shared) for trace in traces]
    for rank in ranks:
        rank.begin()
    queue.run()
    return ranks, mailbox.unreceived()
