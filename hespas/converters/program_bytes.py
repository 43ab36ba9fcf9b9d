"""What the parameters and results of a program take, as :data:`~hespas.graph.PROGRAM_BYTES` says it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isnan

__all__ = ["program_bytes"]


def program_bytes(parameters: Sequence[float], results: Sequence[float], donated: Iterable[int]) -> str:
    """Bytes of the parameters, of the results and of parameters over which results are written; empty where
    one of them has an unknown size. ``donated`` are places of parameters; one that names no result is written
    over by one of its size.
    """
    free, over = Counter(results), 0.0
    for place in sorted(donated):
        size = parameters[place] if place < len(parameters) else 0.0
        if free[size] > 0:
            free[size] -= 1
            over += size
    figures = (sum(parameters), sum(results), over)
    return "" if any(isnan(each) for each in figures) else " ".join(f"{each:.0f}" for each in figures)
