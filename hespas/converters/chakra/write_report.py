"""What a trace does not hold of a workload, and what it says less well: told after writing."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from hespas.converters.chakra.comm_groups import FILE_NAME, GroupIds, render_groups
from hespas.converters.chakra.contract import RANK_ATTRIBUTE
from hespas.converters.chakra.preserve import foreign_texts
from hespas.converters.chakra.readiness import LARGEST_COUNT
from hespas.converters.chakra.shapes import LARGEST_EXTENT, nodes_of_odd_sizes
from hespas.converters.chakra.timing import LONGEST_NS
from hespas.graph import WHOLE_JOB, CollectiveKind, Diagnostics, NodeKind, OpGraph, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = ["report"]

_TAG_SPACE = 500_000_000
"""ASTRA-sim takes tags modulo this number."""

_OF_FILE = frozenset({"format", "version", "form", RANK_ATTRIBUTE, WHOLE_JOB})
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
        products = graph.contractions
        past = np.zeros(len(products), np.bool_)
        for extents in (products.batch, products.m, products.n, products.k):
            past |= np.abs(extents.astype(np.float64)) > LARGEST_EXTENT
        message = f"extents of products past {LARGEST_EXTENT:,} are written and read as text only"
        diagnostics.warning(
            "chakra.large-product",
            graph.name,
            message,
            count=int(np.isin(products.node, products.node[past]).sum()),
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
        times = graph.duration_ns
        fractions = (times >= 0) & (times < LONGEST_NS) & (times != np.floor(times))
        message = "times are in whole nanoseconds; sums along a stream stay right"
        diagnostics.info("chakra.rounded-times", graph.name, message, count=int(fractions.sum()))
        left_out = sum(foreign_texts(graph, of_file=of_file)[1] for of_file in (False, True))
        message = "attributes of another format are left out: their names or types mean something else here"
        diagnostics.warning("chakra.foreign-attribute", graph.name, message, count=left_out)


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
    flops, useful, said = _said(graph.flops), _said(graph.useful_flops), graph.transcendentals
    moved, written = _said(graph.bytes_moved), _said(graph.bytes_written)
    # ``tensor_size`` is read plus written, of which ``bytes_written`` is a part.
    written = np.where(np.isnan(moved), nan, np.where((written > 0) & (written <= moved), written, 0.0))
    broken = _differ(graph.flops, flops)
    broken |= _differ(graph.useful_flops, np.where(np.isnan(useful), flops, useful))
    broken |= _differ(said, np.rint(np.minimum(said, LARGEST_COUNT)))
    return int(
        (broken | _differ(graph.bytes_written, written) | _differ(graph.bytes_read, moved - written)).sum()
    )


def _said(count: FloatArray) -> FloatArray:
    """Counts as attributes state them: whole, NaN where not stated."""
    with np.errstate(invalid="ignore"):
        return np.where((count >= 0) & (count < LARGEST_COUNT), np.rint(count), nan)


def _differ(before: FloatArray, after: FloatArray) -> BoolArray:
    differ: BoolArray = (before != after) & ~(np.isnan(before) & np.isnan(after))
    return differ


def _report_job(workload: Workload, groups: GroupIds, rank: str, diagnostics: Diagnostics) -> None:
    """Facts about the job, and documents of other formats."""
    lost = [key for key in workload.metadata if key not in _OF_FILE]
    lost += [key for key in (RANK_ATTRIBUTE,) if workload.metadata.get(key, rank) != rank]
    message = f"not written, of the facts about the job: {', '.join(lost[:_LISTED])}"
    diagnostics.info("chakra.metadata", workload.name, message, count=len(lost))
    gone = _lost_documents(workload, groups, rank)
    message = f"not written as they are, of the documents beside the graph: {', '.join(gone[:_LISTED])}"
    diagnostics.info("chakra.attachments", workload.name, message, count=len(gone))


def _lost_documents(workload: Workload, groups: GroupIds, rank: str) -> list[str]:
    """Attachments of all classes but the list of process groups, which readers give to that of rank 0."""
    listed = render_groups(groups.of_rank(int(rank))) if rank else groups.document()
    first = int(workload.rank_class[workload.present[0]])
    lost: list[str] = []
    for number, graph in enumerate(workload.classes):
        for name, data in graph.attachments.items():
            if name != FILE_NAME or number != first or data != listed:
                lost.append(name)
    return lost
