"""Summaries of cases: over all, per class, per size; and what each shape adds to the whole error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import nan
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray, constant, is_one_value
from hespas.validators.accuracy.cases import Cases, Prediction, shared_shapes
from hespas.validators.accuracy.result import Accuracy, Contribution, EndToEnd, SpeedUp, SummaryRow, Trend
from hespas.validators.accuracy.statistics import (
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
"""Buckets of measured time: name, from, below."""

_LISTED = 20
_Scalar = TypeVar("_Scalar", bound=np.generic)
_BASES = ("span", "sum of operations")


def accuracy_of_cases(
    cases: Sequence[Cases],
    inputs: Sequence[str],
    estimators: Sequence[str],
    diagnostics: Diagnostics,
    hardware: Iterable[str] = (),
) -> Accuracy:
    """What follows from cases alone; noise of the devices ``hardware``, and of those that cases are of."""
    devices = dict.fromkeys((*hardware, *(each.hardware for each in cases)))
    return Accuracy(
        inputs=tuple(inputs),
        estimators=tuple(estimators),
        cases=tuple(cases),
        summary=tuple(summaries(cases)),
        contributions=tuple(row for each in cases for row in contributions(each)),
        speed_ups=tuple(speed_ups(cases)),
        noise={name: noise_of(cases, name) for name in devices},
        diagnostics=diagnostics,
    )


def summaries(cases: Sequence[Cases]) -> Iterator[SummaryRow]:
    """Rows per device and estimator, at both levels: all, then classes and families by time, then sizes."""
    by_device: dict[str, list[Cases]] = {}
    for each in cases:
        by_device.setdefault(each.hardware, []).append(each)
    for hardware, group in by_device.items():
        shape = shared_shapes(group)
        groups = ShapeGroups.of(shape)
        measured = _together([each.measured_ns for each in group])
        op_class = _together([each.op_class.astype(np.int32, copy=False) for each in group])
        time_ns = _together([each.weights_ns for each in group])
        for name in _estimators(group):
            predictions = [_prediction(each, name) for each in group]
            instances = _Columns(
                predicted=_together([each.duration_ns for each in predictions]),
                low=_together([each.low_ns for each in predictions]),
                high=_together([each.high_ns for each in predictions]),
                measured=measured,
                op_class=op_class,
                shape=shape,
                time_ns=time_ns,
                outside_ns=sum(each.outside_ns for each in group),
            )
            for level in ("instance", "shape"):
                columns = instances if level == "instance" else instances.once(groups)
                for label, size, chosen in _parts(columns, group[0]):
                    yield SummaryRow(
                        estimator=name,
                        hardware=hardware,
                        level=level,
                        op_class=label,
                        size=size,
                        errors=columns.errors(chosen, is_whole=label == size == "all"),
                    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Columns:
    """What one estimator says of the cases of a device, and what was measured. ``time_ns`` is the device time
    that each row stands for, ``covered_ns`` the part of it that the estimator covers (None: all or
    nothing); ``outside_ns`` is that of no row.
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

    def once(self, groups: ShapeGroups) -> _Columns:
        """Each distinct shape once, with the medians of its cases."""
        return _Columns(
            predicted=groups.medians(self.predicted),
            low=groups.medians(self.low),
            high=groups.medians(self.high),
            measured=groups.medians(self.measured),
            op_class=self.op_class[groups.firsts()],
            shape=groups.distinct,
            time_ns=np.bincount(groups.place, self.time_ns, len(groups)).astype(np.float64, copy=False),
            outside_ns=self.outside_ns,
            covered_ns=np.bincount(groups.place, self._covered(), len(groups)).astype(np.float64, copy=False),
        )

    def _covered(self) -> FloatArray:
        if self.covered_ns is not None:
            return self.covered_ns
        known = ~np.isnan(relative_error(self.predicted, self.measured))
        return np.where(known, self.time_ns, 0.0).astype(np.float64, copy=False)

    def errors(self, chosen: BoolArray, *, is_whole: bool) -> ErrorSummary:
        """The summary of some of them. Coverage is of the device time at both levels; that of all also counts
        what no case stands for.
        """
        rows = slice(None) if chosen.all() else chosen
        total = float(self.time_ns[rows].sum()) + (self.outside_ns if is_whole else 0.0)
        is_bounded = not (is_one_value(self.low) and is_one_value(self.high))
        found = errors_of(
            self.predicted[rows],
            self.measured[rows],
            self.shape[rows],
            (self.low[rows], self.high[rows]) if is_bounded else None,
        )
        return replace(found, coverage=float(self._covered()[rows].sum()) / total if total else nan)


