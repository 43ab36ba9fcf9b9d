"""How far an operation is from what a fit has seen."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.estimators import load_estimator
from hespas.estimators.learned.extrapolation import distances
from hespas.hardware import load_device
from hespas.operations import Labels, build


def test_the_nearest_seen_size_counts() -> None:
    random = np.random.default_rng(7)
    seen = random.integers(-1, 121, (50_000, 3)).astype(np.int8)
    asked = random.integers(-1, 121, (40, 3))
    expected = [np.abs(seen - each).max(axis=1).min() for each in asked]
    assert distances(seen, np.repeat(asked, 2, axis=0)).tolist() == np.repeat(expected, 2).tolist()


def test_where_nothing_was_seen_all_is_far() -> None:
    assert distances(np.zeros((0, 2), np.int8), np.zeros((3, 2), np.int64)).tolist() == [np.inf] * 3


@pytest.mark.parametrize(("name", "least", "most"), [("TPU-v4", 0.7, 0.9), ("H100-SXM", -0.1, 0.1)])
def test_sizes_of_unmeasured_alignment_widen_intervals_on_tpus(name: str, least: float, most: float) -> None:
    m, n, k = np.array([[512.0, 500.0], [512.0, 512.0], [512.0, 512.0]])
    ops = build.matmuls(Labels.constant("f16", 2), batch=np.ones(2), m=m, n=n, k=k)
    said = load_estimator("learned").predict(ops, load_device(name))
    aligned, unaligned = np.log(said.high_ns / said.low_ns)
    assert least < unaligned - aligned < most
