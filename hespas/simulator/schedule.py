"""A list schedule: each stream runs, whenever it is idle, the first of the nodes that are ready.

A node is ready when all it depends on has ended. A node without a stream takes no time: it ends when it is
ready. A delay ends its time after it is ready and holds no stream. Nodes are not interrupted. At one moment
all that ends then ends first, then idle streams take up work. O((nodes + edges) log nodes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from math import inf, nan
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from hespas.graph import (
    WAITS,
    Diagnostics,
    OpClass,
    OpGraph,
    Timeline,
    Workload,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, SmallIntArray
from hespas.graph.deprecation import RenamedAttribute, warn_renamed
from hespas.graph.errors import FormatError
from hespas.graph.timeline import united
from hespas.simulator.progress import Pressure, Progress, Steady
from hespas.simulator.streams import (
    COMMUNICATION,
    COMPUTE,
    DELAY,
    FREE,
    STREAMS,
    kinds_of,
    side_by_side,
)
from hespas.simulator.throughput import Throughput

__all__ = [
    "PRIORITIES",
    "Block",
    "ClassResult",
    "CriticalPath",
    "Priority",
    "Program",
    "Schedule",
    "Simulation",
    "Simulator",
    "Tasks",
    "busy_ns",
    "causes_of",
    "communication_order",
    "communication_pairs",
    "covered",
    "critical_ns",
    "exposed_ns",
    "interference_ns",
    "issue_order",
    "list_schedule",
    "node_label",
    "ranks_of",
    "release",
]

_Column = TypeVar("_Column", bound=NDArray[Any])

Priority = Literal["program", "critical-path"]
PRIORITIES: tuple[Priority, ...] = ("program", "critical-path")
"""Which ready node is first: that which stands first in the program, or that with the longest chain of work
behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """What to schedule, in program order; columns of shape ``(tasks,)``.

    ``stream`` is ``FREE``, ``DELAY`` or the code of a stream (:mod:`hespas.simulator.streams`); ``deps`` are
    task numbers. ``pressure`` says what slows what down (None: nothing).
    """

    name: str
    duration_ns: FloatArray
    stream: SmallIntArray
    deps: RaggedArray
    pressure: Pressure | None = None

    def __len__(self) -> int:
        return len(self.stream)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """When each task ran, and why not earlier; columns of shape ``(tasks,)``.

    ``cause`` is the task with a stream whose end let a task start (-1: it starts at 0): one it depends on,
    or, where ``by_resource``, the one that held its stream. ``added_ns`` is by how much what ran beside a
    task made it longer.
    """

    start_ns: FloatArray
    end_ns: FloatArray
    cause: IntArray
    by_resource: BoolArray
    added_ns: FloatArray

    @property
    def finish_ns(self) -> float:
        """When the last task ends; 0 without tasks."""
        return float(self.end_ns.max()) if len(self.end_ns) else 0.0

    def critical(self) -> IntArray:
        """The tasks of the critical path, first to last: back from the one that ends last, cause by cause."""
        if not len(self.end_ns):
            return np.empty(0, np.int64)
        causes: list[int] = self.cause.tolist()
        task = int(np.argmax(self.end_ns))
        path: list[int] = []
        while task >= 0:
            path.append(task)
            task = causes[task]
        return np.array(path[::-1], np.int64)


def list_schedule(tasks: Tasks, priority: Priority, queued: RaggedArray | None = None) -> Schedule:
    """The schedule; see the module. ``queued`` are dependencies with those on what stands before a task in a
    queue. Raises ``FormatError`` where dependencies form a cycle, and where times have no finite sum.
    """
    rank = ranks_of(tasks, priority)
    start_ns, ended_ns, ran = _start_times(tasks if queued is None else replace(tasks, deps=queued), rank)
    with np.errstate(over="ignore", invalid="ignore"):
        end_ns = start_ns + np.where(tasks.stream == FREE, 0.0, tasks.duration_ns)
        added_ns = np.where(np.isnan(ended_ns), 0.0, np.maximum(ended_ns - end_ns, 0.0))
        end_ns = np.where(np.isnan(ended_ns), end_ns, ended_ns)
    if sum(tasks.duration_ns.tolist()) == inf and not np.isfinite(end_ns).all():
        raise FormatError(
            f"{tasks.name or 'the graph'}: times of operations add up to more than a number holds",
            position=f"operation {int(np.argmax(tasks.duration_ns))} of the schedule",
            hint="are the times in nanoseconds?",
        )
    if np.isnan(start_ns).any():
        stuck = int(np.flatnonzero(np.isnan(start_ns))[0])
        raise FormatError(
            f"{tasks.name or 'the graph'}: dependencies form a cycle, so that some operations never start",
            position=f"operation {stuck} of the schedule",
            hint="hespas-validate check shows the cycle",
        )
    cause, by_resource = causes_of(tasks, start_ns, end_ns, ran)
    return Schedule(start_ns, end_ns, cause, by_resource, added_ns)


