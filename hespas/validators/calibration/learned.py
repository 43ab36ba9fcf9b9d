"""Fitting the learned models: choice of form, trees, honest intervals, devices left out.

Only rows of split ``calib`` enter a fit, a choice or an interval; ``devval`` is for the score alone. Shape
groups are never torn apart: a fifth of them is kept from the fits that the choice rests on, and two fifths in
turn (every fifth where rows are few) from those that the intervals rest on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan

import numpy as np
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from hespas.estimators.learned.ensemble import FAMILIES, Forest
from hespas.estimators.learned.inference import octaves_of
from hespas.estimators.learned.serialization import (
    SCHEMA,
    Candidate,
    Card,
    Cell,
    ErrorRow,
    Interval,
    LearnedModel,
    LeftOutError,
    SeenDevice,
    Training,
)
from hespas.estimators.registry import OperationModel
from hespas.files.streams import limits
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import device_names, named_device
from hespas.measurements import Measurements
from hespas.operations import Operations
from hespas.operations.model import numbered, rows_by_label
from hespas.validators.accuracy.statistics import error_figures
from hespas.validators.calibration.learned_parts import (
    Form,
    Part,
    Rows,
    family_name,
    grow,
    library_version,
    rising,
    rows_for,
    rows_of_part,
    transferable,
)

__all__ = ["FEWEST_MARGINS", "fit_learned", "fit_rows", "folds_of", "scored", "with_errors"]

_FOLDS = 5
_FEW_ROWS = 40_000
_TAIL = 0.05
_FEWEST = 40
_FEWEST_GROUPS = 5
FEWEST_MARGINS = 19
"""Rows that an interval's side is widened on, or no rank of them is outside 5 %."""
_SPREAD = Form(trees=60, leaves=12, learning_rate=0.1, least_rows=40)


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """The chosen form, every form's error, and what it leaves on rows kept from its fit (NaN on others)."""

    form: Form
    candidates: tuple[Candidate, ...]
    rest: FloatArray


def fit_learned(part: Part, table: Measurements, *, seed: int = 0) -> LearnedModel:
    """The model of one part from the ``calib`` rows of its table, without errors on ``devval``.

    Raises ``UsageError`` where the table has no such rows. O(rows x trees); one thread of scikit-learn's own.
    """
    measured = table.take(rows_of_part(part, table)).part("calib")
    if not len(measured):
        raise UsageError(f"{part.name}: the table has no rows of split calib", hint=f"give {part.table}")
    return fit_rows(part, rows_for(part, measured), seed=seed)


