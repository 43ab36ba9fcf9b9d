"""What a joint schedule adds up to: for each actor its spans and figures, across actors the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hespas.graph import WAITS, OpClass
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.timeline import united
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.events import JointSchedule
from hespas.simulator.job.meetings import Meetings
from hespas.simulator.list_scheduler import TripsRun
from hespas.simulator.results import Across, Scheduled, critical_path, spans_of
from hespas.simulator.schedule import (
    ClassResult,
    Program,
    Schedule,
    busy_ns,
    covered,
    exposed_ns,
    interference_ns,
)
from hespas.simulator.streams import COMMUNICATION, COMPUTE, COPY, FREE, STREAMS, kinds_of

__all__ = ["across", "run_of", "scheduled"]

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


class _Mine(NamedTuple):
    """What one actor did: its program with the time that tasks worked, when they ran, and from when on they
    worked.
    """

    program: Program
    schedule: Schedule
    working: Schedule
    wait_ns: FloatArray
    is_message: BoolArray
    last: int


def _mine(cast: Cast, meetings: Meetings, done: JointSchedule, place: int) -> _Mine:
    actor = cast.actors[place]
    rows = slice(int(cast.first[place]), int(cast.first[place + 1]))
    start, end, wait = done.schedule.start_ns[rows], done.schedule.end_ns[rows], done.wait_ns[rows]
    cause = done.schedule.cause[rows]
    schedule = Schedule(
        start,
        end,
        np.where(cause >= 0, cause - rows.start, -1),
        done.schedule.by_resource[rows],
        done.schedule.added_ns[rows],
    )
    waits = meetings.ended_by[rows] >= 0
    # without what was added: the schedule has that
    takes = np.where(waits, end - start - wait - schedule.added_ns, meetings.duration_ns[rows])
    tasks = replace(actor.program.tasks, duration_ns=takes, stream=cast.stream[rows])
    return _Mine(
        replace(actor.program, tasks=tasks),
        schedule,
        replace(schedule, start_ns=start + wait),
        wait,
        meetings.is_message[rows],
        rows.start + int(np.argmax(end)) if len(end) else -1,
    )


def _of_actor(
    cast: Cast, meetings: Meetings, done: JointSchedule, place: int, critical: BoolArray
) -> Scheduled:
    actor, mine = cast.actors[place], _mine(cast, meetings, done, place)
    marked = critical[cast.first[place] : cast.first[place + 1]]
    chosen, spans = spans_of(
        mine.program, actor.graph, mine.schedule, actor.rank, critical=marked, wait_ns=mine.wait_ns
    )
    busy, waited = busy_ns(mine.program, mine.working), _exposed_wait_ns(mine)
    path = _path(done, mine.last)
    shown = path.task[cast.stream[path.task] != FREE]
    result = ClassResult(
        rank_class=actor.rank_class,
        name=actor.graph.name,
        num_ranks=actor.count,
        rank=actor.rank,
        finish_ns=mine.schedule.finish_ns,
        exposed_comm_ns=exposed_ns(mine.program, mine.working),
        busy_ns=dict(zip(STREAMS, busy.tolist(), strict=True)),
        wait_ns=dict(zip(WAITS, waited.tolist(), strict=True)),
        critical_path=critical_path(_spent_ns(cast, path), done.schedule.by_resource[shown]),
        extrapolated=len(mine.program.blocks),
        interference_ns=interference_ns(mine.program, mine.schedule),
    )
    return Scheduled(
        result=result, busy_ns=busy, wait_ns=waited, spans=spans, tasks=chosen, path=np.empty(0, np.int64)
    )


def run_of(cast: Cast, meetings: Meetings, done: JointSchedule, place: int) -> TripsRun:
    """What one actor did, as trips of a loop."""
    mine = _mine(cast, meetings, done, place)
    return TripsRun(
        time_ns=mine.schedule.finish_ns,
        exposed_ns=exposed_ns(mine.program, mine.working),
        busy_ns=busy_ns(mine.program, mine.working),
        critical_ns=_spent_ns(cast, _path(done, mine.last)),
        wait_ns=_exposed_wait_ns(mine),
        added_ns=interference_ns(mine.program, mine.schedule),
    )


def _exposed_wait_ns(mine: _Mine) -> FloatArray:
    """Time in which communication waits and nothing of the rank computes, copies or communicates, by cause;
    what waits in both counts for collectives. Blocks say theirs.
    """
    program, working, wait_ns = mine.program, mine.working, mine.wait_ns
    total = np.zeros(len(WAITS))
    kinds = kinds_of(program.tasks.stream)
    for number, block in enumerate(program.blocks):
        tasks = program.tasks.stream[program.block == number]
        if len(tasks):  # a block is several tasks at once, one on each stream
            total += block.wait_ns * (len(tasks) / len(np.unique(tasks)))
    waits = wait_ns > 0
    if not waits.any():
        return total
    works = np.isin(kinds, (COMPUTE, COPY, COMMUNICATION)) & (working.end_ns > working.start_ns)
    busy = united(working.start_ns[works], working.end_ns[works])
    found = [
        _outside(working.start_ns[chosen] - wait_ns[chosen], working.start_ns[chosen], busy)
        for chosen in (waits & ~mine.is_message, waits)
    ]
    total += np.array([found[0], found[1] - found[0]])
    return total


def _outside(start_ns: FloatArray, end_ns: FloatArray, busy: tuple[FloatArray, FloatArray]) -> float:
    """How much of the time of some intervals lies outside of others, which are disjoint and sorted."""
    begin, until = united(start_ns, end_ns)
    inside = covered(*busy, until) - covered(*busy, begin)
    return float(np.maximum(until - begin - inside, 0.0).sum())


def _spent_ns(cast: Cast, path: _Path) -> FloatArray:
    """Time that a path spends by operation class and kind of stream, ``(CLASSES, STREAMS)``."""
    spent = np.zeros((_CLASSES, len(STREAMS)))
    kinds = kinds_of(cast.stream[path.task])
    kinds = np.where(kinds == FREE, COMMUNICATION, kinds)
    for place, rows in _by_owner(cast.owner[path.task]):
        program, tasks = cast.actors[place].program, path.task[rows] - cast.first[place]
        nodes = program.block[tasks] < 0
        op_class = program.op_class[tasks[nodes]]
        np.add.at(spent, (op_class, kinds[rows[nodes]]), path.spent_ns[rows[nodes]])
        blocks: list[int] = program.block[tasks[~nodes]].tolist()
        for block in blocks:
            spent += program.blocks[block].critical_ns
    return spent


def _by_owner(owner: SmallIntArray) -> Iterator[tuple[int, IntArray]]:
    for place in np.unique(owner).tolist():
        yield place, np.flatnonzero(owner == place)
