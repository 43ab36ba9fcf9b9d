"""Collectives one by one: kind, size, and whether the sizes fit the kind."""

from __future__ import annotations

import numpy as np

from hespas.graph import CollectiveKind, NodeKind, OpGraph, Severity
from hespas.graph.columns import BoolArray, IntArray
from hespas.validators.job import Job, Report
from hespas.validators.rules.structure import is_kind

__all__ = ["SIMULATED", "collective_described", "collective_name", "positive_size", "sizes_fit_kind"]

SIMULATED: tuple[CollectiveKind, ...] = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)
"""What ASTRA-sim has algorithms for; a broadcast is replayed with its recorded duration."""

_KIND_ATTRIBUTE, _INTEGER_BYTES, _SHOWN = "comm_type", 8, 40

_SIZELESS = (int(CollectiveKind.BARRIER), int(CollectiveKind.BROADCAST))


def collective_name(kind: int) -> str:
    """``all-reduce`` for a code of :class:`~hespas.graph.opgraph.CollectiveKind`."""
    return CollectiveKind(kind).name.lower().replace("_", "-")


def _at(graph: OpGraph, nodes: IntArray | np.ndarray[tuple[int], np.dtype[np.int32]]) -> BoolArray:
    mask = np.zeros(len(graph), np.bool_)
    mask[nodes] = True
    return mask


def collective_described(job: Job, report: Report) -> None:
    """ET011: a collective states its kind and size, and a kind that the target can run."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        bare = is_kind(graph, NodeKind.COLLECTIVE) & ~_at(graph, table.node)
        report.nodes(index, bare, "a collective states neither kind nor size")
        unknown = table.kind == int(CollectiveKind.UNKNOWN)
        strange, value = _strange_kinds(graph, table.node[unknown])
        mute = _at(graph, table.node[unknown]) & ~strange
        report.nodes(index, mute, "a collective does not state its kind")
        report.nodes(index, strange, f"a collective states a kind that there is not: {value}")
        unsized = np.isnan(table.comm_bytes) & ~unknown & ~np.isin(table.kind, _SIZELESS)
        report.nodes(index, _at(graph, table.node[unsized]), "a collective does not state its size")
        if job.profile == "astra-sim":
            _simulated(index, graph, report)


def _strange_kinds(
    graph: OpGraph, nodes: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> tuple[BoolArray, str]:
    """Which of the nodes state a kind that no reader knows, and the first such."""
    table = graph.extra
    named = [row for row, text in enumerate(graph.strings) if text == _KIND_ATTRIBUTE] if len(nodes) else []
    rows = np.flatnonzero(np.isin(table.key, named) & np.isin(table.node, nodes))
    if not len(rows):
        return _at(graph, nodes[:0]), ""
    value = table.value(int(rows[0]))
    is_text = table.tag[rows[0]] == 0 or len(value) != _INTEGER_BYTES
    shown = repr(value)[:_SHOWN] if is_text else str(int.from_bytes(value, "little", signed=True))
    return _at(graph, table.node[rows]), f"{_KIND_ATTRIBUTE} {shown}"


def _simulated(index: int, graph: OpGraph, report: Report) -> None:
    table = graph.collectives
    known = (*SIMULATED, CollectiveKind.UNKNOWN, CollectiveKind.BROADCAST)
    for kind in np.unique(table.kind).tolist():
        nodes = _at(graph, table.node[table.kind == kind])
        if kind == CollectiveKind.BROADCAST:
            message = "ASTRA-sim only replays the recorded duration of a broadcast"
            report.nodes(index, nodes, message, Severity.WARNING)
        elif kind not in known:
            report.nodes(index, nodes, f"ASTRA-sim has no {collective_name(kind)}")


def positive_size(job: Job, report: Report) -> None:
    """ET012: what is communicated has at least one byte."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        empty = (table.comm_bytes < 1) & ~np.isin(table.kind, _SIZELESS)
        report.nodes(index, _at(graph, table.node[empty]), "a collective of 0 bytes")
        p2p = graph.p2p
        report.nodes(index, _at(graph, p2p.node[p2p.comm_bytes < 1]), "a message of 0 bytes")


def sizes_fit_kind(job: Job, report: Report) -> None:
    """GR002: payload, operand and result bytes of a collective agree with its kind and group size."""
    for index, graph in enumerate(job.classes):
        table = graph.collectives
        sizes = [groups.group_size for groups in graph.group_sets] + [job.num_ranks]
        members = np.array(sizes, np.float64)[table.group_set]
        known = members > 0
        scale = np.ones(len(table))
        gathers = table.kind == int(CollectiveKind.ALL_GATHER)
        scatters = np.isin(
            table.kind, (int(CollectiveKind.REDUCE_SCATTER), int(CollectiveKind.REDUCE_SCATTER_BLOCK))
        )
        same = np.isin(table.kind, (int(CollectiveKind.ALL_REDUCE), int(CollectiveKind.ALL_TO_ALL)))
        scale[gathers] = members[gathers]
        scale[scatters] = 1 / members[scatters]
        expected = table.operand_bytes * scale
        judged = known & (gathers | scatters | same)
        wrong = judged & (np.abs(table.result_bytes - expected) > 0.5)
        report.nodes(
            index,
            _at(graph, table.node[wrong]),
            "result and operand bytes do not fit its kind and group size",
        )
        wrong = judged & (np.abs(table.comm_bytes - table.operand_bytes) > 0.5)
        report.nodes(
            index,
            _at(graph, table.node[wrong]),
            "its size is not that of its operand (the shard of a gather, the whole buffer otherwise)",
        )
