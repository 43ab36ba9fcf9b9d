"""Results of a joint schedule (:mod:`hespas.simulator.job.joint_schedule`): spans and summary of each rank,
and the critical path across ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hespas.graph import WAITS, OpClass
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.timeline import Intervals, united
from hespas.simulator.job.joint_schedule import JointSchedule
from hespas.simulator.job.matching import CommunicationEvents
from hespas.simulator.job.programs import JobTasks
from hespas.simulator.loop_extrapolation import IterationTimes
from hespas.simulator.results import ClassResult, JobColumns, ScheduledRank, critical_path, spans_of
from hespas.simulator.schedule import Schedule, TaskProgram, busy_ns, exposed_ns, interference_ns
from hespas.simulator.streams import COMMUNICATION, COMPUTE, COPY, FREE, STREAMS, kinds_of

__all__ = ["iteration_times", "job_columns", "schedules_of"]


_CLASSES = max(OpClass) + 1


def schedules_of(job: JobTasks, events: CommunicationEvents, done: JointSchedule) -> list[ScheduledRank]:
    """Return the schedule of each simulated rank; spans on the critical path of the whole job are marked.
    O(tasks log tasks).
    """
    critical = np.zeros(len(job.duration_ns), np.bool_)
    if len(critical):
        critical[_path(done, int(np.argmax(done.schedule.end_ns))).task] = True
    return [
        _schedule_of_rank(job, events, done, position, critical) for position in range(len(job.sim_ranks))
    ]


def job_columns(job: JobTasks, done: JointSchedule, parts: Sequence[ScheduledRank], first: int) -> JobColumns:
    """Return the timeline columns that refer to other ranks. ``parts`` are the schedules of the simulated
    ranks. ``first`` is the index of their first span in the timeline of the job.
    """
    span_of = np.full(len(job.duration_ns) + 1, -1, np.int64)
    tasks = [part.tasks + offset for part, offset in zip(parts, job.first.tolist(), strict=False)]
    spans = np.concatenate([np.empty(0, np.int64), *tasks])
    span_of[spans] = first + np.arange(len(spans))
    later = done.awaited[spans]
    awaited = np.concatenate([np.full(first, -1), np.where(later == spans, -1, span_of[later])])
    path = span_of[_path(done, int(np.argmax(done.schedule.end_ns))).task]
    return JobColumns(awaited.astype(np.int32), path[path >= 0])


class _TaskPath(NamedTuple):
    """Critical path through the tasks of a job: the tasks, first to last, and the time on the path spent in
    each of them.
    """

    task: IntArray
    spent_ns: FloatArray


def _path(done: JointSchedule, last: int) -> _TaskPath:
    """Return the critical path that ends with the task ``last``, walked backwards from cause to cause. After
    a wait for another rank the path continues on that rank.
    """
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
    return _TaskPath(np.array(tasks[::-1], np.int64), np.array(spent[::-1], np.float64))


class _RankSchedule(NamedTuple):
    """Schedule of one rank: its program, and the start and end of each task. In ``working``, a task starts
    only after its wait for other ranks.
    """

    program: TaskProgram
    schedule: Schedule
    working: Schedule
    wait_ns: FloatArray
    is_message: BoolArray
    last: int


def _rank_schedule(
    job: JobTasks, events: CommunicationEvents, done: JointSchedule, position: int
) -> _RankSchedule:
    sim_rank = job.sim_ranks[position]
    rows = slice(int(job.first[position]), int(job.first[position + 1]))
    start, end, wait = done.schedule.start_ns[rows], done.schedule.end_ns[rows], done.wait_ns[rows]
    cause = done.schedule.cause[rows]
    schedule = Schedule(
        start,
        end,
        np.where(cause >= 0, cause - rows.start, -1),
        done.schedule.by_resource[rows],
        done.schedule.added_ns[rows],
    )
    waits = events.ended_by[rows] >= 0
    # the schedule has the added time
    takes = np.where(waits, end - start - wait - schedule.added_ns, events.duration_ns[rows])
    tasks = replace(sim_rank.program.tasks, duration_ns=takes, stream=job.stream[rows])
    return _RankSchedule(
        replace(sim_rank.program, tasks=tasks),
        schedule,
        replace(schedule, start_ns=start + wait),
        wait,
        events.is_message[rows],
        rows.start + int(np.argmax(end)) if len(end) else -1,
    )


def _schedule_of_rank(
    job: JobTasks, events: CommunicationEvents, done: JointSchedule, position: int, critical: BoolArray
) -> ScheduledRank:
    sim_rank, own = job.sim_ranks[position], _rank_schedule(job, events, done, position)
    marked = critical[job.first[position] : job.first[position + 1]]
    chosen, spans = spans_of(
        own.program, sim_rank.graph, own.schedule, sim_rank.rank, critical=marked, wait_ns=own.wait_ns
    )
    busy, waited = busy_ns(own.program, own.working), _exposed_wait_ns(own)
    path = _path(done, own.last)
    shown = path.task[job.stream[path.task] != FREE]
    result = ClassResult(
        rank_class=sim_rank.rank_class,
        name=sim_rank.graph.name,
        num_ranks=sim_rank.count,
        rank=sim_rank.rank,
        finish_ns=own.schedule.finish_ns,
        exposed_comm_ns=exposed_ns(own.program, own.working),
        busy_ns=dict(zip(STREAMS, busy.tolist(), strict=True)),
        wait_ns=dict(zip(WAITS, waited.tolist(), strict=True)),
        critical_path=critical_path(_spent_ns(job, path), done.schedule.by_resource[shown]),
        extrapolated=len(own.program.blocks),
        interference_ns=interference_ns(own.program, own.schedule),
    )
    return ScheduledRank(
        result=result, busy_ns=busy, wait_ns=waited, spans=spans, tasks=chosen, path=np.empty(0, np.int64)
    )


def iteration_times(
    job: JobTasks, events: CommunicationEvents, done: JointSchedule, position: int
) -> IterationTimes:
    """Return the times of one simulated rank in a loop, for the extrapolation of its iterations."""
    own = _rank_schedule(job, events, done, position)
    return IterationTimes(
        time_ns=own.schedule.finish_ns,
        exposed_ns=exposed_ns(own.program, own.working),
        busy_ns=busy_ns(own.program, own.working),
        critical_ns=_spent_ns(job, _path(done, own.last)),
        wait_ns=_exposed_wait_ns(own),
        added_ns=interference_ns(own.program, own.schedule),
    )


def _exposed_wait_ns(own: _RankSchedule) -> FloatArray:
    """Return the time in which communication waits for other ranks while the rank does nothing else, by
    cause.

    Overlapping waits of both causes count as waits in collectives. Waits in loop iterations that were not
    simulated are included.
    """
    program, working, wait_ns = own.program, own.working, own.wait_ns
    total = np.zeros(len(WAITS))
    kinds = kinds_of(program.tasks.stream)
    for number, block in enumerate(program.blocks):
        tasks = program.tasks.stream[program.block == number]
        if len(tasks):  # a block has one task per stream
            total += block.wait_ns * (len(tasks) / len(np.unique(tasks)))
    waits = wait_ns > 0
    if not waits.any():
        return total
    works = np.isin(kinds, (COMPUTE, COPY, COMMUNICATION)) & (working.end_ns > working.start_ns)
    busy = Intervals(*united(working.start_ns[works], working.end_ns[works]))
    outside_ns: list[float] = []
    for chosen in (waits & ~own.is_message, waits):
        begin, until = united(working.start_ns[chosen] - wait_ns[chosen], working.start_ns[chosen])
        inside = busy.elapsed_ns(until) - busy.elapsed_ns(begin)
        outside_ns.append(float(np.maximum(until - begin - inside, 0.0).sum()))
    total += np.array([outside_ns[0], outside_ns[1] - outside_ns[0]])
    return total


def _spent_ns(job: JobTasks, path: _TaskPath) -> FloatArray:
    """Return the time that a path spends in each operation class and kind of stream, shape ``(CLASSES,
    STREAMS)``.
    """
    spent = np.zeros((_CLASSES, len(STREAMS)))
    kinds = kinds_of(job.stream[path.task])
    kinds = np.where(kinds == FREE, COMMUNICATION, kinds)
    owner = job.owner[path.task]
    positions: list[int] = np.unique(owner).tolist()
    for position in positions:
        rows = np.flatnonzero(owner == position)
        program, tasks = job.sim_ranks[position].program, path.task[rows] - job.first[position]
        nodes = program.block[tasks] < 0
        op_class = program.op_class[tasks[nodes]]
        np.add.at(spent, (op_class, kinds[rows[nodes]]), path.spent_ns[rows[nodes]])
        blocks: list[int] = program.block[tasks[~nodes]].tolist()
        for block in blocks:
            spent += program.blocks[block].critical_ns
    return spent