def communication_order(tasks: Tasks) -> RaggedArray:
    """Return the dependencies of the tasks of one rank with those of its communication on streams.

    See :func:`communication_pairs`. O(tasks) where program order respects the dependencies.
    """
    after, before = communication_pairs(tasks.stream, issue_order(tasks.deps))
    if not len(after):
        return tasks.deps
    consumers = np.concatenate([tasks.deps.row_ids, after])
    return RaggedArray.from_pairs(consumers, np.concatenate([tasks.deps.values, before]), len(tasks))


def communication_pairs(stream: SmallIntArray, issued: IntArray) -> tuple[IntArray, IntArray]:
    """Return each communication task of one rank with the one that its stream runs before it.

    ``issued`` lists the tasks in order of issue. A communication stream is a queue of a device: it runs in
    that order, also where a later task is ready first. Ranks then cannot wait for each other crosswise.
    """
    queue = issued[(stream[issued] >= 0) & (kinds_of(stream[issued]) == COMMUNICATION)]
    queue = queue[np.argsort(stream[queue], kind="stable")]
    same = stream[queue[1:]] == stream[queue[:-1]]
    return queue[1:][same], queue[:-1][same]


def issue_order(deps: RaggedArray) -> IntArray:
    """Tasks so that each follows what it depends on, the smallest number first; tasks on a cycle come last.

    O(tasks) where program order is one, else O((tasks + dependencies) log tasks).
    """
    count = len(deps)
    if (deps.values < deps.row_ids).all():
        return np.arange(count, dtype=np.int64)
    waiting: list[int] = deps.lengths.tolist()
    consumers = deps.transpose(count)
    bounds, targets = consumers.offsets.tolist(), consumers.values.tolist()
    ready = [task for task, left in enumerate(waiting) if not left]
    heapify(ready)
    order: list[int] = []
    while ready:
        task = heappop(ready)
        order.append(task)
        for consumer in targets[bounds[task] : bounds[task + 1]]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heappush(ready, consumer)
    order += [task for task, left in enumerate(waiting) if left > 0]
    return np.array(order, np.int64)


def ranks_of(tasks: Tasks, priority: Priority) -> IntArray | None:
    """The place of each task among ready ones; None for program order."""
    if priority == "program":
        return None
    first = np.argsort(-_work_behind(tasks), kind="stable")
    rank = np.empty(len(tasks), np.int64)
    rank[first] = np.arange(len(tasks))
    return rank


def _work_behind(tasks: Tasks) -> FloatArray:
    """The longest chain of durations that starts with each task; of a cycle and what precedes it, nothing."""
    durations: list[float] = tasks.duration_ns.tolist()
    behind = [0.0] * len(tasks)
    consumers: list[int] = np.bincount(tasks.deps.values, minlength=len(tasks)).tolist()
    bounds: list[int] = tasks.deps.offsets.tolist()
    deps: list[int] = tasks.deps.values.tolist()
    stack = [task for task, count in enumerate(consumers) if not count]
    while stack:
        task = stack.pop()
        length = behind[task] = behind[task] + durations[task]
        for dep in deps[bounds[task] : bounds[task + 1]]:
            behind[dep] = max(behind[dep], length)
            consumers[dep] -= 1
            if not consumers[dep]:
                stack.append(dep)
    return np.array(behind, np.float64)


