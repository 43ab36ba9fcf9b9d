"""What the figures and the sortable table of the page show, as plain columns that its script draws.

Figures are rounded to five digits, names are stored once. What is left out to keep the page small is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.names import Names
from hespas.validators.accuracy.report.texts import shown
from hespas.validators.accuracy.result import Accuracy
from hespas.validators.accuracy.statistics import relative_error

__all__ = [
    "MOST_POINTS",
    "Column",
    "Curve",
    "Points",
    "ShapeRows",
    "class_names",
    "curves_of",
    "figures",
    "points_of",
    "shape_rows_of",
]

MOST_POINTS = 5_000
"""Cases shown as points, and rows of the table."""

_QUANTILES = 60
_ALWAYS = MOST_POINTS // 5

Column = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Cases, thinned to :data:`MOST_POINTS` of ``of``; ``predicted`` has one column per estimator."""

    of: int
    source: list[int]
    op_class: list[int]
    label: list[int]
    shape: list[int]
    measured_ns: Column
    flops: Column
    bytes_moved: Column
    predicted_ns: list[Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRows:
    """Cases of one source and shape as one row, the longest of ``of``; times are means of ``count`` cases."""

    of: int
    source: list[int]
    op_class: list[int]
    label: list[int]
    shape: list[int]
    count: list[int]
    measured_ns: Column
    share: Column
    predicted_ns: list[Column]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Quantiles of the absolute relative error, evenly spaced from the least to the largest of ``n``."""

    hardware: str
    estimator: int
    op_class: int
    n: int
    quantiles: Column


def figures(values: FloatArray) -> Column:
    """Numbers with five digits; None where unknown or infinite."""
    numbers: list[float] = values.tolist()
    return [float(f"{value:.5g}") if isfinite(value) else None for value in numbers]


def _said(cases: Cases, estimator: str) -> FloatArray:
    found = (said.duration_ns for said in cases.predictions if said.estimator == estimator)
    return next(found, np.full(len(cases), nan))


def points_of(done: Accuracy, estimators: Sequence[str], names: Names) -> Points:
    """The cases as points. O(cases log cases).

    Where there are too many, those that miss most time are kept, and of the rest an even choice over source,
    class and measured time: the same in every run.
    """
    source = np.repeat(np.arange(len(done.cases)), [len(each) for each in done.cases])
    row = np.concatenate([np.arange(len(each)) for each in done.cases] or [np.empty(0, np.int64)])
    measured = _joined([each.measured_ns for each in done.cases])
    op_class = _joined([each.op_class for each in done.cases]).astype(np.int64)
    predicted = [_joined([_said(each, name) for each in done.cases]) for name in estimators]
    chosen = np.arange(len(row))
    if len(row) > MOST_POINTS:
        chosen = _thinned(predicted, measured, (measured, op_class, source))
    parts: list[int] = source[chosen].tolist()
    rows: list[int] = row[chosen].tolist()
    pairs = list(zip(parts, rows, strict=True))
    return Points(
        of=len(row),
        source=parts,
        op_class=op_class[chosen].tolist(),
        label=[names.row(done.cases[part].labels[at]) for part, at in pairs],
        shape=[names.row(done.cases[part].shapes[int(done.cases[part].shape[at])]) for part, at in pairs],
        measured_ns=figures(measured[chosen]),
        flops=figures(_joined([each.flops for each in done.cases])[chosen]),
        bytes_moved=figures(_joined([each.bytes_moved for each in done.cases])[chosen]),
        predicted_ns=[figures(column[chosen]) for column in predicted],
    )


def _joined(columns: Sequence[FloatArray | NDArray[np.int8] | SmallIntArray]) -> FloatArray:
    return np.concatenate([np.asarray(column, np.float64) for column in columns] or [np.empty(0)])


def _thinned(
    predicted: Sequence[FloatArray], measured: FloatArray, keys: tuple[FloatArray | IntArray, ...]
) -> IntArray:
    missed = np.nan_to_num(np.abs((predicted[0] if predicted else measured) - measured))
    largest = np.argsort(-missed, kind="stable")[:_ALWAYS]
    rest = np.lexsort(keys)
    rest = rest[~np.isin(rest, largest)]
    even = rest[np.linspace(0, len(rest) - 1, MOST_POINTS - _ALWAYS).astype(np.int64)]
    return np.sort(np.concatenate((largest, even)))


def shape_rows_of(done: Accuracy, estimators: Sequence[str], names: Names) -> ShapeRows:
    """Every source's shapes, those with most measured time first. O(cases log cases)."""
    tables = [_by_shape(each, estimators) for each in done.cases]
    source = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    everything = np.concatenate(tables) if tables else np.empty((0, 6 + len(estimators)))
    order = np.argsort(-everything[:, 3], kind="stable")[:MOST_POINTS]
    rows = everything[order]
    parts: list[int] = source[order].tolist()
    first: list[int] = rows[:, 0].astype(np.int64).tolist()
    shape: list[int] = rows[:, 1].astype(np.int64).tolist()
    return ShapeRows(
        of=len(everything),
        source=parts,
        op_class=[int(done.cases[part].op_class[at]) for part, at in zip(parts, first, strict=True)],
        label=[names.row(done.cases[part].labels[at]) for part, at in zip(parts, first, strict=True)],
        shape=[names.row(done.cases[part].shapes[at]) for part, at in zip(parts, shape, strict=True)],
        count=rows[:, 2].astype(np.int64).tolist(),
        measured_ns=figures(rows[:, 4]),
        share=figures(rows[:, 5]),
        predicted_ns=[figures(rows[:, 6 + number]) for number in range(len(estimators))],
    )


def _by_shape(cases: Cases, estimators: Sequence[str]) -> FloatArray:
    """Columns: first case, shape, count, total, mean, share of the source's time, mean of each prediction."""
    shape, first, place, counts = np.unique(
        cases.shape, return_index=True, return_inverse=True, return_counts=True
    )
    total = np.bincount(place, cases.measured_ns, len(shape))
    whole = float(total.sum())
    share = total / whole if whole else total * nan
    columns = [first, shape, counts, total, total / counts, share]
    # Where one of equal cases is not covered, their mean is not known.
    columns += [np.bincount(place, _said(cases, name), len(shape)) / counts for name in estimators]
    return np.stack([np.asarray(column, np.float64) for column in columns], axis=1)


def curves_of(done: Accuracy, estimators: Sequence[str]) -> Iterator[Curve]:
    """Error quantiles over all cases of each device: per estimator over all (class -1), then per class."""
    for hardware in dict.fromkeys(each.hardware for each in done.cases):
        group = [each for each in done.cases if each.hardware == hardware]
        measured = _joined([each.measured_ns for each in group])
        op_class = _joined([each.op_class for each in group]).astype(np.int64)
        for number, name in enumerate(estimators):
            error = np.abs(relative_error(_joined([_said(each, name) for each in group]), measured))
            for code in (-1, *np.unique(op_class).tolist()):
                known = error[~np.isnan(error) & ((op_class == code) | (code < 0))]
                if len(known):
                    yield Curve(
                        hardware=shown(hardware),
                        estimator=number,
                        op_class=code,
                        n=len(known),
                        quantiles=figures(_quantiles(known)),
                    )


def _quantiles(errors: FloatArray) -> FloatArray:
    """All errors where they are few, else evenly spaced ranks of them."""
    ordered = np.sort(errors)
    if len(ordered) <= _QUANTILES:
        return ordered
    return ordered[np.linspace(0, len(ordered) - 1, _QUANTILES).astype(np.int64)]


def class_names(done: Accuracy) -> list[str]:
    """Names of the classes by code."""
    return [shown(name) for name in done.cases[0].classes] if done.cases else []
