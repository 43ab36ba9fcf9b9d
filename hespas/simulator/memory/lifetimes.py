"""From when to when each value lives."""

from __future__ import annotations

import numpy as np

from hespas.graph import OpGraph, RegionKind
from hespas.simulator.memory.moments import Moments
from hespas.simulator.memory.values import Kind, Value

__all__ = ["Lifetimes"]


class Lifetimes:
    """Answers for one graph and one order of its nodes. An interval is of places in that order, both ends
    included.
    """

    def __init__(self, graph: OpGraph, when: Moments) -> None:
        """Look at loops once."""
        table = graph.regions
        self.start: list[int] = when.start.tolist()
        self.end: list[int] = when.end.tolist()
        self.whole = (0, int(when.last.max(initial=0)) + 1)
        self._deps = graph.data_deps.to_lists()
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = table.parent.tolist()
        self._repeats: list[bool] = ((table.kind == int(RegionKind.LOOP_BODY)) | (table.trips > 1)).tolist()
        self._bounds = _bounds(graph, when)
        self._beyond: dict[tuple[int, int], int] = {}

    def of(self, value: Value, *, donated: bool = False) -> tuple[int, int]:
        """From the start of what makes a value to the end of its last use. Parameters and constants live
        throughout, ``donated`` parameters to their last use, and results to the end.
        """
        if value.kind in {Kind.PARAMETER, Kind.CONSTANT} and not donated:
            return self.whole
        start = self.born(value)
        if value.kind is Kind.OUTPUT:
            return start, self.whole[1]
        end = start if value.slot >= 0 else self.end[value.node]
        for user in value.users:
            end = max(end, self._last_use(value, user))
        for region in value.before:
            end = max(end, self._bounds[region][0])
        for region in value.until:
            end = max(end, self._bounds[region][1])
        return 0 if donated else start, end

    def reached(self) -> list[int]:
        """The place of each node in post-order from the last one back: XLA's order of what is equal
        otherwise. Nodes that it does not reach stand behind the others. O(nodes + edges).
        """
        count = len(self.start)
        found = list(range(count, 2 * count))
        seen = [False] * count
        stack = [(count - 1, 0)] if count else []
        number = 0
        while stack:
            node, at = stack.pop()
            seen[node] = True
            deps = self._deps[node]
            while at < len(deps) and seen[deps[at]]:
                at += 1
            if at < len(deps):
                stack += [(node, at + 1), (deps[at], 0)]
                seen[deps[at]] = True
            else:
                found[node] = number
                number += 1
        return found

    def born(self, value: Value) -> int:
        """The start of what makes a value: of a slot, that of its loop."""
        return self._bounds[value.slot][0] if value.slot >= 0 else self.start[value.node]

    def replaces_until(self, value: Value) -> int:
        """Until when what a value is written over may live."""
        return self._bounds[value.slot][0] if value.slot >= 0 else self.end[value.node]

    def _last_use(self, value: Value, user: int) -> int:
        """The end of a use: of all trips of the loops that the user stands in and the value does not."""
        loop = self._outermost(value.region, self._region[user])
        return self._bounds[loop][1] if loop >= 0 else self.end[user]

    def _outermost(self, region: int, of_user: int) -> int:
        """The outermost loop around a user that is not around the region of a value; -1: none."""
        key = (region, of_user)
        found = self._beyond.get(key)
        if found is None:
            above: set[int] = {-1}
            while region >= 0:
                above.add(region)
                region = self._parent[region]
            found, here = -1, of_user
            while here not in above:
                if self._repeats[here]:
                    found = here
                here = self._parent[here]
            self._beyond[key] = found
        return found


def _bounds(graph: OpGraph, when: Moments) -> list[tuple[int, int]]:
    """Per region, the first start and the last end of the nodes that run in it. O(nodes + regions)."""
    regions = len(graph.regions)
    runs = (graph.multiplicity != 0) & (graph.region >= 0)
    first = np.full(regions, np.iinfo(np.int64).max)
    last = np.zeros(regions, np.int64)
    np.minimum.at(first, graph.region[runs], when.start[runs])
    np.maximum.at(last, graph.region[runs], when.last[runs])
    firsts: list[int] = first.tolist()
    lasts: list[int] = last.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    for row in reversed(range(regions)):  # children stand behind their parents
        parent = parents[row]
        if parent >= 0:
            firsts[parent] = min(firsts[parent], firsts[row])
            lasts[parent] = max(lasts[parent], lasts[row])
    return list(zip(firsts, lasts, strict=True))
