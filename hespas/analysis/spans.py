"""Spans of a timeline for drawing: operations of the first ranks by stream, simulated or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hespas.analysis.recording import DeviceEventKind, Recording
from hespas.analysis.table import AnalysisRow, RowTable, joined_tables, listed, table_of
from hespas.files.documents import Count, Figure
from hespas.graph import Timeline, Workload, timed_class_name
from hespas.graph.columns import BoolArray, FloatArray, IntArray, at_rows
from hespas.report.timelines import Lane, TimelineChart

__all__ = [
    "MAX_RANKS",
    "RecordedSpans",
    "SimulatedSpans",
    "SpanColumns",
    "SpanRow",
    "drawn_spans",
    "timeline_of",
]

MAX_RANKS = 8
"""Ranks whose spans are drawn."""
_MOST_SPANS = 100_000
"""Most spans of a timeline; if there are more, short spans are merged."""
_PIXELS = (64_000, 16_000, 4_000, 1_000)
"""Spans shorter than this fraction of the time are merged: the first fraction that leaves few enough."""
_STYLES = {"compute": "compute", "communication": "communication", "memory": "copies", "copy": "copies"}
"""Kinds of work -> styles of their spans; others are work of the host."""


class SpanRow(AnalysisRow, frozen=True, kw_only=True):
    """Span in the drawn timeline: one operation on a rank, or ``count`` adjacent operations of one class that
    are drawn as one.
    """

    rank: int
    lane: str
    kind: str
    operation: str
    op_class: str
    count: Count
    start_ns: Figure
    end_ns: Figure
    is_critical: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SpanColumns:
    """Spans of streams before merging; columns of shape ``(spans,)``. ``lane``, ``kind``, ``name`` and
    ``op_class`` are indices in ``lanes``, ``kinds``, ``names`` and ``classes``.
    """

    rank: IntArray
    lane: IntArray
    kind: IntArray
    name: IntArray
    op_class: IntArray
    start_ns: FloatArray
    end_ns: FloatArray
    is_critical: BoolArray
    lanes: Sequence[str]
    kinds: Sequence[str]
    names: Sequence[str]
    classes: Sequence[str]


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSpans:
    """All spans of a simulation with properties of their nodes; columns of shape ``(spans,)``.

    ``duration_ns`` excludes waiting for other ranks. ``weight`` is the number of ranks that a span
    represents. ``runs`` is the number of operations that it represents, over all of these ranks. ``op_class``
    is -1 for spans of later loop iterations, which were not simulated one by one. ``name`` is an index in
    ``names``.
    """

    timeline: Timeline
    workload: Workload
    rank_class: IntArray
    duration_ns: FloatArray
    weight: FloatArray
    runs: FloatArray
    op_class: IntArray
    name: IntArray
    names: list[str]
    flops: FloatArray
    bytes_moved: FloatArray

    @classmethod
    def of(cls, timeline: Timeline, workload: Workload) -> SimulatedSpans:
        """Return all spans of a timeline. O(spans log spans)."""
        shown = timeline.shown_by[timeline.shown_by >= 0]
        alike = np.bincount(shown, minlength=len(timeline.finish_ns)).astype(np.float64)
        rank_class = workload.rank_class[timeline.rank].astype(np.int64)
        spans = len(timeline)
        op_class, name = np.full(spans, -1, np.int64), np.zeros(spans, np.int64)
        flops, moved = np.full(spans, np.nan), np.full(spans, np.nan)
        numbers: dict[str, int] = {}
        for index, graph in enumerate(workload.classes):
            own = np.flatnonzero(rank_class == index)
            node = timeline.node[own].astype(np.int64)
            op_class[own] = at_rows(graph.op_class.astype(np.int64), node, -1)
            flops[own] = at_rows(graph.flops, node, np.nan)
            moved[own] = at_rows(graph.bytes_moved, node, np.nan)
            # later iterations of a loop are named after the loop
            rows = at_rows(graph.op_id.astype(np.int64), node, -1)
            blocks = node < 0
            rows[blocks] = -2 - timeline.region[own[blocks]]
            distinct, group = np.unique(rows, return_inverse=True)
            texts = [
                graph.strings[row]
                if row >= 0
                else graph.strings[int(graph.regions.label[-2 - row])] + " (trips)"
                for row in distinct.tolist()
            ]
            codes = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
            name[own] = codes[group.reshape(-1)]
        weight = alike[timeline.rank]
        return cls(
            timeline=timeline,
            workload=workload,
            rank_class=rank_class,
            duration_ns=timeline.end_ns - timeline.start_ns - timeline.wait_ns,
            weight=weight,
            runs=weight * np.where(timeline.node < 0, timeline.trips, 1.0),
            op_class=op_class,
            name=name,
            names=list(numbers),
            flops=flops,
            bytes_moved=moved,
        )

    def on_resource(self, *names: str) -> BoolArray:
        """Return a mask of the spans that run on one of the given resources, such as compute or
        communication.
        """
        resources = self.timeline.resources
        codes = [resources.index(name) for name in names if name in resources]
        return np.isin(self.timeline.resource, codes)

    def class_name(self, code: int) -> str:
        """Return the name of the operation class with number ``code``."""
        return timed_class_name(code) if code >= 0 else "loop"

    def sums(self, group: IntArray, groups: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return runs, time [ns], FLOPs and bytes of each group, summed over all ranks. A sum is NaN if a
        figure of the group is unknown.
        """
        columns = (
            self.runs,
            self.duration_ns * self.weight,
            self.flops * self.weight,
            self.bytes_moved * self.weight,
        )
        runs, total, flops, moved = (
            np.bincount(group, column, groups).astype(np.float64) for column in columns
        )
        return runs, total, flops, moved


