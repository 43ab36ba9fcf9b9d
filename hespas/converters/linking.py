"""Relations between recorded events: enclosing events, causes of device work, matching records.

A device event and the call that launched it share an id in every profiler, and the call lies within
operations of its own thread; the innermost of these is the cause. Times are whole numbers of one unit, ns or
ps; -1 means no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = [
    "EventNesting",
    "around_launch",
    "common_order",
    "enclosing",
    "exclusive",
    "match_rows",
    "nearest",
    "overlapping",
    "pair",
]


_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class EventNesting:
    """Nesting of the events of each thread: for each event, the innermost event of the thread that encloses
    it.

    ``parent`` is the enclosing event (-1: none). ``order`` lists the events by thread and start; an enclosing
    event precedes the events inside it.
    """

    parent: IntArray
    order: IntArray
    _thread: IntArray
    _start: IntArray
    _end: IntArray

    @classmethod
    def of(
        cls, thread: IntArray, start: IntArray, end: IntArray, chosen: IntArray | None = None
    ) -> EventNesting:
        """Return the nesting of events. An event is inside another one that is running when it starts, even
        if it ends later than that. Only the rows ``chosen`` (None: all) take part. O(n log n).
        """
        rows = np.arange(len(start)) if chosen is None else chosen
        order = rows[np.lexsort((-end[rows], start[rows], thread[rows]))]
        enclosing_index = _around(thread[order], start[order], end[order])
        parent = np.full(len(start), -1, np.int64)
        if len(order):
            parent[order] = np.where(enclosing_index >= 0, order[enclosing_index], -1)
        return cls(parent, order, thread[order], start[order], end)

    def with_parents(self, parent: IntArray, end: IntArray) -> EventNesting:
        """Return the nesting with further events appended, whose ``parent`` is known and which have no
        thread.
        """
        return EventNesting(
            np.concatenate([self.parent, parent]),
            self.order,
            self._thread,
            self._start,
            np.concatenate([self._end, end]),
        )

    def innermost(self, thread: IntArray, at: IntArray) -> IntArray:
        """Return for each thread and time in ``at`` the innermost event that runs then, -1 for none."""
        # Events and questions are sorted together; a question follows the events that start with it.
        count, questions = len(self.order), len(thread)
        if not count:
            return np.full(questions, -1, np.int64)
        is_question = np.arange(count + questions) >= count
        both = np.concatenate((self._start, at)), np.concatenate((self._thread, thread))
        sequence = np.lexsort((is_question, *both))
        last = np.maximum.accumulate(np.where(is_question[sequence], -1, sequence))
        index = np.full(count + questions, -1, np.int64)
        index[sequence] = last
        index = index[count:]
        event = np.where((index >= 0) & (self._thread[index] == thread), self.order[index], -1)
        open_rows = np.flatnonzero(event >= 0)
        while len(open_rows):  # events that have ended are replaced by their parents
            open_rows = open_rows[self._end[event[open_rows]] < at[open_rows]]
            event[open_rows] = self.parent[event[open_rows]]
            open_rows = open_rows[event[open_rows] >= 0]
        return event


def _around(thread: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """Return the index of the innermost event around each event (-1: none). Events are sorted by thread and
    start.

    Events are processed in blocks, because as Python numbers all of them would take more memory than the
    trace.
    """
    parent = np.empty(len(thread), np.int64)
    never = np.iinfo(np.int64).max
    stack: list[int] = []
    ends: list[int] = []
    last = None
    for first in range(0, len(thread), _BLOCK):
        rows = slice(first, first + _BLOCK)
        parents: list[int] = []
        columns = (thread[rows].tolist(), start[rows].tolist(), end[rows].tolist())
        for index, (owner, begin, behind) in enumerate(zip(*columns, strict=True), first):
            if owner != last:
                stack, ends = [-1], [never]  # index -1 encloses all and never ends
                last = owner
            while ends[-1] <= begin and ends[-1] < behind:
                stack.pop()
                ends.pop()
            parents.append(stack[-1])
            stack.append(index)
            ends.append(behind)
        parent[rows] = parents
    return parent


def enclosing(thread: IntArray, start: IntArray, duration: IntArray) -> tuple[IntArray, IntArray]:
    """Return, for each event, the innermost event of its thread that contains it, and its overtaker (-1:
    none).

    The overtaker of an event starts inside the event and ends after it. An event with an overtaker encloses
    no event that starts later than the overtaker.
    """
    order = np.lexsort((-duration, start, thread))
    ends: list[int] = (start + duration)[order].tolist()
    threads: list[int] = thread[order].tolist()
    parent, overtaken = (np.full(len(start), -1, np.int64) for _ in range(2))
    parents, overtakers = [-1] * len(ends), [-1] * len(ends)
    stack: list[int] = []
    last = None
    for index, (owner, begin, end) in enumerate(zip(threads, start[order].tolist(), ends, strict=True)):
        if owner != last:
            stack, last = [], owner
        while stack and ends[stack[-1]] <= begin:
            stack.pop()
        while stack and ends[stack[-1]] < end:
            overtakers[stack.pop()] = index
        if stack:
            parents[index] = stack[-1]
        stack.append(index)
    for column, related in (
        (parent, np.array(parents, np.int64)),
        (overtaken, np.array(overtakers, np.int64)),
    ):
        if len(order):
            column[order] = np.where(related >= 0, order[related], -1)
    return parent, overtaken


def nearest(wanted: BoolArray, parent: IntArray, start: IntArray) -> IntArray:
    """Return, for each event in ``start``, the innermost ``wanted`` event among the event itself and the
    events around it.

    The result is -1 if none of these events is wanted. ``parent`` is the event directly around each event
    (-1: none).
    """
    outer = parent.copy()
    while True:
        skipped = np.flatnonzero((outer >= 0) & ~wanted[outer])
        if not len(skipped):
            break
        outer[skipped] = outer[outer[skipped]]  # skip twice as far each time
    result = start.copy()
    bare = np.flatnonzero(start >= 0)
    bare = bare[~wanted[start[bare]]]
    result[bare] = outer[start[bare]]
    return result


def match_rows(known: Sequence[IntArray], wanted: Sequence[IntArray]) -> IntArray:
    """Return, for each row of ``wanted``, the first row of ``known`` with the same numbers (-1: none).

    Both are sequences of columns. A row whose number in the last wanted column is negative matches nothing.
    """
    count, questions = len(known[0]), len(wanted[0])
    if not count or not questions:
        return np.full(questions, -1, np.int64)
    key = np.zeros(count + questions, np.int64)
    for ours, theirs in zip(known, wanted, strict=True):
        values = np.concatenate((ours, theirs))
        lowest, highest = int(values.min()), int(values.max())
        if highest - lowest < 1 << 31:
            codes, span = values - lowest, highest - lowest + 1
        else:
            distinct, distinct_codes = np.unique(values, return_inverse=True)
            codes, span = distinct_codes.astype(np.int64), len(distinct)
        key = key * span + codes
    order = np.argsort(key[:count], kind="stable")
    ordered = key[:count][order]
    index = np.minimum(np.searchsorted(ordered, key[count:]), count - 1)
    return np.where((ordered[index] == key[count:]) & (wanted[-1] >= 0), order[index], -1)


def around_launch(nesting: EventNesting, launch: IntArray, thread: IntArray, start: IntArray) -> IntArray:
    """Return the innermost event around the launch of each device event (-1: none).

    ``launch`` is the launch of each device event (-1: none). ``thread`` and ``start`` have one entry per
    launch.
    """
    host = np.full(len(launch), -1, np.int64)
    launched = np.flatnonzero(launch >= 0)
    at = launch[launched]
    host[launched] = nesting.innermost(thread[at], start[at])
    return host


def exclusive(thread: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """Return the exclusive time of each operation: its time without the operations inside it.

    Each moment of a thread counts for the operation that started last and still runs. The sum over a thread
    is exactly the length of the union of its operations, even if they overlap without nesting.
    """
    order = np.lexsort((-end, start, thread))
    threads: list[int] = thread[order].tolist()
    starts: list[int] = start[order].tolist()
    ends: list[int] = end[order].tolist()
    own = [0] * len(threads)
    stack: list[int] = []
    now, last = 0, -1
    for index, begin in enumerate(starts):
        if threads[index] != last:
            _drain(stack, ends, own, now, None)
            last = threads[index]
            now = begin
        now = _drain(stack, ends, own, now, begin)
        stack.append(index)
    _drain(stack, ends, own, now, None)
    own_time = np.zeros(len(threads), np.int64)
    own_time[order] = own
    return own_time


def _drain(stack: list[int], ends: list[int], own: list[int], now: int, until: int | None) -> int:
    """Advance the clock of a thread from ``now`` to ``until`` (not before ``now``; None: to the last end);
    return the new time.

    The time is added in ``own`` to the operation that started last and still runs. Operations that have ended
    are removed from ``stack``.
    """
    while stack:
        top = stack[-1]
        end = ends[top]
        if until is not None and end > until:
            own[top] += until - now
            return until
        own[top] += max(end - now, 0)
        now = max(now, end)
        stack.pop()
    return now if until is None else until


@dataclass(frozen=True, slots=True, eq=False)
class _SlicePairs:
    """Begin and end events that were paired to slices. ``begin`` and ``end`` are rows of events; ``end`` is
    -1 if the slice never ended. ``orphans`` counts end events without a begin event.
    """

    begin: IntArray
    end: IntArray
    orphans: int


def pair(
    track: IntArray, time_ns: IntArray, begins: NDArray[np.bool_], chosen: IntArray | None = None
) -> _SlicePairs:
    """Pair each end event with the last unmatched begin event of its track, in the order of time, then of
    rows.

    Only the rows ``chosen`` (None: all) take part. O(events log events).
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
    return _SlicePairs(np.array(begin, np.int64), np.array(end, np.int64), orphans)


