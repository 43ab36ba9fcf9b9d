"""Partition of ranks into kinds that no rule can distinguish, so that each kind is checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.files.limits import refuse_comparison
from hespas.graph import GroupSet, Permutation, StridedGroups, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.groups import GroupMembership, PermutationPeers, membership_of, peers_of, salted

__all__ = [
    "GroupChannel",
    "MessagePair",
    "RankEquivalence",
    "rank_equivalence_of",
]

_Words = NDArray[np.uint64]

_MAX_PATTERNS = 24
"""Limit of permutations that are compared pairwise; above it, ranks that use them are distinguishable."""


@dataclass(frozen=True, slots=True)
class GroupChannel:
    """Groups that no rule can distinguish: ``members`` of one group, and the ``kinds`` of these ranks.

    ``absent`` are members that the job does not have.
    """

    members: Sequence[int]
    kinds: frozenset[int]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MessagePair:
    """Equivalent directed messages: kinds of source and target, and the permutations that connect them."""

    source_kind: int
    target_kind: int
    permutations: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class RankEquivalence:
    """Partition of ranks. ``kind`` has shape ``(ranks,)``; ``representatives`` are the first ranks of kinds.

    ``channel_rows[kind]`` gives, per group-set row of the kind's graph and last for -1 (all ranks), the row
    of ``channels`` or -1. ``send_pairs[kind]`` and ``receive_pairs[kind]`` give, per permutation row, the
    pair and the peer of the representative, or None where it has no peer.
    """

    kind: IntArray
    representatives: tuple[int, ...]
    sizes: tuple[int, ...]
    channels: tuple[GroupChannel, ...]
    channel_rows: tuple[tuple[int, ...], ...]
    send_pairs: tuple[tuple[tuple[MessagePair, int] | None, ...], ...]
    receive_pairs: tuple[tuple[tuple[MessagePair, int] | None, ...], ...]


class _RankRelations:
    """Groups and peers of all ranks as columns, once per distinct group set and permutation.

    ``uses`` has shape ``(classes, sets)``: True if the class communicates over the group set. ``moves`` has
    shape ``(classes, permutations)``: True if the class sends or receives along the permutation.
    """

    def __init__(self, workload: Workload) -> None:
        ranks = workload.num_ranks
        self.num_ranks = ranks
        self.rank_class = workload.rank_class.astype(np.int64)
        self.groups: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}
        self.all_ranks = StridedGroups.all_ranks(ranks)
        for groups in (*workload.group_sets, self.all_ranks):
            self.groups.setdefault(groups, len(self.groups))
        for graph in workload.classes:
            for permutation in graph.permutations:
                self.permutations.setdefault(permutation, len(self.permutations))
        uids: dict[bytes, int] = {}
        self.members: list[tuple[int, ...]] = []
        self.memberships: list[GroupMembership] = [
            membership_of(groups, ranks, uids, self.members) for groups in self.groups
        ]
        self.peers: list[PermutationPeers] = [
            peers_of(permutation, ranks) for permutation in self.permutations
        ]
        self.uses: BoolArray = np.zeros((len(workload.classes), len(self.groups)), np.bool_)
        self.moves: BoolArray = np.zeros((len(workload.classes), len(self.permutations)), np.bool_)
        for index, graph in enumerate(workload.classes):
            set_rows: list[int] = np.unique(graph.collectives.group_set).tolist()
            for row in set_rows:
                self.uses[index, self.groups[graph.group_sets[row] if row >= 0 else self.all_ranks]] = True
            permutation_rows: list[int] = np.unique(graph.p2p.permutation).tolist()
            for row in permutation_rows:
                if row >= 0:
                    self.moves[index, self.permutations[graph.permutations[row]]] = True


def rank_equivalence_of(workload: Workload, path: str = "") -> RankEquivalence:
    """Return the coarsest partition of the ranks of a complete job that is safe to check.

    O(rounds x ranks x (group sets + permutations)), vectorised, with at most one round per kind. O(1) if all
    ranks run one class and are equivalent by the form of their groups. Raises ``BudgetError`` for more ranks
    than the limit of individual comparisons; ``path`` is their file.
    """
    if _is_regular(workload):
        return _regular_equivalence(workload)
    refuse_comparison(workload.num_ranks, path or workload.name)
    relations = _RankRelations(workload)
    kind, channel_hash = _refine(relations)
    representatives, sizes = np.unique(kind, return_index=True, return_counts=True)[1:]
    order = np.argsort(representatives, kind="stable")  # number kinds by their first rank
    renumber = np.empty(len(order), np.int64)
    renumber[order] = np.arange(len(order))
    kind = renumber[kind]
    firsts: list[int] = representatives[order].tolist()
    group_channels, channel_rows = _channels(workload, relations, kind, firsts, channel_hash)
    send_pairs, receive_pairs = _pairs(workload, relations, kind, firsts)
    return RankEquivalence(
        kind,
        tuple(firsts),
        tuple(sizes[order].tolist()),
        group_channels,
        channel_rows,
        send_pairs,
        receive_pairs,
    )


def _is_regular(workload: Workload) -> bool:
    """Return True if every shift of the ranks preserves groups and messages, so that all are equivalent."""
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
    """Return the partition with one kind.

    Group sets of the same members share a channel, as do unused ones of the same size, which no rule uses.
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