def _together(columns: Sequence[NDArray[_Scalar]]) -> NDArray[_Scalar]:
    """The columns of several sources as one; that of one source as it is, and what is nowhere known still
    without memory.
    """
    if len(columns) == 1:
        return columns[0]
    if all(is_one_value(each) and len(each) and each[0] != each[0] for each in columns):
        return np.broadcast_to(columns[0][:1], (sum(map(len, columns)),))
    return np.concatenate(columns)


def _estimators(cases: Sequence[Cases]) -> list[str]:
    return list(dict.fromkeys(prediction.estimator for each in cases for prediction in each.predictions))


def _prediction(cases: Cases, estimator: str) -> Prediction:
    nothing = constant(np.nan, len(cases))
    return cases.prediction(estimator) or Prediction(
        estimator=estimator, duration_ns=nothing, low_ns=nothing, high_ns=nothing
    )


def _parts(columns: _Columns, cases: Cases) -> Iterator[tuple[str, str, BoolArray]]:
    """Names and rows of the parts; ``cases`` says what classes and families are called."""
    measured, op_class = columns.measured, columns.op_class
    yield "all", "all", np.ones(len(measured), np.bool_)
    times = np.bincount(op_class, np.nan_to_num(measured), len(cases.classes))
    present: list[int] = np.unique(op_class).tolist()
    members: dict[str, list[int]] = {}
    for code in present:
        members.setdefault(cases.classes[code], []).append(code)
        if cases.families and cases.families[code] != cases.classes[code]:
            members.setdefault(cases.families[code], []).append(code)
    for label in sorted(members, key=lambda label: -float(times[members[label]].sum())):
        yield label, "all", np.isin(op_class, members[label])
    for size, low, high in SIZES:
        chosen = (measured >= low) & (measured < high)
        if chosen.any():
            yield "all", size, chosen


