"""Joint schedule of the programs of several ranks: a communication event ends for all of its members at once.

Each rank runs as in :mod:`hespas.simulator.schedule`. A task that a communication event ends occupies its
stream from its start until the last arrival is over. A task without a stream starts when it is ready. Ranks
start at the same time, or with the offsets of their recordings. A deadlock raises an error that names the
waiting nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import NamedTuple

import numpy as np

from hespas.graph import Diagnostics, NodeKind, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import CheckFailedError, FormatError
from hespas.simulator.event_loop import ConstantPace, ContentionPace, EventLoop, PendingEvents
from hespas.simulator.job.matching import CommunicationEvents, Differing, Protocol, match_communication
from hespas.simulator.job.programs import (
    CommunicationOrder,
    JobTasks,
    RankProgram,
    communication_of,
    join_tasks,
)
from hespas.simulator.schedule import (
    Priority,
    Schedule,
    Tasks,
    causes_of,
    communication_pairs,
    issue_order,
    list_schedule,
    node_label,
    ranks_of,
)
from hespas.simulator.streams import FREE, POSTED
from hespas.simulator.symmetry import BehaviourClasses, Relations

__all__ = [
    "JointResult",
    "JointSchedule",
    "JointSimulator",
    "check_finished",
    "joint_schedule",
    "recorded_starts",
]


@dataclass(frozen=True, slots=True, eq=False)
class JointSchedule:
    """Start and end of each task of all simulated ranks.

    ``wait_ns`` is the time that a task waited for other ranks after its start. ``awaited`` is the task that
    arrived last at the same communication event. It is the task itself if it arrived last, and -1 for tasks
    without an event.
    """

    schedule: Schedule
    wait_ns: FloatArray
    awaited: IntArray

    @property
    def is_deadlocked(self) -> BoolArray:
        """Return a mask of the tasks that never end."""
        return np.isnan(self.schedule.end_ns)


def joint_schedule(
    job: JobTasks,
    events: CommunicationEvents,
    rank: IntArray | None,
    queued: RaggedArray,
    begin_ns: FloatArray | None = None,
) -> JointSchedule:
    """Return the schedule of all simulated ranks.

    ``rank`` is the priority of each task among ready tasks of its rank (None: program order). ``queued`` are
    dependencies as in :func:`hespas.simulator.schedule.list_schedule`. ``begin_ns`` is the start of each
    rank.

    Times of tasks that never start or end are NaN. Raises ``FormatError`` if times overflow. O((tasks +
    dependencies + arrivals) log tasks).
    """
    width = int(job.stream.max(initial=0)) + 1
    stream = np.where(job.stream >= 0, job.owner.astype(np.int64) * width + job.stream, job.stream)
    pace: ConstantPace = ConstantPace()
    progress = None
    if job.pressure is not None and job.pressure.matters:
        met = np.where(events.is_message, -1, events.ended_by)
        owner = job.owner.astype(np.int64)
        progress = pace = ContentionPace.of(job.pressure, events.duration_ns, job.stream, owner, met)
    waiting = np.flatnonzero(events.ended_by >= 0)
    pending = PendingEvents(
        left=np.bincount(events.arrivals.values, minlength=events.count).tolist(),
        over_ns=[0.0] * events.count,
        ends=RaggedArray.from_pairs(events.ended_by[waiting], waiting, events.count).to_lists(),
        first=events.arrivals.offsets.tolist(),
        at=events.arrivals.values.tolist(),
        lags=events.lag_ns.tolist(),
    )
    loop = EventLoop(queued, stream, events.duration_ns, rank, pace, ended_by=events.ended_by, events=pending)
    start_ns, end_ns, ran = loop.run(None if begin_ns is None else begin_ns[job.owner])
    if np.isnan(end_ns).any() and sum(events.duration_ns.tolist()) == inf:
        raise FormatError(
            f"{job.sim_ranks[0].graph.name}: the sum of operation times overflows",
            position=f"operation {int(np.argmax(job.duration_ns))} of the schedule",
            hint="check that the times are in nanoseconds",
        )
    tasks = Tasks("job", events.duration_ns, stream.astype(np.int32), job.deps)
    cause, by_resource = causes_of(tasks, start_ns, end_ns, ran)
    waits = events.ended_by >= 0
    wait_ns = np.where(waits, end_ns - start_ns - events.duration_ns, 0.0)
    added_ns = np.zeros(len(start_ns))
    if progress is not None:
        ended, moved = progress.columns()
        wait_ns = np.where(waits & ~np.isnan(ended), moved - start_ns, wait_ns)
        begun = np.where(waits, moved, start_ns)
        added_ns = np.where(np.isnan(ended), 0.0, np.maximum(ended - (begun + events.duration_ns), 0.0))
    schedule = Schedule(start_ns, end_ns, cause, by_resource, added_ns)
    # Each task awaits the task that arrived last at the event that ends it: itself if it is one of the last.
    task, event = events.arrivals.row_ids, events.arrivals.values
    over_ns = start_ns[task] + events.lag_ns
    order = np.lexsort((-task, over_ns, event))
    last_ns = np.full(events.count, nan)
    who = np.full(events.count, -1, np.int64)
    last_ns[event[order]], who[event[order]] = over_ns[order], task[order]
    awaited = np.where(events.ended_by >= 0, np.append(who, -1)[events.ended_by], -1)
    own = (events.ended_by[task] == event) & (over_ns == last_ns[event])
    awaited[task[own]] = task[own]
    return JointSchedule(schedule, np.maximum(wait_ns, 0.0), awaited)


def recorded_starts(job: JobTasks, events: CommunicationEvents, priority: Priority) -> FloatArray:
    """Return the offset of the start of each simulated rank from the first one [ns], shape ``(ranks,)``.

    Recorded times include waits for other ranks, so a rank that is simulated alone repeats its recording from
    its own start. The offsets are chosen such that the members of a collective end it at the same time. The
    offset of a rank is the median over the collectives that it shares with earlier ranks, and 0 without
    shared collectives. O(tasks log tasks).
    """
    starts = np.zeros(len(job.sim_ranks))
    ended = np.full(events.count, np.nan)
    for position, sim_rank in enumerate(job.sim_ranks):
        mine: IntArray = np.arange(job.first[position], job.first[position + 1], dtype=np.int64)
        mine = mine[(events.ended_by[mine] >= 0) & ~events.is_message[mine]]
        end_ns = list_schedule(sim_rank.program.tasks, priority).end_ns[mine - job.first[position]]
        met = events.ended_by[mine]
        apart = ended[met] - end_ns
        is_known = ~np.isnan(apart)
        if is_known.any():
            starts[position] = np.median(apart[is_known])
        fresh = np.isnan(ended[met])
        ended[met[fresh]] = end_ns[fresh] + starts[position]
    earliest: FloatArray = starts - starts.min(initial=np.inf)
    return earliest


_CODE = "simulate.deadlock"

_MOST_LISTED = 20

_DEADLOCK_HINT = (
    "run hespas-validate check to list the violated rules (ranks must reach their common communication in "
    "one order), or simulate ranks without waits: `alone`"
)


def check_finished(
    job: JobTasks, events: CommunicationEvents, done: JointSchedule, diagnostics: Diagnostics
) -> None:
    """Raise an error if some tasks never end: ``CheckFailedError`` if ranks deadlock, ``FormatError`` if
    nodes of one rank form a cycle.

    Diagnostics list the waiting nodes and the ranks for which they wait.
    """
    deadlocked = done.is_deadlocked
    if not deadlocked.any():
        return
    waiting = np.flatnonzero(deadlocked & ~np.isnan(done.schedule.start_ns)).tolist()
    if not waiting:
        task = int(np.flatnonzero(deadlocked)[0])
        raise FormatError(
            f"{job.rank_of(task).graph.name or 'the graph'}: dependencies form a cycle, so that some "
            "operations never start",
            position=f"operation {job.local(task)} of the schedule",
            hint="run hespas-validate check to see the cycle",
        )
    arrivals = events.arrivals.transpose(events.count)
    texts = [
        _describe_wait(job, events, done, task, arrivals.row(int(events.ended_by[task]))) for task in waiting
    ]
    for task, text in zip(waiting[:_MOST_LISTED], texts, strict=False):
        sim_rank = job.rank_of(task)
        diagnostics.add(_CODE, Severity.ERROR, f"rank {sim_rank.rank}", f"ET021: {text}", rank=sim_rank.rank)
    owners: list[int] = np.unique(job.owner[deadlocked]).tolist()
    ranks = sum(job.sim_ranks[position].count for position in owners)
    total = sum(sim_rank.count for sim_rank in job.sim_ranks)
    first = job.rank_of(waiting[0])
    node = int(first.program.node[job.local(waiting[0])])
    node_id = int(first.graph.id[node]) if node >= 0 else -1
    raise CheckFailedError(
        f"{ranks:,} of {total:,} ranks never finish; {texts[0]}",
        code="ET021",
        position=f"rank {first.rank}, node {node_id}",
        hint=_DEADLOCK_HINT,
    )


def _describe_wait(
    job: JobTasks,
    events: CommunicationEvents,
    done: JointSchedule,
    task: int,
    members: SmallIntArray,
) -> str:
    """Return a text that names the member for which a task waits, and the task in which that member itself
    waits.
    """
    missing = members[np.isnan(done.schedule.start_ns[members])]
    late = int(missing[0])
    sim_rank = job.rank_of(late)
    began = ~np.isnan(done.schedule.start_ns) & np.isnan(done.schedule.end_ns) & (events.ended_by >= 0)
    theirs = np.flatnonzero(began & (job.owner == job.owner[late]))
    instead = f"which never reaches {_name(job, late)}"
    if len(theirs):
        instead = f"which waits in {_name(job, int(theirs[0]))} before {_name(job, late)}"
    return f"rank {job.rank_of(task).rank}: {_name(job, task)} waits for rank {sim_rank.rank}, {instead}"


def _name(job: JobTasks, task: int) -> str:
    sim_rank = job.rank_of(task)
    return node_label(sim_rank.graph, int(sim_rank.program.node[job.local(task)]))


class JointResult(NamedTuple):
    """Result of a joint simulation: the simulated ranks, their communication events and their schedule."""

    job: JobTasks
    events: CommunicationEvents
    done: JointSchedule


@dataclass(frozen=True, slots=True)
class JointSimulator:
    """Joint simulation of the ranks of a job, with the rules by which their communication is matched.

    ``are_different`` is True if ranks run different programs or run at different speeds; their communication
    must then follow one order. ``common_ns`` has the durations of the nodes if all ranks run one program
    (None: several programs).
    """

    relations: Relations
    behaviours: BehaviourClasses
    priority: Priority
    protocol: Protocol
    differing: Differing
    are_different: bool
    common_ns: FloatArray | None

    def matched(
        self, sim_ranks: Sequence[RankProgram], diagnostics: Diagnostics
    ) -> tuple[JobTasks, CommunicationEvents]:
        """Return the tasks and the communication events of simulated ranks. Raises the errors of
        :func:`hespas.simulator.job.matching.match_communication`.
        """
        by_program: dict[int, CommunicationOrder] = {}
        communications: list[CommunicationOrder] = []
        for sim_rank in sim_ranks:
            key = id(sim_rank.program.node)  # programs that differ only in times share this column
            if key not in by_program:
                by_program[key] = communication_of(sim_rank.graph, sim_rank.program, self.relations)
            communications.append(by_program[key])
        job = join_tasks(tuple(sim_ranks))
        events = match_communication(
            job,
            communications,
            self.relations,
            self.behaviours,
            protocol=self.protocol,
            differing=self.differing,
            diagnostics=diagnostics,
        )
        posted = (events.ended_by >= 0) & (job.stream == FREE)
        for position, sim_rank in enumerate(job.sim_ranks):
            mine = slice(int(job.first[position]), int(job.first[position + 1]))
            only = (sim_rank.graph.kind == int(NodeKind.RECV)) & (sim_rank.graph.stream < 0)
            posted[mine] |= events.is_message[mine] & np.append(only, False)[sim_rank.program.node]
        return replace(job, stream=np.where(posted, POSTED, job.stream).astype(np.int32)), events

    def run(
        self, sim_ranks: Sequence[RankProgram], diagnostics: Diagnostics, *, as_recorded: bool = False
    ) -> JointResult:
        """Simulate ranks jointly. With ``as_recorded``, ranks start with the offsets of their recordings.
        Raises ``CheckFailedError`` if they deadlock.
        """
        job, events = self.matched(sim_ranks, diagnostics)
        common = self._common_order(sim_ranks[0])
        issued: dict[int, IntArray] = {}
        after: list[IntArray] = [job.deps.row_ids]
        before: list[IntArray] = [job.deps.values.astype(np.int64)]
        for position, sim_rank in enumerate(job.sim_ranks if self.are_different else ()):
            deps = sim_rank.program.tasks.deps  # shared by ranks that run the same graph
            if id(deps) not in issued:
                issued[id(deps)] = issue_order(deps) if common is None else common
            first, end = int(job.first[position]), int(job.first[position + 1])
            pairs = communication_pairs(job.stream[first:end], issued[id(deps)])
            after.append(pairs[0] + first)
            before.append(pairs[1] + first)
        begin_ns = None
        if as_recorded:
            begin_ns = recorded_starts(job, events, self.priority)
            diagnostics.info(
                "simulate.recorded-starts",
                job.sim_ranks[0].graph.name,
                f"ranks start up to {begin_ns.max() / 1e6:,.3f} ms apart, to end collectives together",
                count=int((begin_ns > 0).sum()),
            )
        positions: list[IntArray] = []  # priority of each task among ready tasks of its rank
        if self.priority != "program":
            for sim_rank, offset in zip(job.sim_ranks, job.first.tolist(), strict=False):
                local = ranks_of(sim_rank.program.tasks, self.priority)
                assert local is not None
                positions.append(local + offset)
        done = joint_schedule(
            job,
            events,
            np.concatenate(positions) if positions else None,
            RaggedArray.from_pairs(np.concatenate(after), np.concatenate(before), len(job.deps)),
            begin_ns,
        )
        check_finished(job, events, done, diagnostics)
        return JointResult(job, events, done)

    def _common_order(self, sim_rank: RankProgram) -> IntArray | None:
        """Return the order in which the tasks of the program start if all ranks run it at the same speed;
        None if ranks run different programs.
        """
        if self.common_ns is None:
            return None
        program = sim_rank.program
        node_ns = np.append(self.common_ns, np.nan)[program.node]
        takes_ns = np.where(program.node >= 0, node_ns, program.tasks.duration_ns)
        tasks = replace(program.tasks, duration_ns=np.where(program.tasks.stream == FREE, 0.0, takes_ns))
        start_ns = list_schedule(tasks, self.priority).start_ns[issued := issue_order(tasks.deps)]
        common: IntArray = issued[np.argsort(start_ns, kind="stable")]
        return common
