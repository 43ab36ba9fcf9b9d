"""Errors of fits on what they have not seen: other sizes, other operations of a kind, another device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.roofline import Roofline
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, IntArray
from hespas.hardware import Device
from hespas.measurements import Measurements
from hespas.operations import KINDS, Labels, Operations
from hespas.validators.accuracy.cases import CasePrediction, Cases, text_numbers
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.statistics import ShapeGroups
from hespas.validators.accuracy.summaries import accuracy_of_cases
from hespas.validators.accuracy.tables import ShapeTexts, TableClasses, cases_of_rows, prediction_of_rows
from hespas.validators.calibration.approaches import Approach, Others

__all__ = [
    "TESTS",
    "HeldOut",
    "Tested",
    "compared",
    "device_left_out",
    "has_sizes_to_leave_out",
    "operations_left_out",
    "recordings_left_out",
    "sizes_left_out",
]

TESTS: Mapping[str, str] = {
    "shape": "a fifth of the sizes, whatever the operation's format, entered no fit",
    "op": "each operation predicted by a fit of the other operations of its kind",
    "recording": "each recorded program predicted by fits of the others",
    "hardware": "the device predicted by fits of others: the middle one, or one of all together",
}
"""What may be left out, and what that means."""

_PART = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What a test found: ``roofline`` is before, what was fitted after. ``count`` rows were predicted, by
    fits on ``fitted`` others.
    """

    by: str
    count: int
    fitted: int
    accuracy: Accuracy


@dataclass(frozen=True, slots=True, eq=False)
class Tested:
    """Rows of one table, with what fits that have not seen them say, one of each estimator."""

    rows: Measurements
    predictions: tuple[CasePrediction, ...]


def sizes_left_out(
    tables: Sequence[Measurements], device: Device, seed: int, approaches: Sequence[Approach]
) -> tuple[list[Tested], int]:
    """Rows of a fifth of the sizes, predicted by fits of the others; and how many those were."""
    is_test = _drawn_sizes(tables, seed)
    pairs = list(zip(tables, is_test, strict=True))
    seen = [part for table, mine in pairs if len(part := table.take(np.flatnonzero(~mine)))]
    if not seen:
        return [], 0
    rows = [table.take(np.flatnonzero(mine)) for table, mine in pairs]
    return _tested(approaches, seen, rows, device, "sizes left out"), sum(map(len, seen))


def _tested(
    approaches: Sequence[Approach],
    seen: Sequence[Measurements],
    unseen: Sequence[Measurements],
    device: Device,
    purpose: str,
    *,
    keeps: bool = False,
) -> list[Tested]:
    """The rows of each table of ``unseen``, predicted by fits of ``seen``; ``keeps``: and of those the device
    had before.
    """
    founds = [(each, each.fit(seen, device, purpose)) for each in approaches]
    return [
        Tested(rows, tuple(each.predict(rows.ops, device, found, keeps=keeps) for each, found in founds))
        for rows in unseen
        if len(rows)
    ]


def has_sizes_to_leave_out(tables: Sequence[Measurements]) -> bool:
    """Whether the rows are of sizes enough for a test by shape."""
    found: set[str] = set()
    for text in chain.from_iterable(_sizes_of(table)[0] for table in tables):
        found.add(text)
        if len(found) >= _PART:
            return True
    return False


def _drawn_sizes(tables: Sequence[Measurements], seed: int) -> list[BoolArray]:
    """Which rows are of the sizes left out: the same sizes in every table, format and order of rows. A fifth
    of all sizes: those whose texts have the least checksums, of equal ones the first by the alphabet.
    """
    parts = [_sizes_of(table) for table in tables]
    if not parts:
        return []
    numbers = text_numbers([texts for texts, _ in parts])
    checksums = [_checksums(texts, seed) for texts, _ in parts]
    of_number = np.empty(max(int(number.max(initial=-1)) for number in numbers) + 1, np.uint32)
    for number, checksum in zip(numbers, checksums, strict=True):
        of_number[number] = checksum
    count = len(of_number) // _PART
    if not count:
        return [np.zeros(len(table), np.bool_) for table in tables]
    last = np.partition(of_number, count - 1)[count - 1]
    is_chosen = of_number < last
    ties = np.flatnonzero(of_number == last)
    told = {
        int(number[row]): texts[row]
        for (texts, _), number in zip(parts, numbers, strict=True)
        for row in np.flatnonzero(np.isin(number, ties)).tolist()
    }
    is_chosen[sorted(told, key=lambda number: told[number])[: count - int(is_chosen.sum())]] = True
    return [is_chosen[number][place] for number, (_, place) in zip(numbers, parts, strict=True)]


