"""Who talks to whom: process groups and message peers of many ranks, made symbolic.

Ranks of one class differ only here. Per rank a few integers are kept; over all ranks of a class the value of
a node is one vector, which becomes a group set (of a collective) or a permutation (of a send or a receive).
Ranks whose groups overlap, or whose messages meet, have no such form and are of several classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hespas.converters.chakra.comm_groups import NamedGroups
from hespas.converters.chakra.contract import AttributeFacts, Faults, Stated
from hespas.converters.chakra.wire import Bools, ByteRows, EtColumns, Longs
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import ExplicitGroups, GroupSet, Permutation, compress_groups
from hespas.schemas.chakra.tables import NodeType

__all__ = [
    "Groups",
    "PeerRows",
    "Peers",
    "RankPeers",
    "communicators",
    "expressible",
    "highest_rank",
    "peers_of_class",
    "rank_peers",
    "without_rows",
]

Groups = NamedGroups
"""Group id -> global ranks in ring order."""


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """What a graph needs: rows per collective and per message node, and the tables they index."""

    group_set: Longs
    permutation: Longs
    group_sets: tuple[GroupSet, ...]
    permutations: tuple[Permutation, ...]
    group_rows: Longs
    peer_rows: Longs


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """Values as their distinct ones, and which of them each node has."""

    values: tuple[int, ...]
    which: bytes

    @classmethod
    def of(cls, column: Longs) -> _Pattern:
        """Distinct values in order of first appearance."""
        values, first, inverse = np.unique(column, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return cls(tuple(values[order].tolist()), place[inverse].astype(np.int32).tobytes())

    def column(self) -> Longs:
        """The value of each node."""
        return np.array(self.values or (0,), np.int64)[np.frombuffer(self.which, np.int32)]

    def replaced(self, places: Longs, values: Sequence[int]) -> _Pattern:
        """With other values of some nodes."""
        if not len(places):
            return self
        column = self.column()
        column[places] = values
        return _Pattern.of(column)


@dataclass(frozen=True, slots=True, eq=False)
class RankPeers:
    """The values of one rank: group id per collective (0: all ranks), peer per message (-1: not stated)."""

    rank: int
    groups: _Pattern
    peers: _Pattern

    def group_column(self) -> Longs:
        """The group of each collective."""
        return self.groups.column()

    def peer_column(self) -> Longs:
        """The peer of each message."""
        return self.peers.column()


@dataclass(frozen=True, slots=True, eq=False)
class PeerRows:
    """Which attribute rows state the values of :class:`RankPeers`: these differ between ranks of a class."""

    group: Longs
    peer: Longs


def rank_peers(
    columns: EtColumns, facts: AttributeFacts, rank: int, groups: Groups, faults: Faults
) -> tuple[RankPeers, PeerRows]:
    """The values of one rank, and the attribute rows that state them."""
    is_collective = columns.type == NodeType.COMM_COLL
    group, group_rows = _groups(columns, facts, is_collective, groups, faults)
    is_send, is_recv = columns.type == NodeType.COMM_SEND, columns.type == NodeType.COMM_RECV
    peer = np.full(len(columns), -1, np.int64)
    rows: list[Longs] = []
    owns: list[Stated] = []
    for name, far in (("comm_dst", is_send), ("comm_src", is_recv)):
        stated = facts.integers(name)
        other = is_recv if far is is_send else is_send
        good = stated.where(far[stated.node] & (stated.value >= 0) & (stated.value < MAX_DEVICES))
        strange = np.zeros(len(columns), np.bool_)
        strange[stated.node[far[stated.node] & (stated.value >= MAX_DEVICES)]] = True
        limit = f"{name} is past {MAX_DEVICES:,}, the limit of ranks"
        faults.nodes("ET014", columns, strange, limit, hint="name a rank of the job; was the file damaged?")
        peer[good.node] = good.value
        own = stated.where(other[stated.node])
        wrong = np.zeros(len(columns), np.bool_)
        wrong[own.node[own.value != rank]] = True
        faults.nodes("ET014", columns, wrong, f"{name} is not the rank of this file, {rank}")
        rows.append(good.row)
        owns.append(own.where(own.value == rank))
    # The own side goes with the peer; without one it stays an attribute.
    rows += [own.row[peer[own.node] >= 0] for own in owns]
    message = is_send | is_recv
    values = RankPeers(rank, _Pattern.of(group[is_collective]), _Pattern.of(peer[message]))
    return values, PeerRows(group_rows, np.sort(np.concatenate(rows)))


def _groups(
    columns: EtColumns, facts: AttributeFacts, is_collective: Bools, groups: Groups, faults: Faults
) -> tuple[Longs, Longs]:
    """Group id per node, and the attribute rows that state one; the world's spellings stay attributes."""
    found = facts.texts("pg_name")
    found = found.where(is_collective[found.node])
    texts, place = facts.distinct(found)
    ids = np.array([groups.find(text) for text in texts] or [0], np.int64)[place]
    bad = np.zeros(len(columns), np.bool_)
    bad[found.node[ids < 0]] = True
    faults.repaired(
        "ET018",
        columns,
        bad,
        "pg_name is no group of comm_group.json",
        repair="taken as one of all ranks",
        hint="put the comm_group.json of this trace beside it, or name it with `comm_groups`",
    )
    group = np.zeros(len(columns), np.int64)
    group[found.node] = np.maximum(ids, 0)
    return group, found.row[ids > 0]


