"""Graphs prepared for traces: permutes as matched sends and receives, unrolled loops, and the graph of one
rank.

A ``collective_permute`` becomes a SEND and a RECV with the permute's dependencies; its users wait for both. A
rank without a target has no SEND, one without a source no RECV, and a collective over a group of one rank
does not communicate: such nodes are removed and their dependencies bypassed. Transfers to the host, which is
not a rank, become computations, and so does recorded work of known time and little other information.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any, NamedTuple

import numpy as np

from hespas.converters.chakra.readiness import is_as_stated
from hespas.converters.chakra.wire import Bools, Longs
from hespas.converters.measured_ops.waits import serial_excess, with_delays_alone
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    OpGraph,
    RaggedArray,
    StringTableBuilder,
    Workload,
)
from hespas.graph.columns import BoolArray, FloatArray
from hespas.graph.passes import UnrollLoops, bypass, is_recorded_wait
from hespas.graph.passes.rewrite import take_nodes

__all__ = [
    "ExpandedGraph",
    "expand",
    "host_transfers",
    "lacks_description",
    "measured_work",
    "unrolled",
]

_IDLE = "idle"
_LONGER = 0.01
"""Relative increase of a trace's time in ASTRA-sim over its recording that does not cause a warning."""


class ExpandedGraph(NamedTuple):
    """Graph in which each permute is split into a SEND and a RECV. ``halves`` has the node numbers of these
    SENDs. The RECV of a permute is the node after its SEND.
    """

    graph: OpGraph
    halves: Longs

    def for_rank(self, idle: Bools) -> OpGraph:
        """Return the graph of a rank, without the ``idle`` nodes, which have no work on it. The SEND of a
        permute has its costs. On a rank that only receives, the costs are moved to the RECV, so that they
        count exactly once.
        """
        graph = self.graph
        senders = self.halves[idle[self.halves] & ~idle[self.halves + 1]]
        if len(senders):
            costs: dict[str, Any] = {name: _cost(graph, name).copy() for name in _COSTS}
            for column in costs.values():
                column[senders + 1] = column[senders]
            graph = replace(graph, **costs)
        # Nodes that depended on an idle node depend on its dependencies instead.
        reduced = bypass(graph, idle) if idle.any() else graph
        left = np.isin(reduced.id, graph.id[idle])
        if left.any():  # idle nodes that could not be bypassed cost nothing
            kind = reduced.kind.copy()
            kind[left] = NodeKind.COMPUTE
            reduced = replace(
                reduced,
                kind=kind,
                collectives=reduced.collectives.take(~left[reduced.collectives.node]),
                p2p=reduced.p2p.take(~left[reduced.p2p.node]),
                duration_ns=np.where(left, 0.0, reduced.duration_ns),
                flops=np.where(left, 0.0, reduced.flops),
            )
        if len(reduced):
            return reduced
        # A trace without nodes is invalid, and no simulator runs one: write one zero-cost node.
        builder = GraphBuilder(reduced.name)
        builder.strings = StringTableBuilder(reduced.strings)
        idle_name = builder.strings.add(_IDLE)
        node = builder.add_node(
            name_id=idle_name,
            op_id=idle_name,
            op_class=OpClass.FREE,
            flops=0.0,
            transcendentals=0.0,
            bytes_read=0.0,
            bytes_written=0.0,
        )
        builder.set(node, duration_ns=0.0)
        return replace(
            builder.build(),
            group_sets=reduced.group_sets,
            permutations=reduced.permutations,
            extra=reduced.extra,
            attachments=reduced.attachments,
        )


def expand(graph: OpGraph) -> ExpandedGraph:
    """Split every PERMUTE into a SEND and the RECV after it. A permute without a tag gets a new tag.

    Node ids are replaced by node numbers if there is a permute or if two nodes have the same id. The SEND has
    the costs of the permute. The RECV takes place during that time. So its costs are unknown, and its time is
    0 if the time of the SEND is known.
    """
    permutes = graph.kind == NodeKind.PERMUTE
    if not permutes.any():
        ids = graph.id if bool((graph.id[1:] > graph.id[:-1]).all()) else np.sort(graph.id)
        if not bool((ids[1:] > ids[:-1]).all()):  # unrolling a loop has left two nodes with one id
            graph = replace(graph, id=np.arange(len(graph), dtype=np.uint64))
        return ExpandedGraph(graph, np.empty(0, np.int64))
    copies = 1 + permutes.astype(np.int64)
    rows = np.repeat(np.arange(len(graph), dtype=np.int64), copies)
    first = np.cumsum(copies) - copies
    expanded = take_nodes(
        graph,
        rows,
        _both(graph.data_deps, rows, first, copies),
        _both(graph.control_deps, rows, first, copies),
    )
    kind = expanded.kind.copy()
    sends, receives = first[permutes], first[permutes] + 1
    kind[sends], kind[receives] = NodeKind.SEND, NodeKind.RECV
    p2p = expanded.p2p
    untagged = (p2p.tag < 0) & permutes[rows[p2p.node]]
    tag = np.where(untagged, np.searchsorted(graph.p2p.node, rows[p2p.node]).astype(np.int64), p2p.tag)
    costs: dict[str, Any] = {name: _cost(expanded, name).copy() for name in _COSTS}
    for column in costs.values():
        column[receives] = nan
    costs["duration_ns"][receives] = np.where(np.isnan(expanded.duration_ns[receives]), nan, 0.0)
    numbers = np.arange(len(rows), dtype=np.uint64)
    numbered = replace(expanded, kind=kind, id=numbers, p2p=replace(p2p, tag=tag), **costs)
    return ExpandedGraph(numbered, sends)


