"""Simulation of one rank for each class of ranks that must behave alike.

Ranks that start a collective at the same time and see the same network from their positions end it at the
same time. Two ranks behave alike if they run the same graph, and exchange messages with ranks that are alike
and equally far away. In addition, all ranks of each of their collectives must be alike and see the same
network. Classes of ranks are split until this holds (O(ranks x relations), in columns). One rank of each
class is run, and it determines the times of collective phases (:mod:`hespas.simulator.astra.phases`).

A collective between ranks of several classes is called a stop; an example is the norm of all gradients after
a pipeline. Ranks of a class are alike up to their first stop. From there all ranks are run, each from the
state of its class. The times of rings then follow from the starts of their ranks
(:mod:`hespas.simulator.astra.watched`).

With congestion all ranks are run, except for rings in which no two messages share a link.

Without congestion, ranks affect each other only through the times of messages. The order of events of one
rank at the same time still matters: they run in the order in which they were scheduled. If two were also
scheduled at the same time, and one of them by a rank that is not run, then the order is unknown and all ranks
are run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind
from hespas.graph.columns import IntArray, equal_rows
from hespas.simulator.astra.configuration import AstraOptions
from hespas.simulator.astra.events import NEVER, Callback, EventQueue
from hespas.simulator.astra.network import (
    EmptyNetwork,
    Mailbox,
    MessageChannel,
    MessageNetwork,
    RemoteMemory,
    UnawareNetwork,
)
from hespas.simulator.astra.phases import (
    Ambiguous,
    PhaseMachineFactory,
    PhaseStart,
    PhaseTime,
    PhaseTimes,
)
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.ranks import AstraRank, AstraRun, RunContext
from hespas.simulator.astra.traces import Action, AstraTraces, ClassTrace, RankTrace
from hespas.simulator.astra.watched import RingMeetings, WatchedPhase, WatchedTimers

__all__ = ["AlikeClasses", "alike", "run_alike"]


class _NotAlike(Exception):  # noqa: N818 # not an error: all ranks are run
    """Signal that ranks cannot be proved to behave alike, so that each must be simulated."""


class _Relation(NamedTuple):
    """Pairs of ranks that communicate: ``ranks[i]`` exchanges messages with ``peers[i]``."""

    ranks: IntArray
    peers: IntArray


class AlikeClasses(NamedTuple):
    """Classes of ranks that behave alike up to their first stop (see the module).

    ``kinds`` is the number of the class of each rank, from 0. ``stops`` lists the collectives between ranks
    of several classes, as pairs of rank class (of the workload) and node position.
    """

    kinds: IntArray
    stops: frozenset[tuple[int, int]]


def alike(
    traces: AstraTraces, options: AstraOptions, planner: Planner, wires: UnawareNetwork
) -> AlikeClasses | None:
    """Return the classes of ranks that are proved to behave alike; None if no two ranks are."""
    is_aware = options.backend == "aware"
    if is_aware:  # ranks must have one chunk in flight, and no other messages
        is_single = options.queues_per_dim == options.system.active_chunks_per_dimension == 1
        has_messages = any(trace.messages for trace in traces.classes.values())
        if not is_single or has_messages or len(options.network.npus) != 1:
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
    _stops: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def refined(self) -> AlikeClasses:
        while True:
            stops = len(self._stops)
            rank_kinds = self._refine()
            if self.is_aware and self._stops:
                raise _NotAlike
            if len(self._stops) == stops:
                return AlikeClasses(rank_kinds, frozenset(self._stops))

    def _refine(self) -> IntArray:
        """Split classes of ranks until messages and collectives connect only ranks that are alike, and return
        the class of each rank.

        Collectives between ranks of several classes become stops.
        """
        workload = self.traces.workload
        rank_kinds = workload.rank_class.astype(np.int64)
        groups: list[tuple[IntArray, list[tuple[int, int]]]] = []
        relations: list[_Relation] = []
        for index, trace in self.traces.classes.items():
            ranks = workload.ranks_of(index)
            for (table, numbers), places in self._groups(trace, ranks):
                groups.append((table, [(index, place) for place in places]))
                rank_kinds = equal_rows(rank_kinds, numbers)[1]
            sides = {
                (message.row, trace.action[position] == Action.SEND)
                for position, message in trace.messages.items()
            }
            for row, sends in sorted(sides):
                relation = _Relation(ranks, self._peers(trace, row, ranks, sends=sends))
                relations.append(relation)
                paths = np.full(len(rank_kinds), -1, np.int64)
                paths[relation.ranks] = self._paths(*relation)
                rank_kinds = equal_rows(rank_kinds, paths)[1]
        sent = self._listed(sends=True)
        if not np.array_equal(sent, self._listed(sends=False)):
            raise _NotAlike  # a send without a receive
        count = -1
        while count != (count := int(rank_kinds.max()) + 1):
            for relation in relations:
                others = np.full(len(rank_kinds), -1, np.int64)
                others[relation.ranks] = rank_kinds[relation.peers]
                rank_kinds = equal_rows(rank_kinds, others)[1]
        for table, stops in groups:
            if (rank_kinds[table] != rank_kinds[table[:, :1]]).any():
                self._stops.update(stops)
        # A rank must exchange messages of one tag and size with only one rank of a class.
        for end, other in ((0, 1), (1, 0)):
            keys = np.stack([sent[:, end], rank_kinds[sent[:, other]], sent[:, 2], sent[:, 3]], 1)
            if len(np.unique(keys, axis=0)) < len(keys):
                raise _NotAlike
        return rank_kinds

    def _groups(
        self, trace: ClassTrace, ranks: IntArray
    ) -> Iterator[tuple[tuple[IntArray, IntArray], list[int]]]:
        """Yield the groups in which a rank class runs collectives, and the positions of these collectives.

        Groups have shape ``(groups, size)``. A second array has one number per rank: ranks have equal numbers
        if their groups send over equal paths (see :meth:`_views`), and -1 if they are in no group.
        Collectives in which the ranks have different numbers become stops.
        """
        places: dict[tuple[int, str, bool], list[int]] = {}
        for position, collective in trace.collectives.items():
            if collective.kind is CollectiveKind.BROADCAST or (trace.rank_class, position) in self._stops:
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
            unlike = "tree" in families or (flat and plan.group is None)
            # Some ranks of halving-doubling have no partner if their number is not a power of two.
            halving = (phase.ranks for phase in plan.phases if phase.algorithm.family == "halving")
            unlike |= any(ranks & (ranks - 1) for ranks in halving)
            if self.is_aware:  # `direct` sends all messages of a rank at once
                unlike |= "direct" in families
            family = plan.phases[0].algorithm.family if plan.group is not None else ""
            if self.is_aware and plan.group is None and "halving" in families:
                family = "halving"
            if unlike:
                self._stops.add((trace.rank_class, position))
            else:
                key = (-1 if plan.group is None else collective.row, family, plan.group is None)
                places.setdefault(key, []).append(position)
        for (row, family, is_world), positions in places.items():
            try:
                views = self._world(family) if is_world else self._group(trace, row, ranks, family)
            except _NotAlike:
                self._stops.update((trace.rank_class, position) for position in positions)
            else:
                yield views, positions

    def _world(self, family: str) -> tuple[IntArray, IntArray]:
        world = np.arange(self._ranks, dtype=np.int64)
        if family == "halving":
            self._views(world[None], family)
        return world[None], np.zeros(len(world), np.int64)

    def _group(self, trace: ClassTrace, row: int, ranks: IntArray, family: str) -> tuple[IntArray, IntArray]:
        groups = trace.graph.group_sets[row]
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
        return table, numbers

    @property
    def _ranks(self) -> int:
        return self.traces.workload.num_ranks

    def _views(self, table: IntArray, family: str) -> IntArray:
        """Return one number per group. Groups have equal numbers if their ranks send messages over equal
        paths.

        ``table`` has the ranks of each group, ``family`` is the algorithm of the collective. Raises
        :class:`_NotAlike` if the ranks of one group send over different paths.
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
        """Return a number for each rank that identifies the path to its peer: the network dimension and the
        hops.
        """
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
        """Return the messages that ranks send (or receive), as distinct rows of (source, target, tag,
        size).
        """
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


