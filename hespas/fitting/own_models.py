"""Learned models of a user's own rows: fitted to many rows, or adapted from models of reference devices to a
few.

A device that no shipped model was fitted to is predicted from its reference devices. With some rows of the
device, this prediction is corrected:

    prediction from reference devices  x  form with parameters of this device / with theirs  x  trees

Options differ in how much of it is fitted: nothing, one factor, the parameters of the form, trees, or a form
of this device alone. The model is the weighted geometric mean of their predictions. An option with a smaller
error on held-out folds has a larger weight. With few rows the weights are similar, because the order of the
errors is uncertain and a mean has a smaller error than most options (stacking: Wolpert, Neural Networks 5,
1992). The stated error is measured on folds whose errors the weights do not use.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from math import inf, isfinite
from operator import itemgetter
from pathlib import Path

import numpy as np
from msgspec.structs import replace as with_fields

from hespas.estimators.forms import FORMS, Form, Values, form_time_ns, machine_of
from hespas.estimators.learned.bases import REFERENCE_DEVICES, Base, BaseIndex
from hespas.estimators.learned.ensemble import FAMILIES, Forest
from hespas.estimators.learned.extrapolation import tree_columns
from hespas.estimators.learned.inference import prediction_of_references
from hespas.estimators.learned.selection import ModelSelection, OperationLabels, select_model
from hespas.estimators.learned.serialization import Candidate, Card, LearnedModel, load_model
from hespas.fitting.device_forms import Prior, solve
from hespas.fitting.fits import rounded
from hespas.fitting.held_out import parts_in_turn
from hespas.fitting.learned import (
    FEWEST_MARGINS,
    cells_of,
    chosen_form,
    errors_of_folds,
    fit_settings,
    layer_folds,
    splits_of,
    support_of,
    wholly_widened,
)
from hespas.fitting.learned_extrapolation import devices_of, reach_of
from hespas.fitting.learned_parts import (
    EXPERTS,
    FEW,
    HEADS,
    PARTS,
    ROBUST,
    SMALL,
    WEIGHTS,
    BoostingForm,
    LearnedPart,
    TrainingRows,
    constant,
    grow,
    rows_for,
    rows_of_part,
    weighted_sum,
)
from hespas.fitting.rows import may_be_fitted, one_table
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import EXPANDED, find_scheme

__all__ = [
    "FEWEST_ROWS",
    "MOST_ROWS",
    "Adaptable",
    "OwnPart",
    "adaptable",
    "adapted",
    "own_parts",
    "unused_name",
]

MOST_ROWS = 2000
"""Most rows of an adapted model; with more, trees of the device's own rows are as good."""
_FEWEST = 12
_FEWEST_GROUPS = 5
_WIDTH, _FULL_WIDTH_ROWS = 0.5, 8
"""Standard deviation of parameters from the parameters of reference devices (ln units), for classes of at
least this number of rows. For smaller classes, whose rows cannot determine so many parameters, it falls with
the square of the number. Rows are counted before any are held out, so that held-out errors are of the same
procedure.
"""
_CALLS = 40
_LEAST_POWER, _GROUPS_PER_POWER = 2.0, 10.0
"""An option's weight is the inverse of a power of its error: 2, and 1 more for every 10 held-out groups. The
errors on left-out devices hardly change if it is 5 or 20 groups instead.
"""
_LEAST_WEIGHT = 0.05
"""Smallest weight of an option; options below it are left out of the mean."""
_FIRM_ROWS = 5.0
"""Rows with the same weight as the prior that a common factor is 1."""
_LARGEST_SHARE, _LARGEST_ROWS = 0.1, 5
_NO_TREES = BoostingForm(trees=0, leaves=0, learning_rate=0.0, least_rows=0)

_Labels = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True, eq=False)
class Adaptable:
    """Rows of a ``part`` that a model of reference devices covers. ``path`` is the card of this model.
    ``choices`` has the selected cell of the model for each class of rows.

    If there are too few layers, the part does not group rows by layer. ``unknown`` counts the rows that the
    model does not cover.
    """

    part: LearnedPart
    rows: TrainingRows
    path: Path
    choices: Mapping[_Labels, ModelSelection]
    unknown: int


