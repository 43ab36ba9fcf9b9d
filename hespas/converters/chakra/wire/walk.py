"""Walking many messages at once, field by field.

A :class:`Cursor` stands at one position per message and goes through the fields in ascending order. Whatever
is not what a protobuf serialiser writes (fields out of order, unknown fields, wrong wire types, spans that
leave the message) marks the message as ``bad`` and is left to :mod:`.messages`, which knows the whole wire
format. What is not marked has been read right.

:func:`walk` takes any message: the fields of old traces are few, their encodings many (packed and unpacked
lists, explicit zeros). Nothing here raises; malformed messages are marked.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.wire import (
    Bools,
    Longs,
    Window,
    Words,
    offsets_of,
    packed_varints,
    read_varints,
)
from hespas.files.wire import WireError
from hespas.files.wire import fields as wire_fields
from hespas.schemas.chakra.tables import WireType

__all__ = ["Cursor", "Fields", "Repeated", "Spans", "repeated_spans", "tag_of", "walk"]

_ROUNDS = 48
"""Entries of a repeated field that are walked for all messages at once; longer rows are finished singly."""


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """A length-delimited field: ``rows`` have it (None: all), with its content at ``start``, ``length``."""

    rows: Longs | None
    start: Longs
    length: Longs

    def spread(self, count: int) -> tuple[Longs, Longs]:
        """Start and length for each of ``count`` messages; those without the field get length 0."""
        if self.rows is None:
            return self.start, self.length
        start, length = np.zeros(count, np.int64), np.zeros(count, np.int64)
        start[self.rows], length[self.rows] = self.start, self.length
        return start, length


class Cursor:
    """Positions in ``window``: message ``i`` is read from ``at[i]`` and ends at ``end[i]``."""

    __slots__ = ("at", "bad", "end", "window")

    def __init__(self, window: Window, start: Longs, end: Longs) -> None:
        """Stand at the start of every message."""
        self.window = window
        self.at = start
        self.end = end
        self.bad: Bools = np.zeros(len(start), np.bool_)

    def _having(self, tag: int) -> tuple[Longs | None, Longs]:
        """Rows whose next byte is ``tag`` (None: all), and the positions behind the tag."""
        here = (self.window.u8.take(self.at) == tag) & (self.at < self.end)
        if here.all():
            return None, self.at + 1
        rows = np.flatnonzero(here)
        return rows, self.at[rows] + 1

    def _move(self, rows: Longs | None, to: Longs) -> None:
        if rows is None:
            self.at = to
        else:
            self.at = self.at.copy()
            self.at[rows] = to

    def mark(self, rows: Longs | None, bad: Bools | None) -> None:
        """Give the messages up where ``bad``, which is parallel to ``rows``."""
        if bad is None or not bad.any():
            return
        if rows is None:
            self.bad = self.bad | bad
        else:
            self.bad[rows[bad]] = True

    def varint(self, tag: int) -> Words:
        """A varint field of every message, 0 where it is absent."""
        rows, at = self._having(tag)
        if rows is not None and not len(rows):
            return np.zeros(len(self.at), np.uint64)
        value, behind, endless = read_varints(self.window, at)
        self.mark(rows, endless)
        self._move(rows, behind)
        if rows is None:
            return value
        column = np.zeros(len(self.at), np.uint64)
        column[rows] = value
        return column

    def span(self, tag: int) -> Spans:
        """A length-delimited field; its content lies within the message (length 0 where it would not)."""
        rows, at = self._having(tag)
        if not len(at):
            return Spans(rows if len(self.at) else None, at, at)
        end = self.end if rows is None else self.end[rows]
        start, length, bad = _content(self.window, at, end)
        self.mark(rows, bad)
        self._move(rows, start + length)
        return Spans(rows, start, length)

    def finish(self) -> Bools:
        """Messages that were not read to their exact end, or were given up before."""
        unread: Bools = self.at != self.end
        return self.bad | unread


def _content(window: Window, at: Longs, end: Longs) -> tuple[Longs, Longs, Bools | None]:
    """Start and length behind the length varints at ``at``; what leaves ``end`` is bad and has length 0."""
    value, start, bad = read_varints(window, at)
    length = value.view(np.int64)
    outside = (length > end - start) | (length < 0)
    if bad is not None:
        outside |= bad
    if not outside.any():
        return start, length, None
    return np.where(outside, end, start), np.where(outside, 0, length), outside


def repeated_spans(cursor: Cursor, tag: int) -> tuple[Longs, Longs, Longs]:
    """All occurrences of a repeated length-delimited field that fills the rest of each message.

    Returns offsets per message, and start and length per occurrence in message order. Messages holding
    anything else are marked bad.
    """
    window, end = cursor.window, cursor.end
    cursor.bad = cursor.bad | (cursor.at > end)
    rows = np.flatnonzero(cursor.at < end)
    at = cursor.at[rows]
    found: list[tuple[Longs, Longs, Longs]] = []
    tails: list[tuple[int, Longs]] = []
    counts = np.zeros(len(end), np.int64)
    while len(rows):
        if len(found) == _ROUNDS:
            tails = _finish_singly(cursor, tag, rows, at, counts)
            break
        wrong = window.u8.take(at) != tag
        row_end = end[rows]
        start, length, bad = _content(window, at + 1, row_end)
        bad = wrong if bad is None else bad | wrong
        if bad.any():
            cursor.bad[rows[bad]] = True
            kept = np.flatnonzero(~bad)
            rows, row_end, start, length = rows[kept], row_end[kept], start[kept], length[kept]
        found.append((rows, start, length))
        counts[rows] += 1
        at = start + length
        more = at < row_end
        if not more.all():
            rows, at = rows[more], at[more]
    cursor.at = end
    return _in_message_order(found, tails, counts)


def _in_message_order(
    found: list[tuple[Longs, Longs, Longs]], tails: list[tuple[int, Longs]], counts: Longs
) -> tuple[Longs, Longs, Longs]:
    """Rounds hold the first, second, ... occurrence of every message; put each message's side by side."""
    offsets = offsets_of(counts)
    starts, lengths = np.empty(int(offsets[-1]), np.int64), np.empty(int(offsets[-1]), np.int64)
    place = offsets[:-1].copy()
    for rows, start, length in found:
        into = place[rows]
        starts[into], lengths[into] = start, length
        place[rows] = into + 1
    for row, spans in tails:
        first, last = int(place[row]), int(offsets[row + 1])
        starts[first:last], lengths[first:last] = spans[:, 0], spans[:, 1]
    return offsets, starts, lengths