def fit_rows(part: Part, rows: Rows, *, seed: int, own: bool = False) -> LearnedModel:
    """The model of some rows, all of which may be fitted on.

    ``own``: they are a user's, and few perhaps: every fold has as many groups, no interval of a part rests on
    fewer than :data:`FEWEST_MARGINS` of them, and the card's errors are those of the folds.
    """
    group, fold = folds_of(part, rows, seed, even=own)
    chosen = _choose(part, rows, fold // 2, seed)
    low, high, intervals = _intervals(rows, group, fold % 2 == 0, chosen.rest, seed)
    if own:
        intervals = (intervals[0], *(each for each in intervals[1:] if each.n >= FEWEST_MARGINS))
    main = grow(rows.table, rows.ratio, chosen.form, seed=seed, rising=rising(part, rows.names))
    transfer = _fit_transfer(part, rows, seed=seed)
    forests: dict[str, Forest] = {"main": main, "low": low, "high": high}
    if transfer.forest is not None:
        forests["transfer"] = transfer.forest
    card = _card(part, rows, chosen, intervals, transfer, groups=int(group.max()) + 1, seed=seed)
    if own:
        split = " ".join(name for name in rows.measured.split.used() if name)
        training = with_fields(card.training, split=split)
        card = with_fields(card, training=training, errors=_errors_of_folds(rows.measured, chosen.rest))
    return LearnedModel(card, forests, _support_of(part.support, rows.measured.ops))


def folds_of(part: Part, rows: Rows, seed: int, *, even: bool) -> tuple[IntArray, IntArray]:
    """The group of each row and the half fold (of twice five) it is in; ``even``: drawn so that each has as
    many groups, where few could leave one with none.
    """
    group = _groups(part, rows.measured)
    count = int(group.max()) + 1
    draw = np.random.default_rng(seed)
    drawn = draw.permutation(count) % (2 * _FOLDS) if even else draw.integers(0, 2 * _FOLDS, count)
    return group, drawn[group]


def _groups(part: Part, measured: Measurements) -> IntArray:
    """A number per layer: what is wholly in a fit or wholly out of it."""
    return numbered(np.nan_to_num(measured.ops.dim(name), nan=-1.0) for name in part.layer or part.support)


def _rest(rows: Rows, form: Form, kept: BoolArray, up: tuple[int, ...], seed: int) -> FloatArray:
    """What a form leaves on rows kept from its fit."""
    forest = grow(rows.table[~kept], rows.ratio[~kept], form, seed=seed, rising=up)
    return rows.ratio[kept] - forest.predict(rows.table[kept])


def _choose(part: Part, rows: Rows, fold: IntArray, seed: int) -> _Held:
    """The form with the least error on the first fifth; what it leaves on that and some more."""
    up = rising(part, rows.names)
    tried: list[tuple[float, float, FloatArray]] = []
    for form in part.forms:
        rest = _rest(rows, form, fold == 0, up, seed)
        error = np.abs(np.expm1(-rest))
        tried.append((float(error.mean()), float(np.median(error)), rest))
    best = min(range(len(tried)), key=lambda each: tried[each][0])
    candidates = tuple(
        Candidate(
            form="trees",
            loss=form.loss,
            trees=form.trees,
            leaves=form.leaves,
            learning_rate=form.learning_rate,
            mape=round(mape, 6),
            median_ape=round(median, 6),
            chosen=number == best,
        )
        for number, (form, (mape, median, _)) in enumerate(zip(part.forms, tried, strict=True))
    )
    rest = np.full(len(fold), np.nan)
    rest[fold == 0] = tried[best][2]
    for turn in range(1, _FOLDS if len(fold) <= _FEW_ROWS else 2):
        if (fold == turn).any():
            rest[fold == turn] = _rest(rows, part.forms[best], fold == turn, up, seed)
    return _Held(part.forms[best], candidates, rest)


def _intervals(
    rows: Rows, group: IntArray, is_first: BoolArray, rest: FloatArray, seed: int
) -> tuple[Forest, Forest, tuple[Interval, ...]]:
    """Quantiles grown on one half of the rows kept, widened on the other until 90 % lie between.

    Conformalised quantile regression (Romano, Patterson, Candes, NeurIPS 2019), each side by itself. Rows of
    one group err alike: where there are few groups, those count and not their rows.
    """
    grown = np.flatnonzero(is_first & ~np.isnan(rest))
    place = np.flatnonzero(~is_first & ~np.isnan(rest))
    low = grow(rows.table[grown], rest[grown], _SPREAD, seed=seed, quantile=_TAIL)
    high = grow(rows.table[grown], rest[grown], _SPREAD, seed=seed, quantile=1 - _TAIL)
    left = _Left(
        below=low.predict(rows.table[place]) - rest[place],
        above=rest[place] - high.predict(rows.table[place]),
        group=group[place],
    )
    some = rows.measured.take(place)
    found = [left.widened(("*", "*", "*"), np.arange(len(place)))]
    for kind in some.ops.kind.used():
        rows_of_kind = some.ops.kind.where(kind)
        of_kind = left.widened(("*", kind, "*"), rows_of_kind)
        found.append(of_kind)
        for device in some.hardware.used():
            for scheme in some.ops.scheme.used():
                mine = np.intersect1d(some.hardware.where(device), some.ops.scheme.where(scheme))
                mine = np.intersect1d(rows_of_kind, mine)
                if len(mine) >= _FEWEST:
                    found.append(left.widened((device, kind, scheme), mine, least=of_kind))
    return low, high, tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Left:
    """By how much rows lie beyond the fitted quantiles (negative: within), in log time, and their groups."""

    below: FloatArray
    above: FloatArray
    group: IntArray

    def widened(
        self, key: tuple[str, str, str], rows: IntArray, *, least: Interval | None = None
    ) -> Interval:
        """What holds 90 % of some rows. Few groups say little: the widest row then counts, and ``least`` is
        kept.
        """
        groups = len(np.unique(self.group[rows]))
        is_few = groups < _FEWEST_GROUPS
        count = groups if is_few else len(rows)
        level = min(1.0, (1 - _TAIL) * (count + 1) / max(count, 1))
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


def _cells(measured: Measurements) -> tuple[Cell, ...]:
    """The labels that the fit has seen, with the rows of each device."""
    ops = measured.ops
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for labels, rows in rows_by_label(ops.kind, ops.op, ops.scheme, ops.variant, measured.hardware):
        found.setdefault(labels[:-1], {})[labels[-1]] = len(rows)
    return tuple(
        Cell(kind=kind, op=op, scheme=scheme, variant=variant, rows=dict(sorted(rows.items())))
        for (kind, op, scheme, variant), rows in sorted(found.items())
    )


def _devices(rows: Rows) -> tuple[SeenDevice, ...]:
    return tuple(
        SeenDevice(
            name=name,
            vendor=device.vendor,
            family=device.family,
            kind=device.kind,
            rows=len(rows.measured.hardware.where(name)),
        )
        for name, device in sorted(rows.devices.items())
    )


def _card(
    part: Part,
    rows: Rows,
    chosen: _Held,
    intervals: Sequence[Interval],
    transfer: _Transfer,
    *,
    groups: int,
    seed: int,
) -> Card:
    form = chosen.form
    training = Training(
        tables=(rows.measured.name,),
        provenance=(rows.measured.provenance,),
        split="calib",
        rows=len(rows.ratio),
        shape_groups=groups,
        seed=seed,
        form="trees",
        trees=form.trees,
        leaves=form.leaves,
        learning_rate=form.learning_rate,
        loss=form.loss,
        share_of_columns=form.columns,
        least_rows_of_leaf=form.least_rows,
        rising_columns=tuple(rows.names[each] for each in rising(part, rows.names)),
        transfer_trees=_TRANSFER.trees if transfer.forest is not None else 0,
        library=library_version(),
    )
    return Card(
        schema=SCHEMA,
        name=part.name,
        family=FAMILIES[part.kinds[0]],
        overhead_ns=part.overhead_ns,
        columns=rows.names,
        transfer_columns=transferable(part, rows.names),
        codes={name: dict(numbers) for name, numbers in rows.codes.items()},
        support=part.support,
        cells=_cells(rows.measured),
        devices=_devices(rows),
        intervals=tuple(intervals),
        unseen=transfer.interval,
        training=training,
        selection=chosen.candidates,
        left_out=transfer.errors,
    )


# Errors of learned models on rows that no fit has seen, written into their cards.


def with_errors(
    part: Part, model: LearnedModel, estimator: OperationModel, table: Measurements
) -> LearnedModel:
    """The model with its errors on ``devval`` rows of the table; ``estimator`` is what serves it."""
    rows = scored(estimator, table.take(rows_of_part(part, table)).part("devval"))
    return LearnedModel(with_fields(model.card, errors=rows), model.forests, model.octaves)


def scored(estimator: OperationModel, measured: Measurements) -> tuple[ErrorRow, ...]:
    """One row per device, kind, operation, scheme and variant that occurs."""
    found: list[ErrorRow] = []
    for name in sorted(set(measured.hardware.used()) & set(device_names())):
        mine = measured.on(name)
        said = estimator.predict(mine.ops, named_device(name))
        for labels, rows in mine.ops.classes():
            answered = rows[~np.isnan(said.duration_ns[rows])]
            actual = mine.duration_ns[answered]
            inside = (said.low_ns[answered] <= actual) & (actual <= said.high_ns[answered])
            row = _error_row(name, labels, said.duration_ns[answered] / actual - 1, len(rows))
            coverage = _rounded(float(inside.mean())) if len(inside) else None
            found.append(with_fields(row, interval_coverage=coverage))
    return tuple(found)


def _errors_of_folds(measured: Measurements, rest: FloatArray) -> tuple[ErrorRow, ...]:
    """One row per kind and device: errors on rows kept from a fit, which left ``rest`` of log time (NaN: kept
    from none).
    """
    found: list[ErrorRow] = []
    for (name, kind), rows in sorted(rows_by_label(measured.hardware, measured.ops.kind)):
        kept = rest[rows][~np.isnan(rest[rows])]
        if len(kept):
            found.append(_error_row(name, (kind, "*", "*", "*"), np.expm1(-kept), len(kept)))
    return tuple(found)


def _error_row(hardware: str, labels: tuple[str, str, str, str], error: FloatArray, of: int) -> ErrorRow:
    """A row without intervals; the model refused the others ``of`` so many."""
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


# Trees for devices that were not measured, and what leaving measured ones out says of them.

_TRANSFER = Form(trees=300, leaves=31, learning_rate=0.1)
_MOST_ROWS = 40_000
_MOST_ROWS_OF_DEVICE = 5000


@dataclass(frozen=True, slots=True, eq=False)
class _Transfer:
    """``forest`` and ``interval`` are None where all rows are of one family, so that
    nothing says how far such a model would carry.
    """

    forest: Forest | None
    interval: Interval | None
    errors: tuple[LeftOutError, ...]


def _fit_transfer(part: Part, rows: Rows, *, seed: int) -> _Transfer:
    """Trees on columns that do not tell devices apart; the interval is of whole families left out."""
    names = transferable(part, rows.names)
    table, up = rows.columns(names), rising(part, names)
    everything = np.ones(len(rows.ratio), np.bool_)
    families = sorted({family_name(device) for device in rows.devices.values()})
    if len(families) < 2 or not table.shape[1]:
        return _Transfer(None, None, ())
    errors: list[LeftOutError] = []
    rests: list[FloatArray] = []
    for out, siblings in _left_out(rows):
        test = rows.of_devices(out)
        fitted = _some(~test, _MOST_ROWS, seed)
        forest = grow(table[fitted], rows.ratio[fitted], _TRANSFER, seed=seed, rising=up)
        tested = _some(test, _MOST_ROWS_OF_DEVICE * len(out), seed)
        rest = rows.ratio[tested] - forest.predict(table[tested])
        errors.append(_error(out, siblings, rest))
        if not siblings:
            rests.append(rest)
    # Each family counts the same, however many rows it has.
    low = float(np.mean([np.quantile(rest, _TAIL) for rest in rests]))
    high = float(np.mean([np.quantile(rest, 1 - _TAIL) for rest in rests]))
    interval = Interval(
        hardware="*",
        kind="*",
        scheme="*",
        low=round(min(low, 0.0), 6),
        high=round(max(high, 0.0), 6),
        n=len(families),
    )
    fitted = _some(everything, 2 * _MOST_ROWS, seed)
    return _Transfer(
        grow(table[fitted], rows.ratio[fitted], _TRANSFER, seed=seed, rising=up), interval, tuple(errors)
    )


def _left_out(rows: Rows) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Single devices whose siblings stay, then whole families."""
    families: dict[str, list[str]] = {}
    for name, device in sorted(rows.devices.items()):
        families.setdefault(family_name(device), []).append(name)
    for members in families.values():
        if len(members) > 1:
            yield from (((name,), True) for name in members)
    for members in families.values():
        yield tuple(members), False


def _some(mask: BoolArray, most: int, seed: int) -> IntArray:
    """At most so many of the rows, at random, in order."""
    rows = np.flatnonzero(mask)
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))


def _error(out: tuple[str, ...], siblings: bool, rest: FloatArray) -> LeftOutError:
    figures = error_figures(np.expm1(-rest))
    return LeftOutError(
        hardware=out,
        siblings=siblings,
        mape=round(figures["mape"], 6),
        median_ape=round(figures["median_ape"], 6),
        bias=round(figures["bias"], 6),
        n=len(rest),
    )


def _support_of(dims: Sequence[str], ops: Operations) -> NDArray[np.int8]:
    """The distinct octaves that operations lie in; shape (cells, dims).

    Raises ``UnsupportedError`` where they are more than a stored model may have.
    """
    found = np.unique(octaves_of(dims, ops), axis=0).astype(np.int8)
    if len(found) > limits().model_sizes:
        raise UnsupportedError(
            f"a learned model of {len(found):,} octaves of sizes, at most {limits().model_sizes:,}",
            hint="fit it on fewer shapes",
        )
    return found
