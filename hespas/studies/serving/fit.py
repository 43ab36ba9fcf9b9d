"""Fits of a few physical parameters of a serving engine to measured runs, shrunk to their priors.

A fit is for one engine on one device, and for MoE models for one format of experts. Its parameters are
factors on the time of matmuls, expert matmuls, attention, collectives and other kernels, factors for prefill
and expert matmuls in prefill, CPU overheads per step, sequence, prompt, kernel launch and request, and the
acceptance rate of speculative tokens.

To get slopes, runs are simulated at the start parameters and at small steps from them. They are simulated
again at the end of a fit. Slopes are reused, so that fits need few simulations. Residuals are log(predicted /
measured); residuals beyond 15 % count linearly (soft L1). A deployment (release, model, precision) has
separate parameters, whose prior is the parameters of its engine.

The parameters of stacks that ship with the package (:mod:`hespas.simulator.serving.engine_parameters`) are
the prior of fits to a single run. On a device without fits, the prior is the medians over the devices of the
engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hespas.fitting.solvers import robust_least_squares
from hespas.graph.columns import BoolArray, FloatArray
from hespas.simulator.serving import Correction
from hespas.studies.serving.predict import MeanTimes, ServingPredictor
from hespas.studies.serving.rows import ServingRow, deployment_of

__all__ = [
    "PRIORS",
    "EngineFit",
    "fit_engine",
    "one_point",
    "point_of",
]


@dataclass(frozen=True, slots=True)
class _Prior:
    """Prior of a parameter: expected value (``at``), standard deviation (``scale``) and bounds. Derivatives
    are computed with steps in proportion to ``scale``.
    """

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
"""Parameter -> prior: kernels run about as long in an engine as alone, the CPU overhead of a step is one or
two milliseconds, and a launch through PyTorch takes tens of us.
"""
_SOFT_RESIDUAL, _ROUNDS, _MAX_ROWS = 0.15, 3, 100
_NAMES = tuple(PRIORS)
_SCALE, _CENTER, _LOW, _HIGH = (
    np.array([getattr(prior, name) for prior in PRIORS.values()]) for name in ("scale", "at", "low", "high")
)
_DEFAULT_RUN_SPREAD = 0.2
"""Assumed spread of the errors of runs of one deployment, without data."""
_RUN_SPREADS = (0.05, 0.1, 0.2, 0.4, 0.8, 1e3)
"""Candidates for this spread. With the last, a run has no effect on the prediction of others."""
_MIN_SPREAD = 0.01
"""Assumed repeatability of times."""
_MAX_RESIDUAL = 0.5
"""Larger residuals are cut, because they show that an effect is not simulated."""


@dataclass(frozen=True, slots=True)
class EngineFit:
    """Fitted parameters of a serving engine (``correction``), with standard errors, and of its deployments.

    ``apart`` is the relative spread of errors between runs of one deployment. It is the value with which a
    fit to one run predicts the other runs best. ``simulated`` are the numbers of the rows in the fit.
    """

    correction: Correction
    standard_errors: Mapping[str, float]
    apart: float
    deployments: Mapping[str, Correction]
    simulated: frozenset[int]

    @property
    def rows(self) -> int:
        """Return the number of runs in the fit."""
        return len(self.simulated)


def fit_engine(rows: Sequence[ServingRow], predictor: ServingPredictor) -> EngineFit | None:
    """Fit the parameters of the engine of all rows, and of its deployments. Return None if no row can be
    predicted.

    At most :data:`_MAX_ROWS` rows are simulated, spread over servers and loads.
    """
    order = sorted(rows, key=lambda row: (row.model, row.precision, row.ranks, row.prompt, row.concurrency))
    count = min(len(order), _MAX_ROWS)
    chosen = [order[int(index)] for index in np.linspace(0, len(order) - 1, count)] if count else []
    linear = _linear_model(chosen, predictor, _CENTER)
    if linear is None:
        return None
    at, errors = _fit_repeatedly(linear, predictor, _FitPrior(_CENTER, _SCALE, _SOFT_RESIDUAL))
    parts = linear.moved(predictor, at).by_deployment()
    prior = _FitPrior(at, _SCALE, _SOFT_RESIDUAL)
    own = {key: _correction(_fit_repeatedly(part, predictor, prior)[0]) for key, part in parts.items()}
    return EngineFit(
        correction=_correction(at),
        standard_errors=dict(zip(_NAMES, errors.tolist(), strict=True)),
        apart=_best_spread(list(parts.values())),
        deployments=own,
        simulated=frozenset(row.row for row in linear.rows),
    )


def point_of(rows: Sequence[ServingRow]) -> ServingRow:
    """Return the run with the most central settings: the medoid of concurrency, lengths and ranks on a log
    scale.
    """
    settings = np.log2([[row.concurrency, row.prompt, row.output, row.ranks] for row in rows])
    distances = [float(np.abs(settings - setting).sum()) for setting in settings]
    return rows[int(np.argmin(distances))]


def one_point(
    row: ServingRow,
    predictor: ServingPredictor,
    start: Correction | None = None,
    apart: float = _DEFAULT_RUN_SPREAD,
) -> Correction | None:
    """Fit the parameters of a deployment to one measured run. ``start`` has the parameters of the engine,
    which are the prior (None: the default parameters).

    ``apart`` is the assumed relative spread of errors between runs of one deployment. Returns None if the row
    cannot be predicted.
    """
    center = _CENTER if start is None else np.array([getattr(start, name) for name in _NAMES])
    linear = _linear_model([row], predictor, center)
    if linear is None:
        return None
    return _correction(_fit_repeatedly(linear, predictor, _FitPrior(center, _SCALE, apart))[0])


class _FitPrior(NamedTuple):
    """Prior of a fit: the expected values (``center``) and standard deviations (``scale``) of the parameters.
    A residual of the size ``residual`` counts as much as a parameter that is one standard deviation from its
    expected value.
    """

    center: FloatArray
    scale: FloatArray
    residual: float


class _LinearModel(NamedTuple):
    """Linear approximation of the times of rows as a function of the parameters, near the parameter values
    ``at``.

    ``base`` has the TTFT and TPOT [ms] at these values, shape ``(rows, 2)``. ``slopes`` has their
    derivatives, shape ``(rows, 2, parameters)``. ``measured`` has the measured times.
    """

    rows: tuple[ServingRow, ...]
    at: FloatArray
    base: FloatArray
    slopes: FloatArray
    measured: FloatArray

    def times(self, values: FloatArray) -> FloatArray:
        """Return the times that the linear model gives for other parameters, in the shape of ``base``."""
        return np.asarray(np.maximum(self.base + self.slopes @ (values - self.at), 0.05 * self.base))

    def residuals(self, values: FloatArray) -> FloatArray:
        """Return log(predicted / measured) at the given parameters."""
        return np.asarray(np.log(self.times(values) / self.measured))

    def moved(self, predictor: ServingPredictor, at: FloatArray) -> _LinearModel:
        """Return the linear model around other parameters. Times are simulated there; slopes are reused."""
        simulated = [predictor.times(row, _correction(at)) for row in self.rows]
        linear = self.times(at).tolist()
        base = [
            old if isinstance(new, str) else list(new) for old, new in zip(linear, simulated, strict=True)
        ]
        return self._replace(at=at, base=np.array(base))

    def subset(self, mask: BoolArray) -> _LinearModel:
        """Return the model restricted to some rows."""
        rows = tuple(row for row, is_in in zip(self.rows, mask.tolist(), strict=True) if is_in)
        return _LinearModel(rows, self.at, self.base[mask], self.slopes[mask], self.measured[mask])

    def by_deployment(self) -> dict[str, _LinearModel]:
        """Return the model restricted to the rows of each deployment, by deployment."""
        names = np.array([deployment_of(row) for row in self.rows])
        return {name: self.subset(names == name) for name in sorted(set(names.tolist()))}


def _correction(values: FloatArray) -> Correction:
    parameters: list[float] = values.tolist()
    return Correction(**dict(zip(_NAMES, parameters, strict=True)))


def _linear_model(
    rows: Sequence[ServingRow], predictor: ServingPredictor, values: FloatArray
) -> _LinearModel | None:
    """Return a linear model of times as a function of the parameters: the rows are simulated at ``values``
    and near them. None if no row can be predicted.
    """
    at = _correction(values)
    predicted: list[ServingRow] = []
    base: list[MeanTimes] = []
    slopes: list[FloatArray] = []
    for row in rows:
        times = predictor.times(row, at)
        if isinstance(times, str):
            continue
        predicted.append(row)
        base.append(times)
        row_slopes = np.zeros((2, len(_NAMES)))
        for column, (name, prior) in enumerate(PRIORS.items()):
            if (name == "accepts" and not row.launch.drafts) or (name == "collectives" and row.ranks == 1):
                continue
            step = 0.25 * prior.scale
            step = -step if getattr(at, name) + step > prior.high else step
            moved = predictor.times(row, replace(at, **{name: getattr(at, name) + step}))
            if not isinstance(moved, str):
                row_slopes[:, column] = np.subtract(moved, times) / step
        slopes.append(row_slopes)
    if not predicted:
        return None
    measured = np.array([(row.ttft_ms, row.tpot_ms) for row in predicted])
    return _LinearModel(tuple(predicted), values, np.array(base), np.array(slopes), measured)


def _fit_repeatedly(
    linear: _LinearModel, predictor: ServingPredictor, prior: _FitPrior
) -> tuple[FloatArray, FloatArray]:
    """Return the best parameters and their standard errors. The linear model is updated by simulations at the
    end of each fit.
    """
    at, errors = _solve(linear, prior)
    for _ in range(_ROUNDS - 1):
        at, errors = _solve(linear.moved(predictor, at), prior)
    return at, errors


def _solve(linear: _LinearModel, prior: _FitPrior) -> tuple[FloatArray, FloatArray]:
    """Return the parameters with the smallest residuals, and their standard errors.

    The standard errors follow from the residuals and are at most the standard deviations of the prior.
    """
    weight, count, parameters = _SOFT_RESIDUAL / prior.residual, linear.base.size, len(linear.at)

    def residuals(values: FloatArray) -> FloatArray:
        errors = linear.residuals(values * prior.scale).reshape(-1) * weight
        return np.concatenate([errors, (values - prior.center / prior.scale) * _SOFT_RESIDUAL])

    bounds = (_LOW / prior.scale, _HIGH / prior.scale)
    start = np.clip(linear.at / prior.scale, *bounds)
    solution = robust_least_squares(residuals, start, _SOFT_RESIDUAL, bounds=bounds)
    spread = _SOFT_RESIDUAL
    if count > parameters:
        spread = float(np.median(np.abs(linear.residuals(solution.values * prior.scale)))) / 0.6745
    jacobian = solution.jacobian[:count] / (weight * max(spread, _MIN_SPREAD))
    covariance = np.linalg.inv(jacobian.T @ jacobian + np.eye(parameters))
    return solution.values * prior.scale, np.sqrt(np.diag(covariance)) * prior.scale


def _best_spread(parts: Sequence[_LinearModel]) -> float:
    """Return the value of :data:`_RUN_SPREADS` (spread between runs of one deployment) with the smallest
    errors. For each value, each deployment is fitted to its central run, and the errors are measured on its
    other runs.
    """
    errors: dict[float, list[FloatArray]] = defaultdict(list)
    for part in parts:
        if len(part.rows) == 1:
            continue
        is_point = np.array([row is point_of(part.rows) for row in part.rows])
        point, others = part.subset(is_point), part.subset(~is_point)
        for apart in _RUN_SPREADS:
            values, _ = _solve(point, _FitPrior(part.at, _SCALE, apart))
            errors[apart].append(np.minimum(np.abs(others.residuals(values)), _MAX_RESIDUAL))
    if not errors:
        return _DEFAULT_RUN_SPREAD
    return min(errors, key=lambda apart: float(np.concatenate(errors[apart]).mean()))