def _finish_singly(
    cursor: Cursor, tag: int, rows: Longs, at: Longs, counts: Longs
) -> list[tuple[int, Longs]]:
    """Walk the remaining occurrences of long rows one by one: (row, spans of shape (occurrences, 2))."""
    ends: list[int] = cursor.end[rows].tolist()
    tails: list[tuple[int, Longs]] = []
    for row, here, end in zip(rows.tolist(), at.tolist(), ends, strict=True):
        spans = _walk(cursor.window, tag, here, end)
        if spans is None:
            cursor.bad[row] = True
            continue
        counts[row] += len(spans) // 2
        tails.append((row, np.asarray(spans, np.int64).reshape(-1, 2)))
    return tails


def _walk(window: Window, tag: int, at: int, end: int) -> array[int] | None:
    """Content spans of consecutive ``tag`` fields from ``at`` to exactly ``end``, start and length in turn;
    None when it is not so.
    """
    spans = array("q")
    try:
        for number, wire, start, behind in wire_fields(window.u8[at:end].tobytes(), 0, end - at):
            if tag_of(number, wire) != tag:
                return None
            spans.extend((at + start, behind - start))
    except WireError:
        return None
    return spans


# All fields, in whatever order and number they stand.

_FIELD_ROUNDS = 64
"""Fields that are walked for all messages at once; longer messages are finished singly."""

