"""Bytes at many positions: the arrays of the codec, windows over a buffer, and copying of spans.

A :class:`Window` has slack behind its content, so that a load of eight or sixteen bytes at any position
inside is safe.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.files.wire import WireError, decode_varint

__all__ = [
    "BLOCK",
    "SLACK",
    "Bools",
    "Bytes",
    "Cursor",
    "Longs",
    "Spans",
    "Window",
    "Words",
    "copy_spans",
    "offsets_of",
    "packed_varints",
    "read_varints",
    "repeated_spans",
]

Bools = NDArray[np.bool_]
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Longs = NDArray[np.int64]

SLACK = 64
"""Readable bytes that a window keeps behind its content."""

BLOCK = 16
"""Bytes moved at once by :func:`copy_spans`."""

_BLOCK_TYPE = np.dtype((np.void, BLOCK))


def offsets_of(lengths: NDArray[np.integer]) -> Longs:
    """Row offsets, shape ``(rows + 1,)``, from each row's length."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


class Window(NamedTuple):
    """Bytes (with :data:`SLACK` more behind them) as bytes, and as words and blocks at every position."""

    u8: Bytes
    words: Words
    blocks: NDArray[np.void]

    @classmethod
    def over(cls, padded: Bytes) -> Window:
        """A window over an array whose last :data:`SLACK` bytes are padding."""
        size = len(padded) - SLACK
        words: Words = np.ndarray((size + SLACK - 8,), "<u8", padded.data, strides=(1,))
        blocks: NDArray[np.void] = np.ndarray((size + SLACK - BLOCK,), _BLOCK_TYPE, padded.data, strides=(1,))
        return cls(padded, words, blocks)

    @classmethod
    def holding(cls, data: Bytes) -> Window:
        """A window over a padded copy of ``data``."""
        padded = np.empty(len(data) + SLACK, np.uint8)
        padded[: len(data)] = data
        padded[len(data) :] = 0
        return cls.over(padded)


def copy_spans(window: Window, start: Longs, length: Longs) -> tuple[Bytes, Longs]:
    """The spans one behind the other, and their offsets, shape ``(spans + 1,)``.

    The spans must lie within the window's content. Cost: one block move per started 16 bytes.
    """
    offsets = offsets_of(length)
    out = np.empty(int(offsets[-1]) + BLOCK, np.uint8)
    target: NDArray[np.void] = np.ndarray((int(offsets[-1]) + 1,), _BLOCK_TYPE, out.data, strides=(1,))
    blocks = (length + (BLOCK - 1)) >> 4
    source, into = start, offsets[:-1]
    if len(blocks) and (int(blocks.max()) > 1 or int(blocks.min()) == 0):
        first = np.cumsum(blocks) - blocks
        steps = np.arange(int(blocks.sum()), dtype=np.int64) << 4
        source = np.repeat(start - (first << 4), blocks) + steps
        into = np.repeat(offsets[:-1] - (first << 4), blocks) + steps
    # Blocks are written in ascending order, so what one writes beyond its span the next one overwrites.
    target[into] = window.blocks[source]
    return out[: int(offsets[-1])], offsets


# Varints and length-delimited fields, many at a time: https://protobuf.dev/programming-guides/encoding/.
#
# Nothing here raises; what is malformed is reported as a mask for the caller to judge.

_STOPS = np.uint64(0x8080808080808080)
_SEVENS = np.uint64(0x7F7F7F7F7F7F7F7F)
_WIDTH_OF_STOP = np.uint64(0x0102030405060708)
_ONE = np.uint64(1)


def read_varints(window: Window, at: Longs) -> tuple[Words, Longs, Bools | None]:
    """The varint at each position: values, the positions behind them, and where it exceeds ten bytes.

    The mask is ``None`` when no varint is that long. Positions must lie within the window's content or not
    more than ``SLACK - 11`` behind it.
    """
    first = window.u8.take(at)
    if not len(first) or int(first.max()) < 0x80:
        return first.astype(np.uint64), at + 1, None
    word = window.words[at]
    stops = ~word & _STOPS
    lowest = stops & (~stops + _ONE)
    mask = (lowest << _ONE) - _ONE
    value = _pack_sevens(word & mask & _SEVENS)
    width = ((lowest >> np.uint64(7)) * _WIDTH_OF_STOP) >> np.uint64(56)
    behind = at + width.view(np.int64)
    long = np.flatnonzero(stops == 0)
    return (value, behind, None) if not len(long) else _with_long(window, at, value, behind, long)


def _pack_sevens(groups: Words) -> Words:
    """Close the gaps between the seven-bit groups of eight bytes."""
    pairs = (groups & np.uint64(0x007F007F007F007F)) | (
        (groups & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    )
    quads = (pairs & np.uint64(0x00003FFF00003FFF)) | (
        (pairs & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    return (quads & np.uint64(0x000000000FFFFFFF)) | ((quads & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4))


def _with_long(
    window: Window, at: Longs, value: Words, behind: Longs, long: Longs
) -> tuple[Words, Longs, Bools | None]:
    """Complete the rows ``long``, whose varints have nine or ten bytes (or too many)."""
    ninth = window.u8[at[long] + 8].astype(np.uint64)
    tenth = window.u8[at[long] + 9].astype(np.uint64)
    goes_on = ninth >= 0x80
    high = (ninth & np.uint64(0x7F)) << np.uint64(56)
    high |= np.where(goes_on, (tenth & _ONE) << np.uint64(63), np.uint64(0))
    value[long] |= high
    behind[long] = at[long] + 9 + goes_on
    endless = goes_on & (tenth >= 0x80)
    if not endless.any():
        return value, behind, None
    bad = np.zeros(len(at), np.bool_)
    bad[long] = endless
    return value, behind, bad


def packed_varints(window: Window, start: Longs, length: Longs) -> tuple[Words, Longs, Bools | None]:
    """Packed varints of many spans: all values in order, offsets per span, and which spans are malformed."""
    data, bounds = copy_spans(window, start, length)
    if not len(data):
        return np.empty(0, np.uint64), np.broadcast_to(np.int64(0), (len(bounds),)), None
    if int(data.max()) < 0x80:
        return data.astype(np.uint64), bounds, None
    stops = data < 0x80
    counted = np.zeros(len(data) + 1, np.int64)
    np.cumsum(stops, out=counted[1:])
    offsets = counted[bounds]
    cut = (length > 0) & ~stops[np.maximum(bounds[1:] - 1, 0)]
    last = np.flatnonzero(stops)
    first = np.empty_like(last)
    first[:1] = 0
    first[1:] = last[:-1] + 1
    values, _, endless = read_varints(Window.holding(data), first)
    if endless is not None:
        cut[np.searchsorted(offsets, np.flatnonzero(endless), side="right") - 1] = True
    return values, offsets, cut if cut.any() else None


# Walking many messages at once, field by field, in ascending field order.
#
# A :class:`Cursor` stands at one position per message. Whatever is not what a protobuf serialiser writes
# (fields out of order, unknown fields, wrong wire types, spans that leave the message) marks the message as
# ``bad`` and is left to :mod:`.messages`, which knows the whole wire format. What is not marked has been
# read right.

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
        try:
            length, here = decode_varint(data, here + 1, size)
        except WireError:
            return None
        if length > size - here:
            return None
        spans.append(at + here)
        spans.append(length)
        here += length
    return spans
