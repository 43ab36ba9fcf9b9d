"""Summaries of cases: overall, per class and per size, speed-ups, and the error contribution of each
shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import nan
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.interface import CasePrediction
from hespas.fitting.statistics import (
    ErrorSummary,
    NoiseFloor,
    ShapeGroups,
    errors_of,
    kendall_tau,
    noise_floor,
    relative_error,
    slope_of,
    unique_shapes,
)
from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, constant, is_one_value
from hespas.validators.accuracy.cases import Cases, shared_shapes
from hespas.validators.accuracy.result import Accuracy, Contribution, EndToEnd, SpeedUp, SummaryRow, Trend

__all__ = [
    "SIZES",
    "ShapeSpeedUp",
    "accuracy_of_cases",
    "contributions",
    "noise_of",
    "speed_up_rows",
    "speed_ups",
    "summaries",
    "trends",
]

SIZES: tuple[tuple[str, float, float], ...] = (
    ("< 1 us", 0.0, 1e3),
    ("1-10 us", 1e3, 1e4),
    ("10-100 us", 1e4, 1e5),
    ("0.1-1 ms", 1e5, 1e6),
    ("1-10 ms", 1e6, 1e7),
    ("> 10 ms", 1e7, np.inf),
)
"""Buckets of measured time: name, least, limit."""

_MOST_LISTED = 20
_Scalar = TypeVar("_Scalar", bound=np.generic)
_BASES = ("span", "sum of operations")


def accuracy_of_cases(
    cases: Sequence[Cases],
    inputs: Sequence[str],
    estimators: Sequence[str],
    diagnostics: Diagnostics,
    hardware: Iterable[str] = (),
) -> Accuracy:
    """Return all results that follow from cases, with the noise of ``hardware`` and of the cases' devices."""
    devices = dict.fromkeys((*hardware, *(source.hardware for source in cases)))
    return Accuracy(
        inputs=tuple(inputs),
        estimators=tuple(estimators),
        cases=tuple(cases),
        summary=tuple(summaries(cases)),
        contributions=tuple(row for source in cases for row in contributions(source)),
        speed_ups=tuple(speed_ups(cases)),
        noise={name: noise_of(cases, name) for name in devices},
        diagnostics=diagnostics,
    )


def summaries(cases: Sequence[Cases]) -> Iterator[SummaryRow]:
    """Yield the summary rows of each device and estimator at both levels: over all cases, then by class and
    family (most time first), then by size.
    """
    by_device: dict[str, list[Cases]] = {}
    for source in cases:
        by_device.setdefault(source.hardware, []).append(source)
    for hardware, sources in by_device.items():
        shape = shared_shapes(sources)
        groups = ShapeGroups.of(shape)
        measured = _joined_columns([source.measured_ns for source in sources])
        op_class = _joined_columns([source.op_class.astype(np.int32, copy=False) for source in sources])
        time_ns = _joined_columns([source.weights_ns for source in sources])
        names = (prediction.estimator for source in sources for prediction in source.predictions)
        for name in dict.fromkeys(names):
            predictions = [source.prediction(name) or _no_prediction(name, len(source)) for source in sources]
            instances = _CaseColumns(
                predicted=_joined_columns([prediction.duration_ns for prediction in predictions]),
                low=_joined_columns([prediction.low_ns for prediction in predictions]),
                high=_joined_columns([prediction.high_ns for prediction in predictions]),
                measured=measured,
                op_class=op_class,
                shape=shape,
                time_ns=time_ns,
                outside_ns=sum(source.outside_ns for source in sources),
            )
            for level in ("instance", "shape"):
                columns = instances if level == "instance" else instances.once_per_shape(groups)
                for label, size, chosen in columns.parts(sources[0]):
                    yield SummaryRow(
                        estimator=name,
                        hardware=hardware,
                        level=level,
                        op_class=label,
                        size=size,
                        errors=columns.errors(chosen, is_whole=label == size == "all"),
                    )


