"""Which event encloses another, which belong together, and what on the host caused a piece of device work.

Every profiler says the same: a piece of device work and the call that launched it share an id, and the call
stands inside operations of its own thread, of which the innermost is the cause. Times are whole numbers of
one unit, ns or ps; -1 is no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = [
    "Nesting",
    "around_launch",
    "enclosing",
    "exclusive",
    "match_rows",
    "nearest",
    "overlapping",
    "pair",
]


_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """The events of each thread as a forest: ``parent`` encloses (-1: none); ``order`` lists them by thread
    and start, an enclosing one before those in it.
    """

    parent: IntArray
    order: IntArray
    _thread: IntArray
    _start: IntArray
    _end: IntArray

    @classmethod
    def of(cls, thread: IntArray, start: IntArray, end: IntArray, chosen: IntArray | None = None) -> Nesting:
        """Nest by start: what begins while another runs is in it, also where it sticks out. Only the rows
        ``chosen`` (None: all) take part. O(n log n).
        """
        rows = np.arange(len(start)) if chosen is None else chosen
        order = rows[np.lexsort((-end[rows], start[rows], thread[rows]))]
        found = _around(thread[order], start[order], end[order])
        parent = np.full(len(start), -1, np.int64)
        if len(order):
            parent[order] = np.where(found >= 0, order[found], -1)
        return cls(parent, order, thread[order], start[order], end)

    def with_parents(self, parent: IntArray, end: IntArray) -> Nesting:
        """The same forest with events behind it whose ``parent`` is known; they are of no thread."""
        return Nesting(
            np.concatenate([self.parent, parent]),
            self.order,
            self._thread,
            self._start,
            np.concatenate([self._end, end]),
        )

    def innermost(self, thread: IntArray, at: IntArray) -> IntArray:
        """The innermost event of each ``thread`` that is running ``at`` a moment, -1 for none."""
        place = self._last_started(thread, at)
        found = np.where(place >= 0, self.order[np.maximum(place, 0)], -1) if len(self.order) else place
        open_places = np.flatnonzero(found >= 0)
        while len(open_places):
            over = self._end[found[open_places]] < at[open_places]
            open_places = open_places[over]
            found[open_places] = self.parent[found[open_places]]
            open_places = open_places[found[open_places] >= 0]
        return found

    def _last_started(self, thread: IntArray, at: IntArray) -> IntArray:
        """The place in order of the last event of the same thread that starts no later.

        Events and questions are sorted together; a question follows the events that start with it.
        """
        count, questions = len(self.order), len(thread)
        is_question = np.arange(count + questions) >= count
        both = np.concatenate((self._start, at)), np.concatenate((self._thread, thread))
        sequence = np.lexsort((is_question, *both))
        last = np.maximum.accumulate(np.where(is_question[sequence], -1, sequence))
        place = np.full(count + questions, -1, np.int64)
        place[sequence] = last
        place = place[count:]
        same = (place >= 0) & (self._thread[np.maximum(place, 0)] == thread) if count else place >= 0
        return np.where(same, place, -1)


def _around(thread: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """The place of the event around each, events being in order. Only a block of them are numbers of Python
    at a time: those of a long trace would take more memory than the trace.
    """
    parent = np.empty(len(thread), np.int64)
    never = np.iinfo(np.int64).max  # place -1 encloses all: it is never left
    stack, ends = [-1], [never]
    last = None
    for first in range(0, len(thread), _BLOCK):
        rows = slice(first, first + _BLOCK)
        parents: list[int] = []
        columns = (thread[rows].tolist(), start[rows].tolist(), end[rows].tolist())
        for place, (owner, begin, behind) in enumerate(zip(*columns, strict=True), first):
            if owner != last:
                stack, ends = [-1], [never]
                last = owner
            while ends[-1] <= begin and ends[-1] < behind:
                stack.pop()
                ends.pop()
            parents.append(stack[-1])
            stack.append(place)
            ends.append(behind)
        parent[rows] = parents
    return parent


def enclosing(thread: IntArray, start: IntArray, duration: IntArray) -> tuple[IntArray, IntArray]:
    """The innermost event of the same thread that each stands in as a whole, and the event that ended the
    nesting of each by reaching beyond its end (-1: none).
    """
    order = np.lexsort((-duration, start, thread))
    ends: list[int] = (start + duration)[order].tolist()
    threads: list[int] = thread[order].tolist()
    parent, overtaken = (np.full(len(start), -1, np.int64) for _ in range(2))
    parents, overtakers = [-1] * len(ends), [-1] * len(ends)
    stack: list[int] = []
    last = None
    for place, (owner, begin, end) in enumerate(zip(threads, start[order].tolist(), ends, strict=True)):
        if owner != last:
            stack, last = [], owner
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        while stack and ends[stack[-1]] < end:
            overtakers[stack.pop()] = place
        if stack:
            parents[place] = stack[-1]
        stack.append(place)
    for column, found in ((parent, np.array(parents, np.int64)), (overtaken, np.array(overtakers, np.int64))):
        if len(order):
            column[order] = np.where(found >= 0, order[found], -1)
    return parent, overtaken


def nearest(wanted: BoolArray, parent: IntArray, start: IntArray) -> IntArray:
    """From each event (-1: none) outwards to the first that is ``wanted``, itself included; -1 for none."""
    found = parent.copy()
    while True:
        skipped = np.flatnonzero((found >= 0) & ~wanted[found])
        if not len(skipped):
            break
        found[skipped] = found[found[skipped]]  # what was skipped leads on: twice as far each time
    result = start.copy()
    bare = np.flatnonzero(start >= 0)
    bare = bare[~wanted[start[bare]]]
    result[bare] = found[start[bare]]
    return result


def match_rows(known: Sequence[IntArray], wanted: Sequence[IntArray]) -> IntArray:
    """The first row of ``known`` columns with the numbers wanted, -1 where there is none.

    A number below 0 in the last column is no number: it matches nothing.
    """
    count, questions = len(known[0]), len(wanted[0])
    if not count or not questions:
        return np.full(questions, -1, np.int64)
    key = np.zeros(count + questions, np.int64)
    for ours, theirs in zip(known, wanted, strict=True):
        codes, span = _coded(np.concatenate((ours, theirs)))
        key = key * span + codes
    order = np.argsort(key[:count], kind="stable")
    ordered = key[:count][order]
    place = np.minimum(np.searchsorted(ordered, key[count:]), count - 1)
    return np.where((ordered[place] == key[count:]) & (wanted[-1] >= 0), order[place], -1)


def _coded(values: IntArray) -> tuple[IntArray, int]:
    """Numbers from 0 that are equal where ``values`` are, and their bound: below 2**32."""
    lowest, highest = int(values.min()), int(values.max())
    if highest - lowest < 1 << 31:
        return values - lowest, highest - lowest + 1
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), len(distinct)


def around_launch(nesting: Nesting, launch: IntArray, thread: IntArray, start: IntArray) -> IntArray:
    """The innermost event around the launch of each piece of work (-1: none); ``thread`` and ``start`` are
    those of the launches.
    """
    host = np.full(len(launch), -1, np.int64)
    launched = np.flatnonzero(launch >= 0)
    at = launch[launched]
    host[launched] = nesting.innermost(thread[at], start[at])
    return host


# How long each operation of a thread ran itself: its time without that of the operations in it.


def exclusive(thread: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """At every moment of a thread the operation that started last and still runs owns the time.

    The sum over a thread is the length of the union of its operations, exactly, also where they overlap
    without nesting.
    """
    order = np.lexsort((-end, start, thread))
    threads: list[int] = thread[order].tolist()
    starts: list[int] = start[order].tolist()
    ends: list[int] = end[order].tolist()
    own = [0] * len(threads)
    stack: list[int] = []
    now, last = 0, -1
    for place, begin in enumerate(starts):
        if threads[place] != last:
            _drain(stack, ends, own, now, None)
            last = threads[place]
            now = begin
        now = _drain(stack, ends, own, now, begin)
        stack.append(place)
    _drain(stack, ends, own, now, None)
    found = np.zeros(len(threads), np.int64)
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


# Slices on tracks: pairs of begin and end, and those that run over each other.


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """``begin`` and ``end`` are rows of the events given (-1: it never ended); ``orphans`` ended only."""

    begin: IntArray
    end: IntArray
    orphans: int


def pair(
    track: IntArray, time_ns: IntArray, begins: NDArray[np.bool_], chosen: IntArray | None = None
) -> _Pairs:
    """Match each end with the last begin of its track that has none yet, in the order of time (of equal
    times: as they stand). Only the rows ``chosen`` (None: all) take part. O(events log events).
    """
    rows_in_play = np.arange(len(track)) if chosen is None else chosen
    order = rows_in_play[np.lexsort((time_ns[rows_in_play], track[rows_in_play]))]
    opened: list[int] = []
    current = -1
    begin: list[int] = []
    end: list[int] = []
    orphans = 0
    rows = zip(order.tolist(), track[order].tolist(), begins[order].tolist(), strict=True)
    for row, where, is_begin in rows:
        if where != current:
            begin.extend(opened)
            end.extend(-1 for _ in opened)
            opened, current = [], where
        if is_begin:
            opened.append(row)
        elif opened:
            begin.append(opened.pop())
            end.append(row)
        else:
            orphans += 1
    begin.extend(opened)
    end.extend(-1 for _ in opened)
    return _Pairs(np.array(begin, np.int64), np.array(end, np.int64), orphans)


def overlapping(
    track: NDArray[np.integer], start_ns: IntArray | FloatArray, duration_ns: IntArray | FloatArray
) -> BoolArray:
    """Which slices start before an earlier one of their track ends."""
    inside = np.zeros(len(track), np.bool_)
    order = np.lexsort((-duration_ns, start_ns, track))
    track, start_ns = track[order], start_ns[order]
    end_ns = start_ns + duration_ns[order]
    firsts = np.flatnonzero(np.diff(track, prepend=-1))
    # an order that rises from track to track lets one running maximum serve all of them
    _, rank = np.unique(np.concatenate([start_ns, end_ns]), return_inverse=True)
    rank = rank.reshape(-1)
    step = len(rank) + 1
    number = np.zeros(len(track), np.int64)
    number[firsts] = 1
    number = np.cumsum(number) * step
    latest = np.maximum.accumulate(rank[len(track) :] + number)
    before = np.concatenate([[-1], latest[:-1]])
    inside[order] = rank[: len(track)] + number < before
    return inside
