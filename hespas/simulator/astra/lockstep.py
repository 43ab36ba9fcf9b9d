"""Simulation of ranks that must behave alike: one rank per class is run.

Ranks that start a collective at the same time and see the same network from their positions end it at the
same time. Two ranks behave alike if they run the same graph and exchange messages with ranks that are alike
and equally far. All ranks of each of their collectives must also be alike and see the same network from their
positions. Classes of ranks are split until that holds (O(ranks x relations), in columns). One rank of each
class is run, and it determines the times of collective phases (:mod:`hespas.simulator.astra.phases`).

With congestion all ranks are run, except for rings in which no two messages share a link.

Without congestion, ranks affect each other only through the times of messages. The order of events of one
moment on one rank remains: they run in the order of entry. If two were also entered at the same moment, and
one of them by a rank that is not run, the order is unknown and all ranks are run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind
from hespas.graph.columns import IntArray
from hespas.simulator.astra.configuration import AstraOptions
from hespas.simulator.astra.events import Callback, EventQueue, Timers
from hespas.simulator.astra.network import (
    EmptyNetwork,
    Mailbox,
    MessageChannel,
    MessageNetwork,
    RemoteMemory,
    UnawareNetwork,
)
from hespas.simulator.astra.phases import Ambiguous, PhaseMachine, PhaseStart, PhaseTime, PhaseTimes
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.ranks import AstraRank, AstraRun, RunContext
from hespas.simulator.astra.traces import Action, AstraTraces, ClassTrace

__all__ = ["alike", "run_alike"]


class _NotAlike(Exception):  # noqa: N818 # not an error: all ranks are run
    """Raised if ranks are not proved alike."""


class _Relation(NamedTuple):
    """Ranks and the other end of a message of each."""

    ranks: IntArray
    peers: IntArray


def alike(
    traces: AstraTraces, options: AstraOptions, planner: Planner, wires: UnawareNetwork
) -> IntArray | None:
    """Return the class of each rank, counted from 0; None if ranks are not proved alike."""
    own_memory = {"NO_MEMORY_EXPANSION", "PER_NPU_MEMORY_EXPANSION"}
    if options.memory is not None and options.memory.memory_type not in own_memory:
        return None  # ranks wait for a shared memory
    is_aware = options.backend == "aware"
    if is_aware:  # ranks must have one chunk in flight, and no other messages
        is_single = options.queues_per_dim == options.system.active_chunks_per_dimension == 1
        has_messages = any(trace.messages for trace in traces.classes.values())
        if not is_single or has_messages or len(options.network.npus) != 1:
            return None
    if not options.system.endpoint_delay_ns:
        return None
    try:
        return _AlikeRanks(traces, planner, wires, is_aware).refined()
    except _NotAlike:
        return None


@dataclass(slots=True)
class _AlikeRanks:
    traces: AstraTraces
    planner: Planner
    wires: UnawareNetwork
    is_aware: bool

    def refined(self) -> IntArray:
        workload = self.traces.workload
        rank_kinds = workload.rank_class.astype(np.int64)
        groups: list[IntArray] = []
        relations: list[_Relation] = []
        for index, trace in self.traces.classes.items():
            ranks = workload.ranks_of(index)
            for table, numbers in self._groups(trace, ranks):
                groups.append(table)
                rank_kinds = _split(rank_kinds, numbers)
            sides = {
                (message.row, trace.action[position] == Action.SEND)
                for position, message in trace.messages.items()
            }
            for row, sends in sorted(sides):
                relation = _Relation(ranks, self._peers(trace, row, ranks, sends=sends))
                relations.append(relation)
                paths = np.full(len(rank_kinds), -1, np.int64)
                paths[relation.ranks] = self._paths(*relation)
                rank_kinds = _split(rank_kinds, paths)
        sent = self._listed(sends=True)
        if not np.array_equal(sent, self._listed(sends=False)):
            raise _NotAlike  # a send without a receive
        count = -1
        while count != (count := int(rank_kinds.max()) + 1):
            for relation in relations:
                others = np.full(len(rank_kinds), -1, np.int64)
                others[relation.ranks] = rank_kinds[relation.peers]
                rank_kinds = _split(rank_kinds, others)
        for table in groups:
            if (rank_kinds[table] != rank_kinds[table[:, :1]]).any():
                raise _NotAlike
        # A rank must exchange messages of one tag and size with only one rank of a class.
        for end, other in ((0, 1), (1, 0)):
            keys = np.stack([sent[:, end], rank_kinds[sent[:, other]], sent[:, 2], sent[:, 3]], 1)
            if len(np.unique(keys, axis=0)) < len(keys):
                raise _NotAlike
        return rank_kinds

    def _groups(self, trace: ClassTrace, ranks: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
        """Yield the groups of communicating ranks, ``(groups, size)``, and per rank a number for its view of
        the network, -1 for others.
        """
        seen: set[tuple[int, str]] = set()
        for collective in trace.collectives.values():
            if collective.kind is CollectiveKind.BROADCAST:
                continue
            sets = trace.graph.group_sets
            groups = sets[collective.row] if collective.row >= 0 else None
            number = self.traces.group_number(groups, int(ranks[0])) if groups is not None else 0
            members = groups.members(groups.group_of(int(ranks[0]))) if groups is not None else None
            plan = self.planner.plan(
                collective.kind, collective.size,
                tuple(members.tolist()) if number and members is not None else None,
                collective.involved,
            )  # fmt: skip
            # Positions in trees, and in rings over several dimensions, differ.
            families = {phase.algorithm.family for phase in plan.phases}
            flat = any(phase.algorithm.flat for phase in plan.phases) and len(self.planner.network.npus) > 1
            if "tree" in families or (flat and plan.group is None):
                raise _NotAlike
            if self.is_aware and "direct" in families:
                raise _NotAlike  # all messages of a rank at once
            if self.is_aware and plan.group is None and "halving" in families:
                self._views(np.arange(self._ranks, dtype=np.int64)[None], "halving")
            family = plan.phases[0].algorithm.family if plan.group is not None else ""
            row = -1 if plan.group is None else collective.row
            if (row, family) in seen:
                continue
            seen.add((row, family))
            if plan.group is None or groups is None:
                world = np.arange(self.traces.workload.num_ranks, dtype=np.int64)
                yield world[None], np.zeros(len(world), np.int64)
                continue
            places = groups.groups_of(ranks)
            if (places < 0).any():
                raise _NotAlike
            rows = [groups.members(position) for position in np.unique(places).tolist()]
            if len({len(row) for row in rows}) > 1 or max(int(row.max()) for row in rows) >= self._ranks:
                raise _NotAlike
            table = np.stack(rows)
            here = groups.groups_of(table.reshape(-1)).reshape(table.shape)
            if (here != np.unique(places)[:, None]).any():
                raise _NotAlike
            numbers = np.full(self._ranks, -1, np.int64)
            numbers[table] = self._views(table, family)[:, None]
            yield table, numbers

    @property
    def _ranks(self) -> int:
        return self.traces.workload.num_ranks

    def _views(self, table: IntArray, family: str) -> IntArray:
        """Return a number per group for the views of its ranks: the path to each rank they send to, which is
        equal for all of them.
        """
        size = table.shape[1]
        if family == "halving" and size & (size - 1):
            raise _NotAlike
        columns: list[IntArray] = []
        steps: range | list[int] = [1 << bit for bit in range(size.bit_length() - 1)]
        if family != "halving":
            steps = range(1, 2 if family == "ring" else size)
        for step in steps:
            others = table[:, np.arange(size) ^ step] if family == "halving" else np.roll(table, -step, 1)
            paths = self._paths(table.reshape(-1), others.reshape(-1)).reshape(table.shape)
            if (paths != paths[:, :1]).any():
                raise _NotAlike
            if self.is_aware and self.planner.network.topology[0] == "Ring" and (paths > 1).any():
                raise _NotAlike  # messages share links after the first hop
            columns.append(paths[:, 0])
        return np.unique(np.stack(columns, 1), axis=0, return_inverse=True)[1].reshape(-1)

    def _paths(self, ranks: IntArray, peers: IntArray) -> IntArray:
        """Return a number for the dimension and hops between ranks."""
        if (ranks == peers).any():
            raise _NotAlike
        return self.wires.paths(ranks, peers)

    def _peers(self, trace: ClassTrace, row: int, ranks: IntArray, *, sends: bool) -> IntArray:
        if row < 0:
            raise _NotAlike
        permutation = trace.graph.permutations[row]
        peers = permutation.targets_of(ranks) if sends else permutation.sources_of(ranks)
        if (peers < 0).any() or (peers >= self._ranks).any():
            raise _NotAlike
        return peers

    def _listed(self, *, sends: bool) -> IntArray:
        """Return distinct rows of (source, target, tag, size)."""
        wanted = Action.SEND if sends else Action.RECEIVE
        parts: list[IntArray] = [np.empty((0, 4), np.int64)]
        for index, trace in self.traces.classes.items():
            ranks = self.traces.workload.ranks_of(index)
            messages = {
                (message.row, message.tag, message.size)
                for position, message in trace.messages.items()
                if trace.action[position] == wanted
            }
            for row, tag, size in sorted(messages):
                peers = self._peers(trace, row, ranks, sends=sends)
                ends = (ranks, peers) if sends else (peers, ranks)
                parts.append(np.stack([*ends, np.full_like(ranks, tag), np.full_like(ranks, size)], 1))
        return np.unique(np.concatenate(parts), axis=0)


def _split(rank_kinds: IntArray, numbers: IntArray) -> IntArray:
    """Return classes split by a number of each rank."""
    pairs = np.stack([rank_kinds, numbers], 1)
    return np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def run_alike(traces: AstraTraces, options: AstraOptions) -> AstraRun | None:
    """Run a job with one rank per class. Return None if ranks are not proved alike, if the order of events of
    one moment matters, and if a rank does not finish: then all ranks must be run.
    """
    queue = EventQueue()
    planner = Planner(options.system, options.network)
    wires = (EmptyNetwork if options.backend == "aware" else UnawareNetwork)(options.network, queue)
    rank_kinds = alike(traces, options, planner, wires)
    if rank_kinds is None:
        return None
    first = np.unique(rank_kinds, return_index=True)[1]
    mailbox = _ClassMailbox(wires, queue, rank_kinds)
    context = RunContext(
        queue=queue,
        mailbox=mailbox,
        memory=RemoteMemory(options.memory),
        planner=planner,
        queues_per_dim=options.queues_per_dim,
        machines=_Lockstep.maker(queue, PhaseTimes(wires)),
    )
    ranks: list[AstraRank] = []
    for trace in traces.of_ranks(first.tolist()):
        timers = _WatchedTimers(queue)
        mailbox.watch(trace.rank, timers)
        ranks.append(AstraRank(trace, context, timers))
    try:
        for rank in ranks:
            rank.begin()
        queue.run()
    except Ambiguous:
        return None
    if any(rank.ended < len(rank.trace.trace) for rank in ranks) or mailbox.unreceived():
        return None
    return AstraRun([rank.result() for rank in ranks], rank_kinds)


class _WatchedTimers(Timers):
    """Timers that detect an unknown order of events of their rank at one moment."""

    __slots__ = ("_active", "_active_ns", "_entered", "_first", "_has_arrival", "_now_ns", "_phases")

    def __init__(self, queue: EventQueue) -> None:
        super().__init__(queue)
        self._first: dict[int, int] = {}
        self._phases: dict[tuple[int, int], list[tuple[int, ...] | None]] = {}
        self._entered: list[int] = []
        self._has_arrival = False
        self._active, self._active_ns, self._now_ns = 0, -1, -1

    def begin_phase(self) -> None:
        """Record the start of a collective phase on this rank."""
        self._active += 1

    def end_phase(self) -> None:
        """Record the end of a collective phase on this rank."""
        self._active -= 1
        self._active_ns = self._queue.now_ns

    def after(self, delay_ns: int, callback: Callback, argument: object) -> None:
        self._note_end(delay_ns, None)
        super().after(delay_ns, callback, argument)

    def end_after(self, delay_ns: int, callback: Callback, argument: object, rest: tuple[int, ...]) -> None:
        """Set the last timer of a phase; ``rest`` are the remaining queues of its chunk."""
        self._note_end(delay_ns, rest)
        super().after(delay_ns, callback, argument)

    def _note_end(self, delay_ns: int, rest: tuple[int, ...] | None) -> None:
        now_ns = self._queue.now_ns
        self._first.setdefault(now_ns + delay_ns, now_ns)
        others = self._phases.setdefault((now_ns, now_ns + delay_ns), [])
        if any(not _commute(rest, other) for other in others):
            raise Ambiguous
        others.append(rest)

    def _ring(self, time_ns: int) -> None:
        self._note_event(self._first.pop(time_ns), is_arrival=False)
        super()._ring(time_ns)

    def arrive(self, entered_ns: int) -> None:
        """Record the arrival of a message from or to this rank that was sent at ``entered_ns``."""
        self._note_event(entered_ns, is_arrival=True)

    def _note_event(self, entered_ns: int, *, is_arrival: bool) -> None:
        """Record an event. Events of a moment are ordered if they were entered at different times and no
        timers of a collective, which would be among them, are omitted.
        """
        now_ns = self._queue.now_ns
        if self._now_ns != now_ns:
            self._now_ns, self._has_arrival = now_ns, False
            self._entered.clear()
        self._has_arrival |= is_arrival
        hides = self._active > 0 or self._active_ns == now_ns
        if entered_ns in self._entered or (self._entered and self._has_arrival and hides):
            raise Ambiguous
        self._entered.append(entered_ns)


def _commute(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> bool:
    """Return True if two ends at one moment may come in either order: ends of chunks that do the same from
    there, or that enter different queues. ``None`` is the end of a node: it must keep its order with the end
    of a collective.
    """
    if one is None or other is None:
        return one == other or bool(one or other)
    return one == other or not one or not other or one[0] != other[0]


class _ClassMailbox(Mailbox):
    """Messages between classes of ranks."""

    __slots__ = ("_kinds", "_watched")

    def __init__(self, network: MessageNetwork, queue: EventQueue, rank_kinds: IntArray) -> None:
        super().__init__(network, queue)
        self._kinds: list[int] = rank_kinds.tolist()
        self._watched: dict[int, _WatchedTimers] = {}

    def watch(self, rank: int, timers: _WatchedTimers) -> None:
        """Report arrivals for a class to the timers of its rank."""
        self._watched[self._kinds[rank]] = timers

    def _channel(self, key: tuple[int, int, int, int]) -> MessageChannel:
        tag, source, target, size = key
        return super()._channel((tag, self._kinds[source], self._kinds[target], size))

    def send(
        self, key: tuple[int, int, int, int], sent: Callback | None = None, argument: object = None
    ) -> None:
        ends = self._watched[self._kinds[key[1]]], self._watched[self._kinds[key[2]]]
        sent_ns = self._queue.now_ns

        def arrived(given: object) -> None:
            for timers in ends:
                timers.arrive(sent_ns)
            if sent is not None:
                sent(given)

        super().send(key, arrived, argument)


class _Lockstep:
    """Phase whose ranks all do the same."""

    __slots__ = ("_queue", "_start", "_time", "_timers")

    def __init__(self, queue: EventQueue, start: PhaseStart, time: PhaseTime) -> None:
        assert isinstance(start.timers, _WatchedTimers), "ranks of a class have watched timers"
        self._queue, self._start, self._time, self._timers = queue, start, time, start.timers

    @classmethod
    def maker(cls, queue: EventQueue, times: PhaseTimes) -> Callable[[PhaseStart], PhaseMachine]:
        """Return the factory for the machine of a phase."""
        return lambda start: cls(queue, start, times.of(start))

    def start(self) -> None:
        """Wait until the last packet has arrived."""
        self._timers.begin_phase()
        self._queue.enter(self._queue.now_ns + self._time.lead_ns, self._wait, 0)

    def _wait(self, step: object) -> None:
        assert isinstance(step, int), "entered with the number of its delay"
        delays_ns = self._time.delays_ns
        if step == len(delays_ns):
            self._timers.end_phase()
            self._start.done()
        elif step == len(delays_ns) - 1:
            self._timers.end_after(delays_ns[step], self._wait, step + 1, self._start.rest)
        else:
            self._timers.after(delays_ns[step], self._wait, step + 1)
