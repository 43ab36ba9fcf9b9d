"""Where the time of a simulated step goes: by rank, operation, class, module and group of ranks, on the
critical path, and when.

Ranks that do the same are shown by one of them, and counted as many times as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hespas.analysis.breakdown import ALL_STEPS
from hespas.analysis.collectives import bus_factor
from hespas.analysis.intervals import Intervals
from hespas.analysis.table import Row, Table, table_from_rows, table_of
from hespas.files.documents import Count, Figure
from hespas.graph import CollectiveKind, OpGraph, Timeline, Workload, timed_class_name
from hespas.graph.columns import BoolArray, FloatArray, IntArray, at_rows
from hespas.graph.groups import groups_text
from hespas.simulator import Simulation, node_label, segments

__all__ = [
    "AxisRow",
    "ModuleRow",
    "OnPathRow",
    "SegmentRow",
    "SimulatedClassRow",
    "SimulatedOperationRow",
    "SimulatedRankRow",
    "SimulatedStep",
    "SpanRow",
    "simulated_step",
]

_MOST_RANKS = 8
"""Ranks whose spans are drawn."""
_PIXELS = 1000
"""Spans shorter than this part of the step are drawn together with those of their class beside them."""


class SimulatedRankRow(Row, frozen=True, kw_only=True):
    """One rank, which stands for ``alike`` ranks. ``span_ns``, the step of the job, is ``compute_ns`` +
    ``exposed_communication_ns`` + ``exposed_memory_ns`` (copies and the host beside neither) + ``idle_ns``;
    ``idle_ns`` also counts what is left of the step when the rank is done. ``waiting_ns`` of all that is
    waiting for other ranks while nothing computes (NaN: nobody knows).
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


class SimulatedClassRow(Row, frozen=True, kw_only=True):
    """One class of operations on all ranks: ``count`` runs of them took ``total_ns``; ``critical_ns`` is what
    the critical path of the job spends in it.
    """

    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    critical_ns: Figure
    flops: Figure
    tflops_per_s: Figure


class SimulatedOperationRow(Row, frozen=True, kw_only=True):
    """Operations of one name on all ranks; of a loop that was not run trip by trip, its later trips."""

    operation: str
    op_class: str
    count: Count
    total_ns: Figure
    share: Figure
    mean_ns: Figure
    tflops_per_s: Figure
    gbytes_per_s: Figure


class ModuleRow(Row, frozen=True, kw_only=True):
    """One module, or function, of the program as its operations name it; those in it follow. ``total_ns`` is
    the time of all operations inside on all ranks, ``own_ns`` of those in none of its parts.
    """

    node: int
    parent: int
    depth: int
    name: str
    count: Count
    total_ns: Figure
    own_ns: Figure
    share: Figure


