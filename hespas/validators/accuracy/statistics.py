"""Errors of predictions, with intervals. All errors are relative to the measurement: (p - m) / m."""

from __future__ import annotations

from collections.abc import Callable, Generator
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
    "soft_least_squares",
    "unique_shapes",
]

_RESAMPLES = 1000
_SEED = 20_240_601
_CONFIDENCE = 0.95
_MOST_BLOCKS = 2000
_SPARSE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSummary:
    """``n`` cases of ``of`` could be compared; ``coverage`` is their share of the measured time (in the rows
    of a comparison: of all device time that was recorded, matched or not). ``bias`` is the mean signed error,
    ``sum_error`` that of the sums, ``log_ratio`` the median of ln(p / m). ``ci_low`` and ``ci_high`` bound
    ``mape`` (95 %, percentile bootstrap over distinct shapes); NaN below two shapes. Of ``interval_n`` cases
    the estimator gave an interval for, ``interval_coverage`` lie inside.
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
    """(p - m) / m; NaN where nothing was measured or predicted, or that without end."""
    known = (measured > 0) & np.isfinite(predicted) & np.isfinite(measured)
    error = np.full(len(measured), np.nan)
    with np.errstate(over="ignore"):
        error[known] = (predicted[known] - measured[known]) / measured[known]
    return np.where(np.isinf(error), np.nan, error)


def error_figures(error: FloatArray) -> dict[str, float]:
    """``mape``, ``median_ape``, ``p90_ape`` and ``bias`` of relative errors; NaN of none."""
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
    """The summary of some cases; figures are NaN where none can be compared. ``bounds`` are the ends of the
    estimator's intervals [ns], NaN where it gave none.
    """
    error = relative_error(predicted, measured)
    known = ~np.isnan(error)
    total = float(measured[measured > 0].sum())
    coverage = float(measured[known].sum()) / total if total else nan
    if not known.any():
        return ErrorSummary(n=0, of=len(error), shapes=0, coverage=coverage)
    if not known.all():
        error, shape = error[known], shape[known]
    taken, real = (column if len(column) == len(error) else column[known] for column in (predicted, measured))
    low, high, shapes = _interval(np.abs(error), shape)
    positive = taken > 0
    bounded, inside = (0, nan) if bounds is None else _inside(bounds, measured)
    return ErrorSummary(
        n=len(error),
        of=len(known),
        shapes=shapes,
        coverage=coverage,
        **error_figures(error),
        sum_error=float((taken.sum() - real.sum()) / real.sum()),
        rmse_ns=float(np.sqrt(np.mean((taken - real) ** 2))),
        log_ratio=float(np.median(np.log(taken[positive] / real[positive]))) if positive.any() else nan,
        ci_low=low,
        ci_high=high,
        interval_n=bounded,
        interval_coverage=inside,
    )


def _inside(bounds: tuple[FloatArray, FloatArray], measured: FloatArray) -> tuple[int, float]:
    """How many measurements have an interval, and the share of them that lies inside."""
    low, high = bounds
    stated = (measured > 0) & ~np.isnan(low) & ~np.isnan(high)
    count = int(stated.sum())
    within = (low <= measured) & (measured <= high)
    return count, float(within[stated].mean()) if count else nan


def _interval(size: FloatArray, shape: IntArray) -> tuple[float, float, int]:
    """Bounds of the mean of ``size``, resampling shapes with all their cases: equal shapes are not
    independent. Past 2,000 shapes, blocks of shapes drawn at random are resampled: the same, in bounded time.
    """
    groups = ShapeGroups.of(shape)
    shapes, place = len(groups), groups.place
    if shapes < 2:
        return nan, nan, shapes
    if shapes > _MOST_BLOCKS:
        place = (np.random.default_rng(_SEED).permutation(shapes) % _MOST_BLOCKS)[place]
    sums, counts = np.bincount(place, size), np.bincount(place).astype(np.float64)
    times = _times_drawn(len(sums)).astype(np.float64)
    means = (times @ sums) / (times @ counts)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high), shapes


@lru_cache(maxsize=128)
def _times_drawn(blocks: int) -> NDArray[np.uint8]:
    """How often each block is in each resample, shape ``(resamples, blocks)``. Large tables ask for the same
    again and again.
    """
    drawn = np.random.default_rng(_SEED).integers(0, blocks, (_RESAMPLES, blocks))
    # Out of as many draws as blocks, nobody sees one block 256 times.
    return np.stack([np.bincount(row, minlength=blocks).astype(np.uint8) for row in drawn])


@dataclass(frozen=True, slots=True, eq=False)
class ShapeGroups:
    """The distinct ones of some shape numbers, in order: each row's ``place`` among them, and the ``counts``
    of rows of each. Shape numbers count from 0 and are about as many as there are rows.
    """

    distinct: IntArray
    place: IntArray
    counts: IntArray

    @classmethod
    def of(cls, shape: IntArray) -> ShapeGroups:
        """Those of some rows. O(rows)."""
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
        """The first row of each."""
        found = np.full(len(self), len(self.place), np.int64)
        np.minimum.at(found, self.place, np.arange(len(self.place)))
        return found

    def medians(self, values: FloatArray) -> FloatArray:
        """The median of each; NaN where any of its values is (they sort last)."""
        if is_one_value(values):
            return constant(float(values[0]), len(self)) if len(values) else values
        found = np.empty(len(self))
        if len(self) == len(values):
            found[self.place] = values
            return found
        several = self.counts[self.place] > 1
        found[self.place[~several]] = values[~several]
        place, values = self.place[several], values[several]
        order = np.lexsort((values, place))
        group, ordered = place[order], values[order]
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        counts = np.diff(starts, append=len(group))
        middle = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2
        found[group[starts]] = np.where(np.isnan(ordered[starts + counts - 1]), np.nan, middle)
        return found


def medians_of(values: FloatArray, shape: IntArray) -> tuple[FloatArray, FloatArray]:
    """The median of each shape that occurs, and the mean distance of its values from that; NaN distance where
    there is one value only.
    """
    groups = ShapeGroups.of(shape)
    median = groups.medians(values)
    away = np.bincount(groups.place, np.abs(values - median[groups.place]), len(groups)) / groups.counts
    return median, np.where(groups.counts > 1, away, np.nan)


def unique_shapes(
    predicted: FloatArray, measured: FloatArray, shape: IntArray
) -> tuple[FloatArray, FloatArray, IntArray]:
    """One row per distinct shape: the median prediction and the median measurement of its cases."""
    groups = ShapeGroups.of(shape)
    return groups.medians(predicted), groups.medians(measured), groups.distinct


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """How far repeats of equal work lie apart, relative to the measurement. Of each of the ``n`` cases whose
    shape was measured more than once: the root of the sum of squares of its distance from the median of its
    shape and of the mean distance of its runs from its own median; ``mape`` is the mean of these over cases
    (not over shapes), ``median_ape`` and ``p90_ape`` likewise. NaN where nothing was repeated.
    """

    n: int
    mape: float
    median_ape: float
    p90_ape: float


def noise_floor(
    measured: FloatArray, spread_ns: FloatArray, repeats: NDArray[np.integer], shape: IntArray
) -> NoiseFloor:
    """What no estimator can beat, from repeats of equal work: between cases, and between the runs of each."""
    real: BoolArray = measured > 0
    if not real.all():
        measured, spread_ns, shape, repeats = measured[real], spread_ns[real], shape[real], repeats[real]
    if not len(measured):
        return NoiseFloor(0, nan, nan, nan)
    groups = ShapeGroups.of(shape)
    median = groups.medians(measured)[groups.place]
    between = np.abs(median - measured) / measured
    within = np.nan_to_num(spread_ns) / measured
    several = (groups.counts[groups.place] > 1) | (repeats > 1)
    if not several.any():
        return NoiseFloor(0, nan, nan, nan)
    error = np.hypot(between, within)[several]
    return NoiseFloor(
        int(several.sum()), float(error.mean()), float(np.median(error)), float(np.quantile(error, 0.9))
    )


class _Threads(Protocol):
    """threadpoolctl has no types."""

    def threadpool_limits(self, *, limits: int) -> AbstractContextManager[object]: ...


@contextmanager
def one_thread() -> Generator[None]:
    """Libraries of linear algebra and of trees use one thread: where the work is small, threads that wait for
    each other take longer than it, many times so on a machine with other work. Results are the same.
    """
    with cast("_Threads", import_module("threadpoolctl")).threadpool_limits(limits=1):
        yield


def soft_least_squares(
    errors: Callable[[FloatArray], FloatArray], start: FloatArray, scale: float
) -> FloatArray:
    """Parameters with the least sum of errors that count by their square below ``scale``, by their size above
    (``soft_l1`` of ``scipy.optimize.least_squares``).
    """
    from scipy.optimize import least_squares

    return np.asarray(least_squares(errors, start, loss="soft_l1", f_scale=scale).x, np.float64)


def kendall_tau(one: FloatArray, two: FloatArray) -> float:
    """Kendall's tau-b of two rankings; NaN below two values or without any difference."""
    known = ~(np.isnan(one) | np.isnan(two))
    if int(known.sum()) < 2:
        return nan
    from scipy.stats import kendalltau

    return float(kendalltau(one[known], two[known]).statistic)


def slope_of(x: FloatArray, y: FloatArray) -> float:
    """The slope of the straight line of least squares; NaN where all ``x`` are the same."""
    away = x - x.mean()
    square = float((away * away).sum())
    return float((away * (y - y.mean())).sum()) / square if square else nan
