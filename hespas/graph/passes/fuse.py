"""Fuse what compilers fuse: a chain of elementwise work moves its inputs and its outputs once, and layout
changes beside a product are part of it. What is computed from nothing is written where nobody fuses it.
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
"""What computes its elements one by one, so that a loop over the consumer's can hold it."""

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
"""What only says where a product's operand stands: strides and offsets of its library call."""

_HOLDERS = (*_CONSUMERS, OpClass.GATHER, OpClass.BROADCAST)
"""Whose loops compute elements of a broadcast or an iota as they need them."""

_UPDATES = (OpClass.UPDATE, OpClass.SCATTER)

_IOTAS = frozenset({"stablehlo.iota", "stablehlo.dynamic_iota", "mhlo.iota", "mhlo.dynamic_iota", "iota"})

_TRANSPOSES = frozenset({"stablehlo.transpose", "transpose"})

_CONVERTS = frozenset({"stablehlo.convert", "convert"})


class _Takes(IntEnum):
    """What a group takes in beside its root: elementwise work, views of a product's operands, or the product
    whose result it transposes or converts.
    """

    NOTHING = 0
    LOOPS = 1
    VIEWS = 2
    PRODUCT = 3


@dataclass(frozen=True, slots=True)
class _Roles:
    """What each node may join, columns of flags, and what it takes in as the root of a group."""

    loop: BoolArray
    view: BoolArray
    product: BoolArray
    takes: IntArray

    @classmethod
    def of(cls, graph: OpGraph) -> _Roles:
        """Operations of unknown cost have no role, nor has what others wait for, a loop carries, or an
        update overwrites in place: it is in memory before that begins.
        """
        known = (graph.kind == int(NodeKind.COMPUTE)) & ~(np.isnan(graph.flops) | np.isnan(graph.bytes_moved))
        moves = known & (np.bincount(graph.control_deps.values, minlength=len(graph)) == 0)
        moves[graph.regions.carried_producer] = False
        moves[graph.regions.carried_consumer] = False
        moves[graph.data_deps.values[_is_buffer(graph)]] = False
        transposes, converts = _named(graph, _TRANSPOSES), _named(graph, _CONVERTS)
        products = known & np.isin(graph.op_class, _PRODUCTS)
        # Who has nothing but a product before it, which nobody else reads.
        deps = graph.data_deps
        uses = np.bincount(deps.values, minlength=len(graph))
        behind = np.zeros(len(graph), np.bool_)
        behind[deps.row_ids[(products & moves & (uses == 1))[deps.values]]] = True
        behind &= known & (deps.lengths == 1)
        takes = np.select(
            [behind & (transposes | converts), known & np.isin(graph.op_class, _CONSUMERS), products],
            [_Takes.PRODUCT, _Takes.LOOPS, _Takes.VIEWS],
            _Takes.NOTHING,
        )
        return cls(
            loop=moves & np.isin(graph.op_class, _PRODUCERS) & ~(behind & converts),
            view=moves & (np.isin(graph.op_class, _VIEWS) | transposes),
            product=products & moves,
            takes=takes,
        )


def _named(graph: OpGraph, names: frozenset[str]) -> BoolArray:
    used = np.unique(graph.op_row)
    mine = [row for row in used.tolist() if graph.strings[row] in names]
    return np.isin(graph.op_row, mine)


def _is_buffer(graph: OpGraph) -> BoolArray:
    """Which data dependencies are a buffer that its reader changes in a few places only and returns."""
    deps = graph.data_deps
    sizes = graph.results.segment_sum(graph.types.bytes)
    in_place = np.isin(graph.op_class, _UPDATES) & (graph.bytes_written < sizes)
    if not in_place.any():
        return np.zeros(len(deps.values), np.bool_)
    made = np.full(len(graph), -1, np.int64)
    some = np.flatnonzero(graph.results.lengths)
    made[some] = graph.results.values[graph.results.offsets[some]]
    alike: BoolArray = made[deps.values] == made[deps.row_ids]
    return in_place[deps.row_ids] & alike


