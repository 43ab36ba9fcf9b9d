"""End-to-end calibration: factors that correct predicted step times, fitted to published training runs.

The logarithm of a row's error is the sum of the errors of its components, each times the component's share of
the step (a derivative along the critical path). The error of a component is a sum of effects: of the family
of devices, the software stack, the accelerator in that stack, the number formats, the kind of model and the
release. Effects are normal around 0 (shrinkage to the fits per operation), so their posterior has a closed
form, with standard errors. Outliers have less weight (Student's t). No effect belongs to a single row.

:func:`fit_step_factor` fits one effect alone: a factor on whole steps of a device, framework and phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.files.documents import Count, Figure
from hespas.fitting.held_out import best_share
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import InvariantError

__all__ = [
    "COMPONENTS",
    "EFFECTS",
    "CellCorrection",
    "ComponentFactor",
    "Effect",
    "EffectFit",
    "FitRows",
    "LevelEffect",
    "Posterior",
    "RowPairs",
    "StepFactorFit",
    "TextColumn",
    "apply_factors",
    "attribute_errors",
    "cell_correction",
    "central_rows",
    "correct_by_pairs",
    "factors_of",
    "fit_effects",
    "fit_step_factor",
    "level_effects",
    "scale_posterior",
    "share_from_other_cells",
    "single_row_share",
]

TextColumn = np.ndarray[tuple[int], np.dtype[np.str_]]
"""Column of texts."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Random effect: a cause of errors that is common to all rows with equal values in ``columns``.

    ``spread`` scales the effect on single components: the standard deviation of the logarithm of a
    component's factor, relative to the value of that component in :data:`_SPREAD`. ``whole`` is the standard
    deviation of one factor for all components together.
    """

    name: str
    columns: tuple[str, ...]
    spread: float
    whole: float


EFFECTS: tuple[Effect, ...] = (
    Effect("family", ("family",), 0.15, 0.05),
    Effect("stack", ("source",), 0.15, 0.10),
    Effect("accelerator", ("source", "accelerator"), 0.10, 0.10),
    Effect("precision", ("source", "precision"), 0.0, 0.05),
    Effect("model kind", ("source", "kind"), 0.10, 0.10),
    Effect("release", ("source", "release"), 0.0, 0.05),
    Effect("group", ("source", "model", "accelerator"), 0.0, 0.06),
)
"""Effects that rows can share. Round figures, chosen with the development rows in view."""
_SPREAD: Mapping[str, float] = {
    "products": 1.0,
    "products of 8 bits": 1.0,
    "products of 4 bits": 1.0,
    "experts": 1.5,
    "attention": 1.5,
    "vector": 1.5,
    "quantize": 2.0,
    "optimizer": 2.0,
    "tensor": 2.0,
    "context": 2.0,
    "data": 2.0,
    "expert": 2.0,
    "pipeline": 2.0,
    "copies": 2.0,
    "host": 3.0,
    "overlap": 3.0,
    "bubble": 1.0,
}
"""Uncertainty of each component relative to matmuls, which have the most measurements. Round figures, chosen
with the development rows in view.
"""
COMPONENTS = tuple(_SPREAD)
"""Components of a step: matmuls by the bits of their operands, grouped matmuls of experts, attention,
memory-bound kernels, conversions to narrow formats, the optimizer; collectives of tensor, context, data and
expert parallelism, and messages between pipeline stages; copies to the host; waits for the host; slowdown of
kernels by concurrent communication; idle time of the last stage to finish, which waits for other stages.
"""
_NOISE = 0.04
"""Standard deviation of the unexplained error of a row. The median between submitters is 2.8 %."""
_FREEDOM = 4.0
"""Degrees of freedom of Student's t, which lowers the weight of outliers. A customary value, not fitted."""
_ROUNDS = 4
"""Number of alternating updates of weights and fit."""
_GROUP = ("source", "model", "accelerator")
"""Columns of a group, whose rows are held out together."""
_CELL = ("source", "accelerator")
"""Columns of a cell: a software stack on an accelerator."""
_STACK = ("family", "source", "accelerator")
"""Columns that factors distinguish."""
_MIN_SHARE = 0.005
"""Components with a smaller share of the steps get no factor: their effect on a step is too small."""
_CELL_POOL, _SOURCE_POOL = 2.0, 4.0
"""Number of groups of an accelerator and stack that have the weight of all other groups of the stack, and
number of groups of a stack that have the weight of all other stacks. Round figures, chosen with the
development rows in view.
"""
_STACK_POOL = 2.0
"""Number of cells of a stack that have the weight of all cells of other stacks in decisions on the correction
by one row. A round figure, chosen with the development rows in view.
"""
_PAIR_CONFIDENCE = 1.0
"""Standard errors by which a gain must exceed 0 in these decisions, which average over all choices of the
row: the rule of one standard error (Breiman et al. 1984).
"""


