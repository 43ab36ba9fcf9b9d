"""Fitting the learned models: choice of form, trees, honest intervals, devices left out.

Only rows of split ``calib`` enter a fit, a choice or an interval; ``devval`` is for the score alone. Shape
groups are never torn apart: a fifth of them is kept from the fits that the choice rests on, and two fifths in
turn (every fifth where rows are few) from those that the intervals rest on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isnan

import numpy as np
from msgspec.structs import replace as with_fields
from numpy.typing import NDArray

from hespas.estimators.learned.bases import TIERS, SeenDevice, combined_ns, relatives
from hespas.estimators.learned.ensemble import FAMILIES, Forest
from hespas.estimators.learned.inference import octaves_beyond, octaves_of
from hespas.estimators.learned.serialization import (
    SCHEMA,
    Candidate,
    Card,
    Cell,
    ErrorRow,
    Interval,
    LearnedModel,
    LeftOutError,
    Region,
    Training,
    Unseen,
)
from hespas.estimators.registry import OperationModel
from hespas.files.limits import limits
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import device_names, named_device
from hespas.measurements import Measurements
from hespas.operations import Operations
from hespas.operations.model import numbered, rows_by_label
from hespas.validators.accuracy.statistics import error_figures
from hespas.validators.calibration.learned_bases import Bases, beyond_region, form_share, with_bases
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

__all__ = [
    "FEWEST_MARGINS",
    "cells_of",
    "devices_of",
    "errors_of_folds",
    "fit_learned",
    "fit_rows",
    "folds_of",
    "reach_of",
    "scored",
    "support_of",
    "wholly_widened",
    "with_errors",
]

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
    plain = rows
    rows, bases = with_bases(part, plain, seed=seed)
    group, fold = folds_of(part, rows, seed, even=own)
    chosen = _choose(part, rows, fold // 2, seed)
    low, high, intervals = _intervals(rows, group, fold % 2 == 0, chosen.rest, seed)
    if own:
        intervals = (intervals[0], *(each for each in intervals[1:] if each.n >= FEWEST_MARGINS))
    main = grow(rows.table, rows.ratio, chosen.form, seed=seed, rising=rising(part, rows.names))
    transfer = _fit_transfer(part, rows, bases, seed=seed)
    region = _region(part, plain, chosen, seed=seed)
    forests: dict[str, Forest] = {"main": main, "low": low, "high": high}
    if transfer.forest is not None:
        forests["transfer"] = transfer.forest
    card = _card(part, rows, chosen, intervals, transfer, groups=int(group.max()) + 1, seed=seed)
    share = form_share(part, bases.forms)
    card = with_fields(card, form_share=share, forms=dict(bases.forms), bases=bases.bases, region=region)
    if own:
        split = " ".join(name for name in rows.measured.split.used() if name)
        training = with_fields(card.training, split=split)
        card = with_fields(card, training=training, errors=errors_of_folds(rows.measured, chosen.rest))
    return LearnedModel(card, forests, support_of(part.support, rows.measured.ops))


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


def wholly_widened(rest: FloatArray, group: IntArray) -> Interval:
    """The interval of all operations where no quantile is grown: ``rest`` is what rows kept from a fit leave
    [log time], ``group`` what of them errs alike.
    """
    return _Left(below=-rest, above=rest, group=group).widened(("*", "*", "*"), np.arange(len(rest)))


def cells_of(measured: Measurements) -> tuple[Cell, ...]:
    """The labels that the fit has seen, with the rows of each device."""
    ops = measured.ops
    found: dict[tuple[str, ...], dict[str, int]] = {}
    for labels, rows in rows_by_label(ops.kind, ops.op, ops.scheme, ops.variant, measured.hardware):
        found.setdefault(labels[:-1], {})[labels[-1]] = len(rows)
    return tuple(
        Cell(kind=kind, op=op, scheme=scheme, variant=variant, rows=dict(sorted(rows.items())))
        for (kind, op, scheme, variant), rows in sorted(found.items())
    )


def devices_of(rows: Rows) -> tuple[SeenDevice, ...]:
    """The devices of some rows, by name."""
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
        form_share=np.nan,
        forms={},
        bases=(),
        columns=rows.names,
        transfer_columns=() if transfer.forest is None else transferable(part, rows.names),
        codes={name: dict(numbers) for name, numbers in rows.codes.items()},
        support=part.support,
        reach=reach_of(part.support, rows.measured.ops),
        cells=cells_of(rows.measured),
        devices=devices_of(rows),
        intervals=tuple(intervals),
        unseen=transfer.unseen,
        region=None,
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


def errors_of_folds(measured: Measurements, rest: FloatArray) -> tuple[ErrorRow, ...]:
    """One row per device, kind and number format: errors on rows kept from a fit, which left ``rest`` of log
    time (NaN: kept from none).
    """
    found: list[ErrorRow] = []
    ops = measured.ops
    for (name, kind, scheme), rows in sorted(rows_by_label(measured.hardware, ops.kind, ops.scheme)):
        kept = rest[rows][~np.isnan(rest[rows])]
        if len(kept):
            found.append(_error_row(name, (kind, "*", scheme, "*"), np.expm1(-kept), len(kept)))
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
    """``forest`` is None where there is one device, so that nothing says how far such a model would carry."""

    forest: Forest | None
    unseen: tuple[Unseen, ...]
    errors: tuple[LeftOutError, ...]


def _fit_transfer(part: Part, rows: Rows, bases: Bases, *, seed: int) -> _Transfer:
    """Trees on columns that do not tell devices apart; the intervals are of devices and families left out,
    whose bases are then those of their nearest relatives.
    """
    names = transferable(part, rows.names)
    table, up = rows.columns(names), rising(part, names)
    if len(rows.devices) < 2 or not table.shape[1]:
        return _Transfer(None, (), ())
    errors: list[LeftOutError] = []
    rests: dict[str, list[FloatArray]] = {}
    for out, siblings in _left_out(rows):
        test = rows.of_devices(out)
        fitted = _some(~test, _MOST_ROWS, seed)
        if not len(fitted):
            continue
        forest = grow(table[fitted], rows.ratio[fitted], _TRANSFER, seed=seed, rising=up)
        tested = _some(test, _MOST_ROWS_OF_DEVICE * len(out), seed)
        tier, unseen = _unseen_ratio(
            rows.take(tested), bases, out, seen=devices_of(rows), share=form_share(part, bases.forms)
        )
        rest = unseen - forest.predict(table[tested])
        errors.append(_error(out, siblings, rest))
        rests.setdefault(tier, []).append(rest)
    fitted = _some(np.ones(len(rows.ratio), np.bool_), 2 * _MOST_ROWS, seed)
    forest = grow(table[fitted], rows.ratio[fitted], _TRANSFER, seed=seed, rising=up)
    return _Transfer(forest, tuple(_widest(rests)), tuple(errors))


def _unseen_ratio(
    rows: Rows, bases: Bases, out: tuple[str, ...], *, seen: Sequence[SeenDevice], share: float
) -> tuple[str, FloatArray]:
    """How near the nearest relatives of devices are where ``out`` is left out, and the log of measured times
    over the bases that these give, of which ``share`` is their form.
    """
    others = [each.name for each in seen if each.name not in out]
    ratio, tier = np.full(len(rows.ratio), np.nan), ""
    for name in out:
        mine = rows.measured.hardware.where(name)
        device = rows.devices[name]
        kin = relatives(device, seen, others)
        tier = TIERS[-1] if kin is None else kin.tier
        names = others if kin is None else kin.names
        logs, _ = bases.index.log_times(rows.measured.ops.take(mine), device, names)
        base = combined_ns(logs, rows.sheet_ns[mine], share)
        ratio[mine] = np.log(rows.measured.duration_ns[mine] / base)
    return tier, ratio


def _widest(rests: Mapping[str, Sequence[FloatArray]]) -> Iterator[Unseen]:
    """What holds 90 % of what is left on devices left out, by how near the nearest is; each counts the same,
    however many rows it has, and a nearer relative never has the wider interval.
    """
    low = high = 0.0
    for tier in TIERS:
        some = rests.get(tier, ())
        if some:
            low = min(low, float(np.mean([np.quantile(rest, _TAIL) for rest in some])))
            high = max(high, float(np.mean([np.quantile(rest, 1 - _TAIL) for rest in some])))
            yield Unseen(tier=tier, low=round(low, 6), high=round(high, 6), n=len(some))


# Sizes beyond those of a fit.

_MOST_ROWS_INSIDE = 4000
_MOST_ROWS_BEYOND = 1500
_FEWEST_INSIDE = 200
_FEWEST_BEYOND = 60
_STEPS = (0.5, 1.0, 2.0)
"""Octaves beyond the fit up to which rows are looked at together."""


def _region(part: Part, plain: Rows, chosen: _Held, *, seed: int) -> Region | None:
    """Errors where the two largest octaves of every dimension are kept from the fit, forms included, and by
    how much intervals must grow there; None where too few rows are inside or beyond.
    """
    beyond = np.zeros(len(plain.ratio), np.bool_)
    for name in plain.devices:
        mine = plain.measured.hardware.where(name)
        beyond[mine] = beyond_region(part, plain.measured.ops.take(mine))
    count = len(plain.devices)
    seen, unseen = (
        _some(~beyond, count * _MOST_ROWS_INSIDE, seed),
        _some(beyond, count * _MOST_ROWS_BEYOND, seed),
    )
    if len(seen) < _FEWEST_INSIDE or len(unseen) < _FEWEST_BEYOND:
        return None
    inside, bases = with_bases(part, plain.take(seen), seed=seed)
    share = form_share(part, bases.forms)
    forest = grow(inside.table, inside.ratio, chosen.form, seed=seed, rising=rising(part, inside.names))
    outside = plain.take(unseen)
    rest, octaves = np.full(len(unseen), np.nan), np.zeros(len(unseen))
    for name, device in plain.devices.items():
        mine, near = outside.measured.hardware.where(name), inside.measured.hardware.where(name)
        if not len(near):
            continue
        ops = outside.measured.ops.take(mine)
        logs, _ = bases.index.log_times(ops, device, [name])
        base = combined_ns(logs, outside.sheet_ns[mine], share)
        rest[mine] = np.log(outside.measured.duration_ns[mine] / base) - forest.predict(outside.table[mine])
        octaves[mine] = octaves_beyond(reach_of(part.support, inside.measured.ops.take(near)), ops)
    known = ~np.isnan(rest)
    return _region_of(rest[known], octaves[known], chosen.rest[~np.isnan(chosen.rest)])


def _region_of(rest: FloatArray, octaves: FloatArray, inside: FloatArray) -> Region | None:
    """The errors [log time] of rows so many octaves beyond a fit, beside those inside it."""
    if len(rest) < _FEWEST_BEYOND:
        return None
    low, high = (float(np.quantile(inside, level)) for level in (_TAIL, 1 - _TAIL))
    over = np.maximum(rest - max(high, 0.0), min(low, 0.0) - rest)
    steps: list[tuple[float, float]] = []
    wide = 0.0
    for least, most in pairwise((0.0, *_STEPS)):
        some = over[(octaves > least) & (octaves <= most)]
        if len(some) >= _FEWEST:
            # Rows beyond in one more dimension err more than these: one side's share of misses is for both.
            wide = max(wide, float(np.quantile(some, 1 - _TAIL)))
        steps.append((most, round(wide, 6)))
    at, grows = (np.array(column) for column in zip((0.0, 0.0), *steps, strict=True))
    grown: FloatArray = np.interp(octaves, at, grows)
    figures = {name: round(value, 6) for name, value in error_figures(np.expm1(-rest)).items()}
    return Region(
        **figures,
        n=len(rest),
        inside_mape=round(float(np.abs(np.expm1(-inside)).mean()), 6),
        coverage=round(float((over <= grown).mean()), 6),
        widening=tuple(steps),
    )


def reach_of(dims: Sequence[str], ops: Operations) -> dict[str, tuple[float, float]]:
    """The least and most of each size that any operation has."""
    found = {name: size[~np.isnan(size)] for name in dims if len(size := ops.dim(name))}
    return {name: (float(size.min()), float(size.max())) for name, size in found.items() if len(size)}


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


def support_of(dims: Sequence[str], ops: Operations) -> NDArray[np.int8]:
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
