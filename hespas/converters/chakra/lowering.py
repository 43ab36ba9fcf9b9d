"""Permutes as matched sends and receives, and the graph that one rank really runs.

A ``collective_permute`` becomes a SEND and a RECV that wait for what it waited for, and for both of which its
users wait. A rank without a target has no SEND, one without a source no RECV, and a collective over a group
of one has nobody to talk to: such nodes are led around. Transfers to the host, which is no rank, become work,
and so does what a recording knows the time of and little more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any, NamedTuple

import numpy as np

from hespas.converters.chakra.assembly import foreign_texts
from hespas.converters.chakra.comm_groups import FILE_NAME, GroupIds, render_groups
from hespas.converters.chakra.contract import RANK_ATTRIBUTE, TEXTS_OF_JOB
from hespas.converters.chakra.readiness import LARGEST_COUNT, is_as_stated
from hespas.converters.chakra.spelling import LARGEST_EXTENT, LONGEST_NS, nodes_of_odd_sizes
from hespas.converters.chakra.wire import Bools, Longs
from hespas.converters.measured_ops.waits import serial_excess, with_delays_alone
from hespas.graph import (
    PROGRAM_BYTES,
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
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.graph.passes import UnrollLoops, bypass, is_recorded_wait
from hespas.graph.passes.rewrite import take_nodes

__all__ = [
    "Expanded",
    "expand",
    "host_transfers",
    "measured_work",
    "report",
    "report_refused",
    "unrolled",
]

_IDLE = "idle"
_LONGER = 0.01
"""Share by which a trace may take longer in ASTRA-sim than its recording without a warning."""


class Expanded(NamedTuple):
    """A graph without permutes. ``halves`` are the SENDs that were one; the RECV of each stands behind it."""

    graph: OpGraph
    halves: Longs

    def alone(self, idle: Bools) -> Longs:
        """The SENDs among ``halves`` that are idle while their RECV is not."""
        return self.halves[idle[self.halves] & ~idle[self.halves + 1]]

    def for_rank(self, idle: Bools) -> OpGraph:
        """The graph of a rank on which ``idle`` nodes do nothing. The costs of a permute go with its SEND, on
        a rank that only receives with its RECV: the time of a rank is neither lost nor counted twice.
        """
        graph, senders = self.graph, self.alone(idle)
        if len(senders):
            costs: dict[str, Any] = {name: _cost(graph, name).copy() for name in _COSTS}
            for column in costs.values():
                column[senders + 1] = column[senders]
            graph = replace(graph, **costs)
        kept = _without_idle(graph, idle)
        return kept if len(kept) else _idle_graph(kept)


def expand(graph: OpGraph) -> Expanded:
    """The graph with every PERMUTE as SEND then RECV, on a tag of its own where none is stated.

    Ids become node numbers where there is a permute or two nodes have one id. The SEND keeps the costs; of
    the RECV, which comes in meanwhile, they are unknown, and its time is 0 where that of the SEND is known.
    """
    permutes = graph.kind == NodeKind.PERMUTE
    if not permutes.any():
        return Expanded(_with_own_ids(graph), np.empty(0, np.int64))
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
    tag = np.where(untagged, _own_tags(graph, rows[p2p.node]), p2p.tag)
    costs: dict[str, Any] = {name: _without(_cost(expanded, name), receives) for name in _COSTS}
    costs["duration_ns"][receives] = np.where(np.isnan(expanded.duration_ns[receives]), nan, 0.0)
    numbers = np.arange(len(rows), dtype=np.uint64)
    numbered = replace(expanded, kind=kind, id=numbers, p2p=replace(p2p, tag=tag), **costs)
    return Expanded(numbered, sends)


def _with_own_ids(graph: OpGraph) -> OpGraph:
    """Number the nodes anew where a pass (unrolling a loop) has left two with one id."""
    ascending = graph.id if bool((graph.id[1:] > graph.id[:-1]).all()) else np.sort(graph.id)
    if bool((ascending[1:] > ascending[:-1]).all()):
        return graph
    return replace(graph, id=np.arange(len(graph), dtype=np.uint64))


_COSTS = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written", "duration_ns")


def _cost(graph: OpGraph, name: str) -> FloatArray:
    column: FloatArray = getattr(graph, name)
    return column


def _own_tags(graph: OpGraph, nodes: Longs) -> Longs:
    """The place of each node among the messages of the original graph."""
    return np.searchsorted(graph.p2p.node, nodes).astype(np.int64)


def _without(column: FloatArray, rows: Longs) -> FloatArray:
    changed = column.copy()
    changed[rows] = nan
    return changed


def _both(deps: RaggedArray, rows: Longs, first: Longs, copies: Longs) -> RaggedArray:
    """Dependencies in new numbers; who waited for a permute waits for both of its halves."""
    if not len(deps.values):
        return RaggedArray.empty(len(rows))
    taken = deps.take(rows)
    size = copies[taken.values]
    ends = np.cumsum(size)
    values = np.repeat(first[taken.values] - (ends - size), size) + np.arange(int(ends[-1]))
    return RaggedArray.from_lengths(taken.segment_sum(copies.astype(np.float64)).astype(np.int64), values)


def _without_idle(graph: OpGraph, idle: Bools) -> OpGraph:
    """The graph without nodes that do nothing on a rank. One that cannot be led around becomes free work."""
    if not idle.any():
        return graph
    kept = bypass(graph, idle)
    left = np.isin(kept.id, graph.id[idle])
    if not left.any():
        return kept
    kind = kept.kind.copy()
    kind[left] = NodeKind.COMPUTE
    return replace(
        kept,
        kind=kind,
        collectives=kept.collectives.take(~left[kept.collectives.node]),
        p2p=kept.p2p.take(~left[kept.p2p.node]),
        duration_ns=np.where(left, 0.0, kept.duration_ns),
        flops=np.where(left, 0.0, kept.flops),
    )


def _idle_graph(graph: OpGraph) -> OpGraph:
    """One free node in place of none: a trace without nodes is not legal, and no simulator runs one."""
    builder = GraphBuilder(graph.name)
    builder.strings = StringTableBuilder(graph.strings)
    name = builder.strings.add(_IDLE)
    node = builder.add_node(
        name_row=name,
        op_row=name,
        op_class=OpClass.FREE,
        flops=0.0,
        transcendentals=0.0,
        bytes_read=0.0,
        bytes_written=0.0,
    )
    builder.set(node, duration_ns=0.0)
    return replace(
        builder.build(),
        group_sets=graph.group_sets,
        permutations=graph.permutations,
        extra=graph.extra,
        attachments=graph.attachments,
    )


def host_transfers(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    """The graph with transfers over the host link as computation: a trace knows no peer that is no rank.

    They keep their operation, time and bytes (those of the message where nobody counted them).
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
    message = "transfers over the host link are written as COMP nodes of their bytes: the host is no rank"
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
    """The graph with what only a recording has in words of a trace: time of the host as delays, which are
    computation without operations, and collectives of unknown operation or size as computation of their time.

    ASTRA-sim has no statistics for computation on a CPU, and asks a network for every collective.
    """
    if is_as_stated(graph):
        return graph
    waits = int(is_recorded_wait(graph).sum())
    message = "recorded waits and time of the host are written as delays behind the work that ended last"
    diagnostics.info("chakra.waits", graph.name, message, count=waits)
    graph = with_delays_alone(graph)
    excess = serial_excess(graph) if waits else 0.0
    message = (
        f"ASTRA-sim runs computation of a rank one at a time, waits included, of which some was recorded "
        f"side by side: there the trace takes at least {excess:.0%} longer than its recording"
    )
    diagnostics.warning("chakra.serialized", graph.name, message, count=int(excess > _LONGER))
    table = graph.collectives
    vague = _is_vague(graph) & (graph.duration_ns[table.node] > 0)
    if not vague.any():
        return graph
    message = "collectives of unknown operation or size, or of 0 bytes, are written as COMP nodes of their "
    message += "recorded time"
    diagnostics.warning("chakra.collective-as-work", graph.name, message, count=int(vague.sum()))
    kind = graph.kind.copy()
    kind[table.node[vague]] = int(NodeKind.COMPUTE)
    return replace(graph, kind=kind, collectives=table.take(~vague))


