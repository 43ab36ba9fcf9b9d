"""Drop what costs nothing and never runs, leading dependencies around it."""

from __future__ import annotations

from dataclasses import dataclass

from hespas.graph.columns import BoolArray
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.kinds import NodeKind, OpClass
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.rewrite import bypass

__all__ = ["FoldFree", "is_free"]


def is_free(graph: OpGraph) -> BoolArray:
    """Which nodes take no time by construction: no arithmetic, traffic, communication, or stated time."""
    unused = (graph.flops == 0) & (graph.transcendentals == 0) & (graph.bytes_moved == 0)
    compute = graph.kind == int(NodeKind.COMPUTE)
    timed = graph.duration_ns > 0
    free: BoolArray = compute & ~timed & ((graph.op_class == int(OpClass.FREE)) | unused)
    return free


@dataclass(frozen=True, slots=True)
class FoldFree:
    """Fold views, constants and tuples into their consumers, and drop branches that are not taken.

    FLOPs, bytes and communication are conserved: only zeros go. O(nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph without free and never executed nodes."""
        free = is_free(graph)
        untaken = graph.multiplicity == 0
        folded = bypass(graph, free | untaken)
        removed = len(graph) - len(folded)
        diagnostics.info(
            "pass.untaken-branch",
            graph.name,
            "operations of branches not taken left out",
            count=int(untaken.sum()),
        )
        diagnostics.info(
            "pass.folded-free",
            graph.name,
            "operations that cost nothing (views, constants, tuples) folded into their consumers",
            count=removed - int(untaken.sum()),
        )
        return folded
