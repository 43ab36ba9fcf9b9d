"""Writing many messages at once: fields become tokens of at most 16 bytes, which are then set side by side.

A token is a block of 16 bytes of which the first ``width`` count. Every field of every message is one or more
tokens; joining fields interleaves their tokens, and rendering writes all blocks in ascending order, each
overwriting what the one before wrote beyond its width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.columns import ByteRows
from hespas.converters.chakra.spans import BLOCK, Bytes, Longs, Window, Words, offsets_of

__all__ = ["Tokens", "delimited", "fixed", "join", "render", "rows", "spans", "varints"]

_BLOCK_TYPE = np.dtype((np.void, BLOCK))
_CONTINUE = np.uint64(0x8080808080808080)
_ONE, _EIGHT, _WORD = np.uint64(1), np.uint64(8), np.uint64(64)


class Tokens(NamedTuple):
    """Tokens in row order: ``blocks`` has shape ``(tokens, 2)``; ``counts`` per row, None when one each.

    ``clean`` blocks are zero beyond their width, so that another token can be fused onto them.
    """

    blocks: Words
    widths: Longs
    counts: Longs | None = None
    clean: bool = False

    @classmethod
    def none(cls, count: int) -> Tokens:
        """``count`` empty rows."""
        return cls(np.empty((0, 2), np.uint64), np.empty(0, np.int64), np.zeros(count, np.int64))

    def row_counts(self) -> Longs:
        """Tokens in each row."""
        return np.ones(len(self.widths), np.int64) if self.counts is None else self.counts

    def row_bytes(self) -> Longs:
        """Bytes in each row."""
        return self.widths if self.counts is None else _segment_sums(self.widths, self.counts)

    def grouped(self, offsets: Longs) -> Tokens:
        """The same tokens with rows ``offsets[i]:offsets[i + 1]`` made one."""
        return Tokens(self.blocks, self.widths, _segment_sums(self.row_counts(), np.diff(offsets)))

    def only_in(self, rows: Longs, count: int) -> Tokens:
        """The same tokens as rows ``rows`` of ``count``; all other rows are empty."""
        counts = np.zeros(count, np.int64)
        counts[rows] = self.row_counts()
        return Tokens(self.blocks, self.widths, counts)


def _segment_sums(values: Longs, counts: Longs) -> Longs:
    running = offsets_of(values)
    return np.diff(running[offsets_of(counts)])


def _varint_widths(values: Words) -> Longs:
    """Bytes of each varint."""
    widths = np.ones(len(values), np.int64)
    largest = int(values.max()) if len(values) else 0
    for bits in range(7, 64, 7):
        if largest >> bits == 0:
            break
        widths += values >= np.uint64(1 << bits)
    return widths


def _spread_sevens(value: Words) -> Words:
    """The low 56 bits as eight groups of seven, one in each byte."""
    quads = (value & np.uint64(0x000000000FFFFFFF)) | (
        (value & np.uint64(0x00FFFFFFF0000000)) << np.uint64(4)
    )
    pairs = (quads & np.uint64(0x00003FFF00003FFF)) | (
        (quads & np.uint64(0x0FFFC0000FFFC000)) << np.uint64(2)
    )
    return (pairs & np.uint64(0x007F007F007F007F)) | ((pairs & np.uint64(0x3F803F803F803F80)) << np.uint64(1))


def varints(
    values: Words, tag: Words | int | None = None, *, keep: NDArray[np.bool_] | None = None
) -> Tokens:
    """One token per value: the tag (a number whose bytes it is, or one per row), then the value as a varint.

    Where ``keep`` is false the token is empty.
    """
    widths = _varint_widths(values)
    if not len(values) or int(values.max()) < 0x80:
        low, high = values, np.zeros(len(values), np.uint64)
    else:
        stop = (widths - 1).view(np.uint64) * _EIGHT
        low = _spread_sevens(values) | (_CONTINUE & ((_ONE << stop) - _ONE))
        high = np.zeros(len(values), np.uint64)
        long = np.flatnonzero(widths > 8)
        top = values[long] >> np.uint64(56)
        high[long] = (top & np.uint64(0x7F)) | np.where(widths[long] == 10, np.uint64(0x180), np.uint64(0))
    return _tagged(low, high, widths, tag, keep)


def fixed(bits: Words, size: int, tag: Words) -> Tokens:
    """One token per value: the tag, then ``size`` bytes of ``bits``."""
    return _tagged(bits, np.zeros(len(bits), np.uint64), np.full(len(bits), size, np.int64), tag, None)


def _tagged(
    low: Words, high: Words, widths: Longs, tag: Words | int | None, keep: NDArray[np.bool_] | None
) -> Tokens:
    """Put the bytes of the tag in front."""
    blocks = np.empty((len(low), 2), np.uint64)
    if tag is None:
        blocks[:, 0], blocks[:, 1] = low, high
    else:
        tags = np.asarray(tag, np.uint64)
        size = 1 + (tags >= 0x100)
        shift = size.astype(np.uint64) * _EIGHT
        blocks[:, 0] = tags | (low << shift)
        blocks[:, 1] = (high << shift) | (low >> (_WORD - shift))
        widths = widths + size
    if keep is None:
        return Tokens(blocks, widths, clean=True)
    return Tokens(blocks * keep[:, None], widths * keep, clean=True)


def spans(window: Window, start: Longs, length: Longs) -> Tokens:
    """The bytes at the given spans, one token per started 16 bytes."""
    counts = (length + (BLOCK - 1)) >> 4
    if len(counts) and int(counts.max()) == 1 and int(counts.min()) == 1:
        return Tokens(_blocks_at(window, start), length)
    first = np.cumsum(counts) - counts
    total = int(counts.sum())
    source = np.repeat(start - (first << 4), counts) + (np.arange(total, dtype=np.int64) << 4)
    widths = np.full(total, BLOCK, np.int64)
    filled = np.flatnonzero(counts)
    widths[first[filled] + counts[filled] - 1] = length[filled] - ((counts[filled] - 1) << 4)
    return Tokens(_blocks_at(window, source), widths, counts)


def _blocks_at(window: Window, at: Longs) -> Words:
    return window.blocks[at].view(np.uint64).reshape(-1, 2)


def rows(content: ByteRows) -> Tokens:
    """The bytes of each row."""
    return spans(Window.holding(content.data), content.offsets[:-1] - content.offsets[0], content.lengths)


def delimited(tag: int | None, content: Sequence[Tokens], *, keep_empty: bool) -> list[Tokens]:
    """Length-delimited fields: the tag, the length of the row's content, the content.

    Rows without content are left out altogether unless ``keep_empty``.
    """
    size = content[0].row_bytes()
    for part in content[1:]:
        size = size + part.row_bytes()
    head = varints(size.view(np.uint64), tag, keep=None if keep_empty else size > 0)
    return [head, *content]


def join(parts: Sequence[Tokens]) -> Tokens:
    """Rows side by side: row ``i`` is row ``i`` of each part, in order."""
    present = _fused([part for part in parts if len(part.widths)])
    if len(present) < 2:
        return present[0] if present else parts[0]
    if all(part.counts is None for part in present):
        return _interleaved(present)
    counts = np.zeros(len(present[0].row_counts()), np.int64)
    for part in present:
        counts += 1 if part.counts is None else part.counts
    ends = np.cumsum(counts)
    place, total = ends - counts, int(ends[-1])
    blocks = np.empty(total, _BLOCK_TYPE)
    widths = np.empty(total, np.int64)
    for part in present:
        into = place
        if part.counts is None:
            place = place + 1
        else:
            own = np.cumsum(part.counts) - part.counts
            into = np.repeat(place - own, part.counts) + np.arange(len(part.widths), dtype=np.int64)
            place = place + part.counts
        blocks[into] = part.blocks.view(_BLOCK_TYPE).reshape(-1)
        widths[into] = part.widths
    return Tokens(blocks.view(np.uint64).reshape(-1, 2), widths, counts)


def _interleaved(parts: Sequence[Tokens]) -> Tokens:
    """Parts of one token a row each."""
    rows = len(parts[0].widths)
    blocks = np.empty((rows, len(parts), 2), np.uint64)
    widths = np.empty((rows, len(parts)), np.int64)
    for place, part in enumerate(parts):
        blocks[:, place] = part.blocks
        widths[:, place] = part.widths
    counts = np.full(rows, len(parts), np.int64)
    return Tokens(blocks.reshape(-1, 2), widths.reshape(-1), counts)


def _fused(parts: Sequence[Tokens]) -> list[Tokens]:
    """Make one of neighbours that have a token a row each and fit into one block."""
    fused: list[Tokens] = []
    for part in parts:
        last = fused[-1] if fused else None
        if last is not None and _fit(last, part):
            fused[-1] = _fuse(last, part)
        else:
            fused.append(part)
    return fused


def _fit(first: Tokens, second: Tokens) -> bool:
    """Whether each row's two tokens can share a block."""
    if first.counts is not None or second.counts is not None or not first.clean:
        return False
    return int(first.widths.max()) + int(second.widths.max()) <= BLOCK