_SIZELESS = (CollectiveKind.BARRIER,)


def _is_vague(graph: OpGraph) -> BoolArray:
    """Mark collectives, by row of their table, that a trace cannot describe so that others accept it."""
    table = graph.collectives
    no_size = ~(table.comm_bytes >= 1) & ~np.isin(table.kind, _SIZELESS)
    vague: BoolArray = no_size | (table.kind == CollectiveKind.UNKNOWN)
    return vague


def report_refused(graph: OpGraph, diagnostics: Diagnostics) -> None:
    """Report what is about to be written and `hespas-validate check` refuses: simulators cannot run it."""
    bare = len(_undescribed(graph, (NodeKind.COLLECTIVE,), graph.collectives.node))
    empty = (graph.p2p.comm_bytes < 1) & ~graph.p2p.host
    for count, what in (
        (int(_is_vague(graph).sum()) + bare, "collectives of unknown operation or size, or of 0 bytes,"),
        (int(empty.sum()), "messages of 0 bytes"),
    ):
        message = f"{what} are written as they are: `hespas-validate check` refuses them (ET011, ET012)"
        diagnostics.warning("chakra.refused-communication", graph.name, message, count=count)


def unrolled(workload: Workload, ranks: Sequence[int], diagnostics: Diagnostics) -> Workload:
    """Return the workload with loops repeated as often as they run, in the classes of ``ranks``.

    A trace holds no loops. Raises ``UnsupportedError`` for an unknown trip count, and where the trace of a
    rank would be too large.
    """
    classes = list(workload.classes)
    numbers: list[int] = np.unique(workload.rank_class[np.asarray(ranks, np.int64)]).tolist()
    for number in numbers:
        classes[number] = _unrolled(classes[number], diagnostics)
    return replace(workload, classes=tuple(classes))


