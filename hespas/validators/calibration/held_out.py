"""Errors of fits on what they have not seen: other sizes, other operations of a kind, another device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from hespas.estimators.calibrated import Calibrated
from hespas.estimators.collectives import Collectives
from hespas.estimators.measurements import Measurements
from hespas.estimators.operations import KINDS, Labels, Operations
from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, IntArray
from hespas.hardware import Device, Fit
from hespas.validators.accuracy.cases import Cases, Prediction
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.summaries import contributions, noise_of, summaries
from hespas.validators.accuracy.table_cases import TableClasses, cases_of_rows, prediction_of_rows

__all__ = [
    "TESTS",
    "Fitter",
    "HeldOut",
    "Tested",
    "compared",
    "device_left_out",
    "has_sizes_to_leave_out",
    "merged",
    "operations_left_out",
    "recordings_left_out",
    "sizes_left_out",
]

TESTS: Mapping[str, str] = {
    "shape": "a fifth of the sizes, whatever the operation's format, entered no fit",
    "op": "each operation predicted by a fit of the other operations of its kind",
    "recording": "each recorded program predicted by fits of the others",
    "hardware": "the device predicted by fits of each other device: the middle one of their predictions",
}
"""What may be left out, and what that means."""

_PART = 5

Fitter = Callable[[Sequence[Measurements], Device, str], tuple[Fit, ...]]
"""Fits of some rows on a device; the text says what for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a test found: ``roofline`` is before, ``calibrated`` after. ``count`` rows were predicted, by fits
    on ``fitted`` others.
    """

    by: str
    count: int
    fitted: int
    accuracy: Accuracy


@dataclass(frozen=True, slots=True, eq=False)
class Tested:
    """Rows of one table, with what fits that have not seen them say."""

    rows: Measurements
    said: Prediction


def sizes_left_out(
    tables: Sequence[Measurements], device: Device, seed: int, fit: Fitter
) -> tuple[list[Tested], int]:
    """Rows of a fifth of the sizes, predicted by a fit of the others; and how many those were."""
    is_test = _drawn_sizes(tables, seed)
    seen = [table.take(np.flatnonzero(~mine)) for table, mine in zip(tables, is_test, strict=True)]
    seen = [table for table in seen if len(table)]
    if not seen:
        return [], 0
    fits = fit(seen, device, "sizes left out")
    rows = [table.take(np.flatnonzero(mine)) for table, mine in zip(tables, is_test, strict=True)]
    tested = [Tested(each, _said(each.ops, device, fits)) for each in rows if len(each)]
    return tested, sum(map(len, seen))


def has_sizes_to_leave_out(tables: Sequence[Measurements]) -> bool:
    """Whether the rows are of sizes enough for a test by shape."""
    return any(mine.any() for mine in _drawn_sizes(tables, 0))


def _drawn_sizes(tables: Sequence[Measurements], seed: int) -> list[BoolArray]:
    """Which rows are of the sizes left out: the same sizes in every table, format and order of rows."""
    texts: list[list[str]] = []
    places: list[IntArray] = []
    for table in tables:
        _, first, place = np.unique(table.shape_group(), return_index=True, return_inverse=True)
        texts.append(_size_texts(table.ops.take(first.astype(np.int64))))
        places.append(place.reshape(-1).astype(np.int64))
    every = sorted(
        {text for each in texts for text in each}, key=lambda text: (crc32(f"{seed} {text}".encode()), text)
    )
    chosen = set(every[: len(every) // _PART])
    return [
        np.array([text in chosen for text in each], np.bool_)[place]
        for each, place in zip(texts, places, strict=True)
    ]


def _size_texts(ops: Operations) -> list[str]:
    """Kind and sizes of each operation: what has the same, whatever is computed, is left out together."""
    kinds = [ops.kind[row] for row in range(len(ops))]
    columns: dict[str, list[float]] = {name: column.tolist() for name, column in ops.dims.items()}
    return [
        f"{kind} {[columns[dim][row] for dim in KINDS[kind] if dim in columns]}"
        for row, kind in enumerate(kinds)
    ]


def recordings_left_out(
    tables: Sequence[Measurements], device: Device, fit: Fitter
) -> tuple[list[Tested], int]:
    """Each recording, predicted by the device's fits once the other recordings have entered them."""
    tested: list[Tested] = []
    entered = 0
    for table in tables:
        others = [each for each in tables if each is not table]
        if table.recorded:
            fits = fit(others, device, f"without {table.name}")
            tested.append(Tested(table, _said(table.ops, device, merged(fits, device.fits))))
            entered += sum(map(len, others))
    return tested, entered


def merged(fits: Sequence[Fit], before: Sequence[Fit]) -> tuple[Fit, ...]:
    """The new fits, then earlier ones of other classes; the new are what runs where no variant is named."""
    new = {fit.key for fit in fits}
    replaced = {(fit.kind, fit.op, fit.scheme) for fit in fits}
    kept = (fit for fit in before if fit.key not in new)
    return (
        *fits,
        *(
            replace(fit, default=fit.default and (fit.kind, fit.op, fit.scheme) not in replaced)
            for fit in kept
        ),
    )


