"""Timers and phases of ranks whose collectives are simulated without their messages.

Ranks affect each other only through the times of messages. The order of events of one rank at the same time
still matters: they run in the order in which they were scheduled. If this order is unknown,
:class:`Ambiguous` is raised.

The ranks of a ring may start at different times. Without congestion, the times of all messages follow from
the starts, and no rank ends before the last one has started. So the messages are computed when the last rank
starts.
"""

from __future__ import annotations

from hespas.simulator.astra.events import Callback, EventQueue, Timers
from hespas.simulator.astra.network import UnawareNetwork
from hespas.simulator.astra.phases import Ambiguous, PhaseMachine, PhaseStart, RingTimes

__all__ = ["RingMeetings", "WatchedPhase", "WatchedTimers"]


class WatchedTimers(Timers):
    """Timers of one rank that raise :class:`Ambiguous` if two events have the same time and an unknown
    order.
    """

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
        """Schedule a callback after a delay."""
        self._note_end(delay_ns, None)
        super().after(delay_ns, callback, argument)

    def end_after(self, delay_ns: int, callback: Callback, argument: object, rest: tuple[int, ...]) -> None:
        """Set the last timer of a phase. ``rest`` lists the remaining queues of its chunk."""
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
        """Record the arrival of a message from or to this rank, which was sent at ``entered_ns``."""
        self._note_event(entered_ns, is_arrival=True)

    def _note_event(self, entered_ns: int, *, is_arrival: bool) -> None:
        """Record an event at the current time. Raise :class:`Ambiguous` if its order relative to other events
        of this time is unknown.

        ``entered_ns`` is the time at which the event was scheduled. The order is unknown if another event was
        scheduled at the same time. It is also unknown for an arrival while a collective runs whose timers are
        not simulated. ``is_arrival`` is True if a message arrives.
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
    """Return True if two ends at the same time may come in either order.

    This holds for ends of chunks that have the same remaining phases, or that enter different queues.
    ``None`` is the end of a node, whose order relative to the end of a collective matters.
    """
    if one is None or other is None:
        return one == other or bool(one or other)
    return one == other or not one or not other or one[0] != other[0]


class WatchedPhase:
    """Phase on one rank whose messages are not simulated. The last packet arrives; then its timers run one
    after the other.
    """

    __slots__ = ("_delays_ns", "_queue", "_start", "_timers")

    def __init__(self, queue: EventQueue, start: PhaseStart, delays_ns: tuple[int, ...]) -> None:
        assert isinstance(start.timers, WatchedTimers), "the ranks of the run have watched timers"
        self._queue, self._start, self._delays_ns, self._timers = queue, start, delays_ns, start.timers

    def begin(self) -> None:
        """Start the phase now."""
        self._timers.begin_phase()

    def arrive_at(self, time_ns: int) -> None:
        """Schedule the arrival of the last packet."""
        self._queue.enter(time_ns, self._wait, 0)

    def _wait(self, step: object) -> None:
        assert isinstance(step, int), "entered with the number of its delay"
        delays_ns = self._delays_ns
        if step == len(delays_ns):
            self._timers.end_phase()
            self._start.done()
        elif step == len(delays_ns) - 1:
            self._timers.end_after(delays_ns[step], self._wait, step + 1, self._start.rest)
        else:
            self._timers.after(delays_ns[step], self._wait, step + 1)


class RingMeetings:
    """Rings whose ranks start a collective phase at different times. Results for patterns of start times are
    cached.
    """

    def __init__(self, queue: EventQueue, network: UnawareNetwork) -> None:
        self._queue, self._network = queue, network
        self._begun: dict[tuple[object, ...], list[_RingMember]] = {}
        self._known: dict[tuple[object, ...], list[int]] = {}
        self._links: dict[tuple[object, ...], tuple[int, ...]] = {}

    def machine(self, start: PhaseStart) -> PhaseMachine:
        """Return the state machine of a phase. Raises :class:`Ambiguous` if its algorithm is not a ring."""
        if start.plan.algorithm.family != "ring":
            raise Ambiguous
        return _RingMember(self._queue, start, self)

    def join(self, member: _RingMember) -> None:
        """Add a rank of the ring that starts now. When the last rank is added, compute the arrivals of all
        ranks.
        """
        start = member.start_of
        key = (start.tag, start.plan, start.in_group, start.ring[0], start.is_clockwise)
        members = self._begun.setdefault(key, [])
        members.append(member)
        if len(members) < start.plan.ranks:
            return
        del self._begun[key]
        members.sort(key=lambda entry: entry.start_of.position)
        if not start.is_clockwise:
            members.reverse()
        ring = start.ring if start.is_clockwise else start.ring[::-1]
        wires = (start.plan, start.in_group, ring if start.in_group else ring[0], start.is_clockwise)
        links = self._links.get(wires)
        if links is None:
            size = RingTimes.of(start).size_bytes
            links = self._links[wires] = tuple(
                self._network.delay_ns(before, rank, size)
                for before, rank in zip((ring[-1], *ring[:-1]), ring, strict=True)
            )
        if not all(links):
            raise Ambiguous
        base_ns = members[0].started_ns
        starts = tuple(entry.started_ns - base_ns for entry in members)
        times = member.times
        pattern = (times, links, starts)
        arrivals = self._known.get(pattern)
        if arrivals is None:
            if len(set(starts)) == len(set(links)) == 1:
                arrivals = [times.together(links[0]).lead_ns] * len(members)
            else:
                arrivals = times.arrivals(starts, links)
            self._known[pattern] = arrivals
        for entry, arrival_ns in zip(members, arrivals, strict=True):
            entry.arrive_at(base_ns + arrival_ns)


class _RingMember(WatchedPhase):
    """Rank of a ring whose ranks start at different times."""

    __slots__ = ("_meetings", "start_of", "started_ns", "times")

    def __init__(self, queue: EventQueue, start: PhaseStart, meetings: RingMeetings) -> None:
        self.times = RingTimes.of(start)
        super().__init__(queue, start, self.times.delays_ns)
        self.start_of, self._meetings, self.started_ns = start, meetings, -1

    def start(self) -> None:
        """Register the rank at its ring, and wait for the other ranks."""
        self.begin()
        self.started_ns = self._queue.now_ns
        self._meetings.join(self)
