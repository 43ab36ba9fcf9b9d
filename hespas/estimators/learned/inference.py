"""Learned estimator: gradient-boosted trees that correct a base time (fitted formula and data sheet).

    time = base(sizes, fitted physics, data sheet) x exp(sum of trees(log sizes, log ratios, descriptors))

Beyond the fitted sizes the correction by the trees approaches its value for the largest operations, so that
the base alone decides how time grows. The time on a device that was not in the fit is a mean of the times on
its reference devices, scaled to its rates (:mod:`~hespas.estimators.learned.extrapolation`). A model adapted
to a few rows of the device starts from this prediction. The interval holds 90 % of outcomes: fitted
quantiles, widened to that coverage on rows left out of the fit, and wider with every octave beyond its sizes.
On a device that was not in the fit, it is wider the farther the reference devices are, and the more they
differ. No time is below the device's roofline bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from hespas.estimators.interface import Prediction, estimate_by_operation
from hespas.estimators.learned.bases import (
    REFERENCE_DEVICES,
    BaseIndex,
    ReferenceDevices,
    combined_ns,
)
from hespas.estimators.learned.equivalents import (
    CONVOLUTION_WIDENING,
    EXPERTS_WIDENING,
    as_8_bit_experts,
    as_deeper_products,
    as_products,
    of_4_bit_experts,
    reordering_ns,
    roof_beyond_8_bits_ns,
    runs_on_tf32,
    wider_output_ns,
    without_library,
)
from hespas.estimators.learned.extrapolation import (
    expected_deviation,
    octaves_beyond,
    octaves_outside,
    reference_times,
    references_of,
    shares_of_trees,
    tree_columns,
    widening,
    widening_of_layout,
)
from hespas.estimators.learned.rising import raised
from hespas.estimators.learned.selection import ModelSelection, OperationLabels, select_model
from hespas.estimators.learned.serialization import (
    Card,
    LearnedModel,
    cards_at,
    cards_in,
    load_model,
    shipped_folder,
)
from hespas.estimators.rates import within_roof
from hespas.graph import BEYOND_RANGE, MEASURED_BASIS, Diagnostics, Estimate, OpGraph, reference_basis
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import Device
from hespas.operations import LabelColumn, Labels, Operations, timed_with_events

__all__ = ["Learned", "LoadedModels", "prediction_of_references"]


_UNTESTED = 1.0
"""Least distance of the ends of an interval [log time] on a new device, for models without left-out
architectures: a factor of e.
"""
_AS_FITTED = 0.5
"""Octaves beyond the fitted sizes that count as within them in the basis of a time."""

_HALF_SHARE = 0.7
_HALF_SHARE_NEW_DEVICE = 0.5
"""Share of the whole's time below which the form of a half is never raised above the whole by trees: on a
device of the fit, and on others.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """Estimator that uses the learned models of the package and of the device's file.

    ``models``: a folder whose models are used instead of all others. ``shipped`` and ``own``: use the models
    of the package, and the models that the device's file names. ``num_ranks``: number of ranks in collectives
    over all ranks, for graphs that do not state it.
    """

    models: str = ""
    num_ranks: int = -1
    shipped: bool = True
    own: bool = True

    inert_options: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """Name of the model: ``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of each operation; NaN with a reason where no model covers its kind, format or
        sizes.

        O(ops x trees): about 2 us per operation and 300 trees. Raises ``FormatError`` for a damaged or
        missing model, ``UsageError`` without any model.
        """
        folder = Path(self.models) if self.models else shipped_folder()
        own = cards_at(device.learned_models) if self.own and not self.models else ()
        others = cards_in(folder) if self.models or self.shipped else ()
        if not own and not others:
            source = f"in {folder}" if self.models or self.shipped else f"named by the file of {device.name}"
            raise UsageError(f"no learned model {source}", hint="name a folder of cards and trees")
        # All models first: the package's model of a number format comes before an own model of a similar one.
        sets = [_ModelSet((*own, *others), ranked=len(own))]
        if own and others:
            sets += [_ModelSet(own, ranked=len(own)), _ModelSet(others)]
        answer = _predict_all(sets, ops, device, diagnostics)
        for reason, count in answer.reasons.items():
            if diagnostics is not None:
                diagnostics.warning("learned.refused", device.name, f"no duration, {reason}", count=count)
        return Prediction.of(self.name, *answer.times, basis=answer.basis.labels())

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """Return the time of one execution of each node, with one prediction per distinct operation."""
        return estimate_by_operation(self, graph, device, diagnostics, num_ranks=self.num_ranks)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModels:
    """Estimator of single operations by learned models that are already in memory."""

    models: Sequence[LearnedModel]

    @property
    def name(self) -> str:
        """Name of the model: ``learned``."""
        return "learned"

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None = None) -> Prediction:
        """Return the time of each operation; NaN where no model covers it."""
        by_path = {Path(f"{number:06d}.json"): model for number, model in enumerate(self.models)}
        cards = [(path, model.card) for path, model in by_path.items()]
        answer = _ModelSet(cards, load=by_path.__getitem__).predict(ops, device, diagnostics)
        return Prediction.of(self.name, *answer.times, basis=answer.basis.labels())


