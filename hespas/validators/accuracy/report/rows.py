"""The comparison as CSV: one row per case and estimator."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from hespas.files.cells import inert_cell
from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.across import speed_up_rows
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases, Prediction
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.statistics import relative_error

__all__ = ["CSV_COLUMNS", "SPEED_UP_COLUMNS", "accuracy_csv", "speed_up_csv"]

CSV_COLUMNS = (
    "source",
    "hardware",
    "label",
    "shape",
    "op_class",
    "measured_ns",
    "spread_ns",
    "repeats",
    "dtype",
    "flops",
    "useful_flops",
    "bytes",
    "tflops_per_s",
    "share_of_roof",
    "estimator",
    "predicted_ns",
    "low_ns",
    "high_ns",
    "relative_error",
    "events",
    "instructions",
    "operations",
)
"""The header. ``tflops_per_s`` is what was measured, of useful FLOPs; ``share_of_roof`` is what the data
sheet alone would take (the baseline p0) of the time measured. ``instructions`` and ``operations`` are JSON
lists of what the case is made of.
"""

SPEED_UP_COLUMNS = (
    "label",
    "shape",
    "op_class",
    "hardware",
    "other",
    "measured_ns",
    "other_measured_ns",
    "speed_up",
    "estimator",
    "predicted_ns",
    "other_predicted_ns",
    "predicted_speed_up",
    "relative_error",
)
"""The header of the table across devices; a speed-up is the time on ``hardware`` by that on ``other``."""


def accuracy_csv(done: Accuracy) -> str:
    """Every case of every source, once per estimator and baseline; an unknown figure is an empty field.

    Figures are exact (the shortest text that reads back as the same number). Names stand as they are, except
    that an apostrophe stands before what a spreadsheet would calculate, and that unpaired surrogates, which
    no file can hold, are written ``\\ud800``.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for cases in done.cases:
        for said in cases.predictions or (_nobody(cases),):
            writer.writerows([inert_cell(cell) for cell in row] for row in _rows(cases, said))
    return out.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")


def _nobody(cases: Cases) -> Prediction:
    unknown = np.full(len(cases), np.nan)
    return Prediction(estimator="", duration_ns=unknown, low_ns=unknown, high_ns=unknown)


def _rows(cases: Cases, said: Prediction) -> Iterator[tuple[object, ...]]:
    shapes: list[int] = cases.shape.tolist()
    members = [(each.events, _listed(each.instructions), _listed(each.operations)) for each in cases.members]
    blank: list[tuple[object, object, object]] = [("", "", "")] * len(cases)
    told = tuple(zip(*(members or blank), strict=True)) or ((), (), ())
    classes: list[int] = cases.op_class.tolist()
    useful = cases.flops if cases.useful_flops is None else cases.useful_flops
    return zip(
        repeat(cases.source),
        repeat(cases.hardware),
        cases.labels,
        [cases.shapes[row] for row in shapes],
        [cases.classes[code] for code in classes],
        _figures(cases.measured_ns),
        _figures(cases.spread_ns),
        cases.repeats.tolist(),
        cases.dtypes or repeat(""),
        _figures(cases.flops),
        _figures(useful),
        _figures(cases.bytes_moved),
        _figures(_ratio(useful / 1e3, cases.measured_ns)),
        _figures(_ratio(_roof_ns(cases), cases.measured_ns)),
        repeat(said.estimator),
        _figures(said.duration_ns),
        _figures(said.low_ns),
        _figures(said.high_ns),
        _figures(relative_error(said.duration_ns, cases.measured_ns)),
        *told,
        strict=False,  # the repeated columns have no end
    )


def _roof_ns(cases: Cases) -> FloatArray:
    """What the data sheet alone would take; NaN where nothing says."""
    roof = next((said.duration_ns for said in cases.predictions if said.estimator == BASELINES[0]), None)
    return np.full(len(cases), np.nan) if roof is None else roof


def _ratio(one: FloatArray, other: FloatArray) -> FloatArray:
    """NaN where either is unknown or nothing was measured."""
    found = np.full(len(one), np.nan)
    np.divide(one, other, out=found, where=other > 0)
    return found


def speed_up_csv(cases: Sequence[Cases]) -> str:
    """The table across devices: each shape that two of them measured, once per estimator that speaks of both;
    empty where they share none.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for number, row in enumerate(speed_up_rows(cases)):
        if not number:
            writer.writerow(SPEED_UP_COLUMNS)
        at, place = row.cases, row.case
        measured, predicted = (
            row.measured_ns[0] / row.measured_ns[1],
            row.predicted_ns[0] / row.predicted_ns[1],
        )
        what = at.labels[place], at.shapes[int(at.shape[place])], at.classes[int(at.op_class[place])]
        cells = (
            *(*what, row.hardware, row.other, *row.measured_ns, measured),
            *(row.estimator, *row.predicted_ns, predicted, predicted / measured - 1),
        )
        writer.writerow([inert_cell(cell) for cell in cells])
    return out.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")


def _listed(names: tuple[str, ...]) -> str:
    return json.dumps(names, ensure_ascii=False)


def _figures(column: FloatArray | IntArray) -> list[float | str]:
    return ["" if value != value else value for value in column.tolist()]  # noqa: PLR0124 (NaN)
