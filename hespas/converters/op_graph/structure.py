"""Checks that both spellings share: ids are unique, dependencies have no cycle.

A strict read raises. A lenient one goes on: a repeated id or a cycle stands in the graph for the rules to
find, a dependency on a node that does not exist cannot, and is recorded as ``ET006``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.graph import Diagnostics, OpGraph
from hespas.graph.errors import FormatError
from hespas.graph.passes import find_cycle

__all__ = ["Fault", "check_cycle", "check_ids", "repeated_ids"]

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Fault:
    """Where structural faults of one file go: into an exception, or into diagnostics where ``lenient``."""

    path: str
    lenient: bool
    diagnostics: Diagnostics

    def report(self, position: str, message: str, hint: str) -> None:
        """Raise ``FormatError`` unless lenient: the graph shows the fault itself."""
        if not self.lenient:
            raise FormatError(message, path=self.path, position=position, hint=hint)

    def report_lost(self, code: str, position: str, message: str, hint: str, count: int) -> None:
        """Raise ``FormatError``, or record ``count`` findings of what the graph cannot show."""
        self.report(position, message, hint)
        self.diagnostics.error(code, position, message, path=self.path, count=count)


def repeated_ids(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The ids that stand more than once, ascending. O(nodes), or O(nodes log nodes) where unsorted."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):
        return np.empty(0, np.uint64)
    values, counts = np.unique(ids, return_counts=True)
    return values[counts > 1]


def check_ids(ids: NDArray[np.uint64], fault: Fault) -> None:
    """Every node has an id of its own."""
    repeated = repeated_ids(ids)
    if len(repeated):
        first = int(repeated[0])
        fault.report(
            f"node {first}",
            f"node id {first} stands {int((ids == first).sum())} times",
            "give every node its own id, or leave ids out to number nodes by position",
        )


def check_cycle(graph: OpGraph, fault: Fault) -> None:
    """No node waits for itself. O(nodes) where nodes stand in a valid order."""
    cycle = find_cycle(graph)
    if not cycle:
        return
    ids = [int(graph.id[node]) for node in cycle]
    shown = " -> ".join(map(str, ids[:_SHOWN]))
    rest = f" -> ... ({len(ids) - _SHOWN} more)" if len(ids) > _SHOWN else ""
    fault.report(
        f"node {ids[0]}",
        f"dependency cycle: {shown}{rest} -> {ids[0]}",
        "remove one of these dependencies",
    )
