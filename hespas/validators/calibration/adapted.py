"""Models of related devices adapted to a few rows of a new one.

A device that no shipped model has seen is answered by its nearest relatives: their fitted forms on its own
rates, corrected by trees that carry over. From some rows on, parts of that are fitted, each held by the one
before:

    relatives' parameters  ->  the form's parameters here  x  trees that carry over  x  trees grown here

How many trees are grown is chosen on folds left out, from none (one factor for all) on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.forms import FORMS, Form, Values, form_time_ns, machine_of
from hespas.estimators.learned.bases import RELATIVES, Base, BaseIndex, combined_ns
from hespas.estimators.learned.ensemble import Forest, features_of
from hespas.estimators.learned.inference import Choice, Wanted, choose, code_columns
from hespas.estimators.learned.serialization import Candidate, Card, LearnedModel, load_model
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import Operations
from hespas.validators.calibration.fit_device import Prior, rounded, solve
from hespas.validators.calibration.learned import (
    cells_of,
    devices_of,
    errors_of_folds,
    folds_of,
    reach_of,
    support_of,
    wholly_widened,
)
from hespas.validators.calibration.learned_parts import Form as Trees
from hespas.validators.calibration.learned_parts import Part, Rows, constant, grow, library_version

__all__ = ["MOST_ROWS", "Adaptable", "adaptable", "adapted"]

MOST_ROWS = 2000
"""With more, trees of the device's own rows know as much."""
_FEWEST = 12
_FEWEST_GROUPS = 5
_WIDTH = 0.5
"""How far parameters lie from those of relatives: ln units of one standard deviation."""
_CALLS = 40
_FIRM = 5.0
"""Rows that a factor of all is drawn to 1 by."""
_LARGEST_SHARE, _LARGEST_ROWS = 0.1, 5
_NONE = Trees(trees=0, leaves=0, learning_rate=0.0, least_rows=0)

_Labels = tuple[str, str, str, str]


