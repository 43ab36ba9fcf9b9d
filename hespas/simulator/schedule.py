"""List schedule of a program by the event loop (:mod:`hespas.simulator.event_loop`), and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.graph import (
    OpClass,
    OpGraph,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, SmallIntArray
from hespas.graph.errors import FormatError
from hespas.graph.passes.order import ready_order
from hespas.graph.timeline import Intervals, united
from hespas.simulator.event_loop import ConstantPace, ContentionPace, EventLoop
from hespas.simulator.interference import Pressure
from hespas.simulator.streams import (
    COMMUNICATION,
    COMPUTE,
    FREE,
    STREAMS,
    concurrent_kinds,
    kinds_of,
)

__all__ = [
    "PRIORITIES",
    "Block",
    "Priority",
    "Schedule",
    "TaskProgram",
    "Tasks",
    "busy_ns",
    "causes_of",
    "communication_order",
    "communication_pairs",
    "critical_ns",
    "exposed_ns",
    "interference_ns",
    "issue_order",
    "list_schedule",
    "node_label",
    "ranks_of",
]


_Column = TypeVar("_Column", bound=NDArray[Any])

Priority = Literal["program", "critical-path"]

PRIORITIES: tuple[Priority, ...] = ("program", "critical-path")
"""Order of ready nodes: first in program order, or longest chain of dependent work first."""


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """Tasks to schedule, in program order; columns of shape ``(tasks,)``.

    ``stream`` is the code of a stream (:mod:`hespas.simulator.streams`). ``FREE`` marks a task that takes no
    time, ``DELAY`` a task that occupies no stream. ``deps`` lists the tasks for which each task waits.
    ``pressure`` has the contention factors (None: no contention).
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
    """Start and end of each task, and the task that delayed its start; columns of shape ``(tasks,)``.

    ``cause`` is the task whose end allowed a task to start (-1: it starts at 0). It is a dependency, or, if
    ``by_resource``, the previous task on the same stream. Only tasks with a stream are causes. ``added_ns``
    is the time that contention added to a task.
    """

    start_ns: FloatArray
    end_ns: FloatArray
    cause: IntArray
    by_resource: BoolArray
    added_ns: FloatArray

    @property
    def finish_ns(self) -> float:
        """Return the end of the last task; 0 without tasks."""
        return float(self.end_ns.max()) if len(self.end_ns) else 0.0

    def critical(self) -> IntArray:
        """Return the tasks of the critical path, first to last. The path is followed backwards through causes
        from the task that ends last.
        """
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
    """Schedule the tasks of one rank, as described in the module.

    ``queued`` are the dependencies, extended by the order of communication streams (None: computed with
    :func:`communication_order`). Raises ``FormatError`` if dependencies form a cycle, and if times overflow.
    """
    rank = ranks_of(tasks, priority)
    pace = ConstantPace()
    if tasks.pressure is not None and tasks.pressure.matters:
        alone = np.full(len(tasks), -1, np.int64)
        pace = ContentionPace.of(
            tasks.pressure, tasks.duration_ns, tasks.stream, np.zeros(len(tasks), np.int64), alone
        )
    deps = tasks.deps if queued is None else queued
    start_ns, end_ns, ran = EventLoop(deps, tasks.stream, tasks.duration_ns, rank, pace).run()
    with np.errstate(over="ignore", invalid="ignore"):
        takes_ns = np.where(tasks.stream == FREE, 0.0, tasks.duration_ns)
        added_ns = np.maximum(end_ns - (start_ns + takes_ns), 0.0)
    if sum(tasks.duration_ns.tolist()) == inf and not np.isfinite(end_ns).all():
        raise FormatError(
            f"{tasks.name or 'the graph'}: the sum of operation times overflows",
            position=f"operation {int(np.argmax(tasks.duration_ns))} of the schedule",
            hint="check that the times are in nanoseconds",
        )
    if np.isnan(start_ns).any():
        blocked = int(np.flatnonzero(np.isnan(start_ns))[0])
        raise FormatError(
            f"{tasks.name or 'the graph'}: dependencies form a cycle, so that some operations never start",
            position=f"operation {blocked} of the schedule",
            hint="run hespas-validate check to see the cycle",
        )
    cause, by_resource = causes_of(tasks, start_ns, end_ns, ran)
    return Schedule(start_ns, end_ns, cause, by_resource, added_ns)


