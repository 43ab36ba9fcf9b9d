"""Communication matrix of a workload: bytes that ranks send to each other in one step.

The bytes follow from the definition of each collective, whichever algorithm carries them: in an all-reduce of
a buffer among n ranks, each rank sends 2 / n of the buffer to each other rank (a reduce-scatter and an
all-gather), so that it sends the bytes of nccl-tests' bus bandwidth in total.
"""

from __future__ import annotations

import numpy as np

from hespas.analysis.collectives import MatchedCollectives, bus_factor
from hespas.analysis.table import AnalysisRow, RowTable, listed, table_of
from hespas.converters.measured_ops.build import stated_group
from hespas.files.documents import Figure
from hespas.graph import CollectiveKind, NodeKind, OpGraph, Workload
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.groups import StridedGroups, member_rows, peers_of
from hespas.report.charts import Axis, HeatMap

__all__ = ["TrafficRow", "matrix_of", "recorded_traffic", "traffic"]

_MOST_BLOCKS = 64
"""Rows and columns of the matrix; with more ranks, a row is a block of consecutive ranks."""
_EQUAL_PARTS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "reduce_scatter_block", "all_to_all"})
"""Kinds of collectives in which a rank sends the same bytes to each other member of its group."""
_SENDS = (int(NodeKind.SEND), int(NodeKind.PERMUTE))


class TrafficRow(AnalysisRow, frozen=True, kw_only=True):
    """Bytes that the ranks ``source`` send to the ranks ``target`` in a step or a recording. With more than
    64 ranks in the job, both are blocks of consecutive ranks.
    """

    source: str
    target: str
    size_bytes: Figure


def traffic(workload: Workload) -> RowTable[TrafficRow]:
    """Return the bytes between ranks in one step. Collectives with a root, whose rank is unknown, and
    messages without a peer are not included. O(groups x blocks + ranks).
    """
    num_ranks = workload.num_ranks
    block = np.arange(num_ranks) // _ranks_per_block(num_ranks)
    blocks = int(block[-1]) + 1
    matrix = np.zeros((blocks, blocks))
    for index, graph in enumerate(workload.classes):
        ranks = np.flatnonzero(workload.rank_class == index)
        for group_set, size_bytes in _bytes_per_member(graph, num_ranks).items():
            matrix += size_bytes * _pairs(graph, group_set, ranks, block, blocks)
        messages = graph.p2p
        sent = (messages.permutation >= 0) & (messages.comm_bytes > 0) & ~messages.host
        for row in listed(np.unique(messages.permutation[sent])):
            mine = sent & (messages.permutation == row)
            # a receive is counted at its sender
            sends = np.isin(graph.kind[messages.node[mine]], _SENDS)
            node, size = messages.node[mine][sends], messages.comm_bytes[mine][sends]
            target = peers_of(graph.permutations[row], num_ranks).target[ranks]
            known = target >= 0
            total = float((size * graph.executions[node]).sum())
            np.add.at(matrix, (block[ranks[known]], block[target[known]]), total)
    return _traffic_rows(matrix, num_ranks)


