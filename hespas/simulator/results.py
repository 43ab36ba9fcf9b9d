"""Schedules of ranks as the columns of one timeline, and as one summary per rank class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hespas.graph import WAITS, OpGraph, RaggedArray, Timeline, Workload, timed_class_name
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.simulator.schedule import (
    ClassResult,
    CriticalPath,
    Priority,
    Program,
    Schedule,
    Simulation,
    busy_ns,
    critical_ns,
    exposed_ns,
    interference_ns,
    list_schedule,
)
from hespas.simulator.streams import FREE, POSTED, STREAMS, kinds_of, shown_streams

__all__ = [
    "Across",
    "ClassOf",
    "Scheduled",
    "Segment",
    "Spans",
    "alone",
    "critical_path",
    "segments",
    "simulation_of",
    "spans_of",
]


class Spans(NamedTuple):
    """Columns of :class:`hespas.graph.Timeline` of one rank or of several; ``cause`` counts within them."""

    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    stream: SmallIntArray
    start_ns: FloatArray
    end_ns: FloatArray
    critical: BoolArray
    cause: SmallIntArray
    by_resource: BoolArray
    region: SmallIntArray
    trips: FloatArray
    wait_ns: FloatArray


class ClassOf(NamedTuple):
    """Which class runs, as which rank, for how many of them."""

    rank_class: int
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scheduled:
    """What one rank did, and as many others like it.

    ``tasks`` are those of the spans, ``path`` those on its critical path, first to last, where it waits for
    nobody.
    """

    result: ClassResult
    busy_ns: FloatArray
    wait_ns: FloatArray
    spans: Spans
    tasks: IntArray
    path: IntArray


def alone(
    graph: OpGraph, program: Program, priority: Priority, whose: ClassOf, queued: RaggedArray | None = None
) -> Scheduled:
    """A rank that waits for nobody; ``queued`` is that of :func:`hespas.simulator.schedule.list_schedule`."""
    schedule = list_schedule(program.tasks, priority, queued)
    path = schedule.critical()
    on_path = np.zeros(len(program.tasks), np.bool_)
    on_path[path] = True
    tasks, spans = spans_of(program, graph, schedule, whose.rank, critical=on_path)
    busy = busy_ns(program, schedule)
    result = ClassResult(
        rank_class=whose.rank_class,
        name=graph.name,
        num_ranks=whose.num_ranks,
        rank=whose.rank,
        finish_ns=schedule.finish_ns,
        exposed_comm_ns=exposed_ns(program, schedule),
        busy_ns=dict(zip(STREAMS, busy.tolist(), strict=True)),
        critical_path=critical_path(
            critical_ns(program, schedule, path),
            schedule.by_resource[path[program.tasks.stream[path] != FREE]],
        ),
        extrapolated=len(program.blocks),
        interference_ns=interference_ns(program, schedule),
    )
    return Scheduled(
        result=result, busy_ns=busy, wait_ns=np.zeros(len(WAITS)), spans=spans, tasks=tasks, path=path
    )


def critical_path(spent_ns: FloatArray, by_resource: BoolArray) -> CriticalPath:
    """A path that spends time by class and kind of stream, one entry of ``by_resource`` per span."""
    by_class, by_stream = spent_ns.sum(axis=1).tolist(), spent_ns.sum(axis=0).tolist()
    longest = sorted(range(len(by_class)), key=lambda code: -by_class[code])
    return CriticalPath(
        spans=len(by_resource),
        after_resource=int(by_resource.sum()),
        class_ns={timed_class_name(code): by_class[code] for code in longest if by_class[code]},
        resource_ns=dict(zip(STREAMS, by_stream, strict=True)),
    )


def spans_of(
    program: Program,
    graph: OpGraph,
    schedule: Schedule,
    rank: int,
    *,
    critical: BoolArray,
    wait_ns: FloatArray | None = None,
) -> tuple[IntArray, Spans]:
    """One span per task that takes time, in order of their starts, and those tasks. O(tasks log tasks)."""
    posted_only = (program.tasks.stream == POSTED) & (schedule.start_ns == schedule.end_ns)
    tasks = np.flatnonzero((program.tasks.stream != FREE) & ~posted_only)
    tasks = tasks[np.argsort(schedule.start_ns[tasks], kind="stable")]
    place = np.full(len(program.tasks) + 1, -1, np.int32)  # the last: no cause
    place[tasks] = np.arange(len(tasks), dtype=np.int32)
    blocks = program.block[tasks]
    regions = np.array([*(block.region for block in program.blocks), -1], np.int32)
    trips = np.array([*(block.trips for block in program.blocks), 1.0], np.float64)
    node, codes = program.node[tasks], program.tasks.stream[tasks]
    start_ns, end_ns = schedule.start_ns[tasks], schedule.end_ns[tasks]
    return tasks, Spans(
        node=node,
        rank=np.broadcast_to(np.int32(rank), (len(tasks),)),
        resource=kinds_of(codes).astype(np.int8),
        stream=shown_streams(graph, node, codes, (start_ns, end_ns)),
        start_ns=start_ns,
        end_ns=end_ns,
        critical=critical[tasks],
        cause=place[schedule.cause[tasks]],
        by_resource=schedule.by_resource[tasks],
        region=regions[blocks],
        trips=trips[blocks],
        wait_ns=np.zeros(len(tasks)) if wait_ns is None else wait_ns[tasks],
    )


def _joined(parts: Sequence[Spans], first: Sequence[int]) -> Spans:
    """The spans of several ranks, one rank behind the other."""
    if len(parts) == 1:
        return parts[0]
    moved = [
        part._replace(cause=np.where(part.cause < 0, -1, part.cause + offset).astype(np.int32))
        for part, offset in zip(parts, first, strict=False)
    ]
    return Spans(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))


class Across(NamedTuple):
    """What only ranks that meet have: per span the one it waited for (-1: none), and the spans of the
    critical path of the whole job.
    """

    awaited: SmallIntArray
    path: IntArray


class Segment(NamedTuple):
    """A piece of the critical path of a job in one rank: so many spans, from the first node to the last."""

    rank: int
    spans: int
    first_node: int
    last_node: int
    start_ns: float
    end_ns: float


def segments(done: Simulation) -> list[Segment]:
    """The critical path of a job by the ranks it leads through, first to last. O(spans on it)."""
    timeline, path = done.timeline, done.critical_path
    if not len(path):
        return []
    rank = timeline.rank[path]
    first = np.flatnonzero(np.append(True, rank[1:] != rank[:-1]))
    after = np.append(first[1:], len(path))
    start_ns = timeline.start_ns[path[first]]
    end_ns = np.append(start_ns[1:], timeline.end_ns[path[-1]])
    columns = (rank[first], after - first, timeline.node[path[first]], timeline.node[path[after - 1]])
    rows = zip(*(column.tolist() for column in (*columns, start_ns, end_ns)), strict=True)
    return [Segment(*row) for row in rows]


def simulation_of(
    name: str,
    workload: Workload,
    parts: Sequence[Scheduled],
    part_of: IntArray,
    across: Across | None = None,
) -> Simulation:
    """The simulation of all ranks: ``part_of`` each (-1: not here), shape ``(ranks,)``. O(spans + ranks)."""
    sizes = [len(part.tasks) for part in parts]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    spans = _joined([part.spans for part in parts], first.tolist())
    results = [part.result for part in parts]
    unknown = np.full((1, len(STREAMS)), np.nan)  # the last row, which -1 leads to, knows nothing
    finish = np.array([*(found.finish_ns for found in results), np.nan])
    exposed = np.array([*(found.exposed_comm_ns for found in results), np.nan])
    shown = np.array([*(found.rank for found in results), -1], np.int32)
    busy = np.concatenate([*(part.busy_ns[None] for part in parts), unknown])
    added = np.array([*(found.interference_ns for found in results), np.nan])
    waited = np.concatenate([*(part.wait_ns[None] for part in parts), unknown[:, : len(WAITS)]])
    if across is None:
        last = int(np.argmax(finish[:-1]))
        place = np.full(int(parts[last].tasks.max(initial=-1)) + 1, -1, np.int64)
        place[parts[last].tasks] = np.arange(sizes[last])
        path = parts[last].path
        path = place[path[path < len(place)]]
        across = Across(np.full(len(spans.node), -1, np.int32), path[path >= 0] + first[last])
    timeline = Timeline(
        resources=STREAMS,
        **spans._asdict(),
        awaited=across.awaited,
        finish_ns=_of_ranks(finish, part_of),
        exposed_comm_ns=_of_ranks(exposed, part_of),
        shown_by=_of_ranks(shown, part_of),
        busy_ns=_of_ranks(busy, part_of),
        exposed_wait_ns=_of_ranks(waited, part_of),
        interference_ns=_of_ranks(added, part_of),
    )
    return Simulation(
        simulator=name,
        workload=workload,
        timeline=timeline,
        classes=_by_class(results),
        critical_path=across.path,
    )


_Rows = TypeVar("_Rows", bound="NDArray[Any]")


def _of_ranks(rows: _Rows, part_of: IntArray) -> _Rows:
    """Return the row of each rank; a view of one row where all ranks have the same."""
    if part_of.strides != (0,):
        return cast("_Rows", rows[part_of])
    row = rows[int(part_of[0])]
    return cast("_Rows", np.broadcast_to(row, (len(part_of), *row.shape)))


def _by_class(results: Sequence[ClassResult]) -> tuple[ClassResult, ...]:
    """One summary per rank class: that of the rank that ends last, for all ranks of the class."""
    found: dict[int, list[ClassResult]] = {}
    for result in results:
        found.setdefault(result.rank_class, []).append(result)
    return tuple(
        replace(
            max(mine, key=lambda result: result.finish_ns),
            num_ranks=sum(result.num_ranks for result in mine),
            ways=len(mine),
        )
        for _, mine in sorted(found.items())
    )
