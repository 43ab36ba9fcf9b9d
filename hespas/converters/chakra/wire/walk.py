"""Decoding of many messages at once, field by field.

A :class:`Cursor` has one position per message and reads the fields in ascending order. Messages in any other
form than a protobuf serialiser writes (fields out of order, unknown fields, wrong wire types, spans that
leave the message) are marked as ``bad`` and are then read by :mod:`.canonical`, which accepts the complete
wire format. Unmarked messages have been read correctly.

:func:`walk` accepts any message, with fields in any order and number. It reads old traces, which have few
fields and many encodings (packed and unpacked lists, explicit zeros). Nothing here raises; malformed messages
are marked.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.wire import (
    Bools,
    ByteWindow,
    Longs,
    Words,
    offsets_of,
    packed_varints,
    read_varints,
)
from hespas.files.wire import WireError
from hespas.files.wire import fields as wire_fields
from hespas.schemas.chakra.tables import WireType

__all__ = ["Cursor", "FieldSpans", "RepeatedIntegers", "WireFields", "repeated_spans", "tag_of", "walk"]

_ROUNDS = 48
"""Entries of a repeated field that are processed for all messages at once; longer rows are finished one by
one.
"""


@dataclass(frozen=True, slots=True, eq=False)
class FieldSpans:
    """Byte spans (start and length) of the content of one length-delimited field in several messages.
    ``rows`` are the indices of the messages that have the field (None: all).
    """

    rows: Longs | None
    start: Longs
    length: Longs

    def spread(self, count: int) -> tuple[Longs, Longs]:
        """Return start and length for each of ``count`` messages; the length is 0 for messages without the
        field.
        """
        if self.rows is None:
            return self.start, self.length
        start, length = np.zeros(count, np.int64), np.zeros(count, np.int64)
        start[self.rows], length[self.rows] = self.start, self.length
        return start, length


class Cursor:
    """Vectorised reader of many messages in ``window`` at once: message ``i`` is read from ``at[i]`` and ends
    at ``end[i]``.
    """

    __slots__ = ("at", "bad", "end", "window")

    def __init__(self, window: ByteWindow, start: Longs, end: Longs) -> None:
        """Start reading at the beginning of every message."""
        self.window = window
        self.at = start
        self.end = end
        self.bad: Bools = np.zeros(len(start), np.bool_)

    def _having(self, tag: int) -> tuple[Longs | None, Longs]:
        """Return the messages whose next byte is ``tag`` (None: all), and their positions after the tag."""
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
        """Mark as bad the messages in ``rows`` for which ``bad`` is True. Both arrays have one entry per
        message; ``rows`` None means all messages.
        """
        if bad is None or not bad.any():
            return
        if rows is None:
            self.bad = self.bad | bad
        else:
            self.bad[rows[bad]] = True

    def varint(self, tag: int) -> Words:
        """Read a varint field of every message. Return its values, 0 if it is absent."""
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

    def span(self, tag: int) -> FieldSpans:
        """Read a length-delimited field. Content that would leave its message has length 0 and marks the
        message.
        """
        rows, at = self._having(tag)
        if not len(at):
            return FieldSpans(rows if len(self.at) else None, at, at)
        end = self.end if rows is None else self.end[rows]
        start, length, bad = _content(self.window, at, end)
        self.mark(rows, bad)
        self._move(rows, start + length)
        return FieldSpans(rows, start, length)

    def finish(self) -> Bools:
        """Return a mask of bad messages: those marked before, and those with bytes after the last field that
        was read.
        """
        unread: Bools = self.at != self.end
        return self.bad | unread


def _content(window: ByteWindow, at: Longs, end: Longs) -> tuple[Longs, Longs, Bools | None]:
    """Read length varints at ``at``. Return start and length of the contents, and a mask of contents that
    extend beyond ``end``, whose length is set to 0.
    """
    value, start, bad = read_varints(window, at)
    length = value.view(np.int64)
    outside = (length > end - start) | (length < 0)
    if bad is not None:
        outside |= bad
    if not outside.any():
        return start, length, None
    return np.where(outside, end, start), np.where(outside, 0, length), outside


def repeated_spans(cursor: Cursor, tag: int) -> tuple[Longs, Longs, Longs]:
    """Read a repeated length-delimited field that is the last field of each message.

    Return the offsets of each message's occurrences, and start and length of each occurrence. Messages with
    further fields are marked bad.
    """
    window, end = cursor.window, cursor.end
    cursor.bad = cursor.bad | (cursor.at > end)
    rows = np.flatnonzero(cursor.at < end)
    at = cursor.at[rows]
    rounds: list[tuple[Longs, Longs, Longs]] = []
    tails: list[tuple[int, Longs]] = []
    counts = np.zeros(len(end), np.int64)
    while len(rows):
        if len(rounds) == _ROUNDS:
            stops: list[int] = cursor.end[rows].tolist()
            for row, here, stop in zip(rows.tolist(), at.tolist(), stops, strict=True):
                spans = _walk(cursor.window, tag, here, stop)
                if spans is None:
                    cursor.bad[row] = True
                    continue
                counts[row] += len(spans) // 2
                tails.append((row, np.asarray(spans, np.int64).reshape(-1, 2)))
            break
        wrong = window.u8.take(at) != tag
        row_end = end[rows]
        start, length, bad = _content(window, at + 1, row_end)
        bad = wrong if bad is None else bad | wrong
        if bad.any():
            cursor.bad[rows[bad]] = True
            good = np.flatnonzero(~bad)
            rows, row_end, start, length = rows[good], row_end[good], start[good], length[good]
        rounds.append((rows, start, length))
        counts[rows] += 1
        at = start + length
        more = at < row_end
        if not more.all():
            rows, at = rows[more], at[more]
    cursor.at = end
    # Rounds hold the first, second, ... occurrence of every message: reorder them to message order.
    offsets = offsets_of(counts)
    starts, lengths = np.empty(int(offsets[-1]), np.int64), np.empty(int(offsets[-1]), np.int64)
    position = offsets[:-1].copy()
    for rows, start, length in rounds:
        into = position[rows]
        starts[into], lengths[into] = start, length
        position[rows] = into + 1
    for row, tail in tails:
        first, last = int(position[row]), int(offsets[row + 1])
        starts[first:last], lengths[first:last] = tail[:, 0], tail[:, 1]
    return offsets, starts, lengths


def _walk(window: ByteWindow, tag: int, at: int, end: int) -> array[int] | None:
    """Return the content spans of the fields from ``at`` to exactly ``end``, as start and length in
    alternation. All fields must have the tag ``tag``; return None otherwise.
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


