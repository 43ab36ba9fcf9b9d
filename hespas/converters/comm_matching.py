"""Matching of communication across ranks, and alignment of their clocks.

Operations of several ranks match by group and sequence number. If recordings have no numbers, operations of
one kind match by order, provided that all ranks with any have equally many. Operations that differ in kind or
size do not match.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from typing import NamedTuple

import msgspec
import numpy as np

from hespas.graph import Profile
from hespas.graph.columns import IntArray

__all__ = [
    "CommKey",
    "CommMatches",
    "MatchedComms",
    "clock_shifts",
    "comm_key",
    "match_comms",
    "match_profiles",
]

_SENDS, _RECEIVES = frozenset({"send", "isend"}), frozenset({"recv", "irecv", "receive"})
_RANKS = msgspec.json.Decoder(list[int])


class CommKey(NamedTuple):
    """Key by which the communication of several ranks is matched: all ranks of one communication have the
    same ``group``, ``kind`` and ``number``.

    ``number`` is the sequence number in the group; with -1 communication is matched by order. ``side`` is 1
    for a sender, 0 for a receiver, -1 for a collective.
    """

    group: str
    kind: str
    number: int
    side: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MatchedComms:
    """Communication of several profiles; columns of shape ``(communications,)``.

    ``profile`` is the index of the profile, ``event`` the event in the profile. ``instance`` numbers the
    matched communications (-1: no other rank has it). ``sends`` is 1 for a sender, 0 for a receiver, -1 for a
    collective.
    """

    profile: IntArray
    event: IntArray
    rank: IntArray
    instance: IntArray
    sends: IntArray

    def pairs(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return the pairs of rows to connect by arrows, as two lists: for collectives and for messages.

        The members of a collective are connected in order of rank, and the sender of a message with its
        receiver.
        """
        order = np.lexsort((self.rank, self.instance))
        order = order[self.instance[order] >= 0]
        together = np.flatnonzero(self.instance[order][1:] == self.instance[order][:-1])
        one, other = order[together], order[together + 1]
        message = (self.sends[one] >= 0) & (self.sends[other] >= 0)
        swapped = message & (self.sends[one] == 0)
        source, target = np.where(swapped, other, one), np.where(swapped, one, other)
        rows = list(zip(source.tolist(), target.tolist(), strict=True))
        return (
            [pair for pair, is_message in zip(rows, message.tolist(), strict=True) if not is_message],
            [pair for pair, is_message in zip(rows, message.tolist(), strict=True) if is_message],
        )


def match_profiles(profiles: Sequence[Profile]) -> MatchedComms:
    """Match the communication of profiles of one job. O(communications log communications)."""
    parts = [
        profile.comms.take(np.argsort(profile.start_ns[profile.comms.event], kind="stable"))
        for profile in profiles
    ]
    profile = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    event = np.concatenate([np.empty(0, np.int64), *(part.event.astype(np.int64) for part in parts)])
    rank = np.concatenate(
        [
            np.empty(0, np.int64),
            *(current.rank[part.event] for current, part in zip(profiles, parts, strict=True)),
        ]
    )
    keys: list[CommKey] = []
    sizes: list[float] = []
    for current, part in zip(profiles, parts, strict=True):
        sizes += np.fmax(part.operand_bytes, part.result_bytes).tolist()
        for row, number in enumerate(part.sequence.tolist()):
            kind, group, ranks = (
                current.strings[int(column[row])] for column in (part.kind_id, part.group_id, part.ranks_id)
            )
            keys.append(comm_key(kind, group, ranks, int(current.rank[part.event[row]]), number))
    return MatchedComms(
        profile=profile,
        event=event,
        rank=rank.astype(np.int64),
        instance=match_comms(rank.tolist(), keys, sizes).instance,
        sends=np.array([key.side for key in keys], np.int64),
    )


def comm_key(kind: str, group: str, ranks: str, rank: int, number: int) -> CommKey:
    """Return the matching key of one communication of ``rank``. ``group`` is the name of its process group,
    and ``ranks`` the JSON list of the ranks in that group.

    ``number`` is the sequence number of the communication in the group (-1: not recorded).
    """
    side = 1 if kind.lower() in _SENDS else 0 if kind.lower() in _RECEIVES else -1
    if side < 0:
        return CommKey(f"{group} {ranks}", kind, number, side)
    # sequence numbers count the operations of a rank in its group, so both ends of a message may differ
    return CommKey(f"{group} {ranks}", f"from {_sender(ranks, rank, side)}", -1, side)


