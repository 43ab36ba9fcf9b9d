"""Rows beside what was published: factors of a calibration, errors and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, nan
from typing import Literal, get_args

import numpy as np

from hespas.estimators.step_intervals import Level, step_intervals
from hespas.graph.columns import BoolArray, FloatArray
from hespas.validators.league.fit import (
    Factor,
    Facts,
    Fit,
    Posterior,
    applied,
    applied_share,
    central_rows,
    dominating,
    fitted,
    share_of_others,
    strength_of,
)
from hespas.validators.league.parts import COMPONENTS
from hespas.validators.league.predict import LeagueRow

__all__ = [
    "CALIBRATIONS",
    "SHARED",
    "CalibrateBy",
    "Calibration",
    "JudgedRow",
    "Status",
    "facts_of",
    "judged",
]

CalibrateBy = Literal["none", "one-per-accelerator", "leave-group-out"]
Calibration = Literal[CalibrateBy, "factors"]
CALIBRATIONS: tuple[CalibrateBy, ...] = get_args(CalibrateBy)
"""Those that learn from the rows themselves; ``factors`` were fitted before."""
Status = Literal["predicted", "assumed", "calibrating", "refused"]

SHARED = "all alike"
"""What a part of an error is called that all components share."""
_TOLD = 1e-4
"""Parts of errors below are not told."""
_LOW, _HIGH = 0.05, 0.95
_NORMAL = 1.645
"""Deviations of a normal error between its middle and these."""
_FEWEST = 20
"""Rows of other groups from which an interval is taken; below, that of every training step holds."""


@dataclass(frozen=True, slots=True)
class JudgedRow:
    """A prediction beside what was published, times in ms. ``parts`` are shares of the predicted step;
    ``error_parts`` is what of the relative error :func:`hespas.validators.league.fit.dominating` puts down
    to each of them and (:data:`SHARED`) to none in particular: positive where it is predicted too long.
    """

    row: LeagueRow
    status: Status
    predicted_ms: float
    low_ms: float
    high_ms: float
    published_ms: float
    published_low_ms: float
    published_high_ms: float
    parts: dict[str, float]
    error_parts: dict[str, float]

    @property
    def relative_error(self) -> float:
        """(predicted - published) / published."""
        return self.predicted_ms / self.published_ms - 1 if self.published_ms > 0 else nan

    @property
    def inside(self) -> bool:
        """Whether the interval meets that of the published time."""
        return self.low_ms <= self.published_high_ms and self.high_ms >= self.published_low_ms

    @property
    def dominant(self) -> str:
        """What dominates the error: the part that most of it is put down to; empty where there is none."""
        error = self.relative_error
        signed = {name: part * error for name, part in self.error_parts.items() if part * error > 0}
        return max(signed, key=signed.__getitem__, default="")

    @property
    def counts(self) -> bool:
        """Whether the row is one that errors are counted of."""
        return self.status in {"predicted", "assumed"} and self.published_ms > 0


def facts_of(rows: Sequence[LeagueRow]) -> Facts:
    """Rows that are predicted as facts of a fit; of rows without a measurement the error is NaN."""
    parts = np.array([[row.predicted.path.get(name, 0.0) for name in COMPONENTS] for row in rows])
    parts = parts.reshape(len(rows), len(COMPONENTS))
    predicted = np.array([row.predicted.time_ns / 1e6 for row in rows])
    measured, low, high = (
        np.array([row.number_of(f"step_time_{name}ms") for row in rows]) for name in ("", "lo_", "hi_")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rounding = np.nan_to_num(np.log(high / low) / 2.0)
        error = np.log(measured / predicted)
    error[~np.isfinite(error)] = nan
    same = np.array([row.number_of("rows_with_same_config") for row in rows])
    cells = [row.cells for row in rows]
    keys = {
        name: [each.get(column, "") for each in cells]
        for name, column in (
            ("source", "source"),
            ("accelerator", "accelerator"),
            ("precision", "precision_class"),
            ("model", "model"),
            ("release", "release"),
        )
    }
    keys["family"] = [row.predicted.family for row in rows]
    keys["kind"] = [row.predicted.kind for row in rows]
    return Facts(
        shares=parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300),
        log_error=error,
        weight=1.0 / np.maximum(np.nan_to_num(same, nan=1.0), 1.0),
        rounding=rounding,
        keys=keys,
    )


def judged(
    rows: Sequence[LeagueRow], calibrate: Calibration, factors: Sequence[Factor] = ()
) -> list[JudgedRow]:
    """All rows, in order, in one mode of calibration; ``factors`` are those of the mode of that name."""
    some = [row for row in rows if not row.predicted.refused]
    facts = facts_of(some)
    if calibrate == "none":
        said = _uncalibrated([row.predicted.level for row in some])
    else:
        complete = np.array([not row.predicted.assumptions for row in some], np.bool_)
        said = _said(facts, calibrate, factors, complete)
    found: dict[int, JudgedRow] = {}
    error_parts = -dominating(facts, facts.log_error - said.mean)
    for place, row in enumerate(some):
        factor = exp(said.mean[place])
        status: Status = "assumed" if row.predicted.assumptions else "predicted"
        found[row.number] = _row(
            row,
            "calibrating" if said.calibrating[place] else status,
            row.predicted.time_ns / 1e6 * factor,
            (exp(min(said.low[place], 0.0)), exp(max(said.high[place], 0.0))),
            error_parts[place],
        )
    nothing = np.full(len(COMPONENTS) + 1, nan)
    return [found.get(row.number) or _row(row, "refused", nan, (nan, nan), nothing) for row in rows]


def _row(
    row: LeagueRow,
    status: Status,
    predicted_ms: float,
    bounds: tuple[float, float],
    error_parts: FloatArray,
) -> JudgedRow:
    published = row.number_of("step_time_ms")
    low, high = row.number_of("step_time_lo_ms"), row.number_of("step_time_hi_ms")
    whole = sum(row.predicted.parts.values())
    return JudgedRow(
        row=row,
        status=status,
        predicted_ms=predicted_ms,
        low_ms=predicted_ms * bounds[0],
        high_ms=predicted_ms * bounds[1],
        published_ms=published,
        published_low_ms=published if isnan(low) else low,
        published_high_ms=published if isnan(high) else high,
        parts={name: value / whole for name, value in row.predicted.parts.items() if value > 0 and whole > 0},
        error_parts={
            name: part
            for name, part in zip((*COMPONENTS, SHARED), error_parts.tolist(), strict=True)
            if abs(part) > _TOLD
        },
    )


def _groups(facts: Facts) -> list[str]:
    """Source, model and accelerator of each row: what is left out together."""
    columns = (facts.keys[name] for name in ("source", "model", "accelerator"))
    return [" | ".join(parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """Of each row the logarithm of its factor, the ends of its 90 % interval around that, and whether it was
    calibrated on.
    """

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    calibrating: BoolArray


def _said(facts: Facts, calibrate: Calibration, factors: Sequence[Factor], complete: BoolArray) -> _Said:
    """Return corrections in a mode of calibration. One-per-accelerator takes a row that is ``complete``
    (needs no assumption) where there is one.
    """
    groups, calibrating = np.array(_groups(facts)), np.zeros(len(facts), np.bool_)
    measured = ~np.isnan(facts.log_error)
    if calibrate == "factors":
        stated = applied(facts, factors)
        wide = _NORMAL * stated.deviation
        return _Said(stated.mean, -wide, wide, calibrating)
    if calibrate == "leave-group-out":
        return _left_out(facts, groups, measured)
    covariance = facts.covariance()
    calibrating[central_rows(covariance, facts, (measured & complete, measured))] = True
    calibrating &= measured
    alone = replace(facts, weight=np.ones(len(facts)))  # one row of each cell: it has no repetitions
    mean, deviation = _of_points(facts, fitted(covariance, alone, calibrating), measured & ~calibrating)
    low, high = np.zeros((2, len(facts)))
    left, sources = facts.log_error - mean, np.array(facts.keys["source"])
    for group in np.unique(groups):
        mine = groups == group
        others = measured & ~calibrating & ~mine
        own = sources[others] == sources[mine][0]
        low[mine], high[mine] = _interval(left[others], deviation[others], own, deviation[mine])
    return _Said(mean, low, high, calibrating)


def _uncalibrated(levels: Sequence[Level]) -> _Said:
    """Return what is known of each row without calibration: the interval of every prediction of a training
    step.
    """
    ends = np.log([_factors(level) for level in levels]).reshape(len(levels), 2)
    return _Said(np.zeros(len(levels)), ends[:, 0], ends[:, 1], np.zeros(len(levels), np.bool_))


def _left_out(facts: Facts, groups: np.ndarray[tuple[int], np.dtype[np.str_]], measured: BoolArray) -> _Said:
    """Each group by a fit on all others. Its interval is of what that fit, which has nothing of the group,
    would leave of each of those others without its own group.
    """
    covariance, sources = facts.covariance(), np.array(facts.keys["source"])
    prior = np.sqrt(np.diag(covariance))
    mean, low, high = np.zeros((3, len(facts)))
    for group in np.unique(groups):
        mine = groups == group
        fit = fitted(covariance, facts, measured & ~mine)
        first = int(np.flatnonzero(mine)[0])
        strength = strength_of(fit, facts, facts.keys["source"][first], facts.keys["accelerator"][first])
        said = strength.posterior(fit.of(mine), prior[mine])
        mean[mine] = said.mean
        own = sources[fit.here] == sources[mine][0]
        low[mine], high[mine] = _interval(strength.left, strength.deviation, own, said.deviation)
    return _Said(mean, low, high, np.zeros(len(facts), np.bool_))


def _of_points(facts: Facts, fit: Fit, tested: BoolArray) -> tuple[FloatArray, FloatArray]:
    """Return means and deviations of all rows by a fit on one row of each cell. Each cell is corrected by the
    share that helps the rows ``tested`` of other cells.
    """
    said = fit.of(np.ones(len(facts), np.bool_))
    prior = np.sqrt(np.diag(fit.covariance))
    mean, deviation = np.zeros(len(facts)), prior.copy()
    cells = list(zip(facts.keys["source"], facts.keys["accelerator"], strict=True))
    for cell in dict.fromkeys(cells):
        rows = np.array([each == cell for each in cells], np.bool_)
        share = share_of_others(facts, said.mean, tested, *cell)
        found = applied_share(Posterior(said.mean[rows], said.deviation[rows]), prior[rows], share)
        mean[rows], deviation[rows] = found.mean, found.deviation
    return mean, deviation


_LEAST = 0.03
"""Deviation of a logarithm that every row has: a round figure near what submitters with the same layout
differ by (:data:`.summaries.NOISE_FLOOR`).
"""
_POOL = 20.0
"""Rows of a source that count as much as all other sources together: a round figure, set with the development
rows in sight.
"""


def _factors(level: Level) -> tuple[float, float]:
    """Return the ends of the interval of every predicted training step at an extrapolation level."""
    found = step_intervals()["training", level]
    return found.low, found.high


def _scale(deviation: FloatArray) -> FloatArray:
    """The unit of errors: how sure a prediction is of itself, and what no fit explains."""
    return np.sqrt(deviation**2 + _LEAST**2)


def _interval(
    left: FloatArray, deviation: FloatArray, own: BoolArray, asked: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the ends of 90 % intervals of the logarithm of predictions with the deviations ``asked``.

    They are quantiles of what is ``left`` of rows of other groups, in their units. Rows of one software stack
    err alike, so those of the ``own`` source count more, the more there are. Where there are few rows, the
    ends are those of every prediction of a training step.
    """
    if len(left) < _FEWEST:
        low, high = np.log(_factors("measured"))
        return np.full(len(asked), low), np.full(len(asked), high)
    low, high = _quantiles(left / _scale(deviation), _weights(own), (_LOW, _HIGH))
    return low * _scale(asked), high * _scale(asked)


def _weights(own: BoolArray) -> FloatArray:
    """Of rows of the own source and of others; their sum is 1."""
    count, rest = int(own.sum()), int((~own).sum())
    share = count / (count + _POOL) if rest else 1.0
    return np.where(own, share / max(count, 1), (1.0 - share) / max(rest, 1))


def _quantiles(values: FloatArray, weights: FloatArray, levels: Sequence[float]) -> list[float]:
    """Quantiles of weighted values, each of which stands for itself beside an unknown one of its weight."""
    order = np.argsort(values)
    place = np.cumsum(weights[order]) - weights[order] / 2
    margin = float((weights**2).sum()) / 2
    wide = (max(level - margin, 0.0) if level < 0.5 else min(level + margin, 1.0) for level in levels)
    return [float(np.interp(level, place, values[order])) for level in wide]
