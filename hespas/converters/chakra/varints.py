"""Varints and length-delimited fields, many at a time: https://protobuf.dev/programming-guides/encoding/.

Nothing here raises; what is malformed is reported as a mask for the caller to judge.
"""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.spans import Bools, Longs, Window, Words, copy_spans

__all__ = ["packed_varints", "read_varints"]

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
