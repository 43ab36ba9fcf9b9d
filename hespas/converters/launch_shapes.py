"""Launch shapes of kernels as texts: ``[[blocks x, y, z],[threads of a block x, y, z]]``.

Profilers of CUDA count a grid in blocks; profilers of ROCm count threads (HSA work-items) if they read the
queue's packets. Profiles count blocks. Impossible shapes are unknown: row 0.
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
    """Return the launch shape (extents of grid and block) as text, empty for an impossible extent. If
    ``in_threads``, the grid counts threads and not blocks.
    """
    if len(grid) != 3 or len(block) != 3 or not all(0 < extent < _LARGEST for extent in (*grid, *block)):
        return ""
    if in_threads:
        grid = [-(-threads // size) for threads, size in zip(grid, block, strict=True)]
    return msgspec.json.encode([list(grid), list(block)]).decode()


def shape_rows(strings: StringTableBuilder, *extents: IntArray, in_threads: bool = False) -> SmallIntArray:
    """Return, for each launch, the row of its launch shape in the string table ``strings``. ``extents`` are
    six columns: the extents of grid and block.
    """
    if not len(extents[0]):
        return np.empty(0, np.int32)
    shapes, index = distinct_rows(*extents)
    texts = [shape_text(shape[:3], shape[3:], in_threads=in_threads) for shape in shapes]
    return np.array([strings.add(text) for text in texts], np.int32)[index]


def blocks_of_threads(strings: StringTableBuilder, rows: SmallIntArray) -> SmallIntArray:
    """Return the rows of launches with their grids converted from threads to blocks."""

    def converted(row: int) -> int:
        if not row:
            return 0
        grid, block = _shape.decode(strings[row])
        return strings.add(shape_text(grid, block, in_threads=True))

    return mapped(rows, converted, np.int32)
