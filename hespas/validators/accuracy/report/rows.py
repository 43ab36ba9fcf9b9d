"""The comparison as CSV: one row per case and estimator."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import repeat

import numpy as np

from hespas.files.cells import inert_cell
from hespas.graph.columns import FloatArray, IntArray
from hespas.validators.accuracy.cases import Cases, Prediction
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.statistics import relative_error

__all__ = ["CSV_COLUMNS", "accuracy_csv"]

CSV_COLUMNS = (
    "source",
    "hardware",
    "label",
    "shape",
    "op_class",
    "measured_ns",
    "spread_ns",
    "repeats",
    "flops",
    "bytes",
    "estimator",
    "predicted_ns",
    "low_ns",
    "high_ns",
    "relative_error",
    "events",
    "instructions",
    "operations",
)
"""The header. ``instructions`` and ``operations`` are JSON lists of what the case is made of."""


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
    return zip(
        repeat(cases.source),
        repeat(cases.hardware),
        cases.labels,
        [cases.shapes[row] for row in shapes],
        [cases.classes[code] for code in classes],
        _figures(cases.measured_ns),
        _figures(cases.spread_ns),
        cases.repeats.tolist(),
        _figures(cases.flops),
        _figures(cases.bytes_moved),
        repeat(said.estimator),
        _figures(said.duration_ns),
        _figures(said.low_ns),
        _figures(said.high_ns),
        _figures(relative_error(said.duration_ns, cases.measured_ns)),
        *told,
        strict=False,  # the repeated columns have no end
    )


def _listed(names: tuple[str, ...]) -> str:
    return json.dumps(names, ensure_ascii=False)


def _figures(column: FloatArray | IntArray) -> list[float | str]:
    return ["" if value != value else value for value in column.tolist()]  # noqa: PLR0124 (NaN)
