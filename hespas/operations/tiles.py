"""Arrays in the memory of a TPU: whole tiles of 8 x 128 elements of two dimensions, which XLA chooses.

XLA's layouts on TPUs are ``T(8,128)``, of 16 bits ``T(8,128)(2,1)``: 8 rows whatever the width of an element
(openxla.org/xla/tiled_layout). Of short arrays tiles have fewer rows, 1, 2 or 4. A compiler that may choose
lays those two dimensions innermost that fill their tiles best: in this order f16 additions of a TPU v4 take
time in the elements of whole tiles (0.7 % of three dimensions, 0.6 % of two; in elements 9 % and 2 %; in
tiles of 16 rows 6 %: ``tpuv4_nongemm``, arXiv 2603.22535).
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
"""A dimension of kinds that stream their data: how many times the elements of the array those of its whole
tiles are. NaN (tables do not say) is what rows and columns give.
"""

_MOST_RANK = 8
"""Of more dimensions only the longest are tried: pairs grow with the square."""


def padded(size: FloatArray, tile: FloatArray | float) -> FloatArray:
    """``size`` in whole tiles."""
    return np.ceil(size / tile) * tile


def elements_in_tiles(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """Elements of whole tiles that hold matrices, in the order of the two dimensions that takes fewer."""
    return np.minimum(_in_order(rows, columns), _in_order(columns, rows))


def _in_order(rows: FloatArray, columns: FloatArray) -> FloatArray:
    with np.errstate(invalid="ignore"):
        tile = np.minimum(2 ** np.ceil(np.log2(np.maximum(rows, 1.0))), SUBLANES)
    return padded(rows, tile) * padded(columns, LANES)


def padding_of_matrices(rows: FloatArray, columns: FloatArray) -> FloatArray:
    """Elements of whole tiles over elements: at least 1, NaN where a size is unknown or 0."""
    elements = rows * columns
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(elements > 0, elements_in_tiles(rows, columns) / elements, np.nan)


def padding_of(ops: Operations) -> FloatArray:
    """How many times the elements of operations whole tiles hold; 1 where no rows and columns are known."""
    padding = padding_of_matrices(ops.dim("rows"), ops.dim("columns"))
    return np.nan_to_num(ops.dim(TILED, padding), nan=1.0)


def padding_of_shape(shape: Sequence[float]) -> float:
    """The same of an array of any rank: of the two dimensions that fill their tiles best, those before them
    counted as often as they are. NaN of an empty array.
    """
    if not all(size > 0 for size in shape):
        return float("nan")
    sizes = [*sorted(shape, reverse=True)[:_MOST_RANK], *[1.0] * (2 - len(shape))]
    rows, columns = np.array(list(permutations(sizes, 2)), np.float64).T
    return float(np.min(padding_of_matrices(rows, columns)))