def _start_times(tasks: Tasks, rank: IntArray | None) -> tuple[FloatArray, FloatArray, IntArray]:
    """When each task starts [ns], NaN for those that never do; when those end that others slow down (NaN:
    others); those with a stream in order of starts.
    """
    pressure = tasks.pressure if tasks.pressure is not None and tasks.pressure.matters else None
    if rank is not None:  # renumbered, so that the smaller number is the one to run first
        order = np.argsort(rank)
        deps = tasks.deps.take(order)
        deps = RaggedArray(deps.offsets, rank[deps.values].astype(np.int32))
        mine = None if pressure is None else pressure.take(order)
        ranked = Tasks(tasks.name, tasks.duration_ns[order], tasks.stream[order], deps, mine)
        start_ns, ended_ns, ran = _start_times(ranked, None)
        return start_ns[rank], ended_ns[rank], order[ran]
    consumers = tasks.deps.transpose(len(tasks))
    pace = None
    if pressure is not None:
        alone = np.full(len(tasks), -1, np.int64)
        pace = Progress.of(pressure, tasks.duration_ns, tasks.stream, np.zeros(len(tasks), np.int64), alone)
    start_ns, ran = _simulate(
        tasks.duration_ns.tolist(),
        tasks.stream.tolist(),
        tasks.deps.lengths.tolist(),
        consumers.offsets.tolist(),
        consumers.values.tolist(),
        pace=pace or Steady(),
    )
    return start_ns, np.full(len(tasks), nan) if pace is None else pace.columns()[0], ran


def _simulate(
    durations: list[float],
    streams: list[int],
    waiting: list[int],
    bounds: list[int],
    targets: list[int],
    *,
    pace: Steady,
) -> tuple[FloatArray, IntArray]:
    """The events in order of time. ``waiting`` counts dependencies still to end and is used up."""
    starts = [float("nan")] * len(streams)
    ran: list[int] = []
    ready: list[list[int]] = [[] for _ in range(max(streams, default=FREE) + 1)]
    idle = [True] * len(ready)
    ends: list[tuple[float, int]] = []
    fresh = [task for task, count in enumerate(waiting) if not count]
    changed: set[int] = set()
    now = 0.0
    while True:
        while fresh:
            task = fresh.pop()
            stream = streams[task]
            if stream >= 0:
                heappush(ready[stream], task)
                changed.add(stream)
                continue
            starts[task] = now
            if stream == DELAY:
                heappush(ends, (now + durations[task], task))
            else:
                release(targets[bounds[task] : bounds[task + 1]], waiting, fresh)
        for stream in sorted(changed):
            if idle[stream] and ready[stream]:
                task = heappop(ready[stream])
                idle[stream], starts[task] = False, now
                ran.append(task)
                pace.begin(task, now, durations[task], ends)
        changed.clear()
        pace.settle(now, ends)
        if not ends or ends[0][0] == inf:
            return np.array(starts, np.float64), np.array(ran, np.int64)
        now = ends[0][0]
        for task in _over(now, ends, pace):
            if streams[task] >= 0:
                idle[streams[task]] = True
                changed.add(streams[task])
            release(targets[bounds[task] : bounds[task + 1]], waiting, fresh)


def _over(now: float, ends: list[tuple[float, int]], pace: Steady) -> list[int]:
    """The tasks that end at a moment, taken from those that will."""
    over: list[int] = []
    while ends and ends[0][0] == now:
        task = heappop(ends)[1]
        if pace.end(task, now):
            over.append(task)
    return over


def release(consumers: list[int], waiting: list[int], fresh: list[int]) -> None:
    """Tell consumers that something they wait for has ended; those that wait for nothing more are fresh."""
    for consumer in consumers:
        waiting[consumer] -= 1
        if not waiting[consumer]:
            fresh.append(consumer)


def causes_of(
    tasks: Tasks, start_ns: FloatArray, end_ns: FloatArray, ran: IntArray
) -> tuple[IntArray, BoolArray]:
    """Per task: the task with a stream whose end let it start, and whether that only held the stream.

    What a task waited for ended exactly when it started, so equal times tell; a dependency comes before the
    stream, and the first dependency listed before the others.
    """
    count = len(tasks)
    cause = np.full(count, -1, np.int64)
    consumers, producers = tasks.deps.row_ids, tasks.deps.values
    decides = end_ns[producers] == start_ns[consumers]
    cause[consumers[decides][::-1]] = producers[decides][::-1]
    before = _before_on_stream(tasks, ran)
    by_resource = (cause < 0) & (before >= 0)
    by_resource &= end_ns[before] == start_ns
    cause[by_resource] = before[by_resource]
    return _past_free(tasks, cause), by_resource


