"""ASTRA-sim's order of events and its issue rule.

Callbacks run in order of time [ns]. Callbacks of the same time run in the order in which they were scheduled
(entered). A rank issues its ready nodes in ascending order of ids, each if its slot is free. It runs one CPU
operation, one device computation and one communication at a time; receives do not occupy a slot. Nodes that
become ready while other nodes are issued wait until the next node ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any

__all__ = ["NEVER", "Callback", "EventQueue", "IssuingRank", "Slot", "Timers"]

Callback = Callable[[Any], None]
"""Function to call; its argument is entered with it."""


class EventQueue:
    """Event queue of a simulation: callbacks, ordered by time and then by the order of entry."""

    __slots__ = ("_at", "_times", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._times: list[int] = []
        self._at: dict[int, list[tuple[Callback, object]]] = {}

    def enter(self, time_ns: int, callback: Callback, argument: object) -> None:
        """Schedule a callback for ``time_ns``, which is now or later."""
        entered = self._at.get(time_ns)
        if entered is None:
            self._at[time_ns] = [(callback, argument)]
            heappush(self._times, time_ns)
        else:
            entered.append((callback, argument))

    @property
    def is_due(self) -> bool:
        """Return True if a callback is scheduled for the current time."""
        return self.now_ns in self._at

    def run(self) -> None:
        """Run all callbacks, including those that are scheduled meanwhile."""
        times, at = self._times, self._at
        while times:
            now_ns = self.now_ns = heappop(times)
            for callback, argument in at[now_ns]:  # grows by callbacks entered for the current time
                callback(argument)
            del at[now_ns]


class Timers:
    """Timers of one rank. Timers that end at the same time share one event in the event queue. Among events
    of that time, it runs in the order in which the first of the timers was set.

    If a callback of this event sets a timer without delay, the timer runs in the same event.
    """

    __slots__ = ("_at", "_queue")

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue
        self._at: dict[int, list[tuple[Callback, object]]] = {}

    def after(self, delay_ns: int, callback: Callback, argument: object) -> None:
        """Schedule a callback after a delay."""
        time_ns = self._queue.now_ns + delay_ns
        waiting = self._at.get(time_ns)
        if waiting is None:
            self._at[time_ns] = [(callback, argument)]
            self._queue.enter(time_ns, self._ring, time_ns)
        else:
            waiting.append((callback, argument))

    def _ring(self, time_ns: int) -> None:
        for callback, argument in self._at[time_ns]:
            callback(argument)
        del self._at[time_ns]


NEVER = -1
"""Time of an event that has not happened, and cause of a node without a cause."""


class Slot(IntEnum):
    """Slot in which a rank runs a node. A rank runs one node at a time in each of the first three slots."""

    CPU = 0
    COMPUTE = 1
    COMMUNICATION = 2
    RECEIVE = 3
    """No resource."""


class IssuingRank:
    """Scheduler of one rank: issues nodes whose dependencies have ended and whose slot is free.

    Nodes are numbered by position, in ascending order of their ids. ``waiting`` is the number of unfinished
    dependencies of each node. The dependents of the node at ``position`` are ``targets[bounds[position] :
    bounds[position + 1]]``. Subclasses define how a node is issued and when it ends.
    """

    __slots__ = ("_bounds", "_busy", "_ready", "_slot", "_targets", "_waiting")

    def __init__(
        self, slot: Sequence[int], waiting: Sequence[int], bounds: Sequence[int], targets: Sequence[int]
    ) -> None:
        self._slot, self._bounds, self._targets = slot, bounds, targets
        self._waiting = list(waiting)
        self._ready: tuple[list[int], ...] = tuple([] for _ in Slot)
        self._busy = [False] * len(Slot)

    def begin(self) -> None:
        """Issue the nodes without dependencies."""
        for position, waiting in enumerate(self._waiting):
            if not waiting:
                self._ready[self._slot[position]].append(position)  # ascending, so it is a heap
        self._issue_ready()

    def _release(self, position: int) -> None:
        """Mark as ready the nodes whose last unfinished dependency was the node that ended."""
        waiting, targets = self._waiting, self._targets
        for at in range(self._bounds[position], self._bounds[position + 1]):
            target = targets[at]
            waiting[target] -= 1
            if not waiting[target]:
                heappush(self._ready[self._slot[target]], target)

    def _issue_ready(self) -> None:
        """Issue ready nodes in ascending order, each if its slot is free."""
        ready, busy = self._ready, self._busy
        while True:
            first, chosen = NEVER, NEVER
            for slot, heap in enumerate(ready):
                if heap and not busy[slot] and (first == NEVER or heap[0] < first):
                    first, chosen = heap[0], slot
            if chosen == NEVER:
                return
            heappop(ready[chosen])
            self._issue(first, chosen)

    def _issue(self, position: int, slot: int) -> None:
        """Start a node; it occupies its slot until a subclass frees the slot."""
        raise NotImplementedError
