"""Intervals from residuals: order statistics and weighted quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.fitting.intervals import next_value_bound, weighted_quantiles


@pytest.mark.parametrize("count", [19, 20, 39, 200])
def test_one_more_value_is_below_the_bound_in_19_of_20_cases(count: int) -> None:
    values = np.arange(1.0, count + 1)
    bound = next_value_bound(values[::-1])
    # Equal chances for the place of one more value among the others: ``count`` + 1 places.
    assert bound / (count + 1) >= 0.95 > (bound - 1) / (count + 1)


def test_a_small_sample_has_its_largest_value() -> None:
    assert next_value_bound(np.array([3.0, 1.0, 2.0])) == 3.0


def test_weights_count_as_repeats_and_zeros_not_at_all() -> None:
    values, weight = np.arange(40.0), np.full(40, 3.0)
    assert next_value_bound(values, weight) == next_value_bound(np.repeat(values, 3))
    weight[35:] = 0.0
    assert next_value_bound(values, weight) == next_value_bound(np.repeat(values[:35], 3))


def test_quantiles_widen_with_the_weight_of_one_value() -> None:
    values = np.linspace(-1, 1, 201)
    low, high = weighted_quantiles(values, np.full(201, 1 / 201))
    assert (low, high) == pytest.approx((-0.9, 0.9), abs=0.02)
    wide = weighted_quantiles(values[::50], np.full(5, 1 / 5))
    assert wide == (-1.0, 1.0)
