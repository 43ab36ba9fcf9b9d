"""What time would follow from work alone: start, FLOPs and bytes, each at its best rate.

Interpolation goes between measured times divided by this, which bends far less than the times themselves.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from hespas.graph.columns import FloatArray

__all__ = ["start_and_rates", "work_of"]


def work_of(flops: FloatArray, bytes_moved: FloatArray) -> FloatArray:
    """Columns of a reference: one, FLOPs, bytes; shape ``(ops, 3)``. What is unknown counts as none."""
    return np.stack((np.ones(len(flops)), np.nan_to_num(flops), np.nan_to_num(bytes_moved)), axis=1)


def start_and_rates(work: FloatArray, duration_ns: FloatArray) -> FloatArray:
    """Non-negative coefficients of :func:`work_of`, least squares of the relative error. Shape ``(3,)``.

    Three columns have seven subsets: the best of those whose solution has no negative coefficient.
    """
    scale = np.maximum(work.max(axis=0), 1e-300)
    matrix = work / scale / duration_ns[:, None]
    ones = np.ones(len(duration_ns))
    best, least = np.array([np.median(duration_ns), 0.0, 0.0]), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(work.shape[1]), size):
            part = matrix[:, chosen]
            found: FloatArray = np.asarray(np.linalg.lstsq(part, ones, rcond=None)[0], np.float64)
            left = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and found.any() and left < least:
                best, least = np.zeros(3), left
                best[list(chosen)] = found / scale[list(chosen)]
    return best