def _vectors(patterns: Sequence[_Pattern]) -> tuple[list[Longs], Longs]:
    """Distinct vectors over the ranks, and which of them each node has."""
    distinct = {pattern.which: place for place, pattern in reversed(list(enumerate(patterns)))}
    shapes = list(distinct)
    stacked = np.stack([np.frombuffer(which, np.int32) for which in shapes])
    columns, inverse = np.unique(stacked, axis=1, return_inverse=True)
    shape_of = {which: place for place, which in enumerate(shapes)}
    vectors = [
        np.array([pattern.values[column[shape_of[pattern.which]]] for pattern in patterns], np.int64)
        for column in columns.T.tolist()
    ]
    return vectors, inverse.reshape(-1).astype(np.int64)


def communicators(groups: Groups, num_ranks: int) -> dict[int, int]:
    """For each group id, how many lower ids name a group of the same ranks; the ids that name all ranks come
    behind the group without a name.
    """
    seen: dict[tuple[int, ...], int] = {}
    found: dict[int, int] = {}
    for number in sorted(groups):
        members = tuple(sorted(groups[number]))
        # A job may be larger than memory: its ranks are listed where a group lists as many.
        is_world = len(members) == num_ranks and members == tuple(range(num_ranks))
        found[number] = seen.get(members, int(is_world))
        seen[members] = found[number] + 1
    return found


def _group_set_of(vector: Longs, groups: Groups, of_same: Mapping[int, int]) -> GroupSet:
    """The group set whose groups are those named in ``vector``, by ascending id."""
    ids = sorted(set(vector.tolist()))
    lists = [groups[number] for number in ids]
    equal = len({len(members) for members in lists}) == 1
    found = compress_groups(np.array(lists, np.int64)) if equal else ExplicitGroups.from_rows(lists)
    return replace(found, communicator=of_same[ids[0]])


@dataclass(slots=True, eq=False)
class _Part:
    """Ranks that can be one class, while others are tried: per vector, which group each rank is taken by (and
    the communicator of all of them), and who is sent to.
    """

    ranks: list[RankPeers] = field(default_factory=list[RankPeers])
    taken: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    known: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    communicator: dict[int, int] = field(default_factory=dict[int, int])
    peers: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def admits(self, rank: int, named: Sequence[int], peers: Sequence[int], job: _Named) -> bool:
        """Whether a rank fits: each group is that of all its members here or of none, its peers are free."""
        for place, number in enumerate(named):
            if not number:
                continue
            if self.communicator.get(place, job.of_same[number]) != job.of_same[number]:
                return False
            if (place, number) in self.known:
                if self.taken.get((place, rank), number) != number:
                    return False
            elif any((place, member) in self.taken for member in (rank, *job.groups[number])):
                return False
        return not any((place, peer) in self.peers for place, peer in enumerate(peers) if peer >= 0)

    def add(self, rank: RankPeers, named: Sequence[int], peers: Sequence[int], job: _Named) -> None:
        self.ranks.append(rank)
        self.peers.update(enumerate(peers))
        for place, number in enumerate(named):
            if number and (place, number) not in self.known:
                self.known.add((place, number))
                self.communicator[place] = job.of_same[number]
                for member in job.groups[number]:
                    self.taken[place, member] = number
            if number:
                self.taken.setdefault((place, rank.rank), number)


