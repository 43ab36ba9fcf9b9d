"""Communication relations of the ranks of a job: groups of collectives, peers of messages, and idle
communication.

All ranks of a class run one program. A collective whose group set has no group for a rank, a message without
a peer, and a permute from and to no rank or from and to the rank itself are skipped on that rank, as they are
in traces; they take no time there.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np

from hespas.files.limits import refuse_comparison
from hespas.graph import ABSENT, GroupSet, NodeKind, OpGraph, Permutation, StridedGroups, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.groups import membership_of, peers_of
from hespas.graph.passes import with_durations

__all__ = [
    "NONE",
    "RECEIVES",
    "SENDS",
    "IdleParts",
    "Relations",
    "group_rows",
    "has_idle_parts",
    "idle_parts",
    "permutation_rows",
    "relations_of",
]


_Key = TypeVar("_Key", bound=Hashable)

NONE = -1
"""No group, or no peer."""

SENDS = (int(NodeKind.SEND), int(NodeKind.PERMUTE))

RECEIVES = (int(NodeKind.RECV), int(NodeKind.PERMUTE))


@dataclass(frozen=True, slots=True, eq=False)
class Relations:
    """Distinct group sets (the last: all ranks, if none is stated) and permutations over all ranks of a job.

    ``rank_class`` has shape ``(ranks,)``. ``group``, of shape ``(sets, ranks)``, is the group of each rank,
    numbered over all sets by its members; ``members`` is the number of listed members of each group.
    ``label``, of the same shape as ``group``, is the first set through which the rank's class calls the same
    group, or ``NONE`` if its class does not call it. ``target`` and ``source`` have shape ``(permutations,
    ranks)``. ``sends``, ``receives`` and ``permutes``, of shape ``(classes, permutations)``, are the
    operations of a class along a permutation.
    """

    rank_class: IntArray
    sets: dict[GroupSet, int]
    permutations: dict[Permutation, int]
    group: IntArray
    label: IntArray
    members: IntArray
    target: IntArray
    source: IntArray
    sends: BoolArray
    receives: BoolArray
    permutes: BoolArray

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the job, present or absent."""
        return len(self.rank_class)

    def absent_members(self) -> int:
        """Return the number of called groups with absent members."""
        used = self.group[self.label != NONE]
        here = np.zeros(len(self.members), np.int64)
        for row in self.group:
            mine = (row != NONE) & (self.rank_class != ABSENT)
            np.maximum.at(here, row[mine], np.bincount(row[mine], minlength=len(here))[row[mine]])
        return int((here < self.members)[np.unique(used)].sum())


def relations_of(workload: Workload) -> Relations:
    """Return the relations of a workload. O(ranks x (sets + permutations)). Raises ``BudgetError`` for more
    ranks than can be compared individually.
    """
    ranks = workload.num_ranks
    refuse_comparison(ranks, workload.name)
    all_ranks = StridedGroups.all_ranks(ranks)
    sets = _numbered(*workload.group_sets, all_ranks)
    permutations = _numbered(*chain.from_iterable(graph.permutations for graph in workload.classes))
    rank_class = workload.rank_class.astype(np.int64)
    uids: dict[bytes, int] = {}
    listed: list[tuple[int, ...]] = []
    group = np.full((len(sets), ranks), NONE, np.int64)
    for group_of, groups in zip(group, sets, strict=True):
        membership = membership_of(groups, ranks, uids, listed)
        inside = membership.group != NONE
        group_of[inside] = membership.uid[membership.group[inside]]
    peers = [peers_of(permutation, ranks) for permutation in permutations]
    none = np.empty((0, ranks), np.int64)
    doing = [_doing(graph, permutations) for graph in workload.classes]
    table = np.zeros((len(workload.classes), len(sets)), np.bool_)
    for index, graph in enumerate(workload.classes):
        runs = graph.executions[graph.collectives.node] != 0
        table[index, group_rows(graph, sets)[runs]] = True
    calls = table[rank_class] & (rank_class != ABSENT)[:, None]
    label = np.full(group.shape, NONE, np.int64)
    row, rank = np.nonzero((group != NONE) & calls.T)  # the first equal set is the label
    key = rank * (int(group.max(initial=0)) + 1) + group[row, rank]
    first, which = np.unique(key, return_index=True, return_inverse=True)[1:]
    label[row, rank] = row[first][which.reshape(-1)]
    return Relations(
        rank_class=rank_class,
        sets=sets,
        permutations=permutations,
        group=group,
        label=label,
        members=np.fromiter(map(len, listed), np.int64, len(listed)),
        target=np.stack([peer.target for peer in peers]) if peers else none,
        source=np.stack([peer.source for peer in peers]) if peers else none,
        sends=np.stack([operations[0] for operations in doing]),
        receives=np.stack([operations[1] for operations in doing]),
        permutes=np.stack([operations[2] for operations in doing]),
    )