_LARGEST_TAG = (1 << 32) - 1
_FIXED_BYTES: dict[int, int] = {WireType.FIXED64: 8, WireType.FIXED32: 4}


def tag_of(number: int, wire: int) -> int:
    """A field number and wire type as they stand before a value."""
    return number << 3 | wire


class Repeated(NamedTuple):
    """A repeated integer field: ``values[offsets[i]:offsets[i + 1]]`` are those of message ``i``."""

    values: Words
    offsets: Longs


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """Fields in message order: field ``i`` belongs to message ``owner[i]`` and has the tag ``tag[i]``.

    ``value`` is the integer, the raw bits of a fixed one, or the length of the content, which begins at
    ``at``. ``bad`` marks messages that are malformed; their fields up to the fault are listed.
    """

    window: Window
    messages: int
    owner: Longs
    tag: Longs
    value: Words
    at: Longs
    bad: Bools

    def rows(self, tag: int) -> Longs:
        """The fields with one tag."""
        return np.flatnonzero(self.tag == tag)

    def has(self, tag: int) -> Bools:
        """Which messages have a field."""
        found = np.zeros(self.messages, np.bool_)
        found[self.owner[self.rows(tag)]] = True
        return found

    def scalar(self, tag: int) -> Words:
        """The last value of a field in each message, 0 where it is absent."""
        column = np.zeros(self.messages, np.uint64)
        rows = self.rows(tag)
        column[self.owner[rows]] = self.value[rows]
        return column

    def span(self, number: int) -> tuple[Longs, Longs]:
        """Start and length of a length-delimited field's last occurrence; length 0 where it is absent."""
        rows = self.rows(tag_of(number, WireType.BYTES))
        start, length = np.zeros(self.messages, np.int64), np.zeros(self.messages, np.int64)
        start[self.owner[rows]] = self.at[rows]
        length[self.owner[rows]] = self.value[rows].view(np.int64)
        return start, length

    def integers(self, number: int) -> tuple[Repeated, Bools | None]:
        """A repeated varint field, packed or not, and which messages hold a malformed packed one."""
        packed_tag = tag_of(number, WireType.BYTES)
        rows = np.flatnonzero((self.tag == tag_of(number, WireType.VARINT)) | (self.tag == packed_tag))
        if not len(rows):
            return Repeated(np.empty(0, np.uint64), np.broadcast_to(np.int64(0), (self.messages + 1,))), None
        owner, values = self.owner[rows], self.value[rows]
        packed = np.flatnonzero(self.tag[rows] == packed_tag)
        if not len(packed):
            return Repeated(values, offsets_of(np.bincount(owner, minlength=self.messages))), None
        inside, bounds, cut = packed_varints(
            self.window, self.at[rows[packed]], values[packed].view(np.int64)
        )
        counts = np.ones(len(rows), np.int64)
        counts[packed] = np.diff(bounds)
        place = offsets_of(counts)
        merged = np.empty(int(place[-1]), np.uint64)
        single = np.delete(np.arange(len(rows)), packed)
        merged[place[single]] = values[single]
        shift = np.repeat(place[packed] - bounds[:-1], np.diff(bounds))
        merged[np.arange(len(inside)) + shift] = inside
        totals = np.bincount(owner, weights=counts, minlength=self.messages).astype(np.int64)
        bad = None if cut is None else np.isin(np.arange(self.messages), owner[packed[cut]])
        return Repeated(merged, offsets_of(totals)), bad


class _Round(NamedTuple):
    """One field of each of some messages."""

    rows: Longs
    tag: Longs
    value: Words
    at: Longs