_FIELD_ROUNDS = 64
"""Fields that are processed for all messages at once; longer messages are finished one by one."""

_LARGEST_TAG = (1 << 32) - 1
_FIXED_BYTES: dict[int, int] = {WireType.FIXED64: 8, WireType.FIXED32: 4}


def tag_of(number: int, wire: int) -> int:
    """Return the tag of a field number and wire type."""
    return number << 3 | wire


class RepeatedIntegers(NamedTuple):
    """Values of a repeated integer field of many messages: message ``i`` has
    ``values[offsets[i]:offsets[i + 1]]``.
    """

    values: Words
    offsets: Longs


@dataclass(frozen=True, slots=True, eq=False)
class WireFields:
    """Fields of many messages, in message order. Field ``i`` belongs to message ``owner[i]`` and has the tag
    ``tag[i]``.

    ``value`` is an integer, the raw bits of a fixed-width value, or the length of the content of a
    length-delimited field. The value or content begins at byte ``at``. ``bad`` marks malformed messages; only
    their fields before the fault are listed.
    """

    window: ByteWindow
    messages: int
    owner: Longs
    tag: Longs
    value: Words
    at: Longs
    bad: Bools

    def rows(self, tag: int) -> Longs:
        """Return the indices of the fields with one tag."""
        return np.flatnonzero(self.tag == tag)

    def has(self, tag: int) -> Bools:
        """Return a mask of the messages that have a field with this tag."""
        present = np.zeros(self.messages, np.bool_)
        present[self.owner[self.rows(tag)]] = True
        return present

    def scalar(self, tag: int) -> Words:
        """Return the value of a field in each message: the last occurrence, 0 if it is absent."""
        column = np.zeros(self.messages, np.uint64)
        rows = self.rows(tag)
        column[self.owner[rows]] = self.value[rows]
        return column

    def span(self, number: int) -> tuple[Longs, Longs]:
        """Return start and length of a length-delimited field in each message: the last occurrence, length 0
        if it is absent.
        """
        rows = self.rows(tag_of(number, WireType.BYTES))
        start, length = np.zeros(self.messages, np.int64), np.zeros(self.messages, np.int64)
        start[self.owner[rows]] = self.at[rows]
        length[self.owner[rows]] = self.value[rows].view(np.int64)
        return start, length

    def integers(self, number: int) -> tuple[RepeatedIntegers, Bools | None]:
        """Return the values of a repeated varint field, packed or not, and a mask of the messages with a
        malformed packed list.
        """
        packed_tag = tag_of(number, WireType.BYTES)
        rows = np.flatnonzero((self.tag == tag_of(number, WireType.VARINT)) | (self.tag == packed_tag))
        if not len(rows):
            return RepeatedIntegers(
                np.empty(0, np.uint64), np.broadcast_to(np.int64(0), (self.messages + 1,))
            ), None
        owner, values = self.owner[rows], self.value[rows]
        packed = np.flatnonzero(self.tag[rows] == packed_tag)
        if not len(packed):
            return RepeatedIntegers(values, offsets_of(np.bincount(owner, minlength=self.messages))), None
        inside, bounds, cut = packed_varints(
            self.window, self.at[rows[packed]], values[packed].view(np.int64)
        )
        counts = np.ones(len(rows), np.int64)
        counts[packed] = np.diff(bounds)
        offsets = offsets_of(counts)
        merged = np.empty(int(offsets[-1]), np.uint64)
        single = np.delete(np.arange(len(rows)), packed)
        merged[offsets[single]] = values[single]
        shift = np.repeat(offsets[packed] - bounds[:-1], np.diff(bounds))
        merged[np.arange(len(inside)) + shift] = inside
        totals = np.bincount(owner, weights=counts, minlength=self.messages).astype(np.int64)
        bad = None if cut is None else np.isin(np.arange(self.messages), owner[packed[cut]])
        return RepeatedIntegers(merged, offsets_of(totals)), bad


