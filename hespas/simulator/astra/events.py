"""ASTRA-sim's event queue: callbacks in order of time [ns], and of entry at equal times."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

__all__ = ["Callback", "EventQueue", "Timers"]

Callback = Callable[[Any], None]
"""Function to call; its argument is entered with it."""


class EventQueue:
    """Callbacks in order of (time, entry)."""

    __slots__ = ("_at", "_times", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._times: list[int] = []
        self._at: dict[int, list[tuple[Callback, object]]] = {}

    def enter(self, time_ns: int, callback: Callback, argument: object) -> None:
        """Schedule a callback, now or later."""
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
        """Run all callbacks, including those entered meanwhile."""
        times, at = self._times, self._at
        while times:
            now_ns = self.now_ns = heappop(times)
            for callback, argument in at[now_ns]:  # grows by callbacks entered for the current time
                callback(argument)
            del at[now_ns]


class Timers:
    """Timers of one rank: timers of equal time share one event, in the order of the first entry.

    A timer without delay that is set while this event runs still runs within it.
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
