"""Behaviour classes of ranks: ranks that do the same at the same time, found by colour refinement.

Refinement starts from the program of each rank and its speed. Then it separates ranks whose groups or peers
are in different classes, until nothing changes (the result is an equitable partition). A communication event
ends with its last arrival, so only the set of classes of its members matters, not their counts. By induction
over the events of a run, ranks of one class do the same at the same time, so one rank per class is simulated.
Classes are compared by 64-bit fingerprints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph import ABSENT
from hespas.graph.columns import IntArray
from hespas.graph.groups import salted
from hespas.simulator.job.relations import NONE, Relations

__all__ = ["BehaviourClasses", "every_rank", "refined"]

_Words = NDArray[np.uint64]
_MOST_PATTERNS = 24
"""Number of permutations above which ranks that use them count as different: see ``_patterns``."""


@dataclass(frozen=True, slots=True, eq=False)
class BehaviourClasses:
    """Behaviour classes of ranks.

    ``behaviour`` is the class of each rank (-1: absent), shape ``(ranks,)``, numbered by first ranks.
    ``first`` is the first rank of each class and ``count`` its number of ranks. ``group_class``, with one
    entry per group of :attr:`hespas.simulator.job.relations.Relations.group`, numbers groups whose members
    have the same classes and call it alike: they run the same collectives at the same times. ``num_members``
    counts the different members of each group, by class and by the set of their call.
    """

    behaviour: IntArray
    first: IntArray
    count: IntArray
    group_class: IntArray
    num_members: IntArray


def refined(relations: Relations, start: IntArray, *, both_ways: bool) -> BehaviourClasses:
    """Return the coarsest behaviour classes. ``start`` separates ranks by their own properties;
    ``both_ways``: a send also waits for its receiver. O(rounds x ranks x (sets + permutations)), vectorised.
    """
    ranks = np.flatnonzero(relations.rank_class != ABSENT)
    word = salted(start.astype(np.uint64), 1) ^ salted(_patterns(relations), 2)
    num_known = 0
    while True:
        # Number equal words in order of their first ranks.
        _, first, inverse = np.unique(word[ranks], return_index=True, return_inverse=True)
        number_of = np.empty(len(first), np.int64)
        number_of[np.argsort(first)] = np.arange(len(first))
        behaviour = np.full(relations.num_ranks, -1, np.int64)
        behaviour[ranks] = number_of[inverse.reshape(-1)]
        groups, num_members = _group_words(relations, behaviour)
        if len(first) == num_known:
            return _result(behaviour, groups, num_members)
        num_known = len(first)
        word = salted((behaviour + 1).astype(np.uint64), 3)
        for row, group in enumerate(relations.group):
            called = relations.label[row] == row
            word = salted(word ^ np.where(called, groups[group], np.uint64(0)), 2 * row + 10)
        for row in range(len(relations.target)):
            # A message to an absent rank has no peer. At an open end a permutation moves nothing and does
            # not wait, as if the rank were its own peer.
            whose = relations.rank_class
            permutes = relations.permutes[whose, row]
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


def every_rank(relations: Relations) -> BehaviourClasses:
    """Return one class per present rank."""
    here = relations.rank_class != ABSENT
    behaviour = np.where(here, np.cumsum(here) - 1, -1)
    return _result(behaviour, *_group_words(relations, behaviour))


def _result(behaviour: IntArray, groups: _Words, num_members: IntArray) -> BehaviourClasses:
    ranks = np.flatnonzero(behaviour >= 0)
    first, count = np.unique(behaviour[ranks], return_index=True, return_counts=True)[1:]
    group_class = np.unique(groups, return_inverse=True)[1].reshape(-1)
    return BehaviourClasses(behaviour, ranks[first], count, group_class, num_members)


def _group_words(relations: Relations, behaviour: IntArray) -> tuple[_Words, IntArray]:
    """Return per group a fingerprint of the set of (class, label) of its members, and the size of that
    set.
    """
    labels = len(relations.group) + 1
    kinds = (int(behaviour.max()) + 1) * labels
    met: list[IntArray] = []
    for group, label in zip(relations.group, relations.label, strict=True):
        mine = (group != NONE) & (behaviour >= 0)
        met.append(np.unique(group[mine] * kinds + behaviour[mine] * labels + label[mine] + 1))
    pairs = np.unique(np.concatenate(met))
    # Ignore a set that is not called if its class calls the same group through another set.
    calls = np.append(pairs[1:] // labels == pairs[:-1] // labels, False)[: len(pairs)]
    pairs = pairs[(pairs % labels > 0) | ~calls]
    total = np.zeros(len(relations.members), np.uint64)
    np.add.at(total, pairs // kinds, salted((pairs % kinds).astype(np.uint64), 4))
    return salted(total, 5), np.bincount(pairs // kinds, minlength=len(relations.members))


def _patterns(relations: Relations) -> _Words:
    """Return a fingerprint per rank of the permutations, its own and its peers', that connect the same two
    ranks: messages of such permutations are matched with each other.
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
