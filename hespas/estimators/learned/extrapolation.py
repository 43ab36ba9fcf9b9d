"""Predictions outside a fit of learned models: other sizes, and other devices.

Sizes are compared in octaves (log2) with the fitted ones. Beyond them the correction by the trees fades, and
intervals widen. The time on a device that was not in the fit is a weighted geometric mean of the times on its
reference devices (:class:`~hespas.estimators.learned.bases.ReferenceDevices`), scaled to its rates.

The time on a distant device does not approach the roofline. A share of the roofline that rises with the
distance was fitted to left-out architectures of ``calib`` rows, and was 0 for the smallest error in log time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.form_parts import machine_of
from hespas.estimators.learned.bases import (
    MOST_START_NS,
    BaseIndex,
    ReferenceDevices,
    combined_ns,
    device_distance,
    measured_device,
    nearest_devices,
)
from hespas.estimators.learned.ensemble import features_of
from hespas.estimators.learned.serialization import Card, Cell, LearnedModel
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import Device
from hespas.operations import Labels, Operations, timed_with_events

__all__ = [
    "FREE_OCTAVES",
    "GROUP",
    "ReferenceTimes",
    "TreeColumns",
    "code_columns",
    "distances",
    "expected_deviation",
    "octaves_beyond",
    "octaves_of",
    "octaves_outside",
    "reference_times",
    "references_of",
    "shares_of_trees",
    "size_of",
    "tree_columns",
    "widening",
    "widening_of_layout",
]

GROUP = "group"
"""Name of the number of query heads per key head, in the reach of models of attention for one new token."""
FREE_OCTAVES = 1
"""Distance from a fitted size without widening: two held-out shapes are as far from each other."""
_FULL_OCTAVES = 2.0
_FADING_OCTAVES = 4.0
"""Octaves beyond the fitted sizes up to which the trees count in full, and over which they then
fade to 1/e.
"""
_STEEPEST = 0.25 * np.log(2)
"""Limit of the widening of intervals per octave beyond the farthest left-out size [log time]."""
_DIFFERENCES_AT_ONCE = 1 << 17
_CARRIED_PER_DISTANCE = 0.1
"""Decline of the trees' correction of a reference device with the distance from it. It gave the smallest
error on architectures that were left out, together with the weights of distances.
"""
_MOST_CARRIED, _LEAST_CARRIED = 0.8, 0.15
"""Limit of the correction by the trees of a reference device [log time]: at distance 1, falling with its
square, and far away. Slow kernels of odd shapes do not carry over to other devices.
"""
_DEVIATIONS = (0.08, 0.0144, 0.05, 0.083)
"""Expected deviation [log time] of predictions for a device without measurements: at distance 0, per distance
to the power :data:`_DISTANCE_POWER`, per standard deviation between the reference devices, and with another
memory. Largest likelihood of the errors on architectures that were left out, except the deviation at distance
0: with it, intervals hold about 90 % of the errors both of left-out siblings and of left-out architectures.
"""
_DISTANCE_POWER = 1.5
_FARTHEST = 9.0
"""Largest distance that counts: farther devices were not left out of any model."""


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


def size_of(ops: Operations, name: str) -> FloatArray:
    """Return one size of each operation: a dimension, or the number of query heads per key head
    (:data:`GROUP`).
    """
    return ops.dim("heads") / ops.dim("kv_heads") if name == GROUP else ops.dim(name)


def shares_of_trees(
    reach: Mapping[str, tuple[float, float]], ops: Operations, beyond: FloatArray
) -> FloatArray:
    """Return the shares, from 0 to 1, of the trees' correction for operations that are ``beyond`` octaves
    outside of the fitted sizes.

    It is 0 for more query heads per key head than in the fit: libraries switch to another kernel there, of
    which the trees know nothing.
    """
    fading = np.exp(-np.maximum(beyond - _FULL_OCTAVES, 0.0) / _FADING_OCTAVES)
    if GROUP not in reach:
        return fading
    return np.where(size_of(ops, GROUP) > reach[GROUP][1], 0.0, fading)


def octaves_beyond(reach: Mapping[str, tuple[float, float]], ops: Operations) -> FloatArray:
    """Return by how many octaves each operation is beyond the sizes of a fit, in the dimension where it is
    farthest.
    """
    farthest = np.zeros(len(ops))
    for name, (low, high) in reach.items():
        size = size_of(ops, name)
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


_ALIGNED = 16.0
"""Divisor of all measured sizes of products on TPUs that are above it."""
_UNALIGNED_WIDENING = 0.4
"""Widening of the interval of other products on TPUs, on both sides [log time]; their times are unchanged."""


def widening_of_layout(ops: Operations, device: Device) -> FloatArray:
    """Return the number [log time] by which both ends of the interval of products on tiled memories move
    outwards, shape ``(ops,)``. 0 for other operations and devices.

    All measured sizes of a TPU above 16 are multiples of 16. The compiler masks the last tile of others and
    may choose another layout and other blocks, which no row shows: blind errors of such products were 0.31.
    """
    if not machine_of(device, "matmul", "").tiles:
        return np.zeros(len(ops))
    is_product = np.isin(ops.kind.row, [row for row, kind in enumerate(ops.kind.names) if kind == "matmul"])
    sizes = np.stack([ops.dim(name) for name in ("m", "n", "k")])
    with np.errstate(invalid="ignore"):
        unaligned = ((sizes > _ALIGNED) & (sizes % _ALIGNED != 0)).any(axis=0)
    return np.where(is_product & unaligned, _UNALIGNED_WIDENING, 0.0)


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


@dataclass(frozen=True, slots=True, eq=False)
class TreeColumns:
    """Inputs of trees by name, each of shape ``(ops,)``, and the data-sheet times ``sheet_ns`` [ns] that
    belong to them.
    """

    by_name: Mapping[str, NDArray[np.float32]]
    sheet_ns: FloatArray

    def is_complete(self, names: Sequence[str]) -> BoolArray:
        """Return a mask of the operations for which all columns ``names`` and the data-sheet time are
        known.
        """
        complete = np.isfinite(self.sheet_ns)
        for name in names:
            complete &= np.isfinite(self.by_name[name])
        return complete

    def matrix(self, names: Sequence[str]) -> NDArray[np.float32]:
        """Return the columns ``names``, shape ``(ops, names)``."""
        return np.stack([self.by_name[name] for name in names], axis=1)

    def take(self, rows: IntArray) -> TreeColumns:
        """Return the columns of some operations."""
        return TreeColumns({name: column[rows] for name, column in self.by_name.items()}, self.sheet_ns[rows])


def tree_columns(card: Card, ops: Operations, device: Device) -> TreeColumns:
    """Return the inputs of the trees of a model for operations on a device, with the codes of its card."""
    features = features_of(card.family, ops, device, overhead_ns=card.overhead_ns)
    codes = code_columns(card.codes, {"variant": ops.variant, "scheme": ops.scheme, "op": ops.op})
    columns = dict(zip(features.names, features.columns.T, strict=True))
    columns |= {name: column.astype(np.float32) for name, column in codes.items()}
    return TreeColumns(columns, features.base_ns)


def octaves_outside(model: LearnedModel, ops: Operations) -> FloatArray:
    """Return by how many octaves each operation is outside of the fitted sizes of a model: beyond the range
    of a size, or farther than usual from each combination of sizes.
    """
    apart = distances(model.octaves, octaves_of(model.card.support, ops)) - FREE_OCTAVES
    return np.maximum(octaves_beyond(model.card.reach, ops), np.maximum(apart, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceTimes:
    """Prediction for a device without measurements: the log of the time [ns], and the standard deviation of
    this log over its reference devices. Both have shape ``(ops,)``.
    """

    log_ns: FloatArray
    spread: FloatArray


def references_of(
    card: Card, cell: Cell, device: Device, without: Collection[str] = ()
) -> ReferenceDevices | None:
    """Return the devices from which ``device`` is predicted, for the operations of a cell of a model; None if
    none is of the same kind of device. Devices in ``without`` are not used.

    This is the only rule for reference devices: of estimates, of suggested shapes, and of models adapted to a
    device. Every device with rows of the same kind, operation and number format may be one. It is predicted
    in the variant of ``cell``, else in another version of it, else in the variant with the most rows. The
    card of a model adapted to ``device`` has the forms of these devices only, as bases.
    """
    codes = card.codes.get("variant", {})
    code = codes.get(cell.variant)  # versions of a variant have one code
    fitted = card.devices
    measured = [(other.kind, other.op, other.scheme, other.variant, other.rows) for other in card.cells]
    if card.adapts and device.name in cell.rows:
        fitted = card.references
        measured = [
            (base.kind, base.op, base.scheme, base.variant, {base.hardware: 0}) for base in card.bases
        ]
    alike = [row[3:] for row in measured if row[:3] == (cell.kind, cell.op, cell.scheme)]
    alike.sort(key=lambda row: (row[0] == cell.variant, codes.get(row[0]) == code, sum(row[1].values())))
    variants = {name: variant for variant, rows in alike for name in rows if name not in without}
    others = [name for name, variant in variants.items() if codes.get(variant) != code]
    nearest = nearest_devices(device, fitted, variants, cell.kind, cell.scheme, other_library=others)
    return nearest and nearest._replace(variants=tuple(variants[name] for name in nearest.names))


def reference_times(
    model: LearnedModel,
    references: ReferenceDevices,
    ops: Operations,
    device: Device,
    *,
    as_timed: bool = True,
) -> ReferenceTimes:
    """Return the times of operations on a device without measurements, from the times of its reference
    devices. NaN where a size or a rate is unknown.

    The time of a reference device is predicted by the model and scaled by the ratio of two times of its
    fitted form: at the rates of ``device``, and at its own. The correction by the trees counts less if the
    devices are farther apart (:data:`_CARRIED_PER_DISTANCE`, :data:`_MOST_CARRIED`). The result is the
    weighted geometric mean over the reference devices. ``as_timed``: see :meth:`BaseIndex.log_times`. O(ops x
    references x trees).
    """
    card, index = model.card, BaseIndex(model.card.bases, model.card.forms)
    name = "transfer" if card.adapts else "main"
    names = card.transfer_columns if card.adapts else card.columns
    share = shares_of_trees(card.reach, ops, octaves_outside(model, ops))
    new_sheet_ns = tree_columns(card, ops, device).sheet_ns
    excess_ns = 0.0  # launches of another host's fit count only as much as a launch that no host times
    if not as_timed and any(timed_with_events(variant) for variant in ops.variant.used()):
        excess_ns = max(card.overhead_ns - MOST_START_NS, 0.0)
    logs = np.full((len(references.names), len(ops)), np.nan)
    as_measured = ops
    for number, reference in enumerate(references.names):
        if references.variants:
            ops = replace(as_measured, variant=Labels.constant(references.variants[number], len(ops)))
        form_log, _ = index.log_times(ops, device, [reference], as_timed=as_timed)
        with np.errstate(divide="ignore", invalid="ignore"):
            logs[number] = np.where(np.isnan(form_log), np.log(new_sheet_ns - excess_ns), form_log)
        other = measured_device(reference)
        if other is None:
            continue
        table = tree_columns(card, ops, other)
        rows = np.flatnonzero(table.is_complete(names))
        if not len(rows):
            continue
        part, table = ops.take(rows), table.take(rows)
        own_log, ends = index.log_times(part, other, [reference])
        base_ns = combined_ns(own_log, table.sheet_ns, card.form_share)
        own_log = np.where(np.isnan(own_log), np.log(table.sheet_ns), own_log)
        trees = model.forests[name].predict(table.matrix(names))
        ends = np.nan_to_num(ends)
        time_log = np.log(base_ns) + ends + (trees - ends) * share[rows]
        apart = device_distance(device, other, ops.kind[0], ops.scheme[0])
        carried = (time_log - own_log) / (1 + _CARRIED_PER_DISTANCE * apart)
        most = max(_LEAST_CARRIED, _MOST_CARRIED / max(apart, 0.1) ** 2)
        logs[number, rows] += np.clip(carried, -most, most)
    weight = np.array(references.weights)
    middle = weight @ logs
    return ReferenceTimes(middle, np.sqrt(weight @ (logs - middle) ** 2))


def expected_deviation(references: ReferenceDevices, spread: FloatArray | float = 0.0) -> FloatArray:
    """Return the expected deviation [log time] of predictions for a device without measurements. Intervals
    are multiples of it (:class:`~hespas.estimators.learned.serialization.NewDeviceInterval`).

    It grows with the distance of the reference devices, with the share of them that have another memory, and
    with the standard deviation of their predictions, ``spread``.
    """
    far = min(references.distance, _FARTHEST) ** _DISTANCE_POWER
    least, per_distance, per_spread, of_memory = _DEVIATIONS
    least += per_distance * far + of_memory * references.other_memory
    return np.asarray(least + per_spread * spread)