def communication_order(tasks: Tasks) -> RaggedArray:
    """Return the dependencies of the tasks of one rank, extended so that each communication stream runs in
    order of issue.

    See :func:`communication_pairs`. O(tasks) if program order respects the dependencies.
    """
    after, before = communication_pairs(tasks.stream, issue_order(tasks.deps))
    if not len(after):
        return tasks.deps
    consumers = np.concatenate([tasks.deps.row_ids, after])
    return RaggedArray.from_pairs(consumers, np.concatenate([tasks.deps.values, before]), len(tasks))


def communication_pairs(stream: SmallIntArray, issued: IntArray) -> tuple[IntArray, IntArray]:
    """Return pairs of communication tasks of one rank that run one after the other on the same stream: the
    later tasks, and the earlier tasks.

    ``issued`` lists the tasks in order of issue. A communication stream is a device queue. It runs in that
    order even if a later task is ready first. This avoids deadlocks between ranks that would otherwise start
    collectives in different orders.
    """
    queue = issued[(stream[issued] >= 0) & (kinds_of(stream[issued]) == COMMUNICATION)]
    queue = queue[np.argsort(stream[queue], kind="stable")]
    same = stream[queue[1:]] == stream[queue[:-1]]
    return queue[1:][same], queue[:-1][same]


def issue_order(deps: RaggedArray) -> IntArray:
    """Return the tasks in topological order; of several ready tasks, the smallest number is first. Tasks on a
    cycle come last.

    O(tasks) if program order is topological, else O((tasks + dependencies) log tasks).
    """
    if (deps.values < deps.row_ids).all():
        return np.arange(len(deps), dtype=np.int64)
    order = ready_order(deps)
    reached = np.zeros(len(deps), np.bool_)
    reached[order] = True
    return np.concatenate([order, np.flatnonzero(~reached)])


def ranks_of(tasks: Tasks, priority: Priority) -> IntArray | None:
    """Return the priority of each task among ready tasks (0: first); None for program order."""
    if priority == "program":
        return None
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
    first = np.argsort(-np.array(behind, np.float64), kind="stable")
    rank = np.empty(len(tasks), np.int64)
    rank[first] = np.arange(len(tasks))
    return rank


