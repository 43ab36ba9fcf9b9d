"""How long a phase of a collective takes where all its ranks do the same at the same time.

Then what a rank sends is, a place further, what it receives: one rank is enough, whose messages come back to
it. Without congestion no other message matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hespas.graph import CollectiveKind
from hespas.simulator.astra.events import Callback, EventQueue, Timers
from hespas.simulator.astra.mailbox import Mailbox
from hespas.simulator.astra.network import UnawareNetwork
from hespas.simulator.astra.phases import PhaseStart, machine_of
from hespas.simulator.astra.plans import PhasePlan

__all__ = ["Ambiguous", "PhaseTime", "PhaseTimes"]


class Ambiguous(Exception):  # noqa: N818 # no error: all ranks are run then
    """The order of two events of one moment decides, and one rank alone does not tell it."""


class PhaseTime(NamedTuple):
    """``lead_ns`` after its start, the last packet of a phase comes in; the phase ends when the timers that
    this starts, one after the other, have run.
    """

    lead_ns: int
    delays_ns: tuple[int, ...]


@dataclass(slots=True)
class PhaseTimes:
    """Times of phases on one network; equal phases are looked at once."""

    network: UnawareNetwork
    _found: dict[tuple[PhasePlan, int], PhaseTime] = field(
        default_factory=dict[tuple[PhasePlan, int], PhaseTime]
    )

    def of(self, start: PhaseStart) -> PhaseTime:
        """The time of a phase. Raises :class:`Ambiguous` where one rank does not tell."""
        key = start.plan, id(start.ring) if start.in_group else 0  # lists of groups live as long as the run
        found = self._found.get(key)
        if found is None:
            ring = start.plan.algorithm.family == "ring"
            found = self._found[key] = self._of_ring(start) if ring else _run(start, self.network)
        return found

    def _of_ring(self, start: PhaseStart) -> PhaseTime:
        """Of the messages that come in, those of a reduce-scatter, and the first half of those of an
        all-reduce, are reduced before they go on.
        """
        plan, delay_ns = start.plan, start.delay_ns
        peers = plan.ranks - 1
        messages = {
            CollectiveKind.ALL_REDUCE: 2 * peers,
            CollectiveKind.ALL_TO_ALL: plan.ranks * peers // 2,
        }.get(plan.kind, peers)
        size = plan.size if plan.kind is CollectiveKind.ALL_GATHER else plan.size // plan.ranks
        time_ns = self.network.delay_ns(start.rank, start.ring[(start.place + 1) % plan.ranks], size)
        if not time_ns:
            raise Ambiguous
        reduces = plan.kind in {CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER}
        reduction_ns = start.reduction_ns(size) if reduces else 0
        at_end = plan.kind is CollectiveKind.REDUCE_SCATTER
        before = (peers - at_end) * reduction_ns
        lead_ns = messages * (delay_ns + time_ns) + before
        return PhaseTime(lead_ns, (delay_ns, reduction_ns) if at_end else (delay_ns,))


def _run(start: PhaseStart, network: UnawareNetwork) -> PhaseTime:
    """Run the machine of the phase on one rank."""
    queue = EventQueue()
    timers = _TracedTimers(queue)
    gated = start.plan.algorithm.family == "direct" and start.plan.kind is CollectiveKind.ALL_REDUCE
    ends: list[PhaseTime] = []
    alone = replace(
        start,
        timers=timers,
        mailbox=_Echo(network, queue, timers, is_gated=gated),
        done=lambda: ends.append(timers.since),
    )
    machine_of(alone).start()
    queue.run()
    if len(ends) != 1:
        raise Ambiguous
    return ends[0]


class _TracedTimers(Timers):
    """Timers that know what they go back to: ``since`` is the arrival, and the delays behind it."""

    __slots__ = ("ran_ns", "since")

    def __init__(self, queue: EventQueue) -> None:
        super().__init__(queue)
        self.since = PhaseTime(0, ())
        self.ran_ns = -1

    def after(self, delay_ns: int, callback: Callback, argument: object) -> None:
        lead_ns, delays_ns = self.since
        behind = PhaseTime(lead_ns, (*delays_ns, delay_ns))
        super().after(delay_ns, self._resume, (behind, callback, argument))

    def _resume(self, waiting: tuple[PhaseTime, Callback, object]) -> None:
        self.since, callback, argument = waiting
        self.ran_ns = self._queue.now_ns
        callback(argument)


class _Echo(Mailbox):
    """What is sent comes back: the receive that a rank posts with a send ends when that send would."""

    __slots__ = ("_arrived_ns", "_gated", "_sent_ns", "_timers", "_wires")

    def __init__(
        self, network: UnawareNetwork, queue: EventQueue, timers: _TracedTimers, *, is_gated: bool
    ) -> None:
        super().__init__(network, queue)
        self._wires, self._timers, self._gated = network, timers, is_gated
        self._sent_ns = self._arrived_ns = -1

    def send(
        self, key: tuple[int, int, int, int], sent: Callback | None = None, argument: object = None
    ) -> None:
        self._sent_ns = self._wires.delay_ns(key[1], key[2], key[3])
        if not self._sent_ns:
            raise Ambiguous

    def receive(self, key: tuple[int, int, int, int], received: Callback, argument: object) -> None:
        self._check(self._arrived_ns)
        self._queue.enter(self._queue.now_ns + self._sent_ns, self._come, (received, argument))

    def _come(self, waiting: tuple[Callback, object]) -> None:
        received, argument = waiting
        self._arrived_ns = self._queue.now_ns
        self._check(self._timers.ran_ns)
        self._timers.since = PhaseTime(self._queue.now_ns, ())
        received(argument)

    def _check(self, other_ns: int) -> None:
        """Where a second half waits for the first, a token and an arrival of one moment are in an order."""
        if self._gated and other_ns == self._queue.now_ns:
            raise Ambiguous
