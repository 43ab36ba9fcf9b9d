"""Restriction of a program's groups and peers to the ranks that run it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.graph.columns import IntArray
from hespas.graph.groups import ExplicitGroups, GroupSet, Permutation, compress_groups
from hespas.graph.opgraph import NodeKind, OpGraph
from hespas.graph.workload import Workload

__all__ = ["of_own_ranks"]

_SENDS, _RECEIVES, _BOTH = range(3)


def of_own_ranks(workload: Workload, number: int, graph: OpGraph) -> OpGraph:
    """Return ``graph``, the program of rank class ``number``, with the groups and peers of its ranks only.

    Group sets and permutations span the whole job. The time of a message or a collective depends on the links
    between the ranks that take part in it, not on those of other rank classes. O(ranks x sets).
    """
    if len(workload.classes) == 1:
        return graph
    ranks = workload.ranks_of(number)
    table = graph.p2p
    kind = graph.kind[table.node]
    side = np.full(len(table), _BOTH, np.int64)
    side[kind == int(NodeKind.SEND)] = _SENDS
    side[kind == int(NodeKind.RECV)] = _RECEIVES
    key = np.where(table.permutation >= 0, table.permutation.astype(np.int64) * 3 + side, -1)
    used, place = np.unique(key, return_inverse=True)
    stated = used >= 0
    codes: list[int] = used[stated].tolist()
    permutations = tuple(_own_pairs(graph.permutations[code // 3], ranks, code % 3) for code in codes)
    row = np.where(stated, np.cumsum(stated) - 1, -1)[place].astype(table.permutation.dtype)
    return replace(
        graph,
        group_sets=tuple(_own_groups(groups, ranks) for groups in graph.group_sets),
        permutations=permutations,
        p2p=replace(table, permutation=row),
    )


def _own_groups(groups: GroupSet, ranks: IntArray) -> GroupSet:
    """Return the groups that hold one of ``ranks``; all groups where none does."""
    own = np.unique(groups.groups_of(ranks))
    own = own[own >= 0]
    if not len(own) or len(own) == groups.num_groups:
        return groups
    rows = [groups.members(group).tolist() for group in own.tolist()]
    if len({len(row) for row in rows}) > 1:
        return ExplicitGroups(tuple(map(tuple, rows)), groups.communicator)
    return replace(compress_groups(np.array(rows, np.int64)), communicator=groups.communicator)


def _own_pairs(permutation: Permutation, ranks: IntArray, side: int) -> Permutation:
    """Return the pairs in which one of ``ranks`` sends, receives or does either."""
    pairs: set[tuple[int, int]] = set()
    if side != _RECEIVES:
        pairs.update(zip(ranks.tolist(), permutation.targets_of(ranks).tolist(), strict=True))
    if side != _SENDS:
        pairs.update(zip(permutation.sources_of(ranks).tolist(), ranks.tolist(), strict=True))
    own = tuple(sorted(pair for pair in pairs if min(pair) >= 0))
    return replace(permutation, digit=(1, 1), shift=0, wraps=True, pairs=own)
