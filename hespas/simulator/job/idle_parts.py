"""Idle communication: nodes in the program of a rank class in which some of its ranks take no part.

All ranks of a class run one program. A rank skips a collective whose group set has no group for it, a message
without a peer, and a permute without source and target or with the rank itself as peer. As in traces, skipped
nodes take no time on that rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph import ABSENT, NodeKind, OpGraph, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.groups import peers_of
from hespas.graph.passes import with_durations
from hespas.simulator.symmetry import NONE, Relations, group_rows, permutation_rows

__all__ = ["IdleParts", "has_idle_parts", "idle_parts"]

_SIDES = (NodeKind.SEND, NodeKind.RECV)


@dataclass(frozen=True, slots=True, eq=False)
class IdleParts:
    """Communication nodes that ranks skip because they have no peers in them. Ranks that skip the same nodes
    share one pattern.

    ``pattern``, of shape ``(ranks,)``, is the row of each rank in ``patterns``. Row 0 is the pattern without
    skipped nodes. A row has one flag per group set (True: the rank has no group in it), then one flag per
    permutation (True: no target), then one flag per permutation (True: no source).
    """

    pattern: IntArray
    patterns: BoolArray

    @property
    def any(self) -> bool:
        """Return True if some rank skips communication of its class, because it has no group or peer
        there.
        """
        return len(self.patterns) > 1

    def without_idle_time(self, graph: OpGraph, relations: Relations, pattern: int) -> OpGraph:
        """Return the graph with a duration of 0 for the communication that ranks with a pattern skip."""
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
    """Return for all ranks the communication of their class in which they take no part. O(ranks x (sets +
    permutations)).
    """
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
    """Return a mask of the permutations for which each rank class has nodes of one kind, shape ``(classes,
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
