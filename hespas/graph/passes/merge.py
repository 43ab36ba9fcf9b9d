"""Merge of groups of nodes into one node each, and the grouping of computation between communication."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, StringTableBuilder
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import (
    ContractionTable,
    NodeKind,
    OpClass,
    OpGraph,
    RegionTable,
    Resource,
    is_recorded_wait,
)
from hespas.graph.passes.order import all_deps, topological_order
from hespas.graph.passes.rewrite import take_nodes

__all__ = ["GroupRegions", "merge_nodes"]


_KEPT_PRODUCTS = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION), int(OpClass.ATTENTION))


def merge_nodes(
    graph: OpGraph, group: IntArray, roots: IntArray, op_name: str, *, keeps_traffic: bool
) -> OpGraph:
    """A graph with one node per group. ``group[n]`` is the new number of old node ``n``, ``roots[g]`` the old
    node that lends group ``g`` its name, kind and provenance.

    A group with one product is that product with something beside it, others are fusions called ``op_name``.
    FLOPs, transcendentals, durations and contractions of a group add up. Bytes add up where
    ``keeps_traffic``; else a tensor made and used inside a group moves none, and what views inside it show of
    others is read once. Results are those of members
    that are used outside, or by nobody. The rate is that of the member with most work. Groups of one node
    are unchanged.
    """
    groups = len(roots)
    several = np.bincount(group, minlength=groups) > 1
    data, control = (_between_groups(deps, group, groups) for deps in (graph.data_deps, graph.control_deps))
    merged = take_nodes(graph, roots, data, control)
    leaves = _leaves(graph, group)
    if keeps_traffic:
        read, written = _sum(graph.bytes_read, group, groups), _sum(graph.bytes_written, group, groups)
    else:
        read, written = _traffic(graph, group, groups, leaves)
    strings = StringTableBuilder(graph.strings)
    product = _lone_products(graph, group, groups)
    op_class = np.where(product < 0, int(OpClass.FUSION), graph.op_class[product])
    op_row = np.where(product < 0, strings.add(op_name), graph.op_row[product])
    return replace(
        merged,
        strings=strings.build(),
        op_row=np.where(several, op_row, merged.op_row).astype(np.int32),
        op_class=np.where(several, op_class, merged.op_class).astype(np.uint8),
        rate_dtype=_busiest_rate(graph, group, groups),
        flops=_sum(graph.flops, group, groups),
        useful_flops=_sum(graph.useful_flops, group, groups),
        transcendentals=_sum(graph.transcendentals, group, groups),
        bytes_read=np.where(several, read, merged.bytes_read),
        bytes_written=np.where(several, written, merged.bytes_written),
        duration_ns=_sum(graph.duration_ns, group, groups),
        operands=_outside_operands(graph, group, groups),
        results=_outside_results(graph, group, groups, leaves),
        contractions=_merge_contractions(graph, group),
        regions=_merge_carried(graph, group),
    )


def _lone_products(graph: OpGraph, group: IntArray, groups: int) -> IntArray:
    """The one product of each group; -1 where it has none or several."""
    products = np.flatnonzero(np.isin(graph.op_class, _KEPT_PRODUCTS))
    lone = np.full(groups, -1, np.int64)
    lone[group[products]] = products
    lone[np.bincount(group[products], minlength=groups) > 1] = -1
    return lone


def _leaves(graph: OpGraph, group: IntArray) -> BoolArray:
    """Which nodes make something that leaves their group: it is used outside, or nobody uses it."""
    deps = graph.data_deps
    inside = group[deps.row_ids] == group[deps.values]
    leaves = np.ones(len(graph), np.bool_)
    leaves[deps.values[inside]] = False
    leaves[deps.values[~inside]] = True
    leaves[graph.regions.carried_producer] = True
    return leaves


def _busiest_rate(graph: OpGraph, group: IntArray, groups: int) -> NDArray[np.int16]:
    """The arithmetic type of the member with most operations (the last of equals)."""
    with np.errstate(over="ignore"):  # infinity says it, without a warning of NumPy
        work = np.nan_to_num(graph.flops) + np.nan_to_num(graph.transcendentals)
    order = np.argsort(work, kind="stable")
    rates = np.full(groups, -1, np.int16)
    rates[group[order]] = graph.rate_dtype[order]
    return rates


def _outside_results(graph: OpGraph, group: IntArray, groups: int, leaves: BoolArray) -> RaggedArray:
    """Result types of each group: those of its members that leave it, in program order."""
    rows = np.flatnonzero(leaves)
    kept = graph.results.take(rows)
    return RaggedArray.from_pairs(group[rows][kept.row_ids], kept.values, groups)


def _sum(column: FloatArray, group: IntArray, groups: int) -> FloatArray:
    return np.bincount(group, weights=column, minlength=groups).astype(np.float64, copy=False)


def _between_groups(deps: RaggedArray, group: IntArray, groups: int) -> RaggedArray:
    """Dependencies between different groups, each once, in order of first mention."""
    if not len(deps.values):
        return RaggedArray.empty(groups)
    rows, values = group[deps.row_ids], group[deps.values]
    outside = rows != values
    keys = rows[outside] * groups + values[outside]
    _, first = np.unique(keys, return_index=True)
    first.sort()
    return RaggedArray.from_pairs(keys[first] // groups, keys[first] % groups, groups)


def _traffic(
    graph: OpGraph, group: IntArray, groups: int, leaves: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Bytes read and written per group: each node's own less what stays inside, and what several members read
    of one tensor once.
    """
    deps = graph.data_deps
    consumer, producer = deps.row_ids, deps.values.astype(np.int64)
    result_bytes = graph.results.segment_sum(graph.types.bytes)
    taken = np.fmin(result_bytes[producer], graph.bytes_read[consumer])
    inside = group[consumer] == group[producer]
    source = np.where(inside, _viewed(graph, group, groups)[producer], producer)
    made = source < 0
    stays = np.bincount(group[consumer[made]], weights=taken[made], minlength=groups)
    again = _read_again(group[consumer[~made]], source[~made], taken[~made], groups)
    with np.errstate(invalid="ignore"):  # more than a number holds less as much is unknown
        read = _sum(graph.bytes_read, group, groups) - stays - again
    written = _sum(np.where(leaves, graph.bytes_written, 0.0), group, groups)
    return np.maximum(read, 0.0), written


