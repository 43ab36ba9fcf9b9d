"""Report of everything in a workload that a trace does not hold, or holds less exactly than the graph."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from hespas.converters.chakra.comm_groups import FILE_NAME, GroupIds, render_groups
from hespas.converters.chakra.contract import RANK_ATTRIBUTE, TEXTS_OF_JOB
from hespas.converters.chakra.lowering import lacks_description
from hespas.converters.chakra.preserve import foreign_texts
from hespas.converters.chakra.readiness import LARGEST_COUNT
from hespas.converters.chakra.spelling import LARGEST_EXTENT, nodes_of_odd_sizes
from hespas.converters.chakra.times import LONGEST_NS
from hespas.graph import (
    PROGRAM_BYTES,
    RECORDED_STEPS,
    CollectiveKind,
    Diagnostics,
    NodeKind,
    OpGraph,
    Workload,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = ["report", "report_refused"]


def report_refused(graph: OpGraph, diagnostics: Diagnostics) -> None:
    """Report collectives and messages that simulators cannot run and that ``hespas-validate check`` therefore
    refuses. They are written nevertheless.
    """
    bare = len(_undescribed(graph, (NodeKind.COLLECTIVE,), graph.collectives.node))
    empty = (graph.p2p.comm_bytes < 1) & ~graph.p2p.host
    for count, what in (
        (
            int(lacks_description(graph).sum()) + bare,
            "collectives of unknown operation or size, or of 0 bytes,",
        ),
        (int(empty.sum()), "messages of 0 bytes"),
    ):
        message = f"{what} are written unchanged: `hespas-validate check` refuses them (ET011, ET012)"
        diagnostics.warning("chakra.refused-communication", graph.name, message, count=count)


_TAG_SPACE = 500_000_000
"""Range of message tags in ASTRA-sim, which takes tags modulo this number."""

_OF_FILE = frozenset({"format", "version", "form", RANK_ATTRIBUTE, PROGRAM_BYTES, *TEXTS_OF_JOB.values()})
"""Metadata that a reader of the written trace sets again."""

_LISTED = 4

_INEXACT = (
    (CollectiveKind.UNKNOWN, "chakra.unknown-collective", "has no comm_type in Chakra"),
    (
        CollectiveKind.RAGGED_ALL_TO_ALL,
        "chakra.ragged-bound",
        "is written as an all-to-all of its upper bound",
    ),
)
"""Collectives without an exact equivalent in a trace."""


def report(workload: Workload, groups: GroupIds, rank: str, diagnostics: Diagnostics) -> None:
    """Report everything that a trace cannot hold, or holds less exactly than the graph.

    ``rank`` is the rank that a reader will assign to the trace, empty if the traces hold all ranks.
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
        apart = np.array([groups.is_named_apart(group_set) for group_set in graph.group_sets] + [False])
        message = "collectives over ranks listed in another order get a process group of their own"
        count = int(apart[graph.collectives.group_set].sum())
        diagnostics.info("chakra.process-groups", graph.name, message, count=count)
        bare = _undescribed(graph, (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE), graph.p2p.node)
        message = "messages have neither peer nor size; a trace cannot tell absent from unknown values"
        diagnostics.warning("chakra.unknown-message", graph.name, message, count=len(bare))
        untimed = np.isnan(graph.duration_ns) & (graph.kind == NodeKind.COMPUTE) & (graph.executions != 0)
        message = "operations have no duration; a trace cannot distinguish unknown from 0"
        diagnostics.warning("chakra.unknown-duration", graph.name, message, count=int(untimed.sum()))
        large = int((graph.p2p.tag >= _TAG_SPACE).sum())
        diagnostics.warning(
            "chakra.large-tag",
            graph.name,
            "message tags of 5e8 and more: ASTRA-sim may match them with wrong messages",
            count=large,
        )
        matmuls = graph.contractions
        past = np.zeros(len(matmuls), np.bool_)
        for extents in (matmuls.batch, matmuls.m, matmuls.n, matmuls.k):
            past |= np.abs(extents.astype(np.float64)) > LARGEST_EXTENT
        message = f"extents of matmuls above {LARGEST_EXTENT:,} are written and read as text only"
        diagnostics.warning(
            "chakra.large-product",
            graph.name,
            message,
            count=int(np.isin(matmuls.node, matmuls.node[past]).sum()),
        )
        message = "tensors have a size that their shape does not imply"
        diagnostics.warning("chakra.tensor-size", graph.name, message, count=nodes_of_odd_sizes(graph))
        lost = int((graph.source_id > 0).sum())
        diagnostics.info("chakra.source-location", graph.name, "source locations are not written", count=lost)
        diagnostics.info(
            "chakra.rounded-counts",
            graph.name,
            "counts of operations or bytes are rounded to whole numbers, or omitted if they are too large or "
            "only bytes read or only bytes written are known",
            count=_broken_counts(graph),
        )
        message = "bytes of collectives or messages are rounded to whole numbers, or omitted if too large"
        sent, passed = graph.collectives, graph.p2p.comm_bytes
        broken = np.zeros(len(sent), np.bool_)
        for size in (sent.comm_bytes, sent.operand_bytes, sent.result_bytes):
            broken |= _differ(size, _stated(size))
        diagnostics.info(
            "chakra.rounded-sizes",
            graph.name,
            message,
            count=(int(broken.sum()) + int(_differ(passed, _stated(passed)).sum())),
        )
        times = graph.duration_ns
        fractions = (times >= 0) & (times < LONGEST_NS) & (times != np.floor(times))
        message = "times are in whole nanoseconds; sums along a stream stay correct"
        diagnostics.info("chakra.rounded-times", graph.name, message, count=int(fractions.sum()))
        dropped = sum(foreign_texts(graph, of_file=of_file)[1] for of_file in (False, True))
        message = (
            "attributes of another format are omitted: their names or types have another meaning in a trace"
        )
        diagnostics.warning("chakra.foreign-attribute", graph.name, message, count=dropped)


