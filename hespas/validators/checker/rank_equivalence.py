"""Division of ranks into kinds that no rule can distinguish, so that each kind is checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph import StridedGroups, Workload
from hespas.graph.columns import IntArray
from hespas.simulator.symmetry import NONE, RankKinds, Relations, indistinguishable, relations_of

__all__ = [
    "GroupChannel",
    "MessagePair",
    "RankEquivalence",
    "rank_equivalence_of",
]


@dataclass(frozen=True, slots=True)
class GroupChannel:
    """Process groups that no rule can distinguish, treated as one (a channel). ``members`` are the ranks of
    one of these groups, ``kinds`` the kinds of its ranks. ``absent`` are members that are not in the job.
    """

    members: Sequence[int]
    kinds: frozenset[int]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MessagePair:
    """Equivalent messages between two ranks: the kinds of source and target, and the permutations that
    connect them.
    """

    source_kind: int
    target_kind: int
    permutations: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class RankEquivalence:
    """Kinds of ranks: ranks of one kind violate the same rules, so one of each kind is checked. ``kind`` is
    the kind of each rank, shape ``(ranks,)``; ``representatives`` are the first ranks of the kinds.

    ``channel_rows[kind]`` has one entry per group set of the kind's graph: the index of its group in
    ``channels`` (-1: none). The last entry is for the group of all ranks. ``send_pairs[kind]`` and
    ``receive_pairs[kind]`` have one entry per permutation: the message pair and the peer of the
    representative, or None if it has no peer.
    """

    kind: IntArray
    representatives: tuple[int, ...]
    sizes: tuple[int, ...]
    channels: tuple[GroupChannel, ...]
    channel_rows: tuple[tuple[int, ...], ...]
    send_pairs: tuple[tuple[tuple[MessagePair, int] | None, ...], ...]
    receive_pairs: tuple[tuple[tuple[MessagePair, int] | None, ...], ...]


def rank_equivalence_of(workload: Workload, path: str = "") -> RankEquivalence:
    """Return the division of the ranks of a complete job into the smallest number of kinds for a check.

    O(rounds x ranks x (group sets + permutations)), vectorised, with at most one round per kind. O(1) if all
    ranks run one class and the form of their groups shows that they are equivalent. Raises ``BudgetError`` if
    the job has too many ranks to compare them one by one; ``path`` is the file of the job, for the message.
    """
    if _is_regular(workload):
        return _regular_equivalence(workload)
    relations = relations_of(workload, path, only_executed=False)
    kinds = indistinguishable(relations)
    kind = kinds.kind
    representatives, sizes = np.unique(kind, return_index=True, return_counts=True)[1:]
    firsts: list[int] = representatives.tolist()
    group_channels, channel_rows = _channels(workload, relations, kinds, firsts)
    send_pairs, receive_pairs = _pairs(workload, relations, kind, firsts)
    return RankEquivalence(
        kind,
        tuple(firsts),
        tuple(sizes.tolist()),
        group_channels,
        channel_rows,
        send_pairs,
        receive_pairs,
    )


def _is_regular(workload: Workload) -> bool:
    """Return True if shifting all ranks by any number preserves groups and messages, so that all ranks are
    equivalent.
    """
    if len(workload.classes) != 1 or not workload.is_complete:
        return False
    graph = workload.classes[0]
    ranks = workload.num_ranks
    is_strided = all(
        isinstance(groups, StridedGroups) and not groups.base and groups.num_ranks == ranks
        for groups in graph.group_sets
    )
    is_ring = all(
        permutation.pairs is None and permutation.wraps and permutation.num_ranks == ranks
        for permutation in graph.permutations
    )
    return is_strided and is_ring and len(graph.permutations) <= 1


def _regular_equivalence(workload: Workload) -> RankEquivalence:
    """Return the equivalence in which all ranks are of one kind.

    Group sets with the same members share a channel. Unused group sets of the same size share a channel too,
    because no rule checks them.
    """
    graph = workload.classes[0]
    ranks = workload.num_ranks
    all_ranks = StridedGroups.all_ranks(ranks)
    channel_of: dict[object, int] = {}
    channels: list[GroupChannel] = []
    rows: list[int] = []
    for groups in (*graph.group_sets, all_ranks):
        assert isinstance(groups, StridedGroups), "checked before"
        key = (groups.communicator, frozenset(groups.member_digits))
        row = channel_of.setdefault(key, len(channels))
        if row == len(channels):
            members: Sequence[int] = groups.members(0).tolist() if len(groups.member_digits) > 1 else ()
            if len(groups.member_digits) <= 1:  # evenly spaced
                size, stride = groups.member_digits[0] if groups.member_digits else (1, 1)
                members = range(0, size * stride, stride)
            channels.append(GroupChannel(members, frozenset([0]), ()))
        rows.append(row)
    sends: list[tuple[MessagePair, int] | None] = []
    receives: list[tuple[MessagePair, int] | None] = []
    for permutation in graph.permutations:
        pair = MessagePair(0, 0, frozenset([0]))
        target, source = permutation.target_of(0), permutation.source_of(0)
        sends.append((pair, target) if _is_peer(target, 0) else None)
        receives.append((pair, source) if _is_peer(source, 0) else None)
    return RankEquivalence(
        kind=np.broadcast_to(np.int64(0), (ranks,)),
        representatives=(0,),
        sizes=(ranks,),
        channels=tuple(channels),
        channel_rows=(tuple(rows),),
        send_pairs=(tuple(sends),),
        receive_pairs=(tuple(receives),),
    )


def _channels(
    workload: Workload, relations: Relations, kinds: RankKinds, firsts: list[int]
) -> tuple[tuple[GroupChannel, ...], tuple[tuple[int, ...], ...]]:
    row_of: dict[int, int] = {}
    channels: list[GroupChannel] = []
    rows: list[tuple[int, ...]] = []
    for rank in firsts:
        graph = workload.graph_of(rank)
        channel_rows: list[int] = []
        for groups in (*graph.group_sets, StridedGroups.all_ranks(workload.num_ranks)):
            group = int(relations.group[relations.sets[groups], rank])
            if group == NONE:
                channel_rows.append(-1)
                continue
            row = row_of.setdefault(int(kinds.group_word[group]), len(channels))
            if row == len(channels):
                members = relations.members[group]
                present = [rank for rank in members if 0 <= rank < len(kinds.kind)]
                absent = tuple(rank for rank in members if not 0 <= rank < len(kinds.kind))
                channels.append(GroupChannel(members, frozenset(kinds.kind[present].tolist()), absent))
            channel_rows.append(row)
        rows.append(tuple(channel_rows))
    return tuple(channels), tuple(rows)


_PairRows = tuple[tuple[tuple[MessagePair, int] | None, ...], ...]


def _pairs(
    workload: Workload, relations: Relations, kind: IntArray, firsts: list[int]
) -> tuple[_PairRows, _PairRows]:
    listed: dict[tuple[int, int], set[int]] = {}
    symbolic: list[int] = []
    for permutation, index in relations.permutations.items():
        if permutation.pairs is None:
            symbolic.append(index)
            continue
        for pair in permutation.pairs:
            listed.setdefault(pair, set()).add(index)

    def pair_of(source: int, target: int) -> MessagePair:
        joined = set(listed.get((source, target), ()))
        joined.update(index for index in symbolic if relations.target[index, source] == target)
        used = relations.sends[workload.rank_class[source]] | relations.receives[workload.rank_class[target]]
        joined = {index for index in joined if used[index]}
        return MessagePair(int(kind[source]), int(kind[target]), frozenset(joined))

    sends: list[tuple[tuple[MessagePair, int] | None, ...]] = []
    receives: list[tuple[tuple[MessagePair, int] | None, ...]] = []
    for rank in firsts:
        graph = workload.graph_of(rank)
        rows = [relations.permutations[entry] for entry in graph.permutations]
        targets: list[int] = relations.target[rows, rank].tolist()
        sources: list[int] = relations.source[rows, rank].tolist()
        sends.append(tuple((pair_of(rank, to), to) if _is_peer(to, rank) else None for to in targets))
        receives.append(tuple((pair_of(of, rank), of) if _is_peer(of, rank) else None for of in sources))
    return tuple(sends), tuple(receives)


def _is_peer(other: int, rank: int) -> bool:
    return other not in (-1, rank)
