"""Time of a simulated step: by rank, operation, class, module and group of ranks, on the critical path, and
as a timeline.

One rank represents all ranks that behave alike; in sums, its figures are multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hespas.analysis.charts import bandwidth_chart, idle_chart, present, roofline_chart, tree_chart
from hespas.analysis.device_use import ALL_STEPS, IdleLengthRow, gap_lengths
from hespas.analysis.simulated_communication import (
    AxisRow,
    CollectiveSizeRow,
    axis_rows,
    communication_times,
    size_rows,
)
from hespas.analysis.spans import MAX_RANKS, SimulatedSpans, SpanColumns, SpanRow, drawn_spans, timeline_of
from hespas.analysis.table import AnalysisRow, RowTable, rate_of, table_from_rows, table_of
from hespas.analysis.traffic import TrafficRow, matrix_of, traffic
from hespas.files.documents import Count, Figure
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.timeline import Intervals
from hespas.hardware import Device
from hespas.report.charts import Chart
from hespas.simulator import Simulation, node_label, segments
from hespas.simulator.memory import RankMemory

__all__ = [
    "CriticalOperationRow",
    "CriticalSegmentRow",
    "MemoryContentRow",
    "ModuleRow",
    "SimulatedClassRow",
    "SimulatedOperationRow",
    "SimulatedRankRow",
    "SimulatedStep",
    "memory_contents",
    "simulated_step",
]


class SimulatedRankRow(AnalysisRow, frozen=True, kw_only=True):
    """Time breakdown of one rank, which represents ``alike`` ranks.

    ``span_ns``, the step time of the job, is ``compute_ns`` + ``exposed_communication_ns`` +
    ``exposed_memory_ns`` + ``idle_ns``. Exposed memory is the time of copies and host work that overlaps
    neither computation nor communication. Idle time includes the time from the finish of the rank to the end
    of the step. ``waiting_ns`` is the time in which the rank waits for other ranks and nothing computes (NaN:
    unknown).
    """

    rank: int
    step: int
    alike: Count
    span_ns: Figure
    finish_ns: Figure
    compute_ns: Figure
    communication_ns: Figure
    exposed_communication_ns: Figure
    exposed_memory_ns: Figure
    idle_ns: Figure
    waiting_ns: Figure


class SimulatedClassRow(AnalysisRow, frozen=True, kw_only=True):
    """One operation class on all ranks: the number of runs and their total time. ``critical_ns`` is the time
    that the critical path of the job spends in this class.
    """

    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    critical_ns: Figure
    flops: Figure
    tflops_per_s: Figure


class SimulatedOperationRow(AnalysisRow, frozen=True, kw_only=True):
    """All operations of one name on all ranks. A row may also represent the later iterations of a loop, which
    were extrapolated and not simulated one by one.
    """

    operation: str
    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    mean_ns: Figure
    tflops_per_s: Figure
    gbytes_per_s: Figure


class ModuleRow(AnalysisRow, frozen=True, kw_only=True):
    """Module or function of the program, from the names of its operations. Rows of its submodules follow its
    row.

    ``total_ns`` is the time of all its operations on all ranks, ``own_ns`` the time without submodules.
    """

    node: int
    parent: int
    depth: int
    name: str
    count: Count
    total_ns: Figure
    own_ns: Figure
    share: Figure


class CriticalOperationRow(AnalysisRow, frozen=True, kw_only=True):
    """Time that the critical path of the job spends in operations of one name."""

    operation: str
    op_class: str
    resource: str
    count: Count
    total_ns: Figure
    share: Figure


class CriticalSegmentRow(AnalysisRow, frozen=True, kw_only=True):
    """Segment of the critical path of the job on one rank. It starts when the previous segment allows it."""

    rank: int
    count: Count
    start_ns: Figure
    duration_ns: Figure
    first_operation: str
    last_operation: str


class MemoryContentRow(AnalysisRow, frozen=True, kw_only=True):
    """Memory of one kind of content in the ranks of one class at their peak; ``share`` is relative to the
    peak.
    """

    rank_class: str
    content: str
    size_bytes: Figure
    share: Figure


def memory_contents(memories: Sequence[RankMemory], names: Sequence[str]) -> RowTable[MemoryContentRow]:
    """Return the memory of each rank class at its peak by content, largest first. ``names`` are the names of
    all rank classes.
    """
    rows = [
        MemoryContentRow(
            rank_class=names[memory.rank_class],
            content=content,
            size_bytes=size_bytes,
            share=size_bytes / memory.use.peak_bytes,
        )
        for memory in memories
        for content, size_bytes in sorted(memory.use.peak_contents.items(), key=lambda item: -item[1])
    ]
    return table_from_rows(MemoryContentRow, rows)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SimulatedStep:
    """Tables of one simulated step."""

    breakdown: RowTable[SimulatedRankRow]
    classes: RowTable[SimulatedClassRow]
    operations: RowTable[SimulatedOperationRow]
    modules: RowTable[ModuleRow]
    axes: RowTable[AxisRow]
    collectives: RowTable[CollectiveSizeRow]
    critical_path: RowTable[CriticalOperationRow]
    across: RowTable[CriticalSegmentRow]
    traffic: RowTable[TrafficRow]
    idle_lengths: RowTable[IdleLengthRow]
    spans: RowTable[SpanRow]

    def tables(self) -> dict[str, RowTable[Any]]:
        """Return all tables by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}

    def charts(self, device: Device | None, dtype: str = "") -> tuple[Chart, ...]:
        """Return the charts of the step. ``device`` is the device of the roofline (None: no roofline), and
        ``dtype`` the element type of most of the arithmetic.
        """
        roofline = None
        if device is not None:
            with np.errstate(invalid="ignore", divide="ignore"):
                intensity = self.operations["tflops_per_s"] * 1e3 / self.operations["gbytes_per_s"]
            roofline = roofline_chart(self.operations, device, intensity, dtype)
        return present(
            timeline_of(self.spans),
            idle_chart(self.idle_lengths, "idle_lengths", _GAP_NOTE),
            tree_chart(self.modules, "total_ns"),
            roofline,
            bandwidth_chart(self.collectives),
            matrix_of(self.traffic),
        )


