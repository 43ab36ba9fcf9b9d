"""Error figures by hand, coverage of intervals, and robustness to any data."""

from __future__ import annotations

from math import isnan, log, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.fitting.statistics import (
    ErrorSummary,
    errors_of,
    kendall_tau,
    noise_floor,
    relative_error,
    slope_of,
    unique_shapes,
)
from hespas.graph.columns import FloatArray, IntArray


def _floats(*values: float) -> FloatArray:
    return np.array(values, np.float64)


def _rows(*values: int) -> IntArray:
    return np.array(values, np.int64)


def test_a_summary_by_hand() -> None:
    found = errors_of(_floats(110, 80, nan, 50), _floats(100, 100, 50, 100), _rows(0, 1, 2, 3))
    assert (found.n, found.of, found.shapes) == (3, 4, 3)
    assert found.coverage == pytest.approx(300 / 350)
    assert found.mape == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert found.median_ape == pytest.approx(0.2)
    assert found.p90_ape == pytest.approx(0.2 + 0.8 * 0.3)
    assert found.bias == pytest.approx(-0.2)
    assert found.sum_error == pytest.approx((240 - 300) / 300)
    assert found.rmse_ns == pytest.approx(sqrt((100 + 400 + 2500) / 3))
    assert found.log_ratio == pytest.approx(log(0.8))
    assert 0.1 <= found.ci_low < found.mape < found.ci_high <= 0.5


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [((), ()), ((nan, nan), (1.0, 2.0)), ((1.0, 2.0), (0.0, 0.0)), ((1.0,), (-3.0,)), ((np.inf,), (2.0,))],
)
def test_what_cannot_be_compared_is_no_figure(
    predicted: tuple[float, ...], measured: tuple[float, ...]
) -> None:
    found = errors_of(_floats(*predicted), _floats(*measured), _rows(*range(len(measured))))
    assert (found.n, found.of, found.shapes) == (0, len(measured), 0)
    names = (
        "mape",
        "median_ape",
        "p90_ape",
        "bias",
        "sum_error",
        "rmse_ns",
        "log_ratio",
        "ci_low",
        "ci_high",
    )
    assert all(isnan(getattr(found, name)) for name in names)


def test_one_case_has_errors_and_no_interval() -> None:
    found = errors_of(_floats(50), _floats(100), _rows(0))
    assert (found.mape, found.median_ape, found.p90_ape, found.bias) == (0.5, 0.5, 0.5, -0.5)
    assert isnan(found.ci_low)
    assert isnan(found.ci_high)


def test_a_prediction_of_nothing_has_an_error_and_no_ratio() -> None:
    found = errors_of(_floats(0, 0), _floats(10, 20), _rows(0, 1))
    assert (found.mape, found.sum_error) == (1.0, -1.0)
    assert isnan(found.log_ratio)


def test_repeats_of_one_shape_do_not_narrow_the_interval() -> None:
    """A thousand copies of four shapes are no more evidence than the four."""
    predicted, measured, shape = _floats(110, 130, 150, 170), _floats(100, 100, 100, 100), _rows(0, 1, 2, 3)
    few = errors_of(predicted, measured, shape)
    many = errors_of(np.tile(predicted, 1000), np.tile(measured, 1000), np.tile(shape, 1000))
    assert (many.ci_low, many.ci_high) == pytest.approx((few.ci_low, few.ci_high))
    assert (many.n, many.shapes) == (4000, 4)


def _width(found: ErrorSummary) -> float:
    return found.ci_high - found.ci_low


@pytest.mark.parametrize("shapes", [500, 10_000])
def test_the_interval_is_as_wide_as_theory_says(shapes: int) -> None:
    """For many shapes the bootstrap tends to the mean and its standard error."""
    size = np.random.default_rng(3).exponential(1.0, shapes)
    found = errors_of(100 * (1 + size), np.full(shapes, 100.0), np.arange(shapes))
    assert _width(found) == pytest.approx(2 * 1.96 * float(size.std()) / sqrt(shapes), rel=0.12)
    assert found.ci_low < found.mape < found.ci_high


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng, covered, trials = np.random.default_rng(11), 0, 200
    for _ in range(trials):
        size = rng.uniform(0.0, 1.0, 40)
        found = errors_of(100 * (1 + size), np.full(40, 100.0), np.arange(40))
        covered += found.ci_low <= 0.5 <= found.ci_high
    assert 0.89 <= covered / trials <= 0.99