def _ranks_per_block(num_ranks: int) -> int:
    """Return the number of ranks of a row of the matrix."""
    return max(-(-num_ranks // _MOST_BLOCKS), 1)


def _traffic_rows(matrix: FloatArray, num_ranks: int) -> RowTable[TrafficRow]:
    """Return the cells of a matrix of blocks of ranks that are not 0."""
    per_block = _ranks_per_block(num_ranks)
    source, target = np.nonzero(matrix)
    labels = [
        str(first) if per_block == 1 else f"{first}-{min(first + per_block, num_ranks) - 1}"
        for first in range(0, num_ranks, per_block)
    ]
    return table_of(
        TrafficRow,
        source=[labels[row] for row in source.tolist()],
        target=[labels[row] for row in target.tolist()],
        size_bytes=matrix[source, target],
    )


def recorded_traffic(matched: MatchedCollectives) -> RowTable[TrafficRow]:
    """Return the bytes that the recorded ranks sent in collectives whose members, kind and size are recorded.
    O(events + distinct groups x members).
    """
    sums: dict[tuple[int, str, str], float] = {}
    columns = (listed(matched.rank), matched.kind, matched.members, matched.size_bytes.tolist())
    for rank, kind, members, size_bytes in zip(*columns, strict=True):
        if kind in _EQUAL_PARTS and size_bytes > 0 and members:
            sums[rank, kind, members] = sums.get((rank, kind, members), 0.0) + size_bytes
    groups: dict[str, IntArray] = {}
    for _, _, text in sums:
        stated = stated_group(text)
        groups[text] = np.empty(0, np.int64) if stated is None else stated.members(0)
    num_ranks = 1 + max((int(group.max()) for group in groups.values() if len(group)), default=-1)
    per_block = _ranks_per_block(num_ranks)
    blocks = -(-num_ranks // per_block)
    matrix = np.zeros((blocks, blocks))
    for (rank, kind, text), whole_bytes in sums.items():
        group = groups[text]
        if rank in group:
            size_bytes = _bytes_to_each(kind, whole_bytes, len(group))
            np.add.at(matrix[rank // per_block], group[group != rank] // per_block, size_bytes)
    return _traffic_rows(matrix, num_ranks)


def _bytes_to_each(kind: str, whole_bytes: float, members: int) -> float:
    """Return the bytes that a rank sends to each other member of its group, for collectives of a kind with
    equal parts and with the given bytes of whole buffers.
    """
    if members <= 1:
        return 0.0
    return float(bus_factor(kind, np.array([members], np.float64))[0]) * whole_bytes / (members - 1)


def _bytes_per_member(graph: OpGraph, num_ranks: int) -> dict[int, float]:
    """Return the bytes that a rank sends to each other member of its group, by group set (-1: all ranks)."""
    table, sums = graph.collectives, dict[tuple[int, CollectiveKind], float]()
    columns = (listed(table.node), listed(table.kind), listed(table.group_set), table.comm_bytes.tolist())
    for node, code, group_set, size_bytes in zip(*columns, strict=True):
        key, total = (group_set, CollectiveKind(code)), size_bytes * float(graph.executions[node])
        if total > 0:
            sums[key] = sums.get(key, 0.0) + total
    sent: dict[int, float] = {}
    for (group_set, kind), size_bytes in sums.items():
        if kind is CollectiveKind.ALL_GATHER:  # its size is that of the shard that a rank sends
            to_each = size_bytes
        elif (name := kind.name.lower()) in _EQUAL_PARTS:
            members = num_ranks if group_set < 0 else graph.group_sets[group_set].group_size
            to_each = _bytes_to_each(name, size_bytes, members)
        else:
            continue
        sent[group_set] = sent.get(group_set, 0.0) + to_each
    return sent


def _pairs(graph: OpGraph, group_set: int, ranks: IntArray, block: IntArray, blocks: int) -> FloatArray:
    """Return the number of pairs of a rank of ``ranks`` and another member of its group, by their blocks."""
    groups = StridedGroups.all_ranks(len(block)) if group_set < 0 else graph.group_sets[group_set]
    rows = member_rows(groups)
    if isinstance(rows, tuple):
        member = np.array([rank for row in rows for rank in row], np.int64)
        group = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    else:
        member, group = rows.reshape(-1), np.repeat(np.arange(len(rows)), rows.shape[1])
    inside = (member >= 0) & (member < len(block))
    member, group = member[inside], group[inside]
    sends = np.zeros(len(block), np.bool_)
    sends[ranks] = True
    is_sender = sends[member]
    cell = group * blocks + block[member]
    members = np.bincount(cell, minlength=len(rows) * blocks).reshape(-1, blocks).astype(np.float64)
    senders = (
        np.bincount(cell[is_sender], minlength=len(rows) * blocks).reshape(-1, blocks).astype(np.float64)
    )
    return senders.T @ members - np.diag(senders.sum(axis=0))


def matrix_of(table: RowTable[TrafficRow]) -> HeatMap | None:
    """Return the communication matrix; None without communication."""
    if not len(table):
        return None
    sources, targets = table["source"].tolist(), table["target"].tolist()
    labels = sorted({*sources, *targets}, key=lambda label: int(label.partition("-")[0]))
    row_of = {label: row for row, label in enumerate(labels)}
    values = np.full((len(labels), len(labels)), np.nan)
    rows, columns = ([row_of[label] for label in names] for names in (sources, targets))
    values[rows, columns] = table["size_bytes"]
    return HeatMap(
        name="communication-matrix",
        title="Communication matrix",
        table="traffic",
        note="Bytes that a rank sends to another one, by the definition of each collective and not by its "
        "algorithm. An empty cell: none.",
        rows=labels,
        columns=labels,
        values=values,
        axis=Axis("bytes", "bytes"),
        row_title="sender",
        column_title="receiver",
    )