def _checksums(texts: ShapeTexts, seed: int) -> NDArray[np.uint32]:
    found = (crc32(f"{seed} {text}".encode()) for text in texts)
    return np.fromiter(found, np.uint32, len(texts))


def _sizes_of(table: Measurements) -> tuple[ShapeTexts, IntArray]:
    """Kind and sizes of the shapes of a table, and the place of each row among them: what has the same,
    whatever is computed, is left out together.
    """
    groups = ShapeGroups.of(table.shape_group())
    return ShapeTexts(table.ops, groups.firsts(), _size_texts), groups.index


def _size_texts(ops: Operations) -> list[str]:
    kinds = list(ops.kind)
    columns: dict[str, list[float]] = {name: column.tolist() for name, column in ops.dims.items()}
    return [
        f"{kind} {[columns[dim][row] for dim in KINDS[kind] if dim in columns]}"
        for row, kind in enumerate(kinds)
    ]


def recordings_left_out(
    tables: Sequence[Measurements], device: Device, approaches: Sequence[Approach]
) -> tuple[list[Tested], int]:
    """Each recording, predicted by the device's fits once the other recordings have entered them."""
    tested: list[Tested] = []
    entered = 0
    for table in tables:
        others = [each for each in tables if each is not table]
        if table.recorded:
            tested += _tested(approaches, others, [table], device, f"without {table.name}", keeps=True)
            entered += sum(map(len, others))
    return tested, entered


def operations_left_out(
    tables: Sequence[Measurements], device: Device, approaches: Sequence[Approach]
) -> tuple[list[Tested], int]:
    """Each operation of the kinds that have several, predicted by fits of the others as if all were one."""
    tested: list[Tested] = []
    entered = 0
    for table in tables:
        for kind in table.ops.kind.used():
            rows = table.take(table.ops.kind.where(kind))
            names = rows.ops.op.used()
            for name in names if len(names) > 1 else ():
                mine = rows.ops.op.where(name)
                one = replace(rows, ops=replace(rows.ops, op=Labels.constant("", len(rows))))
                seen, unseen = one.take(np.setdiff1d(np.arange(len(rows)), mine)), one.take(mine)
                (found,) = _tested(approaches, [seen], [unseen], device, f"without {name}")
                entered += len(seen)
                if any(np.isfinite(each.duration_ns).any() for each in found.predictions):
                    tested.append(replace(found, rows=rows.take(mine)))
    return tested, entered


def device_left_out(
    tables: Sequence[Measurements], others: Others, device: Device, approaches: Sequence[Approach]
) -> tuple[list[Tested], int]:
    """The rows of ``device`` in ``tables``, predicted from rows of other devices on the data sheet of this
    one: see :meth:`Approach.carried`.
    """
    carried = [each.carried(tables, others, device) for each in approaches]
    tested = [Tested(table, tuple(predictions)) for table, *predictions in zip(tables, *carried, strict=True)]
    return tested, sum(len(rows) for each in others.rows.values() for rows in each)


def compared(
    by: str,
    tested: tuple[Sequence[Tested], int],
    device: Device,
    inputs: Sequence[str],
    names: Sequence[str],
) -> HeldOut:
    """The figures of a test: the roofline of the hardware file before, the fits of estimators ``names``
    after.
    """
    parts, entered = tested
    classes = TableClasses.of([each.rows for each in parts])
    cases = [_cases(each, device, classes, names) for each in parts]
    return HeldOut(
        by=by,
        count=sum(map(len, cases)),
        fitted=entered,
        accuracy=accuracy_of_cases(cases, inputs, ("roofline", *names), Diagnostics(), [device.name]),
    )


def _cases(tested: Tested, device: Device, classes: TableClasses, names: Sequence[str]) -> Cases:
    before = prediction_of_rows(Roofline(), tested.rows.ops, replace(device, efficiencies=()), Diagnostics())
    cases = cases_of_rows(tested.rows, device, classes)
    after = (
        replace(prediction, estimator=name)
        for prediction, name in zip(tested.predictions, names, strict=True)
    )
    return cases.with_predictions((before, *after))
