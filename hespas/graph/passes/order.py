"""Order of nodes: dependencies, topological order, cycles and longest paths.

All functions use data and control dependencies, take O(nodes + edges), and do not recurse.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np

from hespas.graph.columns import (
    IntArray,
    RaggedArray,
)
from hespas.graph.opgraph import (
    OpGraph,
)

__all__ = ["all_deps", "find_cycle", "is_topological", "levels", "ready_order", "topological_order"]


def all_deps(graph: OpGraph) -> RaggedArray:
    """Return data and control dependencies of each node as one ragged column."""
    if not len(graph.control_deps.values):
        return graph.data_deps
    rows = np.concatenate([graph.data_deps.row_ids, graph.control_deps.row_ids])
    values = np.concatenate([graph.data_deps.values, graph.control_deps.values])
    return RaggedArray.from_pairs(rows, values, len(graph))


def is_topological(graph: OpGraph) -> bool:
    """Return True if every node comes after all nodes it depends on."""
    for deps in (graph.data_deps, graph.control_deps):
        if len(deps.values) and not (deps.values < deps.row_ids).all():
            return False
    return True


def topological_order(graph: OpGraph) -> IntArray:
    """Return node numbers in an order in which each node follows its dependencies. It is program order if
    that is topological.

    Otherwise, ready nodes are taken in the order in which they became ready. Nodes on a cycle, and nodes that
    depend on them, are missing from the result.
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
    for node in order:  # a queue: it grows during the loop
        for consumer in targets[bounds[node] : bounds[node + 1]]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                order.append(consumer)
    return np.array(order, np.int64)


def ready_order(deps: RaggedArray, rank: IntArray | None = None) -> IntArray:
    """Return the row numbers in an order in which each row follows its dependencies.

    Of several rows whose dependencies are done, the row with the lowest ``rank`` comes first (None: the row
    with the lowest number). Rows on a cycle, and rows that depend on them, are missing. O((rows +
    dependencies) log rows).
    """
    position: list[int] = list(range(len(deps))) if rank is None else rank.tolist()
    waiting: list[int] = deps.lengths.tolist()
    consumers = deps.transpose(len(deps))
    bounds: list[int] = consumers.offsets.tolist()
    targets: list[int] = consumers.values.tolist()
    ready = [(position[row], row) for row, left in enumerate(waiting) if not left]
    heapify(ready)
    order: list[int] = []
    while ready:
        row = heappop(ready)[1]
        order.append(row)
        for consumer in targets[bounds[row] : bounds[row + 1]]:
            waiting[consumer] -= 1
            if not waiting[consumer]:
                heappush(ready, (position[consumer], consumer))
    return np.array(order, np.int64)


def find_cycle(graph: OpGraph) -> tuple[int, ...]:
    """Return the nodes of one dependency cycle, each depending on the next; empty without a cycle."""
    order = topological_order(graph)
    if len(order) == len(graph):
        return ()
    is_blocked = np.ones(len(graph), np.bool_)
    is_blocked[order] = False
    deps = all_deps(graph)
    bounds: list[int] = deps.offsets.tolist()
    targets: list[int] = deps.values.tolist()
    blocked: list[bool] = is_blocked.tolist()
    node = int(np.flatnonzero(is_blocked)[0])
    position: dict[int, int] = {}
    path: list[int] = []
    while node not in position:  # every blocked node depends on a blocked node, so a node repeats
        position[node] = len(path)
        path.append(node)
        node = next(dep for dep in targets[bounds[node] : bounds[node + 1]] if blocked[dep])
    return tuple(path[position[node] :])


def levels(graph: OpGraph, step: list[int]) -> list[int]:
    """Return for each node of an acyclic graph the length of the longest path to it.

    The length of a path is the sum of ``step[n]`` over its nodes ``n`` except the last one.
    """
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