def overlapping(
    track: NDArray[np.integer], start_ns: IntArray | FloatArray, duration_ns: IntArray | FloatArray
) -> BoolArray:
    """Return a mask of the slices that start before an earlier one of their track ends."""
    inside = np.zeros(len(track), np.bool_)
    order = np.lexsort((-duration_ns, start_ns, track))
    track, start_ns = track[order], start_ns[order]
    end_ns = start_ns + duration_ns[order]
    _, rank = np.unique(np.concatenate([start_ns, end_ns]), return_inverse=True)
    # offsets that rise from track to track allow one running maximum for all tracks
    number = np.cumsum(np.diff(track, prepend=track[:1]) != 0) * len(rank)
    latest = np.maximum.accumulate(rank[len(track) :] + number)
    before = np.concatenate([[-1], latest[:-1]])
    inside[order] = rank[: len(track)] + number < before
    return inside


_WINDOW = 2048
"""Number of elements of each sequence that are compared at once. Gaps of up to half as many do not break
the alignment.
"""


def common_order(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """Align two records of the same operations, with gaps in either. Return pairs of positions with equal
    numbers.

    The pairs are a longest common subsequence (bit-parallel, Hyyro 2004), found window by window, so that the
    time is linear in the length. Only within a window is the subsequence guaranteed to be a longest one.
    """
    pairs: list[tuple[int, int]] = []
    left, right = 0, 0
    while left < len(first) and right < len(second):
        one, other = first[left : left + _WINDOW], second[right : right + _WINDOW]
        last = left + len(one) == len(first) and right + len(other) == len(second)
        matches = _longest(one, other)
        if not last:  # matches at the end of a window are uncertain
            matches = [pair for pair in matches if max(pair) < _WINDOW // 2]
        pairs.extend((left + a, right + b) for a, b in matches)
        if last:
            break
        steps = (matches[-1][0] + 1, matches[-1][1] + 1) if matches else (_WINDOW // 2, _WINDOW // 2)
        left, right = left + steps[0], right + steps[1]
    return pairs


def _longest(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """Return the matched pairs of positions of a longest common subsequence of two lists. O(len(first) *
    len(second) / word).
    """
    positions: dict[int, int] = {}
    for position, value in enumerate(second):
        positions[value] = positions.get(value, 0) | 1 << position
    all_bits = (1 << len(second)) - 1
    row = all_bits
    rows: list[int] = []
    for value in first:
        common = row & positions.get(value, 0)
        row = ((row + common) | (row - common)) & all_bits
        rows.append(row)
    pairs: list[tuple[int, int]] = []
    above, column = len(rows), len(second)
    while above and column:  # backwards; a zero bit means that the column adds one to the length
        bit = 1 << (column - 1)
        if rows[above - 1] & bit:
            column -= 1
            continue
        above -= 1
        if above and not rows[above - 1] & bit:
            continue
        column -= 1
        pairs.append((above, column))
    pairs.reverse()
    return pairs
