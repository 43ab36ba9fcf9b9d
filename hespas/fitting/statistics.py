"""Error statistics of predictions, with confidence intervals. Errors are relative: (p - m) / m."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from math import nan
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray, constant, is_one_value

__all__ = [
    "ErrorSummary",
    "NoiseFloor",
    "ShapeGroups",
    "error_figures",
    "errors_of",
    "kendall_tau",
    "medians_of",
    "noise_floor",
    "one_thread",
    "relative_error",
    "slope_of",
    "unique_shapes",
]

_RESAMPLES = 1000
_SEED = 20_240_601
_CONFIDENCE = 0.95
_MOST_BLOCKS = 2000
_SPARSE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """Error statistics of ``n`` compared cases, out of ``of`` cases.

    * ``coverage`` is the share of the measured time that the compared cases have. In a comparison with
      profiles it is the share of all recorded device time, matched or not.
    * ``bias`` is the mean signed error, ``sum_error`` the error of the sums. ``log_ratio`` is the median of
      ln(predicted / measured).
    * ``ci_low`` and ``ci_high`` bound ``mape`` (95 %, percentile bootstrap over distinct shapes); NaN for
      fewer than two shapes.
    * ``interval_n`` is the number of cases with an estimator interval. ``interval_coverage`` is the share of
      them whose measurement is in the interval.
    """

    n: int
    of: int
    shapes: int
    coverage: float
    mape: float = nan
    median_ape: float = nan
    p90_ape: float = nan
    bias: float = nan
    sum_error: float = nan
    rmse_ns: float = nan
    log_ratio: float = nan
    ci_low: float = nan
    ci_high: float = nan
    interval_n: int = 0
    interval_coverage: float = nan


def relative_error(predicted: FloatArray, measured: FloatArray) -> FloatArray:
    """Return (p - m) / m; NaN without a measurement, without a prediction, or if it is infinite."""
    comparable = (measured > 0) & np.isfinite(predicted) & np.isfinite(measured)
    error = np.full(len(measured), np.nan)
    with np.errstate(over="ignore"):
        error[comparable] = (predicted[comparable] - measured[comparable]) / measured[comparable]
    return np.where(np.isinf(error), np.nan, error)


def error_figures(error: FloatArray) -> dict[str, float]:
    """Return ``mape``, ``median_ape``, ``p90_ape`` and ``bias`` of relative errors; NaN without errors."""
    size = np.abs(error)
    some = len(error) > 0
    return {
        "mape": float(size.mean()) if some else nan,
        "median_ape": float(np.median(size)) if some else nan,
        "p90_ape": float(np.quantile(size, 0.9)) if some else nan,
        "bias": float(error.mean()) if some else nan,
    }


def errors_of(
    predicted: FloatArray,
    measured: FloatArray,
    shape: IntArray,
    bounds: tuple[FloatArray, FloatArray] | None = None,
) -> ErrorSummary:
    """Return error statistics of predictions against measurements; NaN if no case can be compared.

    ``bounds`` are the ends of the estimator's intervals [ns], NaN without an interval.
    """
    error = relative_error(predicted, measured)
    comparable = ~np.isnan(error)
    total = float(measured[measured > 0].sum())
    coverage = float(measured[comparable].sum()) / total if total else nan
    if not comparable.any():
        return ErrorSummary(n=0, of=len(error), shapes=0, coverage=coverage)
    if not comparable.all():
        error, shape = error[comparable], shape[comparable]
    p, m = (column if len(column) == len(error) else column[comparable] for column in (predicted, measured))
    low, high, shapes = _bootstrap_interval(np.abs(error), shape)
    positive = p > 0
    bounded, inside = 0, nan
    if bounds is not None:
        has_interval = (measured > 0) & ~np.isnan(bounds[0]) & ~np.isnan(bounds[1])
        bounded = int(has_interval.sum())
        is_inside = (bounds[0] <= measured) & (measured <= bounds[1])
        inside = float(is_inside[has_interval].mean()) if bounded else nan
    return ErrorSummary(
        n=len(error),
        of=len(comparable),
        shapes=shapes,
        coverage=coverage,
        **error_figures(error),
        sum_error=float((p.sum() - m.sum()) / m.sum()),
        rmse_ns=float(np.sqrt(np.mean((p - m) ** 2))),
        log_ratio=float(np.median(np.log(p[positive] / m[positive]))) if positive.any() else nan,
        ci_low=low,
        ci_high=high,
        interval_n=bounded,
        interval_coverage=inside,
    )


def _bootstrap_interval(size: FloatArray, shape: IntArray) -> tuple[float, float, int]:
    """Return the ends of a confidence interval of the mean of ``size``, and the number of distinct shapes.

    Shapes are resampled with all their cases, because equal shapes are not independent. Above 2,000 shapes,
    random blocks of shapes are resampled, which gives the same distribution in bounded time.
    """
    groups = ShapeGroups.of(shape)
    shapes, block = len(groups), groups.index
    if shapes < 2:
        return nan, nan, shapes
    if shapes > _MOST_BLOCKS:
        block = (np.random.default_rng(_SEED).permutation(shapes) % _MOST_BLOCKS)[block]
    sums, counts = np.bincount(block, size), np.bincount(block).astype(np.float64)
    draws = _resample_counts(len(sums)).astype(np.float64)
    means = (draws @ sums) / (draws @ counts)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high), shapes


@lru_cache(maxsize=128)
def _resample_counts(blocks: int) -> NDArray[np.uint8]:
    """Return the number of times that each block of rows occurs in each bootstrap resample, shape
    ``(resamples, blocks)``. Cached, because summaries of large tables need the same counts often.
    """
    drawn = np.random.default_rng(_SEED).integers(0, blocks, (_RESAMPLES, blocks))
    # With as many draws as blocks, no block is drawn 256 times.
    return np.stack([np.bincount(row, minlength=blocks).astype(np.uint8) for row in drawn])


@dataclass(frozen=True, slots=True, eq=False)
class ShapeGroups:
    """Groups of rows with equal shapes. ``distinct`` are the shape numbers in order, ``index`` is the group
    of each row, and ``counts`` the number of rows of each group.

    Shape numbers start at 0. The largest is about the number of rows, so arrays may be indexed by them.
    """

    distinct: IntArray
    index: IntArray
    counts: IntArray

    @classmethod
    def of(cls, shape: IntArray) -> ShapeGroups:
        """Return the groups of rows with equal numbers in ``shape``. O(rows)."""
        if len(shape) and int(shape.max()) >= _SPARSE * len(shape):  # a few rows of a large table
            return cls(*np.unique(shape, return_inverse=True, return_counts=True))
        every = np.bincount(shape)
        distinct = np.flatnonzero(every)
        if len(distinct) == len(every):
            return cls(distinct, shape, every)
        rank = np.empty(len(every), np.int64)
        rank[distinct] = np.arange(len(distinct))
        return cls(distinct, rank[shape], every[distinct])

    def __len__(self) -> int:
        return len(self.distinct)

    def firsts(self) -> IntArray:
        """Return the first row of each group."""
        first = np.full(len(self), len(self.index), np.int64)
        np.minimum.at(first, self.index, np.arange(len(self.index)))
        return first

    def medians(self, values: FloatArray) -> FloatArray:
        """Return the median of each group; NaN if any of its values is NaN (NaN sorts last)."""
        if is_one_value(values):
            return constant(float(values[0]), len(self)) if len(values) else values
        medians = np.empty(len(self))
        if len(self) == len(values):
            medians[self.index] = values
            return medians
        several = self.counts[self.index] > 1
        medians[self.index[~several]] = values[~several]
        index, values = self.index[several], values[several]
        order = np.lexsort((values, index))
        group, ordered = index[order], values[order]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        counts = np.diff(starts, append=len(group))
        middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2
        medians[group[starts]] = np.where(np.isnan(ordered[starts + counts - 1]), np.nan, middle)
        return medians


def medians_of(values: FloatArray, shape: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return for each shape the median of its values, and the mean distance of the values from that median
    (NaN for one value).
    """
    groups = ShapeGroups.of(shape)
    median = groups.medians(values)
    distance = np.abs(values - median[groups.index])
    mean_distance = np.bincount(groups.index, distance, len(groups)) / groups.counts
    return median, np.where(groups.counts > 1, mean_distance, np.nan)


