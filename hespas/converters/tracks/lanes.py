"""Slices that run over each other on lanes of their own: on one track of a viewer they must nest.

Perfetto's viewer drops a complete slice that runs into the next one (its importer's statistic
``slice_drop_overlapping_complete_event``), be it by 1 ns. So times are shown in whole ns, rounded alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.converters.linking import overlapping
from hespas.converters.tracks.scene import Tracks
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray

__all__ = ["End", "Lanes", "is_whole", "lanes_of", "shown_ns"]

End = tuple[int, int, int]
"""When a slice ends, on which track, on which lane of it."""

_MOST_LANES = 128
"""Lanes that are looked at for a place; past them every slice that does not fit opens its own."""
_PS = 1000.0
_WHOLE_NS = 2.0**52
"""From here on floats hold whole numbers only."""


@dataclass(slots=True)
class Lanes:
    """Takes slices sorted by track and start, the longest first."""

    _track: int = -1
    _opened: list[list[float]] = field(default_factory=list[list[float]])

    def placed(
        self, tracks: Sequence[int], starts: Sequence[float], ends: Sequence[float]
    ) -> Iterator[tuple[int, list[End]]]:
        """The lane of each slice, and what has to end before it begins there."""
        for track, start, end in zip(tracks, starts, ends, strict=True):
            ended: list[End] = []
            if track != self._track:
                ended = self.rest()
                self._track, self._opened = track, [[]]
            lane = self._lane(start, end, ended)
            self._opened[lane].append(end)
            yield lane, ended

    def _lane(self, start: float, end: float, ended: list[End]) -> int:
        for lane, opened in enumerate(self._opened[:_MOST_LANES]):
            while opened and opened[-1] <= start:
                ended.append((int(opened.pop()), self._track, lane))
            if not opened or end <= opened[-1]:
                return lane
        self._opened.append([])
        return len(self._opened) - 1

    def rest(self) -> list[End]:
        """What is still open on the last track, inner slices first."""
        ended = [
            (int(end), self._track, lane)
            for lane, opened in enumerate(self._opened)
            for end in reversed(opened)
        ]
        self._opened = []
        return ended


def is_whole(start_ns: FloatArray, duration_ns: FloatArray) -> BoolArray:
    """Which slices :func:`shown_ns` tells exactly; an unknown duration is not."""
    whole: BoolArray = (np.floor(start_ns) == start_ns) & (np.floor(duration_ns) == duration_ns)
    return whole


def shown_ns(start_ns: FloatArray, duration_ns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Start and length in whole ns, such that what ends before another starts, or inside it, does so still.

    What is whole stays exact at any size. An unknown duration is 0. Where starts are so late that all are
    whole, sums with them say less of a length than the length itself.
    """
    known_ns = np.nan_to_num(duration_ns, nan=0.0)
    begin_ns = _floor(start_ns)
    length_ns = np.where(
        np.abs(start_ns) < _WHOLE_NS, _floor(start_ns + known_ns) - begin_ns, _floor(known_ns)
    )
    return begin_ns, np.where(is_whole(start_ns, known_ns), known_ns, length_ns)


def _floor(times_ns: FloatArray) -> FloatArray:
    """Rounded down, but for the last bits of sums. It never changes the order of two times."""
    whole_ns = np.floor(times_ns)
    partial_ns = np.where(whole_ns == times_ns, 0.0, times_ns)
    return np.where(whole_ns == times_ns, whole_ns, np.floor(np.rint(partial_ns * _PS) / _PS))


def lanes_of(tracks: Tracks) -> SmallIntArray:
    """The lane of each slice on its track, 0 for the first. O(slices log slices)."""
    lanes = np.zeros(len(tracks), np.int32)
    if not len(tracks):
        return lanes
    begin_ns, length_ns = shown_ns(tracks.start_ns, tracks.duration_ns)
    end_ns = begin_ns + np.maximum(length_ns, 0.0)
    crowded = np.unique(tracks.track[overlapping(tracks.track, begin_ns, end_ns - begin_ns)])
    rows = np.flatnonzero(np.isin(tracks.track, crowded))
    placed = Lanes().placed(tracks.track[rows].tolist(), begin_ns[rows].tolist(), end_ns[rows].tolist())
    lanes[rows] = [lane for lane, _ in placed]
    return lanes
