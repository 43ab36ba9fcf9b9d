"""Group computation into regions between communication: the coarsest graph that keeps every collective."""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np

from hespas.graph.columns import BoolArray, Csr, IntArray
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.kinds import NodeKind, OpClass, Resource
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.fuse import merge_nodes
from hespas.graph.passes.order import all_deps, topological_order

__all__ = ["GroupRegions"]


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """Merge connected device computation that stands between the same communications into one node.

    A node's depth is the number of borders on its longest path: communication, host work, operations of
    unknown cost, and the edges of loops and branches. Compute nodes of one depth that are connected through
    each other merge; since an edge between two groups always goes to a greater depth, or from computation to
    the border behind it, no cycle can arise. Costs and durations add up, so estimate before this pass: a
    region's traffic is that of its operations. Program order of what remains is kept as far as dependencies
    allow. O(nodes log nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with one node per region; number, bytes and order of collectives conserved."""
        leader = np.array(self._leaders(graph, _joinable(graph)), np.int64)
        first = np.flatnonzero(leader == np.arange(len(graph)))
        if len(first) == len(graph):
            return graph
        number = np.zeros(len(graph), np.int64)
        number[first] = np.arange(len(first))
        group = number[leader]
        order = np.array(_program_order(graph, group, len(first)), np.int64)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        group = place[group]
        roots = np.zeros(len(order), np.int64)
        roots[group] = np.arange(len(graph))  # the last member of each group: it makes what others use
        diagnostics.info(
            "pass.grouped",
            graph.name,
            "operations merged into regions between collectives",
            count=len(graph) - len(order),
        )
        merged = merge_nodes(graph, group, roots, "region", keeps_traffic=True)
        rising = bool((merged.id[1:] > merged.id[:-1]).all())
        return merged if rising else replace(merged, id=np.arange(len(merged), dtype=np.uint64))

    def _leaders(self, graph: OpGraph, joins: list[bool]) -> list[int]:
        """The smallest node of each node's connected group of equal depth."""
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
                (depth[dep] + (not joins[dep] or region[dep] != here) for dep in before), default=0
            )
            if not joins[node]:
                continue
            for dep in before:
                if joins[dep] and region[dep] == here and depth[dep] == depth[node]:
                    _union(leader, dep, node)
        return [_find(leader, node) for node in range(len(graph))]


def _joinable(graph: OpGraph) -> list[bool]:
    """Device computation of known cost."""
    joins: BoolArray = (
        (graph.kind == int(NodeKind.COMPUTE))
        & (graph.resource == int(Resource.DEVICE))
        & (graph.op_class != int(OpClass.HOST))
        & ~np.isnan(graph.flops)
        & ~np.isnan(graph.bytes_moved)
    )
    timed = ~np.isnan(graph.duration_ns)
    if timed.any():
        joins &= timed
    joined: list[bool] = joins.tolist()
    return joined


def _program_order(graph: OpGraph, group: IntArray, groups: int) -> list[int]:
    """Groups so that each follows what it depends on, the one with the earliest member first."""
    deps = all_deps(graph)
    rows, values = group[deps.row_ids], group[deps.values]
    outside = rows != values
    edges = np.unique(rows[outside] * groups + values[outside])
    consumers = Csr.from_pairs(edges % groups, edges // groups, groups).to_lists()
    waiting: list[int] = np.bincount(edges // groups, minlength=groups).tolist()
    earliest = np.full(groups, len(graph), np.int64)
    np.minimum.at(earliest, group, np.arange(len(graph)))
    priority: list[int] = earliest.tolist()
    ready = [(priority[each], each) for each in range(groups) if not waiting[each]]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, done = heappop(ready)
        order.append(done)
        for after in consumers[done]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (priority[after], after))
    return order


def _find(leader: list[int], node: int) -> int:
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


def _union(leader: list[int], one: int, other: int) -> None:
    low, high = sorted((_find(leader, one), _find(leader, other)))
    leader[high] = low