def _viewed(graph: OpGraph, group: IntArray, groups: int) -> IntArray:
    """Per node, whose memory its readers in the same group read: -1 where the group makes the tensor itself.
    A view makes nothing: it shows what stands outside, or an argument, which has no node (then itself).
    """
    found = np.full(len(graph), -1, np.int64)
    several = np.bincount(group, minlength=groups)[group] > 1
    views: list[bool] = (several & (graph.op_class == int(OpClass.FREE))).tolist()
    if not any(views):
        return found
    shown: list[int] = found.tolist()
    owner: list[int] = group.tolist()
    deps = graph.data_deps.to_lists()
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        if views[node]:
            sources = [shown[dep] if owner[dep] == owner[node] else dep for dep in deps[node]]
            shown[node] = max(sources, default=node)
    return np.array(shown, np.int64)


def _read_again(readers: IntArray, source: IntArray, taken: FloatArray, groups: int) -> FloatArray:
    """Bytes per group that its members read of a tensor after the first of them."""
    order = np.lexsort((-taken, source, readers))
    readers, source, taken = readers[order], source[order], taken[order]
    again = np.zeros(len(order), np.bool_)
    again[1:] = (readers[1:] == readers[:-1]) & (source[1:] == source[:-1])
    return np.bincount(readers[again], weights=taken[again], minlength=groups).astype(np.float64, copy=False)


