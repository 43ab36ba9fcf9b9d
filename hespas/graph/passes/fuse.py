"""Fuse what compilers fuse: a chain of elementwise work moves its inputs and its outputs once, and layout
changes beside a product are part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.kinds import NodeKind, OpClass
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.merge import merge_nodes
from hespas.graph.passes.order import topological_order

__all__ = ["FuseElementwise"]

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
        """Operations of unknown cost have no role, nor has what others wait for or a loop carries."""
        known = (graph.kind == int(NodeKind.COMPUTE)) & ~(np.isnan(graph.flops) | np.isnan(graph.bytes_moved))
        moves = known & (np.bincount(graph.control_deps.values, minlength=len(graph)) == 0)
        moves[graph.regions.carried_producer] = False
        moves[graph.regions.carried_consumer] = False
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
        for node in reversed(order):
            ends = {owner[user] for user in users[bounds[node] : bounds[node + 1]]}
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
