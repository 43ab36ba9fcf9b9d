"""What a program says of its parameters beside its nodes."""

from __future__ import annotations

import numpy as np

from hespas.graph import DONATED_TO, IN_PLACE, RETURNED, OpGraph

__all__ = ["donated_to", "elements", "end_of", "overwritten"]

_RETURNS = frozenset({"func.return", "return"})
_INDEX = "index"
"""The key under which readers keep which element of a tuple a node takes."""
_LONGEST = 9
"""Digits of a number that is taken for one."""


def donated_to(graph: OpGraph) -> dict[int, int]:
    """Per node of a parameter over which a result is written, the place of that among the results."""
    return {node: places[0] for node, places in _numbers(graph, DONATED_TO).items()}


def overwritten(graph: OpGraph) -> dict[int, list[int]] | None:
    """Per fusion that may write over what it waits for, the places of that among its dependencies; None where
    the graph does not tell of any.
    """
    return _numbers(graph, IN_PLACE) or None


def end_of(graph: OpGraph) -> int:
    """The node whose results the program returns, or which takes them as operands and has none; -1: the graph
    does not say.
    """
    row = graph.strings.find(RETURNED)
    marked = graph.extra.node[graph.extra.key == row]
    if row > 0 and len(marked):
        return int(marked[-1])
    last = len(graph) - 1
    return last if last >= 0 and graph.op_name(last) in _RETURNS and graph.region[last] < 0 else -1


def elements(graph: OpGraph) -> dict[int, int]:
    """Per node that takes an element of a tuple, which one."""
    return {node: places[0] for node, places in _numbers(graph, _INDEX).items()}


def _numbers(graph: OpGraph, key: str) -> dict[int, list[int]]:
    """What stands under a key of texts, where that is numbers with commas, by node."""
    row = graph.strings.find(key)
    found: dict[int, list[int]] = {}
    if row < 0:
        return found
    for extra in np.flatnonzero(graph.extra.key == row).tolist():
        parts = graph.extra.value(extra).split(b",")
        if graph.extra.node[extra] >= 0 and all(part.isdigit() and len(part) <= _LONGEST for part in parts):
            found[int(graph.extra.node[extra])] = [int(part) for part in parts]
    return found
