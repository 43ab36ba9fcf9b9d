"""The communication of one unrolled program, in the order in which it is issued."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import OpGraph
from hespas.graph.columns import BoolArray, IntArray
from hespas.simulator.job.relations import RECEIVES, SENDS, Relations, group_rows, permutation_rows
from hespas.simulator.schedule import Program, issue_order

__all__ = ["Talk", "occurrences", "talk_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Talk:
    """Tasks that communicate, in order of issue; ``calls`` are collectives, ``moves`` messages;
    ``call_place`` and ``move_place`` are their places in that order.

    ``call_row`` is the row of the graph's collectives, ``call_set`` the number of the group set, ``stated``
    whether the program says which. ``move_row`` is the row of the graph's messages, ``permutation`` its
    number; ``sends`` and ``receives`` say what a message does.
    """

    calls: IntArray
    call_place: IntArray
    call_row: IntArray
    call_set: IntArray
    stated: BoolArray
    moves: IntArray
    move_place: IntArray
    move_row: IntArray
    permutation: IntArray
    tag: IntArray
    sends: BoolArray
    receives: BoolArray


def talk_of(graph: OpGraph, program: Program, relations: Relations) -> Talk:
    """The communication of a program of ``graph``. O(tasks)."""
    order = issue_order(program.tasks.deps)
    node = program.node[order]
    call_row = _rows(graph.collectives.node, len(graph))[node]
    calls = np.flatnonzero(call_row >= 0)
    move_row = _rows(graph.p2p.node, len(graph))[node]
    permutation = np.append(permutation_rows(graph, relations.permutations), -1)[move_row]
    moves = np.flatnonzero(permutation >= 0)
    kinds = graph.kind[node[moves]]
    return Talk(
        calls=order[calls],
        call_place=calls,
        call_row=call_row[calls],
        call_set=group_rows(graph, relations.sets)[call_row[calls]],
        stated=graph.collectives.group_set[call_row[calls]] >= 0,
        moves=order[moves],
        move_place=moves,
        move_row=move_row[moves],
        permutation=permutation[moves],
        tag=graph.p2p.tag[move_row[moves]],
        sends=np.isin(kinds, SENDS),
        receives=np.isin(kinds, RECEIVES),
    )


def _rows(nodes: IntArray | np.ndarray[tuple[int], np.dtype[np.int32]], count: int) -> IntArray:
    """The row of each node in a table, -1 where it has none; one more entry for what is no node."""
    rows = np.full(count + 1, -1, np.int64)
    rows[nodes] = np.arange(len(nodes))
    return rows


def occurrences(column: IntArray) -> IntArray:
    """How many equal values stand before each. O(n log n)."""
    order = np.argsort(column, kind="stable")
    grouped = column[order]
    starts = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1])[: len(grouped)])
    number = np.empty(len(column), np.int64)
    number[order] = np.arange(len(grouped)) - np.repeat(starts, np.diff(np.append(starts, len(grouped))))
    return number
