"""Learned estimator: gradient-boosted trees that correct a base time (fitted formula and data sheet).

    time = base(sizes, fitted physics, data sheet) x exp(sum of trees(log sizes, log ratios, descriptors))

Beyond the fitted sizes the correction by the trees approaches its value for the largest operations, so that
the base alone decides how time grows. On a device that was not in the fit the base has the parameters of its
nearest reference devices. It is corrected by trees that do not use the device as an input. A model adapted to
a few rows of the device starts from these trees. The interval holds 90 % of outcomes: fitted quantiles,
widened to that coverage on rows left out of the fit, and wider with every octave beyond its sizes. No time is
below the device's roofline bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import nan
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import Prediction, estimate_by_operation
from hespas.estimators.learned.bases import MOST_START_NS, REFERENCE_DEVICES, BaseIndex, combined_ns
from hespas.estimators.learned.ensemble import features_of
from hespas.estimators.learned.equivalents import (
    CONVOLUTION_WIDENING,
    as_deeper_products,
    as_products,
    runs_on_tf32,
    wider_output_ns,
    without_library,
)
from hespas.estimators.learned.rising import raised
from hespas.estimators.learned.selection import ModelSelection, OperationLabels, select_model
from hespas.estimators.learned.serialization import (
    Card,
    LearnedModel,
    NewDeviceInterval,
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

__all__ = [
    "FREE_OCTAVES",
    "Learned",
    "LoadedModels",
    "code_columns",
    "distances",
    "octaves_beyond",
    "octaves_of",
    "widening",
]

FREE_OCTAVES = 1
"""Distance from a fitted size without widening: two held-out shapes are as far from each other."""
_FULL_OCTAVES = 2.0
_FADING_OCTAVES = 4.0
"""Octaves beyond the fitted sizes up to which the trees count in full, and over which they then
fade to 1/e.
"""
_AS_FITTED = 0.5
"""Octaves beyond the fitted sizes that count as within them in the basis of a time."""
_STEEPEST = 0.25 * np.log(2)
"""Limit of the widening of intervals per octave beyond the farthest left-out size [log time]."""
_DIFFERENCES_AT_ONCE = 1 << 17

_HALF_SHARE = 0.7
_HALF_SHARE_NEW_DEVICE = 0.5
"""Share of the whole's time below which the form of a half is never raised above the whole by trees: on a
device of the fit, and on others.
"""
_DEFAULT_INTERVAL = NewDeviceInterval(tier="kind", low=-1.0, high=1.0, n=0)
"""Interval [log time] without any left-out device: a factor of e."""


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
        by_model: dict[tuple[Path, bool], list[tuple[ModelSelection, IntArray]]] = {}
        answer = _LearnedTimes.unknown(len(ops))
        for names, rows in ops.classes():
            labels = OperationLabels(*names)
            selection = select_model(self.cards, labels, device, ranked=self.ranked)
            if isinstance(selection, str):
                answer.reasons[selection] += len(rows)
                continue
            by_model.setdefault((selection.path, selection.is_fitted_device), []).append((selection, rows))
            if diagnostics is not None:
                _report_assumptions(labels, selection, device, len(rows), diagnostics)
        for (path, _), selections in by_model.items():
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
        names = ", ".join(selection.references.names)
        text = f"{labels.kind} {labels.scheme}: the device was not in the fit; reference devices: {names}"
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
    deep, convolved = runs_on_tf32(ops, device), without_library(ops)
    rest = np.setdiff1d(np.arange(len(ops)), np.concatenate((deep, convolved)))
    answer = _LearnedTimes.unknown(len(ops))
    for rows, equivalent in ((rest, None), (deep, _TF32), (convolved, _CONVOLUTIONS)):
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
    return replace(products, times=products.times * factors)


_TF32 = _Equivalent(_predict_tf32, "matmul f32 on TF32 units: estimated as bf16 of twice the depth")
_CONVOLUTIONS = _Equivalent(_predict_convolutions, "convolution {}: estimated as equivalent products")


def octaves_of(dims: Sequence[str], ops: Operations) -> IntArray:
    """Return log2 of each size of each operation, rounded to integers; -1 if an operation has no such size.
    Shape (ops, dims).
    """
    columns = [np.round(np.log2(np.maximum(np.nan_to_num(ops.dim(name), nan=0.5), 0.5))) for name in dims]
    return np.clip(np.stack(columns, axis=1), -1, 120).astype(np.int64)


def distances(fitted: NDArray[np.int8], octaves: IntArray) -> FloatArray:
    """Return the distance of each operation to the nearest fitted sizes, shape ``(ops,)``. The distance of
    two operations is the largest difference of log2 of a size, over all sizes.
    """
    distinct, rows = np.unique(octaves, axis=0, return_inverse=True)
    if not len(fitted):
        return np.full(len(octaves), np.inf)
    nearest = np.zeros(len(distinct))
    columns = [np.ascontiguousarray(column, np.int16) for column in fitted.T]
    block = min(max(1, _DIFFERENCES_AT_ONCE // len(fitted)), len(distinct))
    buffer = np.empty((2, block, len(fitted)), np.int16)
    for start in range(0, len(distinct), block):
        some = distinct[start : start + block].astype(np.int16)
        farthest, difference = buffer[:, : len(some)]
        farthest[:] = 0
        for axis, column in enumerate(columns):
            np.subtract(some[:, axis, None], column, out=difference)
            np.maximum(farthest, np.abs(difference, out=difference), out=farthest)
        nearest[start : start + len(some)] = farthest.min(axis=1)
    return nearest[rows.reshape(-1)]


def octaves_beyond(reach: Mapping[str, tuple[float, float]], ops: Operations) -> FloatArray:
    """Return by how many octaves each operation is beyond the sizes of a fit, in the dimension where it is
    farthest.
    """
    farthest = np.zeros(len(ops))
    for name, (low, high) in reach.items():
        size = ops.dim(name)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            beyond = np.maximum(np.log2(size / max(high, 1e-9)), np.log2(max(low, 1e-9) / size))
        farthest = np.fmax(farthest, np.nan_to_num(beyond, nan=0.0, posinf=64.0))
    return farthest


def widening(card: Card, beyond: FloatArray) -> FloatArray:
    """Return the number [log time] by which both ends of the interval move outwards at ``beyond`` octaves
    beyond the fitted sizes.

    Within the tested octaves it was measured such that intervals hold 90 % of left-out rows. Farther out it
    is extrapolated linearly.
    """
    steps = ((0.0, 0.0), *(() if card.region is None else card.region.widening))
    octaves, wide = (np.array(column) for column in zip(*steps, strict=True))
    pace = (wide[-1] - wide[0]) / octaves[-1] if octaves[-1] > 0 else _STEEPEST
    over = np.maximum(beyond - octaves[-1], 0.0)
    within: FloatArray = np.interp(beyond, octaves, wide)
    further: FloatArray = min(max(float(pace), _STEEPEST / 4), _STEEPEST) * over
    return within + further


def code_columns(
    codes: Mapping[str, Mapping[str, float]], labels: Mapping[str, Labels]
) -> dict[str, FloatArray]:
    """Return the columns ``variant``, ``scheme`` and ``op`` for the trees: the numeric code of each
    operation's label, NaN for an unknown label.
    """
    columns: dict[str, FloatArray] = {}
    for name, numbers in codes.items():
        values = np.array([numbers.get(text, np.nan) for text in labels[name].names])
        columns[name] = values[labels[name].row]
    return columns


def _fill_times(
    model: LearnedModel,
    selections: Sequence[tuple[ModelSelection, IntArray]],
    ops: Operations,
    device: Device,
    answer: _LearnedTimes,
) -> None:
    """Predict the operations of ``selections`` with one model and store the times in ``answer``. A selection
    is paired with the rows of its operations. Either all devices were in the fit of the model or none was.
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
    is_fitted_device = chosen[0].is_fitted_device
    share = _HALF_SHARE if is_fitted_device else _HALF_SHARE_NEW_DEVICE

    def predict_halves(halves: Operations, of: IntArray, at_most: FloatArray) -> FloatArray:
        logs, _ = _form_times(model.card, chosen, cell[of], halves, device)
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.flatnonzero(~(np.exp(logs) < share * at_most))
        half_ns = np.full(len(of), np.nan)
        half_ns[near] = _predict_times(model, chosen, cell[of[near]], halves.take(near), device)[0][0]
        return half_ns

    times = raised(model.card.family, fitted, times, predict_halves, measured=is_fitted_device)
    answer.reasons["sizes, FLOPs, bytes or the peak are unknown"] += int(np.isnan(times[0]).sum())
    answer.times[:, rows] = within_roof(times, fitted, device)
    basis = Labels.choice((MEASURED_BASIS, BEYOND_RANGE), (beyond > _AS_FITTED).astype(np.int64))
    if not is_fitted_device:
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
    features = features_of(card.family, ops, device, overhead_ns=card.overhead_ns)
    labels = {"variant": ops.variant, "scheme": ops.scheme, "op": ops.op}
    columns = dict(zip(features.names, features.columns.T, strict=True))
    codes = code_columns(card.codes, labels)
    columns |= {name: column.astype(np.float32) for name, column in codes.items()}
    complete = np.ones(len(ops), np.bool_)
    for name in (*card.columns, *(card.transfer_columns if card.adapts else ())):
        complete &= np.isfinite(columns[name])
    times, octaves = np.full((3, len(ops)), np.nan), np.zeros(len(ops))
    if not complete.any():
        return times, octaves
    part, part_cell = ops.take(np.flatnonzero(complete)), cell[complete]
    logs, asymptote = _form_times(card, selections, part_cell, part, device)
    # Launches of another host's fit count only as much as a launch that no host times.
    hosts = [
        selection.references is not None
        and not selection.as_timed
        and timed_with_events(selection.cell.variant)
        for selection in selections
    ]
    excess_ns = max(card.overhead_ns - MOST_START_NS, 0.0)
    sheet_ns = features.base_ns[complete] - np.where(np.array(hosts)[part_cell], excess_ns, 0.0)
    if card.adapts:  # trees correct the reference devices' base, scaled by the ratio of both forms
        reference_log_ns, _ = BaseIndex(card.bases, card.forms).log_times(part, device, [REFERENCE_DEVICES])
        base = combined_ns(reference_log_ns, sheet_ns, card.form_share) * np.exp(logs - reference_log_ns)
    else:
        base = combined_ns(logs, sheet_ns, card.form_share)
    table = {name: column[complete] for name, column in columns.items()}
    middle, low, high = _tree_logs(model, table, selections, part_cell, ops=part, device=device)
    apart = distances(model.octaves, octaves_of(card.support, part)) - FREE_OCTAVES
    beyond = np.maximum(octaves_beyond(card.reach, part), np.maximum(apart, 0.0))
    fading = np.exp(-np.maximum(beyond - _FULL_OCTAVES, 0.0) / _FADING_OCTAVES)
    if not selections[0].is_fitted_device:  # fades to the form of the reference devices
        asymptote = np.nan_to_num(logs - np.log(base))
    middle = asymptote + (middle - asymptote) * fading
    wider = widening(card, beyond)
    with np.errstate(over="ignore"):  # far beyond the fitted sizes an end may be infinite
        ends = np.stack((middle, middle + low - wider, middle + high + wider))
        times[:, complete] = base * np.exp(ends)
    octaves[complete] = beyond
    return times, octaves


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


