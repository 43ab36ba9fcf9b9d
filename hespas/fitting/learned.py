"""Fits of learned models: choice of hyperparameters, trees, intervals and errors.

Only rows of split ``calib`` are used to fit trees, to choose and to set intervals. ``devval`` only gives the
score. Shape groups are never split: a fifth of them is held out of the fits for the choice, and two fifths in
turn (every fifth if there are few rows) are held out of the fits for the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan

import numpy as np
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from hespas.estimators.interface import OperationModel
from hespas.estimators.learned.ensemble import FAMILIES, Forest
from hespas.estimators.learned.extrapolation import octaves_of
from hespas.estimators.learned.serialization import (
    SCHEMA,
    USUAL_INTERVAL,
    Candidate,
    Card,
    Cell,
    ErrorRow,
    FitSettings,
    Interval,
    LearnedModel,
)
from hespas.files.limits import limits
from hespas.fitting.held_out import first_of_best, folds_of
from hespas.fitting.learned_bases import with_bases
from hespas.fitting.learned_extrapolation import (
    TAIL,
    devices_of,
    left_out_devices,
    reach_of,
    region_of,
)
from hespas.fitting.learned_parts import (
    BoostingForm,
    LearnedPart,
    TrainingRows,
    grow,
    library_version,
    rising,
    rows_for,
    rows_of_part,
)
from hespas.fitting.rows import is_possible
from hespas.fitting.statistics import error_figures
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import device_names, named_device
from hespas.measurements import Measurements
from hespas.operations import Operations
from hespas.operations.model import numbered, rows_by_label

__all__ = [
    "FEWEST_MARGINS",
    "cells_of",
    "chosen_form",
    "errors_of_folds",
    "fit_learned",
    "fit_rows",
    "fit_settings",
    "layer_folds",
    "scored",
    "splits_of",
    "support_of",
    "wholly_widened",
    "with_errors",
    "with_new_devices",
]

_FOLDS = 5
_FEW_ROWS = 40_000
_FEWEST = 40
_FEWEST_GROUPS = 5
FEWEST_MARGINS = 19
"""Least rows of one side of an interval: with fewer, no order statistic is outside of 5 %."""
_QUANTILE_FORM = BoostingForm(trees=60, leaves=12, learning_rate=0.1, least_rows=40)


@dataclass(frozen=True, slots=True, eq=False)
class _ChosenForm:
    """Result of choosing hyperparameters. ``form`` are the chosen ones, ``candidates`` all tested ones with
    their errors. ``residual`` are the errors of the chosen ones on held-out rows (NaN: row not held out).
    """

    form: BoostingForm
    candidates: tuple[Candidate, ...]
    residual: FloatArray


def fit_learned(part: LearnedPart, table: Measurements, *, seed: int = 0) -> LearnedModel:
    """Fit the model of one part (some kinds and number formats, :class:`LearnedPart`) to the ``calib`` rows
    of its table. The errors on ``devval`` are not computed.

    Raises ``UsageError`` for a table without such rows. O(rows x trees); scikit-learn uses one thread.
    """
    measured = table.take(rows_of_part(part, table)).part("calib")
    if not len(measured):
        raise UsageError(f"{part.name}: the table has no rows of split calib", hint=f"give {part.table}")
    return fit_rows(part, rows_for(part, measured), seed=seed)


def fit_rows(part: LearnedPart, rows: TrainingRows, *, seed: int, own: bool = False) -> LearnedModel:
    """Fit a model to ``rows``, all of which are used.

    ``own`` is True for rows of a user, which may be few. All folds then have equal numbers of groups,
    intervals of single kinds or formats need at least :data:`FEWEST_MARGINS` rows, and the card has the
    errors of the folds.
    """
    plain = rows
    rows, bases = with_bases(part, plain, seed=seed)
    group, fold = layer_folds(part, rows, seed, even=own)
    half = fold // 2
    rising_columns = rising(part, rows.names)

    def held_out(form: BoostingForm, test: BoolArray) -> FloatArray:
        forest = grow(rows.table[~test], rows.ratio[~test], form, seed=seed, rising=rising_columns)
        return rows.ratio[test] - forest.predict(rows.table[test])

    residuals = [held_out(form, half == 0) for form in part.forms]
    best, candidates = chosen_form(part.forms, residuals)
    residual = np.full(len(half), np.nan)
    residual[half == 0] = residuals[best]
    for turn in range(1, _FOLDS if len(half) <= _FEW_ROWS else 2):
        if (half == turn).any():
            residual[half == turn] = held_out(part.forms[best], half == turn)
    chosen = _ChosenForm(part.forms[best], candidates, residual)
    low, high, intervals = _intervals(rows, group, fold % 2 == 0, chosen.residual, seed)
    if own:
        intervals = (
            intervals[0],
            *(interval for interval in intervals[1:] if interval.n >= FEWEST_MARGINS),
        )
    main = grow(rows.table, rows.ratio, chosen.form, seed=seed, rising=rising(part, rows.names))
    region = region_of(part, plain, chosen.form, chosen.residual, seed=seed)
    forests: dict[str, Forest] = {"main": main, "low": low, "high": high}
    card = _card(part, rows, chosen, intervals, groups=int(group.max()) + 1, seed=seed)
    card = with_fields(
        card, form_share=bases.share, forms=dict(bases.forms), bases=bases.bases, region=region
    )
    if own:
        training = with_fields(card.training, split=splits_of(rows.measured))
        card = with_fields(card, training=training, errors=errors_of_folds(rows.measured, chosen.residual))
    return with_new_devices(
        LearnedModel(card, forests, support_of(part.support, rows.measured.ops)), rows, seed=seed
    )


def with_new_devices(model: LearnedModel, rows: TrainingRows, *, seed: int) -> LearnedModel:
    """Return the model with its errors on left-out devices and with the interval that follows from them."""
    unseen, errors = left_out_devices(model, rows, seed=seed)
    return LearnedModel(with_fields(model.card, unseen=unseen, left_out=errors), model.forests, model.octaves)


def chosen_form(
    forms: Sequence[BoostingForm], residuals: Sequence[FloatArray], rows: float = inf
) -> tuple[int, tuple[Candidate, ...]]:
    """Return the index of the best set of hyperparameters, and all sets with their errors.

    ``residuals`` has the errors [log time] of each set on the same held-out rows. The first set is chosen
    whose error equals the smallest error within the uncertainty of ``rows`` rows.
    """
    errors = [np.abs(np.expm1(-residual)) for residual in residuals]
    best = first_of_best([float(error.mean()) for error in errors], rows)
    candidates = tuple(
        Candidate(
            form="trees",
            loss=form.loss,
            trees=form.trees,
            leaves=form.leaves,
            learning_rate=form.learning_rate,
            mape=round(float(error.mean()), 6),
            median_ape=round(float(np.median(error)), 6),
            chosen=number == best,
        )
        for number, (form, error) in enumerate(zip(forms, errors, strict=True))
    )
    return best, candidates


def fit_settings(
    measured: Measurements, form: BoostingForm, *, split: str, groups: int, seed: int
) -> FitSettings:
    """Return the settings of a fit, for its card: the data and the hyperparameters ``form``. ``groups`` is
    the number of groups (layers or sizes) into which the rows are divided.
    """
    return FitSettings(
        tables=(measured.name,),
        provenance=(measured.provenance,),
        split=split,
        rows=len(measured),
        shape_groups=groups,
        seed=seed,
        form="trees",
        trees=form.trees,
        leaves=form.leaves,
        learning_rate=form.learning_rate,
        loss=form.loss,
        share_of_columns=form.columns,
        least_rows_of_leaf=form.least_rows,
        rising_columns=(),
        library=library_version(),
    )


def splits_of(measured: Measurements) -> str:
    """Return the names of the splits that the rows belong to, separated by spaces."""
    return " ".join(name for name in measured.split.used() if name)


def layer_folds(part: LearnedPart, rows: TrainingRows, seed: int, *, even: bool) -> tuple[IntArray, IntArray]:
    """Return the group and the fold (of ten) of each row.

    A group is a layer. All its rows are in the same fold. If ``even`` is True, all folds have about as many
    groups; otherwise folds are random and, with few groups, some may be empty.
    """
    names = part.layer or part.support
    group = numbered(np.nan_to_num(rows.measured.ops.dim(name), nan=-1.0) for name in names)
    generator = np.random.default_rng(seed)
    if even:
        return group, folds_of(group, 2 * _FOLDS, generator)
    return group, generator.integers(0, 2 * _FOLDS, int(group.max()) + 1)[group]


def _intervals(
    rows: TrainingRows, group: IntArray, is_first: BoolArray, residual: FloatArray, seed: int
) -> tuple[Forest, Forest, tuple[Interval, ...]]:
    """Fit quantiles of the errors to one half of the held-out rows (``is_first``). Widen them until they hold
    90 % of the other half. Return the trees of both quantiles, and the widenings.

    This is conformalised quantile regression (Romano, Patterson, Candes, NeurIPS 2019), for each side
    separately. Rows of one group have similar errors. If there are few groups, the number of groups is used
    instead of the number of rows.
    """
    grown = np.flatnonzero(is_first & ~np.isnan(residual))
    widened = np.flatnonzero(~is_first & ~np.isnan(residual))
    low = grow(rows.table[grown], residual[grown], _QUANTILE_FORM, seed=seed, quantile=TAIL)
    high = grow(rows.table[grown], residual[grown], _QUANTILE_FORM, seed=seed, quantile=1 - TAIL)
    excess = _QuantileExcess(
        below=low.predict(rows.table[widened]) - residual[widened],
        above=residual[widened] - high.predict(rows.table[widened]),
        group=group[widened],
    )
    measured = rows.measured.take(widened)
    intervals = [excess.interval(("*", "*", "*"), np.arange(len(widened)))]
    for kind in measured.ops.kind.used():
        rows_of_kind = measured.ops.kind.where(kind)
        of_kind = excess.interval(("*", kind, "*"), rows_of_kind)
        intervals.append(of_kind)
        for device in measured.hardware.used():
            for scheme in measured.ops.scheme.used():
                of_part = np.intersect1d(measured.hardware.where(device), measured.ops.scheme.where(scheme))
                of_part = np.intersect1d(rows_of_kind, of_part)
                if len(of_part) >= _FEWEST:
                    intervals.append(excess.interval((device, kind, scheme), of_part, least=of_kind))
    return low, high, tuple(intervals)


@dataclass(frozen=True, slots=True, eq=False)
class _QuantileExcess:
    """Distances of held-out rows to the fitted quantiles [log time]: positive if a row is outside (``below``
    the lower or ``above`` the upper quantile), negative if it is inside. ``group`` is the group of each row.
    """

    below: FloatArray
    above: FloatArray
    group: IntArray

    def interval(
        self, key: tuple[str, str, str], rows: IntArray, *, least: Interval | None = None
    ) -> Interval:
        """Return the widening of the quantiles with which they hold 90 % of the given rows.

        If the rows have few groups, the row with the largest excess determines the interval, and the interval
        is at least as wide as ``least``.
        """
        groups = len(np.unique(self.group[rows]))
        is_few = groups < _FEWEST_GROUPS
        count = groups if is_few else len(rows)
        level = min(1.0, (1 - TAIL) * (count + 1) / max(count, 1))
        low, high = (float(np.quantile(side[rows], level)) for side in (self.below, self.above))
        if is_few and least is not None:
            low, high = max(low, least.low), max(high, least.high)
        return Interval(
            hardware=key[0],
            kind=key[1],
            scheme=key[2],
            low=round(low, 6),
            high=round(high, 6),
            n=len(rows),
        )


def wholly_widened(residual: FloatArray, group: IntArray) -> Interval:
    """Return an interval of constant width for all operations, without fitted quantiles.

    ``residual`` holds the errors of held-out rows [log time]; rows of one ``group`` have similar errors.
    """
    excess = _QuantileExcess(below=-residual, above=residual, group=group)
    return excess.interval(("*", "*", "*"), np.arange(len(residual)))


def cells_of(measured: Measurements) -> tuple[Cell, ...]:
    """Return the cells of a fit: each combination of labels among the fitted rows, with the number of rows of
    each device.
    """
    ops = measured.ops
    by_labels: dict[tuple[str, ...], dict[str, int]] = {}
    for labels, rows in rows_by_label(ops.kind, ops.op, ops.scheme, ops.variant, measured.hardware):
        by_labels.setdefault(labels[:-1], {})[labels[-1]] = len(rows)
    return tuple(
        Cell(kind=kind, op=op, scheme=scheme, variant=variant, rows=dict(sorted(rows.items())))
        for (kind, op, scheme, variant), rows in sorted(by_labels.items())
    )


def _card(
    part: LearnedPart,
    rows: TrainingRows,
    chosen: _ChosenForm,
    intervals: Sequence[Interval],
    *,
    groups: int,
    seed: int,
) -> Card:
    """Return the card of a model, without its bases, its region beyond the fitted sizes, and its errors on
    other rows and devices.
    """
    training = with_fields(
        fit_settings(rows.measured, chosen.form, split="calib", groups=groups, seed=seed),
        rising_columns=tuple(rows.names[column] for column in rising(part, rows.names)),
    )
    return Card(
        schema=SCHEMA,
        name=part.name,
        family=FAMILIES[part.kinds[0]],
        overhead_ns=part.overhead_ns,
        form_share=np.nan,
        forms={},
        bases=(),
        columns=rows.names,
        transfer_columns=(),
        codes={name: dict(numbers) for name, numbers in rows.codes.items()},
        support=part.support,
        reach=reach_of(part.support, rows.measured.ops),
        cells=cells_of(rows.measured),
        devices=devices_of(rows),
        intervals=tuple(intervals),
        unseen=USUAL_INTERVAL,
        region=None,
        training=training,
        selection=chosen.candidates,
    )


def with_errors(
    part: LearnedPart, model: LearnedModel, estimator: OperationModel, table: Measurements
) -> LearnedModel:
    """Return the model with its errors on the ``devval`` rows of the table, as ``estimator`` predicts
    them.
    """
    rows = scored(estimator, table.take(rows_of_part(part, table)).part("devval"))
    return LearnedModel(with_fields(model.card, errors=rows), model.forests, model.octaves)


def scored(estimator: OperationModel, measured: Measurements) -> tuple[ErrorRow, ...]:
    """Return the errors of ``estimator`` on the rows, per device, kind, operation, number format and
    variant. As in fits, rows that are faster than the roofline of their device are left out.
    """
    errors: list[ErrorRow] = []
    for name in sorted(set(measured.hardware.used()) & set(device_names())):
        device, on_device = named_device(name), measured.on(name)
        on_device = on_device.take(np.flatnonzero(is_possible(on_device, device)))
        prediction = estimator.predict(on_device.ops, device)
        for labels, rows in on_device.ops.classes():
            covered = rows[~np.isnan(prediction.duration_ns[rows])]
            actual = on_device.duration_ns[covered]
            inside = (prediction.low_ns[covered] <= actual) & (actual <= prediction.high_ns[covered])
            row = _error_row(name, labels, prediction.duration_ns[covered] / actual - 1, len(rows))
            coverage = _rounded(float(inside.mean())) if len(inside) else None
            errors.append(with_fields(row, interval_coverage=coverage))
    return tuple(errors)


def errors_of_folds(measured: Measurements, residual: FloatArray) -> tuple[ErrorRow, ...]:
    """Return the errors on held-out rows, per device, kind and number format.

    ``residual`` holds the errors [log time]; NaN for rows that were not held out.
    """
    errors: list[ErrorRow] = []
    ops = measured.ops
    for (name, kind, scheme), rows in sorted(rows_by_label(measured.hardware, ops.kind, ops.scheme)):
        held_out = residual[rows][~np.isnan(residual[rows])]
        if len(held_out):
            errors.append(_error_row(name, (kind, "*", scheme, "*"), np.expm1(-held_out), len(held_out)))
    return tuple(errors)


def _error_row(hardware: str, labels: tuple[str, str, str, str], error: FloatArray, of: int) -> ErrorRow:
    """Return the entry of a card for the errors of one class of operations, without interval coverage. ``of``
    is the number of all rows; rows that are missing in ``error`` were refused by the model.
    """
    kind, op, scheme, variant = labels
    return ErrorRow(
        hardware=hardware,
        kind=kind,
        op=op,
        scheme=scheme,
        variant=variant,
        n=len(error),
        refused=of - len(error),
        interval_coverage=None,
        **{name: _rounded(value) for name, value in error_figures(error).items()},
    )


def _rounded(value: float) -> float | None:
    return None if isnan(value) else round(value, 6)


def support_of(dims: Sequence[str], ops: Operations) -> NDArray[np.int8]:
    """Return the distinct rounded log2 sizes of operations, shape (distinct sizes, dims).

    Raises ``UnsupportedError`` if they are more than a stored model may have.
    """
    octaves = np.unique(octaves_of(dims, ops), axis=0).astype(np.int8)
    if len(octaves) > limits().model_sizes:
        raise UnsupportedError(
            f"the learned model has {len(octaves):,} octaves of sizes, at most {limits().model_sizes:,} are "
            "supported",
            hint="fit it on fewer shapes",
        )
    return octaves
