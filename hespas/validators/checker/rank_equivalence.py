"""Ranks that no rule can tell apart: checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.files.budget import refuse_comparison
from hespas.graph import GroupSet, OpGraph, Permutation, StridedGroups, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.membership import Membership, Peers, membership_of, peers_of, salted

__all__ = [
    "Channel",
    "Pair",
    "RankEquivalence",
    "rank_equivalence_of",
]

_Words = NDArray[np.uint64]

_MAX_PATTERNS = 24
"""More permutations than this are not compared pair by pair: their ranks count as distinguishable."""


@dataclass(frozen=True, slots=True)
class Channel:
    """Groups that look alike. ``members`` are the ranks of one of them, ``kinds`` the kinds of all its ranks.

    ``absent`` are members that the job does not have.
    """

    members: Sequence[int]
    kinds: frozenset[int]
    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Directed messages that look alike: kinds of source and target, and which permutations join them."""

    source_kind: int
    target_kind: int
    permutations: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class RankEquivalence:
    """The partition. ``kind`` has shape ``(ranks,)``; ``representatives`` holds the first rank of each kind.

    ``channel_rows[kind]`` gives, per group-set row of the kind's graph and last for -1 (all ranks), the row
    of ``channels`` or -1. ``send_pairs[kind]`` and ``receive_pairs[kind]`` give, per permutation row, the
    pair and the peer of the representative, or None where it has no peer.
    """

    kind: IntArray
    representatives: tuple[int, ...]
    sizes: tuple[int, ...]
    channels: tuple[Channel, ...]
    channel_rows: tuple[tuple[int, ...], ...]
    send_pairs: tuple[tuple[tuple[Pair, int] | None, ...], ...]
    receive_pairs: tuple[tuple[tuple[Pair, int] | None, ...], ...]


class _Relations:
    """Groups and peers of all ranks as columns, distinct group sets and permutations once."""

    def __init__(self, workload: Workload) -> None:
        ranks = workload.num_ranks
        self.num_ranks = ranks
        self.rank_class = workload.rank_class.astype(np.int64)
        self.groups: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}
        self.everybody = StridedGroups.all_ranks(ranks)
        for groups in (*workload.group_sets, self.everybody):
            self.groups.setdefault(groups, len(self.groups))
        for graph in workload.classes:
            for permutation in graph.permutations:
                self.permutations.setdefault(permutation, len(self.permutations))
        uids: dict[bytes, int] = {}
        self.members: list[tuple[int, ...]] = []
        self.memberships: list[Membership] = [
            membership_of(groups, ranks, uids, self.members) for groups in self.groups
        ]
        self.peers: list[Peers] = [peers_of(permutation, ranks) for permutation in self.permutations]
        self.uses = self._uses(workload.classes)
        self.moves = self._moves(workload.classes)

    def _uses(self, classes: tuple[OpGraph, ...]) -> BoolArray:
        """Which class communicates over which group set, shape ``(classes, sets)``."""
        table = np.zeros((len(classes), len(self.groups)), np.bool_)
        for index, graph in enumerate(classes):
            rows: list[int] = np.unique(graph.collectives.group_set).tolist()
            for row in rows:
                table[index, self.groups[graph.group_sets[row] if row >= 0 else self.everybody]] = True
        return table

    def _moves(self, classes: tuple[OpGraph, ...]) -> BoolArray:
        """Which class sends or receives along which permutation, shape ``(classes, permutations)``."""
        table = np.zeros((len(classes), len(self.permutations)), np.bool_)
        for index, graph in enumerate(classes):
            rows: list[int] = np.unique(graph.p2p.permutation).tolist()
            for row in rows:
                if row >= 0:
                    table[index, self.permutations[graph.permutations[row]]] = True
        return table


