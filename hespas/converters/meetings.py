"""What ranks did together: communication that several of them recorded, matched, and their clocks aligned.

The same operation of different ranks is told by its group and its number in it; where recordings state no
numbers, by the order of operations of one kind, if all ranks that have any did as many. What differs in
operation or size is not the same, and not matched.
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

from hespas.graph import MeasuredComms, Profile
from hespas.graph.columns import IntArray

__all__ = ["Matched", "MeetingKey", "Meetings", "clock_shifts", "meeting_key", "meetings_of", "met"]

_SENDS, _RECEIVES = frozenset({"send", "isend"}), frozenset({"recv", "irecv", "receive"})
_RANKS = msgspec.json.Decoder(list[int])


class MeetingKey(NamedTuple):
    """What ranks that take part in one communication have in common. ``number`` is -1 where it is told by
    order alone; ``side`` is 1 for who sends a message, 0 for who receives it, -1 for a collective.
    """

    group: str
    kind: str
    number: int
    side: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Meetings:
    """Communication of several profiles; columns of shape ``(communications,)``: ``profile`` is the place of
    its profile, ``event`` its row there. ``instance`` numbers what was done together (-1: nobody else has
    it); ``sends`` marks the side of a message that sends.
    """

    profile: IntArray
    event: IntArray
    rank: IntArray
    instance: IntArray
    sends: IntArray

    def pairs(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Rows that an arrow joins: along the members of each collective by rank, and from the sender of each
        message to who receives it.
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


def meetings_of(profiles: Sequence[Profile]) -> Meetings:
    """Match the communication of profiles of one job. O(communications log communications)."""
    parts = [_in_order(profile) for profile in profiles]
    profile = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    event = np.concatenate([np.empty(0, np.int64), *(part.event.astype(np.int64) for part in parts)])
    rank = np.concatenate(
        [np.empty(0, np.int64), *(each.rank[part.event] for each, part in zip(profiles, parts, strict=True))]
    )
    keys: list[MeetingKey] = []
    sizes: list[float] = []
    for each, part in zip(profiles, parts, strict=True):
        sizes += np.fmax(part.operand_bytes, part.result_bytes).tolist()
        for row, number in enumerate(part.sequence.tolist()):
            kind, group, ranks = (
                each.strings[int(column[row])] for column in (part.kind_row, part.group_row, part.ranks_row)
            )
            keys.append(meeting_key(kind, group, ranks, int(each.rank[part.event[row]]), number))
    return Meetings(
        profile=profile,
        event=event,
        rank=rank.astype(np.int64),
        instance=met(rank.tolist(), keys, sizes).instance,
        sends=np.array([key.side for key in keys], np.int64),
    )


def meeting_key(kind: str, group: str, ranks: str, rank: int, number: int) -> MeetingKey:
    """What tells one communication of ``rank`` from others of its ``group`` (of the ``ranks`` in a JSON list)
    by kind and ``number`` in it (-1: not recorded).
    """
    side = 1 if kind.lower() in _SENDS else 0 if kind.lower() in _RECEIVES else -1
    if side < 0:
        return MeetingKey(f"{group} {ranks}", kind, number, side)
    # a number counts what a rank did in its group: two ends of a message may count differently
    return MeetingKey(f"{group} {ranks}", f"from {_sender(ranks, rank, side)}", -1, side)


def _in_order(profile: Profile) -> MeasuredComms:
    """What a profile communicates, by start."""
    comms = profile.comms
    return comms.take(np.argsort(profile.start_ns[comms.event], kind="stable"))


def _sender(ranks: str, rank: int, side: int) -> str:
    """The rank that sends a message between two; unknown where a group is not of two."""
    try:
        members = _RANKS.decode(ranks) if ranks else []
    except msgspec.DecodeError:
        members = []
    if side < 0 or len(members) != 2 or rank not in members:
        return "?"
    return str(rank if side else sum(members) - rank)


class Matched(NamedTuple):
    """``instance`` of each communication (-1: no other rank has it). Rows that are ``unlike`` have a place in
    common with ``others`` of another rank, and differ from them in operation or size.
    """

    instance: IntArray
    unlike: list[int]
    others: list[int]


_OF_ANY_SIZE = frozenset({"alltoall", "raggedalltoall", "gather", "scatter", "broadcast", "reduce"})
"""Collectives in which ranks may have parts of several sizes."""
_MOST_UNEVEN = 16.0


def met(rank: Sequence[int], keys: Sequence[MeetingKey], size_bytes: Sequence[float]) -> Matched:
    """Match communication of several ranks. Rows of a rank stand in the order of time; several of one number
    belong together in their order.

    What differs in operation or size is not matched. Without numbers the sizes of all of one kind have to be
    equal in their order: one that differs shows that ranks recorded different steps.
    """
    of_key: dict[tuple[str, str | int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for row, key in enumerate(keys):
        # a number is one of its group; without it the kind is all that tells them apart
        last = key.number if key.number >= 0 else key.kind
        of_key[key.group, last][rank[row]].append(row)
    found = Matched(np.full(len(keys), -1, np.int64), [], [])
    count = 0
    for (_, last), of_rank in of_key.items():
        lists = list(of_rank.values())
        by_order = isinstance(last, str)
        if len(lists) < 2 or (by_order and len(set(map(len, lists))) > 1):
            continue
        places = list(zip(*lists, strict=False))
        strange = [_unlike(together, keys, size_bytes) for together in places]
        for together, other in zip(places, strange, strict=True):
            if other >= 0:
                found.unlike.append(together[0])
                found.others.append(other)
            elif not by_order or max(strange) < 0:
                found.instance[list(together)] = count
                count += 1
    return found


def _unlike(together: Sequence[int], keys: Sequence[MeetingKey], size_bytes: Sequence[float]) -> int:
    """A row that is not the same communication as the first, -1 for none."""
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
    """A kind without separators, and without the words that spell one operation in several ways."""
    plain = re.sub(r"[^a-z]", "", kind.lower())
    return re.sub(r"(?:base|v|single|coalesced|intotensor|tensor|oop|sparse)+$", "", plain) or plain


def clock_shifts(
    clock: Sequence[int], instance: IntArray, end_ns: Sequence[float], first_ns: Sequence[float]
) -> dict[int, float]:
    """What to add to each clock [ns] so that what ranks did together ends together in the median.

    ``clock`` numbers those of the rows, ``end_ns`` is when each ended, ``first_ns`` when each clock is to
    begin: what is added to one that shares nothing with those before it is minus that.
    """
    shifts: dict[int, float] = {}
    ended: dict[int, float] = {}
    rows_of: defaultdict[int, list[int]] = defaultdict(list)
    numbers: list[int] = instance.tolist()
    for row, number in enumerate(numbers):
        if number >= 0:
            rows_of[clock[row]].append(row)
    for each, begin_ns in enumerate(first_ns):
        rows = rows_of[each]
        apart = [ended[numbers[row]] - end_ns[row] for row in rows if numbers[row] in ended]
        shifts[each] = float(np.median(apart)) if apart else -begin_ns
        for row in rows:
            ended.setdefault(numbers[row], end_ns[row] + shifts[each])
    return shifts
