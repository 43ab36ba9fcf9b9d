"""Rank classes before and after a trip, laid side by side.

A trip may split a class (ranks at the end of a pipeline have no receive) and spell groups otherwise. What a
rank sees is compared: its group, and whom its messages go to and come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from hespas.graph import ABSENT, ExplicitGroups, OpGraph, Permutation, Workload
from hespas.graph.columns import IntArray
from hespas.graph.groups import GroupSet

__all__ = ["class_pairs"]

_MOST_RANKS = 512
"""Of larger classes only the first ranks are looked at: groups repeat in a pattern."""


def class_pairs(before: Workload, after: Workload) -> Iterator[tuple[OpGraph, OpGraph]]:
    """Each class of ``before`` with every class that its ranks have afterwards."""
    for index, graph in enumerate(before.classes):
        ranks = before.ranks_of(index)
        ranks = ranks[ranks < after.num_ranks]
        others: list[int] = np.unique(after.rank_class[ranks]).tolist()
        for other in others:
            if other == ABSENT:
                continue
            shared = ranks[after.rank_class[ranks] == other]
            then = after.classes[other]
            yield _seen_by(graph, shared, before.num_ranks), _seen_by(then, shared, after.num_ranks)


def _seen_by(graph: OpGraph, ranks: IntArray, num_ranks: int) -> OpGraph:
    """The graph with groups and peers as ``ranks`` see them; the group of all ranks is said by nothing."""
    chosen: list[int] = ranks[:_MOST_RANKS].tolist()
    collectives = graph.collectives
    if len(graph.group_sets):
        world = np.array([_is_unnamed(groups, num_ranks) for groups in graph.group_sets] + [True])
        rows = np.where(world[collectives.group_set], -1, collectives.group_set).astype(np.int32)
        collectives = replace(collectives, group_set=rows)
    return replace(
        graph,
        collectives=collectives,
        group_sets=tuple(_groups_of(groups, chosen, num_ranks) for groups in graph.group_sets),
        permutations=tuple(_peers_of(each, chosen, num_ranks) for each in graph.permutations),
    )


def _is_unnamed(groups: GroupSet, num_ranks: int) -> bool:
    return groups.is_world(num_ranks) and not groups.communicator


def _groups_of(groups: GroupSet, ranks: Sequence[int], num_ranks: int) -> GroupSet:
    """The groups of ``ranks``. One of all ranks in another order than theirs always has a name: the first."""
    is_ordered_anew = groups.num_groups == 1 and groups.max_group_size == num_ranks
    is_named = is_ordered_anew and not groups.is_world(num_ranks)
    numbers = dict.fromkeys(groups.group_of(rank) for rank in ranks)
    rows = [sorted(groups.members(number).tolist()) for number in numbers if number >= 0]
    return replace(ExplicitGroups.from_rows(rows), communicator=groups.communicator or int(is_named))


def _peers_of(permutation: Permutation, ranks: Sequence[int], num_ranks: int) -> Permutation:
    out = [(rank, permutation.target_of(rank)) for rank in ranks]
    back = [(permutation.source_of(rank), rank) for rank in ranks]
    pairs = {pair for pair in (*out, *back) if min(pair) >= 0}
    return Permutation.from_pairs(sorted(pairs), num_ranks)
