"""Intervals of time as columns of starts and ends."""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from hespas.graph.columns import FloatArray, IntArray

__all__ = ["layers_of", "united"]


def united(start_ns: FloatArray, end_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The same time as disjoint intervals, sorted. O(intervals log intervals)."""
    order = np.argsort(start_ns, kind="stable")
    start, reached = start_ns[order], np.maximum.accumulate(end_ns[order])
    opens = np.append(True, start[1:] > reached[:-1])[: len(start)]
    return start[opens], reached[np.append(opens[1:], True)[: len(start)]]


def layers_of(start_ns: FloatArray, end_ns: FloatArray) -> IntArray:
    """For each interval the first layer that is free when it starts, in order of starts: intervals of a layer
    do not overlap. O(intervals log intervals).
    """
    busy: list[tuple[float, int]] = []
    free: list[int] = []
    used = 0
    layer = np.zeros(len(start_ns), np.int64)
    order = np.argsort(start_ns, kind="stable")
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            place = heappop(free)
        else:
            place, used = used, used + 1
        heappush(busy, (end, place))
        layer[row] = place
    return layer