def rank_equivalence_of(workload: Workload, path: str = "") -> RankEquivalence:
    """The coarsest partition of the ranks of a complete job that is safe to check on.

    O(rounds x ranks x (group sets + permutations)), vectorised; rounds are at most the number of kinds. O(1)
    where all ranks run one class and are in one situation by the form of their groups. Raises ``BudgetError``
    for more ranks than are compared one by one; ``path`` is their file.
    """
    if _is_regular(workload):
        return _regular(workload)
    refuse_comparison(workload.num_ranks, path or workload.name)
    relations = _Relations(workload)
    kind, channel_hash = _refine(relations)
    representatives, sizes = np.unique(kind, return_index=True, return_counts=True)[1:]
    order = np.argsort(representatives, kind="stable")  # number kinds by their first rank
    renumber = np.empty(len(order), np.int64)
    renumber[order] = np.arange(len(order))
    kind = renumber[kind]
    firsts: list[int] = representatives[order].tolist()
    channels, channel_rows = _channels(workload, relations, kind, firsts, channel_hash)
    sends, receives = _pairs(workload, relations, kind, firsts)
    return RankEquivalence(
        kind, tuple(firsts), tuple(sizes[order].tolist()), channels, channel_rows, sends, receives
    )


def _is_regular(workload: Workload) -> bool:
    """Return True if a shift of the ranks maps every group and message to another: no rank differs then."""
    if len(workload.classes) != 1 or not workload.is_complete:
        return False
    graph = workload.classes[0]
    ranks = workload.num_ranks
    even = all(
        isinstance(groups, StridedGroups) and not groups.base and groups.num_ranks == ranks
        for groups in graph.group_sets
    )
    ring = all(way.pairs is None and way.wraps and way.num_ranks == ranks for way in graph.permutations)
    return even and ring and len(graph.permutations) <= 1


def _regular(workload: Workload) -> RankEquivalence:
    """The partition with one kind. Group sets of the same members share a channel, as do unused ones of a
    size, which no rule asks about.
    """
    graph = workload.classes[0]
    ranks = workload.num_ranks
    everybody = StridedGroups.all_ranks(ranks)
    found: dict[object, int] = {}
    channels: list[Channel] = []
    rows: list[int] = []
    for groups in (*graph.group_sets, everybody):
        assert isinstance(groups, StridedGroups), "checked before"
        row = found.setdefault((groups.communicator, frozenset(groups.member_digits)), len(channels))
        if row == len(channels):
            channels.append(Channel(_first_members(groups), frozenset([0]), ()))
        rows.append(row)
    sends: list[tuple[Pair, int] | None] = []
    receives: list[tuple[Pair, int] | None] = []
    for way in graph.permutations:
        pair = Pair(0, 0, frozenset([0]))
        target, source = way.target_of(0), way.source_of(0)
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


def _first_members(groups: StridedGroups) -> Sequence[int]:
    """Return the ranks of the first group; a range where they are evenly spaced."""
    if len(groups.member_digits) <= 1:
        size, stride = groups.member_digits[0] if groups.member_digits else (1, 1)
        return range(0, size * stride, stride)
    members: list[int] = groups.members(0).tolist()
    return members


def _refine(relations: _Relations) -> tuple[IntArray, _Words]:
    """Kinds of ranks, and a fingerprint per distinct group of who meets in it and through which set."""
    kind = relations.rank_class
    fingerprint = salted(kind.astype(np.uint64), 1) ^ _patterns(relations)
    known = 0
    while True:
        distinct, inverse = np.unique(fingerprint, return_inverse=True)
        kind = inverse.astype(np.int64)
        groups = _group_fingerprints(relations, kind)
        if len(distinct) == known:
            return kind, groups
        known = len(distinct)
        fingerprint = salted(kind.astype(np.uint64), 2)
        for salt, membership in enumerate(relations.memberships):
            mine = relations.uses[relations.rank_class, salt] & (membership.group >= 0)
            seen = np.zeros(relations.num_ranks, np.uint64)
            seen[mine] = groups[membership.uid[membership.group[mine]]]
            fingerprint = salted(fingerprint ^ salted(seen, 3), salt)
        for salt, peers in enumerate(relations.peers):
            mine = relations.moves[relations.rank_class, salt]
            for column in (peers.target, peers.source):
                seen = np.where(mine & (column >= 0), kind[column] + 1, 0).astype(np.uint64)
                fingerprint = salted(fingerprint ^ salted(seen, 4), salt)


