"""Event loop of the scheduler: tasks of one rank or of all ranks of a job on their streams.

A task is ready when all its dependencies have ended. An idle stream runs the first of its ready tasks; tasks
are not interrupted. A task without a stream takes no time: it ends when it is ready. A delay occupies no
stream, and ends its duration after it is ready. At the same time, all ends are processed first, then idle
streams start tasks. Some tasks end by a communication event, which ends when the last of its arrivals is
over.

The pace of a task is its speed relative to running alone. Under contention (:class:`ContentionPace`), the
remaining work of running operations is rescaled whenever an operation of their rank begins or ends. A
collective progresses at the pace of its slowest member.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf, nan
from typing import NamedTuple

import numpy as np

from hespas.graph import RaggedArray
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.simulator.interference import Pressure
from hespas.simulator.streams import FREE

__all__ = ["ConstantPace", "ContentionPace", "EventLoop", "PendingEvents", "TaskTimes"]


_Ends = list[tuple[float, int]]
"""Heap of end times and tasks."""


class ConstantPace:
    """Pace of tasks without contention: each task takes exactly its duration."""

    def begin(self, task: int, now: float, work_ns: float, ends: _Ends) -> None:
        """Start a task that does not wait for other ranks; its end is added to ``ends``."""
        heappush(ends, (now + work_ns, task))

    def wait(self, task: int) -> None:
        """Start a communication task, which may have to wait for other ranks."""

    def move(self, task: int, now: float, over_ns: float, ends: _Ends) -> None:
        """Start the transfer of a communication task after its last arrival. It ends at ``over_ns``."""
        heappush(ends, (over_ns, task))

    def end(self, task: int, now: float) -> bool:
        """Return True if the task really ends now; False if contention has moved its end to another time."""
        return True

    def settle(self, now: float, ends: _Ends) -> None:
        """Recompute the ends of tasks whose pace changed. Called after all events of the same time."""


@dataclass(slots=True)
class ContentionPace(ConstantPace):
    """Pace of tasks under contention between communication and computation.

    ``owner`` is the rank of each task, ``event`` the communication event that ends it (-1: none). ``ended``
    is the time at which a task ended, ``moved`` the time at which it began to transfer bytes (NaN for tasks
    without contention).
    """

    owner: list[int]
    event: list[int]
    holds: list[float]
    moves: list[float]
    by_units: list[float]
    by_memory: list[float]
    works: list[float]
    paced: list[bool]
    presses: list[bool]
    slow: list[float]
    left: list[float]
    since: list[float]
    due: list[float]
    ended: list[float]
    moved: list[float]
    kernels: list[set[int]]
    communicating: list[set[int]]
    load: list[float]
    event_members: dict[int, list[int]]
    changed: set[int]

    @classmethod
    def of(
        cls,
        pressure: Pressure,
        duration_ns: FloatArray,
        stream: IntArray | SmallIntArray,
        owner: IntArray,
        ended_by: IntArray,
    ) -> ContentionPace:
        """Return the initial state. Tasks without a stream are not affected by contention."""
        held = stream >= 0
        slowed = (pressure.by_units > 0) | (pressure.by_memory > 0)
        presses = ((pressure.holds > 0) | (pressure.moves > 0)) & held
        paced = (slowed | (pressure.stretches & presses)) & held
        tasks, owners = len(pressure), int(owner.max(initial=-1)) + 1
        return cls(
            owner=owner.tolist(),
            event=ended_by.tolist(),
            holds=pressure.holds.tolist(),
            moves=pressure.moves.tolist(),
            by_units=pressure.by_units.tolist(),
            by_memory=pressure.by_memory.tolist(),
            works=duration_ns.tolist(),
            paced=paced.tolist(),
            presses=presses.tolist(),
            slow=[nan] * tasks,
            left=[0.0] * tasks,
            since=[0.0] * tasks,
            due=[nan] * tasks,
            ended=[nan] * tasks,
            moved=[nan] * tasks,
            kernels=[set() for _ in range(owners)],
            communicating=[set() for _ in range(owners)],
            load=[0.0] * owners,
            event_members={},
            changed=set(),
        )

    def begin(self, task: int, now: float, work_ns: float, ends: _Ends) -> None:
        """Start a task that does not wait for other ranks; its end is added to ``ends``."""
        if self.presses[task]:
            self.wait(task)
            self.move(task, now, now + work_ns, ends)
        elif self.paced[task]:
            owner = self.owner[task]
            self.kernels[owner].add(task)
            self.left[task], self.since[task] = work_ns, now
            if self.communicating[owner]:
                self.changed.add(owner)
            else:  # the common case: no contention
                self._stretch(task, 1.0, now, ends)
        else:
            heappush(ends, (now + work_ns, task))

    def wait(self, task: int) -> None:
        """Start a communication task, which may have to wait for other ranks."""
        if self.presses[task]:
            owner = self.owner[task]
            self.communicating[owner].add(task)
            if self.kernels[owner]:
                self.changed.add(owner)

    def move(self, task: int, now: float, over_ns: float, ends: _Ends) -> None:
        """Start the transfer of a communication task after its last arrival: it ends at ``over_ns``, or later
        with contention.
        """
        if self.presses[task]:
            self.moved[task] = now
            self.changed.add(self.owner[task])
        if not self.paced[task]:
            heappush(ends, (over_ns, task))
            return
        self.left[task], self.since[task] = self.works[task], now
        if self.event[task] >= 0:
            self.event_members.setdefault(self.event[task], []).append(task)

    def end(self, task: int, now: float) -> bool:
        """Return True if the task really ends now; False if contention has moved its end to another time."""
        if self.paced[task]:
            if self.due[task] != now:
                return False
            self.ended[task] = now
            self.due[task] = nan
            self.event_members.pop(self.event[task], None)
        elif not self.presses[task]:
            return True
        owner = self.owner[task]
        mine, others = self.kernels[owner], self.communicating[owner]
        if self.presses[task]:
            mine, others = others, mine
        mine.discard(task)
        if others:
            self.changed.add(owner)
        if not self.kernels[owner]:
            self.load[owner] = 0.0
        return True

    def settle(self, now: float, ends: _Ends) -> None:
        """Recompute the ends of tasks whose pace changed. Called after all events of the same time."""
        if not self.changed or (ends and ends[0][0] == now):
            return
        events: set[int] = set()
        for owner in self.changed:
            communicating = sorted(self.communicating[owner])
            moving = [task for task in communicating if self.moved[task] == self.moved[task]]
            held, moved = (
                sum(self.holds[task] for task in communicating),
                sum(self.moves[task] for task in moving),
            )
            load = 0.0
            for task in sorted(self.kernels[owner]):
                load += self.by_memory[task]
                slow = 1.0 + self.by_units[task] * held + self.by_memory[task] * moved
                self._stretch(task, slow, now, ends)
            self.load[owner] = min(load, 1.0)
            mine = [task for task in moving if self.paced[task]]
            for task in mine:
                if self.event[task] < 0:
                    self._stretch(task, self._pace(task), now, ends)
            events |= {self.event[task] for task in mine if self.event[task] >= 0}
        self.changed.clear()
        for event in events:
            members = self.event_members[event]
            slowest = max(self._pace(task) for task in members)
            for task in members:
                self._stretch(task, slowest, now, ends)

    def _pace(self, task: int) -> float:
        return 1.0 + self.moves[task] * self.load[self.owner[task]]

    def _stretch(self, task: int, slow: float, now: float, ends: _Ends) -> None:
        if slow == self.slow[task]:
            return
        if now > self.since[task]:
            self.left[task] = max(self.left[task] - (now - self.since[task]) / self.slow[task], 0.0)
        self.slow[task], self.since[task] = slow, now
        self.due[task] = now + self.left[task] * slow
        heappush(ends, (self.due[task], task))

    def columns(self) -> tuple[FloatArray, FloatArray]:
        """Return ``ended`` and ``moved``."""
        return np.array(self.ended, np.float64), np.array(self.moved, np.float64)


@dataclass(slots=True, kw_only=True)
class PendingEvents:
    """Communication events that have not ended. ``left`` is the number of missing arrivals of each event,
    ``over_ns`` the end of its last arrival so far, and ``ends`` the tasks that end with the event.

    Task ``i`` arrives at the events ``at[first[i]:first[i + 1]]``. ``lags`` has the time from the start of a
    task to the end of its arrival, with one entry per arrival.
    """

    left: list[int]
    over_ns: list[float]
    ends: list[list[int]]
    first: list[int]
    at: list[int]
    lags: list[float]

    def arrive(self, task: int, now: float, pace: ConstantPace, ends: _Ends) -> None:
        """Record that a task has arrived at its communication events, and end the events for which no arrival
        is missing.
        """
        for index in range(self.first[task], self.first[task + 1]):
            event = self.at[index]
            self.over_ns[event] = max(self.over_ns[event], now + self.lags[index])
            self.left[event] -= 1
            if not self.left[event]:
                for ended in self.ends[event]:
                    pace.move(ended, now, self.over_ns[event], ends)


class TaskTimes(NamedTuple):
    """Start and end of each task [ns], NaN for tasks that never start or end, and the tasks with a stream in
    order of starts.
    """

    start_ns: FloatArray
    end_ns: FloatArray
    ran: IntArray


class EventLoop:
    """Event loop that runs all tasks on their streams.

    The argument ``rank`` is the priority of each task among ready tasks (None: task order). ``ended_by`` is
    the communication event that ends each task (-1: none). State of the loop: ``waiting`` is the number of
    unfinished dependencies of each task, ``fresh`` the tasks that just became ready, ``ready`` the ready
    tasks of each stream, and ``ends`` the ends of running tasks.
    """

    def __init__(
        self,
        deps: RaggedArray,
        stream: SmallIntArray,
        duration_ns: FloatArray,
        rank: IntArray | None,
        pace: ConstantPace,
        *,
        ended_by: IntArray | None = None,
        events: PendingEvents | None = None,
    ) -> None:
        count = len(deps)
        consumers = deps.transpose(count)
        self.bounds, self.targets = consumers.offsets.tolist(), consumers.values.tolist()
        self.waiting: list[int] = deps.lengths.tolist()
        self.streams: list[int] = stream.tolist()
        self.durations: list[float] = duration_ns.tolist()
        self.alone = [True] * count if ended_by is None else (ended_by < 0).tolist()
        self.first = [0] * (count + 1) if events is None else events.first
        self.position: list[int] = list(range(count)) if rank is None else rank.tolist()
        self.task_at: list[int] = self.position if rank is None else np.argsort(rank).tolist()
        self.pace, self.events = pace, events
        self.starts, self.finished = [nan] * count, [nan] * count
        self.ran: list[int] = []
        self.ready: list[list[int]] = [[] for _ in range(max(self.streams, default=FREE) + 1)]
        self.idle = [True] * len(self.ready)
        self.changed: set[int] = set()
        self.fresh = [task for task, left in enumerate(self.waiting) if not left]
        self.ends: _Ends = []

    def run(self, begin_ns: FloatArray | None = None) -> TaskTimes:
        """Process all events and return the times of tasks. Tasks without dependencies are ready at
        ``begin_ns`` (None: 0). O((tasks + dependencies + arrivals) log tasks).
        """
        ends, now = self.ends, 0.0
        if begin_ns is not None:
            begins: list[float] = begin_ns.tolist()
            ends += [(begins[task], -1 - task) for task in self.fresh if begins[task] > 0]
            self.fresh = [task for task in self.fresh if begins[task] == 0]
            heapify(ends)
        while True:
            if self.fresh:
                self._queue_fresh(now)
            if not ends or ends[0][0] != now:
                self._start_streams(now)
                self.pace.settle(now, ends)
                if not ends or ends[0][0] == inf:
                    break
                now = ends[0][0]
            while ends and ends[0][0] == now:
                task = heappop(ends)[1]
                if task < 0:  # the start of a rank, not an end
                    self.fresh.append(-1 - task)
                elif self.pace.end(task, now):
                    stream = self.streams[task]
                    if stream >= 0:
                        self.idle[stream] = True
                        self.changed.add(stream)
                    self._end(task, now)
        start_ns, end_ns = np.array(self.starts, np.float64), np.array(self.finished, np.float64)
        return TaskTimes(start_ns, end_ns, np.array(self.ran, np.int64))

    def _queue_fresh(self, now: float) -> None:
        """Add tasks that became ready to the queues of their streams, and begin tasks without a stream."""
        streams, first = self.streams, self.first
        while self.fresh:
            task = self.fresh.pop()
            stream = streams[task]
            if stream >= 0:
                heappush(self.ready[stream], self.position[task])
                self.changed.add(stream)
            elif stream == FREE and self.alone[task] and first[task] == first[task + 1]:
                self.starts[task] = now
                self._end(task, now)
            else:
                self._begin(task, now)

    def _start_streams(self, now: float) -> None:
        """Begin the first ready task on each idle stream."""
        if not self.changed:
            return
        for stream in sorted(self.changed):
            if self.idle[stream] and self.ready[stream]:
                task = self.task_at[heappop(self.ready[stream])]
                self.idle[stream] = False
                self.ran.append(task)
                self._begin(task, now)
        self.changed.clear()

    def _begin(self, task: int, now: float) -> None:
        self.starts[task] = now
        if self.alone[task]:
            self.pace.begin(task, now, self.durations[task], self.ends)
        else:
            self.pace.wait(task)
        if self.events is not None and self.first[task] < self.first[task + 1]:
            self.events.arrive(task, now, self.pace, self.ends)

    def _end(self, task: int, now: float) -> None:
        self.finished[task] = now
        waiting = self.waiting
        for consumer in self.targets[self.bounds[task] : self.bounds[task + 1]]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                self.fresh.append(consumer)
