"""How operations walk their operands: in the order of their results, or in another."""

from __future__ import annotations

import numpy as np

from hespas.graph import DYNAMIC, OpGraph
from hespas.graph.columns import BoolArray, FloatArray, IntArray

__all__ = ["strided"]

_ONE = 0
"""The walk of what has one element, or an extent nobody knows: it agrees with any other."""


def strided(graph: OpGraph, elementwise: BoolArray, streamed: BoolArray) -> FloatArray:
    """1 for nodes whose operands are not walked as their first result is, 0 for others; NaN where neither
    ``elementwise`` nor ``streamed``.

    Elements are walked alike in the same shape and order. What is ``streamed`` may have other shapes
    (reductions, concatenations): there, operand and result are both row by row, or both not. O(operands).
    """
    by_order, by_shape = _walks(graph)
    found = np.where(elementwise | streamed, 0.0, np.nan)
    operands, results = graph.operands, graph.results
    if not len(operands.values) or not len(results.values):
        return found
    node = operands.row_ids
    first = np.minimum(results.offsets[:-1], len(results.values) - 1)
    answers = results.offsets[1:] > results.offsets[:-1]
    for walk, asked in ((by_shape, elementwise), (by_order, streamed & ~elementwise)):
        of_result = np.where(answers, walk[results.values[first]], _ONE)[node]
        of_operand = walk[operands.values]
        differs = asked[node] & (of_operand != of_result) & (of_operand != _ONE) & (of_result != _ONE)
        found[node[differs]] = 1.0
    return found


def _walks(graph: OpGraph) -> tuple[IntArray, IntArray]:
    """A number per type for its order in memory (1 row by row, 2 any other), and one for order and shape."""
    count = len(graph.types)
    by_order, by_shape = np.zeros(count, np.int64), np.zeros(count, np.int64)
    seen: dict[tuple[tuple[int, int], ...], int] = {}
    for row in range(count):
        shape = graph.types.shape(row)
        if DYNAMIC in shape or all(extent == 1 for extent in shape):
            continue
        order = _order(graph.strings[int(graph.types.encoding[row])], len(shape))
        # Leading extents of 1 change nothing, so dimensions are counted from the last.
        walk = tuple((len(shape) - dim, shape[dim]) for dim in order if shape[dim] != 1)
        places = [place for place, _ in walk]
        by_order[row] = 1 if order and places == sorted(places) else 2
        by_shape[row] = 1 + seen.setdefault(walk if order else ((-1, row),), len(seen))
    return by_order, by_shape


def _order(layout: str, rank: int) -> tuple[int, ...]:
    """Dimensions from the fastest, as HLO writes them (tiling left out); none for any other order."""
    text = layout.strip("{}").partition(":")[0]
    usual = tuple(reversed(range(rank)))
    if not text or not text[0].isdecimal():
        return () if text.startswith("strides") else usual
    numbers = text.split(",")
    order = tuple(int(each) for each in numbers) if all(each.isdecimal() for each in numbers) else usual
    return order if sorted(order) == list(range(rank)) else usual