class AxisRow(Row, frozen=True, kw_only=True):
    """Communication of one kind among groups of ranks: an axis of the parallel layout. ``size_bytes`` is the
    whole buffer of all its runs on one rank, ``total_ns`` and ``exposed_ns`` (nothing computes meanwhile) are
    sums over all ranks. Bandwidths (10^9 bytes/s) as nccl-tests defines them.
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


class OnPathRow(Row, frozen=True, kw_only=True):
    """What the critical path of the job spends in operations of one name."""

    operation: str
    op_class: str
    resource: str
    count: Count
    total_ns: Figure
    share: Figure


class SegmentRow(Row, frozen=True, kw_only=True):
    """A stretch of the critical path of the job on one rank, which begins when the one before lets it."""

    rank: int
    count: Count
    start_ns: Figure
    duration_ns: Figure
    first_operation: str
    last_operation: str


class SpanRow(Row, frozen=True, kw_only=True):
    """Something that ran on a rank, or ``count`` things of one class beside each other, to be drawn."""

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
    """The tables of one simulated step."""

    breakdown: Table[SimulatedRankRow]
    classes: Table[SimulatedClassRow]
    operations: Table[SimulatedOperationRow]
    modules: Table[ModuleRow]
    axes: Table[AxisRow]
    critical_path: Table[OnPathRow]
    across: Table[SegmentRow]
    spans: Table[SpanRow]

    def tables(self) -> dict[str, Table[Any]]:
        """All of them under their names."""
        return {column.name: getattr(self, column.name) for column in fields(self)}


def simulated_step(done: Simulation) -> SimulatedStep:
    """All tables of a simulation. O(spans log spans)."""
    spans = _Spans.of(done.timeline, done.workload)
    path, spent_ns = _path(done)
    return SimulatedStep(
        breakdown=_breakdown(spans),
        classes=_classes(spans, path, spent_ns),
        operations=_operations(spans),
        modules=_modules(spans),
        axes=_axes(spans),
        critical_path=_critical_path(spans, path, spent_ns),
        across=_across(done),
        spans=_drawn(spans, path),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Spans:
    """All spans with what their nodes are; columns of shape ``(spans,)``. ``duration_ns`` is without waiting
    for other ranks; ``weight`` is how many ranks do the same, ``runs`` how many of all ranks' operations a
    span is. ``op_class`` is -1 for later trips of a loop; ``name`` numbers ``names``.
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
    def of(cls, timeline: Timeline, workload: Workload) -> _Spans:
        shown = timeline.shown_by[timeline.shown_by >= 0]
        alike = np.bincount(shown, minlength=len(timeline.finish_ns)).astype(np.float64)
        of_class = workload.rank_class[timeline.rank].astype(np.int64)
        spans = len(timeline)
        op_class, name = np.full(spans, -1, np.int64), np.zeros(spans, np.int64)
        flops, moved = np.full(spans, np.nan), np.full(spans, np.nan)
        numbers: dict[str, int] = {}
        for index, graph in enumerate(workload.classes):
            mine = np.flatnonzero(of_class == index)
            node = timeline.node[mine].astype(np.int64)
            op_class[mine] = at_rows(graph.op_class.astype(np.int64), node, -1)
            flops[mine] = at_rows(graph.flops, node, np.nan)
            moved[mine] = at_rows(graph.bytes_moved, node, np.nan)
            name[mine] = _named(graph, timeline, mine, numbers)
        weight = alike[timeline.rank]
        return cls(
            timeline=timeline,
            workload=workload,
            rank_class=of_class,
            duration_ns=timeline.end_ns - timeline.start_ns - timeline.wait_ns,
            weight=weight,
            runs=weight * np.where(timeline.node < 0, timeline.trips, 1.0),
            op_class=op_class,
            name=name,
            names=list(numbers),
            flops=flops,
            bytes_moved=moved,
        )

    def resource(self, *names: str) -> BoolArray:
        """Which spans occupy one of some resources."""
        known = self.timeline.resources
        return np.isin(self.timeline.resource, [known.index(name) for name in names if name in known])

    def class_name(self, code: int) -> str:
        """The name of a class of operations."""
        return timed_class_name(code) if code >= 0 else "loop"


def _named(graph: OpGraph, timeline: Timeline, spans: IntArray, numbers: dict[str, int]) -> IntArray:
    """The operation of each span as a number of ``numbers``, which grows; later trips go by their loop."""
    node = timeline.node[spans].astype(np.int64)
    rows = at_rows(graph.op_row.astype(np.int64), node, -1)
    blocks = node < 0
    rows[blocks] = -2 - timeline.region[spans[blocks]]
    distinct, place = np.unique(rows, return_inverse=True)
    texts = [
        graph.strings[row] if row >= 0 else graph.strings[int(graph.regions.label[-2 - row])] + " (trips)"
        for row in distinct.tolist()
    ]
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)[place.reshape(-1)]


def _breakdown(spans: _Spans) -> Table[SimulatedRankRow]:
    timeline = spans.timeline
    step_ns = timeline.step_ns
    working = spans.resource("compute", "communication")
    rows: list[SimulatedRankRow] = []
    shown, alike = np.unique(timeline.shown_by[timeline.shown_by >= 0], return_counts=True)
    compute, talk = (timeline.resource_ns(name) for name in ("compute", "communication"))
    for rank, count in zip(shown.tolist(), alike.tolist(), strict=True):
        mine = timeline.rank == rank
        worked, any_time = (
            Intervals.union(timeline.start_ns[chosen], timeline.end_ns[chosen]).length_ns
            for chosen in (mine & working, mine)
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
                communication_ns=float(talk[rank]),
                exposed_communication_ns=exposed,
                exposed_memory_ns=any_time - worked,
                idle_ns=max(step_ns - float(compute[rank]) - exposed - (any_time - worked), 0.0),
                waiting_ns=float(timeline.exposed_wait_ns[rank].sum()),
            )
        )
    return table_from_rows(SimulatedRankRow, rows)


