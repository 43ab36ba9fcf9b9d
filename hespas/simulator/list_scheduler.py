"""One rank at a time on four streams: no network, no other rank; every node takes the time it states.

The time of communication is what the estimate says (latency and bandwidth, :mod:`hespas.estimators.network`).
Ranks of one class do the same at the same time, so a class is scheduled once. Ranks of different classes do
not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics, OpGraph, Timeline, Workload, timed_class_name
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import UsageError
from hespas.simulator.loops import expanded
from hespas.simulator.result import ClassResult, CriticalPath, Simulation
from hespas.simulator.schedule import (
    PRIORITIES,
    STREAMS,
    Priority,
    Program,
    Schedule,
    busy_ns,
    critical_ns,
    exposed_ns,
    list_schedule,
)

__all__ = ["ListScheduler"]

# Schedules of rank classes as the columns of one timeline.


class _Spans(NamedTuple):
    """Columns of :class:`hespas.graph.Timeline` of one rank or of several; ``cause`` counts within them."""

    node: SmallIntArray
    rank: SmallIntArray
    resource: NDArray[np.int8]
    start_ns: FloatArray
    end_ns: FloatArray
    critical: BoolArray
    cause: SmallIntArray
    by_resource: BoolArray
    region: SmallIntArray
    trips: FloatArray


def _spans_of(program: Program, schedule: Schedule, path: IntArray, rank: int) -> _Spans:
    """One span per task that takes a stream, in order of their starts. O(tasks log tasks)."""
    tasks = np.flatnonzero(program.tasks.stream >= 0)
    tasks = tasks[np.argsort(schedule.start_ns[tasks], kind="stable")]
    place = np.full(len(program.tasks) + 1, -1, np.int32)  # the last: no cause
    place[tasks] = np.arange(len(tasks), dtype=np.int32)
    critical = np.zeros(len(program.tasks), np.bool_)
    critical[path] = True
    blocks = program.block[tasks]
    regions = np.array([*(block.region for block in program.blocks), -1], np.int32)
    trips = np.array([*(block.trips for block in program.blocks), 1.0], np.float64)
    return _Spans(
        node=program.node[tasks],
        rank=np.broadcast_to(np.int32(rank), (len(tasks),)),
        resource=program.tasks.stream[tasks].astype(np.int8),
        start_ns=schedule.start_ns[tasks],
        end_ns=schedule.end_ns[tasks],
        critical=critical[tasks],
        cause=place[schedule.cause[tasks]],
        by_resource=schedule.by_resource[tasks],
        region=regions[blocks],
        trips=trips[blocks],
    )


def _joined(parts: Sequence[_Spans]) -> _Spans:
    """The spans of several ranks, one rank behind the other."""
    if len(parts) == 1:
        return parts[0]
    first = np.cumsum([0, *(len(part.node) for part in parts)]).tolist()
    moved = [
        part._replace(cause=np.where(part.cause < 0, -1, part.cause + offset).astype(np.int32))
        for part, offset in zip(parts, first, strict=False)
    ]
    return _Spans(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))


@dataclass(frozen=True, slots=True)
class _Scheduled:
    result: ClassResult
    busy_ns: FloatArray
    spans: _Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ListScheduler:
    """The list schedule of each rank class; fields are its options.

    ``priority``: which ready node a stream takes first (:data:`hespas.simulator.schedule.PRIORITIES`).
    ``max_executions``: up to so many, all trips of all loops are run; beyond, the longest loops are
    extrapolated (:mod:`hespas.simulator.loops`).
    """

    priority: Priority = "program"
    max_executions: int = 1_000_000

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.priority not in PRIORITIES:
            raise UsageError(f"unknown priority {self.priority!r}", hint=f"one of: {', '.join(PRIORITIES)}")
        if self.max_executions < 1:
            raise UsageError("max_executions must be at least 1")

    @property
    def name(self) -> str:
        """``list-schedule``."""
        return "list-schedule"

    def run(self, workload: Workload, diagnostics: Diagnostics) -> Simulation:
        """The step of each rank; see the module. O(executions log executions) per class."""
        counts = workload.class_sizes
        used = [index for index, count in enumerate(counts) if count]
        if len(used) > 1:
            diagnostics.warning(
                "simulate.ranks-not-synchronised",
                workload.name,
                f"the {len(used):,} rank classes are scheduled each for itself: collectives and messages "
                "between them do not wait for the slower side",
            )
        done = {index: self._scheduled(workload, index, counts[index], diagnostics) for index in used}
        return Simulation(
            simulator=self.name,
            workload=workload,
            timeline=_timeline(workload, done),
            classes=tuple(found.result for found in done.values()),
        )

    def _scheduled(self, workload: Workload, index: int, ranks: int, diagnostics: Diagnostics) -> _Scheduled:
        graph = workload.classes[index]
        _tell_streams(graph, diagnostics)
        program = expanded(graph, self.max_executions, self.priority, diagnostics)
        schedule = list_schedule(program.tasks, self.priority)
        path = schedule.critical()
        rank = int(np.argmax(workload.rank_class == index))
        busy = busy_ns(program)
        result = ClassResult(
            rank_class=index,
            name=graph.name,
            num_ranks=ranks,
            rank=rank,
            finish_ns=schedule.finish_ns,
            exposed_comm_ns=exposed_ns(program, schedule),
            busy_ns=dict(zip(STREAMS, busy.tolist(), strict=True)),
            critical_path=_critical_path(program, schedule, path),
            extrapolated=len(program.blocks),
        )
        return _Scheduled(result, busy, _spans_of(program, schedule, path, rank))


def _critical_path(program: Program, schedule: Schedule, path: IntArray) -> CriticalPath:
    on_stream = path[program.tasks.stream[path] >= 0]
    table = critical_ns(program, schedule, path)
    by_class, by_stream = table.sum(axis=1).tolist(), table.sum(axis=0).tolist()
    longest = sorted(range(len(by_class)), key=lambda code: -by_class[code])
    return CriticalPath(
        spans=len(on_stream),
        after_resource=int(schedule.by_resource[on_stream].sum()),
        class_ns={timed_class_name(code): by_class[code] for code in longest if by_class[code]},
        resource_ns=dict(zip(STREAMS, by_stream, strict=True)),
    )


def _tell_streams(graph: OpGraph, diagnostics: Diagnostics) -> None:
    named = np.unique(graph.stream[graph.stream >= 0])
    diagnostics.info(
        "simulate.streams-merged",
        graph.name,
        "streams that the program names are merged into one per kind of work",
        count=max(len(named) - 1, 0),
    )


def _timeline(workload: Workload, done: dict[int, _Scheduled]) -> Timeline:
    """The spans of one rank per class, and the figures of all ranks. O(spans + ranks)."""
    rows = len(workload.classes) + 1  # the last, which ABSENT leads to, knows nothing
    finish, exposed = np.full(rows, np.nan), np.full(rows, np.nan)
    busy, shown = np.full((rows, len(STREAMS)), np.nan), np.full(rows, -1, np.int32)
    for index, found in done.items():
        finish[index], exposed[index] = found.result.finish_ns, found.result.exposed_comm_ns
        busy[index], shown[index] = found.busy_ns, found.result.rank
    ranks, spans = workload.rank_class, _joined([found.spans for found in done.values()])
    return Timeline(
        resources=STREAMS,
        node=spans.node,
        rank=spans.rank,
        resource=spans.resource,
        start_ns=spans.start_ns,
        end_ns=spans.end_ns,
        critical=spans.critical,
        cause=spans.cause,
        by_resource=spans.by_resource,
        region=spans.region,
        trips=spans.trips,
        finish_ns=finish[ranks],
        exposed_comm_ns=exposed[ranks],
        shown_by=shown[ranks],
        busy_ns=busy[ranks],
    )