@dataclass(frozen=True, slots=True, eq=False)
class _LearnedTimes:
    """Times and intervals by learned models while they are filled in, shape ``(3, ops)`` [ns], the basis of
    each time, and the reasons for operations without a time.
    """

    times: FloatArray
    basis: LabelColumn
    reasons: Counter[str] = field(default_factory=Counter[str])

    @classmethod
    def unknown(cls, count: int) -> _LearnedTimes:
        """Return an object in which the times of all ``count`` operations are unknown."""
        return cls(np.full((3, count), nan), LabelColumn(count))


@dataclass(frozen=True, slots=True, eq=False)
class _ModelSet:
    """Learned models, by the paths of their cards. If several models cover an operation equally well, the
    first ``ranked`` cards are preferred, in order. ``load`` reads the model of a card.
    """

    cards: Sequence[tuple[Path, Card]]
    ranked: int = 0
    load: Callable[[Path], LearnedModel] = load_model

    def predict(self, ops: Operations, device: Device, diagnostics: Diagnostics | None) -> _LearnedTimes:
        """Return the time of each operation, and the number of operations without a time per reason. O(ops x
        trees).

        Raises ``FormatError`` for a card that names an unknown column, family or label.
        """
        by_model: dict[tuple[Path, bool, bool], list[tuple[ModelSelection, IntArray]]] = {}
        answer = _LearnedTimes.unknown(len(ops))
        for names, rows in ops.classes():
            labels = OperationLabels(*names)
            selection = select_model(self.cards, labels, device, ranked=self.ranked)
            if isinstance(selection, str):
                answer.reasons[selection] += len(rows)
                continue
            key = selection.path, selection.is_fitted_device, selection.has_known_kernels
            by_model.setdefault(key, []).append((selection, rows))
            if diagnostics is not None:
                _report_assumptions(labels, selection, device, len(rows), diagnostics)
        for (path, *_), selections in by_model.items():
            model = self.load(path)
            try:
                _fill_times(model, selections, ops, device, answer)
            except KeyError as error:
                raise FormatError(
                    f"the card of {model.card.name!r} is damaged: it defines no {clipped(str(error))}",
                    path=str(path),
                    position="$.family, $.columns or $.codes",
                    hint="copy card and trees again, or fit the model again",
                ) from error
        return answer


def _report_assumptions(
    labels: OperationLabels, selection: ModelSelection, device: Device, count: int, diagnostics: Diagnostics
) -> None:
    """Report that operations are predicted from another number format, operation or device, or from times
    that include the launch.
    """
    cell = selection.cell
    if (cell.op, cell.scheme) != (labels.op, labels.scheme) and (cell.op or labels.op or cell.scheme):
        text = f"{labels.kind} {labels.op} {labels.scheme}: estimated as {cell.op} {cell.scheme}"
        diagnostics.info("learned.stand-in", device.name, " ".join(text.split()), count=count)
    if not labels.variant and timed_with_events(cell.variant):
        text = f"{labels.kind} {labels.scheme}: fitted on times from events, which include the launch"
        diagnostics.info("learned.event-times", device.name, text, count=count)
    if selection.references is not None:
        text = f"{labels.kind} {labels.scheme}: the device was not in the fit; reference devices: "
        text += str(selection.references)
        diagnostics.info("learned.unseen-device", device.name, text, count=count)


