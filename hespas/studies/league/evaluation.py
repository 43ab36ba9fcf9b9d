"""Evaluation of predicted rows against published times: calibration, errors and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isnan, nan
from typing import Literal, get_args

import numpy as np

from hespas.estimators.step_intervals import Level, step_intervals
from hespas.fitting.effects import (
    COMPONENTS,
    ComponentFactor,
    FitRows,
    Posterior,
    TextColumn,
    apply_factors,
    attribute_errors,
    cell_correction,
    central_rows,
    correct_by_pairs,
    fit_effects,
    scale_posterior,
    share_from_other_cells,
    single_row_share,
)
from hespas.fitting.held_out import weighted_quantiles
from hespas.graph.columns import BoolArray, FloatArray
from hespas.studies.league.rows import LeagueRow

__all__ = [
    "CALIBRATIONS",
    "SHARED",
    "CalibrateBy",
    "Calibration",
    "EvaluatedRow",
    "Status",
    "evaluate_rows",
    "fit_rows_of",
]

CalibrateBy = Literal["none", "one-per-accelerator", "leave-group-out"]
Calibration = Literal[CalibrateBy, "factors"]
CALIBRATIONS: tuple[CalibrateBy, ...] = get_args(CalibrateBy)
"""Calibrations on the rows themselves. The calibration ``factors`` applies factors of an earlier fit."""
Status = Literal["predicted", "assumed", "calibrating", "refused"]

SHARED = "all alike"
"""Name of the part of an error that all components share."""
_MIN_ERROR_PART = 1e-4
"""Smaller parts of errors are omitted."""
_NORMAL = 1.645
"""Standard deviations between the median and the ends of the 90 % interval of a normal error."""
_MIN_RESIDUALS = 20
"""Rows of other groups that an interval needs. With fewer rows, that of all training steps is used."""
_MIN_DEVIATION = 0.03
"""Standard deviation of the logarithm that every row has: a round figure near the difference between
submitters with the same layout (:data:`hespas.studies.league.summaries.NOISE_FLOOR`).
"""
_SOURCE_POOL = 20.0
"""Number of rows of a source that have the weight of all other sources: a round figure, chosen with the
development rows in view.
"""


@dataclass(frozen=True, slots=True)
class EvaluatedRow:
    """Predicted and published step time of a row, in ms.

    ``parts`` are the shares of the components (such as matmuls or all-reduces) in the predicted step.
    ``error_parts`` divides the relative error among the components
    (:func:`hespas.fitting.effects.attribute_errors`) and :data:`SHARED`, the error that all components have
    in common. It is positive if the prediction is too long.
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
        """Return (predicted - published) / published."""
        return self.predicted_ms / self.published_ms - 1 if self.published_ms > 0 else nan

    @property
    def uncalibrated_error(self) -> float:
        """Return the relative error of the prediction without calibration."""
        uncalibrated_ms = self.row.predicted.time_ns / 1e6
        return uncalibrated_ms / self.published_ms - 1 if self.published_ms > 0 else nan

    @property
    def inside(self) -> bool:
        """Return True if the predicted interval overlaps the interval of the published time."""
        return self.low_ms <= self.published_high_ms and self.high_ms >= self.published_low_ms

    @property
    def dominant(self) -> str:
        """Return the component to which the largest part of the error is attributed; empty if the row has no
        error.
        """
        error = self.relative_error
        signed = {name: part * error for name, part in self.error_parts.items() if part * error > 0}
        return max(signed, key=signed.__getitem__, default="")

    @property
    def counts(self) -> bool:
        """Return True if the row is included in error summaries."""
        return self.status in {"predicted", "assumed"} and self.published_ms > 0


