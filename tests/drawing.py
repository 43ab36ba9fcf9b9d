"""Drawn part of the slow suite: ``pytest -m slow --draw-seconds 300 --draw-seed TEXT``.

Tests run in a random order in which each function has had one case before any has two, so that a few minutes
reach most of what the slow suite protects. When the seconds are over, the rest is skipped. The seed, such as
a commit, decides the order; the same seed draws the same tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from time import monotonic

import pytest

__all__ = ["TimedDraw", "drawn_order"]


def drawn_order(names: Sequence[str], seed: str) -> list[int]:
    """Return an order of node ids: cases in rounds, of which each has one case of every function."""
    random = Random(seed)
    shuffled = list(range(len(names)))
    random.shuffle(shuffled)
    seen: defaultdict[str, int] = defaultdict(int)
    rounds: list[tuple[int, int]] = []
    for index in shuffled:
        function = names[index].partition("[")[0]
        rounds.append((seen[function], index))
        seen[function] += 1
    return [index for _, index in sorted(rounds, key=lambda entry: entry[0])]


class TimedDraw:
    """Plugin that orders the tests and skips those that would start after ``seconds``."""

    def __init__(self, seconds: float, seed: str) -> None:
        self._seconds, self._seed = seconds, seed
        self._end = monotonic() + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order what the marks have left."""
        items[:] = [items[index] for index in drawn_order([item.nodeid for item in items], self._seed)]

    def pytest_runtestloop(self) -> None:
        """Start the clock when the first test does."""
        self._end = monotonic() + self._seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Skip the rest once the seconds are over."""
        if monotonic() > self._end:
            pytest.skip("not drawn: the seconds are over")
