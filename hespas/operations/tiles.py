"""Padding of arrays to whole memory tiles of a TPU: 8 x 128 elements of two dimensions.

XLA's layouts on TPUs are ``T(8,128)``, for 16 bits ``T(8,128)(2,1)``: 8 rows for any element width
(openxla.org/xla/tiled_layout). Tiles of short arrays have 1, 2 or 4 rows. The compiler lays out innermost the
two dimensions that fill their tiles best. The time of f16 additions on a TPU v4 is then linear in elements of
whole tiles, with an error of 0.7 % for three dimensions and 0.6 % for two (in elements: 9 % and 2 %; in
tiles of 16 rows: 6 %; ``tpuv4_nongemm``, arXiv 2603.22535).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.operations.model import Operations

__all__ = [
    "LANES",
    "SUBLANES",
    "TILED",
    "elements_in_tiles",
    "padded",
    "padding_of",
    "padding_of_matrices",
    "padding_of_shape",
]

SUBLANES, LANES = 8.0, 128.0
"""Rows and columns of a tile."""

TILED = "tiled"
"""Dimension of kinds that stream their data: elements of whole tiles over elements of the array. NaN (not in
tables) is replaced by the ratio of rows and columns.
"""

_MOST_RANK = 8
"""Number of the longest dimensions that are tried as the innermost two."""


def padded(size: FloatArray, tile: FloatArray | float) -> FloatArray:
    """Return ``size`` rounded up to whole tiles."""
    return np.ceil(size / tile) * tile


def elements_in_tiles(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """Return the number of elements in the whole memory tiles that hold each matrix. Of the two orders of the
    dimensions, the one that needs fewer tiles is assumed.
    """
    orders: list[FloatArray] = []
    for outer, inner in ((rows, columns), (columns, rows)):
        with np.errstate(invalid="ignore"):
            tile = np.minimum(2 ** np.ceil(np.log2(np.maximum(outer, 1.0))), SUBLANES)
        orders.append(padded(outer, tile) * padded(inner, LANES))
    return np.minimum(*orders)


def padding_of_matrices(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """Return the ratio of elements in whole memory tiles to elements of a matrix. It is at least 1, or NaN if
    a size is unknown or 0.
    """
    elements = rows * columns
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(elements > 0, elements_in_tiles(rows, columns) / elements, np.nan)


def padding_of(ops: Operations) -> FloatArray:
    """Return the ratio of elements in whole memory tiles to elements of each operation; 1 if rows or columns
    are unknown.
    """
    padding = padding_of_matrices(ops.dim("rows"), ops.dim("columns"))
    return np.nan_to_num(ops.dim(TILED, padding), nan=1.0)


def padding_of_shape(shape: Sequence[float]) -> float:
    """Return the ratio of elements in whole memory tiles to elements of an array of any rank; NaN for an
    empty array.

    The two dimensions that fill their tiles best are assumed to be innermost.
    """
    if not all(size > 0 for size in shape):
        return float("nan")
    sizes = [*sorted(shape, reverse=True)[:_MOST_RANK], *[1.0] * (2 - len(shape))]
    rows, columns = np.array(list(permutations(sizes, 2)), np.float64).T
    return float(np.min(padding_of_matrices(rows, columns)))