def _group_fingerprints(relations: _Relations, kind: IntArray) -> _Words:
    """Per distinct group, a fingerprint of its members' kinds and of the sets they reach it through."""
    total = np.zeros(len(relations.members), np.uint64)
    word = kind.astype(np.uint64)
    for salt, membership in enumerate(relations.memberships):
        inside = membership.group >= 0
        uses = inside & relations.uses[relations.rank_class, salt]
        uid = membership.uid[membership.group[uses]]
        np.add.at(total, uid, salted(word[uses], 2 * salt + 10))
        if not len(membership.uid):
            continue  # a set without groups
        # Who merely is a member counts once per distinct group, through the set that lists it first.
        first = inside & membership.is_first[membership.group]
        np.add.at(total, membership.uid[membership.group[first]], salted(word[first], 5))
    sizes = np.array([len(members) for members in relations.members], np.uint64)
    return salted(total ^ salted(sizes, 6), 7)


def _patterns(relations: _Relations) -> _Words:
    """A fingerprint per rank of which of its permutations lead to the same peer."""
    pattern = np.zeros(relations.num_ranks, np.uint64)
    if len(relations.peers) > _MAX_PATTERNS:
        moving = relations.moves[relations.rank_class].any(axis=1)
        return np.where(moving, np.arange(1, relations.num_ranks + 1), 0).astype(np.uint64)
    for left, one in enumerate(relations.peers):
        for right, other in enumerate(relations.peers[:left]):
            same = (one.target == other.target) + 2 * (one.source == other.source)
            pattern = salted(pattern ^ same.astype(np.uint64), left * _MAX_PATTERNS + right)
    return pattern


def _channels(
    workload: Workload, relations: _Relations, kind: IntArray, firsts: list[int], fingerprints: _Words
) -> tuple[tuple[Channel, ...], tuple[tuple[int, ...], ...]]:
    found: dict[int, int] = {}
    channels: list[Channel] = []
    rows: list[tuple[int, ...]] = []
    for rank in firsts:
        graph = workload.graph_of(rank)
        mine: list[int] = []
        for groups in (*graph.group_sets, relations.everybody):
            membership = relations.memberships[relations.groups[groups]]
            group = int(membership.group[rank])
            if group < 0:
                mine.append(-1)
                continue
            uid = int(membership.uid[group])
            row = found.setdefault(int(fingerprints[uid]), len(channels))
            if row == len(channels):
                channels.append(_channel(relations.members[uid], kind))
            mine.append(row)
        rows.append(tuple(mine))
    return tuple(channels), tuple(rows)


def _channel(members: tuple[int, ...], kind: IntArray) -> Channel:
    present = [rank for rank in members if 0 <= rank < len(kind)]
    absent = tuple(rank for rank in members if not 0 <= rank < len(kind))
    return Channel(members, frozenset(kind[present].tolist()), absent)


_PairRows = tuple[tuple[tuple[Pair, int] | None, ...], ...]


def _pairs(
    workload: Workload, relations: _Relations, kind: IntArray, firsts: list[int]
) -> tuple[_PairRows, _PairRows]:
    listed: dict[tuple[int, int], set[int]] = {}
    symbolic: list[int] = []
    for permutation, index in relations.permutations.items():
        if permutation.pairs is None:
            symbolic.append(index)
            continue
        for pair in permutation.pairs:
            listed.setdefault(pair, set()).add(index)

    def pair_of(source: int, target: int) -> Pair:
        joined = set(listed.get((source, target), ()))
        joined.update(index for index in symbolic if relations.peers[index].target[source] == target)
        return Pair(int(kind[source]), int(kind[target]), frozenset(joined))

    sends: list[tuple[tuple[Pair, int] | None, ...]] = []
    receives: list[tuple[tuple[Pair, int] | None, ...]] = []
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