def run_alike(traces: AstraTraces, options: AstraOptions) -> AstraRun | None:
    """Simulate a job quickly: run one rank per class of ranks that behave alike, without the messages of its
    collectives (see the module).

    Each of these ranks runs until it starts a collective with ranks of other classes. Then all ranks of the
    job are run, and their collectives must be rings without congestion. If a rank is not idle when it starts
    such a collective, all ranks are run from the beginning.

    Return None if the order of events at the same time matters, or if a rank does not finish. The caller must
    then simulate all messages.
    """
    own_memory = {"NO_MEMORY_EXPANSION", "PER_NPU_MEMORY_EXPANSION"}
    if options.memory is not None and options.memory.memory_type not in own_memory:
        return None  # ranks wait for a shared memory
    if not options.system.endpoint_delay_ns:
        return None
    planner = Planner(options.system, options.network)
    part = _PartialRun(traces, options, planner)
    found = alike(traces, options, planner, part.wires)
    try:
        if found is None:
            return None if options.backend == "aware" else part.finished(part.begun_alone())
        first = np.unique(found.kinds, return_index=True)[1].tolist()
        ranks = part.begun_alike(first, found)
        if all(rank.stopped == NEVER for rank in ranks):
            return part.finished(ranks, found.kinds)
        rest = _PartialRun(traces, options, planner)
        if not all(rank.waits_alone for rank in ranks) or part.mailbox.unreceived():
            return rest.finished(rest.begun_alone())
        return rest.finished(rest.continued([ranks[kind] for kind in found.kinds.tolist()]))
    except Ambiguous:
        return None


