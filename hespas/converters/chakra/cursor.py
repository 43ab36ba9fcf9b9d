"""Walking many messages at once, field by field, in ascending field order.

A :class:`Cursor` stands at one position per message. Whatever is not what a protobuf serialiser writes
(fields out of order, unknown fields, wrong wire types, spans that leave the message) marks the message as
``bad`` and is left to :mod:`.canonical`, which knows the whole wire format. What is not marked has been read
right.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from hespas.converters.chakra.spans import Bools, Longs, Window, Words, offsets_of
from hespas.converters.chakra.varints import read_varints

__all__ = ["Cursor", "Spans", "repeated_spans"]

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
    data = window.u8[at:end].tobytes()
    spans = array("q")
    here, size = 0, len(data)
    while here < size:
        if data[here] != tag:
            return None
        length, shift, here = 0, 0, here + 1
        while here < size and data[here] >= 0x80 and shift < 63:
            length |= (data[here] & 0x7F) << shift
            shift, here = shift + 7, here + 1
        if here >= size:
            return None
        length |= data[here] << shift
        here += 1
        if length > size - here:
            return None
        spans.append(at + here)
        spans.append(length)
        here += length
    return spans
