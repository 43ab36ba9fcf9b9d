"""Merge groups of nodes into one node each, costs conserved: what fusing and grouping share."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from hespas.graph.columns import Csr, FloatArray, IntArray, StringTableBuilder
from hespas.graph.kinds import OpClass
from hespas.graph.opgraph import OpGraph
from hespas.graph.passes.rewrite import take_nodes
from hespas.graph.tables import ContractionTable, RegionTable

__all__ = ["merge_nodes"]


def merge_nodes(graph: OpGraph, group: IntArray, roots: IntArray, op_name: str) -> OpGraph:
    """A graph with one node per group. ``group[n]`` is the new number of old node ``n``, ``roots[g]`` the old
    node that lends group ``g`` its name, kind, results and provenance.

    FLOPs, transcendentals and contractions of a group add up. A tensor made and used inside a group moves no
    bytes; one made inside and needed outside is written once. Groups of one node are unchanged.
    """
    groups = len(roots)
    sizes = np.bincount(group, minlength=groups)
    if (sizes == 1).all() and np.array_equal(roots, np.arange(len(graph))):
        return graph
    data, control = (_quotient(deps, group, groups) for deps in (graph.data_deps, graph.control_deps))
    merged = take_nodes(graph, roots, data, control)
    several = sizes > 1
    read, written = _traffic(graph, group, groups)
    strings = StringTableBuilder(graph.strings)
    op_row = strings.add(op_name)
    useful = _sum(graph.useful_flops, group, groups)
    return replace(
        merged,
        strings=strings.build(),
        op_row=np.where(several, op_row, merged.op_row).astype(np.int32),
        op_class=np.where(several, int(OpClass.FUSION), merged.op_class).astype(np.uint8),
        flops=_sum(graph.flops, group, groups),
        useful_flops=useful,
        transcendentals=_sum(graph.transcendentals, group, groups),
        bytes_read=np.where(several, read, merged.bytes_read),
        bytes_written=np.where(several, written, merged.bytes_written),
        duration_ns=_sum(graph.duration_ns, group, groups),
        operands=_outside_operands(graph, group, groups),
        contractions=_merge_contractions(graph, group),
        regions=_merge_carried(graph, group),
    )


def _sum(column: FloatArray, group: IntArray, groups: int) -> FloatArray:
    return np.bincount(group, weights=column, minlength=groups).astype(np.float64, copy=False)


def _quotient(deps: Csr, group: IntArray, groups: int) -> Csr:
    """Dependencies between different groups, each once, in order of first mention."""
    if not len(deps.values):
        return Csr.empty(groups)
    rows, values = group[deps.row_ids], group[deps.values]
    outside = rows != values
    keys = rows[outside] * groups + values[outside]
    _, first = np.unique(keys, return_index=True)
    first.sort()
    return Csr.from_pairs(keys[first] // groups, keys[first] % groups, groups)


def _traffic(graph: OpGraph, group: IntArray, groups: int) -> tuple[FloatArray, FloatArray]:
    """Bytes read and written per group: each node's own less what stays inside."""
    deps = graph.data_deps
    consumer, producer = deps.row_ids, deps.values.astype(np.int64)
    inside = group[consumer] == group[producer]
    result_bytes = graph.results.segment_sum(graph.types.bytes)
    saved = np.minimum(result_bytes[producer[inside]], graph.bytes_read[consumer[inside]])
    read = _sum(graph.bytes_read, group, groups)
    read -= np.bincount(group[consumer[inside]], weights=saved, minlength=groups)
    used_outside = np.ones(len(graph), np.bool_)
    used_outside[producer[inside]] = False
    used_outside[producer[~inside]] = True
    written = _sum(np.where(used_outside, graph.bytes_written, 0.0), group, groups)
    return np.maximum(read, 0.0), written


def _outside_operands(graph: OpGraph, group: IntArray, groups: int) -> Csr:
    """Operand types of each group that no member of the group makes."""
    made = Counter[tuple[int, int]]()
    deps = graph.data_deps
    inside = group[deps.row_ids] == group[deps.values]
    owner: list[int] = group.tolist()
    results = graph.results.to_lists()
    producers: list[int] = deps.values[inside].tolist()
    for producer in producers:
        made.update((owner[producer], kind) for kind in results[producer])
    rows: list[list[int]] = [[] for _ in range(groups)]
    for node, kinds in zip(owner, graph.operands.to_lists(), strict=True):
        for kind in kinds:
            if made[node, kind]:
                made[node, kind] -= 1
            else:
                rows[node].append(kind)
    return Csr.from_lists(rows)


def _merge_contractions(graph: OpGraph, group: IntArray) -> ContractionTable:
    table = graph.contractions
    node = group[table.node].astype(np.int32)
    order = np.argsort(node, kind="stable")
    columns = {name: getattr(table, name)[order] for name in table.__slots__}
    return replace(table, **(columns | {"node": node[order]}))


def _merge_carried(graph: OpGraph, group: IntArray) -> RegionTable:
    table = graph.regions
    return replace(
        table,
        carried_producer=group[table.carried_producer].astype(np.int32),
        carried_consumer=group[table.carried_consumer].astype(np.int32),
    )