def drawn_spans(spans: SpanColumns) -> RowTable[SpanRow]:
    """Return the spans for drawing, by rank, lane and start. If there are too many, spans that are shorter
    than a pixel are merged with spans of the same class in that pixel. O(spans log spans).
    """
    count = len(spans.start_ns)
    first_ns = float(spans.start_ns.min(initial=np.inf)) if count else 0.0
    length_ns = float(spans.end_ns.max()) - first_ns if count else 0.0
    group, first = np.arange(count), np.arange(count)
    for pixels in _PIXELS if count > _MOST_SPANS and length_ns > 0 else ():
        pixel_ns = length_ns / pixels
        is_long = spans.end_ns - spans.start_ns >= pixel_ns
        pixel = np.floor((spans.start_ns - first_ns) / pixel_ns).astype(np.int64)
        alone = np.where(is_long, np.arange(1, count + 1), 0)
        keys = np.stack(
            (spans.rank, spans.lane, spans.kind, pixel, np.where(is_long, 0, spans.op_class), alone)
        )
        _, first, group = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        group = group.reshape(-1)
        if len(first) <= _MOST_SPANS:
            break
    groups = len(first)
    start, end = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(start, group, spans.start_ns)
    np.maximum.at(end, group, spans.end_ns)
    merged = np.bincount(group, minlength=groups)
    critical = np.bincount(group, spans.is_critical, groups) > 0
    order = np.lexsort((start, spans.lane[first], spans.rank[first]))
    first = first[order]
    classes = [spans.classes[row] for row in spans.op_class[first].tolist()]
    return table_of(
        SpanRow,
        rank=spans.rank[first],
        lane=[spans.lanes[row] for row in spans.lane[first].tolist()],
        kind=[spans.kinds[row] for row in spans.kind[first].tolist()],
        operation=[
            spans.names[name] if number == 1 else f"{number:,} of {of_class}"
            for name, number, of_class in zip(
                spans.name[first].tolist(), merged[order].tolist(), classes, strict=True
            )
        ],
        op_class=classes,
        count=merged[order],
        start_ns=start[order],
        end_ns=end[order],
        is_critical=critical[order],
    )


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSpans:
    """Device events for drawing. ``critical`` lists the events of each rank on its critical path, as rows of
    its recording. The times of a rank plus ``shift_ns`` are on the common clock of all ranks.
    """

    recordings: Sequence[Recording]
    critical: Mapping[int, IntArray]
    shift_ns: Mapping[int, float]

    def drawn(self) -> RowTable[SpanRow]:
        """Return the device events of the first ranks."""
        parts: list[RowTable[SpanRow]] = []
        for recording in [recording for recording in self.recordings if len(recording)][:MAX_RANKS]:
            profile, rows = recording.profile, recording.rows
            named = np.where(profile.op_id[rows] > 0, profile.op_id[rows], profile.kernel_id[rows])
            names, name = np.unique(named, return_inverse=True)
            streams, lane = np.unique(profile.stream[rows], return_inverse=True)
            is_critical = np.zeros(len(rows), np.bool_)
            is_critical[self.critical.get(recording.rank, np.empty(0, np.int64))] = True
            shift = self.shift_ns.get(recording.rank, 0.0)
            kinds = [kind.word for kind in DeviceEventKind]
            parts.append(
                drawn_spans(
                    SpanColumns(
                        rank=np.full(len(rows), recording.rank),
                        lane=lane.reshape(-1),
                        kind=recording.kind.astype(np.int64),
                        name=name.reshape(-1),
                        op_class=recording.kind.astype(np.int64),
                        start_ns=recording.start_ns + shift,
                        end_ns=recording.end_ns + shift,
                        is_critical=is_critical,
                        lanes=[
                            "no stream" if stream < 0 else f"stream {stream}" for stream in listed(streams)
                        ],
                        kinds=kinds,
                        names=[profile.strings[row] for row in listed(names)],
                        classes=kinds,
                    )
                )
            )
        return joined_tables(SpanRow, parts)


def timeline_of(table: RowTable[SpanRow], note: str = "") -> TimelineChart | None:
    """Return the timeline of spans with a lane for each stream of each rank; None without spans."""
    if not len(table):
        return None
    lanes: list[Lane] = []
    rank, lane = table["rank"], table["lane"]
    starts = np.flatnonzero(np.append(True, (rank[1:] != rank[:-1]) | (lane[1:] != lane[:-1])))
    several = int(rank[0]) != int(rank[-1])
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(table)], strict=True):
        chosen = table.take(np.arange(first, last))
        label = str(lane[first])
        lanes.append(
            Lane(
                label=f"rank {rank[first]}, {label}" if several else label,
                styles=[_STYLES.get(kind, "host") for kind in chosen["kind"].tolist()],
                start_ns=chosen["start_ns"],
                end_ns=chosen["end_ns"],
                texts=chosen["operation"].tolist(),
                critical=chosen["is_critical"],
            )
        )
    return TimelineChart(name="timeline", title="Timeline", table="spans", note=note, lanes=lanes)