def adapted(found: Adaptable, device: Device, *, seed: int) -> LearnedModel:
    """The model of related devices adapted to rows of ``device``. O(rows x folds x trees)."""
    part, rows = found.part, found.rows
    group, fold = folds_of(part, rows, seed, even=True)
    kin = _Kin(load_model(found.path), found.choices, device, rows.measured)
    folds = kin.folds(fold // 2)
    carries = not _simplest([kin.rest(folds, None, carries=each, seed=seed) for each in (True, False)])
    steps = _steps(len(group))
    rests = [kin.rest(folds, each, carries=carries, seed=seed) for each in steps]
    best = _simplest(rests)
    chosen = _Chosen(carries, steps[best], _candidates(steps, best, rests), rests[best], group)
    return kin.model(part, rows, chosen, seed)


@dataclass(frozen=True, slots=True, eq=False)
class Adaptable:
    """Rows of a ``part`` (without its layers, where these are too few) that the card at ``path`` speaks of,
    and what it takes their classes for; of ``unknown`` others it says nothing.
    """

    part: Part
    rows: Rows
    path: Path
    choices: Mapping[_Labels, Choice]
    unknown: int


def adaptable(
    part: Part, rows: Rows, device: Device, cards: Sequence[tuple[Path, Card]], *, seed: int
) -> Adaptable | None:
    """The model of related devices that covers most of a part's ``rows``, all of ``device``, and which rows
    these are; None where none does, or rows or sizes are too few.
    """
    covered = _covered(rows.measured.ops, device, cards)
    if covered is None:
        return None
    path, choices = covered
    known = np.sort(np.concatenate([mine for _, mine in choices.values()]))
    if len(known) < _FEWEST:
        return None
    some = rows.take(known)
    for each in (part, replace(part, layer=())):
        group, _ = folds_of(each, some, seed, even=True)
        if int(group.max()) + 1 >= _FEWEST_GROUPS:
            taken = {labels: choice for labels, (choice, _) in choices.items()}
            return Adaptable(each, some, path, taken, len(rows.ratio) - len(known))
    return None


def _simplest(rests: Sequence[FloatArray]) -> int:
    """The first of some ways, each with what it leaves [log time] of the same rows left out, that is as good
    as the best, as far as so many rows can tell.
    """
    errors = np.array([np.abs(np.expm1(-rest)).mean() for rest in rests])
    return int(np.flatnonzero((1 - len(rests[0]) ** -0.5) * errors <= errors.min())[0])


def _covered(
    ops: Operations, device: Device, cards: Sequence[tuple[Path, Card]]
) -> tuple[Path, Mapping[_Labels, tuple[Choice, IntArray]]] | None:
    """The card that speaks of most operations as of a device it has not seen, and what it takes them for."""
    by_path: dict[Path, dict[_Labels, tuple[Choice, IntArray]]] = {}
    for labels, rows in ops.classes():
        kind, op, scheme, _ = labels
        choice = choose(cards, Wanted(kind, op, scheme, ""), device)
        if not isinstance(choice, str) and _bases(choice):
            by_path.setdefault(choice.path, {})[labels] = choice, rows
    if not by_path:
        return None
    return max(by_path.items(), key=lambda each: sum(len(rows) for _, rows in each[1].values()))


def _bases(choice: Choice) -> list[Base]:
    """The fitted forms of the relatives that stand in for a device; none where it was in the fit itself."""
    index, cell = BaseIndex(choice.card.bases, choice.card.forms), choice.cell
    names = () if choice.kin is None else choice.kin.names
    labels = (cell.kind, cell.op, cell.scheme, cell.variant)
    return [base for name in names if (base := index.find(name, labels)) is not None]


def _steps(count: int) -> tuple[Trees | None, ...]:
    """What may be grown on so many rows, the least first (None: one factor for all)."""
    forms = (
        Trees(trees=30, leaves=4, learning_rate=0.1, least_rows=max(3, count // 20), columns=0.5),
        Trees(trees=100, leaves=8, learning_rate=0.1, least_rows=max(4, count // 50), columns=0.5),
        Trees(trees=300, leaves=15, learning_rate=0.08, least_rows=10, columns=0.4),
    )
    return (None, *(each for each in forms if count >= 4 * each.least_rows))


def _candidates(
    steps: Sequence[Trees | None], best: int, rests: Sequence[FloatArray]
) -> tuple[Candidate, ...]:
    """What was tried, with its errors on rows left out."""
    error = [np.abs(np.expm1(-rest)) for rest in rests]
    return tuple(
        Candidate(
            form="trees",
            loss=step.loss,
            trees=step.trees,
            leaves=step.leaves,
            learning_rate=step.learning_rate,
            mape=round(float(each.mean()), 6),
            median_ape=round(float(np.median(each)), 6),
            chosen=number == best,
        )
        for number, (step, each) in enumerate(zip((each or _NONE for each in steps), error, strict=True))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """Whether trees that carry over are used, what is grown, what else was tried, and what it leaves
    [log time] on rows left out, in their groups.
    """

    carries: bool
    step: Trees | None
    candidates: tuple[Candidate, ...]
    rest: FloatArray
    group: IntArray


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A form of one class with its parameters, and those of the relatives."""

    form: Form
    values: Values
    expected: Values


class _Fold(NamedTuple):
    """Rows that forms were fitted on, rows kept from them, and the log of all times over what forms say."""

    seen: IntArray
    unseen: IntArray
    over_form: FloatArray


class _Kin:
    """What a model of related devices knows of some rows of a new one."""

    def __init__(
        self,
        model: LearnedModel,
        choices: Mapping[_Labels, Choice],
        device: Device,
        measured: Measurements,
    ) -> None:
        card = model.card
        self._of, self._choices, self._device, self._measured = model, choices, device, measured
        self._classes = list(measured.ops.classes())
        self.codes = {
            name: {
                labels[place]: numbers[told]
                for labels, choice in choices.items()
                if (told := getattr(choice.cell, name)) in numbers
            }
            for place, name in ((1, "op"), (2, "scheme"), (3, "variant"))
            if (numbers := card.codes.get(name)) is not None
        }
        ops = measured.ops
        features = features_of(card.family, ops, device, overhead_ns=card.overhead_ns)
        columns = dict(zip(features.names, features.columns.T, strict=True))
        labels = {"variant": ops.variant, "scheme": ops.scheme, "op": ops.op}
        columns |= {name: each.astype(np.float32) for name, each in code_columns(self.codes, labels).items()}
        self.names = tuple(name for name, each in columns.items() if np.ptp(each) > 0)
        self._table = np.stack([columns[name] for name in self.names], axis=1).astype(np.float32)
        self._sheet_ns = features.base_ns
        self._carried = np.zeros(len(measured))
        if card.transfer_columns:
            table = np.stack([columns[name] for name in card.transfer_columns], axis=1)
            self._carried = model.forests["transfer"].predict(table.astype(np.float32))

    def folds(self, fold: IntArray) -> list[_Fold]:
        """Each fold in turn, with the times of all rows over forms that have not seen it."""
        found: list[_Fold] = []
        for number in np.unique(fold).tolist():
            seen = np.flatnonzero(fold != number)
            over = self._over_form(self._fits(seen))
            found.append(_Fold(seen, np.flatnonzero(fold == number), over))
        return found

    def rest(self, folds: Sequence[_Fold], step: Trees | None, *, carries: bool, seed: int) -> FloatArray:
        """What one way leaves [log time] of rows that entered no fit of it, shape ``(rows,)``."""
        rest = np.full(len(self._measured), np.nan)
        for fold in folds:
            ratio = fold.over_form - carries * self._carried
            forest = self._grown(ratio, fold.seen, step, seed)
            rest[fold.unseen] = ratio[fold.unseen] - forest.predict(self._table[fold.unseen])
        return rest

    def model(self, part: Part, rows: Rows, chosen: _Chosen, seed: int) -> LearnedModel:
        """The model with what was chosen."""
        fits = self._fits(np.arange(len(self._measured)))
        ratio = self._over_form(fits) - chosen.carries * self._carried
        flat = constant(len(self.names), 0.0)
        main = self._grown(ratio, np.arange(len(ratio)), chosen.step, seed)
        forests = {"main": main, "low": flat, "high": flat}
        if chosen.carries and self._of.card.transfer_columns:
            forests["transfer"] = self._of.forests["transfer"]
        before, ops = self._of.card, self._measured.ops
        reach, own = dict(before.reach), reach_of(part.support, ops)
        for name, (low, high) in own.items():
            least, most = reach.get(name, (low, high))
            reach[name] = min(low, least), max(high, most)
        octaves = support_of(before.support, ops)
        step = chosen.step or _NONE
        training = with_fields(
            before.training,
            tables=(self._measured.name,),
            provenance=(self._measured.provenance, *before.training.provenance),
            split=" ".join(name for name in self._measured.split.used() if name),
            rows=len(ratio),
            shape_groups=int(chosen.group.max()) + 1,
            seed=seed,
            trees=step.trees,
            leaves=step.leaves,
            learning_rate=step.learning_rate,
            loss=step.loss,
            share_of_columns=step.columns,
            least_rows_of_leaf=step.least_rows,
            rising_columns=(),
            library=library_version(),
        )
        card = with_fields(
            before,
            name=part.name,
            adapts=before.name,
            forms={fit.form.name: before.forms[fit.form.name] for fit in fits.values()},
            bases=tuple(self._bases(fits)),
            columns=self.names,
            transfer_columns=before.transfer_columns if "transfer" in forests else (),
            codes=self.codes,
            reach=reach,
            cells=cells_of(self._measured),
            devices=devices_of(rows),
            intervals=(wholly_widened(chosen.rest, chosen.group),),
            unseen=(),
            training=training,
            selection=chosen.candidates,
            left_out=(),
            errors=errors_of_folds(self._measured, chosen.rest),
        )
        return LearnedModel(card, forests, np.unique(np.concatenate((self._of.octaves, octaves)), axis=0))

    def _fits(self, seen: IntArray) -> Mapping[_Labels, _Fitted]:
        """The form of each class, drawn to what its relatives' parameters have in common."""
        found: dict[_Labels, _Fitted] = {}
        for labels, rows in self._classes:
            form, expected = self._expected(_bases(self._choices[labels]))
            mine = np.intersect1d(rows, seen)
            values: Values = expected
            if len(mine):
                some = self._measured.take(mine)
                machine = machine_of(self._device, labels[0], labels[2])
                prior: Prior = {name: (value, _WIDTH) for name, value in expected.items()}
                fixed = {each.name: expected[each.name] for each in form.parameters if not each.varies}
                columns, times = form.columns(some.ops, machine), some.duration_ns
                values = solve(
                    form,
                    columns,
                    times,
                    expected,
                    prior=prior,
                    fixed=fixed,
                    most_calls=_CALLS,
                    firm_rows=inf,
                ).values
            found[labels] = _Fitted(form, values, expected)
        return found

    def _expected(self, bases: Sequence[Base]) -> tuple[Form, dict[str, float]]:
        """The form of the first of some bases, and the geometric means of its parameters over all of it; of
        one that is a choice, what most have chosen.
        """
        form = FORMS[bases[0].form]
        names = self._of.card.forms[form.name]
        stated = np.array([base.parameters for base in bases if base.form == form.name])
        means: list[float] = np.exp(np.log(stated).mean(axis=0)).tolist()
        expected = dict(zip(names, means, strict=True))
        for each in form.parameters:
            if not each.varies:
                chosen: list[float] = stated[:, names.index(each.name)].tolist()
                expected[each.name] = Counter(chosen).most_common(1)[0][0]
        return form, expected

    def _over_form(self, fits: Mapping[_Labels, _Fitted]) -> FloatArray:
        """Log of the measured times over the bases of the relatives, moved by how their forms and these
        differ; shape ``(rows,)``.
        """
        ratio = np.log(self._measured.duration_ns)
        for labels, rows in self._classes:
            machine, fit = machine_of(self._device, labels[0], labels[2]), fits[labels]
            part = self._measured.ops.take(rows)
            own, kin = (
                np.log(form_time_ns(fit.form, values, part, machine)) for values in (fit.values, fit.expected)
            )
            base_ns = combined_ns(kin, self._sheet_ns[rows], self._of.card.form_share)
            ratio[rows] -= np.log(base_ns) + own - kin
        return ratio

    def _grown(self, ratio: FloatArray, seen: IntArray, step: Trees | None, seed: int) -> Forest:
        """Trees of what is left, or the middle of it."""
        if step is None:
            middle = float(np.median(ratio[seen])) * len(seen) / (len(seen) + _FIRM)
            return constant(len(self.names), middle)
        return grow(self._table[seen], ratio[seen], step, seed=seed)

    def _bases(self, fits: Mapping[_Labels, _Fitted]) -> Iterator[Base]:
        """Of each class the device's own form, and that of its relatives."""
        ratio = self._over_form(fits)
        for labels, rows in self._classes:
            fit = fits[labels]
            largest = rows[np.argsort(self._sheet_ns[rows], kind="stable")]
            largest = largest[-max(_LARGEST_ROWS, int(_LARGEST_SHARE * len(rows))) :]
            ends = rounded(float(np.median(ratio[largest])))
            kind, op, scheme, variant = labels
            for name, values in ((self._device.name, fit.values), (RELATIVES, fit.expected)):
                yield Base(
                    hardware=name,
                    kind=kind,
                    op=op,
                    scheme=scheme,
                    variant=variant,
                    form=fit.form.name,
                    parameters=tuple(rounded(values[each]) for each in self._of.card.forms[fit.form.name]),
                    asymptote=ends,
                )