def _refine(relations: _RankRelations) -> tuple[IntArray, _Words]:
    """Return the kinds of ranks, and a fingerprint per distinct group of its members and their sets."""
    # Ranks also differ by which of their permutations lead to the same peer.
    pattern = np.zeros(relations.num_ranks, np.uint64)
    if len(relations.peers) > _MAX_PATTERNS:
        moving = relations.moves[relations.rank_class].any(axis=1)
        pattern = np.where(moving, np.arange(1, relations.num_ranks + 1), 0).astype(np.uint64)
    else:
        for left, one in enumerate(relations.peers):
            for right, other in enumerate(relations.peers[:left]):
                same = (one.target == other.target) + 2 * (one.source == other.source)
                pattern = salted(pattern ^ same.astype(np.uint64), left * _MAX_PATTERNS + right)
    fingerprint = salted(relations.rank_class.astype(np.uint64), 1) ^ pattern
    num_kinds = 0
    while True:
        distinct, inverse = np.unique(fingerprint, return_inverse=True)
        kind = inverse.astype(np.int64)
        groups = _group_fingerprints(relations, kind)
        if len(distinct) == num_kinds:
            return kind, groups
        num_kinds = len(distinct)
        fingerprint = salted(kind.astype(np.uint64), 2)
        for salt, membership in enumerate(relations.memberships):
            users = relations.uses[relations.rank_class, salt] & (membership.group >= 0)
            word = np.zeros(relations.num_ranks, np.uint64)
            word[users] = groups[membership.uid[membership.group[users]]]
            fingerprint = salted(fingerprint ^ salted(word, 3), salt)
        for salt, peers in enumerate(relations.peers):
            users = relations.moves[relations.rank_class, salt]
            for peer in (peers.target, peers.source):
                word = np.where(users & (peer >= 0), kind[peer] + 1, 0).astype(np.uint64)
                fingerprint = salted(fingerprint ^ salted(word, 4), salt)


def _group_fingerprints(relations: _RankRelations, kind: IntArray) -> _Words:
    """Return a fingerprint per distinct group, of the kinds of its members and the sets that they use."""
    total = np.zeros(len(relations.members), np.uint64)
    word = kind.astype(np.uint64)
    for salt, membership in enumerate(relations.memberships):
        inside = membership.group >= 0
        uses = inside & relations.uses[relations.rank_class, salt]
        np.add.at(total, membership.uid[membership.group[uses]], salted(word[uses], 2 * salt + 10))
        if not len(membership.uid):
            continue  # a set without groups
        # A member that does not use the group counts once, through the set that lists the group first.
        first = inside & membership.is_first[membership.group]
        np.add.at(total, membership.uid[membership.group[first]], salted(word[first], 5))
    sizes = np.array([len(members) for members in relations.members], np.uint64)
    return salted(total ^ salted(sizes, 6), 7)


def _channels(
    workload: Workload, relations: _RankRelations, kind: IntArray, firsts: list[int], fingerprints: _Words
) -> tuple[tuple[GroupChannel, ...], tuple[tuple[int, ...], ...]]:
    row_of: dict[int, int] = {}
    channels: list[GroupChannel] = []
    rows: list[tuple[int, ...]] = []
    for rank in firsts:
        graph = workload.graph_of(rank)
        channel_rows: list[int] = []
        for groups in (*graph.group_sets, relations.all_ranks):
            membership = relations.memberships[relations.groups[groups]]
            group = int(membership.group[rank])
            if group < 0:
                channel_rows.append(-1)
                continue
            uid = int(membership.uid[group])
            row = row_of.setdefault(int(fingerprints[uid]), len(channels))
            if row == len(channels):
                members = relations.members[uid]
                present = [rank for rank in members if 0 <= rank < len(kind)]
                absent = tuple(rank for rank in members if not 0 <= rank < len(kind))
                channels.append(GroupChannel(members, frozenset(kind[present].tolist()), absent))
            channel_rows.append(row)
        rows.append(tuple(channel_rows))
    return tuple(channels), tuple(rows)


_PairRows = tuple[tuple[tuple[MessagePair, int] | None, ...], ...]


def _pairs(
    workload: Workload, relations: _RankRelations, kind: IntArray, firsts: list[int]
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
        joined.update(index for index in symbolic if relations.peers[index].target[source] == target)
        return MessagePair(int(kind[source]), int(kind[target]), frozenset(joined))

    sends: list[tuple[tuple[MessagePair, int] | None, ...]] = []
    receives: list[tuple[tuple[MessagePair, int] | None, ...]] = []
    for rank in firsts:
        graph = workload.graph_of(rank)
        peers = [relations.peers[relations.permutations[entry]] for entry in graph.permutations]
        targets = [int(entry.target[rank]) for entry in peers]
        sources = [int(entry.source[rank]) for entry in peers]
        sends.append(tuple((pair_of(rank, to), to) if _is_peer(to, rank) else None for to in targets))
        receives.append(tuple((pair_of(of, rank), of) if _is_peer(of, rank) else None for of in sources))
    return tuple(sends), tuple(receives)


def _is_peer(other: int, rank: int) -> bool:
    return other not in (-1, rank)
