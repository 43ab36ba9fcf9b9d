"""Time of a simulated step: by rank, operation, class, module and group of ranks, on the critical path, and
as a timeline.

One rank represents all ranks that behave alike; in sums, its figures are multiplied by their number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hespas.analysis.collectives import bus_factor
from hespas.analysis.device_use import ALL_STEPS
from hespas.analysis.table import AnalysisRow, RowTable, table_from_rows, table_of
from hespas.files.documents import Count, Figure
from hespas.graph import CollectiveKind, OpGraph, Timeline, Workload, timed_class_name
from hespas.graph.columns import BoolArray, FloatArray, IntArray, at_rows
from hespas.graph.groups import groups_text
from hespas.graph.timeline import Intervals
from hespas.simulator import Simulation, node_label, segments

__all__ = [
    "AxisRow",
    "CriticalOperationRow",
    "CriticalSegmentRow",
    "ModuleRow",
    "SimulatedClassRow",
    "SimulatedOperationRow",
    "SimulatedRankRow",
    "SimulatedStep",
    "SpanRow",
    "simulated_step",
]

_MAX_RANKS = 8
"""Ranks whose spans are drawn."""
_PIXELS = 1000
"""Spans shorter than this fraction of the step are merged with adjacent spans of their class."""
_MESSAGE = len(CollectiveKind) + 1
_KIND_NAMES = {int(kind): kind.name.lower() for kind in CollectiveKind} | {_MESSAGE: "send/recv"}


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


class AxisRow(AnalysisRow, frozen=True, kw_only=True):
    """Communication of one kind in one grouping of the ranks, such as an axis of the parallel layout.

    ``size_bytes`` is the sum of the whole buffers on one rank. ``total_ns`` and ``exposed_ns`` (time without
    computation) are sums over all ranks. Bandwidths (10^9 bytes/s) are as defined by nccl-tests.
    """

    kind: str
    groups: str
    group_size: int
    count: Count
    size_bytes: Figure
    total_ns: Figure
    exposed_ns: Figure
    exposed_share: Figure
    algorithm_gbytes_per_s: Figure
    bus_gbytes_per_s: Figure


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


class SpanRow(AnalysisRow, frozen=True, kw_only=True):
    """Span in the drawn timeline: one operation on a rank, or ``count`` adjacent operations of one class that
    are drawn as one.
    """

    rank: int
    lane: str
    operation: str
    op_class: str
    count: Count
    start_ns: Figure
    end_ns: Figure
    is_critical: bool


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SimulatedStep:
    """Tables of one simulated step."""

    breakdown: RowTable[SimulatedRankRow]
    classes: RowTable[SimulatedClassRow]
    operations: RowTable[SimulatedOperationRow]
    modules: RowTable[ModuleRow]
    axes: RowTable[AxisRow]
    critical_path: RowTable[CriticalOperationRow]
    across: RowTable[CriticalSegmentRow]
    spans: RowTable[SpanRow]

    def tables(self) -> dict[str, RowTable[Any]]:
        """Return all tables by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}