def test_intervals_are_the_same_in_every_run() -> None:
    rng = np.random.default_rng(5)
    columns = rng.uniform(1, 2, 50), rng.uniform(1, 2, 50), rng.integers(0, 20, 50)
    assert repr(errors_of(*columns)) == repr(errors_of(*columns))  # NaN is not equal to itself


POSITIVE = st.floats(1e-3, 1e9)


@given(st.lists(st.tuples(POSITIVE, POSITIVE, st.integers(0, 5)), min_size=2, max_size=20))
def test_errors_have_no_unit_and_no_order(rows: list[tuple[float, float, int]]) -> None:
    predicted, measured = (np.array([row[part] for row in rows]) for part in (0, 1))
    shape = np.array([row[2] for row in rows], np.int64)
    one = errors_of(predicted, measured, shape)
    for other in (
        errors_of(predicted * 8, measured * 8, shape),
        errors_of(predicted[::-1], measured[::-1], shape[::-1]),
    ):
        for name in ("mape", "median_ape", "p90_ape", "bias", "sum_error", "log_ratio", "ci_low", "ci_high"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), rel=1e-9, abs=1e-9, nan_ok=True)
    assert abs(one.bias) <= one.mape * (1 + 1e-9)
    assert one.median_ape <= one.p90_ape * (1 + 1e-9)
    assert one.coverage == 1.0


@given(st.lists(st.floats(), max_size=12), st.lists(st.floats(), max_size=12))
def test_no_number_breaks_the_error(predicted: list[float], measured: list[float]) -> None:
    rows = min(len(predicted), len(measured))
    with np.errstate(over="ignore", invalid="ignore"):  # figures near the largest float
        found = relative_error(_floats(*predicted[:rows]), _floats(*measured[:rows]))
    assert len(found) == rows


def test_shapes_count_once_by_their_medians() -> None:
    predicted, measured, rows = unique_shapes(
        _floats(1, 1, 1, 5, nan, 7), _floats(10, 30, 20, 4, 6, 8), _rows(3, 3, 3, 1, 1, 2)
    )
    assert rows.tolist() == [1, 2, 3]
    assert measured.tolist() == [5, 8, 20]
    assert np.isnan(predicted[0])
    assert predicted[1:].tolist() == [7, 1]


def test_the_noise_of_equal_work() -> None:
    """Three times the same shape: each is |median - m| / m away from what no estimator can beat."""
    once = np.ones(4, np.int64)
    found = noise_floor(_floats(90, 100, 120, 7), np.full(4, nan), once, _rows(0, 0, 0, 1))
    assert found.n == 3
    assert found.mape == pytest.approx((10 / 90 + 0 + 20 / 120) / 3)
    assert found.median_ape == pytest.approx(10 / 90)


def test_the_noise_between_runs_adds_to_that_between_instances() -> None:
    found = noise_floor(_floats(100, 100), _floats(5, nan), _rows(4, 1), _rows(0, 1))
    assert found.n == 1
    assert found.mape == pytest.approx(0.05)
    both = noise_floor(_floats(80, 100), _floats(8, 0), _rows(2, 2), _rows(0, 0))
    assert both.mape == pytest.approx((sqrt((10 / 80) ** 2 + 0.1**2) + 10 / 100) / 2)


@pytest.mark.parametrize("measured", [(), (1.0, 2.0), (0.0, 0.0)])
def test_nothing_repeated_has_no_noise_floor(measured: tuple[float, ...]) -> None:
    rows = len(measured)
    found = noise_floor(_floats(*measured), np.full(rows, nan), np.ones(rows, np.int64), np.arange(rows))
    assert found.n == 0
    assert isnan(found.mape)


def test_rank_agreement() -> None:
    assert kendall_tau(_floats(1, 2, 3, 4), _floats(10, 20, 30, 40)) == pytest.approx(1.0)
    assert kendall_tau(_floats(1, 2, 3, 4), _floats(4, 3, 2, 1)) == pytest.approx(-1.0)
    # Five of six pairs agree.
    assert kendall_tau(_floats(1, 2, 3, 4), _floats(1, 2, 4, 3)) == pytest.approx(4 / 6)
    assert kendall_tau(_floats(1, nan, 2), _floats(1, 5, 2)) == pytest.approx(1.0)
    assert isnan(kendall_tau(_floats(1), _floats(1)))
    assert isnan(kendall_tau(_floats(1, 1), _floats(1, 2)))


def test_slopes() -> None:
    assert slope_of(_floats(0, 1, 2), _floats(5, 8, 11)) == pytest.approx(3.0)
    assert isnan(slope_of(_floats(2, 2), _floats(1, 3)))
