"""Waiting for memory behind the buffers: an approximation, and no more than one.

The simulator prefetches demand in the order of its traces; its stalls depend on that order. Here an operand
that fits its buffer is fetched once, any other each time the array reads it, and what the slower of the two
takes beyond the computing is the stall; writes are taken to hide. Of 69 runs of scalesim 3.0.0 three quarters
are told rightly to stall or not; of those that do, the total comes out at about a third of the simulator's
(in the middle; far less where buffers hold a few rows).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.estimators.systolic.array import Array
from hespas.estimators.systolic.closed_form import fold_counts
from hespas.graph.columns import FloatArray

__all__ = ["Backing", "stall_cycles"]


@dataclass(frozen=True, slots=True)
class Backing:
    """The memory behind each buffer of operands: words per cycle, and words it holds."""

    words_per_cycle: float
    buffer_words: float


def stall_cycles(m: FloatArray, n: FloatArray, k: FloatArray, array: Array, backing: Backing) -> FloatArray:
    """Cycles that each product waits, approximately: at least 0, NaN where a size is unknown."""
    counts = fold_counts(m, n, k, array)
    held = backing.buffer_words
    fetched = np.maximum(
        np.where(m * k <= held, m * k, counts.ifmap_reads),
        np.where(k * n <= held, k * n, counts.filter_reads),
    )
    return np.maximum(fetched / backing.words_per_cycle - counts.cycles, 0.0)
