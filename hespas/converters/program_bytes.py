"""Bytes of a program's parameters and results, in the spelling of :data:`~hespas.graph.PROGRAM_BYTES`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import isnan

__all__ = ["program_bytes"]


def program_bytes(parameters: Sequence[float], results: Sequence[float], donated: Iterable[int]) -> str:
    """Return the memory of a program as text for its metadata (:data:`~hespas.graph.PROGRAM_BYTES`), empty if
    a size is unknown.

    The text has the bytes of the parameters, of the results, and of the parameters that results overwrite.
    ``donated`` are the indices of parameters that may be overwritten, each by a result of the same size.
    """
    results_by_size, overwritten = Counter(results), 0.0
    for position in sorted(donated):
        size = parameters[position] if position < len(parameters) else 0.0
        if results_by_size[size] > 0:
            results_by_size[size] -= 1
            overwritten += size
    figures = (sum(parameters), sum(results), overwritten)
    return "" if any(isnan(figure) for figure in figures) else " ".join(f"{figure:.0f}" for figure in figures)
