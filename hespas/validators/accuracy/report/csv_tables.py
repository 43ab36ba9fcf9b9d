"""CSV files of a comparison: all cases with their predictions, and the speed-ups between devices."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from math import isnan

import numpy as np

from hespas.estimators.interface import CasePrediction
from hespas.files.documents import escape_cell
from hespas.fitting.statistics import relative_error
from hespas.graph.columns import FloatArray
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.summaries import speed_up_rows

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
"""Header of the cases. ``tflops_per_s`` is measured, of useful FLOPs; ``share_of_roof`` is the time of the
data sheet alone (``datasheet-roofline``) relative to the measured time. ``instructions`` and ``operations``
are JSON lists of the parts of the case.
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
"""Header of the speed-ups; a speed-up is the time on ``hardware`` divided by the time on ``other``."""


def accuracy_csv(result: Accuracy) -> str:
    """Return all cases of all sources, once per estimator and baseline; an unknown figure is an empty field.

    Figures are exact (the shortest text that reads back as the same number). Names are unchanged, except that
    texts that a spreadsheet would calculate get an apostrophe in front, and that unpaired surrogates, which a
    file cannot contain, are written as ``\\ud800``.
    """

    def rows() -> Iterator[Iterable[object]]:
        yield CSV_COLUMNS
        for cases in result.cases:
            unknown = np.full(len(cases), np.nan)
            nothing = CasePrediction(estimator="", duration_ns=unknown, low_ns=unknown, high_ns=unknown)
            for prediction in cases.predictions or (nothing,):
                yield from _case_rows(cases, prediction)

    return _csv_text(rows())


def _case_rows(cases: Cases, prediction: CasePrediction) -> Iterator[tuple[object, ...]]:
    """Yield one row per case with one prediction."""

    def figures(column: FloatArray) -> list[float | str]:
        return ["" if isnan(value) else value for value in column.tolist()]

    def ratio(numerator: FloatArray) -> list[float | str]:
        quotient = np.full(len(cases), np.nan)
        np.divide(numerator, cases.measured_ns, out=quotient, where=cases.measured_ns > 0)
        return figures(quotient)

    shapes: list[int] = cases.shape.tolist()
    classes: list[int] = cases.op_class.tolist()
    useful = cases.flops if cases.useful_flops is None else cases.useful_flops
    roof = cases.prediction(BASELINES[0])
    members: list[tuple[object, str, str]] = [
        (
            row.events,
            json.dumps(row.instructions, ensure_ascii=False),
            json.dumps(row.operations, ensure_ascii=False),
        )
        for row in cases.members
    ]
    return zip(
        repeat(cases.source),
        repeat(cases.hardware),
        cases.labels,
        [cases.shapes[row] for row in shapes],
        [cases.classes[code] for code in classes],
        figures(cases.measured_ns),
        figures(cases.spread_ns),
        cases.repeats.tolist(),
        cases.dtypes or repeat(""),
        figures(cases.flops),
        figures(useful),
        figures(cases.bytes_moved),
        ratio(useful / 1e3),
        repeat("") if roof is None else ratio(roof.duration_ns),
        repeat(prediction.estimator),
        figures(prediction.duration_ns),
        figures(prediction.low_ns),
        figures(prediction.high_ns),
        figures(relative_error(prediction.duration_ns, cases.measured_ns)),
        *(zip(*members, strict=True) if members else repeat(repeat(""), 3)),
        strict=False,  # the repeated columns have no end
    )


def speed_up_csv(cases: Sequence[Cases]) -> str:
    """Return each shape that two devices measured, once per estimator that covers both.

    The text is empty if the devices share no shape.
    """
    rows: list[Iterable[object]] = []
    for row in speed_up_rows(cases):
        source, case = row.cases, row.case
        measured = row.measured_ns[0] / row.measured_ns[1]
        predicted = row.predicted_ns[0] / row.predicted_ns[1]
        rows.append(
            (
                source.labels[case],
                source.shapes[int(source.shape[case])],
                source.classes[int(source.op_class[case])],
                row.hardware,
                row.other,
                *row.measured_ns,
                measured,
                row.estimator,
                *row.predicted_ns,
                predicted,
                predicted / measured - 1,
            )
        )
    return _csv_text([SPEED_UP_COLUMNS, *rows]) if rows else ""


def _csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV, safe for spreadsheets and for files."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([escape_cell(cell) for cell in row] for row in rows)
    return out.getvalue().encode("utf-8", "backslashreplace").decode("utf-8")
