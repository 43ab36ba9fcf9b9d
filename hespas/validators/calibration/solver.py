"""Parameters of a form from measured times: robust least squares on logarithms, with standard errors.

    minimise  sum soft_l1(ln(form(p) / measured) / scale)  +  sum ((ln p - ln prior) / width)^2

Every parameter is positive, so logarithms are fitted; the prior keeps what few rows cannot tell from the
others near where it is expected, and weighs as much as one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

import numpy as np

from hespas.estimators.forms import Columns, Form
from hespas.graph.columns import FloatArray

__all__ = ["NOISE", "Solution", "Trial", "solve"]

NOISE = 0.1
"""Errors of logarithms count by their square below this, by their size above."""
_WIDTH = 1.5
_UNKNOWN = 1e3
"""The error of a time that is no number: a step into it is never taken."""


class _Found(Protocol):
    x: FloatArray
    jac: FloatArray
    cost: float


class _Optimize(Protocol):
    def least_squares(
        self,
        fun: Callable[[FloatArray], FloatArray],
        x0: FloatArray,
        *,
        bounds: tuple[FloatArray, FloatArray],
        loss: str,
        f_scale: float,
        max_nfev: int,
    ) -> _Found: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """What is fitted: a form, what it needs of the operations, and their times [ns]. ``fixed`` overrides
    parameters that do not vary; ``prior`` says where others are expected and how closely (ln units).
    """

    form: Form
    columns: Columns
    duration_ns: FloatArray
    fixed: Mapping[str, float]
    prior: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """Parameters by name with standard errors (NaN for those that do not vary), and the cost per row."""

    values: Mapping[str, float]
    std_errors: Mapping[str, float]
    cost: float


def solve(trial: Trial, start: Mapping[str, float], *, most_calls: int) -> Solution:
    """The best parameters from one start."""
    optimize = cast("_Optimize", import_module("scipy.optimize"))
    varying = [each for each in trial.form.parameters if each.varies]
    fixed = {each.name: each.start for each in trial.form.parameters if not each.varies} | dict(trial.fixed)
    low, high = (np.log([getattr(each, side) for each in varying]) for side in ("low", "high"))
    priors = [trial.prior.get(each.name, (each.start, _WIDTH)) for each in varying]
    centre = np.log([expected for expected, _ in priors])
    weight = NOISE / np.array([width for _, width in priors])
    measured = np.log(trial.duration_ns)

    def values_of(logs: FloatArray) -> dict[str, float]:
        moved: list[float] = np.exp(logs).tolist()
        return fixed | dict(zip((each.name for each in varying), moved, strict=True))

    def errors(logs: FloatArray) -> FloatArray:
        with np.errstate(all="ignore"):
            error = np.log(trial.form.time_ns(values_of(logs), trial.columns)) - measured
        return np.concatenate((np.nan_to_num(error, nan=_UNKNOWN), weight * (logs - centre)))

    first = np.log([start.get(each.name, each.start) for each in varying])
    margin = 1e-6 * (high - low)
    found = optimize.least_squares(
        errors,
        np.clip(first, low + margin, high - margin),
        bounds=(low, high),
        loss="soft_l1",
        f_scale=NOISE,
        max_nfev=most_calls,
    )
    values = values_of(found.x)
    spread = _std_errors(found, len(measured)) * np.exp(found.x)
    errors_of = dict(zip((each.name for each in varying), spread.tolist(), strict=True))
    return Solution(
        values=values,
        std_errors={name: errors_of.get(name, np.nan) for name in values},
        cost=found.cost / len(measured),
    )


def _std_errors(found: _Found, rows: int) -> FloatArray:
    """Standard errors of the logarithms, from the curvature at the solution."""
    freedom = max(rows - len(found.x), 1)
    curvature = found.jac.T @ found.jac
    variance = np.diag(np.linalg.pinv(curvature)) * 2 * found.cost / freedom
    return np.sqrt(np.maximum(variance, 0.0))