def _outside_operands(graph: OpGraph, group: IntArray, groups: int) -> RaggedArray:
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
    return RaggedArray.from_lists(rows)


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


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """Merge connected device computation that stands between the same communications into one node.

    A node's depth is the number of borders on its longest path: communication, host work, operations of
    unknown cost, and the edges of loops and branches. Compute nodes of one depth that are connected through
    each other merge; since an edge between two groups always goes to a greater depth, or from computation to
    the border behind it, no cycle can arise. Costs and durations add up, so estimate before this pass: a
    region's traffic is that of its operations. Program order of what remains is kept as far as dependencies
    allow. O(nodes log nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph with one node per region; number, bytes and order of collectives conserved."""
        leader = np.array(self._leaders(graph, _joinable(graph)), np.int64)
        first = np.flatnonzero(leader == np.arange(len(graph)))
        if len(first) == len(graph):
            return graph
        number = np.zeros(len(graph), np.int64)
        number[first] = np.arange(len(first))
        group = number[leader]
        order = np.array(_program_order(graph, group, len(first)), np.int64)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        group = place[group]
        roots = np.zeros(len(order), np.int64)
        roots[group] = np.arange(len(graph))  # the last member of each group: it makes what others use
        diagnostics.info(
            "pass.grouped",
            graph.name,
            "operations merged into regions between collectives",
            count=len(graph) - len(order),
        )
        merged = merge_nodes(graph, group, roots, "region", keeps_traffic=True)
        rising = bool((merged.id[1:] > merged.id[:-1]).all())
        return merged if rising else replace(merged, id=np.arange(len(merged), dtype=np.uint64))

    def _leaders(self, graph: OpGraph, joins: list[bool]) -> list[int]:
        """The smallest node of each node's connected group of equal depth."""
        deps = all_deps(graph)
        bounds: list[int] = deps.offsets.tolist()
        values: list[int] = deps.values.tolist()
        region: list[int] = graph.region.tolist()
        depth = [0] * len(graph)
        leader = list(range(len(graph)))
        order: list[int] = topological_order(graph).tolist()
        for node in order:
            before = values[bounds[node] : bounds[node + 1]]
            here = region[node]
            depth[node] = max(
                (depth[dep] + (not joins[dep] or region[dep] != here) for dep in before), default=0
            )
            if not joins[node]:
                continue
            for dep in before:
                if joins[dep] and region[dep] == here and depth[dep] == depth[node]:
                    _union(leader, dep, node)
        return [_find(leader, node) for node in range(len(graph))]


def _joinable(graph: OpGraph) -> list[bool]:
    """Device computation of known cost; recorded waits stay what they are."""
    joins: BoolArray = (
        (graph.kind == int(NodeKind.COMPUTE))
        & (graph.resource == int(Resource.DEVICE))
        & (graph.op_class != int(OpClass.HOST))
        & ~np.isnan(graph.flops)
        & ~np.isnan(graph.bytes_moved)
        & ~is_recorded_wait(graph)
    )
    timed = ~np.isnan(graph.duration_ns)
    if timed.any():
        joins &= timed
    joined: list[bool] = joins.tolist()
    return joined


def _program_order(graph: OpGraph, group: IntArray, groups: int) -> list[int]:
    """Groups so that each follows what it depends on, the one with the earliest member first."""
    deps = all_deps(graph)
    rows, values = group[deps.row_ids], group[deps.values]
    outside = rows != values
    edges = np.unique(rows[outside] * groups + values[outside])
    consumers = RaggedArray.from_pairs(edges % groups, edges // groups, groups).to_lists()
    waiting: list[int] = np.bincount(edges // groups, minlength=groups).tolist()
    earliest = np.full(groups, len(graph), np.int64)
    np.minimum.at(earliest, group, np.arange(len(graph)))
    priority: list[int] = earliest.tolist()
    ready = [(priority[each], each) for each in range(groups) if not waiting[each]]
    heapify(ready)
    order: list[int] = []
    while ready:
        _, done = heappop(ready)
        order.append(done)
        for after in consumers[done]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, (priority[after], after))
    return order


def _find(leader: list[int], node: int) -> int:
    while leader[node] != node:
        leader[node] = leader[leader[node]]
        node = leader[node]
    return node


def _union(leader: list[int], one: int, other: int) -> None:
    low, high = sorted((_find(leader, one), _find(leader, other)))
    leader[high] = low