def _no_prediction(estimator: str, count: int) -> CasePrediction:
    unknown = constant(np.nan, count)
    return CasePrediction(estimator=estimator, duration_ns=unknown, low_ns=unknown, high_ns=unknown)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _CaseColumns:
    """Predicted and measured times of one estimator for the cases of a device, as columns.

    ``time_ns`` is the device time that each row represents. ``covered_ns`` is the part of this time that the
    estimator covers (None: all of it if the row has a prediction, otherwise nothing). ``outside_ns`` is the
    device time that belongs to no row.
    """

    predicted: FloatArray
    low: FloatArray
    high: FloatArray
    measured: FloatArray
    op_class: SmallIntArray
    shape: IntArray
    time_ns: FloatArray
    outside_ns: float
    covered_ns: FloatArray | None = None

    def once_per_shape(self, groups: ShapeGroups) -> _CaseColumns:
        """Return one row per distinct shape, with the median times of its cases and the sum of their device
        times.
        """
        return _CaseColumns(
            predicted=groups.medians(self.predicted),
            low=groups.medians(self.low),
            high=groups.medians(self.high),
            measured=groups.medians(self.measured),
            op_class=self.op_class[groups.firsts()],
            shape=groups.distinct,
            time_ns=np.bincount(groups.index, self.time_ns, len(groups)).astype(np.float64, copy=False),
            outside_ns=self.outside_ns,
            covered_ns=np.bincount(groups.index, self._covered(), len(groups)).astype(np.float64, copy=False),
        )

    def _covered(self) -> FloatArray:
        if self.covered_ns is not None:
            return self.covered_ns
        has_error = ~np.isnan(relative_error(self.predicted, self.measured))
        return np.where(has_error, self.time_ns, 0.0).astype(np.float64, copy=False)

    def errors(self, chosen: BoolArray, *, is_whole: bool) -> ErrorSummary:
        """Return the error summary of the rows in ``chosen``.

        Coverage is relative to the device time. With ``is_whole`` (all rows), device time that belongs to no
        case is included.
        """
        rows = slice(None) if chosen.all() else chosen
        total = float(self.time_ns[rows].sum()) + (self.outside_ns if is_whole else 0.0)
        is_bounded = not (is_one_value(self.low) and is_one_value(self.high))
        summary = errors_of(
            self.predicted[rows],
            self.measured[rows],
            self.shape[rows],
            (self.low[rows], self.high[rows]) if is_bounded else None,
        )
        return replace(summary, coverage=float(self._covered()[rows].sum()) / total if total else nan)

    def parts(self, cases: Cases) -> Iterator[tuple[str, str, BoolArray]]:
        """Yield the subsets of rows for which errors are summarised: the class, the size and a mask of the
        rows. ``cases`` has the names of classes and families.
        """
        measured, op_class = self.measured, self.op_class
        yield "all", "all", np.ones(len(measured), np.bool_)
        times = np.bincount(op_class, np.nan_to_num(measured), len(cases.classes))
        present: list[int] = np.unique(op_class).tolist()
        codes: dict[str, list[int]] = {}
        for code in present:
            codes.setdefault(cases.classes[code], []).append(code)
            if cases.families and cases.families[code] != cases.classes[code]:
                codes.setdefault(cases.families[code], []).append(code)
        for label in sorted(codes, key=lambda label: -float(times[codes[label]].sum())):
            yield label, "all", np.isin(op_class, codes[label])
        for size, low, high in SIZES:
            chosen = (measured >= low) & (measured < high)
            if chosen.any():
                yield "all", size, chosen


def _joined_columns(columns: Sequence[NDArray[_Scalar]]) -> NDArray[_Scalar]:
    """Return the concatenated columns of several sources. If all values are unknown, the result is a view of
    one value without memory.
    """
    if len(columns) == 1:
        return columns[0]
    if all(is_one_value(column) and len(column) and column[0] != column[0] for column in columns):
        return np.broadcast_to(columns[0][:1], (sum(map(len, columns)),))
    return np.concatenate(columns)