def simulated_step(done: Simulation) -> SimulatedStep:
    """Return all tables of a simulation. O(spans log spans)."""
    timeline = done.timeline
    spans = SimulatedSpans.of(timeline, done.workload)
    path = done.critical_path.astype(np.int64)
    if not len(path) and len(timeline):
        last = int(np.nanargmax(timeline.finish_ns))
        path = np.flatnonzero(timeline.critical & (timeline.rank == timeline.shown_by[last]))
    # how long each span of the critical path delays the next one
    spent_ns = np.empty(0)
    if len(path):
        spent_ns = np.diff(np.append(timeline.start_ns[path], timeline.end_ns[path[-1]]))
    codes, of_class = np.unique(spans.op_class, return_inverse=True)
    of_class = of_class.reshape(-1)
    runs, total, flops, _ = spans.sums(of_class, len(codes))
    classes = table_of(
        SimulatedClassRow,
        op_class=[spans.class_name(code) for code in codes.tolist()],
        count=np.rint(runs).astype(np.int64),
        total_ns=total,
        share=_share(total, float(total.sum())),
        critical_ns=np.bincount(of_class[path], spent_ns, len(codes)).astype(np.float64),
        flops=flops,
        tflops_per_s=rate_of(flops, total) / 1e3,
    )
    keys, of_operation = np.unique(np.stack((spans.name, spans.op_class)), axis=1, return_inverse=True)
    runs, total, flops, moved = spans.sums(of_operation.reshape(-1), keys.shape[1])
    operations = table_of(
        SimulatedOperationRow,
        operation=[spans.names[row] for row in keys[0].tolist()],
        op_class=[spans.class_name(code) for code in keys[1].tolist()],
        count=np.rint(runs).astype(np.int64),
        total_ns=total,
        share=_share(total, float(total.sum())),
        mean_ns=rate_of(total, runs),
        tflops_per_s=rate_of(flops, total) / 1e3,
        gbytes_per_s=rate_of(moved, total),
    )
    columns = (spans.name[path], spans.op_class[path], timeline.resource[path].astype(np.int64))
    keys, on_path = np.unique(np.stack(columns), axis=1, return_inverse=True)
    total = np.bincount(on_path.reshape(-1), spent_ns, keys.shape[1]).astype(np.float64)
    critical = table_of(
        CriticalOperationRow,
        operation=[spans.names[row] for row in keys[0].tolist()],
        op_class=[spans.class_name(code) for code in keys[1].tolist()],
        resource=[timeline.resources[row] for row in keys[2].tolist()],
        count=np.bincount(on_path.reshape(-1), minlength=keys.shape[1]),
        total_ns=total,
        share=_share(total, float(total.sum())),
    )
    communication = communication_times(spans)
    return SimulatedStep(
        breakdown=_breakdown(spans),
        classes=classes.largest("total_ns"),
        operations=operations.largest("total_ns"),
        modules=_module_rows(spans),
        axes=axis_rows(communication, done.workload.num_ranks),
        collectives=size_rows(communication),
        critical_path=critical.largest("total_ns"),
        across=_critical_segments(done),
        traffic=traffic(done.workload),
        idle_lengths=_gap_lengths(spans),
        spans=_drawn_spans(spans, path),
    )


