"""Errors of fits on held-out rows: other sizes, other operations of a kind, another recording, another
device.

An approach is an estimator's way to fit rows and to predict others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from zlib import crc32

import numpy as np

from hespas.estimators.interface import CasePrediction, prediction_of_rows
from hespas.estimators.roofline import Roofline
from hespas.fitting.approaches import Approach, OtherDevices
from hespas.fitting.statistics import ShapeGroups
from hespas.graph import Diagnostics
from hespas.graph.columns import IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, named_device
from hespas.measurements import Measurements
from hespas.measurements.model import rows_on
from hespas.operations import KINDS, Labels, Operations
from hespas.validators.accuracy.cases import Cases, text_numbers
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.summaries import accuracy_of_cases
from hespas.validators.accuracy.tables import ShapeTexts, TableClasses, cases_of_rows

__all__ = [
    "TESTS",
    "HeldOutTest",
    "HeldOutTesting",
    "TestedRows",
    "compared",
    "device_left_out",
    "has_sizes_to_leave_out",
    "operations_left_out",
    "other_devices",
    "recordings_left_out",
    "sizes_left_out",
]

TESTS: Mapping[str, str] = {
    "shape": "a fifth of the sizes, of all formats of an operation, is held out",
    "op": "each operation is predicted by a fit to the other operations of its kind",
    "recording": "each recorded program is predicted by fits to the others",
    "hardware": "the device is predicted by fits of other devices: their median, or one common fit",
}
"""Held-out parts by name, with their description."""

_SHARE_PARTS = 5
"""One of so many sizes is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutTest:
    """Result of a test of a calibration on held-out rows: errors of the data-sheet roofline (before) and of
    the fits (after). ``count`` rows were predicted by fits to ``fitted`` other rows.
    """

    by: str
    count: int
    fitted: int
    accuracy: Accuracy


@dataclass(frozen=True, slots=True, eq=False)
class TestedRows:
    """Held-out rows of one table, with predictions by fits that did not use them, one per estimator."""

    rows: Measurements
    predictions: tuple[CasePrediction, ...]


def sizes_left_out(
    tables: Sequence[Measurements], device: Device, seed: int, approaches: Sequence[Approach]
) -> tuple[list[TestedRows], int]:
    """Predict the rows of a fifth of the sizes by fits to the rows of the other sizes. Also return the number
    of fitted rows.
    """
    # The sizes with the least checksums are held out, so that all tables, formats and orders of rows agree.
    parts = [_sizes_of(table) for table in tables]
    if not parts:
        is_held_out = []
    else:
        numbers = text_numbers([texts for texts, _ in parts])
        of_number = np.empty(max(int(number.max(initial=-1)) for number in numbers) + 1, np.uint32)
        for (texts, _), number in zip(parts, numbers, strict=True):
            checksums = (crc32(f"{seed} {text}".encode()) for text in texts)
            of_number[number] = np.fromiter(checksums, np.uint32, len(texts))
        count = len(of_number) // _SHARE_PARTS
        if not count:
            is_held_out = [np.zeros(len(table), np.bool_) for table in tables]
        else:
            last = np.partition(of_number, count - 1)[count - 1]
            is_chosen = of_number < last
            ties = np.flatnonzero(of_number == last)
            tied_texts = {
                int(number[row]): texts[row]
                for (texts, _), number in zip(parts, numbers, strict=True)
                for row in np.flatnonzero(np.isin(number, ties)).tolist()
            }
            order = sorted(tied_texts, key=lambda number: tied_texts[number])
            is_chosen[order[: count - int(is_chosen.sum())]] = True
            is_held_out = [
                is_chosen[number][index] for number, (_, index) in zip(numbers, parts, strict=True)
            ]
    pairs = list(zip(tables, is_held_out, strict=True))
    fitted = [part for table, mask in pairs if len(part := table.take(np.flatnonzero(~mask)))]
    if not fitted:
        return [], 0
    rows = [table.take(np.flatnonzero(mask)) for table, mask in pairs]
    return _predicted_rows(approaches, fitted, rows, device, "sizes held out"), sum(map(len, fitted))


