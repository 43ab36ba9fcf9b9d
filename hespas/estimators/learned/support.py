"""How far an operation is from all that a fit has seen, in octaves of its sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.operations import Operations
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["FREE_OCTAVES", "MOST_OCTAVES", "WIDENING", "distances", "octaves_of", "support_of"]

FREE_OCTAVES = 1
"""As far from a seen size as two held-out shapes are from each other: no reason to widen."""
MOST_OCTAVES = 3
"""Further away trees repeat the edge of what they know: no prediction."""
WIDENING = 0.25
"""Octaves of time that the interval grows, on both sides, for each octave of size beyond the free one."""

_CELLS_AT_ONCE = 256


def support_of(dims: Sequence[str], ops: Operations) -> NDArray[np.int8]:
    """The distinct octaves that operations lie in; shape (cells, dims)."""
    return np.unique(octaves_of(dims, ops), axis=0).astype(np.int8)


def octaves_of(dims: Sequence[str], ops: Operations) -> IntArray:
    """log2 of each size, rounded; -1 where an operation has no such size. Shape (ops, dims)."""
    columns = [np.round(np.log2(np.maximum(np.nan_to_num(ops.dim(name), nan=0.5), 0.5))) for name in dims]
    return np.clip(np.stack(columns, axis=1), -1, 120).astype(np.int64)


def distances(seen: NDArray[np.int8], octaves: IntArray) -> FloatArray:
    """The largest difference in any size to the nearest octaves seen; shape (ops,). Equal ones count once."""
    distinct, place = np.unique(octaves, axis=0, return_inverse=True)
    nearest = np.zeros(len(distinct))
    for start in range(0, len(distinct), _CELLS_AT_ONCE):
        some = distinct[start : start + _CELLS_AT_ONCE]
        apart = np.abs(some[:, None, :] - seen[None, :, :].astype(np.int64)).max(axis=2)
        nearest[start : start + _CELLS_AT_ONCE] = apart.min(axis=1) if len(seen) else np.inf
    return nearest[place.reshape(-1)]