def adapted(adaptable_rows: Adaptable, device: Device, *, seed: int) -> LearnedModel:
    """Adapt the model of reference devices to rows of ``device``. O(rows x folds x trees)."""
    part, rows = adaptable_rows.part, adaptable_rows.rows
    group, fold = layer_folds(part, rows, seed, even=True)
    references = _ReferenceModel(
        load_model(adaptable_rows.path), adaptable_rows.choices, device, rows.measured
    )
    fold = fold // 2
    options = _options(len(group))
    held_out = np.full((len(options), len(group)), np.nan)
    for others, tested in parts_in_turn(fold):
        held_out[:, tested] = references.residuals(others, tested, options, seed=seed)
    residual = np.full(len(group), np.nan)
    for others, tested in parts_in_turn(fold):
        residual[tested] = _weights(held_out[:, others], group[others]) @ held_out[:, tested]
    weights: list[float] = _weights(held_out, group).tolist()
    _, tested_options = chosen_form([option.trees or _NO_TREES for option in options], list(held_out))
    candidates = tuple(
        with_fields(candidate, chosen=weight > 0)
        for candidate, weight in zip(tested_options, weights, strict=True)
    )
    mean = [(option, weight) for option, weight in zip(options, weights, strict=True) if weight > 0]
    return references.model(part, rows, _MeanOfOptions(mean, candidates, residual, group), seed)


def _weights(residuals: FloatArray, group: IntArray) -> FloatArray:
    """Return the weight of each option in the mean; the sum is 1. ``residuals`` has the errors [log time] of
    each option on the same held-out rows, shape ``(options, rows)``.
    """
    error = np.abs(np.expm1(-residuals)).mean(axis=1)
    power = _LEAST_POWER + len(np.unique(group)) / _GROUPS_PER_POWER
    weight: FloatArray = (max(float(error.min()), 1e-9) / np.maximum(error, 1e-9)) ** power
    weight[weight < _LEAST_WEIGHT * weight.sum()] = 0.0
    return weight / float(weight.sum())


@dataclass(frozen=True, slots=True)
class _Adaptation:
    """Option of an adaptation. ``transfers`` is True if the prediction from the reference devices is
    corrected, False for a form of the device alone. ``fits_form`` is True if the parameters of the form are
    fitted. ``trees`` are the hyperparameters of new trees; None: one factor for all rows, if ``scales``.
    """

    transfers: bool = True
    fits_form: bool = False
    scales: bool = False
    trees: BoostingForm | None = None