class _PartialRun:
    """Run of some of the ranks of a job, with an event queue of its own."""

    def __init__(self, traces: AstraTraces, options: AstraOptions, planner: Planner) -> None:
        self._traces, self._options, self._planner = traces, options, planner
        self._queue = EventQueue()
        network = EmptyNetwork if options.backend == "aware" else UnawareNetwork
        self.wires = network(options.network, self._queue)
        self.mailbox = _ClassMailbox(self.wires, self._queue, self._every_rank)

    @property
    def _every_rank(self) -> IntArray:
        return np.arange(self._traces.workload.num_ranks, dtype=np.int64)

    def begun_alike(self, ranks: list[int], found: AlikeClasses) -> list[AstraRank]:
        """Run one rank of each class of alike ranks to its end, or to its first stop."""
        self.mailbox = _ClassMailbox(self.wires, self._queue, found.kinds)
        times = PhaseTimes(self.wires)
        context = self._context(lambda start: _Lockstep(self._queue, start, times.of(start)))
        stops: dict[int, set[int]] = {}
        for rank_class, position in found.stops:
            stops.setdefault(rank_class, set()).add(position)
        return self._run(
            [
                AstraRank(trace, context, self._timers(trace), stops.get(trace.trace.rank_class, ()))
                for trace in self._traces.of_ranks(ranks)
            ]
        )

    def begun_alone(self) -> list[AstraRank]:
        """Run all ranks from the beginning to their ends."""
        context = self._context(RingMeetings(self._queue, self.wires).machine)
        ranks = self._traces.of_ranks(self._every_rank.tolist())
        return self._run([AstraRank(trace, context, self._timers(trace)) for trace in ranks])

    def continued(self, alike_ranks: list[AstraRank]) -> list[AstraRank]:
        """Run all ranks to their ends, each from the state of the rank that represents it in
        ``alike_ranks``.
        """
        context = self._context(RingMeetings(self._queue, self.wires).machine)
        traces = self._traces.of_ranks(self._every_rank.tolist())
        ranks = [
            before.continued(trace, context, self._timers(trace))
            for before, trace in zip(alike_ranks, traces, strict=True)
        ]
        self._queue.run()
        return ranks

    def finished(self, ranks: list[AstraRank], kinds: IntArray | None = None) -> AstraRun | None:
        """Return the finished run; None if a rank has not finished. ``kinds`` is the class of each rank
        (None: all ranks were run).
        """
        if any(rank.ended < len(rank.trace.trace) for rank in ranks) or self.mailbox.unreceived():
            return None
        return AstraRun([rank.result() for rank in ranks], self._every_rank if kinds is None else kinds)

    def _context(self, machines: PhaseMachineFactory) -> RunContext:
        return RunContext(
            queue=self._queue,
            mailbox=self.mailbox,
            memory=RemoteMemory(self._options.memory),
            planner=self._planner,
            queues_per_dim=self._options.queues_per_dim,
            machines=machines,
        )

    def _timers(self, trace: RankTrace) -> WatchedTimers:
        timers = WatchedTimers(self._queue)
        self.mailbox.watch(trace.rank, timers)
        return timers

    def _run(self, ranks: list[AstraRank]) -> list[AstraRank]:
        for rank in ranks:
            rank.begin()
        self._queue.run()
        return ranks


class _ClassMailbox(Mailbox):
    """Mailbox in which all ranks of a class have the same address, because only one rank of each class is
    run.
    """

    __slots__ = ("_kinds", "_watched")

    def __init__(self, network: MessageNetwork, queue: EventQueue, rank_kinds: IntArray) -> None:
        super().__init__(network, queue)
        self._kinds: list[int] = rank_kinds.tolist()
        self._watched: dict[int, WatchedTimers] = {}

    def watch(self, rank: int, timers: WatchedTimers) -> None:
        """Report messages from and to the class of ``rank`` to its timers."""
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


class _Lockstep(WatchedPhase):
    """Phase of a collective whose ranks all start at the same time and behave alike, so that one rank is
    simulated.
    """

    __slots__ = ("_lead_ns",)

    def __init__(self, queue: EventQueue, start: PhaseStart, time: PhaseTime) -> None:
        super().__init__(queue, start, time.delays_ns)
        self._lead_ns = time.lead_ns

    def start(self) -> None:
        """Start the phase, and schedule the arrival of its last packet."""
        self.begin()
        self.arrive_at(self._queue.now_ns + self._lead_ns)
