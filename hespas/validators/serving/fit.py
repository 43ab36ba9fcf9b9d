"""Few parameters of a serving stack from measured runs, with physical meaning and shrunk to none.

A stack is a device and a framework, and of mixtures the format of their experts. Its parameters are factors
on the time of products, of experts' products, attention, collectives and other kernels, on all of them
where they work on prompts and on experts' products there, and time of the host: of a step, of a sequence
and of a prompt in it, of a launch of a kernel, and of a request outside of steps; and how many guessed
tokens are right. Runs are simulated at a point and beside it, and once more where a fit ends; slopes are
kept, so that fits need few simulations. Residuals are logarithms of predicted over measured times; those
beyond 15 % count linearly (soft L1). A deployment (release, model, precision) has parameters of its own as
far as its runs ask for them: they are expected where those of its stack are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from hespas.graph.columns import BoolArray, FloatArray
from hespas.simulator.serving import Correction
from hespas.validators.serving.predict import Predictor, Times
from hespas.validators.serving.rows import Row, deployment_of

__all__ = ["PRIORS", "Fitted", "fit_stack", "one_point", "point_of"]


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
    "routed": _Prior(1.0, 0.3, 0.1, 5.0),
    "prefill": _Prior(1.0, 0.3, 0.3, 4.0),
    "experts": _Prior(1.0, 0.3, 0.3, 8.0),
    "launch_ns": _Prior(6e4, 3e4, 0.0, 3e5),
    "accepts": _Prior(0.8, 0.1, 0.2, 0.99),
}
"""Of each parameter: kernels in a library's graph run about as long as by themselves, a host that keeps the
device waiting does so for a millisecond or two a step, and launches through PyTorch take tens of us.
"""
_SOFT, _ROUNDS, _MOST_ROWS = 0.15, 3, 100
_NAMES = tuple(PRIORS)
_SCALE, _CENTER, _LOW, _HIGH = (
    np.array([getattr(each, name) for each in PRIORS.values()]) for name in ("scale", "at", "low", "high")
)
_APART = 0.2
"""By how much two runs of a deployment are taken to be off unlike each other where nothing tells."""
_APARTS = (0.05, 0.1, 0.2, 0.4, 0.8, 1e3)
"""What is tried for that; with the last a run says nothing of others."""
_LEAST = 0.01
"""Times are taken to be no more repeatable than this."""
_FAR = 0.5
"""A residual beyond this says no more than that something is not simulated."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a fit found: the parameters of a stack, their standard errors, and of how many runs; ``apart``: by
    how much (of a time) runs of a deployment are off unlike each other, so that one of them says best what
    the others take; the parameters of each deployment; which ``rows`` of the table were simulated.
    """

    correction: Correction
    standard_errors: Mapping[str, float]
    apart: float
    deployments: Mapping[str, Correction]
    simulated: frozenset[int]

    @property
    def rows(self) -> int:
        """Runs that were fitted on."""
        return len(self.simulated)


def fit_stack(rows: Sequence[Row], predictor: Predictor) -> Fitted | None:
    """The parameters of the stack that ran all rows, and of its deployments; None where no row can be
    predicted. At most :data:`_MOST_ROWS` of them are simulated, spread over servers and loads.
    """
    linear = _linear(_spread(rows), predictor, _CENTER)
    if linear is None:
        return None
    at, errors = _settled(linear, predictor, _Aim(_CENTER, _SCALE, _SOFT))
    parts = linear.moved(predictor, at).by_deployment()
    aim = _Aim(at, _SCALE, _SOFT)
    own = {key: _correction(_settled(part, predictor, aim)[0]) for key, part in parts.items()}
    return Fitted(
        correction=_correction(at),
        standard_errors=dict(zip(_NAMES, errors.tolist(), strict=True)),
        apart=_apart(list(parts.values())),
        deployments=own,
        simulated=frozenset(row.row for row in linear.rows),
    )


def point_of(rows: Sequence[Row]) -> Row:
    """The run that a site would measure first, by its settings alone: the one that is the nearest to all in
    doublings of clients, of tokens of prompts and of answers, and of ranks.
    """
    places = np.log2([[row.concurrency, row.prompt, row.output, row.ranks] for row in rows])
    far = [float(np.abs(places - place).sum()) for place in places]
    return rows[int(np.argmin(far))]


def one_point(
    row: Row, predictor: Predictor, start: Correction | None = None, apart: float = _APART
) -> Correction | None:
    """What one measured run says of its deployment, beside what is known of the stack (``start``): of the
    parameters that give its times as nearly as runs of a deployment are alike (``apart``) those that are the
    nearest, each in terms of how far stacks are apart; None where the row cannot be predicted.
    """
    center = _CENTER if start is None else np.array([getattr(start, name) for name in _NAMES])
    linear = _linear([row], predictor, center)
    if linear is None:
        return None
    return _correction(_settled(linear, predictor, _Aim(center, _SCALE, apart))[0])


class _Aim(NamedTuple):
    """Where parameters are expected and how far from there, and which residual weighs as much as that."""

    center: FloatArray
    scale: FloatArray
    residual: float


class _Linear(NamedTuple):
    """Times of rows predicted with the parameters ``at``, their slopes, and what was measured: shapes
    ``(rows, 2)`` of TTFT and TPOT [ms], slopes ``(rows, 2, parameters)``.
    """

    rows: tuple[Row, ...]
    at: FloatArray
    base: FloatArray
    slopes: FloatArray
    measured: FloatArray

    def times(self, values: FloatArray) -> FloatArray:
        """Times with other parameters."""
        return np.asarray(np.maximum(self.base + self.slopes @ (values - self.at), 0.05 * self.base))

    def residuals(self, values: FloatArray) -> FloatArray:
        """Logarithms of times over those that were measured."""
        return np.asarray(np.log(self.times(values) / self.measured))

    def moved(self, predictor: Predictor, at: FloatArray) -> _Linear:
        """The same slopes at other parameters."""
        said = [predictor.times(row, _correction(at)) for row in self.rows]
        near = self.times(at).tolist()
        base = [old if isinstance(new, str) else list(new) for old, new in zip(near, said, strict=True)]
        return self._replace(at=at, base=np.array(base))

    def of(self, mine: BoolArray) -> _Linear:
        """Some of the rows."""
        kept = tuple(row for row, is_mine in zip(self.rows, mine.tolist(), strict=True) if is_mine)
        return _Linear(kept, self.at, self.base[mine], self.slopes[mine], self.measured[mine])

    def by_deployment(self) -> dict[str, _Linear]:
        """The rows of each deployment."""
        names = np.array([deployment_of(row) for row in self.rows])
        return {name: self.of(names == name) for name in sorted(set(names.tolist()))}


def _spread(rows: Sequence[Row]) -> list[Row]:
    order = sorted(rows, key=lambda row: (row.model, row.precision, row.ranks, row.prompt, row.concurrency))
    count = min(len(order), _MOST_ROWS)
    return [order[int(place)] for place in np.linspace(0, len(order) - 1, count)] if count else []


def _correction(values: FloatArray) -> Correction:
    stated: list[float] = values.tolist()
    return Correction(**dict(zip(_NAMES, stated, strict=True)))


def _linear(rows: Sequence[Row], predictor: Predictor, values: FloatArray) -> _Linear | None:
    at = _correction(values)
    kept: list[Row] = []
    base: list[Times] = []
    slopes: list[FloatArray] = []
    for row in rows:
        here = predictor.times(row, at)
        if isinstance(here, str):
            continue
        kept.append(row)
        base.append(here)
        slopes.append(_slopes(row, predictor, at, here))
    if not kept:
        return None
    measured = np.array([(row.ttft_ms, row.tpot_ms) for row in kept])
    return _Linear(tuple(kept), values, np.array(base), np.array(slopes), measured)


def _slopes(row: Row, predictor: Predictor, at: Correction, here: Times) -> FloatArray:
    """Changes of both times with each parameter, shape ``(2, parameters)``."""
    found = np.zeros((2, len(_NAMES)))
    for place, (name, prior) in enumerate(PRIORS.items()):
        if (name == "accepts" and not row.launch.drafts) or (name == "collectives" and row.ranks == 1):
            continue
        step = 0.25 * prior.scale
        step = -step if getattr(at, name) + step > prior.high else step
        beside = predictor.times(row, replace(at, **{name: getattr(at, name) + step}))
        if not isinstance(beside, str):
            found[:, place] = np.subtract(beside, here) / step
    return found


def _settled(linear: _Linear, predictor: Predictor, aim: _Aim) -> tuple[FloatArray, FloatArray]:
    """The parameters that fit best when runs are simulated anew where a fit ended, and standard errors."""
    at, errors = _solved(linear, aim)
    for _ in range(_ROUNDS - 1):
        at, errors = _solved(linear.moved(predictor, at), aim)
    return at, errors


def _solved(linear: _Linear, aim: _Aim) -> tuple[FloatArray, FloatArray]:
    """The parameters that fit best, and their standard errors: runs tell as much as what they leave is small,
    and no parameter is less sure than it was expected to be.
    """
    weight, count, parameters = _SOFT / aim.residual, linear.base.size, len(linear.at)

    def residuals(values: FloatArray) -> FloatArray:
        off = linear.residuals(values * aim.scale).reshape(-1) * weight
        return np.concatenate([off, (values - aim.center / aim.scale) * _SOFT])

    bounds = (_LOW / aim.scale, _HIGH / aim.scale)
    start = np.clip(linear.at / aim.scale, *bounds)
    found = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=_SOFT)
    spread = _SOFT
    if count > parameters:
        spread = float(np.median(np.abs(linear.residuals(found.x * aim.scale)))) / 0.6745
    told = np.asarray(found.jac, np.float64)[:count] / (weight * max(spread, _LEAST))
    covariance = np.linalg.inv(told.T @ told + np.eye(parameters))
    return np.asarray(found.x * aim.scale, np.float64), np.sqrt(np.diag(covariance)) * aim.scale


def _apart(parts: Sequence[_Linear]) -> float:
    """How much one run is worth: of :data:`_APARTS` that with which the middle run of each deployment comes
    nearest to the others of it, in the mean over these.
    """
    off: dict[float, list[FloatArray]] = defaultdict(list)
    for part in parts:
        if len(part.rows) == 1:
            continue
        is_point = np.array([row is point_of(part.rows) for row in part.rows])
        point, others = part.of(is_point), part.of(~is_point)
        for apart in _APARTS:
            values, _ = _solved(point, _Aim(part.at, _SCALE, apart))
            off[apart].append(np.minimum(np.abs(others.residuals(values)), _FAR))
    if not off:
        return _APART
    return min(off, key=lambda apart: float(np.concatenate(off[apart]).mean()))
