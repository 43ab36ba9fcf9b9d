"""Communication of a simulated step by group of ranks and by size, with its exposed time and bandwidths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hespas.analysis.collectives import bus_factor
from hespas.analysis.spans import SimulatedSpans
from hespas.analysis.table import AnalysisRow, RowTable, table_from_rows
from hespas.files.documents import Count, Figure
from hespas.graph import CollectiveKind, OpGraph
from hespas.graph.columns import FloatArray, IntArray, at_rows
from hespas.graph.groups import groups_text
from hespas.graph.timeline import Intervals

__all__ = [
    "AxisRow",
    "CollectiveSizeRow",
    "CommunicationKey",
    "CommunicationTime",
    "axis_rows",
    "communication_times",
    "size_rows",
]

_MESSAGE = len(CollectiveKind) + 1
_KIND_NAMES = {int(kind): kind.name.lower() for kind in CollectiveKind} | {_MESSAGE: "send/recv"}


class AxisRow(AnalysisRow, frozen=True, kw_only=True):
    """Communication of one kind in one grouping of the ranks, such as an axis of the parallel layout.

    ``size_bytes`` is the sum of the whole buffers on one rank. ``total_ns`` and ``exposed_ns`` (time without
    computation) are sums over all ranks. Bandwidths (10^9 bytes/s) are as defined by nccl-tests.
    """

    kind: str
    groups: str
    group_size: int
    count: Count
    size_bytes: Figure
    total_ns: Figure
    exposed_ns: Figure
    exposed_share: Figure
    algorithm_gbytes_per_s: Figure
    bus_gbytes_per_s: Figure


class CollectiveSizeRow(AnalysisRow, frozen=True, kw_only=True):
    """Collectives or messages of one kind, group size and buffer size on all ranks. ``size_bytes`` is the
    whole buffer. Bandwidths (10^9 bytes/s) are as defined by nccl-tests, over the mean time without waiting.
    """

    kind: str
    group_size: int
    size_bytes: Figure
    count: Count
    mean_ns: Figure
    algorithm_gbytes_per_s: Figure
    bus_gbytes_per_s: Figure


class CommunicationKey(NamedTuple):
    """Communication of one kind, grouping and buffer size [bytes]."""

    kind: str
    groups: str
    group_size: int
    whole_bytes: float


class CommunicationTime(NamedTuple):
    """Number of collectives and messages on all ranks, and their total and exposed time [ns]."""

    runs: float = 0.0
    total_ns: float = 0.0
    exposed_ns: float = 0.0

    def plus(self, other: CommunicationTime) -> CommunicationTime:
        """Return the sums of two times."""
        return CommunicationTime(*(one + two for one, two in zip(self, other, strict=True)))


def communication_times(spans: SimulatedSpans) -> dict[CommunicationKey, CommunicationTime]:
    """Return the time of collectives and messages by the rank groups in which they run, and by size."""
    timeline, workload = spans.timeline, spans.workload
    # the part of each span that overlaps with computation of its rank [ns]
    computes, covered = spans.on_resource("compute"), np.zeros(len(timeline))
    order = np.argsort(timeline.rank, kind="stable")
    for of_rank in np.split(order, np.flatnonzero(np.diff(timeline.rank[order])) + 1):
        computing = of_rank[computes[of_rank]]
        work = Intervals.union(timeline.start_ns[computing], timeline.end_ns[computing])
        end_ns = timeline.end_ns[of_rank]
        covered[of_rank] = work.within_ns(end_ns - spans.duration_ns[of_rank], end_ns)
    times: dict[CommunicationKey, CommunicationTime] = {}
    for index, graph in enumerate(workload.classes):
        own = np.flatnonzero((spans.rank_class == index) & (timeline.node >= 0))
        kind, groups, size, whole = _communication(graph, workload.num_ranks)
        node = timeline.node[own].astype(np.int64)
        for row in np.flatnonzero(at_rows(kind, node, -1) >= 0).tolist():
            span, at = int(own[row]), int(node[row])
            key = CommunicationKey(_KIND_NAMES[int(kind[at])], groups[at], int(size[at]), float(whole[at]))
            took_ns, weight = float(spans.duration_ns[span]), float(spans.weight[span])
            exposed_ns = took_ns - float(covered[span])
            time = CommunicationTime(weight, took_ns * weight, exposed_ns * weight)
            times[key] = times.get(key, CommunicationTime()).plus(time)
    return times


def axis_rows(times: Mapping[CommunicationKey, CommunicationTime], num_ranks: int) -> RowTable[AxisRow]:
    """Return collectives and messages by the rank groups in which they run; each grouping is an axis of the
    parallel layout.
    """
    sums: dict[tuple[str, str, int], tuple[float, CommunicationTime]] = {}
    for key, time in times.items():
        whole_bytes, total = sums.get(key[:3], (0.0, CommunicationTime()))
        sums[key[:3]] = (whole_bytes + key.whole_bytes * time.runs, total.plus(time))
    rows: list[AxisRow] = []
    for (name, group, group_size), (whole_bytes, (runs, total_ns, exposed_ns)) in sums.items():
        rate = whole_bytes / total_ns if total_ns > 0 else float("nan")
        factor = float(bus_factor(name, np.array([group_size], np.float64))[0])
        rows.append(
            AxisRow(
                kind=name,
                groups=group,
                group_size=group_size,
                count=round(runs),
                size_bytes=whole_bytes / num_ranks,
                total_ns=total_ns,
                exposed_ns=exposed_ns,
                exposed_share=exposed_ns / total_ns if total_ns > 0 else float("nan"),
                algorithm_gbytes_per_s=rate,
                bus_gbytes_per_s=rate * factor,
            )
        )
    return table_from_rows(AxisRow, rows).largest("exposed_ns")


def size_rows(times: Mapping[CommunicationKey, CommunicationTime]) -> RowTable[CollectiveSizeRow]:
    """Return collectives and messages by kind, group size and buffer size, largest buffers first."""
    sums: dict[tuple[str, int, float], CommunicationTime] = {}
    for key, time in times.items():
        short = (key.kind, key.group_size, key.whole_bytes)
        sums[short] = sums.get(short, CommunicationTime()).plus(time)
    rows: list[CollectiveSizeRow] = []
    for (kind, group_size, size_bytes), time in sums.items():
        rate = size_bytes * time.runs / time.total_ns if time.total_ns > 0 else float("nan")
        rows.append(
            CollectiveSizeRow(
                kind=kind,
                group_size=group_size,
                size_bytes=size_bytes,
                count=round(time.runs),
                mean_ns=time.total_ns / time.runs if time.runs else float("nan"),
                algorithm_gbytes_per_s=rate,
                bus_gbytes_per_s=rate * float(bus_factor(kind, np.array([group_size], np.float64))[0]),
            )
        )
    return table_from_rows(CollectiveSizeRow, rows).largest("size_bytes")


def _communication(graph: OpGraph, num_ranks: int) -> tuple[IntArray, dict[int, str], IntArray, FloatArray]:
    """Return four properties of the communication of each node: the code of its kind (-1: none), a text for
    its groups (by node), the number of ranks in a group (-1: sizes differ), and the bytes of the whole
    buffer.
    """
    kind, size = np.full(len(graph), -1, np.int64), np.full(len(graph), -1, np.int64)
    whole = np.full(len(graph), np.nan)
    texts: dict[int, str] = {}
    group_sets: dict[int, tuple[str, int]] = {-1: ("all ranks", num_ranks)}
    for row, groups in enumerate(graph.group_sets):
        group_sets[row] = (groups_text(groups, num_ranks), groups.group_size)
    table = graph.collectives
    kind[table.node] = table.kind
    whole[table.node] = table.comm_bytes
    for node, row in zip(table.node.tolist(), table.group_set.tolist(), strict=True):
        texts[node], size[node] = group_sets[row]
    gathers = table.node[table.kind == int(CollectiveKind.ALL_GATHER)]
    whole[gathers] *= np.where(size[gathers] > 0, size[gathers], np.nan)
    messages = graph.p2p
    kind[messages.node], size[messages.node] = _MESSAGE, 2
    whole[messages.node] = messages.comm_bytes
    texts |= dict.fromkeys(messages.node.tolist(), "pairs")
    return kind, texts, size, whole
