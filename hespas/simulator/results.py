"""Results of a simulation: the timeline of all ranks, a summary per rank class, critical paths and
throughput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan, nan
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.step_intervals import basis_text
from hespas.graph import (
    WAITS,
    Diagnostics,
    OpClass,
    OpGraph,
    RaggedArray,
    StepFacts,
    Timeline,
    Workload,
    find_dtype,
    step_facts,
    timed_class_name,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.deprecation import RenamedAttribute, warn_renamed
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, StepFactor
from hespas.hardware.peaks import peak_for
from hespas.simulator.schedule import (
    Priority,
    Schedule,
    TaskProgram,
    busy_ns,
    critical_ns,
    exposed_ns,
    interference_ns,
    list_schedule,
)
from hespas.simulator.streams import (
    FREE,
    POSTED,
    STREAMS,
    kinds_of,
    shown_streams,
)

__all__ = [
    "MATMULS",
    "ClassResult",
    "CriticalPath",
    "DeviceTimes",
    "JobColumns",
    "RepresentedClass",
    "ScheduledRank",
    "Segment",
    "Simulation",
    "Simulator",
    "SpanColumns",
    "Throughput",
    "critical_path",
    "rates_of",
    "schedule_alone",
    "segments",
    "simulation_of",
    "spans_of",
    "throughput_of",
    "warn_of_rates",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Rates of a step; NaN if the workload does not state the required facts.

    ``mfu`` is the model FLOPs divided by the FLOPs that all devices could do during the step at their dense
    peak. The peak is for ``peak_dtype``, the element type of the matmuls in linear layers.
    """

    model_flops: float = nan
    tokens: float = nan
    mfu: float = nan
    peak_dtype: str = ""
    tokens_per_s: float = nan
    tokens_per_s_per_device: float = nan

    @property
    def is_known(self) -> bool:
        """Return True if there is a rate to report."""
        return not (isnan(self.mfu) and isnan(self.tokens_per_s))

    def __str__(self) -> str:
        """Return the rates as a clause of a summary line; empty where none is known."""
        parts: list[str] = []
        if not isnan(self.mfu):
            parts.append(f"MFU {self.mfu:.1%} of the {self.peak_dtype} peak")
        if not isnan(self.tokens_per_s):
            rates = (self.tokens_per_s, self.tokens_per_s_per_device)
            job, device = (f"{rate:,.0f}" if rate >= 1000 else f"{rate:,.4g}" for rate in rates)
            parts.append(f"{job} tokens/s ({device} per device)")
        return ", ".join(parts)


def throughput_of(metadata: Mapping[str, str], step_ns: float, device: Device | None) -> Throughput:
    """Return the rates of a step from the facts in the metadata of its workload; they cover the whole job."""
    facts = step_facts(metadata)
    return Throughput() if facts is None else rates_of(facts, step_ns, device)


def rates_of(facts: StepFacts, step_ns: float, device: Device | None) -> Throughput:
    """Return the rates of a step of all ranks from its facts. ``step_ns`` is the step time; for a recording,
    it is the time from the start of a step to the start of the next.
    """
    if not step_ns > 0:
        return Throughput()
    step_s, num_ranks = step_ns / 1e9, facts.ranks or nan
    name, peak = _peak(facts.dtype, device)
    tokens_per_s = facts.tokens / step_s
    return Throughput(
        model_flops=facts.model_flops,
        tokens=facts.tokens,
        mfu=facts.model_flops / step_s / (peak * num_ranks),
        peak_dtype=name,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / num_ranks,
    )


def warn_of_rates(rates: Throughput, where: str, diagnostics: Diagnostics) -> None:
    """Warn if the FLOPs of a step exceed the peak of its devices."""
    message = (
        f"MFU is {rates.mfu:.1%} of the {rates.peak_dtype} peak, more than 100 %: check the model FLOPs, the "
        "number of ranks, the element type and the steps that were recorded"
    )
    diagnostics.warning("rates.mfu-above-peak", where, message, count=int(rates.mfu > 1))


