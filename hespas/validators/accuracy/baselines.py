"""The naive models that every estimator is shown beside: one that beats none of them is worth nothing.

* ``datasheet-roofline``: published peaks, compulsory bytes, no launch overhead, no fit.
* ``one-efficiency``: one launch time and one efficiency for the whole device: t0 + roofline / e.
* ``overhead+two-efficiencies``: an overhead and an efficiency per operation class, where a class has enough
  shapes; those of the device elsewhere.

The last two are fitted to the measurements, so each shape is predicted by a fit that has not seen it: that
of the other sources where these have shapes of their own, else of the other four fifths of the shapes. A
table's rows for fitting are the fit's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.roofline import Roofline
from hespas.graph import OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, constant
from hespas.hardware import Device
from hespas.validators.accuracy.cases import Cases, Prediction, shared_shapes
from hespas.validators.accuracy.statistics import (
    ShapeGroups,
    one_thread,
    soft_least_squares,
    unique_shapes,
)

__all__ = ["BASELINES", "MOST_FITTED", "FittingRows", "baselines_of_rows", "fitted_baselines", "naive_ns"]

BASELINES = ("datasheet-roofline", "one-efficiency", "overhead+two-efficiencies")
_SHORTEST_NS, _LONGEST_NS = 1e-6, 1e18
"""What is no time of any operation (light goes no further than an atom, 30 years) is not fitted to."""

_FOLDS = 5
MOST_FITTED = 500_000
"""Shapes that a fit takes at most, drawn at random, always the same: more move its two parameters by less
than their own errors.
"""
_LEAST_SHAPES = 8
"""Shapes of a class below which its own fit says less than the device's."""
_PULL = 1e-3
"""Weight of where a fit starts beside one shape. Shapes of one size say nothing of what part of their time is
launch: without it, the last bit of a logarithm (they differ between processors) would choose.
"""


def naive_ns(graph: OpGraph, device: Device, *, num_ranks: int = -1) -> FloatArray:
    """The roofline of the published peaks of each node [ns], in a job of ``num_ranks`` (-1: unknown)."""
    bare = replace(device, efficiencies=(), launch_overhead_ns=0.0)
    return Roofline(num_ranks=num_ranks).estimate(graph, bare).duration_ns


