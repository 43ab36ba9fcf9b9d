"""Few parameters of a serving stack from measured runs, with physical meaning and shrunk to none.

A stack is a device and a framework. Its parameters are factors on the time of products, attention,
collectives and other kernels, and time of the host: of a step, of a sequence and of a prompt in it, and of a
request outside of steps. Runs are simulated at a point and beside it; between, times of runs are taken to be
linear in the parameters, so that fits need few simulations. Residuals are logarithms of predicted over
measured times; those beyond 15 % count linearly (soft L1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
}
"""Of each parameter: kernels in a library's graph run about as long as by themselves, and a host that keeps
the device waiting does so for a millisecond or two a step.
"""
_SOFT, _ROUNDS, _MOST_ROWS = 0.15, 2, 36
_FACTORS = ("products", "attention", "collectives", "others")


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
    chosen = _spread(rows)
    names, at = tuple(PRIORS), np.array([each.at for each in PRIORS.values()])
    errors = np.full(len(names), np.nan)
    used = 0
    for _ in range(_ROUNDS):
        linear = _linear(chosen, predictor, _correction(at))
        if linear is None:
            return None
        base, slopes, measured = linear
        at, errors = _solved(base, slopes, measured, at)
        used = len(base) // 2
    return Fitted(_correction(at), dict(zip(names, errors.tolist(), strict=True)), used)


def _spread(rows: Sequence[Row]) -> list[Row]:
    order = sorted(rows, key=lambda row: (row.model, row.precision, row.ranks, row.prompt, row.concurrency))
    count = min(len(order), _MOST_ROWS)
    return [order[int(place)] for place in np.linspace(0, len(order) - 1, count)] if count else []


def _correction(values: FloatArray) -> Correction:
    stated: list[float] = values.tolist()
    return Correction(**dict(zip(PRIORS, stated, strict=True)))


def _linear(
    rows: Sequence[Row], predictor: Predictor, at: Correction
) -> tuple[FloatArray, FloatArray, FloatArray] | None:
    """Predicted times at a point of shape ``(2 rows,)``, their slopes ``(2 rows, parameters)``, measured."""
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
            beside = predictor.times(row, replace(at, **{name: getattr(at, name) + step}))
            near = here if isinstance(beside, str) else beside
            columns.append(((near.ttft_ms - here.ttft_ms) / step, (near.tpot_ms - here.tpot_ms) / step))
        base += [here.ttft_ms, here.tpot_ms]
        slopes += [[each[0] for each in columns], [each[1] for each in columns]]
        measured += [row.ttft_ms, row.tpot_ms]
    if not base:
        return None
    return np.array(base), np.array(slopes), np.array(measured)


def _solved(
    base: FloatArray, slopes: FloatArray, measured: FloatArray, at: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The parameters that fit best, and their standard errors."""
    priors = list(PRIORS.values())
    scale = np.array([each.scale for each in priors])
    center = np.array([each.at for each in priors])
    low = np.array([each.low for each in priors])
    high = np.array([each.high for each in priors])

    def residuals(values: FloatArray) -> FloatArray:
        times = np.maximum(base + slopes @ (values * scale - at), 0.05 * base)
        # each row gives two residuals; a prior weighs as much as one of them at 15 %
        pulls = (values * scale - center) / scale * _SOFT
        return np.concatenate([np.log(times / measured), pulls])

    start = np.clip(at, low, high) / scale
    found = least_squares(residuals, start, bounds=(low / scale, high / scale), loss="soft_l1", f_scale=_SOFT)
    jacobian, free = np.asarray(found.jac, np.float64), len(base) - len(at)
    spread = float(np.median(np.abs(residuals(found.x)[: len(base)]))) / 0.6745
    covariance = np.linalg.pinv(jacobian.T @ jacobian) * spread**2 if free > 0 else np.full((8, 8), np.nan)
    return np.asarray(found.x * scale, np.float64), np.sqrt(np.diag(covariance)) * scale


def one_point(row: Row, predictor: Predictor, start: Correction | None = None) -> Correction | None:
    """What one measured run says of its server, beside what is known of the stack (``start``): all kernels
    take so many times as long that its time per token is right, and requests and prompts wait for the host so
    many times as long that its time to the first token is; None where the row cannot be predicted.
    """
    correction = start or Correction()
    waits = (correction.prompt_ns, correction.request_ns)
    if not any(waits):
        waits = (0.2 * PRIORS["prompt_ns"].scale, PRIORS["request_ns"].scale)
    for _ in range(_POINT_ROUNDS):
        said = predictor.times(row, correction)
        if isinstance(said, str):
            return None
        factor = float(np.clip(row.tpot_ms / said.tpot_ms, *_POINT_BOUNDS))
        scaled = {name: getattr(correction, name) * factor for name in _FACTORS}
        correction = replace(correction, **scaled)
        without, with_waits = (
            predictor.times(row, replace(correction, prompt_ns=waits[0] * times, request_ns=waits[1] * times))
            for times in (0.0, 1.0)
        )
        if isinstance(without, str) or isinstance(with_waits, str):
            return None
        slope = max(with_waits.ttft_ms - without.ttft_ms, 1e-9)
        times = min(max(0.0, (row.ttft_ms - without.ttft_ms) / slope), _MOST_WAITS)
        correction = replace(correction, prompt_ns=waits[0] * times, request_ns=waits[1] * times)
    return correction


_POINT_ROUNDS, _POINT_BOUNDS, _MOST_WAITS = 3, (0.3, 3.0), 20.0