def unique_shapes(
    predicted: FloatArray, measured: FloatArray, shape: IntArray
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Return three arrays with one entry per distinct shape: the median prediction, the median measurement,
    and the shape number.
    """
    groups = ShapeGroups.of(shape)
    return groups.medians(predicted), groups.medians(measured), groups.distinct


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """Variation between repeated measurements of equal work, relative to the measurement: no estimator can
    have smaller errors.

    ``n`` cases have a shape that occurs several times. The variation of a case is the root of the sum of two
    squares: its distance from the median of its shape, and the mean distance of its runs from their median.
    ``mape`` is the mean over cases (not over shapes), ``median_ape`` and ``p90_ape`` are quantiles. NaN
    without repeats.
    """

    n: int
    mape: float
    median_ape: float
    p90_ape: float


def noise_floor(
    measured: FloatArray, spread_ns: FloatArray, repeats: NDArray[np.integer], shape: IntArray
) -> NoiseFloor:
    """Return the smallest error that any estimator can have, from the variation between cases of equal work
    and between their runs.
    """
    real: BoolArray = measured > 0
    if not real.all():
        measured, spread_ns, shape, repeats = measured[real], spread_ns[real], shape[real], repeats[real]
    if not len(measured):
        return NoiseFloor(0, nan, nan, nan)
    groups = ShapeGroups.of(shape)
    median = groups.medians(measured)[groups.index]
    between = np.abs(median - measured) / measured
    within = np.nan_to_num(spread_ns) / measured
    several = (groups.counts[groups.index] > 1) | (repeats > 1)
    if not several.any():
        return NoiseFloor(0, nan, nan, nan)
    error = np.hypot(between, within)[several]
    return NoiseFloor(
        int(several.sum()), float(error.mean()), float(np.median(error)), float(np.quantile(error, 0.9))
    )


class _ThreadpoolModule(Protocol):
    """Interface of threadpoolctl, which has no type annotations."""

    def threadpool_limits(self, *, limits: int) -> AbstractContextManager[object]: ...


@contextmanager
def one_thread() -> Generator[None]:
    """Limit libraries of linear algebra and of trees to one thread while the context is active. Results do
    not change.

    For small work, threads spend more time on waiting for each other than on the work, especially on a
    machine with other load.
    """
    with cast("_ThreadpoolModule", import_module("threadpoolctl")).threadpool_limits(limits=1):
        yield


def kendall_tau(first: FloatArray, second: FloatArray) -> float:
    """Return Kendall's tau-b of two rankings; NaN for fewer than two values or without differences."""
    comparable = ~(np.isnan(first) | np.isnan(second))
    if int(comparable.sum()) < 2:
        return nan
    from scipy.stats import kendalltau

    return float(kendalltau(first[comparable], second[comparable]).statistic)


def slope_of(x: FloatArray, y: FloatArray) -> float:
    """Return the slope of the least-squares line through the points; NaN if all ``x`` are equal."""
    away = x - x.mean()
    square = float((away * away).sum())
    return float((away * (y - y.mean())).sum()) / square if square else nan