def fitted_baselines(
    cases: Sequence[Cases], naive: Sequence[FloatArray], times: Sequence[FloatArray]
) -> list[tuple[Prediction, ...]]:
    """All baselines of the cases of each source measured on one device; see the module. ``naive`` is the
    data-sheet roofline of one execution [ns], of which each case has ``times``.
    """
    count = np.concatenate(list(times))
    shape = shared_shapes(cases)
    table = FittingRows(
        naive_ns=np.concatenate(list(naive)),
        measured_ns=np.concatenate([each.measured_ns for each in cases]) / count,
        op_class=np.concatenate([each.op_class for each in cases]).astype(np.int32),
        shape=shape,
        group=shape,
    )
    folds = np.concatenate([_folds(each) for each in cases])
    found = np.full((2, len(count)), np.nan)
    if len(cases) > 1:
        source = np.repeat(np.arange(len(cases)), [len(each) for each in cases])
        found = table.fitted(source)
    missing = np.isnan(found[0])  # one source, or all have the same shapes
    if missing.any():
        found[:, missing] = table.fitted(folds)[:, missing]
    bounds = np.cumsum([0, *(len(each) for each in cases)])
    columns = (table.naive_ns * count, *(found * count))
    return [
        tuple(_prediction(name, column[start:stop]) for name, column in zip(BASELINES, columns, strict=True))
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


@one_thread()
def baselines_of_rows(table: FittingRows, is_test: BoolArray) -> tuple[Prediction, ...]:
    """All baselines of the rows to predict, fitted on the others, or on four fifths of the sizes for the last
    fifth where there are no others.
    """
    found = np.full((2, len(table.shape)), np.nan)
    if not is_test.all():
        table.predict(~is_test, is_test, found)
    missing = is_test & np.isnan(found[0])
    if missing.any():
        sizes = ShapeGroups.of(table.group)
        part = (np.random.default_rng(0).permutation(len(sizes)) % _FOLDS).astype(np.int8)
        fitted = table.fitted(part[sizes.place])
        del sizes, part
        if missing.all():
            found = fitted
        else:
            found[:, missing] = fitted[:, missing]
    whole = bool(is_test.all())
    return tuple(
        _prediction(name, column if whole else column[is_test])
        for name, column in zip(BASELINES, (table.naive_ns, *found), strict=True)
    )


def _prediction(name: str, duration_ns: FloatArray) -> Prediction:
    unknown = constant(np.nan, len(duration_ns))
    return Prediction(estimator=name, duration_ns=duration_ns, low_ns=unknown, high_ns=unknown)


def _folds(cases: Cases) -> IntArray:
    """A part of five for each shape, as equal as can be and the same in every run."""
    chance = np.array([crc32(text.encode("utf-8", "replace")) for text in cases.shapes], np.int64)
    part = np.empty(len(chance), np.int64)
    part[np.argsort(chance, kind="stable")] = np.arange(len(chance)) % _FOLDS
    return part[cases.shape] if len(cases) else cases.shape


def _fitted_line(x: FloatArray, measured: FloatArray) -> tuple[float, float]:
    """Start and slope of the line with the least sum of soft absolute errors of the logarithm: twice too long
    is as wrong as half, and outliers do not count by their square.
    """
    target = np.log(measured)
    shortest = max(float(np.quantile(measured, 0.01)), 1.0)
    above = x > _SHORTEST_NS
    first = float(np.median(measured[above] / x[above])) if above.any() else 1.0
    origin = np.log(np.array((shortest, first)))

    def errors(parameters: FloatArray) -> FloatArray:
        start, slope = np.exp(parameters).tolist()
        return np.concatenate((np.log(start + slope * x) - target, _PULL * (parameters - origin)))

    start, slope = np.exp(soft_least_squares(errors, origin, 0.1)).tolist()
    return start, slope


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FittingRows:
    """What is fitted to, all of one device and per execution; columns of shape ``(rows,)``. ``naive_ns`` is
    NaN where unknown; ``shape`` numbers equal work, ``group`` what is never on both sides of a fit: the same,
    or equal sizes whatever the number format.
    """

    naive_ns: FloatArray
    measured_ns: FloatArray
    op_class: SmallIntArray
    shape: IntArray
    group: IntArray

    @property
    def is_sampled(self) -> bool:
        """Whether there are more shapes than a fit takes: whoever shows the figures has to say so."""
        return int(self.shape.max(initial=-1)) >= MOST_FITTED

    def fitted(self, part: IntArray | NDArray[np.int8]) -> NDArray[np.float64]:
        """Both fitted baselines, shape ``(2, cases)``, of each part by what was measured in the others; NaN
        where the others have no other shape.
        """
        found = np.full((2, len(part)), np.nan)
        for fold in np.unique(part).tolist():
            self.predict(part != fold, part == fold, found)
        return found

    def predict(self, seen: BoolArray, inside: BoolArray, found: NDArray[np.float64]) -> None:
        """Put the fitted baselines of the cases ``inside``, by what was ``seen`` of others, in ``found``."""
        known = (self.naive_ns < _LONGEST_NS) & (self.measured_ns < _LONGEST_NS) & (self.measured_ns > 0)
        # A shape that another source shares is not unseen: it stays out of the fit, too.
        fit = known & seen & ~np.isin(self.group, self.group[inside])
        if fit.any():
            found[:, inside] = self._predicted(fit, inside)
            self._per_class(fit, inside, found[1])

    def _predicted(self, fit: BoolArray, wanted: BoolArray) -> FloatArray:
        """By a line fitted to each distinct shape once: one that recurs often is no better evidence."""
        rows = np.flatnonzero(fit)
        if len(rows) > MOST_FITTED:
            distinct = ShapeGroups.of(self.shape[rows]).distinct
            if len(distinct) > MOST_FITTED:
                drawn = np.zeros(int(distinct[-1]) + 1, np.bool_)
                drawn[np.random.default_rng(0).choice(distinct, MOST_FITTED, replace=False)] = True
                rows = rows[drawn[self.shape[rows]]]
        x, measured, _ = unique_shapes(self.naive_ns[rows], self.measured_ns[rows], self.shape[rows])
        start, slope = _fitted_line(x, measured)
        return start + slope * self.naive_ns[wanted]

    def _per_class(self, fit: BoolArray, inside: BoolArray, found: FloatArray) -> None:
        """Put the fits per class of the cases ``inside``, from those in ``fit``, where classes allow."""
        for code in np.unique(self.op_class[inside]).tolist():
            seen = fit & (self.op_class == code)
            if len(ShapeGroups.of(self.shape[seen])) >= _LEAST_SHAPES:
                wanted = inside & (self.op_class == code)
                found[wanted] = self._predicted(seen, wanted)
