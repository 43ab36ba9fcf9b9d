"""Rings whose ranks start at different times, without their messages.

Without congestion, the times of all messages of a ring follow from the starts of its ranks, and no rank ends
before the last one has started. So the last rank that starts determines when each rank has its last message.
"""

from __future__ import annotations

from hespas.simulator.astra.events import EventQueue
from hespas.simulator.astra.network import UnawareNetwork
from hespas.simulator.astra.phases import Ambiguous, PhaseMachine, PhaseStart, RingTimes
from hespas.simulator.astra.plans import PhasePlan
from hespas.simulator.astra.watched import WatchedPhase

__all__ = ["RingMeetings"]


class RingMeetings:
    """Rings of a run that have begun, and the patterns of starts that were computed."""

    def __init__(self, queue: EventQueue, network: UnawareNetwork) -> None:
        self._queue, self._network = queue, network
        self._begun: dict[tuple[object, ...], list[_RingMember]] = {}
        self._known: dict[tuple[object, ...], list[int]] = {}
        self._links: dict[tuple[object, ...], tuple[int, ...]] = {}

    def machine(self, start: PhaseStart) -> PhaseMachine:
        """Return the machine of a phase. Raises :class:`Ambiguous` for other algorithms than rings."""
        if start.plan.algorithm.family != "ring":
            raise Ambiguous
        return _RingMember(self._queue, start, self)

    def join(self, member: _RingMember) -> None:
        """Add a rank that starts now; the last one to start sets the arrivals of all."""
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
        links = self._links_of(start)
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

    def _links_of(self, start: PhaseStart) -> tuple[int, ...]:
        """Return the time of a message to each rank from the rank before it [ns], in the order of sending."""
        ring = start.ring if start.is_clockwise else start.ring[::-1]
        plan: PhasePlan = start.plan
        key = (plan, start.in_group, ring if start.in_group else ring[0], start.is_clockwise)
        links = self._links.get(key)
        if links is None:
            size = RingTimes.of(start).size_bytes
            links = self._links[key] = tuple(
                self._network.delay_ns(before, rank, size)
                for before, rank in zip((ring[-1], *ring[:-1]), ring, strict=True)
            )
        if not all(links):
            raise Ambiguous
        return links


class _RingMember(WatchedPhase):
    """Rank of a ring whose ranks start at different times."""

    __slots__ = ("_meetings", "start_of", "started_ns", "times")

    def __init__(self, queue: EventQueue, start: PhaseStart, meetings: RingMeetings) -> None:
        self.times = RingTimes.of(start)
        super().__init__(queue, start, self.times.delays_ns)
        self.start_of, self._meetings, self.started_ns = start, meetings, -1

    def start(self) -> None:
        """Wait for the other ranks."""
        self.begin()
        self.started_ns = self._queue.now_ns
        self._meetings.join(self)
