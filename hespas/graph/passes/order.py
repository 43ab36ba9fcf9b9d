"""Order of nodes: dependencies, topological order, cycles and longest paths."""

from __future__ import annotations

import numpy as np

from hespas.graph.columns import (
    IntArray,
    RaggedArray,
)
from hespas.graph.opgraph import (
    OpGraph,
)

__all__ = ["all_deps", "find_cycle", "is_topological", "levels", "topological_order"]


def all_deps(graph: OpGraph) -> RaggedArray:
    """Data and control dependencies of each node as one ragged column."""
    if not len(graph.control_deps.values):
        return graph.data_deps
    rows = np.concatenate([graph.data_deps.row_ids, graph.control_deps.row_ids])
    values = np.concatenate([graph.data_deps.values, graph.control_deps.values])
    return RaggedArray.from_pairs(rows, values, len(graph))


def is_topological(graph: OpGraph) -> bool:
    """Whether every node stands after everything it depends on."""
    for deps in (graph.data_deps, graph.control_deps):
        if len(deps.values) and not (deps.values < deps.row_ids).all():
            return False
    return True


def topological_order(graph: OpGraph) -> IntArray:
    """Node numbers so that each follows its dependencies; program order where that is one already.

    Among ready nodes the one that became ready first comes first. A graph with a cycle gives fewer numbers
    than it has nodes: those on the cycle, and those behind it, are missing.
    """
    nodes = len(graph)
    if is_topological(graph):
        return np.arange(nodes, dtype=np.int64)
    deps = all_deps(graph)
    waiting: list[int] = deps.lengths.tolist()
    consumers = deps.transpose(nodes)
    targets: list[int] = consumers.values.tolist()
    bounds: list[int] = consumers.offsets.tolist()
    order = [node for node in range(nodes) if not waiting[node]]
    for node in order:  # grows while it is walked: a queue
        for consumer in targets[bounds[node] : bounds[node + 1]]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                order.append(consumer)
    return np.array(order, np.int64)


def find_cycle(graph: OpGraph) -> tuple[int, ...]:
    """The nodes of one dependency cycle, each depending on the next; empty where there is none."""
    order = topological_order(graph)
    if len(order) == len(graph):
        return ()
    stuck = np.ones(len(graph), np.bool_)
    stuck[order] = False
    deps = all_deps(graph)
    bounds: list[int] = deps.offsets.tolist()
    targets: list[int] = deps.values.tolist()
    blocked: list[bool] = stuck.tolist()
    node = int(np.flatnonzero(stuck)[0])
    place: dict[int, int] = {}
    walk: list[int] = []
    while node not in place:  # every stuck node waits for a stuck node, so this closes
        place[node] = len(walk)
        walk.append(node)
        node = next(dep for dep in targets[bounds[node] : bounds[node + 1]] if blocked[dep])
    return tuple(walk[place[node] :])


def levels(graph: OpGraph, step: list[int]) -> list[int]:
    """Longest path to each node, where leaving node ``n`` counts ``step[n]``. The graph must be acyclic."""
    deps = all_deps(graph)
    bounds: list[int] = deps.offsets.tolist()
    targets: list[int] = deps.values.tolist()
    level = [0] * len(graph)
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        level[node] = max(
            (level[dep] + step[dep] for dep in targets[bounds[node] : bounds[node + 1]]), default=0
        )
    return level
