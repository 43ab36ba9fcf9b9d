"""Which event of a line encloses which, and what time is left to each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Nesting", "nest"]


@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """Per event of a line: the innermost host operation and the innermost device event around it (-1: none).

    ``exclusive_ps`` is the duration without that of the device events inside; for host operations it is the
    duration. ``overlapping`` counts device events that reach beyond the end of one they start in.
    """

    host: IntArray
    device: IntArray
    exclusive_ps: IntArray
    overlapping: int


def nest(start_ps: IntArray, duration_ps: IntArray, is_device: BoolArray) -> Nesting:
    """Nest the events of one line by containment. O(n log n); the loop is over events in order."""
    count = len(start_ps)
    order = np.lexsort((-duration_ps, start_ps))
    start, end = start_ps[order], (start_ps + duration_ps)[order]
    nothing = np.full(count, -1, np.int64)
    if count < 2 or bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all()):
        return Nesting(nothing, nothing, duration_ps, 0)
    hosts, devices, overlapping = _sweep(start.tolist(), end.tolist(), is_device[order].tolist())
    host, device = nothing.copy(), nothing.copy()
    for into, found in ((host, np.array(hosts)), (device, np.array(devices))):
        into[order] = np.where(found >= 0, order[found], -1)
    exclusive_ps = duration_ps.copy()
    inside = np.flatnonzero(is_device & (device >= 0))
    np.subtract.at(exclusive_ps, device[inside], duration_ps[inside])
    return Nesting(host, device, np.maximum(exclusive_ps, 0), overlapping)


def _sweep(start: list[int], end: list[int], is_device: list[bool]) -> tuple[list[int], list[int], int]:
    """Enclosing events by place in time order."""
    count = len(start)
    hosts, devices = [-1] * count, [-1] * count
    stack: list[int] = []
    overlapping = 0
    for place in range(count):
        while stack and end[stack[-1]] <= start[place]:
            stack.pop()
        while stack and end[stack[-1]] < end[place]:
            overlapping += is_device[stack[-1]] and is_device[place]
            stack.pop()
        if stack:
            around = stack[-1]
            hosts[place] = hosts[around] if is_device[around] else around
            devices[place] = around if is_device[around] else devices[around]
        stack.append(place)
    return hosts, devices, overlapping