def _predict_in_turn(
    sets: Sequence[_ModelSet], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _LearnedTimes:
    """Return the times by several sets of models. Each set predicts the operations that the sets before it do
    not cover.
    """
    answer = _LearnedTimes.unknown(len(ops))
    for models in sets:
        rows = np.flatnonzero(np.isnan(answer.times[0]))
        if not len(rows):
            break
        part = models.predict(ops.take(rows), device, diagnostics)
        answer.times[:, rows] = part.times
        answer.basis.fill(rows, part.basis.labels())
        answer.reasons.clear()  # the next set may cover them
        answer.reasons.update(part.reasons)
    return answer


class _Equivalent(NamedTuple):
    """Replacement of operations by other operations that take about the same time. ``predict`` returns the
    times of the replacements. ``text`` is the message about it, with ``{}`` for the number formats.
    """

    predict: Callable[[Sequence[_ModelSet], Operations, Device, Diagnostics | None], _LearnedTimes]
    text: str


def _predict_all(
    sets: Sequence[_ModelSet], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _LearnedTimes:
    """Return the times by sets of models. Operations that no model covers are predicted by equivalent
    operations.
    """
    deep, convolved, narrow = runs_on_tf32(ops, device), without_library(ops), of_4_bit_experts(ops)
    rest = np.setdiff1d(np.arange(len(ops)), np.concatenate((deep, convolved, narrow)))
    answer = _LearnedTimes.unknown(len(ops))
    for rows, equivalent in ((rest, None), (deep, _TF32), (convolved, _CONVOLUTIONS), (narrow, _EXPERTS)):
        if not len(rows):
            continue
        part = ops.take(rows) if len(rows) < len(ops) else ops
        direct = _predict_in_turn(sets, part, device, diagnostics)
        gaps = np.flatnonzero(np.isnan(direct.times[0]))
        reasons = direct.reasons
        if equivalent is not None and len(gaps):
            missing = part.take(gaps)
            replaced = equivalent.predict(sets, missing, device, diagnostics)
            times = direct.times[:, gaps] = within_roof(replaced.times, missing, device)
            direct.basis.fill(gaps, replaced.basis.labels())
            reasons = replaced.reasons
            if diagnostics is not None and (count := int((~np.isnan(times[0])).sum())):
                text = equivalent.text.format(" ".join(missing.scheme.used()))
                diagnostics.info("learned.stand-in", device.name, text, count=count)
        answer.times[:, rows] = direct.times
        answer.basis.fill(rows, direct.basis.labels())
        answer.reasons.update(reasons)
    return answer


def _predict_tf32(
    sets: Sequence[_ModelSet], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _LearnedTimes:
    deeper = _predict_in_turn(sets, as_deeper_products(ops), device, diagnostics)
    return replace(deeper, times=deeper.times + wider_output_ns(ops, device))


def _predict_convolutions(
    sets: Sequence[_ModelSet], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _LearnedTimes:
    products = _predict_all(sets, as_products(ops, device), device, diagnostics)
    factors = np.exp(CONVOLUTION_WIDENING * np.array([[0.0], [-1.0], [1.0]]))
    return replace(products, times=(products.times + reordering_ns(ops, device)) * factors)


def _predict_experts(
    sets: Sequence[_ModelSet], ops: Operations, device: Device, diagnostics: Diagnostics | None
) -> _LearnedTimes:
    wider = as_8_bit_experts(ops)
    of_8_bits = _predict_in_turn(sets, wider, device, diagnostics)
    with np.errstate(invalid="ignore"):
        times = of_8_bits.times[0] + roof_beyond_8_bits_ns(ops, wider, device)
        ends = (
            np.exp(EXPERTS_WIDENING * np.array([[0.0], [-1.0], [1.0]])) * of_8_bits.times / of_8_bits.times[0]
        )
    return replace(of_8_bits, times=times * ends)


_TF32 = _Equivalent(_predict_tf32, "matmul f32 on TF32 units: estimated as bf16 of twice the depth")
_EXPERTS = _Equivalent(_predict_experts, "experts {}: estimated as experts of 8 bits")
_CONVOLUTIONS = _Equivalent(_predict_convolutions, "convolution {}: estimated as equivalent products")


def _fill_times(
    model: LearnedModel,
    selections: Sequence[tuple[ModelSelection, IntArray]],
    ops: Operations,
    device: Device,
    answer: _LearnedTimes,
) -> None:
    """Predict the operations of ``selections`` with one model and store the times in ``answer``. A selection
    is paired with the rows of its operations. The device was in the fit of the model for all selections or
    for none, and its kernels are known for all or for none.
    """
    rows = np.concatenate([part for _, part in selections])
    cell = np.repeat(np.arange(len(selections)), [len(part) for _, part in selections])
    chosen = [selection for selection, _ in selections]

    def labels_of(names: list[str]) -> Labels:
        distinct = tuple(dict.fromkeys(names))
        return Labels.choice(distinct, np.array([distinct.index(name) for name in names])[cell])

    fitted = replace(  # with the labels of the cells that cover them
        ops.take(rows),
        op=labels_of([selection.cell.op for selection in chosen]),
        scheme=labels_of([selection.cell.scheme for selection in chosen]),
        variant=labels_of([selection.cell.variant for selection in chosen]),
    )
    times, beyond = _predict_times(model, chosen, cell, fitted, device)
    # Attention for one token changes kernels with the number of heads per key head, on all similar devices.
    accepts_jumps = chosen[0].is_fitted_device or (
        chosen[0].has_known_kernels and model.card.family == "generation"
    )
    share = _HALF_SHARE if accepts_jumps else _HALF_SHARE_NEW_DEVICE
    outside = octaves_beyond(model.card.reach, fitted)

    def predict_halves(halves: Operations, of: IntArray, at_most: FloatArray) -> FloatArray:
        logs, _ = _form_times(model.card, chosen, cell[of], halves, device)
        # A half that is farther from the fitted sizes is less certain than the operation.
        is_farther = octaves_beyond(model.card.reach, halves) > outside[of]
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.flatnonzero(~(np.exp(logs) < share * at_most) & ~is_farther)
        half_ns = np.full(len(of), np.nan)
        half_ns[near] = _predict_times(model, chosen, cell[of[near]], halves.take(near), device)[0][0]
        return half_ns

    times = raised(model.card.family, fitted, times, predict_halves, measured=accepts_jumps)
    answer.reasons["sizes, FLOPs, bytes or the peak are unknown"] += int(np.isnan(times[0]).sum())
    answer.times[:, rows] = within_roof(times, ops.take(rows), device)
    basis = Labels.choice((MEASURED_BASIS, BEYOND_RANGE), (beyond > _AS_FITTED).astype(np.int64))
    if not chosen[0].is_fitted_device:
        references = [selection.references for selection in chosen]
        basis = labels_of([reference_basis(() if near is None else near.names) for near in references])
    answer.basis.fill(rows, basis)


def _predict_times(
    model: LearnedModel,
    selections: Sequence[ModelSelection],
    cell: IntArray,
    ops: Operations,
    device: Device,
) -> tuple[FloatArray, FloatArray]:
    """Return the time and interval of operations, shape ``(3, ops)``, and the octaves by which each is beyond
    the fitted sizes. ``cell`` has the index in ``selections`` of the selection that covers each operation.
    """
    card = model.card
    times, octaves = np.full((3, len(ops)), np.nan), np.zeros(len(ops))
    if not selections[0].is_fitted_device:
        for number, selection in enumerate(selections):
            rows = np.flatnonzero(cell == number)
            references = selection.references
            if len(rows) and references is not None:
                times[:, rows] = _times_of_new_device(model, references, ops.take(rows), device, selection)
        return times, octaves
    table = tree_columns(card, ops, device)
    rows = np.flatnonzero(table.is_complete((*card.columns, *(card.transfer_columns if card.adapts else ()))))
    if not len(rows):
        return times, octaves
    part, table = ops.take(rows), table.take(rows)
    logs, asymptote = _form_times(card, selections, cell[rows], part, device)
    if card.adapts:  # the trees correct a mean of the prediction from the reference devices and the own form
        base_log = logs
        if "transfer" in model.forests:
            expected, _ = BaseIndex(card.bases, card.forms).log_times(part, device, [REFERENCE_DEVICES])
            before = prediction_of_references(model, part, device)
            shares = {base.hardware: base.share for base in card.bases}
            own, of_expected = shares[device.name], shares[REFERENCE_DEVICES]
            mixed = (1 - own + of_expected) * before + own * logs - of_expected * expected
            base_log = np.where(np.isnan(before), logs, mixed)
        base = np.exp(base_log)
    else:
        base = combined_ns(logs, table.sheet_ns, card.form_share)
    margins = {(row.hardware, row.kind, row.scheme): row for row in card.intervals}
    beyond = octaves_outside(model, part)
    columns = table.matrix(card.columns)
    share = shares_of_trees(card.reach, part, beyond)
    middle = asymptote + (model.forests["main"].predict(columns) - asymptote) * share
    # Widening of the fitted quantiles: of device, kind and scheme, else of the kind, else of all.
    of_class = [
        margins.get((device.name, kind, scheme)) or margins.get(("*", kind, "*")) or margins[("*", "*", "*")]
        for kind in part.kind.names
        for scheme in part.scheme.names
    ]
    row = part.kind.row.astype(np.int64) * len(part.scheme.names) + part.scheme.row
    below = np.array([margin.low for margin in of_class])[row]
    above = np.array([margin.high for margin in of_class])[row]
    low = np.minimum(model.forests["low"].predict(columns) - below, 0.0)
    high = np.maximum(model.forests["high"].predict(columns) + above, 0.0)
    wider = widening(card, beyond) + widening_of_layout(part, device)
    with np.errstate(over="ignore"):  # far beyond the fitted sizes an end may be infinite
        times[:, rows] = base * np.exp(np.stack((middle, middle + low - wider, middle + high + wider)))
    octaves[rows] = beyond
    return times, octaves


def prediction_of_references(model: LearnedModel, ops: Operations, device: Device) -> FloatArray:
    """Return the log of the times [ns] that a model adapted to ``device`` starts from, which are predicted
    from its reference devices, shape ``(ops,)``. NaN for classes without reference devices.

    The labels of ``ops`` are labels of cells of the model.
    """
    logs, card = np.full(len(ops), np.nan), model.card
    cells = {(cell.kind, cell.op, cell.scheme, cell.variant): cell for cell in card.cells}
    for labels, rows in ops.classes():
        references = references_of(card, cells[labels], device)
        if references is not None:
            logs[rows] = reference_times(model, references, ops.take(rows), device).log_ns
    return logs


def _times_of_new_device(
    model: LearnedModel,
    references: ReferenceDevices,
    ops: Operations,
    device: Device,
    selection: ModelSelection,
) -> FloatArray:
    """Return the time and interval of operations on a device without measurements, shape ``(3, ops)``."""
    times = reference_times(model, references, ops, device, as_timed=selection.as_timed)
    unit = expected_deviation(references, times.spread)
    wider = widening(model.card, octaves_outside(model, ops))
    interval = model.card.unseen
    with np.errstate(over="ignore"):
        least = _UNTESTED if interval.n == 0 else 0.0
        below, above = np.minimum(interval.low * unit, -least), np.maximum(interval.high * unit, least)
        low, high = np.exp(times.log_ns + below - wider), np.exp(times.log_ns + above + wider)
        return np.stack((np.exp(times.log_ns), low, high))


def _form_times(
    card: Card, selections: Sequence[ModelSelection], cell: IntArray, ops: Operations, device: Device
) -> tuple[FloatArray, FloatArray]:
    """Return two columns: the log of the fitted form's time [ns] of each operation (NaN: no form), and the
    asymptote (0: no form). See :class:`~hespas.estimators.learned.bases.Base`.
    """
    index = BaseIndex(card.bases, card.forms)
    logs, asymptote = np.full(len(ops), np.nan), np.zeros(len(ops))
    for number, selection in enumerate(selections):
        rows = np.flatnonzero(cell == number)
        references = selection.references
        names = (device.name,) if references is None else references.names
        as_timed = references is None or selection.as_timed
        logs[rows], ends = index.log_times(ops.take(rows), device, names, as_timed=as_timed)
        asymptote[rows] = np.nan_to_num(ends) if references is None else 0.0
    return logs, asymptote