def _options(count: int) -> list[_Adaptation]:
    """Return the options for ``count`` rows, the prediction from the reference devices first."""
    forms = (
        BoostingForm(trees=30, leaves=4, learning_rate=0.1, least_rows=max(3, count // 20), columns=0.5),
        BoostingForm(trees=100, leaves=8, learning_rate=0.1, least_rows=max(4, count // 50), columns=0.5),
        BoostingForm(trees=300, leaves=15, learning_rate=0.08, least_rows=10, columns=0.4),
    )
    trees = [form for form in forms if count >= 4 * form.least_rows]
    return [
        _Adaptation(),
        _Adaptation(scales=True),
        _Adaptation(fits_form=True, scales=True),
        *(_Adaptation(fits_form=True, trees=form) for form in trees),
        _Adaptation(transfers=False, fits_form=True, scales=True),
        *(_Adaptation(transfers=False, fits_form=True, trees=form) for form in trees[-1:]),
    ]


def adaptable(
    part: LearnedPart, rows: TrainingRows, device: Device, cards: Sequence[tuple[Path, Card]], *, seed: int
) -> Adaptable | None:
    """Return the model of reference devices that covers most of ``rows``, together with the covered rows. All
    rows must be of ``device``.

    Return None without such a model, or if it covers too few rows or sizes.
    """
    by_path: dict[Path, dict[_Labels, tuple[ModelSelection, IntArray]]] = {}
    for labels, numbers in rows.measured.ops.classes():
        kind, op, scheme, _ = labels
        choice = select_model(cards, OperationLabels(kind, op, scheme, ""), device)
        if not isinstance(choice, str) and _reference_bases(choice):
            by_path.setdefault(choice.path, {})[labels] = choice, numbers
    if not by_path:
        return None

    def covered_rows(item: tuple[Path, dict[_Labels, tuple[ModelSelection, IntArray]]]) -> int:
        return sum(len(numbers) for _, numbers in item[1].values())

    path, choices = max(by_path.items(), key=covered_rows)
    covered = np.sort(np.concatenate([numbers for _, numbers in choices.values()]))
    if len(covered) < _FEWEST:
        return None
    covered_part = rows.take(covered)
    for option in (part, replace(part, layer=())):
        group, _ = layer_folds(option, covered_part, seed, even=True)
        if int(group.max()) + 1 >= _FEWEST_GROUPS:
            by_labels = {labels: choice for labels, (choice, _) in choices.items()}
            return Adaptable(option, covered_part, path, by_labels, len(rows.ratio) - len(covered))
    return None


def _reference_bases(choice: ModelSelection) -> list[Base]:
    """Return the fitted forms of the reference devices; empty if the model was fitted to the device
    itself.
    """
    index, cell = BaseIndex(choice.card.bases, choice.card.forms), choice.cell
    names = () if choice.references is None else choice.references.names
    labels = (cell.kind, cell.op, cell.scheme, cell.variant)
    return [base for name in names if (base := index.find(name, labels)) is not None]


@dataclass(frozen=True, slots=True, eq=False)
class _MeanOfOptions:
    """Weighted mean of options of an adaptation: ``options`` are pairs of an option and its weight.
    ``candidates`` are all tested options with their errors. ``residual`` are the errors [log time] of
    held-out rows, ``group`` their groups.
    """

    options: Sequence[tuple[_Adaptation, float]]
    candidates: tuple[Candidate, ...]
    residual: FloatArray
    group: IntArray


@dataclass(frozen=True, slots=True)
class _FittedForm:
    """Fitted form of one class of operations: its parameters on the device, and the parameters of the
    reference devices.
    """

    form: Form
    values: Values
    expected: Values


class _ReferenceModel:
    """Learned model of reference devices, and the rows of a new device to which it is adapted."""

    def __init__(
        self,
        model: LearnedModel,
        choices: Mapping[_Labels, ModelSelection],
        device: Device,
        measured: Measurements,
    ) -> None:
        card = model.card
        self._model, self._choices, self._device, self._measured = model, choices, device, measured
        self._classes = list(measured.ops.classes())
        self.codes: dict[str, dict[str, float]] = {}
        for column, name in ((1, "op"), (2, "scheme"), (3, "variant")):
            numbers = card.codes.get(name)
            if numbers is not None:
                label_of = {labels: getattr(choice.cell, name) for labels, choice in choices.items()}
                self.codes[name] = {
                    labels[column]: numbers[label] for labels, label in label_of.items() if label in numbers
                }
        for choice in choices.values():
            for variant in () if choice.references is None else choice.references.variants:
                if variant in card.codes.get("variant", {}):
                    self.codes["variant"].setdefault(variant, card.codes["variant"][variant])
        coded = tree_columns(with_fields(card, codes=self.codes), measured.ops, device)
        self.names = tuple(
            name for name, column in coded.by_name.items() if np.isfinite(column).all() and np.ptp(column) > 0
        ) or (next(iter(coded.by_name)),)
        self._table, self._sheet_ns = coded.matrix(self.names), coded.sheet_ns
        names = {name for choice in choices.values() if choice.references for name in choice.references.names}
        self._references = tuple(other for other in card.devices if other.name in names)
        transferred = LearnedModel(
            with_fields(
                card,
                adapts=card.name,
                bases=tuple(self._bases_of_references()),
                transfer_columns=card.columns,
                codes=self.codes,
                cells=cells_of(measured),
                references=self._references,
            ),
            {"transfer": model.forests["main"]},
            model.octaves,
        )
        self._before = prediction_of_references(transferred, measured.ops, device)

    def residuals(
        self, numbers: IntArray, tested: IntArray, options: Sequence[_Adaptation], *, seed: int
    ) -> list[FloatArray]:
        """Return the errors [log time] of each option on the rows ``tested``, fitted to the rows
        ``numbers``.
        """
        fits = self._fits(numbers)
        residuals: list[FloatArray] = []
        for option in options:
            ratio = self._log_ratio(option, fits)
            forest = self._grown(option, ratio, numbers, seed)
            residuals.append(ratio[tested] - forest.predict(self._table[tested]))
        return residuals

    def model(self, part: LearnedPart, rows: TrainingRows, mean: _MeanOfOptions, seed: int) -> LearnedModel:
        """Return the adapted model: the weighted mean of options, fitted to all rows."""
        rows_of_all = np.arange(len(self._measured))
        options, weights = zip(*mean.options, strict=True)
        fits = self._fits(rows_of_all)
        ratios = [self._log_ratio(option, fits) for option in options]
        grown = [self._grown(*pair, rows_of_all, seed) for pair in zip(options, ratios, strict=True)]
        flat = constant(len(self.names), 0.0)
        forests = {
            "main": weighted_sum(grown, weights),
            "transfer": self._model.forests["main"],
            "low": flat,
            "high": flat,
        }
        before, ops = self._model.card, self._measured.ops
        reach, own = dict(before.reach), reach_of(part.support, ops)
        for name, (low, high) in own.items():
            least, most = reach.get(name, (low, high))
            reach[name] = min(low, least), max(high, most)
        octaves = support_of(before.support, ops)
        training = with_fields(
            fit_settings(
                self._measured,
                max(mean.options, key=itemgetter(1))[0].trees or _NO_TREES,
                split=splits_of(self._measured),
                groups=int(mean.group.max()) + 1,
                seed=seed,
            ),
            provenance=(self._measured.provenance, *before.training.provenance),
            form=before.training.form,
        )
        card = with_fields(
            before,
            name=part.name,
            adapts=before.name,
            forms=before.forms,
            bases=(
                *self._bases(fits, np.average(ratios, axis=0, weights=weights), mean.options),
                *self._bases_of_references(),
            ),
            columns=self.names,
            transfer_columns=before.columns,
            codes=self.codes,
            reach=reach,
            cells=cells_of(self._measured),
            devices=devices_of(rows),
            intervals=(wholly_widened(mean.residual, mean.group),),
            training=training,
            selection=mean.candidates,
            left_out=(),
            errors=errors_of_folds(self._measured, mean.residual),
            references=self._references,
        )
        return LearnedModel(card, forests, np.unique(np.concatenate((self._model.octaves, octaves)), axis=0))

    def _fits(self, numbers: IntArray) -> Mapping[_Labels, _FittedForm]:
        """Fit the form of each class to the rows ``numbers``, with the parameters of the reference devices as
        the prior.
        """
        fits: dict[_Labels, _FittedForm] = {}
        for labels, rows in self._classes:
            # Expected values are weighted geometric means over the bases with the form of the first; for a
            # parameter that is a choice, the most frequent value.
            choice = self._choices[labels]
            bases = _reference_bases(choice)
            form = FORMS[bases[0].form]
            bases = [base for base in bases if base.form == form.name]
            names = self._model.card.forms[form.name]
            expected_values = np.array([base.parameters for base in bases])
            assert choice.references is not None
            shares = dict(zip(choice.references.names, choice.references.weights, strict=True))
            weights = [shares[base.hardware] for base in bases]
            means: list[float] = np.exp(np.average(np.log(expected_values), axis=0, weights=weights)).tolist()
            expected = dict(zip(names, means, strict=True))
            for parameter in form.parameters:
                if not parameter.varies:
                    choices: list[float] = expected_values[:, names.index(parameter.name)].tolist()
                    expected[parameter.name] = Counter(choices).most_common(1)[0][0]
            of_class = np.intersect1d(rows, numbers)
            values: Values = expected
            if len(of_class):
                measured = self._measured.take(of_class)
                machine = machine_of(self._device, labels[0], labels[2])
                width = _WIDTH * min(len(rows) / _FULL_WIDTH_ROWS, 1.0) ** 2
                prior: Prior = {name: (value, width) for name, value in expected.items()}
                values = solve(
                    form,
                    form.columns(measured.ops, machine),
                    measured.duration_ns,
                    expected,
                    prior=prior,
                    fixed={
                        parameter.name: expected[parameter.name]
                        for parameter in form.parameters
                        if not parameter.varies
                    },
                    most_calls=_CALLS,
                    firm_rows=inf,
                ).values
            fits[labels] = _FittedForm(form, values, expected)
        return fits

    def _log_ratio(self, option: _Adaptation, fits: Mapping[_Labels, _FittedForm]) -> FloatArray:
        """Return the log of measured over predicted times before any trees, shape ``(rows,)``.

        The prediction is the one from the reference devices, multiplied by the ratio of two times of the
        form: with the parameters fitted to this device, and with those of the reference devices. If the
        option does not transfer, it is the time of the form alone.
        """
        ratio = np.log(self._measured.duration_ns)
        if option.transfers:
            ratio -= self._before
        if not option.fits_form:
            return ratio
        for labels, rows in self._classes:
            machine, fit = machine_of(self._device, labels[0], labels[2]), fits[labels]
            part = self._measured.ops.take(rows)
            ratio[rows] -= np.log(form_time_ns(fit.form, fit.values, part, machine))
            if option.transfers:
                ratio[rows] += np.log(form_time_ns(fit.form, fit.expected, part, machine))
        return ratio

    def _grown(self, option: _Adaptation, ratio: FloatArray, numbers: IntArray, seed: int) -> Forest:
        """Return trees fitted to the remaining errors ``ratio`` of the rows ``numbers``. Without trees,
        return a constant: the median error, reduced towards 0, or 0.
        """
        if option.trees is not None:
            return grow(self._table[numbers], ratio[numbers], option.trees, seed=seed)
        median = 0.0
        if option.scales:
            median = float(np.median(ratio[numbers])) * len(numbers) / (len(numbers) + _FIRM_ROWS)
        return constant(len(self.names), median)

    def _bases(
        self,
        fits: Mapping[_Labels, _FittedForm],
        ratio: FloatArray,
        options: Sequence[tuple[_Adaptation, float]],
    ) -> Iterator[Base]:
        """Yield the form of each class with the parameters of this device, and with the parameters from which
        they were fitted. ``ratio`` is the log of measured over predicted times. ``options`` are pairs of an
        option and its weight.
        """
        of_form = [(option, weight) for option, weight in options if option.fits_form]
        share = rounded(sum(weight for _, weight in of_form))
        share_of_expected = rounded(sum(weight for option, weight in of_form if option.transfers))
        for labels, rows in self._classes:
            fit = fits[labels]
            largest = rows[np.argsort(self._sheet_ns[rows], kind="stable")]
            largest = largest[-max(_LARGEST_ROWS, int(_LARGEST_SHARE * len(rows))) :]
            asymptote = rounded(float(np.median(ratio[largest])))
            names = self._model.card.forms[fit.form.name]
            kind, op, scheme, variant = labels
            for hardware, values, exponent in (
                (self._device.name, fit.values, share),
                (REFERENCE_DEVICES, fit.expected, share_of_expected),
            ):
                yield Base(
                    hardware=hardware,
                    kind=kind,
                    op=op,
                    scheme=scheme,
                    variant=variant,
                    form=fit.form.name,
                    parameters=tuple(rounded(values[name]) for name in names),
                    asymptote=asymptote,
                    share=exponent,
                )

    def _bases_of_references(self) -> Iterator[Base]:
        """Yield the forms of the reference devices, in the variants in which they were measured, with the
        other labels of the rows.
        """
        index, seen = BaseIndex(self._model.card.bases, self._model.card.forms), set[Base]()
        for (kind, op, scheme, _), choice in self._choices.items():
            cell, references = choice.cell, choice.references
            assert references is not None
            for name, variant in zip(references.names, references.variants, strict=True):
                base = index.find(name, (cell.kind, cell.op, cell.scheme, variant))
                if base is not None:
                    base = with_fields(base, kind=kind, op=op, scheme=scheme, variant=variant)
                    yield from {base} - seen
                    seen.add(base)


FEWEST_ROWS = 60
"""Least rows of a part, for its trees and their intervals."""
_FEWEST_LAYERS = 10
"""Least layers that are held out as a whole; with fewer, single sizes are held out."""
_LARGEST_GROUP = 0.2
"""Largest share of all rows in a single layer or size."""
_LAYERS: Mapping[str, tuple[str, ...]] = {
    "matmul": WEIGHTS,
    "convolution": WEIGHTS,
    "attention.context": HEADS,
    "attention.generation": HEADS,
    "attention.encoder": ("batch", "heads", "head_dim"),
    "moe": EXPERTS,
}
_BY_FORMAT = frozenset({"matmul", "convolution"})
"""Kinds with different kernels for each number format."""
_START_NS = 3e3
"""Launch time of a device file without one."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """Rows of a user for one learned model. ``fault`` is the reason why the model cannot be fitted to them
    (empty: it can).
    """

    part: LearnedPart
    rows: TrainingRows
    fault: str


def own_parts(
    tables: Sequence[Measurements], devices: Mapping[str, Device], *, seed: int
) -> Iterator[OwnPart]:
    """Yield the parts into which the tables are divided; one model is fitted to each part. Rows reserved for
    testing are left out, and matmuls that expand their weights, because estimates add the expansion.

    ``devices`` maps the device names in the tables to devices. If the package has parts for a table, these
    are used. Other rows are divided by kind, and matmuls also by number format. The order is fixed.
    """
    start_ns = min((device.launch_overhead_ns for device in devices.values()), default=np.nan)
    start_ns = start_ns if isfinite(start_ns) and start_ns > 0 else _START_NS
    plain = [np.flatnonzero(np.nan_to_num(table.ops.dim(EXPANDED)) == 0) for table in tables]
    tables = [may_be_fitted(table.take(rows)) for table, rows in zip(tables, plain, strict=True)]
    parts: list[tuple[LearnedPart, Measurements]] = []
    has_part = [np.zeros(len(table), np.bool_) for table in tables]
    for part in PARTS:
        numbers = [rows_of_part(part, table) for table in tables]
        for mask, of_part in zip(has_part, numbers, strict=True):
            mask[of_part] = True
        rows = one_table([table.take(of_part) for table, of_part in zip(tables, numbers, strict=True)])
        if rows:
            parts.append((part, rows))
    others = [table.take(np.flatnonzero(~mask)) for table, mask in zip(tables, has_part, strict=True)]
    for kind in FAMILIES:
        if rows := one_table([table.take(table.ops.kind.where(kind)) for table in others]):
            parts.extend(_parts_by_format(kind, rows, start_ns))
    names: set[str] = set()
    for part, measured in parts:
        name = unused_name(part.name, names)
        names.add(name)
        yield _checked_part(replace(part, name=name), rows_for(part, measured, devices), seed)


def unused_name(name: str, used: Collection[str]) -> str:
    """Return ``name``, or ``name`` with the first number from 2 on that is not in ``used``."""
    if name not in used:
        return name
    stem = re.sub(r"-\d+$", "", name)
    return next(other for number in count(2) if (other := f"{stem}-{number}") not in used)


def _parts_by_format(
    kind: str, rows: Measurements, start_ns: float
) -> Iterator[tuple[LearnedPart, Measurements]]:
    """Yield the parts into which the rows of one kind are divided: one per number format for matmuls,
    otherwise a single one.
    """
    formats: dict[str, list[str]] = {}
    for name in sorted(rows.ops.scheme.used()):
        scheme = find_scheme(name)
        if scheme is not None:
            family = ""
            if kind in _BY_FORMAT:
                family = "weight-only" if scheme.weight_bits < scheme.activation_bits else name
            formats.setdefault(family, []).append(name)
    for name, schemes in sorted(formats.items()):
        part = LearnedPart(
            name="-".join(re.sub(r"[^\w]+", "-", text) for text in (kind, name) if text),
            table=rows.name,
            kinds=(kind,),
            schemes=tuple(schemes),
            overhead_ns=start_ns,
            forms=(FEW, ROBUST, SMALL),
            layer=_LAYERS.get(kind, ("columns",)),
        )
        yield part, rows.take(rows.ops.scheme.where(*schemes))


def _checked_part(part: LearnedPart, rows: TrainingRows, seed: int) -> OwnPart:
    """Return a part with its rows, and how they are held out: by layers if there are many layers, otherwise
    by single sizes.
    """
    count = len(rows.ratio)
    label = " ".join((*part.kinds, *part.schemes))
    if count < FEWEST_ROWS:
        text = (
            f"{label}: {count} rows with known sizes and a published peak, "
            f"{FEWEST_ROWS} are needed (12 of 5 sizes where the package has a model of related devices)"
        )
        return OwnPart(part, rows, text)
    sizes = 0
    for option in (part, replace(part, layer=())):
        group, fold = layer_folds(option, rows, seed, even=True)
        of_group = np.bincount(group)
        halves = np.bincount(fold % 2, minlength=2)
        sizes = len(of_group)
        is_even = of_group.max() <= _LARGEST_GROUP * count and halves.min() >= FEWEST_MARGINS
        if sizes >= _FEWEST_LAYERS and is_even:
            return OwnPart(option, rows, "")
    text = f"{label}: {sizes} sizes, {_FEWEST_LAYERS} with about as many rows each are needed"
    return OwnPart(part, rows, text)