class _FieldRound(NamedTuple):
    """One field of each message in ``rows``: its tag, its value, and the byte ``at`` which its content
    begins.
    """

    rows: Longs
    tag: Longs
    value: Words
    at: Longs


def walk(window: ByteWindow, start: Longs, end: Longs) -> WireFields:
    """Return all fields of the messages between ``start`` and ``end``. O(fields)."""
    bad = np.zeros(len(start), np.bool_)
    rows = np.flatnonzero(start < end)
    at = start[rows]
    rounds: list[_FieldRound] = []
    while len(rows) and len(rounds) < _FIELD_ROUNDS:
        fields_round, at, good = _step(window, rows, at, end[rows])
        if good is not None:
            bad[rows[~good]] = True
            fields_round = _FieldRound._make(column[good] for column in fields_round)
            at = at[good]
        rounds.append(fields_round)
        more = at < end[fields_round.rows]
        rows, at = (fields_round.rows, at) if more.all() else (fields_round.rows[more], at[more])
    counts = np.zeros(len(start), np.int64)
    for fields_round in rounds:
        counts[fields_round.rows] += 1
    tails: list[tuple[int, _Tail]] = []
    for row, here, stop in zip(rows.tolist(), at.tolist(), end[rows].tolist(), strict=True):
        fields, sound = _walk_one(window.u8[here:stop].tobytes(), here)
        bad[row] |= not sound
        tails.append((row, fields))
    for row, fields in tails:
        counts[row] += len(fields)
    # Rounds hold the first, second, ... field of every message: reorder them to message order.
    offsets = offsets_of(counts)
    total = int(offsets[-1])
    tag, value = np.empty(total, np.int64), np.empty(total, np.uint64)
    at = np.empty(total, np.int64)
    position = offsets[:-1].copy()
    for fields_round in rounds:
        into = position[fields_round.rows]
        tag[into], value[into], at[into] = fields_round.tag, fields_round.value, fields_round.at
        position[fields_round.rows] = into + 1
    for row, fields in tails:
        rest = slice(int(position[row]), int(offsets[row + 1]))
        tag[rest] = [field[0] for field in fields]
        value[rest] = np.array([field[1] for field in fields], np.uint64)
        at[rest] = [field[2] for field in fields]
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    return WireFields(window, len(counts), owner, tag, value, at, bad)


def _step(window: ByteWindow, rows: Longs, at: Longs, end: Longs) -> tuple[_FieldRound, Longs, Bools | None]:
    """Read the next field of each message in ``rows``, at byte ``at``.

    Return the fields, the positions after them, and a mask of the well-formed fields (None: all are).
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
    return _FieldRound(rows, tag.view(np.int64), value, content), behind_value, good


_Tail = list[tuple[int, int, int]]


def _walk_one(data: bytes, base: int) -> tuple[_Tail, bool]:
    """Return the remaining fields of one message, and True if they are well-formed."""
    fields: _Tail = []
    try:
        for number, wire, value, position in wire_fields(data, 0, len(data)):
            tag = number << 3 | wire
            if tag > _LARGEST_TAG:
                return fields, False
            is_bytes = wire == WireType.BYTES
            fields.append(
                (tag, position - value, base + value) if is_bytes else (tag, value, base + position)
            )
    except WireError:
        return fields, False
    return fields, True
