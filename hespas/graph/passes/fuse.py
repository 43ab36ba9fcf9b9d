"""Fusion of elementwise operations, and of layout changes with products, as compilers do.

A fused chain reads its inputs and writes its outputs once. Broadcasts and iotas that are not fused write
their results to memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from hespas.graph.columns import BoolArray, IntArray, RaggedArray
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import (
    NodeKind,
    OpClass,
    OpGraph,
)
from hespas.graph.passes.merge import merge_nodes
from hespas.graph.passes.order import topological_order
from hespas.graph.passes.rewrite import is_free

__all__ = ["FuseElementwise", "materialise"]


_PRODUCERS = (
    OpClass.FREE,
    OpClass.ELEMENTWISE,
    OpClass.TRANSCENDENTAL,
    OpClass.BROADCAST,
    OpClass.GENERATE,
    OpClass.QUANTIZE,
    OpClass.SLICE,
    OpClass.MAP,
    OpClass.MOVE,
    OpClass.GATHER,
)
"""Classes that compute each element separately, so that the loop of their consumer can include them."""

_CONSUMERS = (
    OpClass.ELEMENTWISE,
    OpClass.TRANSCENDENTAL,
    OpClass.QUANTIZE,
    OpClass.MAP,
    OpClass.SLICE,
    OpClass.MOVE,
    OpClass.REDUCTION,
    OpClass.UPDATE,
    OpClass.SCATTER,
)

_PRODUCTS = (OpClass.CONTRACTION, OpClass.CONVOLUTION)

_VIEWS = (OpClass.FREE, OpClass.BROADCAST, OpClass.SLICE)
"""Classes of views that a library call of a product accepts as operands: only strides and offsets change."""

_HOLDERS = (*_CONSUMERS, OpClass.GATHER, OpClass.BROADCAST)
"""Classes whose loops can compute the elements of a broadcast or an iota instead of reading them."""

_UPDATES = (OpClass.UPDATE, OpClass.SCATTER)

_IOTAS = frozenset({"stablehlo.iota", "stablehlo.dynamic_iota", "mhlo.iota", "mhlo.dynamic_iota", "iota"})

_TRANSPOSES = frozenset({"stablehlo.transpose", "transpose"})

_CONVERTS = frozenset({"stablehlo.convert", "convert"})


class _Absorbs(IntEnum):
    """Kind of nodes that the root of a fusion group can absorb.

    ``LOOPS`` are elementwise operations. ``VIEWS`` are views of the operands of a matmul. ``PRODUCT`` is the
    matmul whose result the root transposes or converts.
    """

    NOTHING = 0
    LOOPS = 1
    VIEWS = 2
    PRODUCT = 3


@dataclass(frozen=True, slots=True)
class _FusionRoles:
    """Roles that each node can have in a fusion group; columns of shape ``(nodes,)``.

    ``loop``, ``view`` and ``product`` are True if the node may be absorbed by a root that takes elementwise
    operations, views, or a matmul (:class:`_Absorbs`). ``takes`` is the kind of nodes that this node absorbs
    if it is a root.
    """

    loop: BoolArray
    view: BoolArray
    product: BoolArray
    takes: IntArray

    @classmethod
    def of(cls, graph: OpGraph) -> _FusionRoles:
        """Return the roles of all nodes.

        These nodes have no role: operations of unknown cost, nodes that others wait for by control
        dependencies, values that a loop carries, and buffers that an update overwrites in place (because they
        must be in memory before it starts).
        """
        has_cost = (graph.kind == int(NodeKind.COMPUTE)) & ~(
            np.isnan(graph.flops) | np.isnan(graph.bytes_moved)
        )
        may_move = has_cost & (np.bincount(graph.control_deps.values, minlength=len(graph)) == 0)
        may_move[graph.regions.carried_producer] = False
        may_move[graph.regions.carried_consumer] = False
        may_move[graph.data_deps.values[_is_buffer(graph)]] = False
        transposes, converts = _named(graph, _TRANSPOSES), _named(graph, _CONVERTS)
        products = has_cost & np.isin(graph.op_class, _PRODUCTS)
        # Nodes whose only dependency is a product without other readers.
        deps = graph.data_deps
        uses = np.bincount(deps.values, minlength=len(graph))
        follows_product = np.zeros(len(graph), np.bool_)
        follows_product[deps.row_ids[(products & may_move & (uses == 1))[deps.values]]] = True
        follows_product &= has_cost & (deps.lengths == 1)
        takes = np.select(
            [
                follows_product & (transposes | converts),
                has_cost & np.isin(graph.op_class, _CONSUMERS),
                products,
            ],
            [_Absorbs.PRODUCT, _Absorbs.LOOPS, _Absorbs.VIEWS],
            _Absorbs.NOTHING,
        )
        return cls(
            loop=may_move & np.isin(graph.op_class, _PRODUCERS) & ~(follows_product & converts),
            view=may_move & (np.isin(graph.op_class, _VIEWS) | transposes),
            product=products & may_move,
            takes=takes,
        )


def _named(graph: OpGraph, names: frozenset[str]) -> BoolArray:
    used = np.unique(graph.op_id)
    mine = [row for row in used.tolist() if graph.strings[row] in names]
    return np.isin(graph.op_id, mine)


def _is_buffer(graph: OpGraph) -> BoolArray:
    """Return a mask of the data dependencies through which a node reads a buffer that it updates in place.
    The buffer is returned with a part replaced, and is not copied.
    """
    deps = graph.data_deps
    sizes = graph.results.segment_sum(graph.types.bytes)
    in_place = np.isin(graph.op_class, _UPDATES) & (graph.bytes_written < sizes)
    if not in_place.any():
        return np.zeros(len(deps.values), np.bool_)
    result_type = np.full(len(graph), -1, np.int64)
    with_results = np.flatnonzero(graph.results.lengths)
    result_type[with_results] = graph.results.values[graph.results.offsets[with_results]]
    same_type: BoolArray = result_type[deps.values] == result_type[deps.row_ids]
    return in_place[deps.row_ids] & same_type


def materialise(graph: OpGraph) -> OpGraph:
    """Return the graph of an uncompiled program in which broadcasts and iotas write their result if it is
    needed in memory.

    A result is needed in memory if it is a result of the program, an operand of a library call, sort or
    collective, loop state, or a buffer that is updated in place. Such a node also reads its operand. All
    other broadcasts and iotas cost nothing, because their consumers compute them. O(nodes + edges).
    """
    broadcasts = graph.op_class == OpClass.BROADCAST
    makes = (broadcasts | _named(graph, _IOTAS)) & (graph.bytes_moved == 0)
    if not makes.any():
        return graph
    deps = graph.data_deps
    user, maker = deps.row_ids, deps.values
    holds = np.isin(graph.op_class, _HOLDERS)[user]
    holds |= np.isin(graph.op_class, _PRODUCTS)[user] & broadcasts[maker]
    views = (graph.op_class == OpClass.FREE) & (graph.kind == int(NodeKind.COMPUTE))
    needed = np.bincount(maker, minlength=len(graph)) == 0
    needed[maker[(~holds & ~views[user]) | _is_buffer(graph)]] = True
    needed[graph.regions.carried_producer] = True
    in_memory: list[bool] = needed.tolist()
    for node in np.flatnonzero(views)[::-1].tolist():  # readers follow their operands
        if in_memory[node]:
            for operand in deps.row(node).tolist():
                in_memory[operand] = True
    written = makes & np.array(in_memory, np.bool_)
    sizes = (lists.segment_sum(graph.types.bytes) for lists in (graph.operands, graph.results))
    read_bytes, result_bytes = (np.where(written, size, 0.0) for size in sizes)
    return replace(
        graph,
        bytes_read=graph.bytes_read + read_bytes,
        bytes_written=graph.bytes_written + result_bytes,
    )


def _is_constant(graph: OpGraph) -> list[bool]:
    """Return flags of zero-cost nodes that depend only on zero-cost nodes: constants and views of them."""
    flags: list[bool] = is_free(graph).tolist()
    for node in np.flatnonzero(is_free(graph) & (graph.data_deps.lengths > 0)).tolist():
        deps: list[int] = graph.data_deps.row(node).tolist()
        flags[node] = all(dep < node and flags[dep] for dep in deps)
    return flags


def _computed_by_users(graph: OpGraph, owner: IntArray) -> OpGraph:
    """Return the graph with adjusted traffic, because the users of a broadcast or an iota compute it
    themselves.

    A broadcast inside a fusion reads only its operand. A broadcast or an iota of constants that has several
    users and is not fused is not read from memory.
    """
    joins = owner != np.arange(len(graph))
    broadcasts = graph.op_class == OpClass.BROADCAST
    operands, results = (lists.segment_sum(graph.types.bytes) for lists in (graph.operands, graph.results))
    read = np.where(joins & broadcasts & (graph.bytes_moved == 0), operands, graph.bytes_read)
    shared = ~joins & np.array(_is_constant(graph), np.bool_) & (broadcasts | _named(graph, _IOTAS))
    deps = graph.data_deps
    is_unread = shared[deps.values]
    if not (is_unread.any() or joins.any()):
        return graph
    user, producer = deps.row_ids[is_unread], deps.values[is_unread]
    np.subtract.at(read, user, np.fmin(results[producer], read[user]))
    remaining = (
        RaggedArray.from_pairs(deps.row_ids[~is_unread], deps.values[~is_unread], len(graph))
        if is_unread.any()
        else deps
    )
    return replace(graph, bytes_read=np.maximum(read, 0.0), data_deps=remaining)


@dataclass(frozen=True, slots=True)
class FuseElementwise:
    """Pass that merges an elementwise node into its first consumer, and layout changes with matmuls.

    A transpose, slice or view is merged into the matmul that reads it. A matmul is merged into the transpose
    or conversion of its result. This models XLA's loop and multi-output fusion, its transpose folding, and
    library calls, whose operands have strides and whose result has its own type. XLA recomputes a value in
    each of several consumers. Here, the first consumer writes the value for the others, which moves about as
    many bytes and conserves FLOPs.

    The pass never makes a cycle: outputs of a group are used only by groups whose roots come later. Run it
    before :class:`FoldFree`, because the return of a program is also a use. Operations of unknown cost are
    not fused. ``max_nodes`` limits the size of a fusion. O(nodes + edges).
    """

    max_nodes: int = 64

    def owners(self, graph: OpGraph) -> IntArray:
        """Return the root of each node's group: the node itself, or the root of a consumer."""
        roles = _FusionRoles.of(graph)
        joins = (None, roles.loop.tolist(), roles.view.tolist(), roles.product.tolist())
        takes: list[int] = roles.takes.tolist()
        region: list[int] = graph.region.tolist()
        uses = graph.data_deps.transpose(len(graph))
        users: list[int] = uses.values.tolist()
        bounds: list[int] = uses.offsets.tolist()
        order: list[int] = topological_order(graph).tolist()
        position = np.zeros(len(graph), np.int64)
        position[order] = np.arange(len(order))
        positions: list[int] = position.tolist()
        owner, size = list(range(len(graph))), [1] * len(graph)
        ready = _is_constant(graph)
        for node in reversed(order):
            ends = {owner[user] for user in users[bounds[node] : bounds[node + 1]]}
            if ready[node] and len(ends) > 1:  # every consumer computes it, without waiting for the others
                continue
            root = min(ends, key=positions.__getitem__, default=node)
            may_join = joins[takes[root]]
            if may_join is None or not may_join[node] or (len(ends) > 1 and takes[root] != _Absorbs.LOOPS):
                continue
            if region[node] == region[root] and size[root] < self.max_nodes:
                owner[node] = root
                size[root] += 1
                if takes[root] == _Absorbs.PRODUCT:
                    takes[root] = int(_Absorbs.VIEWS)
        return np.array(owner, np.int64)

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph with chains merged; FLOPs and communication are conserved, traffic inside chains
        is removed.
        """
        owners = self.owners(graph)
        graph = _computed_by_users(graph, owners)
        roots = np.flatnonzero(owners == np.arange(len(graph)))
        if len(roots) == len(graph):
            return graph
        number = np.zeros(len(graph), np.int64)
        number[roots] = np.arange(len(roots))
        diagnostics.info(
            "pass.fused",
            graph.name,
            "operations merged into those that use them, as compilers do",
            count=len(graph) - len(roots),
        )
        return merge_nodes(graph, number[owners], roots, "fusion", keeps_traffic=False)