def _breakdown(spans: SimulatedSpans) -> RowTable[SimulatedRankRow]:
    timeline = spans.timeline
    step_ns = timeline.step_ns
    working = spans.on_resource("compute", "communication")
    rows: list[SimulatedRankRow] = []
    shown, alike = np.unique(timeline.shown_by[timeline.shown_by >= 0], return_counts=True)
    compute, communication = (timeline.resource_ns(name) for name in ("compute", "communication"))
    for rank, count in zip(shown.tolist(), alike.tolist(), strict=True):
        own = timeline.rank == rank
        worked, any_time = (
            Intervals.union(timeline.start_ns[chosen], timeline.end_ns[chosen]).length_ns
            for chosen in (own & working, own)
        )
        exposed = float(timeline.exposed_comm_ns[rank])
        rows.append(
            SimulatedRankRow(
                rank=rank,
                step=ALL_STEPS,
                alike=count,
                span_ns=step_ns,
                finish_ns=float(timeline.finish_ns[rank]),
                compute_ns=float(compute[rank]),
                communication_ns=float(communication[rank]),
                exposed_communication_ns=exposed,
                exposed_memory_ns=any_time - worked,
                idle_ns=max(step_ns - float(compute[rank]) - exposed - (any_time - worked), 0.0),
                waiting_ns=float(timeline.exposed_wait_ns[rank].sum()),
            )
        )
    return table_from_rows(SimulatedRankRow, rows)


def _share(part: FloatArray, whole: float) -> FloatArray:
    shares: FloatArray = part / whole if whole > 0 else np.full(len(part), np.nan)
    return shares


_GAP_NOTE = "Gaps in which a rank computes nothing, on all ranks together."
_GAP_CAUSES = ("communication", "copy", "host", "waiting")
"""Work that covers most of a gap between computations; waiting: none."""


def _gap_lengths(spans: SimulatedSpans) -> RowTable[IdleLengthRow]:
    """Return the gaps in which a rank computes nothing, from the start of the step to its end, by length and
    by the work that covers most of the gap.
    """
    timeline = spans.timeline
    end_of_step = np.array([timeline.step_ns])
    parts: list[tuple[FloatArray, IntArray, FloatArray]] = []
    for rank in np.unique(timeline.shown_by[timeline.shown_by >= 0]).tolist():
        own = timeline.rank == rank

        def ran(*names: str, own: BoolArray = own) -> Intervals:
            chosen = own & spans.on_resource(*names)
            # a collective begins to transfer when its last rank has arrived
            return Intervals.union(
                timeline.end_ns[chosen] - spans.duration_ns[chosen], timeline.end_ns[chosen]
            )

        computed = ran("compute")
        start, end = np.append(0.0, computed.end), np.append(computed.start, end_of_step)
        start, end = start[end > start], end[end > start]
        covered = np.stack([ran(name).within_ns(start, end) for name in _GAP_CAUSES[:-1]])
        cause = np.where(covered.max(axis=0) * 2 >= end - start, covered.argmax(axis=0), len(_GAP_CAUSES) - 1)
        alike = float((timeline.shown_by == rank).sum())
        parts.append((end - start, cause.astype(np.int64), np.full(len(start), alike)))
    length, cause, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
    return gap_lengths(_GAP_CAUSES, cause, length, weight)


def _critical_segments(done: Simulation) -> RowTable[CriticalSegmentRow]:
    """Return the segments of the critical path across ranks; an empty table if the path stays on one rank."""
    path = segments(done)
    rows: list[CriticalSegmentRow] = []
    for segment in path if len(path) > 1 else ():
        graph = done.workload.graph_of(segment.rank)
        rows.append(
            CriticalSegmentRow(
                rank=segment.rank,
                count=segment.spans,
                start_ns=segment.start_ns,
                duration_ns=segment.end_ns - segment.start_ns,
                first_operation=node_label(graph, segment.first_node),
                last_operation=node_label(graph, segment.last_node),
            )
        )
    return table_from_rows(CriticalSegmentRow, rows)


