"""Why some ranks never finish: which node of which rank waits for whom."""

from __future__ import annotations

import numpy as np

from hespas.graph import Diagnostics
from hespas.graph.columns import SmallIntArray
from hespas.graph.diagnostics import Severity
from hespas.graph.errors import CheckFailedError, FormatError
from hespas.simulator.job.actors import Cast
from hespas.simulator.job.events import JointSchedule
from hespas.simulator.job.meetings import Meetings
from hespas.simulator.schedule import node_label

__all__ = ["check_finished"]

_CODE = "simulate.deadlock"
_MOST_TOLD = 20
_HINT = (
    "ranks have to come to what they do together in one order; hespas-validate check lists the rules that "
    "are broken, with `alone` no rank waits"
)


def check_finished(cast: Cast, meetings: Meetings, done: JointSchedule, diagnostics: Diagnostics) -> None:
    """Raise ``CheckFailedError`` where ranks wait for each other for ever, ``FormatError`` where nodes of one
    rank do; findings say who waits in which node for whom.
    """
    stuck = done.is_stuck
    if not stuck.any():
        return
    waiting = np.flatnonzero(stuck & ~np.isnan(done.schedule.start_ns)).tolist()
    if not waiting:
        task = int(np.flatnonzero(stuck)[0])
        raise FormatError(
            f"{cast.actor_of(task).graph.name or 'the graph'}: dependencies form a cycle, so that some "
            "operations never start",
            position=f"operation {cast.local(task)} of the schedule",
            hint="hespas-validate check shows the cycle",
        )
    arrivals = meetings.arrivals.transpose(meetings.count)
    told = [_told(cast, meetings, done, task, arrivals.row(int(meetings.ended_by[task]))) for task in waiting]
    for task, text in zip(waiting[:_MOST_TOLD], told, strict=False):
        actor = cast.actor_of(task)
        diagnostics.add(_CODE, Severity.ERROR, f"rank {actor.rank}", f"ET021: {text}", rank=actor.rank)
    places: list[int] = np.unique(cast.owner[stuck]).tolist()
    ranks = sum(cast.actors[place].count for place in places)
    total = sum(actor.count for actor in cast.actors)
    first = cast.actor_of(waiting[0])
    raise CheckFailedError(
        f"{ranks:,} of {total:,} ranks never finish; {told[0]}",
        code="ET021",
        position=f"rank {first.rank}, node {_node(cast, waiting[0])}",
        hint=_HINT,
    )


def _told(
    cast: Cast,
    meetings: Meetings,
    done: JointSchedule,
    task: int,
    members: SmallIntArray,
) -> str:
    """What a task waits for: the member that never comes, and what that one does instead."""
    missing = members[np.isnan(done.schedule.start_ns[members])]
    late = int(missing[0])
    actor = cast.actor_of(late)
    began = ~np.isnan(done.schedule.start_ns) & np.isnan(done.schedule.end_ns) & (meetings.ended_by >= 0)
    theirs = np.flatnonzero(began & (cast.owner == cast.owner[late]))
    instead = f"which never comes to {_name(cast, late)}"
    if len(theirs):
        instead = f"which waits in {_name(cast, int(theirs[0]))} before {_name(cast, late)}"
    return f"rank {cast.actor_of(task).rank}: {_name(cast, task)} waits for rank {actor.rank}, {instead}"


def _node(cast: Cast, task: int) -> int:
    actor = cast.actor_of(task)
    node = int(actor.program.node[cast.local(task)])
    return int(actor.graph.id[node]) if node >= 0 else -1


def _name(cast: Cast, task: int) -> str:
    actor = cast.actor_of(task)
    return node_label(actor.graph, int(actor.program.node[cast.local(task)]))
