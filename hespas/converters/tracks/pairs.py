"""Pairs of begin and end, and slices that run over each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = ["Pairs", "enclosing", "overlapping", "pair"]


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """``begin`` and ``end`` are rows of the events given (-1: it never ended); ``orphans`` ended only."""

    begin: IntArray
    end: IntArray
    orphans: int


def pair(track: IntArray, time_ns: IntArray, begins: NDArray[np.bool_]) -> Pairs:
    """Match each end with the last begin of its track that has none yet, in the order of time (of equal
    times: as they stand). O(events log events).
    """
    order = np.lexsort((time_ns, track))
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
    return Pairs(np.array(begin, np.int64), np.array(end, np.int64), orphans)


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


def enclosing(track: IntArray, start_ns: IntArray, duration_ns: IntArray) -> IntArray:
    """The innermost slice of the same track that each slice stands in, -1 for none."""
    parent = np.full(len(track), -1, np.int64)
    order = np.lexsort((-duration_ns, start_ns, track))
    end_ns: list[int] = (start_ns + duration_ns)[order].tolist()
    opened: list[tuple[int, int]] = []
    current = -1
    rows = zip(order.tolist(), track[order].tolist(), start_ns[order].tolist(), end_ns, strict=True)
    for row, where, start, end in rows:
        if where != current:
            opened, current = [], where
        while opened and (opened[-1][0] <= start or opened[-1][0] < end):
            opened.pop()
        if opened:
            parent[row] = opened[-1][1]
        opened.append((end, row))
    return parent