def _predicted_rows(
    approaches: Sequence[Approach],
    fitted: Sequence[Measurements],
    held_out: Sequence[Measurements],
    device: Device,
    purpose: str,
    *,
    with_earlier: bool = False,
) -> list[TestedRows]:
    """Predict the rows of each table in ``held_out`` by fits to ``fitted``.

    ``with_earlier``: fits that the device already has are also used.
    """
    results = [(approach, approach.fit(fitted, device, purpose)) for approach in approaches]
    return [
        TestedRows(
            rows,
            tuple(
                approach.predict(rows.ops, device, result, with_earlier=with_earlier)
                for approach, result in results
            ),
        )
        for rows in held_out
        if len(rows)
    ]


def has_sizes_to_leave_out(tables: Sequence[Measurements]) -> bool:
    """Return True if the rows have enough sizes for a test by shape."""
    texts = set[str]()
    for text in chain.from_iterable(_sizes_of(table)[0] for table in tables):
        texts.add(text)
        if len(texts) >= _SHARE_PARTS:
            return True
    return False


def _sizes_of(table: Measurements) -> tuple[ShapeTexts, IntArray]:
    """Return the distinct kinds and sizes in a table as texts, and the index of each row's text.

    Rows with equal texts are held out together, even if their operations differ.
    """

    def spelled(ops: Operations) -> list[str]:
        columns: dict[str, list[float]] = {name: column.tolist() for name, column in ops.dims.items()}
        return [
            f"{kind} {[columns[dim][row] for dim in KINDS[kind] if dim in columns]}"
            for row, kind in enumerate(ops.kind)
        ]

    groups = ShapeGroups.of(table.shape_group())
    return ShapeTexts(table.ops, groups.firsts(), spelled), groups.index


def recordings_left_out(
    tables: Sequence[Measurements], device: Device, approaches: Sequence[Approach]
) -> tuple[list[TestedRows], int]:
    """Predict the rows of each recording by fits to the other recordings, together with the fits that the
    device already has. Also return the number of fitted rows.
    """
    tested: list[TestedRows] = []
    entered = 0
    for table in tables:
        others = [other for other in tables if other is not table]
        if table.recorded:
            tested += _predicted_rows(
                approaches, others, [table], device, f"without {table.name}", with_earlier=True
            )
            entered += sum(map(len, others))
    return tested, entered


def operations_left_out(
    tables: Sequence[Measurements], device: Device, approaches: Sequence[Approach]
) -> tuple[list[TestedRows], int]:
    """Predict each operation by a fit to the other operations of its kind, all taken together. Kinds with a
    single operation are skipped. Also return the number of fitted rows.
    """
    tested: list[TestedRows] = []
    entered = 0
    for table in tables:
        for kind in table.ops.kind.used():
            rows = table.take(table.ops.kind.where(kind))
            names = rows.ops.op.used()
            for name in names if len(names) > 1 else ():
                of_op = rows.ops.op.where(name)
                unnamed = replace(rows, ops=replace(rows.ops, op=Labels.constant("", len(rows))))
                fitted = unnamed.take(np.setdiff1d(np.arange(len(rows)), of_op))
                (test,) = _predicted_rows(
                    approaches, [fitted], [unnamed.take(of_op)], device, f"without {name}"
                )
                entered += len(fitted)
                if any(np.isfinite(prediction.duration_ns).any() for prediction in test.predictions):
                    tested.append(replace(test, rows=rows.take(of_op)))
    return tested, entered


def device_left_out(
    tables: Sequence[Measurements], others: OtherDevices, device: Device, approaches: Sequence[Approach]
) -> tuple[list[TestedRows], int]:
    """Predict the rows of ``device`` without its measurements, from rows of other devices and its data sheet
    (:meth:`Approach.carried`). Also return the number of rows of the other devices.
    """
    carried = [approach.carried(tables, others, device) for approach in approaches]
    tested = [
        TestedRows(table, tuple(predictions)) for table, *predictions in zip(tables, *carried, strict=True)
    ]
    return tested, sum(len(rows) for of_device in others.rows.values() for rows in of_device)