def contributions(cases: Cases) -> Iterator[Contribution]:
    """The shapes that add most to the error of one source, of each estimator; the largest first."""
    total = float(cases.measured_ns.sum())
    if not total:
        return
    groups = ShapeGroups.of(cases.shape)
    firsts = groups.firsts()
    for prediction in cases.predictions:
        known = np.isfinite(prediction.duration_ns)
        predicted = np.bincount(cases.shape[known], prediction.duration_ns[known], len(cases.shapes))
        measured = np.bincount(cases.shape[known], cases.measured_ns[known], len(cases.shapes))
        order: list[int] = np.argsort(-np.abs(predicted - measured), kind="stable")[:_LISTED].tolist()
        for row in order:
            place = int(np.searchsorted(groups.distinct, row))
            is_there = place < len(groups) and int(groups.distinct[place]) == row
            if not is_there or predicted[row] == measured[row]:
                continue
            lead = int(firsts[place])
            members = cases.members[lead] if cases.members else None
            yield Contribution(
                source=cases.source,
                hardware=cases.hardware,
                estimator=prediction.estimator,
                label=cases.labels[lead],
                shape=cases.shapes[row],
                op_class=cases.classes[int(cases.op_class[lead])],
                count=int(groups.counts[place]),
                instructions=len(members.instructions) if members else 1,
                operations=len(members.operations) if members else 1,
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


def noise_of(cases: Sequence[Cases], hardware: str) -> NoiseFloor:
    """The noise floor of all that was measured on a device."""
    group = [each for each in cases if each.hardware == hardware]
    if not group:
        nothing = np.empty(0)
        return noise_floor(nothing, nothing, nothing.astype(np.int64), nothing.astype(np.int64))
    return noise_floor(
        _together([each.measured_ns for each in group]),
        _together([each.spread_ns for each in group]),
        _together([each.repeats for each in group]),
        shared_shapes(group),
    )


_LONG_NS = 20_000.0
"""Shapes above 20 us on both devices are listed apart: below, launches decide."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ShapeSpeedUp:
    """One shape on two devices: times on each; ``case`` is its first one on ``hardware``."""

    estimator: str
    hardware: str
    other: str
    cases: Cases
    case: int
    predicted_ns: tuple[float, float]
    measured_ns: tuple[float, float]


def speed_ups(cases: Sequence[Cases]) -> list[SpeedUp]:
    """One row per pair of devices and estimator; none where the devices share no shape."""
    by_device = _by_device(cases)
    names = _names(by_device)
    pairs = list(combinations(by_device, 2))
    found: dict[tuple[str, str, str], SpeedUp] = {}
    for name in dict.fromkeys(chain.from_iterable(names.values())):  # what one says stands in memory at once
        tables = {
            device: _by_shape(group, name) for device, group in by_device.items() if name in names[device]
        }
        for one, two in pairs:
            if one not in tables or two not in tables:
                continue
            left, right = tables[one], tables[two]
            order, paired = _paired(left, right)
            if len(order):
                found[one, two, name] = _compare(name, one, two, left[order, 1:], right[paired, 1:])
    return [found[one, two, name] for one, two in pairs for name in names[one] if (one, two, name) in found]


def speed_up_rows(cases: Sequence[Cases]) -> Iterator[ShapeSpeedUp]:
    """Each shape that two devices measured, by pair and estimator, as the first device has them."""
    by_device = _by_device(cases)
    names = _names(by_device)
    places = {device: _places(group) for device, group in by_device.items()}
    for one, two in combinations(by_device, 2):
        for name in (each for each in names[one] if each in names[two]):
            left, right = _by_shape(by_device[one], name), _by_shape(by_device[two], name)
            order, paired = _paired(left, right)
            for mine, theirs in zip(left[order].tolist(), right[paired].tolist(), strict=True):
                group, case = places[one][int(mine[0])]
                yield ShapeSpeedUp(
                    estimator=name,
                    hardware=one,
                    other=two,
                    cases=group,
                    case=case,
                    predicted_ns=(mine[1], theirs[1]),
                    measured_ns=(mine[2], theirs[2]),
                )


def _by_device(cases: Sequence[Cases]) -> dict[str, list[tuple[Cases, IntArray]]]:
    """Sources and their shared shape numbers, by device; empty where there is one device only."""
    by_device: dict[str, list[tuple[Cases, IntArray]]] = {}
    if len({each.hardware for each in cases}) < 2:
        return by_device
    shape = shared_shapes(cases)
    bounds = np.cumsum([0, *(len(each) for each in cases)])
    for each, start in zip(cases, bounds.tolist(), strict=False):
        by_device.setdefault(each.hardware, []).append((each, shape[start : start + len(each)]))
    return by_device


def _names(by_device: Mapping[str, Sequence[tuple[Cases, IntArray]]]) -> dict[str, list[str]]:
    """The estimators that cover each device."""
    return {
        device: list(dict.fromkeys(prediction.estimator for prediction in group[0][0].predictions))
        for device, group in by_device.items()
    }


def _places(group: Sequence[tuple[Cases, IntArray]]) -> dict[int, tuple[Cases, int]]:
    """The first case of each shape."""
    found: dict[int, tuple[Cases, int]] = {}
    for each, shape in group:
        numbers, first = np.unique(shape, return_index=True)
        for number, place in zip(numbers.tolist(), first.tolist(), strict=True):
            found.setdefault(number, (each, place))
    return found


def _paired(left: FloatArray, right: FloatArray) -> tuple[IntArray, IntArray]:
    """Rows of both tables that are of one shape, in the order of the first."""
    _, first, second = np.intersect1d(left[:, 0], right[:, 0], return_indices=True)
    return np.sort(first), second[np.argsort(first)]


def _by_shape(cases: Sequence[tuple[Cases, IntArray]], estimator: str) -> FloatArray:
    """Shape, predicted and measured time on one device, shape ``(shapes, 3)``; of the first source that has
    it.
    """
    parts = [np.empty((0, 3))]
    for each, shape in cases:
        prediction = each.prediction(estimator)
        if prediction is not None and len(each):
            predicted, measured, distinct = unique_shapes(prediction.duration_ns, each.measured_ns, shape)
            known = (predicted > 0) & (measured > 0)
            parts.append(np.stack((distinct.astype(np.float64), predicted, measured), axis=1)[known])
    rows = np.concatenate(parts)
    _, first = np.unique(rows[:, 0], return_index=True)
    found: FloatArray = rows[np.sort(first)]
    return found


def _compare(name: str, one: str, two: str, left: FloatArray, right: FloatArray) -> SpeedUp:
    predicted, measured = np.log(right[:, 0] / left[:, 0]), np.log(right[:, 1] / left[:, 1])
    long = (left[:, 1] > _LONG_NS) & (right[:, 1] > _LONG_NS)
    right_sign = np.sign(predicted) == np.sign(measured)
    constant = float(np.median(measured))
    return SpeedUp(
        estimator=name,
        hardware=one,
        other=two,
        n=len(left),
        n_long=int(long.sum()),
        sign=float(right_sign.mean()),
        sign_long=float(right_sign[long].mean()) if long.any() else nan,
        median_error=float(np.median(np.abs(np.exp(predicted - measured) - 1))),
        rank=kendall_tau(predicted, measured),
        constant_error=float(np.median(np.abs(np.exp(constant - measured) - 1))),
        constant_sign=float((np.sign(constant) == np.sign(measured)).mean()),
    )