def _unrolled(graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
    if not len(graph.regions) and bool((graph.multiplicity == 1).all()):
        return graph
    flat = UnrollLoops()(graph, diagnostics)
    message = "operations are repetitions of loop bodies: a trace holds no loops"
    diagnostics.info("chakra.unrolled", graph.name, message, count=max(len(flat) - len(graph), 0))
    return flat


# --- What a trace does not hold of a workload, and what it says less well: reported after writing.

_TAG_SPACE = 500_000_000
"""ASTRA-sim takes tags modulo this number."""

_OF_FILE = frozenset({"format", "version", "form", RANK_ATTRIBUTE, PROGRAM_BYTES, *TEXTS_OF_JOB.values()})
"""Metadata that a reader of the written trace states anew."""

_LISTED = 4


_INEXACT = (
    (CollectiveKind.UNKNOWN, "chakra.unknown-collective", "has no comm_type in Chakra"),
    (CollectiveKind.RAGGED_ALL_TO_ALL, "chakra.ragged-bound", "is written as all-to-all of its bound"),
)
"""Collectives that a trace has no word of its own for."""


def report(workload: Workload, groups: GroupIds, rank: str, diagnostics: Diagnostics) -> None:
    """Say what a trace cannot hold, and what it says less well than the graph.

    ``rank`` is which rank a reader will take the trace for, empty where it holds all.
    """
    _report_job(workload, groups, rank, diagnostics)
    for graph in workload.classes:
        table = graph.collectives
        for kind, code, message in _INEXACT:
            nodes = table.node[table.kind == kind]
            if kind == CollectiveKind.UNKNOWN:
                nodes = np.concatenate([nodes, _undescribed(graph, (NodeKind.COLLECTIVE,), table.node)])
            if len(nodes):
                name = graph.node_name(int(nodes[0])) or graph.op_name(int(nodes[0]))
                diagnostics.warning(code, name, f"{name} {message}", count=len(nodes))
        _report_process_groups(graph, groups, diagnostics)
        bare = _undescribed(graph, (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE), graph.p2p.node)
        message = (
            "messages state neither peer nor size; a trace cannot tell that from one that states nothing"
        )
        diagnostics.warning("chakra.unknown-message", graph.name, message, count=len(bare))
        untimed = np.isnan(graph.duration_ns) & (graph.kind == NodeKind.COMPUTE) & (graph.multiplicity != 0)
        message = "operations have no duration; a trace cannot tell that from 0"
        diagnostics.warning("chakra.unknown-duration", graph.name, message, count=int(untimed.sum()))
        large = int((graph.p2p.tag >= _TAG_SPACE).sum())
        diagnostics.warning("chakra.large-tag", graph.name, "message tags of 5e8 and more alias", count=large)
        matmuls = graph.contractions
        past = np.zeros(len(matmuls), np.bool_)
        for extents in (matmuls.batch, matmuls.m, matmuls.n, matmuls.k):
            past |= np.abs(extents.astype(np.float64)) > LARGEST_EXTENT
        message = f"extents of matmuls past {LARGEST_EXTENT:,} are written and read as text only"
        diagnostics.warning(
            "chakra.large-product",
            graph.name,
            message,
            count=int(np.isin(matmuls.node, matmuls.node[past]).sum()),
        )
        message = "tensors state a size that their shape does not bring back"
        diagnostics.warning("chakra.tensor-size", graph.name, message, count=nodes_of_odd_sizes(graph))
        lost = int((graph.source_row > 0).sum())
        diagnostics.info("chakra.source-location", graph.name, "source locations are not written", count=lost)
        diagnostics.info(
            "chakra.rounded-counts",
            graph.name,
            "counts of operations or bytes are rounded to whole numbers, or left out: too large, or of bytes "
            "those read without those written",
            count=_broken_counts(graph),
        )
        message = "bytes of collectives or messages are rounded to whole numbers, or left out: too large"
        diagnostics.info("chakra.rounded-sizes", graph.name, message, count=_broken_sizes(graph))
        times = graph.duration_ns
        fractions = (times >= 0) & (times < LONGEST_NS) & (times != np.floor(times))
        message = "times are in whole nanoseconds; sums along a stream stay right"
        diagnostics.info("chakra.rounded-times", graph.name, message, count=int(fractions.sum()))
        dropped = sum(foreign_texts(graph, of_file=of_file)[1] for of_file in (False, True))
        message = "attributes of another format are left out: their names or types mean something else here"
        diagnostics.warning("chakra.foreign-attribute", graph.name, message, count=dropped)


def _report_process_groups(graph: OpGraph, groups: GroupIds, diagnostics: Diagnostics) -> None:
    apart = np.array([groups.is_named_apart(each) for each in graph.group_sets] + [False])
    message = "collectives over ranks listed in another order get a process group of their own"
    count = int(apart[graph.collectives.group_set].sum())
    diagnostics.info("chakra.process-groups", graph.name, message, count=count)


def _undescribed(graph: OpGraph, kinds: Sequence[NodeKind], described: SmallIntArray) -> IntArray:
    """Communicating nodes without a row that says with whom."""
    bare = np.isin(graph.kind, [int(kind) for kind in kinds])
    bare[described] = False
    return np.flatnonzero(bare)


def _broken_counts(graph: OpGraph) -> int:
    """Nodes of which a count is another one, or unknown, when it is read again."""
    flops, useful, rare = _stated(graph.flops), _stated(graph.useful_flops), graph.transcendentals
    moved, written = _stated(graph.bytes_moved), _stated(graph.bytes_written)
    # ``tensor_size`` is read plus written, of which ``bytes_written`` is a part.
    written = np.where(np.isnan(moved), nan, np.where((written > 0) & (written <= moved), written, 0.0))
    broken = _differ(graph.flops, flops)
    broken |= _differ(graph.useful_flops, np.where(np.isnan(useful), flops, useful))
    broken |= _differ(rare, np.rint(np.minimum(rare, LARGEST_COUNT)))
    return int(
        (broken | _differ(graph.bytes_written, written) | _differ(graph.bytes_read, moved - written)).sum()
    )


def _broken_sizes(graph: OpGraph) -> int:
    """Collectives and messages of which a size is another one, or unknown, when it is read again."""
    sent, passed = graph.collectives, graph.p2p.comm_bytes
    broken = np.zeros(len(sent), np.bool_)
    for size in (sent.comm_bytes, sent.operand_bytes, sent.result_bytes):
        broken |= _differ(size, _stated(size))
    return int(broken.sum()) + int(_differ(passed, _stated(passed)).sum())


def _stated(count: FloatArray) -> FloatArray:
    """Counts as attributes state them: whole, NaN where not stated."""
    with np.errstate(invalid="ignore"):
        return np.where((count >= 0) & (count < LARGEST_COUNT), np.rint(count), nan)


def _differ(before: FloatArray, after: FloatArray) -> BoolArray:
    differ: BoolArray = (before != after) & ~(np.isnan(before) & np.isnan(after))
    return differ


def _report_job(workload: Workload, groups: GroupIds, rank: str, diagnostics: Diagnostics) -> None:
    """Metadata of the job, and attachments of other formats."""
    lost = [key for key in workload.metadata if key not in _OF_FILE]
    lost += [key for key in (RANK_ATTRIBUTE,) if workload.metadata.get(key, rank) != rank]
    message = f"not written, of the metadata of the job: {', '.join(lost[:_LISTED])}"
    diagnostics.info("chakra.metadata", workload.name, message, count=len(lost))
    gone = _lost_documents(workload, groups, rank)
    message = f"not written as they are, of the attachments: {', '.join(gone[:_LISTED])}"
    diagnostics.info("chakra.attachments", workload.name, message, count=len(gone))


def _lost_documents(workload: Workload, groups: GroupIds, rank: str) -> list[str]:
    """Return the attachments of all classes but the recorded steps, which are metadata of a trace, and the
    list of process groups, which readers give to the class of rank 0.
    """
    if not any(graph.attachments for graph in workload.classes):
        return []
    from hespas.converters.measured_ops import RECORDED_STEPS

    listed = render_groups(groups.of_rank(int(rank))) if rank else groups.document()
    first = int(workload.rank_class[workload.present[0]])
    lost: list[str] = []
    for number, graph in enumerate(workload.classes):
        for name, data in graph.attachments.items():
            if name == RECORDED_STEPS:
                continue
            if name != FILE_NAME or number != first or data != listed:
                lost.append(name)
    return lost
