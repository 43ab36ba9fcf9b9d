"""Programs of the simulated ranks with consecutive task numbers, and their communication in order of
issue.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.simulator.interference import Pressure
from hespas.simulator.schedule import TaskProgram, issue_order
from hespas.simulator.symmetry import RECEIVES, SENDS, Relations, group_rows, permutation_rows

__all__ = ["CommunicationOrder", "JobTasks", "RankProgram", "communication_of", "join_tasks", "occurrences"]


@dataclass(frozen=True, slots=True, eq=False)
class RankProgram:
    """One simulated rank, which represents the ``count`` ranks that behave like it. ``program`` has the tasks
    of its ``graph``, with loops unrolled or extrapolated.
    """

    behaviour: int
    rank: int
    count: int
    rank_class: int
    graph: OpGraph
    program: TaskProgram


@dataclass(frozen=True, slots=True, eq=False)
class JobTasks:
    """Tasks of all simulated ranks with consecutive numbers: rank ``i`` has the tasks ``first[i]:first[i +
    1]``.

    ``duration_ns``, ``stream`` and ``deps`` are the columns of :class:`hespas.simulator.schedule.Tasks`, over
    all ranks. ``owner`` is the simulated rank of each task.
    """

    sim_ranks: tuple[RankProgram, ...]
    first: IntArray
    duration_ns: FloatArray
    stream: SmallIntArray
    deps: RaggedArray
    owner: SmallIntArray
    pressure: Pressure | None

    def rank_of(self, task: int) -> RankProgram:
        """Return the simulated rank of a task."""
        return self.sim_ranks[int(self.owner[task])]

    def local(self, task: int) -> int:
        """Return the number of a task within the program of its rank."""
        return task - int(self.first[int(self.owner[task])])


def join_tasks(sim_ranks: tuple[RankProgram, ...]) -> JobTasks:
    """Return the concatenated tasks of all simulated ranks; streams keep their codes. O(tasks)."""
    sizes = [len(sim_rank.program.tasks) for sim_rank in sim_ranks]
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    parts = [sim_rank.program.tasks for sim_rank in sim_ranks]
    lengths = [part.deps.lengths for part in parts]
    values = [part.deps.values + offset for part, offset in zip(parts, first.tolist(), strict=False)]
    nothing = np.empty(0, np.int64)
    pressed = any(part.pressure is not None for part in parts)
    pressures = [Pressure.none(len(part)) if part.pressure is None else part.pressure for part in parts]
    return JobTasks(
        sim_ranks=sim_ranks,
        first=first,
        duration_ns=np.concatenate([np.empty(0), *(part.duration_ns for part in parts)]),
        stream=np.concatenate([np.empty(0, np.int32), *(part.stream for part in parts)]),
        deps=RaggedArray.from_lengths(
            np.concatenate([nothing, *lengths]), np.concatenate([nothing, *values])
        ),
        owner=np.repeat(np.arange(len(sim_ranks), dtype=np.int32), sizes),
        pressure=Pressure.joined(pressures) if pressed else None,
    )


@dataclass(frozen=True, slots=True, eq=False)
class CommunicationOrder:
    """Communication tasks of one program in order of issue: ``calls`` are collectives, ``messages`` are
    sends, receives and permutes.

    ``call_position`` and ``message_position`` are positions in that order. ``call_row`` and ``message_row``
    are rows in the graph's tables of collectives and messages. ``call_set`` is the number of the group set of
    a call, and ``states_group`` is True if the program states the group. ``permutation`` is the number of the
    permutation of a message. ``sends`` and ``receives`` are True if the task sends, and if it receives.
    """

    calls: IntArray
    call_position: IntArray
    call_row: IntArray
    call_set: IntArray
    states_group: BoolArray
    messages: IntArray
    message_position: IntArray
    message_row: IntArray
    permutation: IntArray
    tag: IntArray
    sends: BoolArray
    receives: BoolArray


def communication_of(graph: OpGraph, program: TaskProgram, relations: Relations) -> CommunicationOrder:
    """Return the communication tasks of a program of ``graph`` in order of issue. O(tasks)."""
    order = issue_order(program.tasks.deps)
    node = program.node[order]
    call_row = _rows(graph.collectives.node, len(graph))[node]
    calls = np.flatnonzero(call_row >= 0)
    message_row = _rows(graph.p2p.node, len(graph))[node]
    permutation = np.append(permutation_rows(graph, relations.permutations), -1)[message_row]
    messages = np.flatnonzero(permutation >= 0)
    kinds = graph.kind[node[messages]]
    return CommunicationOrder(
        calls=order[calls],
        call_position=calls,
        call_row=call_row[calls],
        call_set=group_rows(graph, relations.sets)[call_row[calls]],
        states_group=graph.collectives.group_set[call_row[calls]] >= 0,
        messages=order[messages],
        message_position=messages,
        message_row=message_row[messages],
        permutation=permutation[messages],
        tag=graph.p2p.tag[message_row[messages]],
        sends=np.isin(kinds, SENDS),
        receives=np.isin(kinds, RECEIVES),
    )


def _rows(nodes: IntArray | np.ndarray[tuple[int], np.dtype[np.int32]], count: int) -> IntArray:
    """Return a table that maps each node to its index in ``nodes`` (-1: not in it). The last entry is for
    tasks without a node.
    """
    rows = np.full(count + 1, -1, np.int64)
    rows[nodes] = np.arange(len(nodes))
    return rows


def occurrences(column: IntArray) -> IntArray:
    """Return for each entry the number of equal values before it in the column. O(n log n)."""
    order = np.argsort(column, kind="stable")
    grouped = column[order]
    starts = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1])[: len(grouped)])
    number = np.empty(len(column), np.int64)
    number[order] = np.arange(len(grouped)) - np.repeat(starts, np.diff(np.append(starts, len(grouped))))
    return number
