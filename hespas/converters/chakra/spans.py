"""Bytes at many positions: the arrays of the codec, windows over a buffer, and copying of spans.

A :class:`Window` has slack behind its content, so that a load of eight or sixteen bytes at any position
inside is safe.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BLOCK", "SLACK", "Bools", "Bytes", "Longs", "Window", "Words", "copy_spans", "offsets_of"]

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