def contributions(cases: Cases) -> Iterator[Contribution]:
    """Yield for each estimator the shapes of one source that contribute most to its error, largest first."""
    total = float(cases.measured_ns.sum())
    if not total:
        return
    groups = ShapeGroups.of(cases.shape)
    firsts = groups.firsts()
    for prediction in cases.predictions:
        is_covered = np.isfinite(prediction.duration_ns)
        predicted = np.bincount(
            cases.shape[is_covered], prediction.duration_ns[is_covered], len(cases.shapes)
        )
        measured = np.bincount(cases.shape[is_covered], cases.measured_ns[is_covered], len(cases.shapes))
        order: list[int] = np.argsort(-np.abs(predicted - measured), kind="stable")[:_MOST_LISTED].tolist()
        for row in order:
            number = int(np.searchsorted(groups.distinct, row))
            is_present = number < len(groups) and int(groups.distinct[number]) == row
            if not is_present or predicted[row] == measured[row]:
                continue
            lead = int(firsts[number])
            members = cases.members[lead] if cases.members else None
            yield Contribution(
                source=cases.source,
                hardware=cases.hardware,
                estimator=prediction.estimator,
                label=cases.labels[lead],
                shape=cases.shapes[row],
                op_class=cases.classes[int(cases.op_class[lead])],
                count=int(groups.counts[number]),
                instructions=len(members.instructions) if members else 1,
                operations=len(members.operations) if members else 1,
                predicted_ns=float(predicted[row]),
                measured_ns=float(measured[row]),
                share=float((predicted[row] - measured[row]) / total),
            )


def trends(runs: Sequence[EndToEnd]) -> Iterator[Trend]:
    """Yield the agreement of predicted and measured times for each device and estimator with at least three
    sources.

    The spans of steps are compared if there are at least three, otherwise sums of operations.
    """
    groups: dict[tuple[str, str], dict[str, list[EndToEnd]]] = {}
    for run in runs:
        if run.predicted_ns > 0 and run.measured_ns > 0:
            by_basis = groups.setdefault((run.estimator, run.hardware), {})
            by_basis.setdefault(run.basis, []).append(run)
    for (estimator, hardware), by_basis in groups.items():
        rows = next((by_basis[basis] for basis in _BASES if len(by_basis.get(basis, ())) >= 3), None)
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


def noise_of(cases: Sequence[Cases], hardware: str) -> NoiseFloor:
    """Return the noise floor of all measurements on a device."""
    group = [source for source in cases if source.hardware == hardware]
    if not group:
        empty = np.empty(0)
        return noise_floor(empty, empty, empty.astype(np.int64), empty.astype(np.int64))
    return noise_floor(
        _joined_columns([source.measured_ns for source in group]),
        _joined_columns([source.spread_ns for source in group]),
        _joined_columns([source.repeats for source in group]),
        shared_shapes(group),
    )


