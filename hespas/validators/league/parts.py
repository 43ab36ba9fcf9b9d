"""Components of a step: parts that one physical figure scales, and the one that each node belongs to.

A component is scaled by one physical figure: the efficiency of one kind of kernel, or the bandwidth that one
kind of communication reaches. The time of a step is a sum over its critical path, so over components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hespas.graph import NodeKind, OpClass, OpGraph
from hespas.graph.columns import DTYPES, IntArray
from hespas.simulator.launches import LAUNCH

__all__ = [
    "BUBBLE",
    "COMPONENTS",
    "HOST",
    "OVERLAP",
    "components_of",
]

COMPONENTS = (
    "products",
    "products of 8 bits",
    "products of 4 bits",
    "experts",
    "attention",
    "vector",
    "quantize",
    "optimizer",
    "tensor",
    "context",
    "data",
    "expert",
    "pipeline",
    "copies",
    "host",
    "overlap",
    "bubble",
)
"""Parts of a step: matrix products by bits of their operands, grouped ones of experts, attention, kernels
that stream, conversions to narrow formats, the update of weights; collectives of tensor, context, data and
expert parallelism and messages between stages; copies to the host; waits for the host; slowdown of kernels by
concurrent communication; idle time of the last stage to finish, which waits for other stages.
"""
_ROW = {name: row for row, name in enumerate(COMPONENTS)}
HOST, OVERLAP, BUBBLE = _ROW["host"], _ROW["overlap"], _ROW["bubble"]

_BY_CLASS: Mapping[int, str] = {
    int(OpClass.ATTENTION): "attention",
    int(OpClass.QUANTIZE): "quantize",
}
_BY_BITS: Mapping[int, str] = {8: "products of 8 bits", 4: "products of 4 bits"}
_BY_OP: Mapping[str, str] = {
    "aten::bmm": "experts",
    "absmax": "quantize",
    "aten::_fused_adamw_": "optimizer",
    "cpu_adam": "optimizer",
}
_BY_WORD: Sequence[tuple[str, str]] = (
    ("pipeline.", "pipeline"),
    ("dispatch", "expert"),
    ("combine", "expert"),
    ("weights", "data"),
    ("gradients", "data"),
    ("grad_norm", "data"),
    ("ends.", "data"),
    (".kv.", "context"),
    ("attention.core.", "context"),
    ("qkv.all_to_all", "context"),
    ("qkv.grad.all_to_all", "context"),
)
"""Words in the names of communication; any other is of tensor parallelism."""


def components_of(graph: OpGraph) -> IntArray:
    """Return the row of :data:`COMPONENTS` of each node, shape ``(nodes,)``. O(nodes log nodes)."""
    operand = np.full(len(graph), -1, np.int64)
    operand[graph.contractions.node] = graph.contractions.lhs
    key = graph.name_row.astype(np.int64) * len(graph.strings) + graph.op_row
    for column, most in ((graph.kind, max(NodeKind)), (graph.op_class, max(OpClass)), (operand, len(DTYPES))):
        key = key * (int(most) + 2) + column + 1
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    rows = [_ROW[_component(graph, node, int(operand[node]))] for node in first.tolist()]
    found: IntArray = np.array(rows, np.int64)[place.reshape(-1)]
    return found


_TALKS = frozenset((int(NodeKind.COLLECTIVE), int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE)))
_COPIES = frozenset((int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))


def _component(graph: OpGraph, node: int, code: int) -> str:
    if graph.op_name(node) == LAUNCH:
        return "host"
    kind = int(graph.kind[node])
    if kind in _COPIES:
        return "copies"
    name = graph.node_name(node)
    if kind in _TALKS:
        return next((found for word, found in _BY_WORD if word in name), "tensor")
    found = _BY_OP.get(graph.op_name(node))
    if found is None and code >= 0:
        return _BY_BITS.get(DTYPES[code].bits, "products")
    return found or _BY_CLASS.get(int(graph.op_class[node]), "vector")