def _sums(
    spans: _Spans, group: IntArray, groups: int
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Runs, time [ns], FLOPs and bytes of each group on all ranks (NaN where some of them are not known)."""
    ran = spans.duration_ns * spans.weight

    def summed(values: FloatArray) -> FloatArray:
        return np.bincount(group, values, groups).astype(np.float64)

    return (
        summed(spans.runs),
        summed(ran),
        summed(spans.flops * spans.weight),
        summed(spans.bytes_moved * spans.weight),
    )


def _share(part: FloatArray, whole: float) -> FloatArray:
    shares: FloatArray = part / whole if whole > 0 else np.full(len(part), np.nan)
    return shares


def _rate(amount: FloatArray, time_ns: FloatArray) -> FloatArray:
    """Per ns; NaN where nothing took time."""
    rates: FloatArray = np.full(len(amount), np.nan)
    np.divide(amount, time_ns, out=rates, where=time_ns > 0)
    return rates


def _path(done: Simulation) -> tuple[IntArray, FloatArray]:
    """The spans of the critical path of the job, first to last, and how long each holds up what follows."""
    timeline = done.timeline
    path = done.path.astype(np.int64)
    if not len(path) and len(timeline):
        last = int(np.nanargmax(timeline.finish_ns))
        path = np.flatnonzero(timeline.critical & (timeline.rank == timeline.shown_by[last]))
    if not len(path):
        return path, np.empty(0)
    return path, np.diff(np.append(timeline.start_ns[path], timeline.end_ns[path[-1]]))


def _classes(spans: _Spans, path: IntArray, spent_ns: FloatArray) -> Table[SimulatedClassRow]:
    codes, place = np.unique(spans.op_class, return_inverse=True)
    place = place.reshape(-1)
    runs, total, flops, _ = _sums(spans, place, len(codes))
    critical = np.bincount(place[path], spent_ns, len(codes)).astype(np.float64)
    return table_of(
        SimulatedClassRow,
        op_class=[spans.class_name(code) for code in codes.tolist()],
        count=np.rint(runs).astype(np.int64),
        total_ns=total,
        share=_share(total, float(total.sum())),
        critical_ns=critical,
        flops=flops,
        tflops_per_s=_rate(flops, total) / 1e3,
    ).largest("total_ns")


def _operations(spans: _Spans) -> Table[SimulatedOperationRow]:
    keys, place = np.unique(np.stack((spans.name, spans.op_class)), axis=1, return_inverse=True)
    runs, total, flops, moved = _sums(spans, place.reshape(-1), keys.shape[1])
    return table_of(
        SimulatedOperationRow,
        operation=[spans.names[row] for row in keys[0].tolist()],
        op_class=[spans.class_name(code) for code in keys[1].tolist()],
        count=np.rint(runs).astype(np.int64),
        total_ns=total,
        share=_share(total, float(total.sum())),
        mean_ns=_rate(total, runs),
        tflops_per_s=_rate(flops, total) / 1e3,
        gbytes_per_s=_rate(moved, total),
    ).largest("total_ns")


def _critical_path(spans: _Spans, chosen: IntArray, spent_ns: FloatArray) -> Table[OnPathRow]:
    timeline = spans.timeline
    columns = (spans.name[chosen], spans.op_class[chosen], timeline.resource[chosen].astype(np.int64))
    keys, place = np.unique(np.stack(columns), axis=1, return_inverse=True)
    total = np.bincount(place.reshape(-1), spent_ns, keys.shape[1]).astype(np.float64)
    return table_of(
        OnPathRow,
        operation=[spans.names[row] for row in keys[0].tolist()],
        op_class=[spans.class_name(code) for code in keys[1].tolist()],
        resource=[timeline.resources[row] for row in keys[2].tolist()],
        count=np.bincount(place.reshape(-1), minlength=keys.shape[1]),
        total_ns=total,
        share=_share(total, float(total.sum())),
    ).largest("total_ns")


def _across(done: Simulation) -> Table[SegmentRow]:
    """Empty where one rank alone decides how long the step is."""
    found = segments(done)
    rows: list[SegmentRow] = []
    for each in found if len(found) > 1 else ():
        graph = done.workload.graph_of(each.rank)
        first, last = (node_label(graph, node) for node in (each.first_node, each.last_node))
        rows.append(
            SegmentRow(
                rank=each.rank,
                count=each.spans,
                start_ns=each.start_ns,
                duration_ns=each.end_ns - each.start_ns,
                first_operation=first,
                last_operation=last,
            )
        )
    return table_from_rows(SegmentRow, rows)


# --- By module: the path of names that a framework gives an operation, as ``jit(step)/Model/layer_0/attn``.


def _modules(spans: _Spans) -> Table[ModuleRow]:
    """Empty where no operation says what module it is of."""
    own: dict[tuple[str, ...], list[float]] = {}
    for index, graph in enumerate(spans.workload.classes):
        mine = np.flatnonzero((spans.rank_class == index) & (spans.timeline.node >= 0))
        rows = graph.framework_row[spans.timeline.node[mine]].astype(np.int64)
        distinct, place = np.unique(rows, return_inverse=True)
        runs = np.bincount(place.reshape(-1), spans.runs[mine], len(distinct))
        time_ns = np.bincount(place.reshape(-1), (spans.duration_ns * spans.weight)[mine], len(distinct))
        for row, count, took_ns in zip(distinct.tolist(), runs.tolist(), time_ns.tolist(), strict=True):
            path = tuple(graph.strings[row].split("/")[:-1]) if row > 0 else ()
            sums = own.setdefault(path, [0.0, 0.0])
            sums[0] += count
            sums[1] += took_ns
    if not any(own):
        return table_from_rows(ModuleRow, [])
    return table_from_rows(ModuleRow, list(_tree_rows(own)))


def _tree_rows(own: Mapping[tuple[str, ...], list[float]]) -> Iterator[ModuleRow]:
    inside: dict[tuple[str, ...], list[float]] = {}
    for path, (count, took_ns) in own.items():
        for depth in range(len(path) + 1):
            sums = inside.setdefault(path[:depth], [0.0, 0.0])
            sums[0] += count
            sums[1] += took_ns
    parts: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for path in inside:
        if path:
            parts.setdefault(path[:-1], []).append(path)
    whole_ns = inside[()][1]
    number: dict[tuple[str, ...], int] = {}
    nowhere: list[tuple[str, ...]] = [()] if () in own else []
    waiting = [*nowhere, *sorted(parts.get((), []), key=lambda path: inside[path][1])]
    while waiting:
        path = waiting.pop()
        number[path] = len(number)
        count, took_ns = inside[path] if path else own[()]
        yield ModuleRow(
            node=number[path],
            parent=number.get(path[:-1], -1) if len(path) > 1 else -1,
            depth=max(len(path) - 1, 0),
            name=path[-1] if path else "(of no module)",
            count=round(count),
            total_ns=took_ns,
            own_ns=own.get(path, [0.0, 0.0])[1],
            share=took_ns / whole_ns if whole_ns > 0 else float("nan"),
        )
        if path:
            waiting.extend(sorted(parts.get(path, []), key=lambda each: inside[each][1]))


# --- By axis of the parallel layout: collectives and messages by the groups of ranks among whom they are.


def _axes(spans: _Spans) -> Table[AxisRow]:
    timeline, workload = spans.timeline, spans.workload
    covered = _covered_by_computation(spans)
    sums: dict[tuple[str, str, int], list[float]] = {}
    for index, graph in enumerate(workload.classes):
        mine = np.flatnonzero((spans.rank_class == index) & (timeline.node >= 0))
        kind, groups, size, whole = _communication(graph, workload.num_ranks)
        node = timeline.node[mine].astype(np.int64)
        talking = np.flatnonzero(at_rows(kind, node, -1) >= 0)
        for place in talking.tolist():
            span, at = int(mine[place]), int(node[place])
            key = (_KINDS[int(kind[at])], groups[at], int(size[at]))
            row = sums.setdefault(key, [0.0, 0.0, 0.0, 0.0])
            took_ns, weight = float(spans.duration_ns[span]), float(spans.weight[span])
            for column, value in enumerate((1.0, float(whole[at]), took_ns, took_ns - float(covered[span]))):
                row[column] += value * weight
    rows = [_axis_row(key, row, workload.num_ranks) for key, row in sums.items()]
    return table_from_rows(AxisRow, rows).largest("exposed_ns")


_MESSAGE = len(CollectiveKind) + 1
_KINDS = {int(kind): kind.name.lower() for kind in CollectiveKind} | {_MESSAGE: "send/recv"}


def _communication(graph: OpGraph, num_ranks: int) -> tuple[IntArray, dict[int, str], IntArray, FloatArray]:
    """By node: kind (-1: none), the text of the groups, their size (-1: they differ) and the whole buffer."""
    kind, size = np.full(len(graph), -1, np.int64), np.full(len(graph), -1, np.int64)
    whole = np.full(len(graph), np.nan)
    texts: dict[int, str] = {}
    known: dict[int, tuple[str, int]] = {-1: ("all ranks", num_ranks)}
    for row, groups in enumerate(graph.group_sets):
        known[row] = (groups_text(groups, num_ranks), groups.group_size)
    table = graph.collectives
    kind[table.node] = table.kind
    whole[table.node] = table.comm_bytes
    for node, row in zip(table.node.tolist(), table.group_set.tolist(), strict=True):
        texts[node], size[node] = known[row]
    gathers = table.node[table.kind == int(CollectiveKind.ALL_GATHER)]
    whole[gathers] *= np.where(size[gathers] > 0, size[gathers], np.nan)
    messages = graph.p2p
    kind[messages.node], size[messages.node] = _MESSAGE, 2
    whole[messages.node] = messages.comm_bytes
    texts |= dict.fromkeys(messages.node.tolist(), "pairs")
    return kind, texts, size, whole


def _axis_row(key: tuple[str, str, int], row: list[float], num_ranks: int) -> AxisRow:
    kind, groups, size = key
    count, whole, total_ns, exposed_ns = row
    rate = whole / total_ns if total_ns > 0 else float("nan")
    factor = float(bus_factor(kind, np.array([size], np.float64))[0])
    return AxisRow(
        kind=kind,
        groups=groups,
        group_size=size,
        count=round(count),
        size_bytes=whole / num_ranks,
        total_ns=total_ns,
        exposed_ns=exposed_ns,
        exposed_share=exposed_ns / total_ns if total_ns > 0 else float("nan"),
        algorithm_gbytes_per_s=rate,
        bus_gbytes_per_s=rate * factor,
    )


def _covered_by_computation(spans: _Spans) -> FloatArray:
    """How much of each span lies under computation of its rank [ns]."""
    timeline, computes = spans.timeline, spans.resource("compute")
    covered = np.zeros(len(timeline))
    order = np.argsort(timeline.rank, kind="stable")
    bounds = np.flatnonzero(np.diff(timeline.rank[order])) + 1
    for mine in np.split(order, bounds):
        own = mine[computes[mine]]
        work = Intervals.union(timeline.start_ns[own], timeline.end_ns[own])
        covered[mine] = work.within_ns(timeline.end_ns[mine] - spans.duration_ns[mine], timeline.end_ns[mine])
    return covered


# --- What ran when, coarse enough to be drawn.


def _drawn(spans: _Spans, path: IntArray) -> Table[SpanRow]:
    timeline = spans.timeline
    is_critical = np.zeros(len(timeline), np.bool_)
    is_critical[path] = True
    shown = np.unique(timeline.shown_by[timeline.shown_by >= 0])[:_MOST_RANKS]
    chosen = np.flatnonzero(np.isin(timeline.rank, shown))
    pixel_ns = timeline.step_ns / _PIXELS
    pixel = np.floor(timeline.start_ns[chosen] / pixel_ns).astype(np.int64) if pixel_ns > 0 else chosen * 0
    is_long = spans.duration_ns[chosen] >= pixel_ns
    alone = np.where(is_long, np.arange(1, len(chosen) + 1), 0)
    keys = np.stack(
        (timeline.rank[chosen], timeline.resource[chosen], timeline.stream[chosen], pixel,
         np.where(is_long, 0, spans.op_class[chosen]), alone)
    ).astype(np.int64)  # fmt: skip
    distinct, first, place, count = np.unique(
        keys, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    place, groups = place.reshape(-1), distinct.shape[1]
    start, end = np.full(groups, np.inf), np.zeros(groups)
    np.minimum.at(start, place, timeline.start_ns[chosen])
    np.maximum.at(end, place, timeline.end_ns[chosen])
    one = chosen[first]
    names: list[str] = [spans.names[row] for row in spans.name[one].tolist()]
    classes = [spans.class_name(code) for code in spans.op_class[one].tolist()]
    return table_of(
        SpanRow,
        rank=distinct[0],
        lane=[_lane(timeline, kind, stream) for kind, stream in distinct[1:3].T.tolist()],
        operation=[
            name if number == 1 else f"{number:,} of {of_class}"
            for name, number, of_class in zip(names, count.tolist(), classes, strict=True)
        ],
        op_class=classes,
        count=count,
        start_ns=start,
        end_ns=end,
        is_critical=np.bincount(place, is_critical[chosen], groups) > 0,
    )


def _lane(timeline: Timeline, kind: int, stream: int) -> str:
    name = timeline.resources[kind]
    return name if stream < 0 else f"{name} {stream}"
