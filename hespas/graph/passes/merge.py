"""Merging of nodes: groups of nodes become one node each, and computation between communication is
grouped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from hespas.graph.columns import BoolArray, FloatArray, IntArray, RaggedArray, StringTableBuilder
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import (
    NodeKind,
    OpClass,
    OpGraph,
    Resource,
    is_recorded_wait,
)
from hespas.graph.passes.order import all_deps, ready_order, topological_order
from hespas.graph.passes.rewrite import take_nodes

__all__ = ["REGION", "GroupRegions", "merge_nodes", "regions_between_communications"]

REGION = "region"
"""Operation of a node that :class:`GroupRegions` merged: several kernels, which no estimator can time."""


_PRODUCT_CLASSES = (int(OpClass.CONTRACTION), int(OpClass.CONVOLUTION), int(OpClass.ATTENTION))


def merge_nodes(
    graph: OpGraph, group: IntArray, roots: IntArray, op_name: str, *, keeps_traffic: bool
) -> OpGraph:
    """Return a graph with one node per group.

    ``group[n]`` is the new number of old node ``n``. ``roots[g]`` is the old node from which group ``g`` has
    its name, kind and provenance. Groups are fusions with the operation ``op_name``, except that a group with
    one matmul has the class and operation of that matmul. FLOPs, transcendentals, durations and contractions
    are summed. If ``keeps_traffic`` is True, all groups are fusions, and bytes are summed too. Otherwise a
    tensor that is made and used inside a group moves no bytes, and a tensor that several views of the group
    show is read once. Results are outputs of members that are used outside, or unused. The rate type is the
    type of the member with the most work. Groups of one node are unchanged.
    """
    groups = len(roots)
    several = np.bincount(group, minlength=groups) > 1
    data, control = (_between_groups(deps, group, groups) for deps in (graph.data_deps, graph.control_deps))
    merged = take_nodes(graph, roots, data, control)
    # Nodes whose output leaves their group: it is used outside, or unused.
    deps = graph.data_deps
    inside = group[deps.row_ids] == group[deps.values]
    leaves = np.ones(len(graph), np.bool_)
    leaves[deps.values[inside]] = False
    leaves[deps.values[~inside]] = True
    leaves[graph.regions.carried_producer] = True
    if keeps_traffic:
        read, written = _sum(graph.bytes_read, group, groups), _sum(graph.bytes_written, group, groups)
    else:
        read, written = _traffic(graph, group, groups, leaves)
    strings = StringTableBuilder(graph.strings)
    # The only product of each group; -1 if it has none or several.
    products = np.flatnonzero(np.isin(graph.op_class, _PRODUCT_CLASSES))
    product = np.full(groups, -1, np.int64)
    product[group[products]] = products
    product[(np.bincount(group[products], minlength=groups) > 1) | keeps_traffic] = -1
    op_class = np.where(product < 0, int(OpClass.FUSION), graph.op_class[product])
    op_id = np.where(product < 0, strings.add(op_name), graph.op_id[product])
    # The arithmetic type of the member with the most operations (the last of equals).
    with np.errstate(over="ignore"):
        work = np.nan_to_num(graph.flops) + np.nan_to_num(graph.transcendentals)
    order = np.argsort(work, kind="stable")
    rates = np.full(groups, -1, np.int16)
    rates[group[order]] = graph.rate_dtype[order]
    leaving = np.flatnonzero(leaves)
    results = graph.results.take(leaving)
    table, regions = graph.contractions, graph.regions
    node = group[table.node].astype(np.int32)
    by_node = np.argsort(node, kind="stable")
    return replace(
        merged,
        strings=strings.build(),
        op_id=np.where(several, op_id, merged.op_id).astype(np.int32),
        op_class=np.where(several, op_class, merged.op_class).astype(np.uint8),
        rate_dtype=rates,
        flops=_sum(graph.flops, group, groups),
        useful_flops=_sum(graph.useful_flops, group, groups),
        transcendentals=_sum(graph.transcendentals, group, groups),
        bytes_read=np.where(several, read, merged.bytes_read),
        bytes_written=np.where(several, written, merged.bytes_written),
        duration_ns=_sum(graph.duration_ns, group, groups),
        operands=_outside_operands(graph, group, groups),
        results=RaggedArray.from_pairs(group[leaving][results.row_ids], results.values, groups),
        contractions=table.take(by_node, node[by_node]),
        regions=replace(
            regions,
            carried_producer=group[regions.carried_producer].astype(np.int32),
            carried_consumer=group[regions.carried_consumer].astype(np.int32),
        ),
    )


def _sum(column: FloatArray, group: IntArray, groups: int) -> FloatArray:
    return np.bincount(group, weights=column, minlength=groups).astype(np.float64, copy=False)


def _between_groups(deps: RaggedArray, group: IntArray, groups: int) -> RaggedArray:
    """Return the dependencies between groups: a group depends on another one if one of its nodes does. Each
    dependency is listed once, in order of first occurrence.
    """
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
    """Return the bytes read and written per group.

    They are the sums over the nodes of the group, without tensors that stay inside. A tensor that several
    members read is counted once.
    """
    deps = graph.data_deps
    consumer, producer = deps.row_ids, deps.values.astype(np.int64)
    result_bytes = graph.results.segment_sum(graph.types.bytes)
    taken = np.fmin(result_bytes[producer], graph.bytes_read[consumer])
    inside = group[consumer] == group[producer]
    source = np.where(inside, _tensor_sources(graph, group, groups)[producer], producer)
    made = source < 0
    stays = np.bincount(group[consumer[made]], weights=taken[made], minlength=groups)
    # Reads of one tensor by the members of a group, the largest first: the others repeat it.
    reader, tensor, size = group[consumer[~made]], source[~made], taken[~made]
    order = np.lexsort((-size, tensor, reader))
    reader, tensor, size = reader[order], tensor[order], size[order]
    repeats = np.zeros(len(order), np.bool_)
    repeats[1:] = (reader[1:] == reader[:-1]) & (tensor[1:] == tensor[:-1])
    repeated = np.bincount(reader[repeats], weights=size[repeats], minlength=groups)
    with np.errstate(invalid="ignore"):  # infinity minus infinity is unknown
        read = _sum(graph.bytes_read, group, groups) - stays - repeated
    written = _sum(np.where(leaves, graph.bytes_written, 0.0), group, groups)
    return np.maximum(read, 0.0), written


def _tensor_sources(graph: OpGraph, group: IntArray, groups: int) -> IntArray:
    """Return for each view inside a group the node that wrote the memory it shows; -1 if the group itself
    wrote it, and for all other nodes.

    If the memory is an argument of the program, which has no node, the result is the view itself.
    """
    unknown = np.full(len(graph), -1, np.int64)
    is_grouped = np.bincount(group, minlength=groups)[group] > 1
    views: list[bool] = (is_grouped & (graph.op_class == int(OpClass.FREE))).tolist()
    if not any(views):
        return unknown
    shown: list[int] = unknown.tolist()
    owner: list[int] = group.tolist()
    deps = graph.data_deps.to_lists()
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        if views[node]:
            sources = [shown[dep] if owner[dep] == owner[node] else dep for dep in deps[node]]
            shown[node] = max(sources, default=node)
    return np.array(shown, np.int64)


def _outside_operands(graph: OpGraph, group: IntArray, groups: int) -> RaggedArray:
    """Return the operand types of each group that no member of the group produces."""
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


def regions_between_communications(graph: OpGraph) -> IntArray:
    """Return for each node the first node of its region (see :class:`GroupRegions`), itself if it does not
    merge. O(nodes + edges).
    """
    # Device computation of known cost may merge, except recorded waits.
    is_mergeable: BoolArray = (
        (graph.kind == int(NodeKind.COMPUTE))
        & (graph.resource == int(Resource.DEVICE))
        & (graph.op_class != int(OpClass.HOST))
        & ~np.isnan(graph.flops)
        & ~np.isnan(graph.bytes_moved)
        & ~is_recorded_wait(graph)
    )
    timed = ~np.isnan(graph.duration_ns)
    if timed.any():
        is_mergeable &= timed
    joins: list[bool] = is_mergeable.tolist()
    deps = all_deps(graph)
    queue: list[tuple[int, int]] = list(zip(graph.region.tolist(), graph.stream.tolist(), strict=True))
    bounds: list[int] = deps.offsets.tolist()
    values: list[int] = deps.values.tolist()
    is_inner = [False] * len(values)
    feeds_others = [False] * len(graph)
    for node, join in enumerate(joins):
        for edge in range(bounds[node], bounds[node + 1]):
            dep = values[edge]
            is_inner[edge] = join and joins[dep] and queue[dep] == queue[node]
            feeds_others[dep] = feeds_others[dep] or not is_inner[edge]
    leader = list(range(len(graph)))
    open_region: dict[tuple[int, int], int] = {}
    awaited: dict[int, set[int]] = {}
    order: list[int] = topological_order(graph).tolist()
    for node in order:
        if not joins[node]:
            continue
        edges = range(bounds[node], bounds[node + 1])
        outside = {values[edge] for edge in edges if not is_inner[edge]}
        first = open_region.get(queue[node], -1)
        follows = any(is_inner[edge] and leader[values[edge]] == first for edge in edges)
        # A node that neither follows the region nor waits for the same work may run before the region.
        if first >= 0 and (outside <= awaited[first] if follows else outside == awaited[first]):
            leader[node] = first
        else:
            first = node
            awaited[first] = outside
        open_region[queue[node]] = -1 if feeds_others[node] else first
    return np.array(leader, np.int64)


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """Pass that merges device computation between communications into one node.

    Computations of one queue that follow each other in program order are merged if only the first one waits
    for other work (communication, host work, other queues, loops, operations of unknown cost), and only the
    last one has other work waiting for it. Each member depends on an earlier one, or waits for the same work
    as the first one. Communication therefore starts and ends as before on a queue that runs in program order,
    and ranks cannot wait for each other in a circle. A queue that runs the first ready operation, as the
    simulator does, may run another operation inside a region; a region is not interrupted, so the time of the
    step then changes by a few percent. Costs and durations are summed. Estimate times before this pass,
    because the traffic of a region is the sum over its operations. The result is in program order as far as
    dependencies allow. O(nodes log nodes + edges).
    """

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph with one node per region; number, bytes and order of collectives are conserved."""
        leader = regions_between_communications(graph)
        first = np.flatnonzero(leader == np.arange(len(graph)))
        if len(first) == len(graph):
            return graph
        number = np.zeros(len(graph), np.int64)
        number[first] = np.arange(len(first))
        group = number[leader]
        order = np.array(_program_order(graph, group, len(first)), np.int64)
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        group = position[group]
        roots = np.zeros(len(order), np.int64)
        roots[group] = np.arange(len(graph))  # the last member of each group, whose output others use
        diagnostics.info(
            "pass.grouped",
            graph.name,
            "operations merged into regions between collectives",
            count=len(graph) - len(order),
        )
        merged = merge_nodes(graph, group, roots, REGION, keeps_traffic=True)
        rising = bool((merged.id[1:] > merged.id[:-1]).all())
        return merged if rising else replace(merged, id=np.arange(len(merged), dtype=np.uint64))


def _program_order(graph: OpGraph, group: IntArray, groups: int) -> list[int]:
    """Return the groups in an order that follows dependencies, the group with the earliest member first."""
    deps = all_deps(graph)
    rows, values = group[deps.row_ids], group[deps.values]
    outside = rows != values
    edges = np.unique(rows[outside] * groups + values[outside])
    earliest = np.full(groups, len(graph), np.int64)
    np.minimum.at(earliest, group, np.arange(len(graph)))
    order: list[int] = ready_order(
        RaggedArray.from_pairs(edges // groups, edges % groups, groups), earliest
    ).tolist()
    return order
