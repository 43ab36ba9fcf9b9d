"""Which range encloses another, and which runs on a thread at a given time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.gpu_trace.trace import Ranges, listed
from hespas.graph.columns import IntArray

__all__ = ["Nesting", "match_pairs"]


@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """The ranges of each thread as a forest: ``parent`` encloses (-1: none). Only ranges that nest take part;
    ``order`` lists them by thread and start, an enclosing one before those in it.
    """

    parent: IntArray
    order: IntArray
    _thread: IntArray
    _start_ns: IntArray
    _end_ns: IntArray

    @classmethod
    def of(cls, ranges: Ranges) -> Nesting:
        """Nest by containment. O(n log n); the one loop is over ranges in order."""
        chosen = np.flatnonzero(ranges.nests)
        thread, start, end = ranges.thread[chosen], ranges.start_ns[chosen], ranges.end_ns[chosen]
        order = np.lexsort((-end, start, thread))
        chosen, thread, start = chosen[order], thread[order], start[order]
        parent = np.full(len(ranges), -1, np.int64)
        found = np.array(_enclosing(listed(thread), listed(start), listed(end[order])), np.int64)
        parent[chosen] = np.where(found >= 0, chosen[found], -1) if len(found) else found
        return cls(parent, chosen, thread, start, ranges.end_ns)

    def innermost(self, thread: IntArray, at_ns: IntArray) -> IntArray:
        """The innermost range of each ``thread`` that is running ``at_ns``, -1 for none."""
        place = self._last_started(thread, at_ns)
        found = np.where(place >= 0, self.order[np.maximum(place, 0)], -1) if len(self.order) else place
        open_places = np.flatnonzero(found >= 0)
        while len(open_places):
            over = self._end_ns[found[open_places]] < at_ns[open_places]
            open_places = open_places[over]
            found[open_places] = self.parent[found[open_places]]
            open_places = open_places[found[open_places] >= 0]
        return found

    def _last_started(self, thread: IntArray, at_ns: IntArray) -> IntArray:
        """The place in order of the last range of the same thread that starts no later.

        Ranges and questions are sorted together; a question follows the ranges that start with it.
        """
        count, asked = len(self.order), len(thread)
        both_threads = np.concatenate((self._thread, thread))
        both_times = np.concatenate((self._start_ns, at_ns))
        is_question = np.arange(count + asked) >= count
        sequence = np.lexsort((is_question, both_times, both_threads))
        last = np.maximum.accumulate(np.where(is_question[sequence], -1, sequence))
        place = np.full(count + asked, -1, np.int64)
        place[sequence] = last
        place = place[count:]
        same = (place >= 0) & (self._thread[np.maximum(place, 0)] == thread) if count else place >= 0
        return np.where(same, place, -1)


def _enclosing(threads: list[int], starts: list[int], ends: list[int]) -> list[int]:
    """The place of the range around each, ranges being in order; a range that sticks out counts as inside."""
    parents = [-1] * len(threads)
    stack: list[int] = []
    last = None
    for place, thread in enumerate(threads):
        if thread != last:
            stack.clear()
            last = thread
        start, end = starts[place], ends[place]
        while stack and ends[stack[-1]] <= start and ends[stack[-1]] < end:
            stack.pop()
        if stack:
            parents[place] = stack[-1]
        stack.append(place)
    return parents


def _coded(values: IntArray) -> tuple[IntArray, int]:
    """Numbers from 0 that are equal where ``values`` are, and their bound: below 2**32."""
    lowest, highest = int(values.min()), int(values.max())
    if highest - lowest < 1 << 31:
        return values - lowest, highest - lowest + 1
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), len(distinct)


def match_pairs(first: tuple[IntArray, IntArray], wanted: tuple[IntArray, IntArray]) -> IntArray:
    """The first row whose pair of numbers is the one wanted, -1 where there is none.

    A second number below 0 is no number: it matches nothing. O(n log n).
    """
    known, asked = len(first[0]), len(wanted[0])
    if not known or not asked:
        return np.full(asked, -1, np.int64)
    key = np.zeros(known + asked, np.int64)
    for ours, theirs in zip(first, wanted, strict=True):
        codes, span = _coded(np.concatenate((ours, theirs)))
        key = key * span + codes
    order = np.argsort(key[:known], kind="stable")
    ordered = key[:known][order]
    place = np.minimum(np.searchsorted(ordered, key[known:]), known - 1)
    return np.where((ordered[place] == key[known:]) & (wanted[1] >= 0), order[place], -1)
