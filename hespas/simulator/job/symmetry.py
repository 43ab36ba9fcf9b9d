"""Ranks that behave alike: colours of ranks, refined until equal colours meet equal colours.

Start with what ranks are by themselves (the program and how fast it runs). Then tell ranks apart whose groups
or peers have other colours, until nothing changes (colour refinement: the result is an equitable partition).
A meeting ends when the last of its members has come, so it is the set of colours that counts, not how many
have each. By induction over the events of a run, ranks of one colour then do the same at the same time, so
one of each is enough. Colours are told apart by 64-bit fingerprints.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph import ABSENT
from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.groups import salted
from hespas.simulator.job.relations import NOBODY, Relations

__all__ = ["Colours", "every_rank", "refined"]

_Words = NDArray[np.uint64]
_MOST_PATTERNS = 24
"""With more permutations than these the ranks that use them count as different: see ``_patterns``."""


@dataclass(frozen=True, slots=True, eq=False)
class Colours:
    """``colour`` of each rank (-1: not here), shape ``(ranks,)``, numbered by their first ranks.

    ``first`` is that rank of each colour and ``count`` how many have it. ``meets``, of the shape of
    :attr:`hespas.simulator.job.relations.Relations.group`'s groups, numbers groups whose members have the
    same colours and call it alike: they run the same collectives at the same times. ``crowd`` counts the
    different members of each group, by colour and by the set that they call it through.
    """

    colour: IntArray
    first: IntArray
    count: IntArray
    meets: IntArray
    crowd: IntArray


def refined(relations: Relations, start: IntArray, *, both_ways: bool) -> Colours:
    """The coarsest colours. ``start`` tells ranks apart by themselves; ``both_ways`` says that who sends
    waits for the receiver, too. O(rounds x ranks x (sets + permutations)), vectorised.
    """
    here = relations.rank_class != ABSENT
    word = salted(start.astype(np.uint64), 1) ^ salted(_patterns(relations), 2)
    known = 0
    while True:
        colour, distinct = _numbered(word, here)
        groups, crowd = _group_words(relations, colour)
        if distinct == known:
            return _result(colour, groups, crowd)
        known = distinct
        word = salted((colour + 1).astype(np.uint64), 3)
        for row, group in enumerate(relations.group):
            called = relations.label[row] == row
            word = salted(word ^ np.where(called, groups[group], np.uint64(0)), 2 * row + 10)
        for row in range(len(relations.target)):
            for salt, seen in enumerate(_seen(relations, row, colour, both_ways=both_ways)):
                word = salted(word ^ seen, 4 * row + salt + 7_000_001)


def every_rank(relations: Relations) -> Colours:
    """Each rank that is here by itself."""
    here = relations.rank_class != ABSENT
    colour = np.where(here, np.cumsum(here) - 1, -1)
    return _result(colour, *_group_words(relations, colour))


def _result(colour: IntArray, groups: _Words, crowd: IntArray) -> Colours:
    ranks = np.flatnonzero(colour >= 0)
    first, count = np.unique(colour[ranks], return_index=True, return_counts=True)[1:]
    meets = np.unique(groups, return_inverse=True)[1].reshape(-1)
    return Colours(colour, ranks[first], count, meets, crowd)


def _numbered(word: _Words, here: BoolArray) -> tuple[IntArray, int]:
    """Equal words of ranks that are here as equal numbers, in order of first ranks."""
    ranks = np.flatnonzero(here)
    _, first, inverse = np.unique(word[ranks], return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    colour = np.full(len(here), -1, np.int64)
    colour[ranks] = place[inverse.reshape(-1)]
    return colour, len(first)


def _group_words(relations: Relations, colour: IntArray) -> tuple[_Words, IntArray]:
    """Per group a fingerprint of the set of (colour, label) of its members, and the size of that set."""
    labels = len(relations.group) + 1
    kinds = (int(colour.max()) + 1) * labels
    met: list[IntArray] = []
    for group, label in zip(relations.group, relations.label, strict=True):
        mine = (group != NOBODY) & (colour >= 0)
        met.append(np.unique(group[mine] * kinds + colour[mine] * labels + label[mine] + 1))
    pairs = np.unique(np.concatenate(met))
    # A set that is not called says nothing of a colour that calls the same group through another one.
    calls = np.append(pairs[1:] // labels == pairs[:-1] // labels, False)[: len(pairs)]
    pairs = pairs[(pairs % labels > 0) | ~calls]
    total = np.zeros(len(relations.members), np.uint64)
    np.add.at(total, pairs // kinds, salted((pairs % kinds).astype(np.uint64), 4))
    return salted(total, 5), np.bincount(pairs // kinds, minlength=len(relations.members))


def _seen(relations: Relations, row: int, colour: IntArray, *, both_ways: bool) -> list[_Words]:
    """What each rank sees along one permutation: colours of its target and of its source, 0 for nobody.

    A message to an absent rank is one to nobody. At an open end a permutation moves nothing and waits for
    nobody, as if the rank were its own peer.
    """
    whose = relations.rank_class
    permutes = relations.permutes[whose, row]
    of_target, of_source = (
        np.where(peer != NOBODY, colour[peer], -1) for peer in (relations.target[row], relations.source[row])
    )
    of_target = np.where(permutes & (of_target < 0), colour, of_target)
    of_source = np.where(permutes & (of_source < 0), colour, of_source)
    sends, receives = relations.sends[whose, row], relations.receives[whose, row]
    sends = sends if both_ways else sends & False
    return [
        np.where(sends, of_target + 1, 0).astype(np.uint64),
        np.where(receives, of_source + 1, 0).astype(np.uint64),
    ]


def _patterns(relations: Relations) -> _Words:
    """A fingerprint per rank of which of its permutations, and of those of its peers, join the same two
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
            leads = mine[whose, row] & (peer != NOBODY)
            for other in range(count):
                # The peer reaches me through ``other``; I reach the same peer through ``other``.
                answers = leads & theirs[whose[peer], other] & (back[other][peer] == ranks)
                same = leads & mine[whose, other] & (peers[other] == peer)
                word = answers.astype(np.uint64) + np.uint64(2) * same.astype(np.uint64)
                pattern = salted(pattern ^ word, (salt * count + row) * count + other)
    return pattern
