"""Operands of matrix products that a compiler copies into another order, and the operations fused into the
copy.

A compiler copies an operand to bring several contracted dimensions together (XLA's ``DotDecomposer``; a
single one is read in place, ``TransposeFolding``). It fuses cheap work into that copy, however slow the copy
accesses memory. Products for gradients of weights have such operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hespas.graph import OpClass, OpGraph
from hespas.graph.opgraph import RegionKind
from hespas.programs.contractions import likely_dot_axes
from hespas.programs.text import Tensor

__all__ = ["copies_of", "is_turned", "origins_of"]

_EXPENSIVE = frozenset({"divide", "remainder"})
"""Elementwise operations that are not repeated, like the transcendental ones (XLA's ``IsExpensive``)."""
_MOST_NODES = 64


def origins_of(graph: OpGraph) -> Mapping[int, int]:
    """Return a map from call nodes to the node in the called body that computes the result. If that node is a
    call too, its own entry is followed. Calls with several results are not included.
    """
    kinds: list[int] = graph.regions.kind.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    region: list[int] = graph.region.tolist()
    deps = graph.data_deps.to_lists()
    results = graph.results.to_lists()
    origins: dict[int, int] = {}
    controls: list[int] = np.flatnonzero(graph.op_class == OpClass.CONTROL).tolist()
    for node in controls:
        inside = [dep for dep in deps[node] if region[dep] >= 0 and parents[region[dep]] == region[node]]
        called = [dep for dep in inside if kinds[region[dep]] == RegionKind.CALL]
        if len(called) == len(results[node]) == 1 and results[called[0]] == results[node]:
            origins[node] = called[0]
    for node, first in origins.items():
        made = first
        while made in origins:  # a body that ends in a call; regions nest, so this ends
            made = origins[made]
        origins[node] = made
    return origins


def copies_of(
    graph: OpGraph, origins: Mapping[int, int], turned: Callable[[int], int]
) -> Mapping[int, frozenset[int]]:
    """Return the matmuls whose operand the compiler copies into another memory order. Each is mapped to the
    nodes that are fused into this copy.

    ``turned`` returns the producer of the operand that a matmul copies, or -1. A cheap node is fused if only
    matmuls and the copy use its result. If another matmul reads the result in its stored order, the node is
    computed twice: for that matmul and in the copy. If only matmuls with copies use the result, the node is
    computed once.
    """
    classes: list[int] = graph.op_class.tolist()
    starts = {
        node: origins.get(first, first)
        for node, op_class in enumerate(classes)
        if op_class == OpClass.CONTRACTION and (first := turned(node)) >= 0
    }
    if not starts:
        return {}
    deps = [[origins.get(dep, dep) for dep in producers] for producers in graph.data_deps.to_lists()]
    users: list[list[int]] = [[] for _ in deps]
    for node in (node for node in range(len(deps)) if node not in origins):
        for dep in deps[node]:
            users[dep].append(node)
    region: list[int] = graph.region.tolist()
    # Replace bodies of calls by the region that contains the call.
    kinds: list[int] = graph.regions.kind.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    whole: list[int] = []
    for number, (kind, parent) in enumerate(zip(kinds, parents, strict=True)):
        inner = kind == RegionKind.CALL  # parents come before the regions that they enclose
        whole.append((whole[parent] if parent >= 0 else -1) if inner else number)
    outer = [whole[number] if number >= 0 else -1 for number in region]

    def is_cheap(node: int) -> bool:
        is_quick = (
            classes[node] == OpClass.ELEMENTWISE and graph.op_name(node).rpartition(".")[2] not in _EXPENSIVE
        )
        return is_quick or classes[node] == OpClass.FREE

    def copy_of(product: int, first: int) -> set[int]:
        products = {user for user in users[first] if classes[user] == OpClass.CONTRACTION}
        others = any(starts.get(other) != first for other in products)
        if not others and len(users[first]) > 1:
            return set()
        copy: set[int] = set()
        left = [first]
        while left and len(copy) < _MOST_NODES:
            node = left.pop()
            if node in copy or outer[node] != outer[product] or not is_cheap(node):
                continue
            is_adjacent = len(users[node]) == 1 and region[node] == region[product]
            if copy | products >= set(users[node]) and (others or is_adjacent):
                copy.add(node)
                left += deps[node]
        return copy

    copies = {product: frozenset(copy_of(product, first)) for product, first in starts.items()}
    works = frozenset(np.flatnonzero(graph.op_class == OpClass.ELEMENTWISE).tolist())
    return {product: copy for product, copy in copies.items() if copy & works}


def is_turned(left: Tensor, right: Tensor, result: Tensor) -> bool:
    """Return True if a matrix product of these types needs a copy of its left operand with the contracted
    dimensions last.
    """
    axes = likely_dot_axes(left.shape, right.shape, result.shape)
    contracted = () if axes is None else axes.contracting[0]
    return len(contracted) > 1 and max(contracted) < left.rank - 1
