"""Fuse chains of elementwise work, as every compiler does: a chain moves its inputs and output once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import IntArray
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
)
_CONSUMERS = (
    OpClass.ELEMENTWISE,
    OpClass.TRANSCENDENTAL,
    OpClass.QUANTIZE,
    OpClass.MAP,
    OpClass.REDUCTION,
    OpClass.UPDATE,
)


@dataclass(frozen=True, slots=True)
class FuseElementwise:
    """Merge an elementwise-like node into its consumer where that is its only one.

    The rule of XLA's loop fusion without duplication: it never makes a cycle, since all paths out of the
    producer pass through that consumer. It stands before :class:`FoldFree`, because a program's return is a
    use, too. Operations of unknown cost stay alone. ``max_nodes`` bounds one fusion. O(nodes + edges).
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
            "elementwise operations merged into their consumers",
            count=len(graph) - len(roots),
        )
        return merge_nodes(graph, number[owner], roots, "fusion", keeps_traffic=False)

    def _owners(self, graph: OpGraph) -> IntArray:
        """The root that each node ends up in: itself, or its only consumer's root."""
        compute = graph.kind == int(NodeKind.COMPUTE)
        uses = np.bincount(graph.data_deps.values, minlength=len(graph))
        waits = np.bincount(graph.control_deps.values, minlength=len(graph))
        carried = np.zeros(len(graph), np.bool_)
        carried[graph.regions.carried_producer] = True
        carried[graph.regions.carried_consumer] = True
        known = ~(np.isnan(graph.flops) | np.isnan(graph.bytes_moved))
        plain = compute & known & (waits == 0) & ~carried
        joins = (plain & (uses == 1) & np.isin(graph.op_class, _PRODUCERS)).tolist()
        takes = (compute & known & np.isin(graph.op_class, _CONSUMERS)).tolist()
        region: list[int] = graph.region.tolist()
        bounds: list[int] = graph.data_deps.offsets.tolist()
        deps: list[int] = graph.data_deps.values.tolist()
        order: list[int] = topological_order(graph).tolist()
        owner = list(range(len(graph)))
        size = [1] * len(graph)
        for node in reversed(order):
            root = owner[node]
            if not takes[node] and root == node:
                continue
            for dep in deps[bounds[node] : bounds[node + 1]]:
                if (
                    joins[dep]
                    and owner[dep] == dep
                    and region[dep] == region[root]
                    and size[root] < self.max_nodes
                ):
                    owner[dep] = root
                    size[root] += 1
        return np.array(owner, np.int64)