def walk(window: Window, start: Longs, end: Longs) -> Fields:
    """The fields of the messages at ``start`` to ``end``. Cost: O(fields), a few passes over each."""
    bad = np.zeros(len(start), np.bool_)
    rows = np.flatnonzero(start < end)
    at = start[rows]
    rounds: list[_Round] = []
    while len(rows) and len(rounds) < _FIELD_ROUNDS:
        found, at, good = _step(window, rows, at, end[rows])
        if good is not None:
            bad[rows[~good]] = True
            found = _Round(found.rows[good], found.tag[good], found.value[good], found.at[good])
            at = at[good]
        rounds.append(found)
        more = at < end[found.rows]
        rows, at = (found.rows, at) if more.all() else (found.rows[more], at[more])
    counts = np.zeros(len(start), np.int64)
    for found in rounds:
        counts[found.rows] += 1
    tails = _tails(window, rows, at, end, bad)
    for row, fields in tails:
        counts[row] += len(fields)
    return _in_order(window, rounds, tails, counts, bad)


def _step(window: Window, rows: Longs, at: Longs, end: Longs) -> tuple[_Round, Longs, Bools | None]:
    """Read one field of each message at ``at``.

    Returns the positions behind, and which are sound (None: all).
    """
    tag, behind, wrong = read_varints(window, at)
    wire = (tag & np.uint64(7)).astype(np.uint8)
    value, content, endless = read_varints(window, behind)
    delimited = wire == WireType.BYTES
    length = np.where(delimited, value.view(np.int64), 0)
    behind_value = content + length
    fixed = np.flatnonzero((wire == WireType.FIXED32) | (wire == WireType.FIXED64))
    sound = (length >= 0) & (length <= end - content) & (delimited | (wire == WireType.VARINT))
    if endless is not None:
        sound &= ~endless
    if len(fixed):
        size = np.where(wire[fixed] == WireType.FIXED64, 8, 4)
        behind_value[fixed] = behind[fixed] + size
        raw = window.words[behind[fixed]]
        value[fixed] = np.where(size == 8, raw, raw & np.uint64(0xFFFFFFFF))
        content[fixed] = behind[fixed]
        sound[fixed] = behind_value[fixed] <= end[fixed]
    sound &= (tag >= 8) & (tag <= _LARGEST_TAG)
    if wrong is not None:
        sound &= ~wrong
    good = None if sound.all() else sound
    return _Round(rows, tag.view(np.int64), value, content), behind_value, good


_Tail = list[tuple[int, int, int]]


def _tails(window: Window, rows: Longs, at: Longs, end: Longs, bad: Bools) -> list[tuple[int, _Tail]]:
    """The rest of long messages, one by one: (row, [(tag, value, position)])."""
    tails: list[tuple[int, _Tail]] = []
    for row, here, stop in zip(rows.tolist(), at.tolist(), end[rows].tolist(), strict=True):
        fields, sound = _walk_one(window.u8[here:stop].tobytes(), here)
        bad[row] |= not sound
        tails.append((row, fields))
    return tails


def _walk_one(data: bytes, base: int) -> tuple[_Tail, bool]:
    """The fields of one message's rest, and whether it is sound."""
    found: _Tail = []
    try:
        for number, wire, value, place in wire_fields(data, 0, len(data)):
            tag = number << 3 | wire
            if tag > _LARGEST_TAG:
                return found, False
            is_bytes = wire == WireType.BYTES
            found.append((tag, place - value, base + value) if is_bytes else (tag, value, base + place))
    except WireError:
        return found, False
    return found, True


def _in_order(
    window: Window, rounds: list[_Round], tails: list[tuple[int, _Tail]], counts: Longs, bad: Bools
) -> Fields:
    """Rounds hold the first, second, ... field of every message; put each message's side by side."""
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    tag, value = np.empty(total, np.int64), np.empty(total, np.uint64)
    at = np.empty(total, np.int64)
    place = offsets[:-1].copy()
    for found in rounds:
        into = place[found.rows]
        tag[into], value[into], at[into] = found.tag, found.value, found.at
        place[found.rows] = into + 1
    for row, fields in tails:
        rest = slice(int(place[row]), int(offsets[row + 1]))
        tag[rest] = [field[0] for field in fields]
        value[rest] = np.array([field[1] for field in fields], np.uint64)
        at[rest] = [field[2] for field in fields]
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return Fields(window, len(counts), owner, tag, value, at, bad)