def fit_rows_of(rows: Sequence[LeagueRow]) -> FitRows:
    """Return predicted rows in the form in which effects are fitted. The error of a row without a measurement
    is NaN.
    """
    parts = np.array([[row.predicted.path.get(name, 0.0) for name in COMPONENTS] for row in rows])
    parts = parts.reshape(len(rows), len(COMPONENTS))
    predicted = np.array([row.predicted.time_ns / 1e6 for row in rows])
    measured, low, high = (
        np.array([row.number_of(f"step_time_{bound}ms") for row in rows]) for bound in ("", "lo_", "hi_")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        rounding = np.nan_to_num(np.log(high / low) / 2.0)
        error = np.log(measured / predicted)
    error[~np.isfinite(error)] = nan
    repetitions = np.array([row.number_of("rows_with_same_config") for row in rows])
    keys = {
        key: [row.cells.get(column, "") for row in rows]
        for key, column in (
            ("source", "source"),
            ("accelerator", "accelerator"),
            ("precision", "precision_class"),
            ("model", "model"),
            ("release", "release"),
        )
    }
    keys["family"] = [row.predicted.family for row in rows]
    keys["kind"] = [row.predicted.kind for row in rows]
    return FitRows(
        shares=parts / np.maximum(parts.sum(axis=1, keepdims=True), 1e-300),
        log_error=error,
        weight=1.0 / np.maximum(np.nan_to_num(repetitions, nan=1.0), 1.0),
        rounding=rounding,
        keys=keys,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _RowCorrections:
    """Corrections of predicted times by a calibration, one per row. ``mean`` is the logarithm of the factor.
    ``low`` and ``high`` are the ends of its 90 % interval, relative to ``mean``. ``calibrating`` is True for
    rows that were used in the fit.
    """

    mean: FloatArray
    low: FloatArray
    high: FloatArray
    calibrating: BoolArray


def evaluate_rows(
    rows: Sequence[LeagueRow], calibrate: Calibration, factors: Sequence[ComponentFactor] = ()
) -> list[EvaluatedRow]:
    """Return the evaluation of all rows, in order, with a calibration. ``factors`` are used by the
    calibration ``factors``.
    """
    predicted = [row for row in rows if not row.predicted.refused]
    fit_rows = fit_rows_of(predicted)
    if calibrate == "none":
        ends = np.log([_step_bounds(row.predicted.level) for row in predicted]).reshape(len(predicted), 2)
        no_row = np.zeros(len(predicted), np.bool_)
        corrections = _RowCorrections(np.zeros(len(predicted)), ends[:, 0], ends[:, 1], no_row)
    elif calibrate == "factors":
        posterior = apply_factors(fit_rows, factors)
        wide = _NORMAL * posterior.deviation
        corrections = _RowCorrections(posterior.mean, -wide, wide, np.zeros(len(predicted), np.bool_))
    else:
        columns = (fit_rows.keys[name] for name in ("source", "model", "accelerator"))
        groups = np.array([" | ".join(texts) for texts in zip(*columns, strict=True)])
        if calibrate == "leave-group-out":
            corrections = _leave_groups_out(fit_rows, groups)
        else:
            complete = np.array([not row.predicted.assumptions for row in predicted], np.bool_)
            corrections = _correct_by_single_rows(fit_rows, groups, complete)
    evaluated: dict[int, EvaluatedRow] = {}
    error_parts = -attribute_errors(fit_rows, fit_rows.log_error - corrections.mean)
    for index, row in enumerate(predicted):
        status: Status = "assumed" if row.predicted.assumptions else "predicted"
        evaluated[row.number] = _evaluated_row(
            row,
            "calibrating" if corrections.calibrating[index] else status,
            row.predicted.time_ns / 1e6 * exp(corrections.mean[index]),
            (exp(min(corrections.low[index], 0.0)), exp(max(corrections.high[index], 0.0))),
            error_parts[index],
        )
    no_parts = np.full(len(COMPONENTS) + 1, nan)
    return [
        evaluated.get(row.number) or _evaluated_row(row, "refused", nan, (nan, nan), no_parts) for row in rows
    ]


def _evaluated_row(
    row: LeagueRow,
    status: Status,
    predicted_ms: float,
    bounds: tuple[float, float],
    error_parts: FloatArray,
) -> EvaluatedRow:
    published = row.number_of("step_time_ms")
    low, high = row.number_of("step_time_lo_ms"), row.number_of("step_time_hi_ms")
    total = sum(row.predicted.parts.values())
    return EvaluatedRow(
        row=row,
        status=status,
        predicted_ms=predicted_ms,
        low_ms=predicted_ms * bounds[0],
        high_ms=predicted_ms * bounds[1],
        published_ms=published,
        published_low_ms=published if isnan(low) else low,
        published_high_ms=published if isnan(high) else high,
        parts={name: value / total for name, value in row.predicted.parts.items() if value > 0 and total > 0},
        error_parts={
            name: part
            for name, part in zip((*COMPONENTS, SHARED), error_parts.tolist(), strict=True)
            if abs(part) > _MIN_ERROR_PART
        },
    )


def _correct_by_single_rows(rows: FitRows, groups: TextColumn, complete: BoolArray) -> _RowCorrections:
    """Return corrections that are fitted to one row of each cell. A cell is the runs of one source on one
    accelerator.

    A ``complete`` row, which needs no assumption, is preferred. The correction of a cell is multiplied by two
    shares (0 to 1): the trust in its row (:func:`hespas.fitting.effects.single_row_share`), and the share
    that lowers the errors of other cells most.
    """
    measured, calibrating = ~np.isnan(rows.log_error), np.zeros(len(rows), np.bool_)
    covariance = rows.covariance()
    calibrating[central_rows(covariance, rows, (measured & complete, measured))] = True
    calibrating &= measured
    tested = measured & ~calibrating
    unweighted = replace(rows, weight=np.ones(len(rows)))  # a single row per cell has no repetitions
    fit = fit_effects(covariance, unweighted, calibrating)
    posterior = fit.posterior(np.ones(len(rows), np.bool_))
    prior = np.sqrt(np.diag(fit.covariance))
    mean, deviation = np.zeros(len(rows)), prior.copy()
    cells = list(zip(rows.keys["source"], rows.keys["accelerator"], strict=True))
    unexpected, _ = fit.held_out(np.array(["\0".join(cell) for cell in cells]))
    fitted: list[int] = fit.rows.tolist()
    expected = fit.target - unexpected
    trust = {
        cells[row]: single_row_share(float(fit.target[place]), float(expected[place]))
        for place, row in enumerate(fitted)
    }
    pairs = correct_by_pairs(covariance, rows)
    for cell in dict.fromkeys(cells):
        members = np.array([row_cell == cell for row_cell in cells], np.bool_)
        share = trust.get(cell, 0.0) * share_from_other_cells(rows, pairs, *cell)
        own = Posterior(posterior.mean[members], posterior.deviation[members])
        scaled = scale_posterior(own, prior[members], share)
        mean[members], deviation[members] = scaled.mean, scaled.deviation
    low, high = np.zeros((2, len(rows)))
    residual, sources = rows.log_error - mean, np.array(rows.keys["source"])
    for group in np.unique(groups):
        members = groups == group
        others = tested & ~members
        same_source = sources[others] == sources[members][0]
        low[members], high[members] = _interval(
            residual[others], deviation[others], same_source, deviation[members]
        )
    return _RowCorrections(mean, low, high, calibrating)


def _leave_groups_out(rows: FitRows, groups: TextColumn) -> _RowCorrections:
    """Return corrections of each group of rows, fitted to all other groups.

    The intervals are computed from the residuals of the rows in this fit. The residual of a row is from a fit
    without its group.
    """
    covariance, sources = rows.covariance(), np.array(rows.keys["source"])
    measured, prior = ~np.isnan(rows.log_error), np.sqrt(np.diag(covariance))
    mean, low, high = np.zeros((3, len(rows)))
    for group in np.unique(groups):
        members = groups == group
        fit = fit_effects(covariance, rows, measured & ~members)
        first = int(np.flatnonzero(members)[0])
        cell = rows.keys["source"][first], rows.keys["accelerator"][first]
        correction = cell_correction(fit, rows, *cell)
        posterior = scale_posterior(fit.posterior(members), prior[members], correction.share)
        mean[members] = posterior.mean
        same_source = sources[fit.rows] == sources[members][0]
        low[members], high[members] = _interval(
            correction.residual, correction.deviation, same_source, posterior.deviation
        )
    return _RowCorrections(mean, low, high, np.zeros(len(rows), np.bool_))


def _step_bounds(level: Level) -> tuple[float, float]:
    """Return the ends of the interval of predicted training steps at an extrapolation level, as factors on
    the prediction.
    """
    interval = step_intervals()["training", level]
    return interval.low, interval.high


def _interval(
    residual: FloatArray, deviation: FloatArray, same_source: BoolArray, predicted_deviation: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the ends of 90 % intervals for predictions with standard deviations ``predicted_deviation``, all
    in logarithms.

    They are quantiles of residuals / ``deviation`` of rows of other groups, multiplied by
    ``predicted_deviation``. Rows of the same source have more weight, because rows of one software stack have
    similar errors. This weight grows with their number. If there are few rows, the ends for all predicted
    training steps are used.
    """
    if len(residual) < _MIN_RESIDUALS:
        low, high = np.log(_step_bounds("measured"))
        return np.full(len(predicted_deviation), low), np.full(len(predicted_deviation), high)
    values = residual / np.sqrt(deviation**2 + _MIN_DEVIATION**2)
    count, rest = int(same_source.sum()), int((~same_source).sum())
    share = count / (count + _SOURCE_POOL) if rest else 1.0
    weights = np.where(same_source, share / max(count, 1), (1.0 - share) / max(rest, 1))
    low, high = weighted_quantiles(values, weights)
    unit = np.sqrt(predicted_deviation**2 + _MIN_DEVIATION**2)
    return low * unit, high * unit