def simulated_step(done: Simulation) -> SimulatedStep:
    """Return all tables of a simulation. O(spans log spans)."""
    timeline = done.timeline
    spans = _SimulatedSpans.of(timeline, done.workload)
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
        tflops_per_s=_rate(flops, total) / 1e3,
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
        mean_ns=_rate(total, runs),
        tflops_per_s=_rate(flops, total) / 1e3,
        gbytes_per_s=_rate(moved, total),
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
    return SimulatedStep(
        breakdown=_breakdown(spans),
        classes=classes.largest("total_ns"),
        operations=operations.largest("total_ns"),
        modules=_module_rows(spans),
        axes=_axis_rows(spans),
        critical_path=critical.largest("total_ns"),
        across=_critical_segments(done),
        spans=_drawn_spans(spans, path),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _SimulatedSpans:
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
    def of(cls, timeline: Timeline, workload: Workload) -> _SimulatedSpans:
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


def _breakdown(spans: _SimulatedSpans) -> RowTable[SimulatedRankRow]:
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


def _rate(amount: FloatArray, time_ns: FloatArray) -> FloatArray:
    """Return ``amount`` per ns; NaN where the time is 0 or unknown."""
    rates: FloatArray = np.full(len(amount), np.nan)
    np.divide(amount, time_ns, out=rates, where=time_ns > 0)
    return rates


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


def _module_rows(spans: _SimulatedSpans) -> RowTable[ModuleRow]:
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


def _axis_rows(spans: _SimulatedSpans) -> RowTable[AxisRow]:
    """Return collectives and messages by the rank groups in which they run; each grouping is an axis of the
    parallel layout.
    """
    timeline, workload = spans.timeline, spans.workload
    # the part of each span that overlaps with computation of its rank [ns]
    computes, covered = spans.on_resource("compute"), np.zeros(len(timeline))
    order = np.argsort(timeline.rank, kind="stable")
    for of_rank in np.split(order, np.flatnonzero(np.diff(timeline.rank[order])) + 1):
        computing = of_rank[computes[of_rank]]
        work = Intervals.union(timeline.start_ns[computing], timeline.end_ns[computing])
        end_ns = timeline.end_ns[of_rank]
        covered[of_rank] = work.within_ns(end_ns - spans.duration_ns[of_rank], end_ns)
    sums: dict[tuple[str, str, int], list[float]] = {}
    for index, graph in enumerate(workload.classes):
        own = np.flatnonzero((spans.rank_class == index) & (timeline.node >= 0))
        kind, groups, size, whole = _communication(graph, workload.num_ranks)
        node = timeline.node[own].astype(np.int64)
        for row in np.flatnonzero(at_rows(kind, node, -1) >= 0).tolist():
            span, at = int(own[row]), int(node[row])
            key = (_KIND_NAMES[int(kind[at])], groups[at], int(size[at]))
            total = sums.setdefault(key, [0.0, 0.0, 0.0, 0.0])
            took_ns, weight = float(spans.duration_ns[span]), float(spans.weight[span])
            for column, value in enumerate((1.0, float(whole[at]), took_ns, took_ns - float(covered[span]))):
                total[column] += value * weight
    rows: list[AxisRow] = []
    for (name, group, group_size), (count, whole_bytes, total_ns, exposed_ns) in sums.items():
        rate = whole_bytes / total_ns if total_ns > 0 else float("nan")
        factor = float(bus_factor(name, np.array([group_size], np.float64))[0])
        rows.append(
            AxisRow(
                kind=name,
                groups=group,
                group_size=group_size,
                count=round(count),
                size_bytes=whole_bytes / workload.num_ranks,
                total_ns=total_ns,
                exposed_ns=exposed_ns,
                exposed_share=exposed_ns / total_ns if total_ns > 0 else float("nan"),
                algorithm_gbytes_per_s=rate,
                bus_gbytes_per_s=rate * factor,
            )
        )
    return table_from_rows(AxisRow, rows).largest("exposed_ns")


def _communication(graph: OpGraph, num_ranks: int) -> tuple[IntArray, dict[int, str], IntArray, FloatArray]:
    """Return four properties of the communication of each node: the code of its kind (-1: none), a text for
    its groups (by node), the number of ranks in a group (-1: sizes differ), and the bytes of the whole
    buffer.
    """
    kind, size = np.full(len(graph), -1, np.int64), np.full(len(graph), -1, np.int64)
    whole = np.full(len(graph), np.nan)
    texts: dict[int, str] = {}
    group_sets: dict[int, tuple[str, int]] = {-1: ("all ranks", num_ranks)}
    for row, groups in enumerate(graph.group_sets):
        group_sets[row] = (groups_text(groups, num_ranks), groups.group_size)
    table = graph.collectives
    kind[table.node] = table.kind
    whole[table.node] = table.comm_bytes
    for node, row in zip(table.node.tolist(), table.group_set.tolist(), strict=True):
        texts[node], size[node] = group_sets[row]
    gathers = table.node[table.kind == int(CollectiveKind.ALL_GATHER)]
    whole[gathers] *= np.where(size[gathers] > 0, size[gathers], np.nan)
    messages = graph.p2p
    kind[messages.node], size[messages.node] = _MESSAGE, 2
    whole[messages.node] = messages.comm_bytes
    texts |= dict.fromkeys(messages.node.tolist(), "pairs")
    return kind, texts, size, whole


def _drawn_spans(spans: _SimulatedSpans, path: IntArray) -> RowTable[SpanRow]:
    """Return the spans of the first ranks for drawing. Spans that are shorter than a pixel are merged with
    spans of the same class in that pixel. ``path`` lists the spans of the critical path.
    """
    timeline = spans.timeline
    is_critical = np.zeros(len(timeline), np.bool_)
    is_critical[path] = True
    shown = np.unique(timeline.shown_by[timeline.shown_by >= 0])[:_MAX_RANKS]
    chosen = np.flatnonzero(np.isin(timeline.rank, shown))
    pixel_ns = timeline.step_ns / _PIXELS
    pixel = np.floor(timeline.start_ns[chosen] / pixel_ns).astype(np.int64) if pixel_ns > 0 else chosen * 0
    is_long = spans.duration_ns[chosen] >= pixel_ns
    alone = np.where(is_long, np.arange(1, len(chosen) + 1), 0)
    keys = np.stack(
        (timeline.rank[chosen], timeline.resource[chosen], timeline.stream[chosen], pixel,
         np.where(is_long, 0, spans.op_class[chosen]), alone)
    ).astype(np.int64)  # fmt: skip
    distinct, first, group, count = np.unique(
        keys, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    group, groups = group.reshape(-1), distinct.shape[1]
    start, end = np.full(groups, np.inf), np.zeros(groups)
    np.minimum.at(start, group, timeline.start_ns[chosen])
    np.maximum.at(end, group, timeline.end_ns[chosen])
    first_span = chosen[first]
    names: list[str] = [spans.names[row] for row in spans.name[first_span].tolist()]
    classes = [spans.class_name(code) for code in spans.op_class[first_span].tolist()]
    lanes: list[str] = [
        timeline.resources[kind] if stream < 0 else f"{timeline.resources[kind]} {stream}"
        for kind, stream in distinct[1:3].T.tolist()
    ]
    return table_of(
        SpanRow,
        rank=distinct[0],
        lane=lanes,
        operation=[
            name if number == 1 else f"{number:,} of {of_class}"
            for name, number, of_class in zip(names, count.tolist(), classes, strict=True)
        ],
        op_class=classes,
        count=count,
        start_ns=start,
        end_ns=end,
        is_critical=np.bincount(group, is_critical[chosen], groups) > 0,
    )