def _sender(ranks: str, rank: int, side: int) -> str:
    """Return the rank that sends a message in a group of two ranks, ``?`` if it is unknown."""
    try:
        members = _RANKS.decode(ranks) if ranks else []
    except msgspec.DecodeError:
        members = []
    if side < 0 or len(members) != 2 or rank not in members:
        return "?"
    return str(rank if side else sum(members) - rank)


class CommMatches(NamedTuple):
    """Result of matching communication across ranks.

    ``instance`` numbers the matched operations (-1: no other rank has the operation). Rows ``unlike[i]`` and
    ``others[i]`` have the same position on two ranks but differ in kind or size, so they are not matched.
    """

    instance: IntArray
    unlike: list[int]
    others: list[int]


_OF_ANY_SIZE = frozenset({"alltoall", "raggedalltoall", "gather", "scatter", "broadcast", "reduce"})
"""Collectives whose ranks may have parts of different sizes."""
_MOST_UNEVEN = 16.0


def match_comms(rank: Sequence[int], keys: Sequence[CommKey], size_bytes: Sequence[float]) -> CommMatches:
    """Match the communication of several ranks. Rows are in the order of time.

    Operations with equal sequence numbers match in the order of time, unless they differ in kind or size.
    Operations without sequence numbers match by position, and only if the sizes at all positions are equal. A
    difference in size shows that the ranks recorded different steps.
    """
    of_key: dict[tuple[str, str | int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, key in enumerate(keys):
        # numbers are unique in a group; without them only the kind distinguishes operations
        last = key.number if key.number >= 0 else key.kind
        of_key[key.group, last][rank[row]].append(row)
    matches = CommMatches(np.full(len(keys), -1, np.int64), [], [])
    count = 0
    for (_, last), of_rank in of_key.items():
        lists = list(of_rank.values())
        by_order = isinstance(last, str)
        if len(lists) < 2 or (by_order and len(set(map(len, lists))) > 1):
            continue
        positions = list(zip(*lists, strict=False))
        strange = [_unlike(together, keys, size_bytes) for together in positions]
        for together, other in zip(positions, strange, strict=True):
            if other >= 0:
                matches.unlike.append(together[0])
                matches.others.append(other)
            elif not by_order or max(strange) < 0:
                matches.instance[list(together)] = count
                count += 1
    return matches


def _unlike(together: Sequence[int], keys: Sequence[CommKey], size_bytes: Sequence[float]) -> int:
    """Return the first of the rows ``together`` whose kind or size differs from the first row; -1 if they all
    agree. The rows are operations of several ranks that match by number or position.
    """
    first = together[0]
    kind, size = _letters(keys[first].kind), size_bytes[first]
    for row in together[1:]:
        other = size_bytes[row]
        if _letters(keys[row].kind) != kind and keys[first].side < 0:
            return row
        if isnan(size) or isnan(other) or size == other:
            continue
        least, most = sorted((size, other))
        if kind not in _OF_ANY_SIZE or most > _MOST_UNEVEN * max(least, 1.0):
            return row
    return -1


def _letters(kind: str) -> str:
    """Return the name of a collective in a common spelling, with letters only and without suffixes such as
    ``_base``.
    """
    plain = re.sub(r"[^a-z]", "", kind.lower())
    return re.sub(r"(?:base|v|single|coalesced|intotensor|tensor|oop|sparse)+$", "", plain) or plain


def clock_shifts(
    clock: Sequence[int], instance: IntArray, end_ns: Sequence[float], first_ns: Sequence[float]
) -> dict[int, float]:
    """Return the shift of each clock [ns] that aligns it with the earlier clocks.

    After the shift, the median difference between the ends of matched operations is 0. Each row is an
    operation: ``clock`` is its clock, ``instance`` the matched operation (-1: none) and ``end_ns`` its end.
    ``first_ns`` is the first time of each clock. A clock without matches to earlier clocks is shifted to
    start at 0.
    """
    shifts: dict[int, float] = {}
    ended: dict[int, float] = {}
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    numbers: list[int] = instance.tolist()
    for row, number in enumerate(numbers):
        if number >= 0:
            rows_of[clock[row]].append(row)
    for number, begin_ns in enumerate(first_ns):
        rows = rows_of[number]
        apart = [ended[numbers[row]] - end_ns[row] for row in rows if numbers[row] in ended]
        shifts[number] = float(np.median(apart)) if apart else -begin_ns
        for row in rows:
            ended.setdefault(numbers[row], end_ns[row] + shifts[number])
    return shifts
