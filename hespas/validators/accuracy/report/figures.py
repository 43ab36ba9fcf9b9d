"""Data of the figures of the HTML page: points, curves, waterfalls, lanes and rooflines.

The number of points, spans and bytes of names is limited, so that the page stays small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np
from numpy.typing import NDArray

from hespas.fitting.statistics import relative_error
from hespas.graph import ABSENT, DTypeKind, Profile, Timeline, Workload, find_dtype
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, peak_for
from hespas.hardware.devices import Unit
from hespas.report.texts import NameTable, shown
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.result import Accuracy, Contribution

__all__ = [
    "MOST_POINTS",
    "CasePoints",
    "Column",
    "ErrorCurve",
    "ErrorPart",
    "ErrorWaterfall",
    "ShapeRow",
    "SpanLanes",
    "class_names",
    "curves_of",
    "figures",
    "measured_lanes",
    "points_of",
    "roofs_of",
    "shape_rows_of",
    "simulated_lanes",
    "waterfalls_of",
]

MOST_POINTS = 5_000
"""Most cases shown as points, and rows of the table."""
_QUANTILES = 60
_ALWAYS_SHOWN = MOST_POINTS // 5
_MOST_SOURCES = 40
_MOST_PARTS = 20
_MOST_SPANS = 1_500
_MOST_LANES = 12
_MOST_SHAPE_LETTERS = 500
"""Letters of a shape that are searched for element types."""
_UNITS: tuple[Unit, ...] = ("matrix", "vector")
_ELEMENT_TYPE = re.compile(r"\b(?:\d+x|\?x)*([a-z][a-zA-Z0-9]{1,15})\b")

Column = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePoints:
    """Cases that the page draws as points: at most :data:`MOST_POINTS`. ``of`` is the number of all cases.
    ``predicted_ns`` has one column per estimator.
    """

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
class ShapeRow:
    """Cases of one source and shape, as a row of a table. Times [ns] are means over ``count`` cases.
    ``share`` is their share of the measured time of the source. ``predicted_ns`` has one time per estimator.
    """

    source: str
    hardware: str
    op_class: str
    label: str
    shape: str
    count: int
    measured_ns: float
    share: float
    predicted_ns: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCurve:
    """Quantiles of the absolute relative errors of ``n`` cases, evenly spaced from the smallest to the
    largest error.
    """

    hardware: str
    estimator: int
    op_class: int
    n: int
    quantiles: Column


def figures(values: FloatArray) -> Column:
    """Return numbers rounded to five significant digits; None if unknown or infinite."""
    numbers: list[float] = values.tolist()
    return [float(f"{value:.5g}") if isfinite(value) else None for value in numbers]


def _predicted_ns(cases: Cases, estimator: str) -> FloatArray:
    prediction = cases.prediction(estimator)
    return np.full(len(cases), nan) if prediction is None else prediction.duration_ns


def points_of(result: Accuracy, estimators: Sequence[str], names: NameTable) -> CasePoints:
    """Return the cases to draw as points. O(cases log cases).

    If there are too many, some points are the cases with the largest absolute errors of the first estimator.
    The others are an even selection over source, class and measured time. The selection is the same in every
    run.
    """
    source = np.repeat(np.arange(len(result.cases)), [len(cases) for cases in result.cases])
    row = np.concatenate([np.arange(len(cases)) for cases in result.cases] or [np.empty(0, np.int64)])
    measured = _joined_columns([cases.measured_ns for cases in result.cases])
    op_class = _joined_columns([cases.op_class for cases in result.cases]).astype(np.int64)
    predicted = [
        _joined_columns([_predicted_ns(cases, name) for cases in result.cases]) for name in estimators
    ]
    chosen = np.arange(len(row))
    if len(row) > MOST_POINTS:
        error = np.nan_to_num(np.abs((predicted[0] if predicted else measured) - measured))
        largest = np.argsort(-error, kind="stable")[:_ALWAYS_SHOWN]
        rest = np.lexsort((measured, op_class, source))
        rest = rest[~np.isin(rest, largest)]
        even = rest[np.linspace(0, len(rest) - 1, MOST_POINTS - _ALWAYS_SHOWN).astype(np.int64)]
        chosen = np.sort(np.concatenate((largest, even)))
    sources: list[int] = source[chosen].tolist()
    rows: list[int] = row[chosen].tolist()
    pairs = [(result.cases[number], case) for number, case in zip(sources, rows, strict=True)]
    return CasePoints(
        of=len(row),
        source=sources,
        op_class=op_class[chosen].tolist(),
        label=[names.row(cases.labels[case]) for cases, case in pairs],
        shape=[names.row(cases.shapes[int(cases.shape[case])]) for cases, case in pairs],
        measured_ns=figures(measured[chosen]),
        flops=figures(_joined_columns([cases.flops for cases in result.cases])[chosen]),
        bytes_moved=figures(_joined_columns([cases.bytes_moved for cases in result.cases])[chosen]),
        predicted_ns=[figures(column[chosen]) for column in predicted],
    )


def _joined_columns(columns: Sequence[FloatArray | NDArray[np.int8] | SmallIntArray]) -> FloatArray:
    return np.concatenate([np.asarray(column, np.float64) for column in columns] or [np.empty(0)])


def shape_rows_of(result: Accuracy, estimators: Sequence[str]) -> tuple[list[ShapeRow], int]:
    """Return the shapes with the most measured time, longest first (at most :data:`MOST_POINTS`), and the
    number of shapes of all sources. O(cases log cases).
    """
    tables: list[FloatArray] = []
    for cases in result.cases:
        shape, first, index, counts = np.unique(
            cases.shape, return_index=True, return_inverse=True, return_counts=True
        )
        total = np.bincount(index, cases.measured_ns, len(shape))
        sum_ns = float(total.sum())
        share = total / sum_ns if sum_ns else total * nan
        columns = [first, shape, counts, total, total / counts, share]
        # The mean is unknown if one of the cases has no prediction.
        columns += [
            np.bincount(index, _predicted_ns(cases, name), len(shape)) / counts for name in estimators
        ]
        tables.append(np.stack([np.asarray(column, np.float64) for column in columns], axis=1))
    source = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    all_rows = np.concatenate(tables) if tables else np.empty((0, 6 + len(estimators)))
    order = np.argsort(-all_rows[:, 3], kind="stable")[:MOST_POINTS]
    rows = all_rows[order]
    shapes: list[ShapeRow] = []
    numbers: list[int] = source[order].tolist()
    lines: list[list[float]] = rows.tolist()
    for number, cells in zip(numbers, lines, strict=True):
        of_source, row = result.cases[number], int(cells[0])
        shapes.append(
            ShapeRow(
                source=of_source.source,
                hardware=of_source.hardware,
                op_class=of_source.classes[int(of_source.op_class[row])],
                label=of_source.labels[row],
                shape=of_source.shapes[int(cells[1])],
                count=int(cells[2]),
                measured_ns=cells[4],
                share=cells[5],
                predicted_ns=tuple(cells[6:]),
            )
        )
    return shapes, len(all_rows)


def curves_of(result: Accuracy, estimators: Sequence[str]) -> Iterator[ErrorCurve]:
    """Yield the error quantiles of each device and estimator: first over all classes (class -1), then for
    each class.
    """
    for hardware in dict.fromkeys(cases.hardware for cases in result.cases):
        group = [cases for cases in result.cases if cases.hardware == hardware]
        measured = _joined_columns([cases.measured_ns for cases in group])
        op_class = _joined_columns([cases.op_class for cases in group]).astype(np.int64)
        for number, name in enumerate(estimators):
            predicted = _joined_columns([_predicted_ns(cases, name) for cases in group])
            error = np.abs(relative_error(predicted, measured))
            for code in (-1, *np.unique(op_class).tolist()):
                errors = np.sort(error[~np.isnan(error) & ((op_class == code) | (code < 0))])
                count = len(errors)
                if count > _QUANTILES:
                    errors = errors[np.linspace(0, count - 1, _QUANTILES).astype(np.int64)]
                if count:
                    yield ErrorCurve(
                        hardware=shown(hardware),
                        estimator=number,
                        op_class=code,
                        n=count,
                        quantiles=figures(errors),
                    )


def class_names(result: Accuracy) -> list[str]:
    """Return the names of the classes by code."""
    return [shown(name) for name in result.cases[0].classes] if result.cases else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorPart:
    """Part of the error of a source that the cases of one shape contribute."""

    label: int
    shape: int
    op_class: str
    count: int
    predicted_ns: float
    measured_ns: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorWaterfall:
    """Waterfall chart from the measured to the predicted time of a source: ``uncovered_ns`` is subtracted,
    then ``parts`` and ``rest_ns`` are added.

    ``uncovered_ns`` is the measured time without an estimate. ``rest_ns`` is the sum of the errors that are
    not listed in ``parts``.
    """

    source: int
    estimator: int
    measured_ns: float
    uncovered_ns: float
    rest_ns: float
    predicted_ns: float
    parts: tuple[ErrorPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLanes:
    """Spans of one run for a timeline chart with lanes; times are from the start of the run.

    ``of`` is the number of all spans; only the longest are shown, with ``shown_share`` of the time. ``lane``
    is the lane of each span. ``tone`` is 0 for measured spans, 1 for simulated spans, 2 for simulated spans
    on the critical path.
    """

    title: str
    names: list[str]
    of: int
    lanes_of: int
    shown_share: float
    lane: list[int]
    start_ns: Column
    duration_ns: Column
    label: list[int]
    tone: list[int]


def waterfalls_of(result: Accuracy, estimators: Sequence[str], names: NameTable) -> Iterator[ErrorWaterfall]:
    """Yield a waterfall chart (contributions of shapes to the error) for each of the longest sources and each
    estimator.
    """
    by_estimator: dict[tuple[str, str, str], list[Contribution]] = {}
    for row in result.contributions:
        by_estimator.setdefault((row.source, row.hardware, row.estimator), []).append(row)
    order = sorted(range(len(result.cases)), key=lambda index: -float(result.cases[index].measured_ns.sum()))
    for index in order[:_MOST_SOURCES]:
        cases = result.cases[index]
        for number, name in enumerate(estimators):
            prediction = cases.prediction(name)
            if prediction is None or not len(cases):
                continue
            parts = tuple(
                ErrorPart(
                    label=names.row(row.label),
                    shape=names.row(row.shape),
                    op_class=row.op_class,
                    count=row.count,
                    predicted_ns=row.predicted_ns,
                    measured_ns=row.measured_ns,
                    share=row.share,
                )
                for row in by_estimator.get((cases.source, cases.hardware, name), [])[:_MOST_PARTS]
            )
            is_covered = ~np.isnan(prediction.duration_ns)
            measured = float(cases.measured_ns.sum())
            predicted = float(prediction.duration_ns[is_covered].sum())
            uncovered = float(cases.measured_ns[~is_covered].sum())
            listed = sum(part.predicted_ns - part.measured_ns for part in parts)
            yield ErrorWaterfall(
                source=index,
                estimator=number,
                measured_ns=measured,
                uncovered_ns=uncovered,
                rest_ns=predicted - (measured - uncovered) - listed,
                predicted_ns=predicted,
                parts=parts,
            )


def measured_lanes(profile: Profile, names: NameTable) -> SpanLanes | None:
    """Return the spans of the run with the median duration, with one lane per rank and stream; None without
    events. O(n log n).

    If events have no run numbers, all events are shown.
    """
    rows: IntArray = np.arange(len(profile))
    inside = np.flatnonzero(profile.run >= 0)
    if len(inside):
        runs, run = np.unique(profile.run[inside], return_inverse=True)
        first, last = np.full(len(runs), np.inf), np.full(len(runs), -np.inf)
        np.minimum.at(first, run, profile.start_ns[inside])
        np.maximum.at(last, run, (profile.start_ns + np.maximum(profile.duration_ns, 0.0))[inside])
        median = np.argsort(last - first, kind="stable")[(len(runs) - 1) // 2]
        rows = inside[run == median]
    if not len(rows):
        return None
    start, duration = profile.start_ns[rows], np.maximum(profile.duration_ns[rows], 0.0)
    keys = np.stack((profile.rank[rows].astype(np.int64), profile.stream[rows].astype(np.int64)))
    distinct, lane = np.unique(keys, axis=1, return_inverse=True)
    ranks, streams = distinct.tolist()
    several = len(set(ranks)) > 1
    titles = [
        (f"rank {rank}, " if several else "") + ("stream unknown" if stream < 0 else f"stream {stream}")
        for rank, stream in zip(ranks, streams, strict=True)
    ]
    text: list[int] = np.where(profile.op_id > 0, profile.op_id, profile.kernel_id)[rows].tolist()
    return _lanes(
        profile.name,
        titles,
        (lane.reshape(-1), start - float(start.min()), duration),
        lambda row: names.row(profile.strings[text[row]] or "(unnamed)"),
        np.zeros(len(rows), np.int64),
    )


def simulated_lanes(timeline: Timeline, program: Workload | None, names: NameTable) -> SpanLanes | None:
    """Return the spans of the first simulated rank, with one lane per resource; None without spans.
    ``program`` has the names of nodes.
    """
    if not len(timeline):
        return None
    rank = int(timeline.rank.min())
    rows = np.flatnonzero(timeline.rank == rank)
    nodes: list[int] = timeline.node[rows].tolist()
    tone = np.where(timeline.critical[rows], 2, 1)
    start = timeline.start_ns[rows]

    def label(row: int) -> int:
        node = nodes[row]
        text = "loop iterations" if node < 0 else f"node {node}"
        if node >= 0 and program is not None and rank < program.num_ranks:
            graph = None if program.rank_class[rank] == ABSENT else program.graph_of(rank)
            if graph is not None and node < len(graph):
                text = graph.node_name(node) or graph.op_name(node) or text
        return names.row(text)

    return _lanes(
        f"simulated, rank {rank}",
        timeline.resources,
        (timeline.resource[rows].astype(np.int64), start, timeline.end_ns[rows] - start),
        label,
        tone,
    )


def _lanes(
    title: str,
    names: Sequence[str],
    spans: tuple[IntArray, FloatArray, FloatArray],
    label: Callable[[int], int],
    tone: IntArray,
) -> SpanLanes:
    """Return the lanes with the most time and their longest spans, in order of lane and start."""
    lane, start, duration = spans
    busy = np.bincount(lane, duration, len(names))
    used = np.sort(np.argsort(-busy, kind="stable")[:_MOST_LANES])
    used = used[np.bincount(lane, minlength=len(names))[used] > 0]
    inside = np.flatnonzero(np.isin(lane, used))
    longest = inside[np.argsort(-duration[inside], kind="stable")[:_MOST_SPANS]]
    rows = longest[np.lexsort((start[longest], lane[longest]))]
    total = float(duration.sum())
    return SpanLanes(
        title=title,
        names=[str(names[number]) for number in used.tolist()],
        of=len(lane),
        lanes_of=int((np.bincount(lane, minlength=len(names)) > 0).sum()),
        shown_share=float(duration[rows].sum()) / total if total else 1.0,
        lane=np.searchsorted(used, lane[rows]).tolist(),
        # Rounded to 1 ns: with five digits, spans would overlap.
        start_ns=[float(value) for value in np.round(start[rows], 0).tolist()],
        duration_ns=figures(duration[rows]),
        label=[label(row) for row in rows.tolist()],
        tone=tone[rows].tolist(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RateCeiling:
    """Horizontal line in a roofline plot: the peak rate of a unit. ``name`` lists the element types that have
    this rate.
    """

    name: str
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceRoof:
    """Roofline of a device in a plot: its peak rates for the measured element types, and its main memory."""

    hardware: str
    memory: str
    bandwidth_bytes_per_s: float | None
    ceilings: tuple[_RateCeiling, ...]


def roofs_of(devices: Sequence[Device], cases: Sequence[Cases]) -> Iterator[_DeviceRoof]:
    """Yield the roofline of each device with measurements."""
    for device in devices:
        group = [source for source in cases if source.hardware == device.name]
        if not group:
            continue
        words = {
            word
            for source in group
            for text in source.shapes
            for word in _ELEMENT_TYPE.findall(text[:_MOST_SHAPE_LETTERS])
        }
        # Names of operations contain words like "float"; only the spelling of shapes is a type.
        dtypes = [
            dtype for word in sorted(words) if (dtype := find_dtype(word)) is not None and dtype.name == word
        ]
        element_types = [dtype.name for dtype in dtypes if dtype.kind is DTypeKind.FLOAT] or [
            dtype.name for dtype in dtypes
        ]
        memory = device.main_memory
        bandwidth = memory.bandwidth_bytes_per_s
        yield _DeviceRoof(
            hardware=shown(device.name),
            memory=memory.name,
            bandwidth_bytes_per_s=bandwidth if isfinite(bandwidth) else None,
            ceilings=tuple(_ceilings(device, element_types)),
        )


def _ceilings(device: Device, element_types: Sequence[str]) -> Iterator[_RateCeiling]:
    """Yield the peak rates of element types, highest first. Types with the same rate share a row.

    If no rate is known for any of the types, all dense rates are returned.
    """
    rates: dict[tuple[Unit, float], list[str]] = {}
    for unit in _UNITS:
        for name in element_types:
            try:
                rate = peak_for(device, unit, name)
            except UnsupportedError:
                continue
            if rate.peak.unit == unit:
                rates.setdefault((unit, rate.flops_per_s), []).append(name)
    if not rates:
        for peak in device.peaks:
            if peak.density == "dense":
                rates.setdefault((peak.unit, peak.flops_per_s), []).append(peak.dtype)
    for (unit, flops_per_s), names in sorted(rates.items(), key=lambda entry: -entry[0][1]):
        yield _RateCeiling(name=f"{unit} {', '.join(names)}", flops_per_s=flops_per_s)
