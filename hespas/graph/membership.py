"""Group sets and permutations as columns over all ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.groups import GroupSet, Permutation, StridedGroups

__all__ = ["Membership", "Peers", "member_rows", "membership_of", "peers_of", "salted"]

_MAX_ABSENT = 1 << 20
"""Ranks a group set may name beyond those of the job; one that names more counts as naming none."""


@dataclass(frozen=True, slots=True, eq=False)
class Membership:
    """``group`` is each rank's group (-1: none), shape ``(ranks,)``; the others have shape ``(groups,)``.

    ``uid`` numbers distinct process groups over all group sets: their members, and which of those of the same
    members they are. ``is_first`` marks groups that no earlier set had.
    """

    group: IntArray
    uid: IntArray
    is_first: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """``target`` and ``source`` of each rank, -1 for nobody, shape ``(ranks,)``.

    Peers outside of the job count as nobody.
    """

    target: IntArray
    source: IntArray


def _spread(digits: tuple[tuple[int, int], ...]) -> IntArray:
    values = np.zeros(1, np.int64)
    for size, stride in digits:
        values = (values[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return values


def member_rows(groups: GroupSet) -> IntArray | tuple[tuple[int, ...], ...]:
    """The members of every group: a matrix of shape ``(groups, size)``, or rows of differing length."""
    if isinstance(groups, StridedGroups):
        starts = groups.base + _spread(groups.group_digits)
        return starts[:, None] + _spread(groups.member_digits)[None, :]
    return groups.rows


def membership_of(
    groups: GroupSet, num_ranks: int, uids: dict[bytes, int], members: list[tuple[int, ...]]
) -> Membership:
    """One group set over the ranks of a job; distinct member lists go into ``uids`` and ``members``.

    O(ranks). A rank that is listed twice belongs to the first group that lists it.
    """
    if groups.num_ranks > num_ranks + _MAX_ABSENT:
        return Membership(np.full(num_ranks, -1, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))
    rows = member_rows(groups)
    lists: list[tuple[int, ...]] = [
        tuple(row) for row in (rows if isinstance(rows, tuple) else rows.tolist())
    ]
    uid: list[int] = []
    is_first: list[bool] = []
    for row in lists:
        key = np.array([groups.communicator, *sorted(row)], np.int64).tobytes()
        number = uids.setdefault(key, len(members))
        is_first.append(number == len(members))
        if is_first[-1]:
            members.append(row)
        uid.append(number)
    return Membership(_group_column(lists, num_ranks), np.array(uid, np.int64), np.array(is_first, np.bool_))


def _group_column(lists: list[tuple[int, ...]], num_ranks: int) -> IntArray:
    column = np.full(num_ranks, -1, np.int64)
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    flat = np.fromiter((rank for row in lists for rank in row), np.int64, int(sizes.sum()))
    owner = np.repeat(np.arange(len(lists), dtype=np.int64), sizes)
    inside = (flat >= 0) & (flat < num_ranks)
    # Written backwards, so that the first group that lists a rank is the one that stays.
    column[flat[inside][::-1]] = owner[inside][::-1]
    return column


def peers_of(permutation: Permutation, num_ranks: int) -> Peers:
    """One permutation over the ranks of a job. O(ranks)."""
    if permutation.pairs is None:
        return Peers(
            _moved(permutation, permutation.shift, num_ranks),
            _moved(permutation, -permutation.shift, num_ranks),
        )
    target = np.full(num_ranks, -1, np.int64)
    source = np.full(num_ranks, -1, np.int64)
    pairs = np.array(permutation.pairs, np.int64).reshape(-1, 2)
    inside = ((pairs >= 0) & (pairs < num_ranks)).all(axis=1)
    target[pairs[inside, 0]] = pairs[inside, 1]
    source[pairs[inside, 1]] = pairs[inside, 0]
    return Peers(target, source)


def _moved(permutation: Permutation, shift: int, num_ranks: int) -> IntArray:
    size, stride = permutation.digit
    rank = np.arange(num_ranks, dtype=np.int64)
    place = rank // stride % size
    moved = (place + shift) % size if permutation.wraps else place + shift
    other = rank + (moved - place) * stride
    nobody = (moved < 0) | (moved >= size) | (rank >= permutation.num_ranks)
    return np.where(nobody | (other >= num_ranks), -1, other)


def salted(value: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """One word in, a word out that depends on every bit and on the salt: SplitMix64's finaliser. Ranks are
    told apart by such words of what they do and whom they meet.
    """
    mixed = value + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & (2**64 - 1))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
