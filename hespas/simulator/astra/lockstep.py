"""Ranks that must behave alike are run once.

The ranks of a collective that start it at the same time and see the same network from each place of it end it
at the same time, and a rank whose messages go to ranks like those of another behaves like that one. Which
ranks are alike, structure alone tells (:mod:`hespas.simulator.astra.symmetry`); one of each is run, with
phases of collectives that take the time which one rank tells (:mod:`hespas.simulator.astra.phase_times`).

Congestion is left to a run of all ranks, but for rings in which no two messages meet on a link.

Without congestion, ranks touch each other in nothing but times of messages. What is left is the order of
events of one moment on one rank: they run in the order in which they were entered. Where two were entered at
the same moment too, and one of them by what is not run here, nothing is claimed and all ranks are run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hespas.graph.columns import IntArray
from hespas.simulator.astra.events import Callback, EventQueue, Timers
from hespas.simulator.astra.mailbox import Channel, Mailbox
from hespas.simulator.astra.memory import RemoteMemory
from hespas.simulator.astra.network import EmptyNetwork, Network, UnawareNetwork
from hespas.simulator.astra.options import AstraOptions
from hespas.simulator.astra.phase_times import Ambiguous, PhaseTime, PhaseTimes
from hespas.simulator.astra.phases import Machine, PhaseStart
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.ranks import Rank
from hespas.simulator.astra.runs import Run
from hespas.simulator.astra.shared import Shared
from hespas.simulator.astra.symmetry import alike
from hespas.simulator.astra.traces import JobTraces

__all__ = ["run_alike"]


def run_alike(traces: JobTraces, options: AstraOptions) -> Run | None:
    """The run of a job by one rank of each kind. None where ranks are not proved alike, where the order of
    events of one moment would decide, and where a rank does not finish: then all ranks are to be run.
    """
    queue = EventQueue()
    planner = Planner(options.system, options.network)
    wires = (EmptyNetwork if options.backend == "aware" else UnawareNetwork)(options.network, queue)
    kinds = alike(traces, options, planner, wires)
    if kinds is None:
        return None
    first = np.unique(kinds, return_index=True)[1]
    mailbox = _KindMailbox(wires, queue, kinds)
    shared = Shared(
        queue=queue,
        mailbox=mailbox,
        memory=RemoteMemory(options.memory),
        planner=planner,
        queues_per_dim=options.queues_per_dim,
        machines=_Lockstep.maker(queue, PhaseTimes(wires)),
    )
    ranks: list[Rank] = []
    for trace in traces.of_ranks(first.tolist()):
        timers = _WatchedTimers(queue)
        mailbox.watch(trace.rank, timers)
        ranks.append(Rank(trace, shared, timers))
    try:
        for rank in ranks:
            rank.begin()
        queue.run()
    except Ambiguous:
        return None
    if any(rank.ended < len(rank.trace.trace) for rank in ranks) or mailbox.unreceived():
        return None
    return Run([rank.result() for rank in ranks], kinds)


class _WatchedTimers(Timers):
    """Timers that tell where the order of what happens to their rank at one moment is not known."""

    __slots__ = ("_active", "_active_ns", "_entered", "_first", "_has_arrival", "_now_ns", "_phases")

    def __init__(self, queue: EventQueue) -> None:
        super().__init__(queue)
        self._first: dict[int, int] = {}
        self._phases: dict[tuple[int, int], list[tuple[int, ...] | None]] = {}
        self._entered: list[int] = []
        self._has_arrival = False
        self._active, self._active_ns, self._now_ns = 0, -1, -1

    def begin_phase(self) -> None:
        """A phase of a collective runs on this rank."""
        self._active += 1

    def end_phase(self) -> None:
        """It does not any more."""
        self._active -= 1
        self._active_ns = self._queue.now_ns

    def after(self, delay_ns: int, callback: Callback, argument: object) -> None:
        self._note_end(delay_ns, None)
        super().after(delay_ns, callback, argument)

    def end_after(self, delay_ns: int, callback: Callback, argument: object, rest: tuple[int, ...]) -> None:
        """The last timer of a phase; ``rest`` are the queues its chunk goes through then."""
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
        """A message from or to this rank arrives, which was sent at ``entered_ns``."""
        self._note_event(entered_ns, is_arrival=True)

    def _note_event(self, entered_ns: int, *, is_arrival: bool) -> None:
        """Events of a moment have an order where they were entered at different times, and where no timers
        of a collective, which would be among them, are left out.
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
    """Whether two ends at one moment may come in either order: those of chunks that do the same from there,
    or enter different queues. ``None`` is a node of the rank, which the end of a collective may not pass.
    """
    if one is None or other is None:
        return one == other or bool(one or other)
    return one == other or not one or not other or one[0] != other[0]


class _KindMailbox(Mailbox):
    """Messages between kinds of ranks."""

    __slots__ = ("_kinds", "_watched")

    def __init__(self, network: Network, queue: EventQueue, kinds: IntArray) -> None:
        super().__init__(network, queue)
        self._kinds: list[int] = kinds.tolist()
        self._watched: dict[int, _WatchedTimers] = {}

    def watch(self, rank: int, timers: _WatchedTimers) -> None:
        """Tell the timers of a kind's rank what arrives."""
        self._watched[self._kinds[rank]] = timers

    def _channel(self, key: tuple[int, int, int, int]) -> Channel:
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
    """A phase whose ranks all do the same."""

    __slots__ = ("_queue", "_start", "_time", "_timers")

    def __init__(self, queue: EventQueue, start: PhaseStart, time: PhaseTime) -> None:
        assert isinstance(start.timers, _WatchedTimers), "ranks of a kind have watched timers"
        self._queue, self._start, self._time, self._timers = queue, start, time, start.timers

    @classmethod
    def maker(cls, queue: EventQueue, times: PhaseTimes) -> Callable[[PhaseStart], Machine]:
        """What makes the machine of a phase."""
        return lambda start: cls(queue, start, times.of(start))

    def start(self) -> None:
        """Wait until the last packet is in."""
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
