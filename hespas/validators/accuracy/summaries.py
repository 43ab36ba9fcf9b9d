"""Summaries of cases: over all, per class, per size; and what each shape adds to the whole error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hespas.graph import OpClass
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.validators.accuracy.cases import Cases, shared_shapes
from hespas.validators.accuracy.fitting import kendall_tau, slope_of
from hespas.validators.accuracy.result import Contribution, EndToEnd, SummaryRow, Trend
from hespas.validators.accuracy.statistics import errors_of, unique_shapes

__all__ = ["SIZES", "contributions", "summaries", "trends"]

SIZES: tuple[tuple[str, float, float], ...] = (
    ("< 1 us", 0.0, 1e3),
    ("1-10 us", 1e3, 1e4),
    ("10-100 us", 1e4, 1e5),
    ("0.1-1 ms", 1e5, 1e6),
    ("1-10 ms", 1e6, 1e7),
    ("> 10 ms", 1e7, np.inf),
)
"""Buckets of measured time: name, from, below."""

_LISTED = 20
_BASES = ("span", "sum of operations")


def summaries(cases: Sequence[Cases]) -> Iterator[SummaryRow]:
    """Rows per device and estimator, at both levels: all, then classes by time, then sizes."""
    by_device: dict[str, list[Cases]] = {}
    for each in cases:
        by_device.setdefault(each.hardware, []).append(each)
    for hardware, group in by_device.items():
        measured = np.concatenate([each.measured_ns for each in group])
        op_class = np.concatenate([each.op_class for each in group])
        shape = shared_shapes(group)
        for name in _estimators(group):
            predicted = np.concatenate([_said(each, name) for each in group])
            yield from _rows(name, hardware, (predicted, measured, op_class, shape))


def _estimators(cases: Sequence[Cases]) -> list[str]:
    return list(dict.fromkeys(said.estimator for each in cases for said in each.predictions))


def _said(cases: Cases, estimator: str) -> FloatArray:
    found = (said.duration_ns for said in cases.predictions if said.estimator == estimator)
    return next(found, np.full(len(cases), np.nan))


def _rows(
    name: str,
    hardware: str,
    columns: tuple[FloatArray, FloatArray, NDArray[np.int8], IntArray],
) -> Iterator[SummaryRow]:
    predicted, measured, op_class, shape = columns
    _, first = np.unique(shape, return_index=True)
    once = unique_shapes(predicted, measured, shape)
    for level, said, real, kind, number in (
        ("instance", predicted, measured, op_class, shape),
        ("shape", once[0], once[1], op_class[first], once[2]),
    ):
        for label, size, chosen in _parts(real, kind):
            yield SummaryRow(
                estimator=name,
                hardware=hardware,
                level=level,
                op_class=label,
                size=size,
                errors=errors_of(said[chosen], real[chosen], number[chosen]),
            )


def _parts(measured: FloatArray, op_class: NDArray[np.int8]) -> Iterator[tuple[str, str, BoolArray]]:
    yield "all", "all", np.ones(len(measured), np.bool_)
    times = np.bincount(op_class, measured, len(OpClass)) if len(measured) else np.zeros(len(OpClass))
    present = set(np.unique(op_class).tolist())
    for code in sorted(present, key=lambda code: -float(times[code])):
        yield OpClass(code).name.lower(), "all", op_class == code
    for size, low, high in SIZES:
        chosen = (measured >= low) & (measured < high)
        if chosen.any():
            yield "all", size, chosen


def contributions(cases: Cases) -> Iterator[Contribution]:
    """The shapes that add most to the error of one source, of each estimator; the largest first."""
    total = float(cases.measured_ns.sum())
    if not total:
        return
    _, first, counts = np.unique(cases.shape, return_index=True, return_counts=True)
    for said in cases.predictions:
        known = np.isfinite(said.duration_ns)
        predicted = np.bincount(cases.shape[known], said.duration_ns[known], len(cases.shapes))
        measured = np.bincount(cases.shape[known], cases.measured_ns[known], len(cases.shapes))
        order: list[int] = np.argsort(-np.abs(predicted - measured), kind="stable")[:_LISTED].tolist()
        place = {int(cases.shape[row]): number for number, row in enumerate(first.tolist())}
        for row in order:
            if row not in place or predicted[row] == measured[row]:
                continue
            lead = int(first[place[row]])
            yield Contribution(
                source=cases.source,
                hardware=cases.hardware,
                estimator=said.estimator,
                label=cases.labels[lead],
                shape=cases.shapes[row],
                op_class=OpClass(int(cases.op_class[lead])).name.lower(),
                count=int(counts[place[row]]),
                predicted_ns=float(predicted[row]),
                measured_ns=float(measured[row]),
                share=float((predicted[row] - measured[row]) / total),
            )


def trends(runs: Sequence[EndToEnd]) -> Iterator[Trend]:
    """Per device and estimator with at least three sources: does the estimate follow the measurement? By the
    span of steps where there are three, else by sums of operations.
    """
    groups: dict[tuple[str, str], dict[str, list[EndToEnd]]] = {}
    for run in runs:
        if run.predicted_ns > 0 and run.measured_ns > 0:
            found = groups.setdefault((run.estimator, run.hardware), {})
            found.setdefault(run.basis, []).append(run)
    for (estimator, hardware), found in groups.items():
        rows = next((found[basis] for basis in _BASES if len(found.get(basis, ())) >= 3), None)
        if rows is None:
            continue
        predicted = np.array([row.predicted_ns for row in rows])
        measured = np.array([row.measured_ns for row in rows])
        yield Trend(
            estimator=estimator,
            hardware=hardware,
            n=len(rows),
            rank=kendall_tau(predicted, measured),
            slope=slope_of(np.log(measured), np.log(predicted)),
        )