def _tree_logs(
    model: LearnedModel,
    table: Mapping[str, NDArray[np.float32]],
    selections: Sequence[ModelSelection],
    cell: IntArray,
    *,
    ops: Operations,
    device: Device,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return the log of (time / base time) that the trees predict, and the ends of its interval relative to
    this value: a negative and a positive distance.
    """
    card, forests = model.card, model.forests

    def matrix(names: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([table[name] for name in names], axis=1)

    middle = np.zeros(len(cell))
    if not selections[0].is_fitted_device:
        if card.transfer_columns:
            middle = forests["transfer"].predict(matrix(card.transfer_columns))
        by_level = {interval.tier: interval for interval in card.unseen}
        intervals = [
            by_level.get(selection.references.nearness if selection.references else "", _DEFAULT_INTERVAL)
            for selection in selections
        ]
        low = np.array([interval.low for interval in intervals])[cell]
        high = np.array([interval.high for interval in intervals])[cell]
        return middle, low, high
    columns = matrix(card.columns)
    middle = forests["main"].predict(columns)
    if card.adapts and card.transfer_columns:
        middle = middle + forests["transfer"].predict(matrix(card.transfer_columns))
    # Widening of the fitted quantiles: of device, kind and scheme, else of the kind, else of all.
    margins = {(row.hardware, row.kind, row.scheme): row for row in card.intervals}
    rows = [
        margins.get((device.name, kind, scheme)) or margins.get(("*", kind, "*")) or margins[("*", "*", "*")]
        for kind in ops.kind.names
        for scheme in ops.scheme.names
    ]
    row = ops.kind.row.astype(np.int64) * len(ops.scheme.names) + ops.scheme.row
    below = np.array([margin.low for margin in rows])[row]
    above = np.array([margin.high for margin in rows])[row]
    low = np.minimum(forests["low"].predict(columns) - below, 0.0)
    high = np.maximum(forests["high"].predict(columns) + above, 0.0)
    return middle, low, high
