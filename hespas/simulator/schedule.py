"""A list schedule: each stream runs, whenever it is idle, the first of the nodes that are ready.

A node is ready when all it depends on has ended. A node without a stream takes no time: it ends when it is
ready. Nodes are not interrupted. At one moment all that ends then ends first, then idle streams take up work.
O((nodes + edges) log nodes).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Literal

import numpy as np

from hespas.graph.columns import BoolArray, Csr, FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError
from hespas.simulator.streams import FREE, STREAMS

__all__ = ["PRIORITIES", "Priority", "Schedule", "Tasks", "list_schedule"]

Priority = Literal["program", "critical-path"]
PRIORITIES: tuple[Priority, ...] = ("program", "critical-path")
"""Which ready node is first: that which stands first in the program, or that with the longest chain of work
behind it."""


@dataclass(frozen=True, slots=True, eq=False)
class Tasks:
    """What to schedule, in program order; columns of shape ``(tasks,)``.

    ``stream`` is ``FREE`` or an index of ``STREAMS``; ``deps`` are task numbers.
    """

    name: str
    duration_ns: FloatArray
    stream: SmallIntArray
    deps: Csr

    def __len__(self) -> int:
        return len(self.stream)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """When each task ran, and why not earlier; columns of shape ``(tasks,)``.

    ``cause`` is the task with a stream whose end let a task start (-1: it starts at 0): one it depends on,
    or, where ``by_resource``, the one that held its stream.
    """

    start_ns: FloatArray
    end_ns: FloatArray
    cause: IntArray
    by_resource: BoolArray

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


def list_schedule(tasks: Tasks, priority: Priority) -> Schedule:
    """The schedule; see the module. Raises ``FormatError`` where dependencies form a cycle, and where times
    have no finite sum.
    """
    rank = _ranks(tasks, priority)
    start_ns, ran = _start_times(tasks, rank)
    with np.errstate(over="ignore"):
        end_ns = start_ns + np.where(tasks.stream == FREE, 0.0, tasks.duration_ns)
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
    cause, by_resource = _causes(tasks, start_ns, end_ns, ran)
    return Schedule(start_ns, end_ns, cause, by_resource)


def _ranks(tasks: Tasks, priority: Priority) -> IntArray | None:
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


def _start_times(tasks: Tasks, rank: IntArray | None) -> tuple[FloatArray, IntArray]:
    """When each task starts [ns], NaN for those that never do; those with a stream in order of starts."""
    if rank is not None:  # renumbered, so that the smaller number is the one to run first
        order = np.argsort(rank)
        deps = tasks.deps.take(order)
        deps = Csr(deps.offsets, rank[deps.values].astype(np.int32))
        ranked = Tasks(tasks.name, tasks.duration_ns[order], tasks.stream[order], deps)
        start_ns, ran = _start_times(ranked, None)
        return start_ns[rank], order[ran]
    consumers = tasks.deps.transpose(len(tasks))
    return _simulate(
        tasks.duration_ns.tolist(),
        tasks.stream.tolist(),
        tasks.deps.lengths.tolist(),
        consumers.offsets.tolist(),
        consumers.values.tolist(),
    )


def _simulate(
    durations: list[float], streams: list[int], waiting: list[int], bounds: list[int], targets: list[int]
) -> tuple[FloatArray, IntArray]:
    """The events in order of time. ``waiting`` counts dependencies still to end and is used up."""
    starts = [float("nan")] * len(streams)
    ran: list[int] = []
    each_stream = range(len(STREAMS))
    ready: list[list[int]] = [[] for _ in each_stream]
    running = [-1 for _ in each_stream]
    until = [inf for _ in each_stream]
    fresh = [task for task, count in enumerate(waiting) if not count]
    now = 0.0
    while True:
        while fresh:
            task = fresh.pop()
            stream = streams[task]
            if stream >= 0:
                heappush(ready[stream], task)
                continue
            starts[task] = now
            _release(targets[bounds[task] : bounds[task + 1]], waiting, fresh)
        for stream in each_stream:
            if running[stream] < 0 and ready[stream]:
                task = running[stream] = heappop(ready[stream])
                starts[task] = now
                ran.append(task)
                until[stream] = now + durations[task]
        now = min(until)
        if now == inf:
            return np.array(starts, np.float64), np.array(ran, np.int64)
        for stream in each_stream:
            if until[stream] == now:
                task, running[stream], until[stream] = running[stream], -1, inf
                _release(targets[bounds[task] : bounds[task + 1]], waiting, fresh)


def _release(consumers: list[int], waiting: list[int], fresh: list[int]) -> None:
    """Tell consumers that something they wait for has ended; those that wait for nothing more are fresh."""
    for consumer in consumers:
        waiting[consumer] -= 1
        if not waiting[consumer]:
            fresh.append(consumer)


def _causes(
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