def _fuse(first: Tokens, second: Tokens) -> Tokens:
    """The bytes of ``second`` behind those of ``first``, which is clean."""
    # A shift by 64 or more (and by a negative number, which is a large unsigned one) gives 0 in NumPy.
    shift = first.widths.view(np.uint64) * _EIGHT
    low, high = second.blocks[:, 0], second.blocks[:, 1]
    blocks = np.empty_like(first.blocks)
    blocks[:, 0] = first.blocks[:, 0] | (low << shift)
    blocks[:, 1] = first.blocks[:, 1] | (high << shift) | (low >> (_WORD - shift)) | (low << (shift - _WORD))
    return Tokens(blocks, first.widths + second.widths, clean=second.clean)


def render(tokens: Tokens) -> Bytes:
    """All rows one behind the other."""
    ends = np.cumsum(tokens.widths)
    total = int(ends[-1]) if len(ends) else 0
    out = np.empty(total + BLOCK, np.uint8)
    target: NDArray[np.void] = np.ndarray((total + 1,), _BLOCK_TYPE, out.data, strides=(1,))
    # Ascending order: what a block writes beyond its width the next one overwrites.
    target[ends - tokens.widths] = tokens.blocks.view(_BLOCK_TYPE).reshape(-1)
    return out[:total]