def operations_left_out(
    tables: Sequence[Measurements], device: Device, fit: Fitter
) -> tuple[list[Tested], int]:
    """Each operation of the kinds that have several, predicted by a fit of the others as if all were one."""
    tested: list[Tested] = []
    entered = 0
    for table in tables:
        for kind in table.ops.kind.used():
            rows = table.take(table.ops.kind.where(kind))
            names = rows.ops.op.used()
            for name in names if len(names) > 1 else ():
                seen, unseen = (_as_one(part) for part in _parted(rows, name))
                fits = fit([seen], device, f"without {name}")
                said = _said(unseen.ops, device, fits)
                entered += len(seen)
                if bool(np.isfinite(said.duration_ns).any()):
                    tested.append(Tested(rows.take(rows.ops.op.where(name)), said))
    return tested, entered


def _parted(rows: Measurements, name: str) -> tuple[Measurements, Measurements]:
    """Rows of all operations but one, and of that one."""
    mine = rows.ops.op.where(name)
    return rows.take(np.setdiff1d(np.arange(len(rows)), mine)), rows.take(mine)


def _as_one(rows: Measurements) -> Measurements:
    return replace(rows, ops=replace(rows.ops, op=Labels.constant("", len(rows))))


def device_left_out(
    tables: Sequence[Measurements],
    others: tuple[Mapping[str, Sequence[Measurements]], Mapping[str, Device]],
    device: Device,
    fit: Fitter,
) -> tuple[list[Tested], int]:
    """The rows of ``device`` in ``tables``, predicted by the fits of each other device on the data sheet of
    this one; the middle of what they say, and the widest of their intervals. ``others`` are tables and files
    by device.
    """
    by_device, devices = others
    fits = {name: fit(rows, devices[name], f"on {name}") for name, rows in by_device.items()}
    tested: list[Tested] = []
    for table in tables:
        said = [_said(_with_known_variants(table.ops, each), device, each) for each in fits.values()]
        if said:
            tested.append(Tested(table, _middle(said)))
    return tested, sum(len(rows) for each in by_device.values() for rows in each)


def _with_known_variants(ops: Operations, fits: Sequence[Fit]) -> Operations:
    """Variants that a device's fits have not are left open: what it usually runs speaks for them."""
    known = {fit.variant for fit in fits}
    names = tuple(name if name in known else "" for name in ops.variant.names)
    return replace(ops, variant=Labels(ops.variant.row, names))


def _middle(said: Sequence[Prediction]) -> Prediction:
    durations = np.stack([each.duration_ns for each in said])
    known = ~np.isnan(durations).all(axis=0)
    middle, low, high = (np.full(durations.shape[1], np.nan) for _ in range(3))
    with np.errstate(invalid="ignore"):
        middle[known] = np.exp(np.nanmedian(np.log(durations[:, known]), axis=0))
        low[known] = np.fmin.reduce([each.low_ns[known] for each in said])
        high[known] = np.fmax.reduce([each.high_ns[known] for each in said])
    return Prediction(estimator="calibrated", duration_ns=middle, low_ns=low, high_ns=high)


def _said(ops: Operations, device: Device, fits: tuple[Fit, ...]) -> Prediction:
    """What the fits say of operations, and of collectives, for which a model of their own speaks."""
    fitted = replace(device, own_fits=fits, fits_of="")
    said = prediction_of_rows(Calibrated(), ops, fitted, Diagnostics())
    rows = ops.kind.where("collective")
    if not len(rows):
        return said
    other = prediction_of_rows(Collectives(), ops.take(rows), fitted, Diagnostics())
    columns = [said.duration_ns.copy(), said.low_ns.copy(), said.high_ns.copy()]
    for column, mine in zip(columns, (other.duration_ns, other.low_ns, other.high_ns), strict=True):
        column[rows] = mine
    return Prediction(estimator=said.estimator, duration_ns=columns[0], low_ns=columns[1], high_ns=columns[2])


def compared(by: str, tested: tuple[Sequence[Tested], int], device: Device, inputs: Sequence[str]) -> HeldOut:
    """The figures of a test: the roofline of the hardware file before, the fit after."""
    parts, entered = tested
    classes = TableClasses.of([each.rows for each in parts])
    cases = [_cases(each, device, classes) for each in parts]
    return HeldOut(
        by=by,
        count=sum(map(len, cases)),
        fitted=entered,
        accuracy=Accuracy(
            inputs=tuple(inputs),
            estimators=("roofline", "calibrated"),
            cases=tuple(cases),
            summary=tuple(summaries(cases)),
            end_to_end=(),
            contributions=tuple(row for each in cases for row in contributions(each)),
            speed_ups=(),
            trends=(),
            noise={device.name: noise_of(cases, device.name)},
            coverage={},
            lint=(),
            diagnostics=Diagnostics(),
        ),
    )


def _cases(tested: Tested, device: Device, classes: TableClasses) -> Cases:
    before = prediction_of_rows(Roofline(), tested.rows.ops, replace(device, efficiencies=()), Diagnostics())
    cases = cases_of_rows(tested.rows, device, classes)
    return cases.with_predictions((before, replace(tested.said, estimator="calibrated")))