def _numbered(*keys: _Key) -> dict[_Key, int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def group_rows(graph: OpGraph, sets: dict[GroupSet, int]) -> IntArray:
    """Return the number of the group set of each row of the graph's collectives."""
    numbers = [*(sets[groups] for groups in graph.group_sets), len(sets) - 1]
    return np.array(numbers, np.int64)[graph.collectives.group_set]


def permutation_rows(graph: OpGraph, permutations: dict[Permutation, int]) -> IntArray:
    """Return the number of the permutation of each row of the graph's messages; ``NONE`` if none is stated,
    and for messages over the host link.
    """
    numbers = [*(permutations[entry] for entry in graph.permutations), NONE]
    rows: IntArray = np.array(numbers, np.int64)[graph.p2p.permutation]
    return np.where(graph.p2p.host, NONE, rows)


def _doing(graph: OpGraph, permutations: dict[Permutation, int]) -> tuple[BoolArray, BoolArray, BoolArray]:
    rows, kinds = permutation_rows(graph, permutations), graph.kind[graph.p2p.node]
    counts = rows != NONE
    counts &= graph.executions[graph.p2p.node] != 0
    tables: list[BoolArray] = []
    for chosen in (SENDS, RECEIVES, (int(NodeKind.PERMUTE),)):
        table = np.zeros(len(permutations), np.bool_)
        table[rows[counts & np.isin(kinds, chosen)]] = True
        tables.append(table)
    return tables[0], tables[1], tables[2]


_SIDES = (NodeKind.SEND, NodeKind.RECV)


@dataclass(frozen=True, slots=True, eq=False)
class IdleParts:
    """Patterns of idle communication of the ranks of a job.

    ``pattern`` has shape ``(ranks,)``: the row of ``patterns``, 0 without idle communication. A row marks
    group sets without a group, permutations without a target, and permutations without a source, in that
    order.
    """

    pattern: IntArray
    patterns: BoolArray

    @property
    def any(self) -> bool:
        """Return True if some rank skips some communication of its class."""
        return len(self.patterns) > 1

    def without_idle_time(self, graph: OpGraph, relations: Relations, pattern: int) -> OpGraph:
        """Return the graph with a duration of 0 for the communication that is idle in a pattern."""
        if not pattern:
            return graph
        sets, ways = len(relations.group), len(relations.target)
        flags = np.append(self.patterns[pattern], False)  # the last entry: no permutation is stated
        rows, kinds = permutation_rows(graph, relations.permutations), graph.kind[graph.p2p.node]
        no_target = flags[np.where(rows == NONE, -1, sets + rows)]
        no_source = flags[np.where(rows == NONE, -1, sets + ways + rows)]
        idle = np.zeros(len(graph), np.bool_)
        idle[graph.collectives.node] = flags[group_rows(graph, relations.sets)]
        idle[graph.p2p.node] |= np.select(
            [kinds == NodeKind.SEND, kinds == NodeKind.RECV], [no_target, no_source], no_target & no_source
        )
        return with_durations(graph, np.where(idle, 0.0, graph.duration_ns))


def idle_parts(workload: Workload, relations: Relations) -> IdleParts:
    """Return the idle patterns of all ranks; O(ranks x (sets + permutations))."""
    rank_class, present = relations.rank_class, relations.rank_class != ABSENT
    calls = np.zeros((len(workload.classes), len(relations.group)), np.bool_)
    for index, graph in enumerate(workload.classes):
        calls[index, group_rows(graph, relations.sets)] = True
    only_sends, only_receives = (_one_sided(workload, relations, kind)[rank_class].T for kind in _SIDES)
    permutes = relations.permutes[rank_class].T
    no_target, no_source = relations.target == NONE, relations.source == NONE
    # A permute takes time where a rank has either peer; one with itself has none.
    skipped = permutes & ((no_target & no_source) | (relations.target == np.arange(relations.num_ranks)))
    slots = (
        (relations.group == NONE) & calls[rank_class].T,
        skipped | (no_target & only_sends),
        skipped | (no_source & only_receives),
    )
    idle = np.concatenate(slots).T & present[:, None]
    busy = np.zeros((1, idle.shape[1]), np.bool_)
    if not idle.any():
        return IdleParts(np.zeros(len(idle), np.int64), busy)
    some = np.flatnonzero(idle.any(axis=1))
    packed = np.packbits(idle[some], axis=1)
    _, first, which = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    pattern = np.zeros(len(idle), np.int64)
    pattern[some] = which.reshape(-1) + 1
    return IdleParts(pattern, np.concatenate([busy, idle[some[first]]]))


def _one_sided(workload: Workload, relations: Relations, kind: NodeKind) -> BoolArray:
    """Return a mask of the permutations along which each class has messages of one kind, ``(classes,
    permutations)``.
    """
    table = np.zeros((len(workload.classes), len(relations.target)), np.bool_)
    for index, graph in enumerate(workload.classes):
        rows = permutation_rows(graph, relations.permutations)
        table[index, rows[(rows != NONE) & (graph.kind[graph.p2p.node] == kind)]] = True
    return table


def has_idle_parts(workload: Workload, index: int) -> bool:
    """Return True if some rank of a job of one class takes no part in some of its communication."""
    graph = workload.classes[index]
    group_set = graph.collectives.group_set
    used: list[int] = np.unique(group_set[group_set >= 0]).tolist()
    if not all(graph.group_sets[row].holds_all(workload.num_ranks) for row in used):
        return True
    ways = graph.p2p.permutation[(graph.p2p.permutation >= 0) & ~graph.p2p.host]
    rows: list[int] = np.unique(ways).tolist()
    peers = (peers_of(graph.permutations[way], workload.num_ranks) for way in rows)
    ranks: IntArray = np.arange(workload.num_ranks if len(ways) else 0, dtype=np.int64)
    return any(
        bool((((peer.target < 0) & (peer.source < 0)) | (peer.target == ranks)).any()) for peer in peers
    )