def _peak(name: str, device: Device | None) -> tuple[str, float]:
    """Return the element type whose peak rate applies to matmuls of type ``name`` on the device, and that
    peak rate; NaN if the device has no peak for it.

    GPUs without matrix units for IEEE f32 multiply it on vector units.
    """
    if device is None or find_dtype(name) is None:
        return name, nan
    try:
        choice = peak_for(device, "matrix", name)
        if name == "f32" and choice.peak.dtype != "f32" and device.kind == "gpu":
            choice = peak_for(device, "vector", name)
    except UnsupportedError:
        return name, nan
    return choice.peak.dtype, choice.flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """Summary of the critical path: the chain of spans that ends last. Each span starts when the previous one
    ends. If a rank waits for another rank, the chain continues on that rank.

    ``spans`` is the number of spans. ``after_resource`` counts spans that waited for a busy stream instead of
    a dependency. ``class_ns`` splits the time of the path by operation class, ``resource_ns`` by resource.
    Each split sums to the finish of the rank.
    """

    spans: int
    after_resource: int
    class_ns: Mapping[str, float]
    resource_ns: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """Summary of one rank class. ``rank`` is the rank of the class that ends last; its spans are in the
    timeline.

    ``ways`` is the number of different behaviours among the ranks of the class. ``busy_ns`` is by resource.
    ``wait_ns`` is the time in which the rank only waits for other ranks, by cause
    (:data:`hespas.graph.WAITS`). ``unknown`` counts nodes of unknown time. Their time counts as 0, so
    ``finish_ns`` is then a lower bound. ``kept`` counts nodes that use a recorded time although other times
    are estimated for a device. ``extrapolated`` counts loops that were not simulated iteration by iteration.
    ``interference_ns`` is the time that contention between communication and kernels added, summed over
    operations.
    """

    rank_class: int
    name: str
    num_ranks: int
    rank: int
    finish_ns: float
    exposed_comm_ns: float
    busy_ns: Mapping[str, float]
    critical_path: CriticalPath
    wait_ns: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(WAITS, 0.0))
    ways: int = 1
    extrapolated: int = 0
    unknown: int = 0
    kept: int = 0
    interference_ns: float = 0.0


MATMULS = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION), int(OpClass.ATTENTION))
"""Operation classes that keep the matrix units of a device busy."""


