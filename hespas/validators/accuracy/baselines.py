"""The naive models that every estimator is shown beside: one that beats none of them is worth nothing.

* ``p0``: published peaks, compulsory bytes, no launch overhead, no fit.
* ``p1``: one launch time and one efficiency for the whole device: t0 + p0 / e.
* ``p2``: the same per operation class, where a class has enough shapes; p1 elsewhere.

p1 and p2 are fitted to the measurements, so each shape is predicted by a fit that has not seen it: the fit of
the other sources where there are several, else of the other four fifths of the shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.roofline import Roofline
from hespas.graph import OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import Device
from hespas.validators.accuracy.cases import Cases, Prediction, shared_shapes
from hespas.validators.accuracy.fitting import soft_least_squares

__all__ = ["BASELINES", "fitted_baselines", "naive_ns"]

BASELINES = ("p0", "p1", "p2")
_FOLDS = 5
_LEAST_SHAPES = 8
"""Shapes of a class below which its own fit says less than the device's."""


def naive_ns(graph: OpGraph, device: Device) -> FloatArray:
    """p0 of each node [ns]: the roofline of the published peaks."""
    bare = replace(device, efficiencies=(), launch_overhead_ns=0.0)
    return Roofline().estimate(graph, bare).duration_ns


def fitted_baselines(cases: Sequence[Cases], naive: Sequence[FloatArray]) -> list[tuple[Prediction, ...]]:
    """p0, p1 and p2 of the cases of each source measured on one device; see the module."""
    everything = shared_shapes(cases)
    table = _Table(
        np.concatenate(list(naive)),
        np.concatenate([each.measured_ns for each in cases]),
        np.concatenate([each.op_class for each in cases]),
        everything,
    )
    base, measured = table.p0_ns, table.measured_ns
    source = np.repeat(np.arange(len(cases)), [len(each) for each in cases])
    part = source if len(cases) > 1 else _folds(cases[0])
    device_fit, class_fit = np.full(len(base), np.nan), np.full(len(base), np.nan)
    known = ~np.isnan(base) & (measured > 0)
    for fold in np.unique(part).tolist():
        inside = part == fold
        # A shape that another source shares is not unseen: it stays out of the fit, too.
        fit = known & ~inside & ~np.isin(everything, everything[inside])
        if not fit.any():
            continue
        device_fit[inside] = _Line.fitted(base[fit], measured[fit])(base[inside])
        class_fit[inside] = table.per_class(fit, inside, device_fit)
    bounds = np.cumsum([0, *(len(each) for each in cases)])
    return [
        tuple(
            _prediction(name, column[start:stop])
            for name, column in zip(BASELINES, (base, device_fit, class_fit), strict=True)
        )
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]


def _prediction(name: str, duration_ns: FloatArray) -> Prediction:
    unknown = np.full(len(duration_ns), np.nan)
    return Prediction(estimator=name, duration_ns=duration_ns, low_ns=unknown, high_ns=unknown)


def _folds(cases: Cases) -> IntArray:
    """A part of five for each shape, the same in every run."""
    part = np.array([crc32(text.encode("utf-8", "replace")) % _FOLDS for text in cases.shapes], np.int64)
    return part[cases.shape] if len(cases) else cases.shape


@dataclass(frozen=True, slots=True)
class _Line:
    """t = t0 + slope x."""

    t0_ns: float
    slope: float

    def __call__(self, x: FloatArray) -> FloatArray:
        return self.t0_ns + self.slope * x

    @classmethod
    def fitted(cls, x: FloatArray, measured: FloatArray) -> _Line:
        """The line with the least sum of soft absolute errors of the logarithm: twice too long is as wrong as
        half, and outliers do not count by their square.
        """
        target = np.log(measured)

        def errors(parameters: FloatArray) -> FloatArray:
            start, slope = np.exp(parameters).tolist()
            error: FloatArray = np.log(start + slope * x) - target
            return error

        shortest = max(float(np.quantile(measured, 0.01)), 1.0)
        slope = float(np.median(measured[x > 0] / x[x > 0])) if (x > 0).any() else 1.0
        found = soft_least_squares(errors, np.log(np.array((shortest, slope))), 0.1)
        start, slope = np.exp(found).tolist()
        return cls(start, slope)


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Columns of all cases of one device; p0 is NaN where unknown."""

    p0_ns: FloatArray
    measured_ns: FloatArray
    op_class: NDArray[np.int8]
    shape: IntArray

    def per_class(self, fit: BoolArray, inside: BoolArray, device_fit: FloatArray) -> FloatArray:
        """p2 of the cases ``inside``, from those in ``fit``."""
        found = device_fit.copy()
        for code in np.unique(self.op_class[inside]).tolist():
            seen = fit & (self.op_class == code)
            if len(np.unique(self.shape[seen])) >= _LEAST_SHAPES:
                wanted = inside & (self.op_class == code)
                line = _Line.fitted(self.p0_ns[seen], self.measured_ns[seen])
                found[wanted] = line(self.p0_ns[wanted])
        return found[inside]
