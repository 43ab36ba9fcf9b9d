"""Figures of a program as captured and as compiled, side by side: what the compiler made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hespas.graph import CollectiveKind, NodeKind, OpGraph, Workload
from hespas.graph.columns import BoolArray, SmallIntArray
from hespas.graph.passes import is_free

__all__ = ["Figures", "figures_of"]

_TALKING = (NodeKind.COLLECTIVE, NodeKind.PERMUTE, NodeKind.SEND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one rank class and step, loops run out. ``operations`` counts what takes time, ``fusions`` those of
    them that are fused; ``product_flops`` are useful FLOPs of matrix products and convolutions.
    ``collectives`` and ``collective_bytes`` are by kind (``all_reduce``), bytes in Chakra's sense;
    ``asynchronous`` are collectives and messages that other work stands beside, before what completes them.
    """

    operations: float
    fusions: float
    product_flops: float
    collectives: Mapping[str, float]
    collective_bytes: Mapping[str, float]
    asynchronous: float


def figures_of(workload: Workload, rank_class: int = 0) -> Figures:
    """Figures of one class. O(nodes)."""
    graph = workload.classes[rank_class]
    runs = np.nan_to_num(graph.multiplicity, nan=1.0)
    busy = ~is_free(graph)
    table, products = graph.collectives, graph.contractions
    counts: dict[str, float] = {}
    sizes: dict[str, float] = {}
    for code in np.unique(table.kind).tolist():
        mine = table.kind == code
        kind = CollectiveKind(code).name.lower()
        counts[kind] = float(runs[table.node[mine]].sum())
        sizes[kind] = float((table.comm_bytes[mine] * runs[table.node[mine]]).sum())
    useful = np.where(np.isnan(products.useful_flops), products.flops, products.useful_flops)
    return Figures(
        operations=float(runs[busy].sum()),
        fusions=float(runs[busy & _named(graph, graph.op_row, "fusion")].sum()),
        product_flops=float((useful * runs[products.node]).sum()),
        collectives=counts,
        collective_bytes=sizes,
        asynchronous=float(runs[_asynchronous(graph)].sum()),
    )


def _named(graph: OpGraph, rows: SmallIntArray, part: str) -> BoolArray:
    """Which string rows have a text in them."""
    holds = {row: part in graph.strings[row] for row in np.unique(rows).tolist()}
    return np.array([holds[row] for row in rows.tolist()], np.bool_)


def _asynchronous(graph: OpGraph) -> BoolArray:
    """Which nodes communicate while something else computes, as the order of nodes has it."""
    busy = ~is_free(graph) & (graph.kind == int(NodeKind.COMPUTE))
    completes = _named(graph, graph.op_row, "-done") | _named(graph, graph.name_row, "-done")
    rows, made = graph.data_deps.row_ids, graph.data_deps.values
    rows, made = rows[completes[rows]], made[completes[rows]]
    first = np.full(len(graph), -1, np.int64)
    np.maximum.at(first, made, rows)
    before = np.concatenate([[0], np.cumsum(busy)])
    talks = np.isin(graph.kind, _TALKING) & (first >= 0)
    beside: BoolArray = talks & (before[np.maximum(first, 0)] > before[np.arange(len(graph)) + 1])
    return beside
