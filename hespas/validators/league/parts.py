"""Passes of a pipeline stage as timed nodes, and what of a step each node is: its component.

A component is scaled by one physical figure: the efficiency of one kind of kernel, or the bandwidth that one
kind of communication reaches. The time of a step is a sum over its critical path, so over components.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hespas.generators.llm.assemble import Part
from hespas.graph import NodeKind, OpClass, OpGraph
from hespas.graph.columns import DTYPES

__all__ = [
    "BUBBLE",
    "COMPONENTS",
    "COMPUTE",
    "DATA",
    "HOST",
    "OVERLAP",
    "PIPELINE",
    "StageNodes",
    "stage_nodes",
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
DATA, PIPELINE = _ROW["data"], _ROW["pipeline"]
HOST, OVERLAP, BUBBLE = _ROW["host"], _ROW["overlap"], _ROW["bubble"]
COMPUTE = 0
"""The stream of kernels that compute; any other stream communicates or copies."""

_BY_CLASS: Mapping[int, str] = {
    int(OpClass.ATTENTION): "attention",
    int(OpClass.QUANTIZE): "quantize",
}
_COUNTED = "moe_permute"
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


@dataclass(frozen=True, slots=True)
class StageNodes:
    """The passes of a stage, columns of shape ``(nodes,)`` as lists: ``time_ns`` of a node alone, its row of
    :data:`COMPONENTS`, its stream, the nodes of its own part that it waits for, and whether the host is
    ``waited`` for it before it issues more. ``parts`` are runs of nodes, ``variants`` and ``end`` say which
    is which, as the generator has them.
    """

    time_ns: list[float]
    component: list[int]
    stream: list[int]
    waits: list[list[int]]
    waited: list[bool]
    parts: Sequence[Part]
    variants: Mapping[tuple[str, int, bool], int]
    end: int

    def part(self, kind: str, chunk: int, *, special: bool) -> int:
        """The number of a pass; the special one where there is no other."""
        found = self.variants.get((kind, chunk, special))
        return self.variants[kind, chunk, True] if found is None else found


def stage_nodes(
    graph: OpGraph,
    parts: Sequence[Part],
    variants: Mapping[tuple[str, int, bool], int],
    end: int,
    time_ns: list[float],
    *,
    synchronizes: bool,
) -> StageNodes:
    """The nodes of a template graph with their times. ``synchronizes``: the host reads how many tokens reach
    each expert before it issues their products. O(nodes + dependencies).
    """
    kinds, classes = graph.kind.tolist(), graph.op_class.tolist()
    bits = dict(zip(graph.contractions.node.tolist(), graph.contractions.lhs.tolist(), strict=True))
    component: list[int] = []
    stream: list[int] = []
    queue = graph.stream.tolist()
    for node, kind in enumerate(kinds):
        name = _component(graph, node, kind, classes[node], bits.get(node, -1))
        component.append(_ROW[name])
        stream.append(_stream(kind, queue[node]))
    data, control = graph.data_deps, graph.control_deps
    starts, values = data.offsets.tolist(), data.values.tolist()
    more, others = control.offsets.tolist(), control.values.tolist()
    waits = [
        values[starts[node] : starts[node + 1]] + others[more[node] : more[node + 1]]
        for node in range(len(kinds))
    ]
    waited = [synchronizes and graph.op_name(node) == _COUNTED for node in range(len(kinds))]
    return StageNodes(time_ns, component, stream, waits, waited, parts, variants, end)


_TALKS = frozenset((int(NodeKind.COLLECTIVE), int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE)))
_COPIES = frozenset((int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))


def _component(graph: OpGraph, node: int, kind: int, op_class: int, code: int) -> str:
    if kind in _COPIES:
        return "copies"
    name = graph.node_name(node)
    if kind in _TALKS:
        return next((found for word, found in _BY_WORD if word in name), "tensor")
    found = _BY_OP.get(graph.op_name(node))
    if found is None and code >= 0:
        return _BY_BITS.get(DTYPES[code].bits, "products")
    return found or _BY_CLASS.get(op_class, "vector")


_LOADS, _STORES = 2_000, 2_001


def _stream(kind: int, queue: int) -> int:
    """One stream computes, one each copies to and from the host, others communicate as the graph says."""
    if kind in _COPIES:
        return _LOADS if kind == int(NodeKind.MEM_LOAD) else _STORES
    return 1 + max(queue, 0) if kind in _TALKS else COMPUTE
