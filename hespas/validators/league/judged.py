"""Rows beside what was published: factors of a calibration, errors and intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, isnan, nan
from typing import Literal

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray
from hespas.validators.league.fit import (
    Factor,
    Facts,
    Posterior,
    applied,
    central_rows,
    dominating,
    posterior,
)
from hespas.validators.league.parts import COMPONENTS
from hespas.validators.league.predict import LeagueRow

__all__ = ["CALIBRATIONS", "SHARED", "Calibration", "JudgedRow", "Status", "facts_of", "judged"]

Calibration = Literal["none", "one-per-accelerator", "leave-group-out", "factors"]
CALIBRATIONS: tuple[Calibration, ...] = ("none", "one-per-accelerator", "leave-group-out")
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
"""Rows of other groups from which an interval is taken; below, :data:`_START` holds."""
_START = (0.75, 1.6)
"""The interval of a prediction that nothing is known about, as factors: round figures, set with the
development rows in sight.
"""


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
    parts = np.array([[row.predicted.parts.get(name, 0.0) for name in COMPONENTS] for row in rows])
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
    measured = ~np.isnan(facts.log_error)
    groups = np.array(_groups(facts))
    if calibrate == "factors":
        said = applied(facts, factors)
        mean, calibrating = said.mean, np.zeros(len(facts), np.bool_)
        low, high = -_NORMAL * said.deviation, _NORMAL * said.deviation
    else:
        mean, deviation, calibrating = _factors(facts, groups, measured, calibrate)
        known = measured & ~calibrating
        low, high = _bounds(facts.log_error - mean, deviation, groups, facts.keys["source"], known)
    found: dict[int, JudgedRow] = {}
    error_parts = -dominating(facts, facts.log_error - mean)
    for place, row in enumerate(some):
        factor = exp(mean[place])
        status: Status = "assumed" if row.predicted.assumptions else "predicted"
        found[row.number] = _row(
            row,
            "calibrating" if calibrating[place] else status,
            row.predicted.time_ns / 1e6 * factor,
            (exp(low[place]), exp(high[place])),
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


def _factors(
    facts: Facts,
    groups: np.ndarray[tuple[int], np.dtype[np.str_]],
    measured: BoolArray,
    calibrate: Calibration,
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """The logarithm of the factor of each row, its deviation, and which rows are calibrated on."""
    count = len(facts)
    mean, nobody = np.zeros(count), np.zeros(count, np.bool_)
    covariance = facts.covariance()
    deviation = np.sqrt(np.diag(covariance)) if count else mean
    if calibrate == "none":
        return mean, np.ones(count), nobody
    if calibrate == "one-per-accelerator":
        known = nobody.copy()
        known[central_rows(covariance, facts, measured)] = True
        known &= measured
        said = posterior(covariance, facts, known, np.ones(count, np.bool_))
        return said.mean, said.deviation, known
    for group in np.unique(groups):
        asked = groups == group
        others: Posterior = posterior(covariance, facts, measured & ~asked, asked)
        mean[asked], deviation[asked] = others.mean, others.deviation
    return mean, deviation, nobody


_LEAST = 0.03
"""Deviation of a logarithm that every row has: a round figure near what submitters with the same layout
differ by (:data:`.summaries.NOISE_FLOOR`).
"""
_POOL = 20.0
"""Rows of a source that count as much as all other sources together: a round figure, set with the development
rows in sight.
"""


def _bounds(
    left: FloatArray,
    deviation: FloatArray,
    groups: np.ndarray[tuple[int], np.dtype[np.str_]],
    sources: Sequence[str],
    known: BoolArray,
) -> tuple[FloatArray, FloatArray]:
    """Ends of 90 % intervals of the logarithm of what is left: quantiles over rows of other groups of it in
    units of its deviation. Rows of one software stack err alike, so those of a row's own source count more,
    the more there are.
    """
    scale = np.sqrt(deviation**2 + _LEAST**2)
    units, stack = left / scale, np.array(sources)
    low, high = np.full(len(left), np.log(_START[0])), np.full(len(left), np.log(_START[1]))
    for group in np.unique(groups):
        mine = groups == group
        others = known & ~mine
        if others.sum() >= _FEWEST:
            own = stack[others] == stack[mine][0]
            ends = _quantiles(units[others], _weights(own), (_LOW, _HIGH))
            low[mine], high[mine] = (end * scale[mine] for end in ends)
    return low, high


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
