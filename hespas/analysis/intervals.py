"""Sets of moments as sorted intervals that do not touch: unions, intersections, and how long they last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import FloatArray, IntArray

__all__ = ["Intervals"]


@dataclass(frozen=True, slots=True, eq=False)
class Intervals:
    """``start`` and ``end`` of intervals [ns]: sorted, each ends before the next begins."""

    start: FloatArray
    end: FloatArray

    @classmethod
    def union(cls, start: FloatArray, end: FloatArray) -> Intervals:
        """When any of some spans ran; those that end before they start never did. O(n log n)."""
        ran = end > start
        order = np.argsort(start[ran], kind="stable")
        start, end = start[ran][order], end[ran][order]
        if not len(start):
            return cls(start, end)
        reached = np.maximum.accumulate(end)
        first = np.append(True, start[1:] > reached[:-1])
        last = np.append(first[1:], True)
        return cls(start[first], reached[last])

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length_ns(self) -> float:
        """How long they last together."""
        return float((self.end - self.start).sum())

    def joined(self, other: Intervals) -> Intervals:
        """When either was."""
        return Intervals.union(
            np.concatenate((self.start, other.start)), np.concatenate((self.end, other.end))
        )

    def gaps(self) -> Intervals:
        """What lies between them."""
        return Intervals(self.end[:-1], self.start[1:])

    def within_ns(self, start: FloatArray, end: FloatArray) -> FloatArray:
        """How much of each span [start, end] they cover, shape ``(spans,)``. O((spans + n) log n)."""
        covered: FloatArray = np.maximum(self.elapsed_ns(end) - self.elapsed_ns(start), 0.0)
        return covered

    def elapsed_ns(self, at: FloatArray) -> FloatArray:
        """How long they lasted before each moment: a clock that stands still between them."""
        if not len(self):
            return np.zeros(len(at))
        before = np.append(0.0, np.cumsum(self.end - self.start))
        place: IntArray = np.searchsorted(self.start, at, side="right")
        inside = np.minimum(at, self.end[np.maximum(place - 1, 0)]) - self.start[np.maximum(place - 1, 0)]
        return np.where(place > 0, before[np.maximum(place - 1, 0)] + inside, 0.0)
