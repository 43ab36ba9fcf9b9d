"""Share of the capacity of a server that a measured run takes; beyond it, requests wait in a queue.

There a small error of the rate becomes a large one of the time to the first token, so such runs are marked
and reported, and their errors are summarized apart.
"""

from __future__ import annotations

from math import isnan
from typing import Literal

import numpy as np

from hespas.graph.columns import FloatArray, IntArray

__all__ = ["Capacity", "capacity_of", "most_at_once"]

Capacity = Literal["below", "near", "beyond", "unknown"]
_NEAR = 0.9
"""Share of the capacity from which chance makes requests wait."""


def capacity_of(load_share: float) -> Capacity:
    """Return where a run is, by the most that it asked of its server at once over what that holds."""
    if isnan(load_share):
        return "unknown"
    return "beyond" if load_share > 1 else "near" if load_share >= _NEAR else "below"


def most_at_once(start_s: FloatArray, end_s: FloatArray, amount: IntArray) -> float:
    """Return the largest sum of ``amount`` over requests between their start and end. O(requests log)."""
    times = np.concatenate((start_s, end_s))
    change = np.concatenate((amount, -amount))
    order = np.lexsort((change, times))  # at one time, what ends goes before what begins
    return float(np.cumsum(change[order]).max())
