"""Several arrays on one product: each takes a share of the batch, of M or of N, and all run at once.

K is not shared: partial sums would have to be added across arrays. A TPU that joins two cores (megacore) has
the arrays of both.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hespas.estimators.systolic.array import Array
from hespas.estimators.systolic.closed_form import fold_cycles
from hespas.graph.columns import FloatArray

__all__ = ["shared_cycles"]


def shared_cycles(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    array: Array,
    *,
    arrays: int = 1,
    batch: FloatArray | None = None,
) -> FloatArray:
    """Cycles of the slowest of ``arrays`` equal arrays, with the split that takes the fewest."""
    times = np.ones_like(m) if batch is None else batch
    best = np.full(m.shape, np.nan)
    for over_batch, over_m, over_n in _splits(arrays):
        one = fold_cycles(np.ceil(m / over_m), np.ceil(n / over_n), k, array) + 1
        best = np.fmin(best, np.ceil(times / over_batch) * one - 1)
    empty = (m == 0) | (n == 0) | (k == 0) | (times == 0)
    return np.where(empty, 0.0, best)


def _splits(arrays: int) -> Iterator[tuple[int, int, int]]:
    """Every way to write ``arrays`` as a product of three shares."""
    divisors = [share for share in range(1, arrays + 1) if arrays % share == 0]
    for over_batch in divisors:
        for over_m in divisors:
            if arrays % (over_batch * over_m) == 0:
                yield over_batch, over_m, arrays // (over_batch * over_m)
