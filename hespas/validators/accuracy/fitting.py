"""The few functions of SciPy that are used here, with types; SciPy loads on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import nan
from typing import Protocol, cast

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["kendall_tau", "slope_of", "soft_least_squares"]


class _Found(Protocol):
    x: FloatArray


class _Optimize(Protocol):
    def least_squares(
        self, fun: Callable[[FloatArray], FloatArray], x0: FloatArray, *, loss: str, f_scale: float
    ) -> _Found: ...


class _Ranked(Protocol):
    statistic: float


class _Stats(Protocol):
    def kendalltau(self, x: FloatArray, y: FloatArray) -> _Ranked: ...


def soft_least_squares(
    errors: Callable[[FloatArray], FloatArray], start: FloatArray, scale: float
) -> FloatArray:
    """Parameters with the least sum of errors that count by their square below ``scale``, by their size above
    (``soft_l1`` of ``scipy.optimize.least_squares``).
    """
    optimize = cast("_Optimize", import_module("scipy.optimize"))
    return optimize.least_squares(errors, start, loss="soft_l1", f_scale=scale).x


def kendall_tau(one: FloatArray, two: FloatArray) -> float:
    """Kendall's tau-b of two rankings; NaN below two values or without any difference."""
    known = ~(np.isnan(one) | np.isnan(two))
    if int(known.sum()) < 2:
        return nan
    stats = cast("_Stats", import_module("scipy.stats"))
    return float(stats.kendalltau(one[known], two[known]).statistic)


def slope_of(x: FloatArray, y: FloatArray) -> float:
    """The slope of the straight line of least squares; NaN where all ``x`` are the same."""
    away = x - x.mean()
    square = float((away * away).sum())
    return float((away * (y - y.mean())).sum()) / square if square else nan
