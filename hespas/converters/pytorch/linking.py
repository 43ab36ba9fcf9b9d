"""Which operation on the host caused a piece of device work: by correlation, then by time on the thread.

The rules, in order: the correlation id names the launching call of the same trace; the launch stands inside
operations of its own thread, of which the innermost is the cause; where there is no launch record, the
``External id`` names the operation. Work without any of these stays, unlinked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.graph.columns import IntArray, SmallIntArray

__all__ = [
    "LinkedBy",
    "Links",
    "Nesting",
    "exclusive_ns",
    "host_steps_of",
    "link",
    "owner_with_shapes",
    "steps_of",
    "thread_key",
]


class LinkedBy(IntEnum):
    """How a piece of device work found its operation."""

    NOTHING = 0
    CORRELATION = 1
    EXTERNAL_ID = 2


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Per device event: its launch and its innermost host operation (-1: none), and how that was found."""

    launch: IntArray
    host: IntArray
    linked_by: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """Operations of each thread as a forest: ``parent`` encloses (-1: none); ``order`` sorts by thread and
    start, an enclosing operation before those in it.
    """

    parent: IntArray
    order: IntArray
    key: IntArray
    start_ns: IntArray

    @classmethod
    def of(cls, events: Events) -> Nesting:
        """Nest by containment. O(n log n); the one loop is over events in order."""
        key = thread_key(events)
        order = np.lexsort((-events.duration_ns, events.start_ns, key))
        threads: list[int] = key[order].tolist()
        ends: list[int] = events.end_ns[order].tolist()
        starts: list[int] = events.start_ns[order].tolist()
        ends.append(np.iinfo(np.int64).max)  # place -1 encloses all: it is never left
        parents: list[int] = []
        stack = [-1]
        last = None
        for place, (thread, start, end) in enumerate(zip(threads, starts, ends, strict=False)):
            if thread != last:
                stack = [-1]
                last = thread
            while ends[stack[-1]] <= start and ends[stack[-1]] < end:
                stack.pop()
            parents.append(stack[-1])
            stack.append(place)
        found = np.array(parents, np.int64)
        parent = np.full(len(order), -1, np.int64)
        parent[order] = np.where(found >= 0, order[found], -1)
        return cls(parent, order, key[order], events.start_ns[order])

    def innermost(self, events: Events, key: IntArray, at_ns: IntArray) -> IntArray:
        """The innermost event of thread ``key`` that is running ``at_ns``, -1 for none."""
        if not len(self.order):
            return np.full(len(at_ns), -1, np.int64)
        place = _last_started(self, key, at_ns)
        found = np.where(place >= 0, self.order[np.maximum(place, 0)], -1)
        end_ns = events.end_ns
        while True:
            over = (found >= 0) & (end_ns[np.maximum(found, 0)] < at_ns)
            if not over.any():
                return found
            found = np.where(over, self.parent[np.maximum(found, 0)], found)


def thread_key(events: Events) -> IntArray:
    """One number per (process, thread)."""
    return (events.process.astype(np.int64) << 32) | events.thread


def _last_started(nesting: Nesting, key: IntArray, at_ns: IntArray) -> IntArray:
    """The place in order of the last event of the same thread that starts no later."""
    keys, first = np.unique(nesting.key, return_index=True)
    last = np.append(first[1:], len(nesting.key))
    group = np.searchsorted(keys, key)
    known = (group < len(keys)) & (keys[np.minimum(group, len(keys) - 1)] == key)
    found = np.full(len(key), -1, np.int64)
    for number in np.unique(group[known]).tolist():
        rows = np.flatnonzero(known & (group == number))
        begin, end = int(first[number]), int(last[number])
        place = begin + np.searchsorted(nesting.start_ns[begin:end], at_ns[rows], side="right") - 1
        found[rows] = np.where(place >= begin, place, -1)
    return found


def link(trace: KinetoTrace, nesting: Nesting) -> Links:
    """Find the launch and the operation of every device event; ``nesting`` is that of the host's."""
    launch = _matching(trace.launch.correlation, trace.device.correlation)
    at = np.maximum(launch, 0)
    has_launch = launch >= 0
    if len(trace.launch):
        key = thread_key(trace.launch)[at]
        host = np.where(has_launch, nesting.innermost(trace.host, key, trace.launch.start_ns[at]), -1)
    else:
        host = np.full(len(launch), -1, np.int64)
    by_id = _matching(trace.host.external_id, trace.device.external_id)
    fallback = (host < 0) & (by_id >= 0)
    linked_by = np.where(host >= 0, LinkedBy.CORRELATION, LinkedBy.NOTHING).astype(np.uint8)
    linked_by[fallback] = LinkedBy.EXTERNAL_ID
    return Links(launch, np.where(fallback, by_id, host), linked_by)


def _matching(ids: IntArray, wanted: IntArray) -> IntArray:
    """The first row with each wanted id, -1 where there is none or the id is not stated."""
    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    place = np.minimum(np.searchsorted(ordered, wanted), len(ids) - 1)
    return np.where((ordered[place] == wanted) & (wanted >= 0), order[place], -1)


def owner_with_shapes(host: HostEvents, nesting: Nesting, of: IntArray) -> IntArray:
    """From each operation (-1: none) outwards to the first whose input shapes are recorded, -1 for none."""
    found = of.copy()
    if not len(host):
        return found
    while True:
        bare = (found >= 0) & (host.dims_row[np.maximum(found, 0)] == 0)
        if not bare.any():
            return found
        found = np.where(bare, nesting.parent[np.maximum(found, 0)], found)


# How long each operation of a thread ran itself: its time without that of the operations in it.


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


# Which step of the training loop an event is part of: ranges that the profiler names ``ProfilerStep#N``.

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")


def steps_of(trace: KinetoTrace, links: Links) -> SmallIntArray:
    """The number of the step that launched each device event; -1 where none did, or nobody knows."""
    return _during(trace, _when(trace, links))


def host_steps_of(trace: KinetoTrace, start_ns: IntArray) -> SmallIntArray:
    """The number of the step that runs when something of the host starts; -1 for none."""
    return _during(trace, start_ns)


def _during(trace: KinetoTrace, at_ns: IntArray) -> SmallIntArray:
    """The number of the step that runs at each moment, -1 for none."""
    ranges: list[tuple[int, int, int]] = []
    note = trace.annotation
    numbers = {row: _STEP.fullmatch(trace.strings[row]) for row in np.unique(note.name_row).tolist()}
    rows = np.flatnonzero(np.isin(note.name_row, [row for row, found in numbers.items() if found]))
    for row in rows.tolist():
        found = numbers[int(note.name_row[row])]
        if found:
            ranges.append((int(note.start_ns[row]), int(note.end_ns[row]), int(found[1])))
    if not ranges or not len(at_ns):
        return np.full(len(at_ns), -1, np.int32)
    ranges.sort()
    starts = np.array([start for start, _, _ in ranges], np.int64)
    place = np.searchsorted(starts, at_ns, side="right") - 1
    safe = np.maximum(place, 0)
    inside = (place >= 0) & (at_ns <= np.array([end for _, end, _ in ranges], np.int64)[safe])
    return np.where(inside, np.array([number for _, _, number in ranges])[safe], -1).astype(np.int32)


def _when(trace: KinetoTrace, links: Links) -> IntArray:
    """When each event was launched; before everything where no launch is recorded."""
    never = np.full(len(links.launch), np.iinfo(np.int64).min, np.int64)
    if not len(trace.launch):
        return never
    return np.where(links.launch >= 0, trace.launch.start_ns[np.maximum(links.launch, 0)], never)