def _before_on_stream(tasks: Tasks, ran: IntArray) -> IntArray:
    """The task that ran before each on its stream, -1 for the first and for those without a stream."""
    before = np.full(len(tasks), -1, np.int64)
    order = ran[np.argsort(tasks.stream[ran], kind="stable")]
    same = tasks.stream[order[1:]] == tasks.stream[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


def _past_free(tasks: Tasks, cause: IntArray) -> IntArray:
    """Causes with tasks that take no time replaced by what let those start."""
    free = np.append(tasks.stream == FREE, False)  # the last: no cause
    step = np.append(cause, -1)
    while True:
        through = free[step]
        if not through.any():
            return step[:-1]
        # Doubling: a chain of free tasks halves with each round.
        step = np.where(through, step[step], step)


# What a schedule adds up to: busy streams, exposed communication, where the critical path spends time.

_CLASSES = max(OpClass) + 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Trips of a loop that are not run one by one, as if the loop had its streams to itself.

    ``trips`` are those it stands for (all but the first) and ``duration_ns`` the time they add. Within it,
    ``busy_ns`` is by stream, ``exposed_ns`` communicates while nothing computes, and the critical path spends
    ``critical_ns`` by operation class and stream, shape ``(CLASSES, streams)``, which sums to the duration;
    ``wait_ns`` it waits for other ranks with nothing at work, by cause (:data:`hespas.graph.WAITS`);
    ``added_ns`` is by how much operations took longer beside others.
    """

    region: int
    trips: int
    duration_ns: float
    busy_ns: FloatArray
    exposed_ns: float
    critical_ns: FloatArray
    wait_ns: FloatArray
    added_ns: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Tasks and what they are: ``node`` of the graph (-1: a block), ``block`` (-1: a node), operation class.

    A block is several tasks at once, one on each stream that its loop uses.
    """

    tasks: Tasks
    node: SmallIntArray
    block: SmallIntArray
    op_class: SmallIntArray
    blocks: tuple[Block, ...]


def busy_ns(program: Program, schedule: Schedule) -> FloatArray:
    """Time in which each kind of stream works, shape ``(streams,)``: that of any of them where there are
    several of a kind. O(tasks log tasks).
    """
    tasks = program.tasks
    alone = (program.block < 0) & (tasks.stream != FREE)
    resource = kinds_of(tasks.stream)
    worked = tasks.duration_ns[alone] + schedule.added_ns[alone]
    busy = np.bincount(resource[alone], worked, len(STREAMS)).astype(np.float64)
    for kind in side_by_side(tasks.stream[alone]):
        mine = alone & (resource == kind)
        from_ns, to_ns = united(schedule.start_ns[mine], schedule.end_ns[mine])
        busy[kind] = (to_ns - from_ns).sum()
    for task in np.flatnonzero(program.block >= 0).tolist():
        kind = int(resource[task])
        busy[kind] += program.blocks[int(program.block[task])].busy_ns[kind]
    return busy


def interference_ns(program: Program, schedule: Schedule) -> float:
    """By how much operations took longer beside others, summed over them; blocks say theirs."""
    added = float(schedule.added_ns[program.tasks.stream != FREE].sum())
    for number, block in enumerate(program.blocks):
        added += block.added_ns * bool((program.block == number).any())
    return added


def exposed_ns(program: Program, schedule: Schedule) -> float:
    """Time in which communication runs and no computation; blocks say theirs. O(tasks log tasks)."""
    resource, block = kinds_of(program.tasks.stream), program.block
    several = side_by_side(program.tasks.stream)
    compute, talking = resource == COMPUTE, (resource == COMMUNICATION) & (block < 0)
    start, end = schedule.start_ns, schedule.end_ns
    from_ns, to_ns = np.sort(start[compute]), np.sort(end[compute])
    if COMPUTE in several:
        from_ns, to_ns = united(start[compute], end[compute])
    begin, until = start[talking], end[talking]
    if COMMUNICATION in several:
        begin, until = united(begin, until)
    hidden = covered(from_ns, to_ns, until) - covered(from_ns, to_ns, begin)
    exposed = float(np.maximum(until - begin - hidden, 0.0).sum())
    for task in np.flatnonzero((resource == COMMUNICATION) & (block >= 0)).tolist():
        exposed += program.blocks[int(block[task])].exposed_ns
    return exposed


def covered(from_ns: FloatArray, to_ns: FloatArray, at_ns: FloatArray) -> FloatArray:
    """How much of the time before ``at_ns`` lies in the intervals, which do not overlap and are sorted."""
    if not len(from_ns):
        return np.zeros(len(at_ns))
    before = np.concatenate([[0.0], np.cumsum(to_ns - from_ns)])
    last = np.searchsorted(from_ns, at_ns, side="right") - 1
    inside = np.minimum(at_ns, to_ns[last]) - from_ns[last]
    covered: FloatArray = np.where(last < 0, 0.0, before[last] + inside)
    return covered


def critical_ns(program: Program, schedule: Schedule, path: IntArray) -> FloatArray:
    """Time that the critical path spends by operation class and kind of stream, ``(CLASSES, STREAMS)``."""
    spent = schedule.end_ns[path] - schedule.start_ns[path]
    stream, block = kinds_of(program.tasks.stream[path]), program.block[path]
    alone = (block < 0) & (stream >= 0)
    key = program.op_class[path][alone] * len(STREAMS) + stream[alone]
    sums = np.bincount(key, spent[alone], _CLASSES * len(STREAMS)).astype(np.float64)
    table: FloatArray = sums.reshape(_CLASSES, len(STREAMS))
    met: list[int] = block[block >= 0].tolist()
    for index in met:
        table += program.blocks[index].critical_ns
    return table


def node_label(graph: OpGraph, node: int) -> str:
    """What a node is called: by its name, else its operation; -1 stands for the trips of a loop."""
    return graph.node_name(node) or graph.op_name(node) if node >= 0 else "the rest of a loop"


# --- What a simulation says besides its timeline.


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of spans that ends last; each starts at the moment the one before it ends. Where a rank waits
    for another, it goes on with what that one did.

    ``spans`` counts them, ``after_resource`` those that waited for a busy resource and not for a dependency.
    ``class_ns`` and ``resource_ns`` say where its time goes, by the name of the operation class or resource;
    each sums to the finish of the rank.
    """

    spans: int
    after_resource: int
    class_ns: Mapping[str, float]
    resource_ns: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """One rank class that some rank runs. ``rank`` is the one whose spans the timeline has.

    That is the one that ends last; its ranks behave in ``ways`` different ways. ``busy_ns`` is by resource.
    ``wait_ns`` is the time in which it waited for other ranks with nothing of its own at work, by what it
    waited in (:data:`hespas.graph.WAITS`). ``unknown`` counts nodes whose time nobody knows: they took none,
    so that ``finish_ns`` is a lower bound. ``kept`` counts nodes whose time is a recorded one, beside those
    that are estimated for a device. ``extrapolated`` counts the loops that were not run trip by trip.
    ``interference_ns`` is by how much communication and kernels beside each other made its operations longer,
    summed over them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The timeline of all ranks, and one summary per rank class, in order of the classes.

    ``workload`` is what ran. ``critical_path`` has the spans of the critical path of the whole job, first
    to last, of whatever rank. ``interval_ns`` is the 90 % interval of the step, from the intervals of the
    estimates of its operations (two NaN: unknown). ``throughput`` is known where the workload states its
    FLOPs or tokens.
    """

    simulator: str
    workload: Workload
    timeline: Timeline
    classes: tuple[ClassResult, ...]
    critical_path: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    interval_ns: tuple[float, float] = (nan, nan)
    throughput: Throughput = field(default_factory=Throughput)
    path = RenamedAttribute("critical_path")
    is_mixed = RenamedAttribute("mixes_recorded_and_estimated")

    @property
    def step_ns(self) -> float:
        """When the last rank is done."""
        return self.timeline.step_ns

    @property
    def is_lower_bound(self) -> bool:
        """Whether the time of some node that runs is not known, and counts as none."""
        return any(found.unknown for found in self.classes)

    @property
    def mixes_recorded_and_estimated(self) -> bool:
        """Return True if some times were recorded, on any device, and others are estimates."""
        return any(result.kept for result in self.classes)

    @property
    def low_ns(self) -> float:
        """Return the lower end of ``interval_ns``: a deprecated name."""
        warn_renamed("Simulation.low_ns", "Simulation.interval_ns[0]")
        return self.interval_ns[0]

    @property
    def high_ns(self) -> float:
        """Return the upper end of ``interval_ns``: a deprecated name."""
        warn_renamed("Simulation.high_ns", "Simulation.interval_ns[1]")
        return self.interval_ns[1]


# What a simulator is.


@runtime_checkable
class Simulator(Protocol):
    """A model of what happens when a workload runs: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What reports call the model."""
        ...

    def run(self, workload: Workload, diagnostics: Diagnostics) -> Simulation:
        """Run one step of every rank from time 0; ``workload`` is not changed.

        All nodes that run have a time (finite, 0 or more, 0 for what costs nothing) and all trip counts are
        whole numbers: :func:`hespas.simulator.simulate` sees to it. Raises ``FormatError`` where dependencies
        form a cycle.
        """
        ...