def _module_rows(spans: SimulatedSpans) -> RowTable[ModuleRow]:
    """Return the time by module of the model.

    Modules are read from the operation names of frameworks, such as ``jit(step)/Model/layer_0/attn``. The
    table is empty if no operation names its module.
    """
    own: dict[tuple[str, ...], list[float]] = {}
    for index, graph in enumerate(spans.workload.classes):
        chosen = np.flatnonzero((spans.rank_class == index) & (spans.timeline.node >= 0))
        rows = graph.framework_id[spans.timeline.node[chosen]].astype(np.int64)
        distinct, group = np.unique(rows, return_inverse=True)
        group, time_ns = group.reshape(-1), (spans.duration_ns * spans.weight)[chosen]
        runs = np.bincount(group, spans.runs[chosen], len(distinct))
        took = np.bincount(group, time_ns, len(distinct))
        for row, count, took_ns in zip(distinct.tolist(), runs.tolist(), took.tolist(), strict=True):
            path = tuple(graph.strings[row].split("/")[:-1]) if row > 0 else ()
            sums = own.setdefault(path, [0.0, 0.0])
            sums[0] += count
            sums[1] += took_ns
    if not any(own):
        return table_from_rows(ModuleRow, [])
    return table_from_rows(ModuleRow, list(_module_tree(own)))


def _module_tree(own: Mapping[tuple[str, ...], list[float]]) -> Iterator[ModuleRow]:
    """Yield the modules in tree order; submodules with the most time are first. ``own`` maps the path of a
    module to its runs and its time without submodules.
    """
    inside: dict[tuple[str, ...], list[float]] = {}
    for path, (count, took_ns) in own.items():
        for depth in range(len(path) + 1):
            sums = inside.setdefault(path[:depth], [0.0, 0.0])
            sums[0] += count
            sums[1] += took_ns
    submodules: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in inside:
        if path:
            submodules.setdefault(path[:-1], []).append(path)
    whole_ns = inside[()][1]
    number: dict[tuple[str, ...], int] = {}
    without_module: list[tuple[str, ...]] = [()] if () in own else []
    waiting = [*without_module, *sorted(submodules.get((), []), key=lambda path: inside[path][1])]
    while waiting:
        path = waiting.pop()
        number[path] = len(number)
        count, took_ns = inside[path] if path else own[()]
        yield ModuleRow(
            node=number[path],
            parent=number.get(path[:-1], -1) if len(path) > 1 else -1,
            depth=max(len(path) - 1, 0),
            name=path[-1] if path else "(no module)",
            count=round(count),
            total_ns=took_ns,
            own_ns=own.get(path, [0.0, 0.0])[1],
            share=took_ns / whole_ns if whole_ns > 0 else float("nan"),
        )
        if path:
            waiting.extend(sorted(submodules.get(path, []), key=lambda child: inside[child][1]))


def _drawn_spans(spans: SimulatedSpans, path: IntArray) -> RowTable[SpanRow]:
    """Return the spans of the first ranks for drawing. ``path`` lists the spans of the critical path."""
    timeline = spans.timeline
    is_critical = np.zeros(len(timeline), np.bool_)
    is_critical[path] = True
    shown = np.unique(timeline.shown_by[timeline.shown_by >= 0])[:MAX_RANKS]
    chosen = np.flatnonzero(np.isin(timeline.rank, shown))
    streams, lane = np.unique(
        np.stack((timeline.resource[chosen], timeline.stream[chosen])).astype(np.int64),
        axis=1,
        return_inverse=True,
    )
    classes, op_class = np.unique(spans.op_class[chosen], return_inverse=True)
    lanes: list[str] = [
        timeline.resources[kind] if stream < 0 else f"{timeline.resources[kind]} {stream}"
        for kind, stream in streams.T.tolist()
    ]
    return drawn_spans(
        SpanColumns(
            rank=timeline.rank[chosen].astype(np.int64),
            lane=lane.reshape(-1),
            kind=timeline.resource[chosen].astype(np.int64),
            name=spans.name[chosen],
            op_class=op_class.reshape(-1),
            start_ns=timeline.start_ns[chosen],
            end_ns=timeline.end_ns[chosen],
            is_critical=is_critical[chosen],
            lanes=lanes,
            kinds=timeline.resources,
            names=spans.names,
            classes=[spans.class_name(code) for code in classes.tolist()],
        )
    )
