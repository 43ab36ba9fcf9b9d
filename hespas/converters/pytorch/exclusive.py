"""How long each operation of a thread ran itself: its time without that of the operations in it."""

from __future__ import annotations

import numpy as np

from hespas.graph.columns import IntArray

__all__ = ["exclusive_ns"]


def exclusive_ns(key: IntArray, start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """At every moment of a thread ``key`` the operation that started last and still runs owns the time.

    The sum over a thread is the length of the union of its operations, to the ns, also where they overlap
    without nesting. O(n log n).
    """
    order = np.lexsort((-end_ns, start_ns, key))
    keys: list[int] = key[order].tolist()
    starts: list[int] = start_ns[order].tolist()
    ends: list[int] = end_ns[order].tolist()
    own = [0] * len(keys)
    stack: list[int] = []
    now, thread = 0, -1
    for place, start in enumerate(starts):
        if keys[place] != thread:
            _drain(stack, ends, own, now, None)
            thread = keys[place]
            now = start
        now = _drain(stack, ends, own, now, start)
        stack.append(place)
    _drain(stack, ends, own, now, None)
    found = np.zeros(len(keys), np.int64)
    found[order] = own
    return found


def _drain(stack: list[int], ends: list[int], own: list[int], now: int, until: int | None) -> int:
    """Give the time from ``now`` to ``until`` (None: the end) to what runs; returns where it got to."""
    while stack:
        top = stack[-1]
        end = ends[top]
        if until is not None and end > until:
            own[top] += max(until - now, 0)
            return max(now, until)
        own[top] += max(end - now, 0)
        now = max(now, end)
        stack.pop()
    return now if until is None else max(now, until)
