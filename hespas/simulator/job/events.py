"""The run of several programs that meet: streams take up what is ready, meetings end for all at once.

Each actor runs as in :mod:`hespas.simulator.schedule`. A task that a meeting ends holds its stream from its
start until the last arrival is over; one that holds no stream starts when it is ready.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf, nan

import numpy as np

from hespas.graph import RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.errors import FormatError
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.meetings import Meetings
from hespas.simulator.progress import Progress, Steady
from hespas.simulator.schedule import Schedule, Tasks, causes_of, release
from hespas.simulator.streams import FREE

__all__ = ["JointSchedule", "joint_schedule"]


@dataclass(frozen=True, slots=True, eq=False)
class JointSchedule:
    """When each task of all actors ran: ``schedule`` counts tasks of the cast.

    ``wait_ns`` is how long a task waited for others once it had started; ``awaited`` is the task whose
    arrival was the last (itself, where it was; -1 where it met nobody).
    """

    schedule: Schedule
    wait_ns: FloatArray
    awaited: IntArray

    @property
    def is_stuck(self) -> BoolArray:
        """Tasks that never end."""
        return np.isnan(self.schedule.end_ns)


def joint_schedule(
    cast: Cast,
    meetings: Meetings,
    rank: IntArray | None,
    queued: RaggedArray,
    begin_ns: FloatArray | None = None,
) -> JointSchedule:
    """The schedule; ``rank`` is the place of each task among ready ones of its actor (None: program order),
    ``queued`` that of :func:`hespas.simulator.schedule.list_schedule`, ``begin_ns`` when each actor begins.

    Times of tasks that never start or end are NaN. Raises ``FormatError`` where times have no finite sum.
    O((tasks + dependencies + arrivals) log tasks).
    """
    stream = _apart(cast)
    begin_ns = np.zeros(len(cast.deps)) if begin_ns is None else begin_ns[cast.owner]
    order = None if rank is None else np.argsort(rank)
    progress = _progress(cast, meetings, order)
    pace = progress or Steady()
    if rank is None or order is None:
        start_ns, end_ns, ran = _run(queued, stream, meetings, begin_ns, pace)
    else:
        deps = queued.take(order)
        deps = RaggedArray(deps.offsets, rank[deps.values].astype(np.int32))
        start_ns, end_ns, ran = _run(deps, stream[order], _reordered(meetings, order), begin_ns[order], pace)
        start_ns, end_ns, ran = start_ns[rank], end_ns[rank], order[ran]
    if np.isnan(end_ns).any() and sum(meetings.duration_ns.tolist()) == inf:
        raise FormatError(
            f"{cast.actors[0].graph.name}: times of operations add up to more than a number holds",
            position=f"operation {int(np.argmax(cast.duration_ns))} of the schedule",
            hint="are the times in nanoseconds?",
        )
    tasks = Tasks("job", meetings.duration_ns, stream.astype(np.int32), cast.deps)
    cause, by_resource = causes_of(tasks, start_ns, end_ns, ran)
    waits = meetings.ended_by >= 0
    wait_ns = np.where(waits, end_ns - start_ns - meetings.duration_ns, 0.0)
    added_ns = np.zeros(len(start_ns))
    if progress is not None:
        ended, moved = (column if rank is None else column[rank] for column in progress.columns())
        wait_ns = np.where(waits & ~np.isnan(ended), moved - start_ns, wait_ns)
        begun = np.where(waits, moved, start_ns)
        added_ns = np.where(np.isnan(ended), 0.0, np.maximum(ended - (begun + meetings.duration_ns), 0.0))
    schedule = Schedule(start_ns, end_ns, cause, by_resource, added_ns)
    return JointSchedule(schedule, np.maximum(wait_ns, 0.0), _awaited(meetings, start_ns))


def _progress(cast: Cast, meetings: Meetings, order: IntArray | None) -> Progress | None:
    """The pace of tasks in some ``order``; None where nothing slows anything down."""
    if cast.pressure is None or not cast.pressure.matters:
        return None
    met = np.where(meetings.is_message, -1, meetings.ended_by)
    if order is None:
        order = np.arange(len(cast.deps))
    return Progress.of(
        cast.pressure.take(order),
        meetings.duration_ns[order],
        cast.stream[order],
        cast.owner[order].astype(np.int64),
        met[order],
    )


def _apart(cast: Cast) -> IntArray:
    """Streams of different actors as different numbers; what holds none keeps its code."""
    width = int(cast.stream.max(initial=0)) + 1
    return np.where(cast.stream >= 0, cast.owner.astype(np.int64) * width + cast.stream, cast.stream)


def _reordered(meetings: Meetings, order: IntArray) -> Meetings:
    places = RaggedArray.from_lengths(meetings.arrivals.lengths, np.arange(len(meetings.lag_ns)))
    return replace(
        meetings,
        arrivals=meetings.arrivals.take(order),
        lag_ns=meetings.lag_ns[places.take(order).values],
        ended_by=meetings.ended_by[order],
        duration_ns=meetings.duration_ns[order],
        is_message=meetings.is_message[order],
    )


def _awaited(meetings: Meetings, start_ns: FloatArray) -> IntArray:
    """The last arrival of the meeting that ends each task: the task itself, where it is one of the last."""
    task, meeting = meetings.arrivals.row_ids, meetings.arrivals.values
    over_ns = start_ns[task] + meetings.lag_ns
    order = np.lexsort((-task, over_ns, meeting))
    last_ns = np.full(meetings.count, nan)
    who = np.full(meetings.count, -1, np.int64)
    last_ns[meeting[order]], who[meeting[order]] = over_ns[order], task[order]
    found = np.where(meetings.ended_by >= 0, np.append(who, -1)[meetings.ended_by], -1)
    own = (meetings.ended_by[task] == meeting) & (over_ns == last_ns[meeting])
    found[task[own]] = task[own]
    return found


@dataclass(slots=True)
class _Open:
    """Meetings still to end: how many arrivals each waits for, when the last one so far is over, and whom it
    ends. ``first`` and ``at`` are the arrivals of each task, ``lags`` one entry for each.
    """

    left: list[int]
    over_ns: list[float]
    ends: list[list[int]]
    first: list[int]
    at: list[int]
    lags: list[float]
    pace: Steady

    @classmethod
    def of(cls, meetings: Meetings, pace: Steady) -> _Open:
        count = meetings.count
        waiting = np.flatnonzero(meetings.ended_by >= 0)
        return cls(
            np.bincount(meetings.arrivals.values, minlength=count).tolist(),
            [0.0] * count,
            RaggedArray.from_pairs(meetings.ended_by[waiting], waiting, count).to_lists(),
            meetings.arrivals.offsets.tolist(),
            meetings.arrivals.values.tolist(),
            meetings.lag_ns.tolist(),
            pace,
        )

    def arrive(self, task: int, now: float, ends: list[tuple[float, int]]) -> None:
        """A task starts: it comes to its meetings, and ends those of which it is the last."""
        for place in range(self.first[task], self.first[task + 1]):
            meeting = self.at[place]
            self.over_ns[meeting] = max(self.over_ns[meeting], now + self.lags[place])
            self.left[meeting] -= 1
            if not self.left[meeting]:
                for each in self.ends[meeting]:
                    self.pace.move(each, now, self.over_ns[meeting], ends)


@dataclass(slots=True)
class _Streams:
    """Streams of all actors, and what is ready for each."""

    number: list[int]
    ready: list[list[int]]
    idle: list[bool]
    ran: list[int]
    changed: set[int]

    @classmethod
    def of(cls, stream: IntArray) -> _Streams:
        count = int(stream.max(initial=FREE)) + 1
        return cls(stream.tolist(), [[] for _ in range(count)], [True] * count, [], set())

    def queue(self, fresh: list[int]) -> list[int]:
        """Tasks that are ready stand in their queues; those that hold no stream are returned."""
        begun: list[int] = []
        for task in fresh:
            stream = self.number[task]
            if stream < 0:
                begun.append(task)
            else:
                heappush(self.ready[stream], task)
                self.changed.add(stream)
        return begun

    def end(self, task: int) -> None:
        """What held a stream holds it no more."""
        stream = self.number[task]
        if stream >= 0:
            self.idle[stream] = True
            self.changed.add(stream)

    def starting(self) -> list[int]:
        """The first that is ready of each stream that is idle."""
        ready, idle = self.ready, self.idle
        begun: list[int] = []
        for stream in self.changed:
            if idle[stream] and ready[stream]:
                begun.append(heappop(ready[stream]))
                idle[stream] = False
        self.changed.clear()
        self.ran += begun
        return begun


def _run(
    deps: RaggedArray,
    stream: IntArray,
    meetings: Meetings,
    begin_ns: FloatArray,
    pace: Steady,
) -> tuple[FloatArray, FloatArray, IntArray]:
    """Starts and ends of all tasks, and those with a stream in order of starts; what depends on nothing is
    ready at ``begin_ns``. At one moment all that ends then ends first, then idle streams take up work.
    """
    consumers = deps.transpose(len(deps))
    bounds, targets = consumers.offsets.tolist(), consumers.values.tolist()
    waiting: list[int] = deps.lengths.tolist()
    durations: list[float] = np.where(stream == FREE, 0.0, meetings.duration_ns).tolist()
    alone: list[bool] = (meetings.ended_by < 0).tolist()
    comes: list[bool] = (meetings.arrivals.lengths > 0).tolist()
    still, streams = _Open.of(meetings, pace), _Streams.of(stream)
    starts, finished = [nan] * len(deps), [nan] * len(deps)
    roots = np.flatnonzero(deps.lengths == 0)
    fresh: list[int] = roots[begin_ns[roots] == 0].tolist()
    later = roots[begin_ns[roots] > 0]
    ends = [(at, -1 - task) for at, task in zip(begin_ns[later].tolist(), later.tolist(), strict=True)]
    heapify(ends)
    now = 0.0
    while True:
        while ends and ends[0][0] == now:
            task = heappop(ends)[1]
            if task < 0:  # not an end: its rank begins
                fresh.append(-1 - task)
                continue
            if not pace.end(task, now):
                continue
            finished[task] = now
            streams.end(task)
            release(targets[bounds[task] : bounds[task + 1]], waiting, fresh)
        begun = streams.queue(fresh) if fresh else streams.starting()
        if not begun and not fresh:
            pace.settle(now, ends)
            if not ends or ends[0][0] == inf:
                return _columns(starts, finished, streams.ran)
            now = ends[0][0]
        fresh.clear()
        for task in begun:
            starts[task] = now
            if alone[task]:
                pace.begin(task, now, durations[task], ends)
            else:
                pace.wait(task)
            if comes[task]:
                still.arrive(task, now, ends)


def _columns(
    starts: list[float], finished: list[float], ran: list[int]
) -> tuple[FloatArray, FloatArray, IntArray]:
    return np.array(starts, np.float64), np.array(finished, np.float64), np.array(ran, np.int64)