class DeviceTimes(NamedTuple):
    """Times of a device in a step by kind of work [ns], means over all simulated ranks. ``matmul_ns`` is part
    of ``compute_ns``. The sum of the other times is the time of the step.
    """

    compute_ns: float
    matmul_ns: float
    exposed_comm_ns: float
    idle_ns: float

    @property
    def by_power_ns(self) -> tuple[float, float, float]:
        """Return the times in matmuls, in other kernels and exposed communication, and in waits."""
        return self.matmul_ns, self.compute_ns - self.matmul_ns + self.exposed_comm_ns, self.idle_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result of a simulation: the timeline of all ranks, and a summary of each rank class of ``workload``, in
    order.

    ``critical_path`` lists the spans of the critical path of the whole job, first to last, across ranks.
    ``interval_ns`` is the 90 % interval of the step time, derived from the intervals of the operation
    estimates (two NaN: unknown). ``basis`` is the share of each basis of estimates
    (:class:`~hespas.graph.Estimate`) in the time of all operations, the largest first (empty: no estimates).
    ``throughput`` is known if the workload states its FLOPs or tokens. ``step_factor`` is the step factor of
    the device file that was applied (None: none), and ``correction`` the ratio of ``step_ns`` to
    ``operations_ns`` that follows from it; it is nearer to 1 if some times are recorded ones. The timeline
    and the rank classes have times without this correction.
    """

    simulator: str
    workload: Workload
    timeline: Timeline
    classes: tuple[ClassResult, ...]
    critical_path: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    interval_ns: tuple[float, float] = (nan, nan)
    basis: Mapping[str, float] = field(default_factory=dict[str, float])
    throughput: Throughput = field(default_factory=Throughput)
    step_factor: StepFactor | None = None
    correction: float = 1.0
    path = RenamedAttribute("critical_path")
    is_mixed = RenamedAttribute("mixes_recorded_and_estimated")

    @property
    def step_ns(self) -> float:
        """Return the predicted time of the step: the end of the last rank, times ``correction``."""
        return self.timeline.step_ns * self.correction

    @property
    def operations_ns(self) -> float:
        """Return the end of the last rank, which follows from the times of single operations."""
        return self.timeline.step_ns

    @property
    def basis_text(self) -> str:
        """Return the shares of :attr:`basis` as text; empty if no estimate states its basis."""
        return basis_text(self.basis)

    @property
    def is_lower_bound(self) -> bool:
        """Return True if the time of some node is unknown and counts as 0, so that the real step is
        longer.
        """
        return any(result.unknown for result in self.classes)

    @property
    def mixes_recorded_and_estimated(self) -> bool:
        """Return True if some times were recorded, on any device, and others are estimates."""
        return any(result.kept for result in self.classes)

    @property
    def relative_interval(self) -> tuple[float, float]:
        """Return the ends of ``interval_ns`` relative to the step; NaN if unknown."""
        low_ns, high_ns = self.interval_ns
        return (low_ns / self.step_ns, high_ns / self.step_ns) if self.step_ns else (nan, nan)

    def device_times(self) -> DeviceTimes:
        """Return the times of a device by kind of work, with the correction of the step. O(spans)."""
        line = self.timeline
        compute_ns = float(np.nanmean(line.resource_ns("compute"))) * self.correction
        exposed_ns = float(np.nanmean(line.exposed_comm_ns)) * self.correction
        represented = np.bincount(line.shown_by[line.shown_by >= 0], minlength=len(line.shown_by))
        matmul_ns = 0.0
        for number, graph in enumerate(self.workload.classes):
            spans = (line.node >= 0) & (self.workload.rank_class[line.rank] == number)
            spans &= line.resource == line.resources.index("compute")
            spans[spans] = np.isin(graph.op_class[line.node[spans]], MATMULS)
            durations_ns = (line.end_ns - line.start_ns) * line.trips * represented[line.rank]
            matmul_ns += float(durations_ns[spans].sum())
        matmul_ns = min(matmul_ns * self.correction / max(int(represented.sum()), 1), compute_ns)
        idle_ns = max(self.step_ns - compute_ns - exposed_ns, 0.0)
        return DeviceTimes(compute_ns, matmul_ns, exposed_ns, idle_ns)

    @property
    def low_ns(self) -> float:
        """Return the lower end of ``interval_ns``. Deprecated."""
        warn_renamed("Simulation.low_ns", "Simulation.interval_ns[0]")
        return self.interval_ns[0]

    @property
    def high_ns(self) -> float:
        """Return the upper end of ``interval_ns``. Deprecated."""
        warn_renamed("Simulation.high_ns", "Simulation.interval_ns[1]")
        return self.interval_ns[1]


@runtime_checkable
class Simulator(Protocol):
    """Interface of simulators: a model of the execution of a workload, as a frozen dataclass whose fields are
    its options.
    """

    @property
    def name(self) -> str:
        """Return the name of the model in reports."""
        ...

    def run(self, workload: Workload, diagnostics: Diagnostics) -> Simulation:
        """Simulate one step of every rank from time 0; ``workload`` is not changed.

        All nodes that run have a time (finite, at least 0, 0 for zero-cost nodes) and all trip counts are
        whole numbers: :func:`hespas.simulator.simulate` ensures this. Raises ``FormatError`` if dependencies
        form a cycle.
        """
        ...


class SpanColumns(NamedTuple):
    """Columns of :class:`hespas.graph.Timeline` for one rank or several ranks. ``cause`` has the index of
    another span in these columns.
    """

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


class RepresentedClass(NamedTuple):
    """Rank class with the simulated rank that represents it, and the number of ranks that it represents."""

    rank_class: int
    rank: int
    num_ranks: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScheduledRank:
    """Schedule of one simulated rank, which represents all ranks with the same behaviour.

    ``tasks`` has the task of each span. ``path`` lists the tasks of the rank's critical path, first to last,
    if the rank waits for no other rank.
    """

    result: ClassResult
    busy_ns: FloatArray
    wait_ns: FloatArray
    spans: SpanColumns
    tasks: IntArray
    path: IntArray


def schedule_alone(
    graph: OpGraph,
    program: TaskProgram,
    priority: Priority,
    whose: RepresentedClass,
    queued: RaggedArray | None = None,
) -> ScheduledRank:
    """Schedule a rank that waits for no other rank; ``queued`` is passed to
    :func:`hespas.simulator.schedule.list_schedule`.
    """
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
    return ScheduledRank(
        result=result, busy_ns=busy, wait_ns=np.zeros(len(WAITS)), spans=spans, tasks=tasks, path=path
    )


def critical_path(spent_ns: FloatArray, by_resource: BoolArray) -> CriticalPath:
    """Return the summary of a critical path.

    ``spent_ns`` is the time on the path by operation class and kind of stream. ``by_resource`` has one flag
    per span of the path: True if it waited for a busy stream.
    """
    by_class, by_stream = spent_ns.sum(axis=1).tolist(), spent_ns.sum(axis=0).tolist()
    longest = sorted(range(len(by_class)), key=lambda code: -by_class[code])
    return CriticalPath(
        spans=len(by_resource),
        after_resource=int(by_resource.sum()),
        class_ns={timed_class_name(code): by_class[code] for code in longest if by_class[code]},
        resource_ns=dict(zip(STREAMS, by_stream, strict=True)),
    )


def spans_of(
    program: TaskProgram,
    graph: OpGraph,
    schedule: Schedule,
    rank: int,
    *,
    critical: BoolArray,
    wait_ns: FloatArray | None = None,
) -> tuple[IntArray, SpanColumns]:
    """Return the tasks of a rank that take time, in order of their starts, and the columns of one span for
    each. O(tasks log tasks).
    """
    posted_only = (program.tasks.stream == POSTED) & (schedule.start_ns == schedule.end_ns)
    tasks = np.flatnonzero((program.tasks.stream != FREE) & ~posted_only)
    tasks = tasks[np.argsort(schedule.start_ns[tasks], kind="stable")]
    span_of = np.full(len(program.tasks) + 1, -1, np.int32)  # the last: no cause
    span_of[tasks] = np.arange(len(tasks), dtype=np.int32)
    blocks = program.block[tasks]
    regions = np.array([*(block.region for block in program.blocks), -1], np.int32)
    trips = np.array([*(block.trips for block in program.blocks), 1.0], np.float64)
    node, codes = program.node[tasks], program.tasks.stream[tasks]
    start_ns, end_ns = schedule.start_ns[tasks], schedule.end_ns[tasks]
    return tasks, SpanColumns(
        node=node,
        rank=np.broadcast_to(np.int32(rank), (len(tasks),)),
        resource=kinds_of(codes).astype(np.int8),
        stream=shown_streams(graph, node, codes, (start_ns, end_ns)),
        start_ns=start_ns,
        end_ns=end_ns,
        critical=critical[tasks],
        cause=span_of[schedule.cause[tasks]],
        by_resource=schedule.by_resource[tasks],
        region=regions[blocks],
        trips=trips[blocks],
        wait_ns=np.zeros(len(tasks)) if wait_ns is None else wait_ns[tasks],
    )


def _joined(parts: Sequence[SpanColumns], first: Sequence[int]) -> SpanColumns:
    """Return the concatenated span columns of several ranks. ``first`` is the number of the first span of
    each.
    """
    if len(parts) == 1:
        return parts[0]
    moved = [
        part._replace(cause=np.where(part.cause < 0, -1, part.cause + offset).astype(np.int32))
        for part, offset in zip(parts, first, strict=False)
    ]
    return SpanColumns(*(np.concatenate(columns) for columns in zip(*moved, strict=True)))


class JobColumns(NamedTuple):
    """Timeline columns of ranks that wait for each other: the span for which each span waited (-1: none), and
    the spans of the critical path of the whole job.
    """

    awaited: SmallIntArray
    path: IntArray


class Segment(NamedTuple):
    """Section of a job's critical path on one rank: its number of spans, its first and last node, and its
    start and end [ns].
    """

    rank: int
    spans: int
    first_node: int
    last_node: int
    start_ns: float
    end_ns: float


def segments(done: Simulation) -> list[Segment]:
    """Return the sections of a job's critical path that run on one rank, first to last. A new section begins
    whenever the path continues on another rank. O(spans on the path).
    """
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
    parts: Sequence[ScheduledRank],
    part_of: IntArray,
    across: JobColumns | None = None,
) -> Simulation:
    """Return the simulation result for all ranks. ``parts`` are the schedules of the simulated ranks.
    ``part_of``, of shape ``(ranks,)``, is the index in ``parts`` of the schedule that represents each rank
    (-1: absent). O(spans + ranks).
    """
    sizes = [len(part.tasks) for part in parts]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    spans = _joined([part.spans for part in parts], first.tolist())
    results = [part.result for part in parts]
    unknown = np.full((1, len(STREAMS)), np.nan)  # the last row, selected by -1, is unknown
    finish = np.array([*(result.finish_ns for result in results), np.nan])
    exposed = np.array([*(result.exposed_comm_ns for result in results), np.nan])
    shown = np.array([*(result.rank for result in results), -1], np.int32)
    busy = np.concatenate([*(part.busy_ns[None] for part in parts), unknown])
    added = np.array([*(result.interference_ns for result in results), np.nan])
    waited = np.concatenate([*(part.wait_ns[None] for part in parts), unknown[:, : len(WAITS)]])
    if across is None:
        last = int(np.argmax(finish[:-1]))
        span_of = np.full(int(parts[last].tasks.max(initial=-1)) + 1, -1, np.int64)
        span_of[parts[last].tasks] = np.arange(sizes[last])
        path = parts[last].path
        path = span_of[path[path < len(span_of)]]
        across = JobColumns(np.full(len(spans.node), -1, np.int32), path[path >= 0] + first[last])
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
    by_class: dict[int, list[ClassResult]] = {}
    for result in results:
        by_class.setdefault(result.rank_class, []).append(result)
    return Simulation(
        simulator=name,
        workload=workload,
        timeline=timeline,
        classes=tuple(
            replace(
                max(mine, key=lambda result: result.finish_ns),
                num_ranks=sum(result.num_ranks for result in mine),
                ways=len(mine),
            )
            for _, mine in sorted(by_class.items())
        ),
        critical_path=across.path,
    )


_Rows = TypeVar("_Rows", bound="NDArray[Any]")


def _of_ranks(rows: _Rows, part_of: IntArray) -> _Rows:
    """Return for each rank its row of the column of its part. If all ranks share one row, return a view
    without copies.
    """
    if part_of.strides != (0,):
        return cast("_Rows", rows[part_of])
    row = rows[int(part_of[0])]
    return cast("_Rows", np.broadcast_to(row, (len(part_of), *row.shape)))
