"""What a joint schedule adds up to: for each actor its spans and figures, across actors the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hespas.graph import WAITS, OpClass
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.intervals import united
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.events import JointSchedule
from hespas.simulator.job.meetings import Meetings
from hespas.simulator.results import Across, Scheduled, critical_path, spans_of
from hespas.simulator.schedule import (
    ClassResult,
    CriticalPath,
    Program,
    Schedule,
    busy_ns,
    covered,
    exposed_ns,
)
from hespas.simulator.streams import COMMUNICATION, COMPUTE, COPY, FREE, STREAMS, kinds_of

__all__ = ["across", "scheduled"]

_CLASSES = max(OpClass) + 1


def scheduled(cast: Cast, meetings: Meetings, done: JointSchedule) -> list[Scheduled]:
    """What each actor did; spans of the critical path of the whole job are marked. O(tasks log tasks)."""
    critical = np.zeros(len(cast.duration_ns), np.bool_)
    if len(critical):
        critical[_path(done, int(np.argmax(done.schedule.end_ns))).task] = True
    return [_of_actor(cast, meetings, done, place, critical) for place in range(len(cast.actors))]


def across(cast: Cast, done: JointSchedule, parts: Sequence[Scheduled], first: int) -> Across:
    """The columns across actors; ``first`` spans stand before those of ``parts``, which are of the cast."""
    place = np.full(len(cast.duration_ns) + 1, -1, np.int64)
    tasks = [part.tasks + offset for part, offset in zip(parts, cast.first.tolist(), strict=False)]
    spans = np.concatenate([np.empty(0, np.int64), *tasks])
    place[spans] = first + np.arange(len(spans))
    later = done.awaited[spans]
    awaited = np.concatenate([np.full(first, -1), np.where(later == spans, -1, place[later])])
    path = place[_path(done, int(np.argmax(done.schedule.end_ns))).task]
    return Across(awaited.astype(np.int32), path[path >= 0])


class _Path(NamedTuple):
    """Tasks of a critical path, first to last, and what it spends in each."""

    task: IntArray
    spent_ns: FloatArray


def _path(done: JointSchedule, last: int) -> _Path:
    """Back from a task, cause by cause; where a task waited for another rank, on with that one's."""
    cause, awaited = done.schedule.cause, done.awaited
    start, end = done.schedule.start_ns, done.schedule.end_ns
    tasks: list[int] = []
    spent: list[float] = []
    while last >= 0:
        over = end[last]
        if awaited[last] >= 0:
            last = int(awaited[last])
        tasks.append(last)
        spent.append(float(over - start[last]))
        last = int(cause[last])
    return _Path(np.array(tasks[::-1], np.int64), np.array(spent[::-1], np.float64))


def _of_actor(
    cast: Cast, meetings: Meetings, done: JointSchedule, place: int, critical: BoolArray
) -> Scheduled:
    actor = cast.actors[place]
    mine = slice(int(cast.first[place]), int(cast.first[place + 1]))
    start, end, wait = done.schedule.start_ns[mine], done.schedule.end_ns[mine], done.wait_ns[mine]
    cause = done.schedule.cause[mine]
    schedule = Schedule(
        start, end, np.where(cause >= 0, cause - mine.start, -1), done.schedule.by_resource[mine]
    )
    waits = meetings.ended_by[mine] >= 0
    takes = np.where(waits, end - start - wait, meetings.duration_ns[mine])
    tasks = replace(actor.program.tasks, duration_ns=takes, stream=cast.stream[mine])
    program = replace(actor.program, tasks=tasks)
    working = replace(schedule, start_ns=start + wait)
    chosen, spans = spans_of(
        program, actor.graph, schedule, actor.rank, critical=critical[mine], wait_ns=wait
    )
    busy = busy_ns(program, working)
    waited = _exposed_wait_ns(program, working, wait, meetings.is_message[mine])
    last = mine.start + int(np.argmax(end)) if len(end) else -1
    result = ClassResult(
        rank_class=actor.rank_class,
        name=actor.graph.name,
        num_ranks=actor.count,
        rank=actor.rank,
        finish_ns=schedule.finish_ns,
        exposed_comm_ns=exposed_ns(program, working),
        busy_ns=dict(zip(STREAMS, busy.tolist(), strict=True)),
        wait_ns=dict(zip(WAITS, waited.tolist(), strict=True)),
        critical_path=_summary(cast, done, _path(done, last)),
    )
    return Scheduled(
        result=result, busy_ns=busy, wait_ns=waited, spans=spans, tasks=chosen, path=np.empty(0, np.int64)
    )


def _exposed_wait_ns(
    program: Program, working: Schedule, wait_ns: FloatArray, is_message: BoolArray
) -> FloatArray:
    """Time in which communication waits and nothing of the rank computes, copies or communicates, by cause;
    what waits in both counts for collectives.
    """
    waits = wait_ns > 0
    if not waits.any():
        return np.zeros(len(WAITS))
    kinds = kinds_of(program.tasks.stream)
    works = np.isin(kinds, (COMPUTE, COPY, COMMUNICATION)) & (working.end_ns > working.start_ns)
    from_ns, to_ns = united(working.start_ns[works], working.end_ns[works])
    found = [
        _outside(working.start_ns[chosen] - wait_ns[chosen], working.start_ns[chosen], (from_ns, to_ns))
        for chosen in (waits & ~is_message, waits)
    ]
    return np.array([found[0], found[1] - found[0]])


def _outside(start_ns: FloatArray, end_ns: FloatArray, busy: tuple[FloatArray, FloatArray]) -> float:
    """How much of the time of some intervals lies outside of others, which are disjoint and sorted."""
    begin, until = united(start_ns, end_ns)
    inside = covered(*busy, until) - covered(*busy, begin)
    return float(np.maximum(until - begin - inside, 0.0).sum())


def _summary(cast: Cast, done: JointSchedule, path: _Path) -> CriticalPath:
    spent = np.zeros((_CLASSES, len(STREAMS)))
    kinds = kinds_of(cast.stream[path.task])
    owner = cast.owner[path.task]
    for place, rows in _by_owner(owner):
        op_class = cast.actors[place].program.op_class[path.task[rows] - cast.first[place]]
        kind = np.where(kinds[rows] == FREE, COMMUNICATION, kinds[rows])
        np.add.at(spent, (op_class, kind), path.spent_ns[rows])
    shown = path.task[cast.stream[path.task] != FREE]
    return critical_path(spent, done.schedule.by_resource[shown])


def _by_owner(owner: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Iterator[tuple[int, IntArray]]:
    for place in np.unique(owner).tolist():
        yield place, np.flatnonzero(owner == place)