_COSTS = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written", "duration_ns")


def _cost(graph: OpGraph, name: str) -> FloatArray:
    column: FloatArray = getattr(graph, name)
    return column


def _both(deps: RaggedArray, rows: Longs, first: Longs, copies: Longs) -> RaggedArray:
    """Return the dependencies of the nodes ``rows``, renumbered after permutes were split. Node ``i`` became
    ``copies[i]`` nodes from number ``first[i]`` on, so that users of a permute depend on its SEND and its
    RECV.
    """
    if not len(deps.values):
        return RaggedArray.empty(len(rows))
    taken = deps.take(rows)
    size = copies[taken.values]
    ends = np.cumsum(size)
    values = np.repeat(first[taken.values] - (ends - size), size) + np.arange(int(ends[-1]))
    return RaggedArray.from_lengths(taken.segment_sum(copies.astype(np.float64)).astype(np.int64), values)


def host_transfers(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    """Convert transfers over the host link to computations, because a trace can only state peers that are
    ranks.

    The computations have the operation, time and bytes of the transfers (by default the bytes of the
    message).
    """
    table = graph.p2p
    over = table.host
    if not over.any():
        return graph
    nodes = table.node[over]
    kind, op_class, read = graph.kind.copy(), graph.op_class.copy(), graph.bytes_read.copy()
    kind[nodes], op_class[nodes] = NodeKind.COMPUTE, OpClass.HOST
    written = graph.bytes_written.copy()
    uncounted = np.isnan(graph.bytes_moved[nodes])
    read[nodes[uncounted]], written[nodes[uncounted]] = table.comm_bytes[over][uncounted], 0.0
    message = "transfers over the host link are written as COMP nodes of their bytes: the host is not a rank"
    diagnostics.info("chakra.host-transfer", graph.name, message, count=len(nodes))
    return replace(
        graph,
        kind=kind,
        op_class=op_class,
        bytes_read=read,
        bytes_written=written,
        p2p=table.take(~over),
    )


def measured_work(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph with recorded work in a form that a trace can hold. Host time becomes delays, which
    are computations without FLOPs. Collectives whose operation or size is unknown become computations of the
    recorded time.

    ASTRA-sim has no statistics for computations on a CPU, and ignores recorded times of collectives in favour
    of its network model.
    """
    if is_as_stated(graph):
        return graph
    waits = int(is_recorded_wait(graph).sum())
    message = "recorded waits and host time are written as delays after the work that ended last"
    diagnostics.info("chakra.waits", graph.name, message, count=waits)
    graph = with_delays_alone(graph)
    excess = serial_excess(graph) if waits else 0.0
    message = (
        f"ASTRA-sim runs the computations and waits of a rank one at a time, but some were recorded "
        f"concurrently: the trace takes at least {excess:.0%} longer than its recording"
    )
    diagnostics.warning("chakra.serialized", graph.name, message, count=int(excess > _LONGER))
    table = graph.collectives
    vague = lacks_description(graph) & (graph.duration_ns[table.node] > 0)
    if not vague.any():
        return graph
    message = "collectives of unknown operation or size, or of 0 bytes, are written as COMP nodes of their "
    message += "recorded time"
    diagnostics.warning("chakra.collective-as-work", graph.name, message, count=int(vague.sum()))
    kind = graph.kind.copy()
    kind[table.node[vague]] = int(NodeKind.COMPUTE)
    return replace(graph, kind=kind, collectives=table.take(~vague))


_SIZELESS = (CollectiveKind.BARRIER,)


def lacks_description(graph: OpGraph) -> BoolArray:
    """Return a mask of the collectives that simulators refuse in a trace, with one entry per row of the
    collective table. Their operation is unknown, or their size is unknown or 0.
    """
    table = graph.collectives
    no_size = ~(table.comm_bytes >= 1) & ~np.isin(table.kind, _SIZELESS)
    vague: BoolArray = no_size | (table.kind == CollectiveKind.UNKNOWN)
    return vague


def unrolled(workload: Workload, ranks: Sequence[int], diagnostics: Diagnostics) -> Workload:
    """Repeat loop bodies by their trip count, in the classes of ``ranks``, because a trace cannot hold loops.

    Raises ``UnsupportedError`` for an unknown trip count, and if the trace of a rank would be too large.
    """
    classes = list(workload.classes)
    numbers: list[int] = np.unique(workload.rank_class[np.asarray(ranks, np.int64)]).tolist()
    for number in numbers:
        graph = classes[number]
        if len(graph.regions) or not bool((graph.executions == 1).all()):
            flat = classes[number] = UnrollLoops()(graph, diagnostics)
            message = "operations are repetitions of loop bodies: a trace has no loops"
            diagnostics.info("chakra.unrolled", graph.name, message, count=max(len(flat) - len(graph), 0))
    return replace(workload, classes=tuple(classes))
