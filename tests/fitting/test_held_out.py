"""Folds, held-out predictions, choices that are never worse than before, intervals."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.fitting.held_out import (
    best_share,
    first_of_best,
    folds_of,
    held_out_times,
    next_value_bound,
    parts_in_turn,
    weighted_quantiles,
)
from hespas.graph.columns import FloatArray, IntArray


def test_groups_are_whole_in_folds_of_equal_size() -> None:
    group = np.repeat(np.arange(20), 3)[::-1] * 7
    fold = folds_of(group, 4, np.random.default_rng(0))
    by_group = {number: set(fold[group == number].tolist()) for number in group.tolist()}
    assert all(len(folds) == 1 for folds in by_group.values())
    assert np.bincount(fold).tolist() == [15] * 4


def test_fewer_groups_than_folds_are_held_out_one_by_one() -> None:
    fold = folds_of(np.array([5, 5, 9]), 4, np.random.default_rng(0))
    parts = [(fitted.tolist(), tested.tolist()) for fitted, tested in parts_in_turn(fold)]
    assert sorted(parts) == [([0, 1], [2]), ([2], [0, 1])]


def test_each_row_is_predicted_by_a_fit_without_its_fold() -> None:
    values = np.arange(6.0)

    def times_of(fitted: IntArray, tested: IntArray) -> FloatArray:
        assert not set(fitted.tolist()) & set(tested.tolist())
        return np.full(len(tested), values[fitted].sum())

    fold = np.array([0, 0, 1, 1, 2, 2])
    assert held_out_times(fold, times_of).tolist() == [14.0, 14.0, 10.0, 10.0, 6.0, 6.0]
    assert np.isnan(held_out_times(np.zeros(3, np.int64), times_of)).all()


def test_a_fit_replaces_only_a_worse_prediction() -> None:
    assert first_of_best([0.10, 0.10]) == 0
    assert first_of_best([0.10, 0.09]) == 1
    assert first_of_best([0.10, 0.09], rows=25) == 0  # the difference is within the uncertainty of 25 rows
    assert first_of_best([0.10, 0.07], rows=25) == 1
    assert first_of_best([np.nan, 0.9]) == 1
    assert first_of_best([0.9, np.nan]) == 0


@pytest.mark.parametrize(("gain", "share"), [(1.0, 1.0), (0.0, 0.0), (-1.0, 0.0)])
def test_a_correction_shrinks_to_none_without_a_gain(gain: float, share: float) -> None:
    error = np.full(30, 0.2)
    units = np.array([str(number // 3) for number in range(30)])
    assert best_share(error, gain * error, np.full(30, 1 / 30), units) == share


def test_one_unit_cannot_show_a_gain() -> None:
    error = np.full(4, 0.2)
    assert best_share(error, error, np.full(4, 1 / 4), np.array(["a"] * 4)) == 0.0


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