def materialise(graph: OpGraph) -> OpGraph:
    """The graph of a program that nobody has compiled, in which a broadcast or an iota writes its result (and
    reads its operand) where somebody needs it in memory: as a result of the program, in a library call, a
    sort or a collective, as the state of a loop, as a buffer that is updated in place. Elsewhere it costs
    nothing, because its consumers compute it. O(nodes + edges).
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
    found: list[bool] = needed.tolist()
    for node in np.flatnonzero(views)[::-1].tolist():  # readers stand behind what they read
        if found[node]:
            for read in deps.row(node).tolist():
                found[read] = True
    written = makes & np.array(found, np.bool_)
    sizes = (lists.segment_sum(graph.types.bytes) for lists in (graph.operands, graph.results))
    read_bytes, result_bytes = (np.where(written, size, 0.0) for size in sizes)
    return replace(
        graph,
        bytes_read=graph.bytes_read + read_bytes,
        bytes_written=graph.bytes_written + result_bytes,
    )


def _constant(graph: OpGraph) -> list[bool]:
    """Per node, whether it costs nothing and nor does all that it is made of: constants and views of them."""
    found: list[bool] = is_free(graph).tolist()
    for node in np.flatnonzero(is_free(graph) & (graph.data_deps.lengths > 0)).tolist():
        deps: list[int] = graph.data_deps.row(node).tolist()
        found[node] = all(dep < node and found[dep] for dep in deps)
    return found


def _computed_by_users(graph: OpGraph, owner: IntArray) -> OpGraph:
    """The graph with the traffic of broadcasts and iotas that their users compute: one that is part of a
    fusion reads its operand; one made of constants for many users, which stays alone, is read by none.
    """
    joins = owner != np.arange(len(graph))
    broadcasts = graph.op_class == OpClass.BROADCAST
    operands, results = (each.segment_sum(graph.types.bytes) for each in (graph.operands, graph.results))
    read = np.where(joins & broadcasts & (graph.bytes_moved == 0), operands, graph.bytes_read)
    shared = ~joins & np.array(_constant(graph), np.bool_) & (broadcasts | _named(graph, _IOTAS))
    deps = graph.data_deps
    gone = shared[deps.values]
    if not (gone.any() or joins.any()):
        return graph
    user, maker = deps.row_ids[gone], deps.values[gone]
    np.subtract.at(read, user, np.fmin(results[maker], read[user]))
    kept = RaggedArray.from_pairs(deps.row_ids[~gone], deps.values[~gone], len(graph)) if gone.any() else deps
    return replace(graph, bytes_read=np.maximum(read, 0.0), data_deps=kept)


@dataclass(frozen=True, slots=True)
class FuseElementwise:
    """Merge a node that computes element by element into the first of its consumers; and a transpose, slice
    or view into the product that reads it, a product into the transpose or the conversion of its result.

    What XLA's loop and multi-output fusion, its transpose folding and its library calls do, whose operands
    have strides and whose result has a type of its own; where XLA computes a value again in each of several
    consumers, here the first writes it for the others, which moves about as much and conserves FLOPs. Never
    makes a cycle: all that a group makes is used by groups whose roots stand behind its own. It stands before
    :class:`FoldFree`, because a program's return is a use, too. Operations of unknown cost stay alone.
    ``max_nodes`` bounds one fusion. O(nodes + edges).
    """

    max_nodes: int = 64

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with chains merged; FLOPs and communication conserved, traffic inside a chain gone."""
        owner = self._owners(graph)
        graph = _computed_by_users(graph, owner)
        roots = np.flatnonzero(owner == np.arange(len(graph)))
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
        return merge_nodes(graph, number[owner], roots, "fusion", keeps_traffic=False)

    def _owners(self, graph: OpGraph) -> IntArray:
        """The root that each node ends up in: itself, or that of its consumers."""
        roles = _Roles.of(graph)
        joins = (None, roles.loop.tolist(), roles.view.tolist(), roles.product.tolist())
        takes: list[int] = roles.takes.tolist()
        region: list[int] = graph.region.tolist()
        uses = graph.data_deps.transpose(len(graph))
        users: list[int] = uses.values.tolist()
        bounds: list[int] = uses.offsets.tolist()
        order: list[int] = topological_order(graph).tolist()
        place = np.zeros(len(graph), np.int64)
        place[order] = np.arange(len(order))
        places: list[int] = place.tolist()
        owner, size = list(range(len(graph))), [1] * len(graph)
        ready = _constant(graph)
        for node in reversed(order):
            ends = {owner[user] for user in users[bounds[node] : bounds[node + 1]]}
            if ready[node] and len(ends) > 1:  # each computes it, and waits for none of the others
                continue
            root = min(ends, key=places.__getitem__, default=node)
            may_join = joins[takes[root]]
            if may_join is None or not may_join[node] or (len(ends) > 1 and takes[root] != _Takes.LOOPS):
                continue
            if region[node] == region[root] and size[root] < self.max_nodes:
                owner[node] = root
                size[root] += 1
                if takes[root] == _Takes.PRODUCT:
                    takes[root] = int(_Takes.VIEWS)
        return np.array(owner, np.int64)
