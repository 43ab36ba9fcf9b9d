"""Charts of a comparison: predictions over measurements, errors, rooflines, waterfalls and timelines.

The number of points, spans and charts is limited, so that a page with many cases stays small.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from hespas.converters.measured_ops.device_events import EventRole, event_roles
from hespas.fitting.statistics import relative_error
from hespas.graph import ABSENT, DTypeKind, Profile, Timeline, Workload, find_dtype
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, peak_for
from hespas.hardware.devices import Unit
from hespas.report.charts import (
    TONES,
    Axis,
    Chart,
    Plot,
    Series,
    StripPlot,
    Waterfall,
    roof_lines,
)
from hespas.report.texts import shown
from hespas.report.timelines import Lane, TimelineChart
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.report.tables import FEW_SHAPES
from hespas.validators.accuracy.report.texts import percent, summary_lines, time_text
from hespas.validators.accuracy.result import Accuracy, Contribution

__all__ = ["ChartGroup", "chart_groups"]

_MOST_POINTS, _MOST_POINTS_OF_ALL = 2_000, 16_000
"""Cases of one chart that are drawn as points, and of all charts together."""
_QUANTILES, _STRIP_QUANTILES = 60, 61
_SMALLEST_ERROR, _LARGEST_ERROR = 1e-3, 1e4
"""Errors in the cumulative distribution; smaller and larger ones are drawn at these."""
_STRIP_LIMIT = 1.5
_MOST_WATERFALLS, _MOST_PARTS = 40, 20
_MOST_TIMELINES, _MOST_LANES, _MOST_SPANS = 8, 12, 20_000
_NAME_LETTERS = 100
_MOST_SHAPE_LETTERS = 500
"""Letters of a shape that are searched for element types."""
_BANDS = ((0.1, 1), (0.5, 2))
"""Relative errors that are drawn around the measured time, and the dashes of their lines."""
_UNITS: tuple[Unit, ...] = ("matrix", "vector")
_ELEMENT_TYPE = re.compile(r"\b(?:\d+x|\?x)*([a-z][a-zA-Z0-9]{1,15})\b")
_STYLE_OF_ROLE = {
    EventRole.WORK: "compute", EventRole.COMMUNICATION: "communication", EventRole.HOST_COPY: "copies",
    EventRole.DEVICE_COPY: "copies", EventRole.FILL: "copies",
}  # fmt: skip
_STYLE_OF_RESOURCE = {"compute": "compute", "communication": "communication", "copy": "copies"}
"""Simulated resource -> style of its spans; others are work of the host."""


@dataclass(frozen=True, slots=True)
class ChartGroup:
    """Charts that a page shows under one title."""

    title: str
    charts: Sequence[Chart]


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceCases:
    """Cases of all sources of one device as columns. ``tones`` has the colour of each class by its code."""

    hardware: str
    sources: Sequence[Cases]
    source: IntArray
    row: IntArray
    op_class: IntArray
    measured_ns: FloatArray
    tones: Mapping[int, int]

    @classmethod
    def of(cls, hardware: str, sources: Sequence[Cases], tones: Mapping[int, int]) -> _DeviceCases:
        return cls(
            hardware,
            sources,
            source=np.repeat(np.arange(len(sources)), [len(cases) for cases in sources]),
            row=np.concatenate([np.arange(len(cases)) for cases in sources]),
            op_class=np.concatenate([np.asarray(cases.op_class, np.int64) for cases in sources]),
            measured_ns=np.concatenate([cases.measured_ns for cases in sources]),
            tones=tones,
        )

    def column(self, of: Callable[[Cases], FloatArray]) -> FloatArray:
        """Return a column of all sources."""
        return np.concatenate([np.asarray(of(cases), np.float64) for cases in self.sources])

    def predicted_ns(self, estimator: str) -> FloatArray:
        """Return the predicted times; NaN where the estimator predicts nothing."""
        return self.column(lambda cases: cases.predicted_ns(estimator))

    def class_name(self, code: int) -> str:
        """Return the name of a class."""
        return shown(self.sources[0].classes[code], 60)

    def drawn(
        self, is_known: BoolArray, weight: FloatArray, most: int, largest_of: str
    ) -> tuple[IntArray, str]:
        """Return the rows to draw, and a sentence about the selection (empty: all). O(cases log cases).

        A fifth of the selected rows have the largest weights. The others are an even selection over source,
        class and measured time. The selection is the same in every run.
        """
        rows = np.flatnonzero(is_known)
        if len(rows) <= most:
            return rows, ""
        largest = rows[np.argsort(-weight[rows], kind="stable")[: most // 5]]
        rest = rows[np.lexsort((self.measured_ns[rows], self.op_class[rows], self.source[rows]))]
        rest = rest[~np.isin(rest, largest)]
        even = rest[np.linspace(0, len(rest) - 1, most - len(largest)).astype(np.int64)]
        text = (
            f" {most:,} of {len(rows):,} cases are drawn: those with the {largest_of}, and an even selection "
            "of the others."
        )
        return np.sort(np.concatenate((largest, even))), text

    def points(
        self, rows: IntArray, x: FloatArray, y: FloatArray, text: Callable[[int], str]
    ) -> Iterator[Series]:
        """Yield the points of each class; classes without a colour of their own are drawn together."""
        tones = np.array([self.tones.get(code, TONES - 1) for code in self.op_class[rows].tolist()])
        for tone in np.unique(tones).tolist():
            chosen = rows[tones == tone]
            codes = np.unique(self.op_class[chosen]).tolist()
            label = self.class_name(codes[0]) if len(codes) == 1 else "other classes"
            texts = [f"{text(row)}: {self._name(row)}" for row in chosen.tolist()]
            yield Series(label=label, x=x[chosen], y=y[chosen], texts=texts, tone=tone)

    def _name(self, row: int) -> str:
        """Return the shape of a case, which begins with its operation, the class and the source."""
        cases, number = self.sources[int(self.source[row])], int(self.row[row])
        label, shape = cases.labels[number], cases.shapes[int(cases.shape[number])]
        name = shown(shape if shape.startswith(label) else f"{label} {shape}", _NAME_LETTERS)
        source = f", {shown(cases.source, 30)}" if len(self.sources) > 1 else ""
        return f"{name} ({self.class_name(int(self.op_class[row]))}{source})"


def chart_groups(
    result: Accuracy,
    devices: Sequence[Device],
    *,
    profiles: Sequence[Profile] = (),
    timeline: Timeline | None = None,
    program: Workload | None = None,
) -> Iterator[ChartGroup]:
    """Yield the charts of a comparison: of each device, with a group for each estimator, and of the time.

    ``devices`` have the limits of the rooflines. ``profiles`` and ``timeline`` are drawn as timelines;
    ``program`` has the names of the nodes in ``timeline``.
    """
    time_of: dict[int, float] = {}
    for cases in result.cases:
        totals = np.bincount(np.asarray(cases.op_class, np.int64), cases.measured_ns)
        for code in np.unique(cases.op_class).tolist():
            time_of[code] = time_of.get(code, 0.0) + float(totals[code])
    classes = sorted(time_of, key=lambda code: -time_of[code])
    tones = {code: tone for tone, code in enumerate(classes[: TONES - (len(classes) > TONES)])}
    hardware = list(dict.fromkeys(cases.hardware for cases in result.cases if len(cases)))
    most = min(_MOST_POINTS, _MOST_POINTS_OF_ALL // max(len(hardware) * (len(result.estimators) + 1), 1))
    falls = list(_waterfalls(result))
    number = 0
    for name in hardware:
        sources = [source for source in result.cases if source.hardware == name]
        group = _DeviceCases.of(name, sources, tones)
        pairs: list[ChartGroup] = []
        for estimator in result.estimators:
            number += 1
            end = "" if number == 1 else f"-{number}"
            title = f"{shown(estimator, 60)} on {shown(name, 60)}"
            charts: list[Chart] = [
                *_scatter(group, estimator, end, title, most),
                *_distribution(group, estimator, end, title, result.noise[name].mape),
                *(fall for pair, fall in falls if pair == (name, estimator)),
            ]
            pairs.append(ChartGroup(title, charts))
        end = "" if name == hardware[0] else f"-{hardware.index(name) + 1}"
        naive = next((line.best_baseline for line in summary_lines(result) if line.hardware == name), "")
        shared: list[Chart] = [
            *_strips(group, [*result.estimators, *filter(None, [naive])], end),
            *_roofline(group, next((row for row in devices if row.name == name), None), end, most),
        ]
        yield from pairs[:1]
        yield ChartGroup(f"All estimators on {shown(name, 60)}", shared)
        yield from pairs[1:]
    times = list(_timelines(profiles[:_MOST_TIMELINES], timeline, program))
    if times:
        yield ChartGroup("Timelines", times)


def _scatter(cases: _DeviceCases, estimator: str, end: str, title: str, most: int) -> Iterator[Plot]:
    """Yield the predicted over the measured times, if there are any."""
    measured, predicted = cases.measured_ns, cases.predicted_ns(estimator)
    is_known = (measured > 0) & (predicted > 0) & np.isfinite(predicted)
    if not is_known.any():
        return
    error = relative_error(predicted, measured)
    rows, selection = cases.drawn(is_known, np.abs(predicted - measured), most, "largest time errors")
    times = np.concatenate((measured[rows], predicted[rows]))
    low, high = float(times.min()), float(times.max())
    guides = [Series(label="equal", x=[low, high], y=[low, high], mark="guide", tone=0)]
    for band, tone in _BANDS:
        for factor in (1 + band, 1 - band):
            ends = [max(low, low / factor), min(high, high / factor)]
            if ends[0] < ends[1]:
                y = [value * factor for value in ends]
                guides.append(Series(label=f"±{band:.0%}", x=ends, y=y, mark="guide", tone=tone))
    known = np.abs(error[~np.isnan(error)])
    within = " and ".join(
        f"{percent(float((known <= band * (1 + 1e-12)).mean()))} within {band:.0%}" for band, _ in _BANDS
    )
    yield Plot(
        name=f"predicted{end}",
        title=f"Predicted against measured: {title}",
        note=f"Of {len(known):,} predicted cases, {within}.{selection}",
        x=Axis("measured", "time", is_log=True),
        y=Axis("predicted", "time", is_log=True),
        series=[
            *guides,
            *cases.points(
                rows,
                measured,
                predicted,
                lambda row: (
                    f"{percent(float(error[row]), signed=True)}, predicted "
                    f"{time_text(float(predicted[row]))}, measured {time_text(float(measured[row]))}"
                ),
            ),
        ],
    )


def _distribution(cases: _DeviceCases, estimator: str, end: str, title: str, noise: float) -> Iterator[Plot]:
    """Yield the share of cases within an error: of all classes, of each class, and of the naive models."""

    def curve(name: str, code: int | None, label: str, tone: int) -> Iterator[Series]:
        is_wanted = np.ones(len(cases.row), np.bool_) if code is None else cases.op_class == code
        error = np.abs(relative_error(cases.predicted_ns(name), cases.measured_ns))
        errors = np.sort(error[is_wanted & ~np.isnan(error)])
        if len(errors) < (1 if code is None else FEW_SHAPES):
            return
        at = np.unique(np.linspace(0, len(errors) - 1, _QUANTILES).astype(np.int64))
        x = np.clip(errors[at], _SMALLEST_ERROR, _LARGEST_ERROR)
        yield Series(
            label=f"{label} ({len(errors):,})",
            x=np.repeat(x, 2),
            y=np.append(0.0, np.repeat((at + 1) / len(errors), 2))[:-1],
            mark="guide" if code is None else "line",
            tone=tone,
        )

    whole = list(curve(estimator, None, "all classes", 0))
    if not whole:
        return
    for name in BASELINES:
        if name != estimator:
            whole += curve(name, None, shown(name), len(whole))
    if noise > _SMALLEST_ERROR:
        whole.append(Series(label="noise floor", x=[noise, noise], y=[0.0, 1.0], mark="guide", tone=6))
    of_classes = (
        series
        for code, tone in cases.tones.items()
        for series in curve(estimator, code, cases.class_name(code), tone)
    )
    yield Plot(
        name=f"error-distribution{end}",
        title=f"Share of cases within an error: {title}",
        note="Lines without a colour: all classes, and the naive models. Classes of fewer than "
        f"{FEW_SHAPES} cases are omitted.",
        x=Axis("absolute relative error", "share", is_log=True),
        y=Axis("share of cases", "share"),
        series=[*whole, *of_classes],
    )


def _strips(cases: _DeviceCases, estimators: Sequence[str], end: str) -> Iterator[StripPlot]:
    """Yield the distribution of the signed errors of each class and estimator."""
    codes = [code for code in cases.tones if (cases.op_class == code).any()]
    series: list[Series] = []
    for name in dict.fromkeys(estimators):
        error = relative_error(cases.predicted_ns(name), cases.measured_ns)
        x, y = list[float](), list[int]()
        for strip, code in enumerate(codes):
            errors = error[(cases.op_class == code) & np.isfinite(error)]
            count = min(len(errors), _STRIP_QUANTILES)
            if count:
                x += np.quantile(errors, np.linspace(0.0, 1.0, count)).tolist()
                y += [strip] * count
        if x:
            series.append(Series(label=shown(name), x=x, y=y))
    if series:
        yield StripPlot(
            name=f"errors-by-class{end}",
            title=f"Relative errors by class on {shown(cases.hardware, 60)}",
            note=f"Up to {_STRIP_QUANTILES} evenly spaced quantiles of each class, with the median. Classes "
            f"with the most time first. Errors above {_STRIP_LIMIT:.0%} are drawn at the edge.",
            labels=[cases.class_name(code) for code in codes],
            x=Axis("relative error", "share"),
            limit=_STRIP_LIMIT,
            series=series,
        )


def _roofline(cases: _DeviceCases, device: Device | None, end: str, most: int) -> Iterator[Plot]:
    """Yield the achieved rates over FLOPs per byte, if a case has both, with the limits of the device."""
    flops, size = cases.column(lambda row: row.flops), cases.column(lambda row: row.bytes_moved)
    is_known = (flops > 0) & (size > 0) & (cases.measured_ns > 0) & np.isfinite(flops) & np.isfinite(size)
    if not is_known.any():
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        rate, intensity = flops / cases.measured_ns / 1e3, flops / size
    rows, selection = cases.drawn(is_known, cases.measured_ns, most, "longest times")
    lines: list[Series] = []
    if device is not None:
        memory = device.main_memory
        bandwidth = memory.bandwidth_bytes_per_s / 1e12
        peaks = _peaks(device, cases.sources)
        knee = 2 * max(peaks.values(), default=0.0) / bandwidth
        low, high = float(intensity[rows].min()) / 2, float(intensity[rows].max())
        high = max(high, knee) if isfinite(knee) else high
        lines = roof_lines(f"{memory.name}: {bandwidth:,.4g} TB/s", bandwidth, peaks, low, high)
    yield Plot(
        name=f"roofline{end}",
        title=f"Roofline of {shown(cases.hardware, 60)}",
        note="Measured rate of each operation over its FLOPs per byte of memory traffic. Lines: limits of "
        f"the device.{selection}",
        x=Axis("FLOP/byte", "number", is_log=True),
        y=Axis("TFLOP/s", "number", is_log=True),
        series=[
            *lines,
            *cases.points(
                rows,
                intensity,
                rate,
                lambda row: (
                    f"{rate[row]:,.4g} TFLOP/s at {intensity[row]:,.4g} FLOP/byte, "
                    f"{time_text(float(cases.measured_ns[row]))}"
                ),
            ),
        ],
    )


def _peaks(device: Device, sources: Sequence[Cases]) -> dict[str, float]:
    """Return the peak rates [TFLOP/s] of the element types in the shapes by label, highest first. Types with
    the same rate share a label. If no rate is known for any of the types, all dense rates are returned.
    """
    words = {
        word
        for cases in sources
        for text in cases.shapes
        for word in _ELEMENT_TYPE.findall(text[:_MOST_SHAPE_LETTERS])
    }
    # Names of operations contain words like "float"; only the spelling of shapes is a type.
    dtypes = [
        dtype for word in sorted(words) if (dtype := find_dtype(word)) is not None and dtype.name == word
    ]
    element_types = [dtype.name for dtype in dtypes if dtype.kind is DTypeKind.FLOAT] or [
        dtype.name for dtype in dtypes
    ]
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
    return {
        f"{unit} {', '.join(names)}: {flops_per_s / 1e12:,.4g} TFLOP/s": flops_per_s / 1e12
        for (unit, flops_per_s), names in sorted(rates.items(), key=lambda entry: -entry[0][1])
    }


def _waterfalls(result: Accuracy) -> Iterator[tuple[tuple[str, str], Waterfall]]:
    """Yield device, estimator and waterfall of each estimator and each of the longest sources, from the
    measured to the predicted time: the time without an estimate, then the errors of shapes.
    """
    parts_of: dict[tuple[str, str, str], list[Contribution]] = {}
    for row in result.contributions:
        parts_of.setdefault((row.source, row.hardware, row.estimator), []).append(row)
    order = sorted(result.cases, key=lambda cases: -float(cases.measured_ns.sum()))
    number = 0
    for cases in order[: max(_MOST_WATERFALLS // max(len(result.estimators), 1), 1)]:
        for estimator in result.estimators:
            prediction = cases.prediction(estimator)
            if prediction is None or not len(cases):
                continue
            is_covered = ~np.isnan(prediction.duration_ns)
            if not is_covered.any():
                continue
            number += 1
            measured = float(cases.measured_ns.sum())
            uncovered = float(cases.measured_ns[~is_covered].sum())
            parts = parts_of.get((cases.source, cases.hardware, estimator), [])[:_MOST_PARTS]
            labels = [part.label for part in parts]
            changes = {"not estimated": -uncovered} if uncovered else {}
            texts: dict[str, str] = {}
            for part in parts:
                shape = part.shape.removeprefix(part.label).strip()
                label = part.label if labels.count(part.label) == 1 else f"{part.label} {shape}"
                label = label or "(unnamed)"
                changes[label] = changes.get(label, 0.0) + part.predicted_ns - part.measured_ns
                texts[label] = (
                    f"{part.share:+.1%} of the measured time; n {part.count:,}, predicted "
                    f"{time_text(part.predicted_ns)}, measured {time_text(part.measured_ns)}: "
                    f"{shown(part.shape, _NAME_LETTERS)}"
                )
            yield (
                (cases.hardware, estimator),
                Waterfall(
                    name="waterfall" if number == 1 else f"waterfall-{number}",
                    title=f"From measured to predicted time: {shown(cases.source, 60)}, "
                    f"{shown(estimator, 60)}",
                    note="The shapes with the largest errors. Time without an estimate is subtracted first.",
                    before=measured,
                    after=float(prediction.duration_ns[is_covered].sum()),
                    changes=changes,
                    texts=texts,
                    axis=Axis("time", "time"),
                    labels=("measured", "predicted"),
                ),
            )


def _timelines(
    profiles: Sequence[Profile], timeline: Timeline | None, program: Workload | None
) -> Iterator[TimelineChart]:
    """Yield a timeline for each profile, with the simulated spans below the measured ones. All spans
    begin at 0.
    """
    most = _MOST_SPANS // (len(profiles) + 1)
    simulated, about_simulated = _simulated_lanes(timeline, program, most)
    measured = [(profile.name, *_measured_lanes(profile, most)) for profile in profiles]
    if simulated and not any(lanes for _, lanes, _ in measured):
        measured = [("simulated", list[Lane](), "")]
    number = 0
    for name, lanes, about in measured:
        if lanes or simulated:
            number += 1
            yield TimelineChart(
                name="timeline" if number == 1 else f"timeline-{number}",
                title=f"Timeline: {shown(name, 60)}",
                note=" ".join(filter(None, [about, about_simulated])),
                lanes=[*lanes, *simulated],
            )


def _measured_lanes(profile: Profile, most: int) -> tuple[list[Lane], str]:
    """Return the spans of the run with the median duration, with one lane per rank and stream, and a note on
    them. If events have no run numbers, all events are drawn. O(n log n).
    """
    has_time = ~np.isnan(profile.start_ns + profile.duration_ns)
    rows: IntArray = np.flatnonzero(has_time)
    inside = np.flatnonzero(has_time & (profile.run >= 0))
    if len(inside):
        runs, run = np.unique(profile.run[inside], return_inverse=True)
        first, last = np.full(len(runs), np.inf), np.full(len(runs), -np.inf)
        np.minimum.at(first, run, profile.start_ns[inside])
        np.maximum.at(last, run, (profile.start_ns + np.maximum(profile.duration_ns, 0.0))[inside])
        median = np.argsort(last - first, kind="stable")[(len(runs) - 1) // 2]
        rows = inside[run == median]
    if not len(rows):
        return [], ""
    keys = np.stack((profile.rank[rows].astype(np.int64), profile.stream[rows].astype(np.int64)))
    distinct, lane = np.unique(keys, axis=1, return_inverse=True)
    ranks, streams = distinct.tolist()
    several = len(set(ranks)) > 1
    labels = [
        "measured: "
        + (f"rank {rank}, " if several else "")
        + ("no stream" if stream < 0 else f"stream {stream}")
        for rank, stream in zip(ranks, streams, strict=True)
    ]
    texts: list[int] = np.where(profile.op_id > 0, profile.op_id, profile.kernel_id)[rows].tolist()
    roles: list[int] = event_roles(profile)[rows].tolist()
    start = profile.start_ns[rows]
    lanes, note = _lanes(
        labels,
        (lane.reshape(-1), start - float(start.min()), np.maximum(profile.duration_ns[rows], 0.0)),
        lambda row: (_STYLE_OF_ROLE[EventRole(roles[row])], profile.strings[texts[row]] or "(unnamed)"),
        np.zeros(len(rows), np.bool_),
        most,
    )
    return lanes, f"Measured: the run of median length, {note}."


def _simulated_lanes(
    timeline: Timeline | None, program: Workload | None, most: int
) -> tuple[list[Lane], str]:
    """Return the spans of the first simulated rank, with one lane per resource, and a note on them.
    ``program`` has the names of nodes.
    """
    if timeline is None or not len(timeline):
        return [], ""
    rank = int(timeline.rank.min())
    rows = np.flatnonzero(timeline.rank == rank)
    nodes: list[int] = timeline.node[rows].tolist()
    resources: list[int] = timeline.resource[rows].tolist()
    start = timeline.start_ns[rows]

    def style_and_name(row: int) -> tuple[str, str]:
        node = nodes[row]
        text = "loop iterations" if node < 0 else f"node {node}"
        if node >= 0 and program is not None and rank < program.num_ranks:
            graph = None if program.rank_class[rank] == ABSENT else program.graph_of(rank)
            if graph is not None and node < len(graph):
                text = graph.node_name(node) or graph.op_name(node) or text
        return _STYLE_OF_RESOURCE.get(timeline.resources[resources[row]], "host"), text

    lanes, note = _lanes(
        [f"simulated: {name}" for name in timeline.resources],
        (timeline.resource[rows].astype(np.int64), start, timeline.end_ns[rows] - start),
        style_and_name,
        timeline.critical[rows],
        most,
    )
    return lanes, f"Simulated: rank {rank}, {note}."


def _lanes(
    labels: Sequence[str],
    spans: tuple[IntArray, FloatArray, FloatArray],
    style_and_name: Callable[[int], tuple[str, str]],
    is_critical: BoolArray,
    most: int,
) -> tuple[list[Lane], str]:
    """Return the lanes with the most time and their ``most`` longest spans, and the number of spans as
    text.
    """
    lane, start, duration = spans
    busy = np.bincount(lane, duration, len(labels))
    count = np.bincount(lane, minlength=len(labels))
    used = np.sort(np.argsort(-busy, kind="stable")[:_MOST_LANES])
    used = used[count[used] > 0]
    inside = np.flatnonzero(np.isin(lane, used))
    longest = inside[np.argsort(-duration[inside], kind="stable")[:most]]
    lanes: list[Lane] = []
    numbers: list[int] = used.tolist()
    for number in numbers:
        rows = longest[lane[longest] == number]
        rows = rows[np.argsort(start[rows], kind="stable")]
        texts = [style_and_name(row) for row in rows.tolist()]
        lanes.append(
            Lane(
                label=labels[number],
                styles=[style for style, _ in texts],
                start_ns=start[rows],
                end_ns=start[rows] + duration[rows],
                texts=[text for _, text in texts],
                critical=is_critical[rows],
            )
        )
    note = f"{len(lane):,} spans"
    if len(longest) < len(lane):
        total = float(duration.sum())
        share = float(duration[longest].sum()) / total if total else 1.0
        note = f"the {len(longest):,} longest of {len(lane):,} spans ({share:.1%} of their time)"
    lanes_of = int((count > 0).sum())
    return lanes, note + (f" on the {len(used)} busiest of {lanes_of} lanes" if lanes_of > len(used) else "")
