"""How far an operation is from what a fit has seen."""

from __future__ import annotations

import numpy as np

from hespas.estimators.learned.extrapolation import distances


def test_the_nearest_seen_size_counts() -> None:
    random = np.random.default_rng(7)
    seen = random.integers(-1, 121, (50_000, 3)).astype(np.int8)
    asked = random.integers(-1, 121, (40, 3))
    expected = [np.abs(seen - each).max(axis=1).min() for each in asked]
    assert distances(seen, np.repeat(asked, 2, axis=0)).tolist() == np.repeat(expected, 2).tolist()


def test_where_nothing_was_seen_all_is_far() -> None:
    assert distances(np.zeros((0, 2), np.int8), np.zeros((3, 2), np.int64)).tolist() == [np.inf] * 3
