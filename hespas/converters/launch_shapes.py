"""How kernels were launched, as one text each: ``[[blocks x, y, z],[threads of a block x, y, z]]``.

Profilers of CUDA count a grid in blocks, those of ROCm in threads (HSA's work-items) wherever they read what
the queue was given. Profiles count blocks. Shapes that no launch has are unknown: row 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hespas.graph import StringTableBuilder
from hespas.graph.columns import IntArray, SmallIntArray, distinct_rows, mapped

__all__ = ["blocks_of_threads", "shape_rows", "shape_text"]

_LARGEST = 1 << 31
_shape = msgspec.json.Decoder(tuple[tuple[int, int, int], tuple[int, int, int]])


def shape_text(grid: Sequence[int], block: Sequence[int], *, in_threads: bool = False) -> str:
    """The text of one launch; empty where an extent is none. ``in_threads``: the grid counts threads."""
    if len(grid) != 3 or len(block) != 3 or not all(0 < each < _LARGEST for each in (*grid, *block)):
        return ""
    if in_threads:
        grid = [-(-threads // size) for threads, size in zip(grid, block, strict=True)]
    return msgspec.json.encode([list(grid), list(block)]).decode()


def shape_rows(strings: StringTableBuilder, *extents: IntArray, in_threads: bool = False) -> SmallIntArray:
    """The row of each launch among ``strings``, from six columns: extents of the grid, then of a block."""
    if not len(extents[0]):
        return np.empty(0, np.int32)
    shapes, place = distinct_rows(*extents)
    texts = [shape_text(shape[:3], shape[3:], in_threads=in_threads) for shape in shapes]
    return np.array([strings.add(text) for text in texts], np.int32)[place]


def blocks_of_threads(strings: StringTableBuilder, rows: SmallIntArray) -> SmallIntArray:
    """The rows of launches whose grid was told in threads, as blocks."""

    def converted(row: int) -> int:
        if not row:
            return 0
        grid, block = _shape.decode(strings[row])
        return strings.add(shape_text(grid, block, in_threads=True))

    return mapped(rows, converted, np.int32)
