"""One rank: which nodes are ready, which run, and what is issued when one of them ends.

A rank runs one CPU operation, one computation of the device and one communication at a time; receives are not
counted. Whenever a node ends, ready nodes are looked at in ascending order of their ids, and each whose slot
is free is issued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

from hespas.graph import CollectiveKind
from hespas.graph.errors import UnsupportedError
from hespas.simulator.astra.events import Timers
from hespas.simulator.astra.plans import CollectivePlan
from hespas.simulator.astra.queues import GROUP_STREAMS, RankQueues
from hespas.simulator.astra.runs import NEVER, RankRun
from hespas.simulator.astra.shared import Shared
from hespas.simulator.astra.traces import Action, RankTrace, Slot

__all__ = ["Issued", "Rank"]

_SLOTS = 3
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective that was issued: its plan, and the numbers of its group (0: all) and first chunk."""

    place: int
    plan: CollectivePlan
    group: int
    first_stream: int


class Rank:
    """The state of one rank; times are ``NEVER`` until they happen, ``cause`` is what let a node start."""

    __slots__ = (
        "_busy",
        "_counters",
        "_flying",
        "_ready",
        "_shared",
        "_timers",
        "_trigger",
        "_waiting",
        "cause",
        "end_ns",
        "ended",
        "finish_ns",
        "issued",
        "queues",
        "start_ns",
        "trace",
    )  # fmt: skip

    def __init__(self, trace: RankTrace, shared: Shared, timers: Timers | None = None) -> None:
        self.trace, self._shared = trace, shared
        self._timers = timers or Timers(shared.queue)
        self.queues = RankQueues(trace.rank, shared, self._timers)
        nodes = len(trace.trace)
        self._waiting = trace.trace.waiting.copy()
        self._ready: tuple[list[int], ...] = ([], [], [], [])
        self._busy = [False] * (_SLOTS + 1)
        self._flying = 0
        self._counters: dict[int, int] = {}
        self._trigger = NEVER
        self.ended = 0
        self.issued: list[Issued] = []
        self.start_ns, self.end_ns, self.cause = [NEVER] * nodes, [NEVER] * nodes, [NEVER] * nodes
        self.finish_ns = NEVER

    def begin(self) -> None:
        """Issue what waits for nothing."""
        slot = self.trace.trace.slot
        for place, waiting in enumerate(self._waiting):
            if not waiting:
                self._ready[slot[place]].append(place)  # ascending, and so a heap
        self._issue_ready()
        if self._shared.queue.is_due:
            shown = [self.trace.trace.label(place) for place in self.flying()[:_SHOWN]]
            raise UnsupportedError(
                f"rank {self.trace.rank} begins with an event of 0 ns ({', '.join(shown)}), on which "
                "ASTRA-sim's event queue aborts", code="ET035",
                hint="let a computation of 1 ns or more come before, or raise the latency or the "
                "endpoint-delay that is 0",
            )  # fmt: skip
        self._look_finished(is_caught=False)

    def result(self) -> RankRun:
        """When its nodes ran."""
        return RankRun(self.trace, self.start_ns, self.end_ns, self.cause, self.finish_ns)

    def ready(self) -> list[int]:
        """Nodes that wait for nothing but a slot, ascending."""
        return sorted(place for heap in self._ready for place in heap)

    def flying(self) -> list[int]:
        """Nodes that were issued and have not ended, ascending."""
        return [
            place
            for place, start in enumerate(self.start_ns)
            if start != NEVER and self.end_ns[place] == NEVER
        ]

    def _end(self, place: int, *, is_caught: bool = True) -> None:
        """End a node and issue what waited for it and for its slot. ``is_caught`` is True where a timer of
        the rank ends it: ASTRA-sim goes on after an error there.
        """
        self._trigger = place
        self._close(place)
        self._issue_ready()
        self._look_finished(is_caught=is_caught)

    def _close(self, place: int) -> None:
        trace = self.trace.trace
        self._busy[trace.slot[place]] = False
        self._flying -= 1
        self.ended += 1
        self.end_ns[place] = self._shared.queue.now_ns
        waiting, targets = self._waiting, trace.targets
        for at in range(trace.bounds[place], trace.bounds[place + 1]):
            target = targets[at]
            waiting[target] -= 1
            if not waiting[target]:
                heappush(self._ready[trace.slot[target]], target)

    def _issue_ready(self) -> None:
        """Issue ready nodes in ascending order, each if its slot is free; those that become ready meanwhile
        wait for the next node that ends.
        """
        ready, busy = self._ready, self._busy
        skipped: list[int] = []
        while True:
            first, chosen = NEVER, NEVER
            for slot, heap in enumerate(ready):
                if heap and not busy[slot] and (first == NEVER or heap[0] < first):
                    first, chosen = heap[0], slot
            if chosen == NEVER:
                break
            heappop(ready[chosen])
            if self.trace.trace.action[first] == Action.SKIP:
                self.start_ns[first] = self._shared.queue.now_ns
                skipped.append(first)
            else:
                self._issue(first, chosen)
        for place in skipped:
            self._flying += 1
            busy_before = self._busy[self.trace.trace.slot[place]]
            self._close(place)
            self._busy[self.trace.trace.slot[place]] = busy_before

    def _issue(self, place: int, slot: int) -> None:
        shared, trace = self._shared, self.trace.trace
        self._busy[slot] = slot != Slot.RECEIVE
        self._flying += 1
        self.start_ns[place] = shared.queue.now_ns
        self.cause[place] = self._trigger
        action = trace.action[place]
        if action == Action.WAIT:
            self._timers.after(trace.delay_ns[place], self._end_any, place)
        elif action == Action.COLLECTIVE:
            self._open(place)
        elif action == Action.MEMORY:
            size = trace.memory_bytes[place]
            shared.memory.access(self.trace.rank, self._timers, size, self._end_any, place)
        else:
            message, peer, rank = trace.messages[place], self.trace.peers[place], self.trace.rank
            if action == Action.SEND:
                shared.mailbox.send((message.tag, rank, peer, message.size), self._end_message, place)
            else:
                shared.mailbox.receive((message.tag, peer, rank, message.size), self._end_message, place)

    def _end_any(self, place: object) -> None:
        assert isinstance(place, int), "callbacks of nodes carry their place"
        self._end(place)

    def _end_message(self, place: object) -> None:
        assert isinstance(place, int), "callbacks of nodes carry their place"
        self._end(place, is_caught=False)

    def _open(self, place: int) -> None:
        """Start a collective. Numbers of chunks are those of the group, or of the rank, which also counts the
        chunks of groups.
        """
        trace = self.trace.trace
        stated = trace.collectives[place]
        if stated.kind is CollectiveKind.BROADCAST:
            self._timers.after(trace.delay_ns[place], self._end_any, place)
            return
        number, group = self.trace.groups.get(stated.row, (0, None))
        plan = self._shared.planner.plan(stated.kind, stated.size, group if number else None, stated.involved)
        base = number * GROUP_STREAMS
        first = base + self._counters.get(number, 0)
        for counted in {0, number}:
            self._counters[counted] = self._counters.get(counted, 0) + plan.streams
        self.issued.append(Issued(place, plan, number, first))
        done: Callable[[], None] = partial(self._end, place)
        self.queues.open(plan, first, done)

    def _look_finished(self, *, is_caught: bool) -> None:
        """Note the finish of the rank. Raises ``UnsupportedError`` where ASTRA-sim ends all ranks then."""
        if self.finish_ns != NEVER or self._flying or any(self._ready):
            return
        self.finish_ns = self._shared.queue.now_ns
        if not is_caught and not self.trace.trace.is_summed:
            raise UnsupportedError(
                f"rank {self.trace.rank} ends with a message and has nodes of the CPU, of remote memory or "
                "of no type: ASTRA-sim cannot sum up their times and ends all ranks", code="ET034",
                hint="let a computation of the rank come last",
            )  # fmt: skip
