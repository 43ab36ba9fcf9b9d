"""Group computation into regions between communication: the coarsest graph that keeps every collective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.diagnostics import Diagnostics
from hespas.graph.kinds import NodeKind
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.merge import merge_nodes
from hespas.graph.passes.order import all_deps, topological_order

__all__ = ["GroupRegions"]


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """Merge connected computation that stands between the same communications into one node.

    A node's depth is the number of communications (and region borders) on its longest path. Compute nodes of
    one depth that are connected through each other merge; since an edge between two groups always goes to a
    greater depth, or from computation to the communication behind it, no cycle can arise. O(nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with one node per region; number and bytes of collectives conserved."""
        compute = graph.kind == int(NodeKind.COMPUTE)
        depth, component = self._components(graph, compute.tolist())
        leader = np.array(component, np.int64)
        roots = np.flatnonzero(leader == np.arange(len(graph)))
        if len(roots) == len(graph):
            return graph
        order = np.lexsort((roots, ~compute[roots], np.array(depth, np.int64)[roots]))
        number = np.zeros(len(graph), np.int64)
        number[roots[order]] = np.arange(len(roots))
        diagnostics.info(
            "pass.grouped",
            graph.name,
            "operations merged into regions between collectives",
            count=len(graph) - len(roots),
        )
        return merge_nodes(graph, number[leader], roots[order], "region")

    def _components(self, graph: OpGraph, compute: list[bool]) -> tuple[list[int], list[int]]:
        """Depth of each node, and the smallest node of its connected group."""
        deps = all_deps(graph)
        bounds: list[int] = deps.offsets.tolist()
        values: list[int] = deps.values.tolist()
        region: list[int] = graph.region.tolist()
        depth = [0] * len(graph)
        leader = list(range(len(graph)))
        order: list[int] = topological_order(graph).tolist()
        for node in order:
            before = values[bounds[node] : bounds[node + 1]]
            here = region[node]
            depth[node] = max(
                (depth[dep] + (not compute[dep] or region[dep] != here) for dep in before), default=0
            )
            if not compute[node]:
                continue
            for dep in before:
                if compute[dep] and region[dep] == here and depth[dep] == depth[node]:
                    _union(leader, dep, node)
        return depth, [_find(leader, node) for node in range(len(graph))]


def _find(leader: list[int], node: int) -> int:
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


def _union(leader: list[int], one: int, other: int) -> None:
    low, high = sorted((_find(leader, one), _find(leader, other)))
    leader[high] = low
