"""Ranks that are alike, found by colour refinement over their groups and peers.

Refinement starts from the program of each rank. Then it separates ranks whose groups or peers are in
different classes, until nothing changes (the result is an equitable partition). Two predicates decide which
differences count:

- Ranks *behave alike* (:func:`behave_alike`) if they do the same at the same time. A communication event ends
  with its last arrival, so only the set of classes of its members matters, not their counts. By induction
  over the events of a run, ranks of one class do the same at the same time, so one rank per class is
  simulated.
- Ranks are *indistinguishable* (:func:`indistinguishable`) if no rule on a job can distinguish them, so that
  one rank per class is checked. The counts of members matter, and so do both ends of each message.

Classes are compared by 64-bit fingerprints.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hespas.files.limits import refuse_comparison
from hespas.graph import ABSENT, GroupSet, NodeKind, OpGraph, Permutation, StridedGroups, Workload
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.groups import membership_of, peers_of, salted

__all__ = [
    "NONE",
    "RECEIVES",
    "SENDS",
    "BehaviourClasses",
    "RankKinds",
    "Relations",
    "behave_alike",
    "every_rank",
    "group_rows",
    "indistinguishable",
    "permutation_rows",
    "relations_of",
]


_Key = TypeVar("_Key", bound=Hashable)
_Words = NDArray[np.uint64]
_MOST_PATTERNS = 24
"""Number of permutations above which ranks that use them count as different: see ``_patterns``."""

NONE = -1
"""No group, or no peer."""

SENDS = (int(NodeKind.SEND), int(NodeKind.PERMUTE))

RECEIVES = (int(NodeKind.RECV), int(NodeKind.PERMUTE))


@dataclass(frozen=True, slots=True, eq=False)
class Relations:
    """Distinct group sets and permutations of a job, over all ranks. The last group set has all ranks, for
    collectives without a group set.

    ``rank_class`` has shape ``(ranks,)``. ``group``, of shape ``(sets, ranks)``, is the number of the group
    of each rank; groups with equal members have the same number in all sets. ``members`` lists the members of
    each group. ``label``, of the same shape as ``group``, is the first set in which the rank's class runs a
    collective of the same group (``NONE``: it runs none). ``target`` and ``source``, of shape
    ``(permutations, ranks)``, are the ranks to which and from which a rank sends and receives. ``sends``,
    ``receives`` and ``permutes``, of shape ``(classes, permutations)``, are True if a class has such
    operations along a permutation.
    """

    rank_class: IntArray
    sets: dict[GroupSet, int]
    permutations: dict[Permutation, int]
    group: IntArray
    label: IntArray
    members: tuple[tuple[int, ...], ...]
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
        """Return the number of groups that some rank calls and that have members without a program."""
        used = self.group[self.label != NONE]
        here = np.zeros(len(self.members), np.int64)
        for row in self.group:
            mine = (row != NONE) & (self.rank_class != ABSENT)
            np.maximum.at(here, row[mine], np.bincount(row[mine], minlength=len(here))[row[mine]])
        return int((here < self.num_listed)[np.unique(used)].sum())

    @property
    def num_listed(self) -> IntArray:
        """Return the number of members in the list of each group."""
        return np.fromiter(map(len, self.members), np.int64, len(self.members))


def relations_of(workload: Workload, path: str = "", *, only_executed: bool = True) -> Relations:
    """Return the relations of a workload, by default only of nodes that are executed.

    O(ranks x (sets + permutations)). Raises ``BudgetError`` if the job has too many ranks to compare them one
    by one; ``path`` is the file of the job, for the message.
    """
    ranks = workload.num_ranks
    refuse_comparison(ranks, path or workload.name)
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
    doing = [_doing(graph, permutations, only_executed=only_executed) for graph in workload.classes]
    table = np.zeros((len(workload.classes), len(sets)), np.bool_)
    for index, graph in enumerate(workload.classes):
        runs = (graph.executions[graph.collectives.node] != 0) | (not only_executed)
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
        members=tuple(listed),
        target=np.stack([peer.target for peer in peers]) if peers else none,
        source=np.stack([peer.source for peer in peers]) if peers else none,
        sends=np.stack([operations[0] for operations in doing]),
        receives=np.stack([operations[1] for operations in doing]),
        permutes=np.stack([operations[2] for operations in doing]),
    )


def _numbered(*keys: _Key) -> dict[_Key, int]:
    return {key: number for number, key in enumerate(dict.fromkeys(keys))}


def group_rows(graph: OpGraph, sets: dict[GroupSet, int]) -> IntArray:
    """Return for each collective of a graph the number of its group set in ``sets``."""
    numbers = [*(sets[groups] for groups in graph.group_sets), len(sets) - 1]
    return np.array(numbers, np.int64)[graph.collectives.group_set]


def permutation_rows(graph: OpGraph, permutations: dict[Permutation, int]) -> IntArray:
    """Return for each message of a graph the number of its permutation in ``permutations``; ``NONE`` if it
    states none, and for messages over the host link.
    """
    numbers = [*(permutations[entry] for entry in graph.permutations), NONE]
    rows: IntArray = np.array(numbers, np.int64)[graph.p2p.permutation]
    return np.where(graph.p2p.host, NONE, rows)


def _doing(
    graph: OpGraph, permutations: dict[Permutation, int], *, only_executed: bool
) -> tuple[BoolArray, BoolArray, BoolArray]:
    rows, kinds = permutation_rows(graph, permutations), graph.kind[graph.p2p.node]
    counts = rows != NONE
    counts &= (graph.executions[graph.p2p.node] != 0) | (not only_executed)
    tables: list[BoolArray] = []
    for chosen in (SENDS, RECEIVES, (int(NodeKind.PERMUTE),)):
        table = np.zeros(len(permutations), np.bool_)
        table[rows[counts & np.isin(kinds, chosen)]] = True
        tables.append(table)
    return tables[0], tables[1], tables[2]


@dataclass(frozen=True, slots=True, eq=False)
class BehaviourClasses:
    """Classes of ranks that behave alike.

    ``behaviour``, of shape ``(ranks,)``, is the class of each rank (-1: absent); classes are numbered in the
    order of their first ranks. ``first`` is the first rank of each class and ``count`` its number of ranks.
    ``group_class`` has one entry per group of :attr:`Relations.group`. Groups have the same number if their
    members have the same classes and call the group alike, so that they run the same collectives at the same
    times. ``num_members`` is the number of different members of each group. Members of one class that call
    the group alike count once.
    """

    behaviour: IntArray
    first: IntArray
    count: IntArray
    group_class: IntArray
    num_members: IntArray


class RankKinds(NamedTuple):
    """Classes of indistinguishable ranks. ``kind`` is the class of each rank, numbered in the order of their
    first ranks.

    ``group_word`` is a fingerprint of each group of :attr:`Relations.group`. It is equal for groups with the
    same kinds of members and equal numbers of each kind.
    """

    kind: IntArray
    group_word: _Words


def behave_alike(relations: Relations, start: IntArray, *, both_ways: bool) -> BehaviourClasses:
    """Return the largest classes of ranks that behave alike.

    ``start`` separates ranks that differ in other properties. ``both_ways``: a send also waits for its
    receiver. O(rounds x ranks x (sets + permutations)), vectorised.
    """
    behaviour, groups = _refined(relations, start, both_ways=both_ways, counts_members=False)
    return _result(behaviour, groups.word, groups.num_members)


def indistinguishable(relations: Relations) -> RankKinds:
    """Return the largest classes of indistinguishable ranks in a job without absent ranks. The time is as for
    :func:`behave_alike`.
    """
    kind, groups = _refined(relations, relations.rank_class, both_ways=True, counts_members=True)
    return RankKinds(kind, groups.word)


def every_rank(relations: Relations) -> BehaviourClasses:
    """Return classes of one rank each, for all ranks that are present."""
    here = relations.rank_class != ABSENT
    behaviour = np.where(here, np.cumsum(here) - 1, -1)
    groups = _group_words(relations, _Memberships.of(relations), behaviour, counts_members=False)
    return _result(behaviour, groups.word, groups.num_members)


class _Groups(NamedTuple):
    """Process groups during the search for ranks that behave alike: a fingerprint of each group, and its
    number of different members.
    """

    word: _Words
    num_members: IntArray


def _refined(
    relations: Relations, start: IntArray, *, both_ways: bool, counts_members: bool
) -> tuple[IntArray, _Groups]:
    """Refine classes of ranks until the ranks of each class are indistinguishable. ``start`` has the initial
    classes. Return the class of each rank (-1: absent), numbered in the order of their first ranks, and the
    fingerprints of groups.
    """
    ranks = np.flatnonzero(relations.rank_class != ABSENT)
    members = _Memberships.of(relations)
    is_called = np.zeros(len(relations.members), np.bool_)
    is_called[members.group[members.label != NONE]] = True
    word = salted(start.astype(np.uint64), 1) ^ salted(_patterns(relations), 2)
    num_known = 0
    while True:
        # Number equal words in order of their first ranks.
        _, first, inverse = np.unique(word[ranks], return_index=True, return_inverse=True)
        number_of = np.empty(len(first), np.int64)
        number_of[np.argsort(first)] = np.arange(len(first))
        behaviour = np.full(relations.num_ranks, -1, np.int64)
        behaviour[ranks] = number_of[inverse.reshape(-1)]
        groups = _group_words(relations, members, behaviour, counts_members=counts_members)
        if len(first) == num_known:
            return behaviour, groups
        num_known = len(first)
        word = salted((behaviour + 1).astype(np.uint64), 3)
        for row, group in enumerate(relations.group):
            matters = relations.label[row] == row
            if counts_members:  # also a group that others call, and the rank does not
                matters = (group != NONE) & is_called[group]
            word = salted(word ^ np.where(matters, groups.word[group], np.uint64(0)), 2 * row + 10)
        for row in range(len(relations.target)):
            # A message to an absent rank has no peer. At an open end a permutation moves nothing and does
            # not wait, as if the rank were its own peer; but its messages are fewer.
            whose = relations.rank_class
            permutes = relations.permutes[whose, row] & (not counts_members)
            of_target, of_source = (
                np.where(peer != NONE, behaviour[peer], -1)
                for peer in (relations.target[row], relations.source[row])
            )
            of_target = np.where(permutes & (of_target < 0), behaviour, of_target)
            of_source = np.where(permutes & (of_source < 0), behaviour, of_source)
            sends, receives = relations.sends[whose, row], relations.receives[whose, row]
            seen_target = np.where(sends & both_ways, of_target + 1, 0)
            seen_source = np.where(receives, of_source + 1, 0)
            for salt, seen in enumerate((seen_target.astype(np.uint64), seen_source.astype(np.uint64))):
                word = salted(word ^ seen, 4 * row + salt + 7_000_001)


def _result(behaviour: IntArray, groups: _Words, num_members: IntArray) -> BehaviourClasses:
    ranks = np.flatnonzero(behaviour >= 0)
    first, count = np.unique(behaviour[ranks], return_index=True, return_counts=True)[1:]
    group_class = np.unique(groups, return_inverse=True)[1].reshape(-1)
    return BehaviourClasses(behaviour, ranks[first], count, group_class, num_members)


class _Memberships(NamedTuple):
    """Memberships of ranks in groups, each listed once. It also has the group set through which the class of
    the rank runs collectives of the group.
    """

    group: IntArray
    rank: IntArray
    label: IntArray

    @classmethod
    def of(cls, relations: Relations) -> _Memberships:
        row, rank = np.nonzero((relations.group != NONE) & (relations.rank_class != ABSENT))
        group, label = relations.group[row, rank], relations.label[row, rank]
        order = np.argsort(-label, kind="stable")  # a set that is not called comes last
        once = order[np.unique((group * relations.num_ranks + rank)[order], return_index=True)[1]]
        return cls(group[once], rank[once], label[once])


def _group_words(
    relations: Relations, members: _Memberships, behaviour: IntArray, *, counts_members: bool
) -> _Groups:
    """Return a fingerprint of each group, and its number of different members.

    The fingerprint is computed from the pairs (class, label) of the members. If ``counts_members`` is True,
    it also depends on the number of members with each pair, and on the number of all members.
    """
    labels = len(relations.group) + 1
    kinds = (int(behaviour.max()) + 1) * labels
    pairs, counts = np.unique(
        members.group * kinds + behaviour[members.rank] * labels + members.label + 1, return_counts=True
    )
    total = np.zeros(len(relations.members), np.uint64)
    if counts_members:
        total += salted(relations.num_listed.astype(np.uint64), 6)
    else:
        # Ignore a set that is not called if its class calls the same group through another set.
        calls = np.append(pairs[1:] // labels == pairs[:-1] // labels, False)[: len(pairs)]
        pairs = pairs[(pairs % labels > 0) | ~calls]
        counts = np.ones(len(pairs), np.int64)
    word = salted((pairs % kinds).astype(np.uint64), 4) * counts.astype(np.uint64)
    np.add.at(total, pairs // kinds, word)
    return _Groups(salted(total, 5), np.bincount(pairs // kinds, minlength=len(relations.members)))


def _patterns(relations: Relations) -> _Words:
    """Return a fingerprint of the permutations of each rank: the pairs of permutations along which it
    exchanges messages with the same peer. Messages along such permutations are matched with each other, so
    ranks with different pairs can behave differently.
    """
    ranks = np.arange(relations.num_ranks)
    pattern = np.zeros(relations.num_ranks, np.uint64)
    whose = relations.rank_class
    count = len(relations.target)
    if count > _MOST_PATTERNS:
        moving = (relations.sends | relations.receives)[whose].any(axis=1)
        return np.where(moving, ranks + 1, 0).astype(np.uint64)
    ways = (
        (relations.target, relations.sends, relations.source, relations.receives),
        (relations.source, relations.receives, relations.target, relations.sends),
    )
    for salt, (peers, mine, back, theirs) in enumerate(ways):
        for row, peer in enumerate(peers):
            leads = mine[whose, row] & (peer != NONE)
            for other in range(count):
                # The peer, and this rank, communicate with each other through ``other`` as well.
                answers = leads & theirs[whose[peer], other] & (back[other][peer] == ranks)
                same = leads & mine[whose, other] & (peers[other] == peer)
                word = answers.astype(np.uint64) + np.uint64(2) * same.astype(np.uint64)
                pattern = salted(pattern ^ word, (salt * count + row) * count + other)
    return pattern