_LONG_NS = 20_000.0
"""Least time of a long shape on both devices: 20 us. Launch overhead dominates shorter ones."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShapeSpeedUp:
    """Times of one shape on two devices, from which speed-ups follow. ``case`` is its first case on
    ``hardware``.
    """

    estimator: str
    hardware: str
    other: str
    cases: Cases
    case: int
    predicted_ns: tuple[float, float]
    measured_ns: tuple[float, float]


def speed_ups(cases: Sequence[Cases]) -> list[SpeedUp]:
    """Return the errors of speed-ups for each pair of devices and each estimator; none if the devices share
    no shape.
    """
    by_device = _sources_by_device(cases)
    estimators = {
        device: list(dict.fromkeys(prediction.estimator for prediction in sources[0][0].predictions))
        for device, sources in by_device.items()
    }
    pairs = list(combinations(by_device, 2))
    rows: dict[tuple[str, str, str], SpeedUp] = {}
    # Only the tables of one estimator are in memory at a time.
    for name in dict.fromkeys(chain.from_iterable(estimators.values())):
        tables = {
            device: _shape_times(sources, name)
            for device, sources in by_device.items()
            if name in estimators[device]
        }
        for first, second in pairs:
            if first not in tables or second not in tables:
                continue
            left, right = _common_shapes(tables[first], tables[second])
            if len(left):
                left_times = left[:, 1:]
                right_times = right[:, 1:]
                predicted = np.log(right_times[:, 0] / left_times[:, 0])
                measured = np.log(right_times[:, 1] / left_times[:, 1])
                is_long = (left_times[:, 1] > _LONG_NS) & (right_times[:, 1] > _LONG_NS)
                is_right = np.sign(predicted) == np.sign(measured)
                median = float(np.median(measured))
                rows[first, second, name] = SpeedUp(
                    estimator=name,
                    hardware=first,
                    other=second,
                    n=len(left_times),
                    n_long=int(is_long.sum()),
                    sign=float(is_right.mean()),
                    sign_long=float(is_right[is_long].mean()) if is_long.any() else nan,
                    median_error=float(np.median(np.abs(np.exp(predicted - measured) - 1))),
                    rank=kendall_tau(predicted, measured),
                    constant_error=float(np.median(np.abs(np.exp(median - measured) - 1))),
                    constant_sign=float((np.sign(median) == np.sign(measured)).mean()),
                )
    return [
        rows[first, second, name]
        for first, second in pairs
        for name in estimators[first]
        if (first, second, name) in rows
    ]


def speed_up_rows(cases: Sequence[Cases]) -> Iterator[ShapeSpeedUp]:
    """Yield each shape that two devices measured, by pair and estimator, in the order of the first device."""
    by_device = _sources_by_device(cases)
    first_cases: dict[str, dict[int, tuple[Cases, int]]] = {}
    for device, sources in by_device.items():
        of_shape = first_cases.setdefault(device, {})
        for source, shape in sources:
            numbers, indices = np.unique(shape, return_index=True)
            for number, index in zip(numbers.tolist(), indices.tolist(), strict=True):
                of_shape.setdefault(number, (source, index))
    for first, second in combinations(by_device, 2):
        others = {prediction.estimator for prediction in by_device[second][0][0].predictions}
        names = dict.fromkeys(prediction.estimator for prediction in by_device[first][0][0].predictions)
        for name in (name for name in names if name in others):
            left, right = _common_shapes(
                _shape_times(by_device[first], name), _shape_times(by_device[second], name)
            )
            for mine, theirs in zip(left.tolist(), right.tolist(), strict=True):
                source, case = first_cases[first][int(mine[0])]
                yield ShapeSpeedUp(
                    estimator=name,
                    hardware=first,
                    other=second,
                    cases=source,
                    case=case,
                    predicted_ns=(mine[1], theirs[1]),
                    measured_ns=(mine[2], theirs[2]),
                )


def _sources_by_device(cases: Sequence[Cases]) -> dict[str, list[tuple[Cases, IntArray]]]:
    """Return the sources of each device, with shape numbers that all devices share; empty if there is only
    one device.
    """
    by_device: dict[str, list[tuple[Cases, IntArray]]] = {}
    if len({source.hardware for source in cases}) < 2:
        return by_device
    shape = shared_shapes(cases)
    bounds = np.cumsum([0, *(len(source) for source in cases)])
    for source, start in zip(cases, bounds.tolist(), strict=False):
        by_device.setdefault(source.hardware, []).append((source, shape[start : start + len(source)]))
    return by_device


def _common_shapes(left: FloatArray, right: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the rows of both tables whose shapes are in both, in the order of the first table."""
    _, first, second = np.intersect1d(left[:, 0], right[:, 0], return_indices=True)
    return left[np.sort(first)], right[second[np.argsort(first)]]


def _shape_times(sources: Sequence[tuple[Cases, IntArray]], estimator: str) -> FloatArray:
    """Return the shape number, predicted time and measured time of each shape on one device, as an array of
    shape ``(shapes, 3)``.

    If several sources have a shape, the first source is used.
    """
    parts = [np.empty((0, 3))]
    for source, shape in sources:
        prediction = source.prediction(estimator)
        if prediction is not None and len(source):
            predicted, measured, distinct = unique_shapes(prediction.duration_ns, source.measured_ns, shape)
            has_times = (predicted > 0) & (measured > 0)
            parts.append(np.stack((distinct.astype(np.float64), predicted, measured), axis=1)[has_times])
    rows = np.concatenate(parts)
    _, first = np.unique(rows[:, 0], return_index=True)
    unique_rows: FloatArray = rows[np.sort(first)]
    return unique_rows