@dataclass(frozen=True, slots=True)
class _Named:
    """The groups of a job, and which of those of the same ranks each is."""

    groups: Groups
    of_same: Mapping[int, int]


def expressible(ranks: Sequence[RankPeers], groups: Groups, num_ranks: int) -> list[list[RankPeers]]:
    """Ranks of equal files, cut into as few classes as come by taking them in order: in each, the groups of a
    node are disjoint and its messages a permutation.

    O(ranks x vectors) where one class will do, and once more per class otherwise.
    """
    job = _Named(groups, communicators(groups, num_ranks))
    named, peers = _by_rank([rank.groups for rank in ranks]), _by_rank([rank.peers for rank in ranks])
    parts: list[_Part] = []
    for rank, mine, others in zip(ranks, named, peers, strict=True):
        fitting = (part for part in parts if part.admits(rank.rank, mine, others, job))
        part = next(fitting, None)
        if part is None:
            part = _Part()
            parts.append(part)
        part.add(rank, mine, others, job)
    return [part.ranks for part in parts]


def _by_rank(patterns: Sequence[_Pattern]) -> list[list[int]]:
    """The values of each rank, one for each distinct vector over all ranks."""
    if not patterns[0].which:
        return [[] for _ in patterns]
    values: list[list[int]] = np.stack(_vectors(patterns)[0], axis=1).tolist()
    return values


def highest_rank(ranks: Sequence[RankPeers], groups: Groups) -> int:
    """The highest rank that ranks of a job are or name."""
    ids = {number for rank in ranks for number in rank.groups.values if number}
    named = [max(groups[number]) for number in ids]
    return max([*named, *(max((rank.rank, *rank.peers.values)) for rank in ranks)])


def peers_of_class(
    columns: EtColumns, ranks: Sequence[RankPeers], rows: PeerRows, groups: Groups, num_ranks: int
) -> Peers:
    """The symbolic form over the ranks of a class, which must be :func:`expressible` as one."""
    sets: dict[GroupSet, int] = {}
    group_set = np.full(int((columns.type == NodeType.COMM_COLL).sum()), -1, np.int64)
    if len(group_set):
        vectors, which = _vectors([rank.groups for rank in ranks])
        of_same = communicators(groups, num_ranks)
        chosen = [
            sets.setdefault(_group_set_of(vector, groups, of_same), len(sets)) if vector.all() else -1
            for vector in vectors
        ]
        group_set = np.array(chosen, np.int64)[which]
    is_send = columns.type == NodeType.COMM_SEND
    sends = is_send[is_send | (columns.type == NodeType.COMM_RECV)]
    permutations: dict[Permutation, int] = {}
    permutation = np.full(len(sends), -1, np.int64)
    if len(sends):
        vectors, which = _vectors([rank.peers for rank in ranks])
        owners = [rank.rank for rank in ranks]
        size = 1 + max(num_ranks - 1, *owners, *(int(vector.max()) for vector in vectors))
        for number, vector in enumerate(vectors):
            for direction in (True, False):
                nodes = (which == number) & (sends == direction)
                if nodes.any() and (vector >= 0).all():
                    found = _permutation(owners, vector.tolist(), size, sends=direction)
                    permutation[nodes] = permutations.setdefault(found, len(permutations))
    return Peers(group_set, permutation, tuple(sets), tuple(permutations), rows.group, rows.peer)


def _permutation(owners: Sequence[int], peers: Sequence[int], size: int, *, sends: bool) -> Permutation:
    pairs = zip(owners, peers, strict=True) if sends else zip(peers, owners, strict=True)
    return Permutation.from_pairs(list(pairs), size)


def without_rows(columns: EtColumns, rows: PeerRows) -> tuple[Bools, ByteRows]:
    """What ranks of a class share: which attribute rows to leave out, and the payloads that remain."""
    attrs = columns.attrs
    hidden = np.zeros(len(attrs), np.bool_)
    hidden[rows.group] = True
    hidden[rows.peer] = True
    kept = np.flatnonzero(attrs.has_payload & ~hidden)
    payload_rows = attrs.bits[kept].view(np.int64)
    return hidden, attrs.payload.take(payload_rows)
