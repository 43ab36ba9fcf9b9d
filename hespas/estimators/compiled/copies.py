"""Operands that a product wants in another order than they lie in, and what is done while they are copied.

A compiler brings several contracted dimensions together by a copy (XLA's ``DotDecomposer``; a single one is
read as it lies, ``TransposeFolding``), and makes cheap work in that copy rather than before it, however
slowly it then walks through memory: gradients of weights are such products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hespas.graph import OpClass, OpGraph
from hespas.graph.opgraph import RegionKind
from hespas.programs.contractions import likely_dot_axes
from hespas.programs.text import Tensor

__all__ = ["copies_of", "is_turned", "origins_of"]

_EXPENSIVE = frozenset({"divide", "remainder"})
"""Elementwise operations that are not done twice, as the transcendental are not (XLA's ``IsExpensive``)."""
_MOST_NODES = 64


def origins_of(graph: OpGraph) -> Mapping[int, int]:
    """Calls of one result, each with the node of the called body, or of what that calls, that makes it."""
    kinds: list[int] = graph.regions.kind.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    region: list[int] = graph.region.tolist()
    deps = graph.data_deps.to_lists()
    results = graph.results.to_lists()
    found: dict[int, int] = {}
    controls: list[int] = np.flatnonzero(graph.op_class == OpClass.CONTROL).tolist()
    for node in controls:
        inside = [dep for dep in deps[node] if region[dep] >= 0 and parents[region[dep]] == region[node]]
        called = [dep for dep in inside if kinds[region[dep]] == RegionKind.CALL]
        if len(called) == len(results[node]) == 1 and results[called[0]] == results[node]:
            found[node] = called[0]
    for node, first in found.items():
        made = first
        while made in found:  # a body that ends in a call; regions nest, so this ends
            made = found[made]
        found[node] = made
    return found


def copies_of(
    graph: OpGraph, origins: Mapping[int, int], turned: Callable[[int], int]
) -> Mapping[int, frozenset[int]]:
    """Products whose operand is copied, each with the nodes whose work is done in the copy: what is cheap and
    used by products and by the copy alone. ``turned`` names who makes such an operand of a product, or -1.

    What other products want as it lies is made for them, and once more in the copy. What turned products
    alone want is made once: in the copy where that is of one product and next to it, before it otherwise.
    """
    classes: list[int] = graph.op_class.tolist()
    starts = {
        node: origins.get(first, first)
        for node, each in enumerate(classes)
        if each == OpClass.CONTRACTION and (first := turned(node)) >= 0
    }
    if not starts:
        return {}
    deps = [[origins.get(dep, dep) for dep in each] for each in graph.data_deps.to_lists()]
    users: list[list[int]] = [[] for _ in deps]
    for node in (node for node in range(len(deps)) if node not in origins):
        for dep in deps[node]:
            users[dep].append(node)
    place = _places(graph)
    region: list[int] = graph.region.tolist()

    def is_cheap(node: int) -> bool:
        is_quick = classes[node] == OpClass.ELEMENTWISE and _name(graph, node) not in _EXPENSIVE
        return is_quick or classes[node] == OpClass.FREE

    def copy_of(product: int, first: int) -> set[int]:
        products = {user for user in users[first] if classes[user] == OpClass.CONTRACTION}
        others = any(starts.get(each) != first for each in products)
        if not others and len(users[first]) > 1:
            return set()
        copy: set[int] = set()
        left = [first]
        while left and len(copy) < _MOST_NODES:
            node = left.pop()
            if node in copy or place[node] != place[product] or not is_cheap(node):
                continue
            is_beside = len(users[node]) == 1 and region[node] == region[product]
            if copy | products >= set(users[node]) and (others or is_beside):
                copy.add(node)
                left += deps[node]
        return copy

    copies = {product: frozenset(copy_of(product, first)) for product, first in starts.items()}
    works = frozenset(np.flatnonzero(graph.op_class == OpClass.ELEMENTWISE).tolist())
    return {product: copy for product, copy in copies.items() if copy & works}


def is_turned(left: Tensor, right: Tensor, result: Tensor) -> bool:
    """Whether a product of these types has its left operand copied: contracted dimensions are last there."""
    axes = likely_dot_axes(left.shape, right.shape, result.shape)
    contracted = () if axes is None else axes.contracting[0]
    return len(contracted) > 1 and max(contracted) < left.rank - 1


def _places(graph: OpGraph) -> Sequence[int]:
    """The region of each node that is run as a whole: bodies of calls are where the call is."""
    kinds: list[int] = graph.regions.kind.tolist()
    parents: list[int] = graph.regions.parent.tolist()
    whole: list[int] = []
    for number, kind in enumerate(kinds):  # parents stand before what they enclose
        parent = parents[number]
        inner = kind == RegionKind.CALL
        whole.append((whole[parent] if parent >= 0 else -1) if inner else number)
    regions: list[int] = graph.region.tolist()
    return [whole[region] if region >= 0 else -1 for region in regions]


def _name(graph: OpGraph, node: int) -> str:
    return graph.op_name(node).rpartition(".")[2]
