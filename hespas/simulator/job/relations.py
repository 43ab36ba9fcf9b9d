"""Who meets whom in a job, as columns over its ranks: groups of collectives, peers of messages."""

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

__all__ = ["NOBODY", "RECEIVES", "SENDS", "Relations", "group_rows", "permutation_rows", "relations_of"]

_Key = TypeVar("_Key", bound=Hashable)

NOBODY = -1
"""No group, no peer."""

SENDS = (int(NodeKind.SEND), int(NodeKind.PERMUTE))
RECEIVES = (int(NodeKind.RECV), int(NodeKind.PERMUTE))


@dataclass(frozen=True, slots=True, eq=False)
class Relations:
    """Distinct group sets (the last: all ranks, where nobody says) and permutations over all ranks of a job.

    ``rank_class`` has shape ``(ranks,)``. ``group``, of shape ``(sets, ranks)``, is the group of each rank,
    numbered over all sets by its members; ``members`` counts those it lists. ``label``, of the same shape, is
    the first set that leads the rank's class to the same group, or ``NOBODY`` where its class does not call
    it. ``target`` and ``source`` have shape ``(permutations, ranks)``. ``sends``, ``receives`` and
    ``permutes``, of shape ``(classes, permutations)``, say which class does what along a permutation.
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
        """Ranks of the job, here or not."""
        return len(self.rank_class)

    def absent_members(self) -> int:
        """How many groups that are called here have members which are not."""
        used = self.group[self.label != NOBODY]
        here = np.zeros(len(self.members), np.int64)
        for row in self.group:
            mine = (row != NOBODY) & (self.rank_class != ABSENT)
            np.maximum.at(here, row[mine], np.bincount(row[mine], minlength=len(here))[row[mine]])
        return int((here < self.members)[np.unique(used)].sum())


def relations_of(workload: Workload) -> Relations:
    """Return the columns. O(ranks x (sets + permutations)). Raises ``BudgetError`` for more ranks than are
    compared one by one.
    """
    ranks = workload.num_ranks
    refuse_comparison(ranks, workload.name)
    everybody = StridedGroups.all_ranks(ranks)
    sets = _numbered(*workload.group_sets, everybody)
    permutations = _numbered(*chain.from_iterable(graph.permutations for graph in workload.classes))
    rank_class = workload.rank_class.astype(np.int64)
    group, members = _groups(tuple(sets), ranks)
    peers = [peers_of(permutation, ranks) for permutation in permutations]
    none = np.empty((0, ranks), np.int64)
    doing = [_doing(graph, permutations) for graph in workload.classes]
    return Relations(
        rank_class=rank_class,
        sets=sets,
        permutations=permutations,
        group=group,
        label=_labels(group, _callers(workload.classes, sets)[rank_class] & (rank_class != ABSENT)[:, None]),
        members=members,
        target=np.stack([peer.target for peer in peers]) if peers else none,
        source=np.stack([peer.source for peer in peers]) if peers else none,
        sends=np.stack([each[0] for each in doing]),
        receives=np.stack([each[1] for each in doing]),
        permutes=np.stack([each[2] for each in doing]),
    )


def _numbered(*keys: _Key) -> dict[_Key, int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def _groups(sets: tuple[GroupSet, ...], ranks: int) -> tuple[IntArray, IntArray]:
    uids: dict[bytes, int] = {}
    listed: list[tuple[int, ...]] = []
    rows = np.full((len(sets), ranks), NOBODY, np.int64)
    for row, groups in zip(rows, sets, strict=True):
        found = membership_of(groups, ranks, uids, listed)
        inside = found.group != NOBODY
        row[inside] = found.uid[found.group[inside]]
    return rows, np.fromiter(map(len, listed), np.int64, len(listed))


def group_rows(graph: OpGraph, sets: dict[GroupSet, int]) -> IntArray:
    """The number of the group set of each row of the graph's collectives."""
    numbers = [*(sets[groups] for groups in graph.group_sets), len(sets) - 1]
    return np.array(numbers, np.int64)[graph.collectives.group_set]


def permutation_rows(graph: OpGraph, permutations: dict[Permutation, int]) -> IntArray:
    """The number of the permutation of each row of the graph's messages; ``NOBODY`` where none is stated, and
    over the link of the host.
    """
    numbers = [*(permutations[entry] for entry in graph.permutations), NOBODY]
    found: IntArray = np.array(numbers, np.int64)[graph.p2p.permutation]
    return np.where(graph.p2p.host, NOBODY, found)


def _callers(classes: tuple[OpGraph, ...], sets: dict[GroupSet, int]) -> BoolArray:
    """Which class runs a collective over which set, ``(classes, sets)``."""
    table = np.zeros((len(classes), len(sets)), np.bool_)
    for index, graph in enumerate(classes):
        runs = graph.multiplicity[graph.collectives.node] != 0
        table[index, group_rows(graph, sets)[runs]] = True
    return table


def _labels(group: IntArray, calls: BoolArray) -> IntArray:
    """See :class:`Relations`; ``calls`` has shape ``(ranks, sets)``."""
    label = np.full(group.shape, NOBODY, np.int64)
    row, rank = np.nonzero((group != NOBODY) & calls.T)  # set after set: the first of equals is the label
    key = rank * (int(group.max(initial=0)) + 1) + group[row, rank]
    first, which = np.unique(key, return_index=True, return_inverse=True)[1:]
    label[row, rank] = row[first][which.reshape(-1)]
    return label


def _doing(graph: OpGraph, permutations: dict[Permutation, int]) -> tuple[BoolArray, BoolArray, BoolArray]:
    rows, kinds = permutation_rows(graph, permutations), graph.kind[graph.p2p.node]
    counts = rows != NOBODY
    counts &= graph.multiplicity[graph.p2p.node] != 0
    tables: list[BoolArray] = []
    for chosen in (SENDS, RECEIVES, (int(NodeKind.PERMUTE),)):
        table = np.zeros(len(permutations), np.bool_)
        table[rows[counts & np.isin(kinds, chosen)]] = True
        tables.append(table)
    return tables[0], tables[1], tables[2]