@dataclass(frozen=True, slots=True, eq=False)
class HeldOutTesting:
    """Inputs of the tests of a calibration: rows on the device, rows on other devices, and the approaches."""

    on_device: Sequence[Measurements]
    others: OtherDevices
    device: Device
    seed: int
    approaches: Sequence[Approach]

    def tested(self, by: str) -> tuple[list[TestedRows], int]:
        """Run the test ``by``. Return held-out rows with predictions, and the number of fitted rows."""
        if by == "shape":
            return sizes_left_out(self.on_device, self.device, self.seed, self.approaches)
        if by == "op":
            return operations_left_out(self.on_device, self.device, self.approaches)
        if by == "recording":
            return recordings_left_out(self.on_device, self.device, self.approaches)
        return device_left_out(self.on_device, self.others, self.device, self.approaches)

    def chosen(self, tests: Sequence[str] | None, diagnostics: Diagnostics) -> list[str]:
        """Return the names of the tests to run: the requested ones (None: by shape, if there are enough
        sizes).

        Raises ``UsageError`` for a test with no rows to hold out, before anything is fitted.
        """
        possible = {
            "shape": has_sizes_to_leave_out(self.on_device),
            "op": True,
            "recording": sum(table.recorded for table in self.on_device) > 1,
            "hardware": bool(self.others.rows),
        }
        if tests is None and not possible["shape"]:
            text = f"the fits are untested: {_IMPOSSIBLE['shape']}"
            diagnostics.warning("calibrate.untested", self.device.name, text)
            return []
        chosen = list(dict.fromkeys(("shape",) if tests is None else tests))
        for by in chosen:
            if by not in TESTS:
                raise UsageError(f"unknown `test_by={by}`", hint=f"choose one of {', '.join(TESTS)}")
            faults = [approach.fault(by, self.on_device, self.others) for approach in self.approaches]
            fault = next(filter(None, faults), "") if possible[by] else _IMPOSSIBLE[by]
            if fault:
                raise UsageError(f"`test_by={by}`: {fault}", hint="leave it out, or give more tables")
        return chosen


_IMPOSSIBLE: Mapping[str, str] = {
    "shape": "too few sizes to hold some out",
    "recording": "there is at most one recording",
    "hardware": "no other device with a hardware file in the tables",
}


def other_devices(tables: Sequence[Measurements], device: Device) -> OtherDevices:
    """Return rows and files of the devices other than ``device``; devices without a file are skipped."""
    rows: dict[str, list[Measurements]] = {}
    devices: dict[str, Device] = {}
    for table in tables:
        own = set(np.unique(table.hardware.row[rows_on(table, device)]).tolist())
        for number, name in enumerate(table.hardware.names):
            part = table.on(name) if number not in own and name else None
            if part is None or not len(part):
                continue
            try:
                devices.setdefault(name, named_device(name))
            except UsageError:
                continue
            rows.setdefault(name, []).append(part)
    return OtherDevices(rows, devices)


def compared(
    by: str,
    tested: tuple[Sequence[TestedRows], int],
    device: Device,
    inputs: Sequence[str],
    names: Sequence[str],
) -> HeldOutTest:
    """Return the result of a test: the errors of the data-sheet roofline (before), and of the estimators
    ``names`` (after).
    """
    parts, entered = tested
    classes = TableClasses.of([part.rows for part in parts])
    sheet = replace(device, efficiencies=())
    cases: list[Cases] = []
    for part in parts:
        before = prediction_of_rows(Roofline(), part.rows.ops, sheet, Diagnostics())
        after = (
            replace(prediction, estimator=name)
            for prediction, name in zip(part.predictions, names, strict=True)
        )
        cases.append(cases_of_rows(part.rows, device, classes).with_predictions((before, *after)))
    return HeldOutTest(
        by=by,
        count=sum(map(len, cases)),
        fitted=entered,
        accuracy=accuracy_of_cases(cases, inputs, ("roofline", *names), Diagnostics(), [device.name]),
    )
