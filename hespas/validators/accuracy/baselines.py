"""Naive baselines with which every estimator is compared. An estimator that beats none of them has no value.

* ``datasheet-roofline``: published peaks, compulsory bytes, no launch overhead, no fit.
* ``one-efficiency``: one launch time t0 and one efficiency e for the whole device: t0 + roofline / e.
* ``overhead+two-efficiencies``: an overhead and an efficiency per operation class, if a class has enough
  shapes; otherwise the values of the device.

The last two are fitted to the measurements. Each shape is predicted by a fit without that shape: to the
other sources if these have other shapes, otherwise to the other four fifths of the shapes. For a table, the
fit uses the rows that are marked for fitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import CasePrediction
from hespas.estimators.roofline import Roofline
from hespas.fitting.solvers import robust_least_squares
from hespas.fitting.statistics import (
    ShapeGroups,
    one_thread,
    unique_shapes,
)
from hespas.graph import OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, constant
from hespas.hardware import Device
from hespas.validators.accuracy.cases import Cases, shared_shapes

__all__ = ["BASELINES", "MOST_FITTED", "FittingRows", "baselines_of_rows", "fitted_baselines", "naive_ns"]

BASELINES = ("datasheet-roofline", "one-efficiency", "overhead+two-efficiencies")
_SHORTEST_NS, _LONGEST_NS = 1e-6, 1e18
"""Least and largest time that is fitted to; no operation takes less or more."""

_FOLDS = 5
MOST_FITTED = 500_000
"""Most shapes of a fit, drawn at random with a fixed seed: more change its two parameters by less than their
errors.
"""
_LEAST_SHAPES = 8
"""Least shapes of a class with its own fit; with fewer, the fit of the device is better."""
_PULL = 1e-3
"""Weight of the start of a fit relative to one shape. Shapes of one size do not determine the launch part of
their time: without this weight the last bit of a logarithm, which differs between processors, would decide.
"""


def naive_ns(graph: OpGraph, device: Device, *, num_ranks: int = -1) -> FloatArray:
    """Return the data-sheet roofline of each node [ns], in a job of ``num_ranks`` ranks (-1: unknown)."""
    bare = replace(device, efficiencies=(), launch_overhead_ns=0.0)
    return Roofline(num_ranks=num_ranks).estimate(graph, bare).duration_ns


def fitted_baselines(
    cases: Sequence[Cases], naive: Sequence[FloatArray], times: Sequence[FloatArray]
) -> list[tuple[CasePrediction, ...]]:
    """Return the predictions of all naive baselines for the cases of each source on one device.

    ``naive`` is the data-sheet roofline of one execution of each case [ns]; ``times`` is the number of
    executions of each case.
    """
    count = np.concatenate(list(times))
    shape = shared_shapes(cases)
    table = FittingRows(
        naive_ns=np.concatenate(list(naive)),
        measured_ns=np.concatenate([source.measured_ns for source in cases]) / count,
        op_class=np.concatenate([source.op_class for source in cases]).astype(np.int32),
        shape=shape,
        group=shape,
    )
    folds: list[IntArray] = []  # one of five per shape, of equal sizes and the same in every run
    for source in cases:
        checksum = np.array([crc32(text.encode("utf-8", "replace")) for text in source.shapes], np.int64)
        fold = np.empty(len(checksum), np.int64)
        fold[np.argsort(checksum, kind="stable")] = np.arange(len(checksum)) % _FOLDS
        folds.append(fold[source.shape] if len(source) else source.shape)
    fitted = np.full((2, len(count)), np.nan)
    if len(cases) > 1:
        source_number = np.repeat(np.arange(len(cases)), [len(source) for source in cases])
        fitted = table.fitted(source_number)
    missing = np.isnan(fitted[0])  # one source, or all have the same shapes
    if missing.any():
        fitted[:, missing] = table.fitted(np.concatenate(folds))[:, missing]
    bounds = np.cumsum([0, *(len(source) for source in cases)])
    columns = (table.naive_ns * count, *(fitted * count))
    return [
        tuple(_prediction(name, column[start:stop]) for name, column in zip(BASELINES, columns, strict=True))
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


@one_thread()
def baselines_of_rows(table: FittingRows, is_test: BoolArray) -> tuple[CasePrediction, ...]:
    """Return the predictions of all naive baselines for the rows in ``is_test``, fitted to the other rows.

    If there are no other rows, each fifth of the sizes is predicted by a fit to the other four.
    """
    fitted = np.full((2, len(table.shape)), np.nan)
    if not is_test.all():
        table.predict(~is_test, is_test, fitted)
    missing = is_test & np.isnan(fitted[0])
    if missing.any():
        sizes = ShapeGroups.of(table.group)
        fold = (np.random.default_rng(0).permutation(len(sizes)) % _FOLDS).astype(np.int8)
        cross_fitted = table.fitted(fold[sizes.index])
        del sizes, fold
        if missing.all():
            fitted = cross_fitted
        else:
            fitted[:, missing] = cross_fitted[:, missing]
    whole = bool(is_test.all())
    return tuple(
        _prediction(name, column if whole else column[is_test])
        for name, column in zip(BASELINES, (table.naive_ns, *fitted), strict=True)
    )


def _prediction(name: str, duration_ns: FloatArray) -> CasePrediction:
    unknown = constant(np.nan, len(duration_ns))
    return CasePrediction(estimator=name, duration_ns=duration_ns, low_ns=unknown, high_ns=unknown)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FittingRows:
    """Rows of one device for fits of the baselines, with times of one execution; columns of shape
    ``(rows,)``.

    ``naive_ns`` is the data-sheet roofline (NaN: unknown). Rows with the same ``shape`` do equal work. Rows
    with the same ``group`` are never divided between fitted and predicted rows. A group is a shape, or equal
    sizes in all number formats.
    """

    naive_ns: FloatArray
    measured_ns: FloatArray
    op_class: SmallIntArray
    shape: IntArray
    group: IntArray

    @property
    def is_sampled(self) -> bool:
        """Return True if there are more shapes than a fit uses, which reports must mention."""
        return int(self.shape.max(initial=-1)) >= MOST_FITTED

    def fitted(self, part: IntArray | NDArray[np.int8]) -> NDArray[np.float64]:
        """Return the predictions of both fitted baselines, shape ``(2, cases)``, by cross-validation.
        ``part`` is the fold of each case; each fold is predicted by a fit to the other folds.

        Predictions are NaN if the other folds have no other shape.
        """
        fitted = np.full((2, len(part)), np.nan)
        for fold in np.unique(part).tolist():
            self.predict(part != fold, part == fold, fitted)
        return fitted

    def predict(self, is_fitted: BoolArray, is_predicted: BoolArray, out: NDArray[np.float64]) -> None:
        """Write the predictions of naive baselines for the rows ``is_predicted`` into ``out``. They are
        fitted to the rows ``is_fitted``.
        """
        is_usable = (self.naive_ns < _LONGEST_NS) & (self.measured_ns < _LONGEST_NS) & (self.measured_ns > 0)
        # The fit also excludes shapes of other sources that are among the predicted ones.
        fit = is_usable & is_fitted & ~np.isin(self.group, self.group[is_predicted])
        if not fit.any():
            return
        out[:, is_predicted] = self._predicted(fit, is_predicted)
        for code in np.unique(self.op_class[is_predicted]).tolist():
            fit_class = fit & (self.op_class == code)
            if len(ShapeGroups.of(self.shape[fit_class])) >= _LEAST_SHAPES:
                rows = is_predicted & (self.op_class == code)
                out[1][rows] = self._predicted(fit_class, rows)

    def _predicted(self, fit: BoolArray, rows: BoolArray) -> FloatArray:
        """Return the times of ``rows``, predicted by a line that is fitted to each distinct shape of ``fit``
        once.

        The line minimises the sum of soft absolute errors of the logarithm. A prediction that is two times
        too long counts as much as one that is half as long. Outliers do not count by their square, and
        frequent shapes do not count more.
        """
        numbers = np.flatnonzero(fit)
        if len(numbers) > MOST_FITTED:
            distinct = ShapeGroups.of(self.shape[numbers]).distinct
            if len(distinct) > MOST_FITTED:
                is_drawn = np.zeros(int(distinct[-1]) + 1, np.bool_)
                is_drawn[np.random.default_rng(0).choice(distinct, MOST_FITTED, replace=False)] = True
                numbers = numbers[is_drawn[self.shape[numbers]]]
        x, measured, _ = unique_shapes(self.naive_ns[numbers], self.measured_ns[numbers], self.shape[numbers])
        target = np.log(measured)
        shortest = max(float(np.quantile(measured, 0.01)), 1.0)
        above = x > _SHORTEST_NS
        first = float(np.median(measured[above] / x[above])) if above.any() else 1.0
        origin = np.log(np.array((shortest, first)))

        def errors(parameters: FloatArray) -> FloatArray:
            start, slope = np.exp(parameters).tolist()
            return np.concatenate((np.log(start + slope * x) - target, _PULL * (parameters - origin)))

        start, slope = np.exp(robust_least_squares(errors, origin, 0.1).values).tolist()
        times: FloatArray = start + slope * self.naive_ns[rows]
        return times
