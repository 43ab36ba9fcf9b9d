"""How far an operation is from all that a fit has seen, in octaves of its sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hespas.estimators.operations import Operations
from hespas.files.limits import limits
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError

__all__ = ["FREE_OCTAVES", "MOST_OCTAVES", "WIDENING", "distances", "octaves_of", "support_of"]

FREE_OCTAVES = 1
"""As far from a seen size as two held-out shapes are from each other: no reason to widen."""
MOST_OCTAVES = 3
"""Further away trees repeat the edge of what they know: no prediction."""
WIDENING = 0.25
"""Octaves of time that the interval grows, on both sides, for each octave of size beyond the free one."""

_DIFFERENCES_AT_ONCE = 1 << 17


def support_of(dims: Sequence[str], ops: Operations) -> NDArray[np.int8]:
    """The distinct octaves that operations lie in; shape (cells, dims).

    Raises ``UnsupportedError`` where they are more than a stored model may have.
    """
    found = np.unique(octaves_of(dims, ops), axis=0).astype(np.int8)
    if len(found) > limits().model_sizes:
        raise UnsupportedError(
            f"a learned model of {len(found):,} octaves of sizes, at most {limits().model_sizes:,}",
            hint="fit it on fewer shapes",
        )
    return found


def octaves_of(dims: Sequence[str], ops: Operations) -> IntArray:
    """log2 of each size, rounded; -1 where an operation has no such size. Shape (ops, dims)."""
    columns = [np.round(np.log2(np.maximum(np.nan_to_num(ops.dim(name), nan=0.5), 0.5))) for name in dims]
    return np.clip(np.stack(columns, axis=1), -1, 120).astype(np.int64)


def distances(seen: NDArray[np.int8], octaves: IntArray) -> FloatArray:
    """The largest difference in any size to the nearest octaves seen; shape (ops,). Equal ones count once."""
    distinct, rows = np.unique(octaves, axis=0, return_inverse=True)
    if not len(seen):
        return np.full(len(octaves), np.inf)
    nearest = np.zeros(len(distinct))
    columns = [np.ascontiguousarray(column, np.int16) for column in seen.T]
    room = np.empty((2, min(max(1, _DIFFERENCES_AT_ONCE // len(seen)), len(distinct)), len(seen)), np.int16)
    for start in range(0, len(distinct), room.shape[1]):
        some = distinct[start : start + room.shape[1]].astype(np.int16)
        farthest, apart = room[:, : len(some)]
        farthest[:] = 0
        for place, column in enumerate(columns):
            np.subtract(some[:, place, None], column, out=apart)
            np.maximum(farthest, np.abs(apart, out=apart), out=farthest)
        nearest[start : start + len(some)] = farthest.min(axis=1)
    return nearest[rows.reshape(-1)]
