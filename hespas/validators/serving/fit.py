"""Few parameters of a serving stack from measured runs, with physical meaning and shrunk to none.

A stack is a device and a framework. Its parameters are factors on the time of products, attention,
collectives and other kernels, and time of the host: of a step, of a sequence and of a prompt in it, of a
launch of a kernel, and of a request outside of steps; and how many guessed tokens are right. Runs are
simulated at a point and beside it; between, times of runs are taken to be linear in the parameters, so that
fits need few simulations. Residuals are logarithms of predicted over measured times; those beyond 15 % count
linearly (soft L1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from hespas.graph.columns import FloatArray
from hespas.simulator.serving import Correction
from hespas.validators.serving.predict import Predictor
from hespas.validators.serving.rows import Row

__all__ = ["PRIORS", "Fitted", "fit_stack", "one_point"]


@dataclass(frozen=True, slots=True)
class _Prior:
    """Where a parameter is expected and how far from there; ``scale`` is a step for differences, too."""

    at: float
    scale: float
    low: float
    high: float


PRIORS: Mapping[str, _Prior] = {
    "products": _Prior(1.0, 0.2, 0.3, 3.0),
    "attention": _Prior(1.0, 0.4, 0.3, 4.0),
    "collectives": _Prior(1.0, 0.4, 0.3, 5.0),
    "others": _Prior(1.0, 0.4, 0.3, 5.0),
    "step_ns": _Prior(0.0, 1.5e6, 0.0, 2e7),
    "sequence_ns": _Prior(0.0, 2e4, 0.0, 1e6),
    "prompt_ns": _Prior(0.0, 4e6, 0.0, 1e8),
    "request_ns": _Prior(0.0, 5e7, 0.0, 2e9),
    "prefill": _Prior(1.0, 0.3, 0.3, 4.0),
    "launch_ns": _Prior(6e4, 3e4, 0.0, 3e5),
    "accepts": _Prior(0.8, 0.1, 0.2, 0.99),
}
"""Of each parameter: kernels in a library's graph run about as long as by themselves, a host that keeps the
device waiting does so for a millisecond or two a step, and launches through PyTorch take tens of us.
"""
_SOFT, _ROUNDS, _MOST_ROWS = 0.15, 2, 36
_NAMES = tuple(PRIORS)
_SCALE, _CENTER, _LOW, _HIGH = (
    np.array([getattr(each, name) for each in PRIORS.values()]) for name in ("scale", "at", "low", "high")
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a fit found: the parameters, their standard errors, and of how many runs."""

    correction: Correction
    standard_errors: Mapping[str, float]
    rows: int


def fit_stack(rows: Sequence[Row], predictor: Predictor) -> Fitted | None:
    """The parameters of the stack that ran all rows; None where none of them can be predicted. At most
    :data:`_MOST_ROWS` of them are simulated, spread over servers and loads.
    """
    chosen, at = _spread(rows), _CENTER
    errors, used = np.full(len(at), np.nan), 0
    for _ in range(_ROUNDS):
        linear = _linear(chosen, predictor, _correction(at))
        if linear is None:
            return None
        at, errors = _solved(linear, at, _Aim(_CENTER, _SCALE, _SOFT))
        used = len(linear.base) // 2
    return Fitted(_correction(at), dict(zip(_NAMES, errors.tolist(), strict=True)), used)


def one_point(row: Row, predictor: Predictor, start: Correction | None = None) -> Correction | None:
    """What one measured run says of its server, beside what is known of the stack (``start``): of the
    parameters that give its times about right those that are the nearest, each in terms of how far servers
    of a stack are apart; None where the row cannot be predicted.
    """
    center = _CENTER if start is None else np.array([getattr(start, name) for name in _NAMES])
    at, aim = center, _Aim(center, _SCALE, _APART)
    for _ in range(_ROUNDS):
        linear = _linear([row], predictor, _correction(at))
        if linear is None:
            return None
        at, _ = _solved(linear, at, aim)
    return _correction(at)


_APART = 0.2
"""By how much two runs of a server are off unlike each other: what one says is worth no more."""


class _Aim(NamedTuple):
    """Where parameters are expected and how far from there, and which residual weighs as much as that."""

    center: FloatArray
    scale: FloatArray
    residual: float


class _Linear(NamedTuple):
    """Predicted times at a point of shape ``(2 rows,)``, their slopes ``(2 rows, parameters)``, measured."""

    base: FloatArray
    slopes: FloatArray
    measured: FloatArray


def _spread(rows: Sequence[Row]) -> list[Row]:
    order = sorted(rows, key=lambda row: (row.model, row.precision, row.ranks, row.prompt, row.concurrency))
    count = min(len(order), _MOST_ROWS)
    return [order[int(place)] for place in np.linspace(0, len(order) - 1, count)] if count else []


def _correction(values: FloatArray) -> Correction:
    stated: list[float] = values.tolist()
    return Correction(**dict(zip(_NAMES, stated, strict=True)))


def _linear(rows: Sequence[Row], predictor: Predictor, at: Correction) -> _Linear | None:
    base: list[float] = []
    slopes: list[list[float]] = []
    measured: list[float] = []
    for row in rows:
        here = predictor.times(row, at)
        if isinstance(here, str):
            continue
        columns: list[tuple[float, float]] = []
        for name, prior in PRIORS.items():
            step = 0.25 * prior.scale
            step = -step if getattr(at, name) + step > prior.high else step
            beside = predictor.times(row, replace(at, **{name: getattr(at, name) + step}))
            near = here if isinstance(beside, str) else beside
            columns.append(((near.ttft_ms - here.ttft_ms) / step, (near.tpot_ms - here.tpot_ms) / step))
        base += [here.ttft_ms, here.tpot_ms]
        slopes += [[each[0] for each in columns], [each[1] for each in columns]]
        measured += [row.ttft_ms, row.tpot_ms]
    if not base:
        return None
    return _Linear(np.array(base), np.array(slopes), np.array(measured))


def _solved(linear: _Linear, at: FloatArray, aim: _Aim) -> tuple[FloatArray, FloatArray]:
    """The parameters that fit best, and their standard errors."""
    base, slopes, measured = linear

    def residuals(values: FloatArray) -> FloatArray:
        times = np.maximum(base + slopes @ (values * aim.scale - at), 0.05 * base)
        pulls = (values - aim.center / aim.scale) * aim.residual
        return np.concatenate([np.log(times / measured), pulls])

    bounds = (_LOW / aim.scale, _HIGH / aim.scale)
    start = np.clip(at / aim.scale, *bounds)
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=_SOFT)
    jacobian, free = np.asarray(found.jac, np.float64), len(base) - len(at)
    spread = float(np.median(np.abs(residuals(found.x)[: len(base)]))) / 0.6745
    covariance = np.full((len(at), len(at)), np.nan)
    if free > 0:
        covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread**2
    return np.asarray(found.x * aim.scale, np.float64), np.sqrt(np.diag(covariance)) * aim.scale