def _undescribed(graph: OpGraph, kinds: Sequence[NodeKind], described: SmallIntArray) -> IntArray:
    """Return the nodes of the given ``kinds`` that are not in ``described``, the nodes with a row in a side
    table.
    """
    bare = np.isin(graph.kind, [int(kind) for kind in kinds])
    bare[described] = False
    return np.flatnonzero(bare)


def _broken_counts(graph: OpGraph) -> int:
    """Return the number of nodes whose FLOPs, bytes or transcendentals differ or are unknown when the trace
    is read again.
    """
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


def _stated(count: FloatArray) -> FloatArray:
    """Return counts in the form in which a trace stores them: rounded to whole numbers, NaN for counts that
    it cannot store.
    """
    with np.errstate(invalid="ignore"):
        return np.where((count >= 0) & (count < LARGEST_COUNT), np.rint(count), nan)


def _differ(before: FloatArray, after: FloatArray) -> BoolArray:
    differ: BoolArray = (before != after) & ~(np.isnan(before) & np.isnan(after))
    return differ


def _report_job(workload: Workload, groups: GroupIds, rank: str, diagnostics: Diagnostics) -> None:
    """Report metadata of the job that is not written, and attachments that other formats left in the
    graph.
    """
    lost = [key for key in workload.metadata if key not in _OF_FILE]
    lost += [key for key in (RANK_ATTRIBUTE,) if workload.metadata.get(key, rank) != rank]
    message = f"metadata of the job not written: {', '.join(lost[:_LISTED])}"
    diagnostics.info("chakra.metadata", workload.name, message, count=len(lost))
    if not any(graph.attachments for graph in workload.classes):
        return

    # The recorded steps are metadata of a trace; readers attach the process groups to the class of rank 0.
    listed = render_groups(groups.of_rank(int(rank))) if rank else groups.document()
    first = int(workload.rank_class[workload.present[0]])
    documents = [
        name
        for number, graph in enumerate(workload.classes)
        for name, data in graph.attachments.items()
        if name != RECORDED_STEPS and (name != FILE_NAME or number != first or data != listed)
    ]
    message = f"attachments not written unchanged: {', '.join(documents[:_LISTED])}"
    diagnostics.info("chakra.attachments", workload.name, message, count=len(documents))
