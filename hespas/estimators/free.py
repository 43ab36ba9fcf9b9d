"""Nodes that take no time whatever the device."""

from __future__ import annotations

import numpy as np

from hespas.graph import NodeKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray, FloatArray

__all__ = ["takes_no_time", "transcendentals"]


def transcendentals(graph: OpGraph) -> FloatArray:
    """Transcendentals per node; 0 where a format counts only FLOPs (they are then among those)."""
    return np.where(np.isnan(graph.transcendentals) & ~np.isnan(graph.flops), 0.0, graph.transcendentals)


def takes_no_time(graph: OpGraph) -> BoolArray:
    """Nodes that take no time: metadata, and compute or structure that states no cost at all."""
    work = (graph.flops > 0) | (graph.transcendentals > 0) | (graph.bytes_moved > 0)
    nothing = (graph.flops == 0) & (transcendentals(graph) == 0) & (graph.bytes_moved == 0)
    structural = np.isin(graph.op_class, (int(OpClass.FREE), int(OpClass.CONTROL)))
    compute = graph.kind == int(NodeKind.COMPUTE)
    free: BoolArray = compute & (nothing | (structural & ~work))
    free |= graph.kind == int(NodeKind.METADATA)
    return free
