"""Carried edges of loops while nodes are dropped: they never leave their loop, and span one trip each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from hespas.graph.columns import BoolArray, Csr, SmallIntArray
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.order import all_deps
from hespas.graph.tables import RegionTable

__all__ = ["CarriedValues", "leaves_loop"]


def leaves_loop(graph: OpGraph) -> BoolArray:
    """Which carried edges have an end outside of their loop, shape ``(carried edges,)``. A graph that a pass
    or a simulator is given has none. O(regions + edges).
    """
    table = graph.regions
    parents: list[int] = table.parent.tolist()
    size = [1] * len(parents)
    for row in reversed(range(len(parents))):  # children stand behind their parents
        if parents[row] >= 0:
            size[parents[row]] += size[row]
    # Number the regions so that those nested in one follow it.
    start, free = [0] * len(parents), [0] * (len(parents) + 1)
    for row, parent in enumerate(parents):
        start[row] = free[parent]
        free[parent] += size[row]
        free[row] = start[row] + 1
    first = np.array([*start, -1], np.int64)
    low = first[table.carried_region]
    high = low + np.array(size, np.int64)[table.carried_region]
    outside = np.zeros(len(low), np.bool_)
    for end in (table.carried_producer, table.carried_consumer):
        place = first[graph.region[end]]
        outside |= (place < low) | (place >= high)
    return outside


class CarriedValues:
    """The values that the loops of a graph carry, seen by a pass that drops nodes.

    An edge spans exactly one trip. Where a free node takes a value carried to it and hands it on, into the
    next trip or out of the loop, the value behind it is one trip older than what stands before it: without
    that node the trip would be lost. So such a node stays (:meth:`needs`). Each method visits a node once,
    in topological order, and costs O(its edges).
    """

    def __init__(self, graph: OpGraph, consumers: Csr) -> None:
        """``consumers`` lists, for each node, those that depend on it (one row a node)."""
        table = graph.regions
        self._consumers = consumers
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = table.parent.tolist()
        self._runs: list[bool] = (graph.multiplicity != 0).tolist()
        self._takes = _regions_of(table.carried_consumer, table.carried_region)
        self._gives = _regions_of(table.carried_producer, table.carried_region)
        self._holds: dict[int, set[int]] = {}
        self._is_within: dict[tuple[int, int], bool] = {}

    @classmethod
    def of(cls, graph: OpGraph) -> CarriedValues | None:
        """Those of a graph; None where no loop carries anything."""
        if not len(graph.regions.carried_region):
            return None
        return cls(graph, all_deps(graph).transpose(len(graph)))

    def needs(self, node: int, dropped: Iterable[int], producers: Iterable[int]) -> bool:
        """Whether a node about to be dropped hands a carried value on, and has to stay.

        ``dropped`` are the dropped nodes it directly depends on, ``producers`` the kept nodes it waits for
        once those are led around. Nodes that never run hand nothing on.
        """
        if not self._runs[node]:
            return False
        given = self._gives.get(node, ())
        # Carried into the loop from outside: there in the second trip, but not in the first.
        if given and any(not self.within(each, row) for each in producers for row in given):
            return True
        held = set(self._takes.get(node, ()))
        for dep in dropped:
            held.update(self._holds.get(dep, ()))
        held = {row for row in held if self.within(node, row)}
        if not held:
            return False
        if given or self._is_read_outside(node, held):
            return True
        self._holds[node] = held
        return False

    def _is_read_outside(self, node: int, rows: set[int]) -> bool:
        readers: list[int] = self._consumers.row(node).tolist()
        return any(self._runs[each] and not self.within(each, row) for each in readers for row in rows)

    def within(self, node: int, row: int) -> bool:
        """Whether a node stands in a region or in one nested in it. O(depth) once per pair of regions."""
        key = (self._region[node], row)
        known = self._is_within.get(key)
        if known is None:
            here = key[0]
            while here > row:  # parents stand before their children
                here = self._parent[here]
            known = self._is_within[key] = here == row
        return known

    def bypass(
        self, table: RegionTable, drop: list[bool], data: list[list[int]], control: list[list[int]]
    ) -> RegionTable:
        """Carried edges with dropped producers replaced by what they waited for, dropped consumers by whoever
        waits for them in the same loop.
        """
        edges: dict[tuple[int, int, int], None] = {}
        regions: list[int] = table.carried_region.tolist()
        producers: list[int] = table.carried_producer.tolist()
        consumers: list[int] = table.carried_consumer.tolist()
        for row, producer, consumer in zip(regions, producers, consumers, strict=True):
            sources = [*data[producer], *control[producer]] if drop[producer] else [producer]
            targets = self._live_consumers(consumer, row, drop)
            inside = [each for each in sources if self.within(each, row)]
            edges.update(dict.fromkeys((row, source, target) for source in inside for target in targets))
        flat = np.array(list(edges), np.int32).reshape(-1, 3)
        return replace(
            table, carried_region=flat[:, 0], carried_producer=flat[:, 1], carried_consumer=flat[:, 2]
        )

    def _live_consumers(self, node: int, row: int, drop: list[bool]) -> list[int]:
        """The nearest kept nodes downstream of a node in a loop, the node itself if kept."""
        found: dict[int, None] = {}
        seen = {node}
        stack = [node]
        while stack:
            current = stack.pop()
            if not drop[current]:
                found[current] = None
                continue
            after: list[int] = self._consumers.row(current).tolist()
            fresh = [each for each in after if each not in seen and self.within(each, row)]
            seen.update(fresh)
            stack.extend(fresh)
        return list(found)


def _regions_of(nodes: SmallIntArray, rows: SmallIntArray) -> dict[int, set[int]]:
    """The loops that carry something to or from each node."""
    found: dict[int, set[int]] = {}
    for node, row in zip(nodes.tolist(), rows.tolist(), strict=True):
        found.setdefault(node, set()).add(row)
    return found