@dataclass(frozen=True, slots=True, eq=False)
class FitRows:
    """Published runs as rows of a fit.

    ``shares`` are the shares of the components in the predicted step, shape ``(rows, components)``.
    ``log_error`` is ln(measured / predicted), ``rounding`` the rounding error of that logarithm. ``keys`` has
    text columns, such as the accelerator, by which effects distinguish rows.
    """

    shares: FloatArray
    log_error: FloatArray
    weight: FloatArray
    rounding: FloatArray
    keys: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.log_error)

    def joined_keys(self, columns: Sequence[str]) -> list[str]:
        """Return for each row the texts of some key columns, joined to one string."""
        return ["\0".join(texts) for texts in zip(*(self.keys[name] for name in columns), strict=True)]

    def covariance(self, effects: Sequence[Effect] = EFFECTS) -> FloatArray:
        """Return the prior covariance of the logarithms of the errors of all rows. O(rows^2 effects)."""
        spread = np.array([_SPREAD[name] for name in COMPONENTS])
        mixed = (self.shares * spread**2) @ self.shares.T
        total: FloatArray = np.zeros((len(self), len(self)))
        for effect in effects:
            total = total + self.same_effect(effect) * (effect.spread**2 * mixed + effect.whole**2)
        return total

    def same_effect(self, effect: Effect) -> BoolArray:
        """Return a mask of shape ``(rows, rows)``: True for pairs of rows that share an effect."""
        _, code = np.unique(self.joined_keys(effect.columns), return_inverse=True)
        return np.asarray(code[:, None] == code[None, :])

    def select(self, rows: IntArray) -> FitRows:
        """Return a table with only the given rows."""
        indices: list[int] = rows.tolist()
        return FitRows(
            shares=self.shares[rows],
            log_error=self.log_error[rows],
            weight=self.weight[rows],
            rounding=self.rounding[rows],
            keys={name: [texts[index] for index in indices] for name, texts in self.keys.items()},
        )


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Corrections of rows, predicted by the fit of effects. ``mean`` is the logarithm of the factor on the
    time, ``deviation`` its standard deviation without unexplained noise.
    """

    mean: FloatArray
    deviation: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class EffectFit:
    """Fit of the effects to some ``rows`` of a table.

    ``covariance`` is over all rows of the table. ``inverse`` is the inverse of its block for the fitted rows,
    to which the ``noise`` of each row is added. Outliers have more noise.
    """

    covariance: FloatArray
    rows: IntArray
    target: FloatArray
    noise: FloatArray
    inverse: FloatArray

    def posterior(self, selected: BoolArray) -> Posterior:
        """Return the correction of each of the ``selected`` rows of the table."""
        across = self.covariance[np.ix_(np.flatnonzero(selected), self.rows)]
        gain = across @ self.inverse
        own = np.diag(self.covariance)[selected]
        return Posterior(gain @ self.target, np.sqrt(np.maximum(own - (gain * across).sum(axis=1), 0.0)))

    def held_out(self, groups: TextColumn) -> tuple[FloatArray, FloatArray]:
        """Return for each fitted row the residual of a fit without the rows of its group, and the standard
        deviation of this residual, each of shape ``(rows of the fit,)``.

        The computation uses blocks of the inverse (Rasmussen and Williams, Gaussian Processes for Machine
        Learning, 5.4.2), with the same noise.
        """
        residual, variance = np.zeros((2, len(self.rows)))
        pull, group_of = self.inverse @ self.target, groups[self.rows]
        for group in np.unique(group_of):
            members = np.flatnonzero(group_of == group)
            spread = np.linalg.inv(self.inverse[np.ix_(members, members)])
            residual[members] = spread @ pull[members]
            variance[members] = np.diag(spread) - self.noise[members]
        return residual, np.sqrt(np.maximum(variance, 0.0))


def fit_effects(
    covariance: FloatArray, table: FitRows, fitted: BoolArray, rounds: int = _ROUNDS
) -> EffectFit:
    """Fit the effects to the ``fitted`` rows of a table. O(fitted^3)."""
    rows = np.flatnonzero(fitted)
    inside, target = covariance[np.ix_(rows, rows)], table.log_error[rows]
    base_noise = (_NOISE**2 + table.rounding[rows] ** 2) / table.weight[rows]
    noise = base_noise
    inverse = _inverse(inside + np.diag(noise))
    for _ in range(rounds):
        residual = inverse @ target * noise
        trust = (_FREEDOM + 1) / (_FREEDOM + residual**2 / base_noise)
        noise = base_noise / trust
        inverse = _inverse(inside + np.diag(noise))
    return EffectFit(covariance, rows, target, noise, inverse)


def _inverse(matrix: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.inv(matrix), np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class CellCorrection:
    """Share of the correction that is applied to a cell (a software stack on an accelerator), 0 to 1.

    ``residual`` is the residual of each fitted row in a fit without its group, and ``deviation`` its standard
    deviation, each of shape ``(rows of the fit,)``.
    """

    share: float
    residual: FloatArray
    deviation: FloatArray


def scale_posterior(posterior: Posterior, prior: FloatArray, share: float) -> Posterior:
    """Return a posterior in which only the fraction ``share`` of the correction is applied. ``prior`` are the
    standard deviations of rows without a correction.
    """
    return Posterior(posterior.mean * share, _mixed_deviation(posterior.deviation, prior, share))


def _mixed_deviation(deviation: FloatArray, prior: FloatArray, share: float) -> FloatArray:
    return np.sqrt(share * deviation**2 + (1 - share) * prior**2)


def cell_correction(fit: EffectFit, table: FitRows, source: str, accelerator: str) -> CellCorrection:
    """Return the share of the correction to apply in a cell (a software stack on an accelerator): the share
    with the lowest errors on held-out rows of the fit.

    Each row is corrected by a fit without its group. Groups of the cell have the most weight, then groups of
    its stack. A cell without rows gets no correction, because corrections from other accelerators do not
    reliably lower its mean error. A fit to one group cannot be tested; its correction is applied.
    """
    keys = np.array(table.joined_keys(_GROUP))
    sources, accelerators = (np.array(table.keys[name])[fit.rows] for name in ("source", "accelerator"))
    in_source = sources == source
    in_cell = in_source & (accelerators == accelerator)
    prior = np.sqrt(np.diag(fit.covariance)[fit.rows])
    groups = keys[fit.rows]
    several = len(set(groups.tolist())) > 1
    if several and not in_cell.any():
        return CellCorrection(0.0, fit.target, prior)
    residual, deviation = fit.held_out(keys)
    if not several:
        return CellCorrection(1.0, residual, deviation)
    correction = fit.target - residual
    levels = ((in_cell, _CELL_POOL), (in_source & ~in_cell, _SOURCE_POOL), (~in_source, 0.0))
    share = best_share(fit.target, correction, _evidence(groups, levels), groups)
    return CellCorrection(share, fit.target - share * correction, _mixed_deviation(deviation, prior, share))


_OWN_SPREAD = 0.09
"""Standard deviation of errors of rows within a cell: a round figure near the median of the development
rows.
"""
_ROUNDING = 1e-12
"""Size below which the product of two logarithms may be a rounding error."""


def single_row_share(log_error: float, expected: float) -> float:
    """Return the share of the correction by one row to apply, from the error of this row and the error that
    the calibration rows of other cells predict for it (``expected``).

    Errors of equal signs confirm each other, and the share is 1. An error of the other sign may be of this
    row only. The share is then near 1 if it is much larger than the spread of rows within a cell, and 0 if it
    is not (positive-part estimator: James and Stein 1961).
    """
    if log_error * expected > -_ROUNDING:
        return 1.0
    return max(0.0, 1.0 - (_OWN_SPREAD / log_error) ** 2)


class RowPairs(NamedTuple):
    """Corrections of rows by single rows of the same cell, one for each ordered pair of measured rows.

    ``row`` is the index of the corrected row, ``correction`` the logarithm of its factor, both of shape
    ``(pairs,)``.
    """

    row: IntArray
    correction: FloatArray


def correct_by_pairs(covariance: FloatArray, table: FitRows) -> RowPairs:
    """Correct every measured row by a fit to each other measured row of its cell alone. O(rows^2)."""
    cells = np.array(table.joined_keys(_CELL))
    pairs = (cells[:, None] == cells) & ~np.eye(len(table), dtype=np.bool_)
    measured = ~np.isnan(table.log_error)
    fitted, corrected = np.nonzero(pairs & measured[:, None] & measured)
    variance = np.diag(covariance) + _NOISE**2 + table.rounding**2
    gain = covariance[fitted, corrected] / variance[fitted]
    return RowPairs(corrected, gain * table.log_error[fitted])


def share_from_other_cells(table: FitRows, pairs: RowPairs, source: str, accelerator: str) -> float:
    """Return the share of the correction to apply in a cell (a software stack on an accelerator) that is
    corrected by one row.

    It is the share with the lowest errors on ``pairs`` of other cells, so the decision does not depend on the
    choice of rows there. Cells of the same stack have the most weight. Without other cells nothing can be
    tested, and the correction is applied.
    """
    cells = np.array(table.joined_keys(_CELL))[pairs.row]
    others = cells != "\0".join((source, accelerator))
    if not others.any():
        return 1.0
    in_source = np.array(table.keys["source"])[pairs.row[others]] == source
    weight = _evidence(cells[others], ((in_source, _STACK_POOL), (~in_source, 0.0)))
    error = table.log_error[pairs.row[others]]
    return best_share(error, pairs.correction[others], weight, cells[others], _PAIR_CONFIDENCE)


def _evidence(groups: TextColumn, levels: Sequence[tuple[BoolArray, float]]) -> FloatArray:
    """Return the weight of each row in the decision about a cell; the weights sum to 1. ``levels`` are masks
    of rows in descending order of their weight, each with the number of groups that have the weight of all
    later levels. Within a level, all groups have equal weights, and so have all rows of a group.
    """
    _, number, size = np.unique(groups, return_inverse=True, return_counts=True)
    row_share = 1.0 / size[number.reshape(-1)]
    weight, remaining = np.zeros(len(groups)), 1.0
    for members, pool in levels:
        count = float(row_share[members].sum())
        if count > 0:
            share = remaining * count / (count + pool)
            weight[members] = share * row_share[members] / count
            remaining -= share
    total = float(weight.sum())
    return weight / total if total > 0 else weight


def attribute_errors(table: FitRows, residual: FloatArray) -> FloatArray:
    """Divide the residual ln(measured / predicted) of each row among components. Shape ``(rows, components +
    1)``.

    The last column is the error that all components share. Rows without a measurement are NaN. The result is
    the posterior mean of the effects, so it is determined by rows with similar errors. O(rows^2 effects
    components).
    """
    rows = np.flatnonzero(~np.isnan(residual))
    measured = table.select(rows)
    shares, spread = measured.shares, np.array([_SPREAD[name] for name in COMPONENTS])
    attributed = np.full((len(table), len(COMPONENTS) + 1), np.nan)
    noise = (_NOISE**2 + measured.rounding**2) / measured.weight
    error = residual[rows]
    pull = np.linalg.solve(measured.covariance() + np.diag(noise), error) if len(rows) else error
    parts: FloatArray = np.zeros((len(rows), len(COMPONENTS) + 1))
    for effect in EFFECTS:
        same = measured.same_effect(effect)
        parts[:, :-1] += effect.spread**2 * (shares * spread**2) * (same @ (shares * pull[:, None]))
        parts[:, -1] += effect.whole**2 * (same @ pull)
    attributed[rows] = parts
    return attributed


def central_rows(covariance: FloatArray, table: FitRows, preferred: Sequence[BoolArray]) -> list[int]:
    """Return one row for each accelerator and software stack: the row whose error predicts the errors of the
    other rows there best.

    It is chosen from the covariance of the rows' settings, not from their errors: the row with the largest
    sum of squared correlations with the others, so that all of them count alike. The row is chosen from the
    first mask in ``preferred`` that has rows of that accelerator and stack.
    """
    texts = table.joined_keys(_CELL)
    chosen: list[int] = []
    for cell in dict.fromkeys(texts):
        members = np.array([text == cell for text in texts])
        choices = (np.flatnonzero(members & rows) for rows in preferred)
        candidates = next((rows for rows in choices if len(rows)), np.flatnonzero(members))
        variance = np.diag(covariance)
        others = np.flatnonzero(members & (variance > 0))  # a row without variance correlates with no other
        explained = covariance[np.ix_(candidates, others)] ** 2 / variance[others]
        worth = explained.sum(axis=1) / (variance[candidates] + _NOISE**2)
        chosen.append(int(candidates[int(np.argmax(worth))]))
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFactor:
    """Ratio of measured to predicted time of a component on an accelerator in a software stack.

    ``std_error`` is the standard error of its logarithm, ``prior_std`` the standard deviation before the fit.
    ``share`` is the mean share of the component in the steps, ``n`` the number of rows.
    """

    source: str
    accelerator: str
    component: str
    factor: Figure
    std_error: Figure
    prior_std: Figure
    share: Figure
    n: Count


def factors_of(table: FitRows) -> list[ComponentFactor]:
    """Return the factor of each component on each accelerator and software stack, fitted to all measured
    rows.
    """
    measured = np.flatnonzero(~np.isnan(table.log_error))
    cells = list(zip(table.keys["source"], table.keys["accelerator"], strict=True))
    members: dict[tuple[str, str], list[int]] = {}
    for row in measured.tolist():
        members.setdefault(cells[row], []).append(row)
    pairs: list[tuple[int, int]] = []
    for rows in members.values():
        share = table.shares[rows].mean(axis=0)
        pairs += [(rows[0], component) for component in np.flatnonzero(share >= _MIN_SHARE).tolist()]
    # Append an artificial row for each pair of a row and a component. It consists of the component only, has
    # the stack and accelerator of the row, and a model, release and number format that no other row has.
    units = np.zeros((len(pairs), len(COMPONENTS)))
    units[np.arange(len(pairs)), [component for _, component in pairs]] = 1.0
    recorded = table.select(measured)
    keys: dict[str, Sequence[str]] = {
        name: [
            *recorded.keys[name],
            *(texts[row] if name in _STACK else f"\0{index}" for index, (row, _) in enumerate(pairs)),
        ]
        for name, texts in table.keys.items()
    }
    extended = FitRows(
        shares=np.concatenate([recorded.shares, units]),
        log_error=np.concatenate([recorded.log_error, np.full(len(pairs), np.nan)]),
        weight=np.concatenate([recorded.weight, np.ones(len(pairs))]),
        rounding=np.concatenate([recorded.rounding, np.zeros(len(pairs))]),
        keys=keys,
    )
    is_unit = np.arange(len(extended)) >= len(measured)
    fit = fit_effects(extended.covariance(), extended, ~is_unit)
    posterior, prior = fit.posterior(is_unit), np.sqrt(np.diag(fit.covariance)[is_unit])
    shares = {cell: cell_correction(fit, extended, *cell).share for cell in members}
    if not np.isfinite(posterior.mean).all():
        raise InvariantError("a fit has factors that are not finite")
    factors: list[ComponentFactor] = []
    for index, (row, component) in enumerate(pairs):
        source, accelerator = cells[row]
        rows = members[source, accelerator]
        own = Posterior(posterior.mean[index : index + 1], posterior.deviation[index : index + 1])
        scaled = scale_posterior(own, prior[index : index + 1], shares[source, accelerator])
        factors.append(
            ComponentFactor(
                source=source,
                accelerator=accelerator,
                component=COMPONENTS[component],
                factor=float(np.exp(scaled.mean[0])),
                std_error=float(scaled.deviation[0]),
                prior_std=float(prior[index]),
                share=float(table.shares[rows, component].mean()),
                n=len(rows),
            )
        )
    return factors


class LevelEffect(NamedTuple):
    """Effect on all components of the rows with equal ``keys``, such as a release of a stack.

    ``factor`` is the ratio of measured to predicted time, ``std_error`` the standard error of its logarithm,
    ``n`` the number of rows.
    """

    keys: tuple[str, ...]
    factor: float
    std_error: float
    n: int


def level_effects(table: FitRows, name: str) -> list[LevelEffect]:
    """Return the effect ``name`` of :data:`EFFECTS` for each combination of its keys, fitted to all measured
    rows together with all other effects. An effect of few rows is near 1 (shrinkage). O(rows^3).
    """
    effect = next(effect for effect in EFFECTS if effect.name == name)
    fit = fit_effects(table.covariance(), table, ~np.isnan(table.log_error))
    rows: list[int] = fit.rows.tolist()
    keys_of_row = table.joined_keys(effect.columns)
    texts = [keys_of_row[row] for row in rows]
    effects: list[LevelEffect] = []
    for text in sorted(set(texts)):
        has_effect = np.array([other == text for other in texts], np.float64)
        weight = effect.whole**2 * (has_effect @ fit.inverse)
        variance = effect.whole**2 * (1.0 - float(weight @ has_effect))
        factor = float(np.exp(weight @ fit.target))
        keys = tuple(text.split("\0"))
        effects.append(LevelEffect(keys, factor, float(np.sqrt(max(variance, 0.0))), int(has_effect.sum())))
    return effects


def apply_factors(table: FitRows, factors: Sequence[ComponentFactor]) -> Posterior:
    """Return the corrections of rows by the component factors of an earlier fit.

    Rows of another accelerator or software stack are not corrected. Standard deviations include effects that
    factors do not cover: model, number format and release.
    """
    cells = list(zip(table.keys["source"], table.keys["accelerator"], strict=True))
    column = {name: number for number, name in enumerate(COMPONENTS)}
    mean, variance = np.zeros((2, len(table)))
    corrected = np.zeros(len(table), np.bool_)
    for factor in factors:
        rows = np.array([cell == (factor.source, factor.accelerator) for cell in cells], np.bool_)
        share = table.shares[:, column[factor.component]] * rows
        mean += share * np.log(factor.factor)
        variance += (share * factor.std_error) ** 2
        corrected |= rows
    prior = np.diag(table.covariance()) if len(table) else mean
    uncovered = sum(effect.whole**2 for effect in EFFECTS if not set(effect.columns) <= set(_STACK))
    uncovered += _NOISE**2
    return Posterior(mean, np.sqrt(np.where(corrected, variance + uncovered, prior + _NOISE**2)))


_STEP = Effect("step", ("cell",), 0.0, 0.10)
"""Effect of a device, framework and phase on the time of whole steps."""
_STEP_NOISE = 0.08
"""Standard deviation of the error that a workload does not share with the other workloads of its device,
framework and phase. A round figure, chosen with training steps in view.
"""
_LEAST_WORKLOADS = 3
"""Workloads without which no factor is applied: a factor from two cannot be tested on a third."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepFactorFit:
    """Factor on the time of whole steps of one device, framework and phase.

    ``mean`` is the logarithm of the factor (0: not applied), ``std_error`` its standard error, and ``share``
    the share of the fitted correction that is applied. ``log_ratio`` is the mean ln(measured / predicted)
    over ``workloads``. ``before`` and ``after`` are relative errors of the prediction of each workload, shape
    ``(workloads,)``: without a factor, and with the factor that the other workloads give.
    """

    mean: float
    std_error: float
    share: float
    log_ratio: float
    workloads: tuple[str, ...]
    before: FloatArray
    after: FloatArray


