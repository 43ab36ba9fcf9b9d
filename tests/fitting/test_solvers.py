"""Robust and non-negative least squares, and standard errors."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.fitting.solvers import nonnegative_least_squares, robust_least_squares, standard_errors
from hespas.graph.columns import FloatArray


def test_an_outlier_hardly_moves_a_soft_fit() -> None:
    values = np.append(np.full(20, 3.0), 1000.0)
    optimum = robust_least_squares(lambda at: at[0] - values, np.zeros(1), 0.1)
    assert float(optimum.values[0]) == pytest.approx(3.0, abs=0.05)


def test_bounds_hold() -> None:
    bounds = np.array([0.0]), np.array([2.0])
    optimum = robust_least_squares(lambda at: at - 3.0, np.ones(1), 1.0, bounds=bounds)
    assert float(optimum.values[0]) == pytest.approx(2.0, abs=1e-6)
    assert optimum.jacobian.shape == (1, 1)


def test_a_pull_counts_by_its_square_however_large() -> None:
    def moved(pull: float) -> float:
        optimum = robust_least_squares(
            lambda at: np.full(4, at[0] - 10.0), np.zeros(1), 0.1, pulls=lambda at: pull * at
        )
        return float(optimum.values[0])

    assert moved(1e-6) == pytest.approx(10.0, abs=1e-3)
    assert 0 < moved(1.0) < 1


def test_factors_are_not_negative_and_fit_relative_errors() -> None:
    sizes = np.array([1.0, 10.0, 100.0, 1e6])
    columns = np.stack((np.ones(4), sizes, -np.ones(4)), axis=1)
    values, error, _ = nonnegative_least_squares(columns, 5.0 + 2.0 * sizes)
    assert values.tolist() == pytest.approx([5.0, 2.0, 0.0], abs=1e-9)
    assert np.abs(error).max() < 1e-9


def test_rounds_lower_the_weight_of_outliers() -> None:
    times = np.append(np.full(20, 3.0), 300.0)

    def factor(rounds: int) -> float:
        return float(nonnegative_least_squares(np.ones((21, 1)), times, rounds=rounds, scale=0.01)[0][0])

    assert abs(factor(8) - 3.0) < abs(factor(1) - 3.0)
    assert factor(8) == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("unit", [1.0, 1e-9])
def test_standard_errors_have_the_unit_of_their_parameter(unit: float) -> None:
    generator = np.random.default_rng(0)
    slopes: FloatArray = np.stack((np.ones(400), generator.normal(size=400) / unit), axis=1)
    first, second = standard_errors(slopes, 400.0 * 0.04, 400).tolist()
    assert first == pytest.approx(0.2 / 20, rel=0.1)
    assert second == pytest.approx(unit * 0.2 / 20, rel=0.1)
