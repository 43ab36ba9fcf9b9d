"""Process groups and message peers of many ranks, converted to group sets and permutations.

Within a rank class only these values differ. A collective has a group id on each rank, and a message a peer
rank. Over all ranks of a class the values of a node form a vector, which becomes a group set (of a
collective) or a permutation (of a send or a receive). This is impossible if groups overlap or several
messages have one receiver; such ranks are split into several classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hespas.converters.chakra.checks import Faults
from hespas.converters.chakra.comm_groups import NamedGroups
from hespas.converters.chakra.contract import AttributeFacts, AttributeValues
from hespas.converters.chakra.wire import Bools, ByteRows, EtColumns, Longs
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import ExplicitGroups, GroupSet, Permutation, compress_groups
from hespas.schemas.chakra.tables import NodeType

__all__ = [
    "ClassPeers",
    "Groups",
    "PeerRows",
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
class ClassPeers:
    """Group sets and permutations of a class. ``group_set`` has, for each collective, an index into
    ``group_sets``. ``permutation`` has, for each message, an index into ``permutations``. ``group_rows`` and
    ``peer_rows`` are the attribute rows in the file from which they were read.
    """

    group_set: Longs
    permutation: Longs
    group_sets: tuple[GroupSet, ...]
    permutations: tuple[Permutation, ...]
    group_rows: Longs
    peer_rows: Longs


@dataclass(frozen=True, slots=True, eq=False)
class _Pattern:
    """Compressed column of integers, one per node, with few distinct ``values``. ``which`` has, for each
    node, the index of its value as 32 bits.
    """

    values: tuple[int, ...]
    which: bytes

    @classmethod
    def of(cls, column: Longs) -> _Pattern:
        """Compress a column; the distinct values are in order of first appearance."""
        values: list[int] = column.tolist()
        numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
        which = np.fromiter(map(numbers.__getitem__, values), np.int32, len(values))
        return cls(tuple(numbers), which.tobytes())

    def column(self) -> Longs:
        """Return the column with the value of each node."""
        return np.array(self.values or (0,), np.int64)[np.frombuffer(self.which, np.int32)]

    def replaced(self, places: Longs, values: Sequence[int]) -> _Pattern:
        """Return the compressed column with other ``values`` at the nodes ``places``."""
        if not len(places):
            return self
        column = self.column()
        column[places] = values
        return _Pattern.of(column)


@dataclass(frozen=True, slots=True, eq=False)
class RankPeers:
    """Process groups and message peers that the file of one rank states. ``groups`` has the group id of each
    collective (0: all ranks), ``peers`` the peer of each message (-1: not stated).
    """

    rank: int
    groups: _Pattern
    peers: _Pattern


@dataclass(frozen=True, slots=True, eq=False)
class PeerRows:
    """Rows of the attributes of a file that state process groups (``group``) and message peers (``peer``).
    Their values may differ between the ranks of a class.
    """

    group: Longs
    peer: Longs


def rank_peers(
    columns: EtColumns, facts: AttributeFacts, rank: int, groups: Groups, faults: Faults
) -> tuple[RankPeers, PeerRows]:
    """Return the process groups and message peers of one rank, and the attribute rows that state them."""
    is_collective = columns.type == NodeType.COMM_COLL
    names = facts.texts("pg_name")
    names = names.where(is_collective[names.node])
    texts, index = facts.distinct(names)
    ids = np.array([groups.find(text) for text in texts] or [0], np.int64)[index]
    faults.repaired(
        "ET018",
        columns,
        names.node[ids < 0],
        "pg_name is not a group in comm_group.json",
        repair="treated as a group of all ranks",
        hint="put the comm_group.json of this trace into its folder, or name it with `comm_groups`",
    )
    group = np.zeros(len(columns), np.int64)
    group[names.node] = np.maximum(ids, 0)
    group_rows = names.row[ids > 0]  # names of the group of all ranks stay attributes
    is_send, is_recv = columns.type == NodeType.COMM_SEND, columns.type == NodeType.COMM_RECV
    peer = np.full(len(columns), -1, np.int64)
    rows: list[Longs] = []
    owns: list[AttributeValues] = []
    for name, far in (("comm_dst", is_send), ("comm_src", is_recv)):
        values_of_name = facts.integers(name)
        other = is_recv if far is is_send else is_send
        far_values = values_of_name.where(far[values_of_name.node])
        good = far_values.where((far_values.value >= 0) & (far_values.value < MAX_DEVICES))
        strange = far_values.node[far_values.value >= MAX_DEVICES]
        limit = f"{name} is above the limit of {MAX_DEVICES:,} ranks"
        faults.nodes("ET014", columns, strange, limit, hint="name a rank of the job, or copy the file again")
        peer[good.node] = good.value
        own = values_of_name.where(other[values_of_name.node])
        wrong = own.node[own.value != rank]
        faults.nodes("ET014", columns, wrong, f"{name} is not the rank of this file, {rank}")
        rows.append(good.row)
        owns.append(own.where(own.value == rank))
    # The own rank is modelled together with the peer; without a peer it stays an attribute.
    rows += [own.row[peer[own.node] >= 0] for own in owns]
    message = is_send | is_recv
    values = RankPeers(rank, _Pattern.of(group[is_collective]), _Pattern.of(peer[message]))
    return values, PeerRows(group_rows, np.sort(np.concatenate(rows)))


def _vectors(patterns: Sequence[_Pattern]) -> tuple[list[Longs], Longs]:
    """Return the distinct vectors of values that a node has on all ranks, and for each node the index of its
    vector. ``patterns`` has the values of all nodes on each rank.
    """
    distinct = {pattern.which: index for index, pattern in reversed(list(enumerate(patterns)))}
    shapes = list(distinct)
    stacked = np.stack([np.frombuffer(which, np.int32) for which in shapes])
    columns, inverse = np.unique(stacked, axis=1, return_inverse=True)
    shape_of = {which: index for index, which in enumerate(shapes)}
    vectors = [
        np.array([pattern.values[column[shape_of[pattern.which]]] for pattern in patterns], np.int64)
        for column in columns.T.tolist()
    ]
    return vectors, inverse.reshape(-1).astype(np.int64)


def communicators(groups: Groups, num_ranks: int) -> dict[int, int]:
    """Return the communicator number of each group. It distinguishes groups with the same ranks: it is the
    number of such groups with a lower id. The default group of all ranks counts as the first group of all
    ranks.
    """
    seen: dict[tuple[int, ...], int] = {}
    index_of: dict[int, int] = {}
    for number in sorted(groups):
        members = tuple(sorted(groups[number]))
        # A job may be larger than memory: list its ranks only if the group has as many members.
        is_world = len(members) == num_ranks and members == tuple(range(num_ranks))
        index_of[number] = seen.get(members, int(is_world))
        seen[members] = index_of[number] + 1
    return index_of


@dataclass(slots=True, eq=False)
class _RankPartition:
    """Rank class under construction: ranks whose groups and messages fit group sets and permutations.

    A vector is a distinct combination of values that a node has over all ranks. ``taken`` has the group of
    each (vector, rank), ``communicator`` the communicator number of each vector, and ``peers`` the (vector,
    receiver) pairs that are in use.
    """

    ranks: list[RankPeers] = field(default_factory=list[RankPeers])
    taken: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    assigned: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    communicator: dict[int, int] = field(default_factory=dict[int, int])
    peers: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def admits(self, rank: int, named: Sequence[int], peers: Sequence[int], job: _GroupIndex) -> bool:
        """Return True if a rank can join the class. No member of its groups may already be in another group
        of the same collective, and no rank of the class may have the same message peer. ``named`` (group ids)
        and ``peers`` are the rank's values, one per distinct vector (see the class).
        """
        for vector, number in enumerate(named):
            if not number:
                continue
            if self.communicator.get(vector, job.of_same[number]) != job.of_same[number]:
                return False
            if (vector, number) in self.assigned:
                if self.taken.get((vector, rank), number) != number:
                    return False
            elif any((vector, member) in self.taken for member in (rank, *job.groups[number])):
                return False
        return not any((vector, peer) in self.peers for vector, peer in enumerate(peers) if peer >= 0)

    def add(self, rank: RankPeers, named: Sequence[int], peers: Sequence[int], job: _GroupIndex) -> None:
        """Add a rank with its groups and peers to the class."""
        self.ranks.append(rank)
        self.peers.update(enumerate(peers))
        for vector, number in enumerate(named):
            if number and (vector, number) not in self.assigned:
                self.assigned.add((vector, number))
                self.communicator[vector] = job.of_same[number]
                for member in job.groups[number]:
                    self.taken[vector, member] = number
            if number:
                self.taken.setdefault((vector, rank.rank), number)


@dataclass(frozen=True, slots=True)
class _GroupIndex:
    """Process groups of a job, with the communicator number of each group (see :func:`communicators`)."""

    groups: Groups
    of_same: Mapping[int, int]


def expressible(ranks: Sequence[RankPeers], groups: Groups, num_ranks: int) -> list[list[RankPeers]]:
    """Divide ranks with equal files into few classes, greedily. In each class the groups of a collective are
    disjoint and the messages of a node form a permutation.

    O(ranks x vectors) if one class suffices, where a vector is a distinct combination of values of a node
    over all ranks. Each further class takes one more pass.
    """
    job = _GroupIndex(groups, communicators(groups, num_ranks))
    named, peers = _by_rank([rank.groups for rank in ranks]), _by_rank([rank.peers for rank in ranks])
    parts: list[_RankPartition] = []
    for rank, mine, others in zip(ranks, named, peers, strict=True):
        fitting = (part for part in parts if part.admits(rank.rank, mine, others, job))
        part = next(fitting, None)
        if part is None:
            part = _RankPartition()
            parts.append(part)
        part.add(rank, mine, others, job)
    return [part.ranks for part in parts]


def _by_rank(patterns: Sequence[_Pattern]) -> list[list[int]]:
    """Return, for each rank, its value in every distinct combination, as :func:`expressible` needs them."""
    if not patterns[0].which:
        return [[] for _ in patterns]
    values: list[list[int]] = np.stack(_vectors(patterns)[0], axis=1).tolist()
    return values


def highest_rank(ranks: Sequence[RankPeers], groups: Groups) -> int:
    """Return the highest rank among ``ranks``, their groups and their message peers."""
    ids = {number for rank in ranks for number in rank.groups.values if number}
    named = [max(groups[number]) for number in ids]
    return max([*named, *(max((rank.rank, *rank.peers.values)) for rank in ranks)])


def peers_of_class(
    columns: EtColumns, ranks: Sequence[RankPeers], rows: PeerRows, groups: Groups, num_ranks: int
) -> ClassPeers:
    """Return the group sets and permutations of a class, inferred from the groups and peers of all its
    ``ranks``. :func:`expressible` must have returned these ranks as one class.
    """
    sets: dict[GroupSet, int] = {}
    group_set = np.full(int((columns.type == NodeType.COMM_COLL).sum()), -1, np.int64)
    if len(group_set):
        vectors, which = _vectors([rank.groups for rank in ranks])
        of_same = communicators(groups, num_ranks)
        chosen = np.full(len(vectors), -1, np.int64)
        for number, vector in enumerate(vectors):
            if not vector.all():
                continue
            ids = sorted(set(vector.tolist()))
            lists = [groups[group] for group in ids]
            equal = len({len(members) for members in lists}) == 1
            group_set_of = (
                compress_groups(np.array(lists, np.int64)) if equal else ExplicitGroups.from_rows(lists)
            )
            group_set_of = replace(group_set_of, communicator=of_same[ids[0]])
            chosen[number] = sets.setdefault(group_set_of, len(sets))
        group_set = chosen[which]
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
                    peers = vector.tolist()
                    pairs = zip(owners, peers, strict=True) if direction else zip(peers, owners, strict=True)
                    new_permutation = Permutation.from_pairs(list(pairs), size)
                    permutation[nodes] = permutations.setdefault(new_permutation, len(permutations))
    return ClassPeers(group_set, permutation, tuple(sets), tuple(permutations), rows.group, rows.peer)


def without_rows(columns: EtColumns, rows: PeerRows) -> tuple[Bools, ByteRows]:
    """Hide the attributes that differ between the ranks of a class. Return a mask of these rows, and the
    strings and lists of the remaining rows.
    """
    attrs = columns.attrs
    hidden = np.zeros(len(attrs), np.bool_)
    hidden[rows.group] = True
    hidden[rows.peer] = True
    remaining = np.flatnonzero(attrs.has_payload & ~hidden)
    payload_rows = attrs.bits[remaining].view(np.int64)
    return hidden, attrs.payload.take(payload_rows)
