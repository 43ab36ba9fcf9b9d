"""Slices that run over each other on lanes of their own: begin and end on one track must nest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["End", "Lanes"]

End = tuple[int, int, int]
"""When a slice ends, on which track, on which lane of it."""

_MOST_LANES = 128
"""Lanes that are looked at for a place; past them every slice that does not fit opens its own."""


@dataclass(slots=True)
class Lanes:
    """Takes slices sorted by track and start, the longest first."""

    _track: int = -1
    _opened: list[list[int]] = field(default_factory=list[list[int]])

    def placed(
        self, tracks: Sequence[int], starts: Sequence[int], ends: Sequence[int]
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

    def _lane(self, start: int, end: int, ended: list[End]) -> int:
        for lane, opened in enumerate(self._opened[:_MOST_LANES]):
            while opened and opened[-1] <= start:
                ended.append((opened.pop(), self._track, lane))
            if not opened or end <= opened[-1]:
                return lane
        self._opened.append([])
        return len(self._opened) - 1

    def rest(self) -> list[End]:
        """What is still open on the last track, inner slices first."""
        ended = [
            (end, self._track, lane) for lane, opened in enumerate(self._opened) for end in reversed(opened)
        ]
        self._opened = []
        return ended