def causes_of(
    tasks: Tasks, start_ns: FloatArray, end_ns: FloatArray, ran: IntArray
) -> tuple[IntArray, BoolArray]:
    """Return for each task the task whose end allowed it to start. Also return a mask that is True if that
    task only occupied the stream.

    A task starts exactly when its cause ends, so the cause is found by equal times. A dependency takes
    precedence over the stream, and the first listed dependency over the others. Only tasks with a stream are
    causes.
    """
    count = len(tasks)
    cause = np.full(count, -1, np.int64)
    consumers, producers = tasks.deps.row_ids, tasks.deps.values
    decides = end_ns[producers] == start_ns[consumers]
    cause[consumers[decides][::-1]] = producers[decides][::-1]
    before = np.full(len(tasks), -1, np.int64)
    order = ran[np.argsort(tasks.stream[ran], kind="stable")]
    same = tasks.stream[order[1:]] == tasks.stream[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    by_resource = (cause < 0) & (before >= 0)
    by_resource &= end_ns[before] == start_ns
    cause[by_resource] = before[by_resource]
    # Replace zero-cost tasks by their own causes. A chain of them halves with each round.
    free = np.append(tasks.stream == FREE, False)  # the last entry: no cause
    step = np.append(cause, -1)
    while free[step].any():
        step = np.where(free[step], step[step], step)
    return step[:-1], by_resource


_CLASSES = max(OpClass) + 1


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Block:
    """Block: all later iterations of a loop, which are not simulated one by one. Times are the times of the
    loop alone on idle streams.

    ``trips`` is the number of these iterations (all but the first), ``duration_ns`` the time that they add.
    ``busy_ns`` is the time in which each stream works. ``exposed_ns`` is the time of communication without
    computation. ``critical_ns`` splits the critical path by operation class and stream, shape ``(CLASSES,
    streams)``; it sums to the duration. ``wait_ns`` is the time in which the rank only waits for other ranks,
    by cause (:data:`hespas.graph.WAITS`). ``added_ns`` is the time added by contention.
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
class TaskProgram:
    """Tasks of a program; columns of shape ``(tasks,)``.

    ``node`` is the node of the graph that a task runs (-1: the task belongs to a block). ``block`` is the
    index in ``blocks`` of the block that a task belongs to (-1: it runs a node). ``op_class`` is the
    operation class. A block consists of one task on each stream that its loop uses.
    """

    tasks: Tasks
    node: SmallIntArray
    block: SmallIntArray
    op_class: SmallIntArray
    blocks: tuple[Block, ...]


def busy_ns(program: TaskProgram, schedule: Schedule) -> FloatArray:
    """Return the time in which each kind of stream works, shape ``(streams,)``. Time in which several streams
    of one kind work counts once. O(tasks log tasks).
    """
    tasks = program.tasks
    alone = (program.block < 0) & (tasks.stream != FREE)
    resource = kinds_of(tasks.stream)
    worked = tasks.duration_ns[alone] + schedule.added_ns[alone]
    busy = np.bincount(resource[alone], worked, len(STREAMS)).astype(np.float64)
    for kind in concurrent_kinds(tasks.stream[alone]):
        mine = alone & (resource == kind)
        from_ns, to_ns = united(schedule.start_ns[mine], schedule.end_ns[mine])
        busy[kind] = (to_ns - from_ns).sum()
    for task in np.flatnonzero(program.block >= 0).tolist():
        kind = int(resource[task])
        busy[kind] += program.blocks[int(program.block[task])].busy_ns[kind]
    return busy


def interference_ns(program: TaskProgram, schedule: Schedule) -> float:
    """Return the time that contention added to operations, summed over operations and blocks."""
    added = float(schedule.added_ns[program.tasks.stream != FREE].sum())
    for number, block in enumerate(program.blocks):
        added += block.added_ns * bool((program.block == number).any())
    return added


def exposed_ns(program: TaskProgram, schedule: Schedule) -> float:
    """Return the time in which the rank communicates and does not compute, including the exposed time of
    blocks. O(tasks log tasks).
    """
    resource, block = kinds_of(program.tasks.stream), program.block
    several = concurrent_kinds(program.tasks.stream)
    compute, talking = resource == COMPUTE, (resource == COMMUNICATION) & (block < 0)
    start, end = schedule.start_ns, schedule.end_ns
    from_ns, to_ns = np.sort(start[compute]), np.sort(end[compute])
    if COMPUTE in several:
        from_ns, to_ns = united(start[compute], end[compute])
    begin, until = start[talking], end[talking]
    if COMMUNICATION in several:
        begin, until = united(begin, until)
    computed = Intervals(from_ns, to_ns)
    hidden = computed.elapsed_ns(until) - computed.elapsed_ns(begin)
    exposed = float(np.maximum(until - begin - hidden, 0.0).sum())
    for task in np.flatnonzero((resource == COMMUNICATION) & (block >= 0)).tolist():
        exposed += program.blocks[int(block[task])].exposed_ns
    return exposed


def critical_ns(program: TaskProgram, schedule: Schedule, path: IntArray) -> FloatArray:
    """Return the time on the critical path by operation class and kind of stream, shape ``(CLASSES,
    STREAMS)``.
    """
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
    """Return the name of a node, or its operation if it has no name. -1 is the rest of a loop."""
    return graph.node_name(node) or graph.op_name(node) if node >= 0 else "the rest of a loop"