def fit_step_factor(workloads: Sequence[str], log_error: FloatArray) -> StepFactorFit:
    """Fit the factor of measured steps of one device, framework and phase.

    ``workloads`` names the workload of each row, ``log_error`` is ln(measured / predicted), both of shape
    ``(rows,)``. Rows of one workload count as their mean. The effect is normal around 0 (shrinkage), and
    :func:`hespas.fitting.held_out.best_share` decides on left-out workloads which share of it is applied.
    With fewer than three workloads it is 0. O(workloads^4).
    """
    names, number = np.unique(np.array(workloads, np.str_), return_inverse=True)
    error = np.bincount(number.reshape(-1), log_error) / np.bincount(number.reshape(-1))
    chosen, share = _step_posterior(error, names)
    left_out = np.zeros(len(names))
    for index in range(len(names)):
        others = np.arange(len(names)) != index
        if others.any():
            left_out[index] = _step_posterior(error[others], names[others])[0].mean[0]
    return StepFactorFit(
        mean=float(chosen.mean[0]),
        std_error=float(chosen.deviation[0]),
        share=share,
        log_ratio=float(error.mean()),
        workloads=tuple(names.tolist()),
        before=np.expm1(-error),
        after=np.expm1(left_out - error),
    )


def _step_posterior(error: FloatArray, names: TextColumn) -> tuple[Posterior, float]:
    """Return the applied correction of one device, framework and phase, of shape ``(1,)``, and its share.
    ``error`` is ln(measured / predicted) of each workload.
    """
    count = len(error)
    table = FitRows(
        shares=np.zeros((count, len(COMPONENTS))),
        log_error=error,
        weight=np.full(count, (_NOISE / _STEP_NOISE) ** 2),
        rounding=np.zeros(count),
        keys={"cell": [""] * count},
    )
    fit = fit_effects(table.covariance((_STEP,)), table, np.ones(count, np.bool_))
    share = 0.0
    if count >= _LEAST_WORKLOADS:
        residual, _ = fit.held_out(names)
        share = best_share(error, error - residual, np.full(count, 1.0 / count), names)
    first = np.arange(count) == 0  # all workloads have the same correction
    prior = np.sqrt(np.diag(fit.covariance)[first])
    return scale_posterior(fit.posterior(first), prior, share), share
