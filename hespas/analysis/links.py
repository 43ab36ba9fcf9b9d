"""Network utilization of a simulated step: bytes, time and utilization of each dimension of the system.

:mod:`hespas.simulator.network.algorithms` computes the traffic. For each transfer it selects the algorithm
whose predicted time fits the simulated one. The bytes of a message are counted at its sender. Time in which a
rank waits for other ranks does not count as use of a link. Loop iterations that were not simulated one by one
are assumed to send as much as the simulated ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.table import AnalysisRow, RowTable, table_from_rows
from hespas.files.documents import Figure
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GroupSet,
    NodeKind,
    OpGraph,
    Permutation,
    StridedGroups,
    Timeline,
    Workload,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.timeline import Intervals
from hespas.hardware import System
from hespas.operations import between_ranks
from hespas.simulator.network.algorithms import chosen_traffic, message_traffic
from hespas.simulator.network.placement import PlacedGroups, place_groups, place_messages

__all__ = ["LinkRow", "LinkTrafficRow", "NetworkUtilization", "network_utilization"]

_MESSAGE = "send/recv"
_ROUNDING = 1 + 1e-6


class LinkRow(AnalysisRow, frozen=True, kw_only=True):
    """Utilization of one dimension of the network.

    ``bandwidth_gbytes_per_s`` (10^9 bytes/s) is per device and direction. ``sent_bytes`` per step and
    ``in_use_ns``, the time with a transfer, are means over the ranks; ``most_sent_bytes`` and
    ``most_in_use_ns`` are the maxima. ``utilization_share`` is ``sent_bytes`` / (bandwidth x step time).
    ``in_use_utilization_share`` is ``sent_bytes`` / the bytes that could have been sent during the transfers.
    """

    dimension: str
    topology: str
    bandwidth_gbytes_per_s: Figure
    sent_bytes: Figure
    most_sent_bytes: Figure
    in_use_ns: Figure
    most_in_use_ns: Figure
    utilization_share: Figure
    in_use_utilization_share: Figure


class LinkTrafficRow(AnalysisRow, frozen=True, kw_only=True):
    """Traffic of one kind of operation and algorithm on one dimension of the network. ``transfers`` and
    ``sent_bytes`` are per device and step, as means over the ranks.
    """

    dimension: str
    kind: str
    algorithm: str
    transfers: Figure
    sent_bytes: Figure
    share: Figure


@dataclass(frozen=True, slots=True, eq=False)
class NetworkUtilization:
    """Traffic of one step: a table with a row per dimension, and a table by dimension, kind of transfer and
    algorithm.
    """

    links: RowTable[LinkRow]
    traffic: RowTable[LinkTrafficRow]

    def tables(self) -> dict[str, RowTable[LinkRow] | RowTable[LinkTrafficRow]]:
        """Return both tables by name."""
        return {"links": self.links, "link_traffic": self.traffic}


def network_utilization(
    workload: Workload, timeline: Timeline, system: System, diagnostics: Diagnostics | None = None
) -> NetworkUtilization:
    """Return the traffic and the utilization of each dimension of ``system`` that has more than one device.

    O(spans log spans), and O(ranks log ranks) for each group set and permutation.
    """
    counted = _TrafficCount(workload, timeline, system)
    counted.count()
    present = np.flatnonzero(timeline.shown_by >= 0)
    rows = {
        axis: counted.link(axis, present)
        for axis, dimension in enumerate(system.dimensions)
        if dimension.size > 1
    }
    for axis, row in rows.items():
        reach = system.dimensions[axis].devices_per_nic * row.bandwidth_gbytes_per_s
        over = counted.sent[present, axis] > reach * counted.in_use_ns[present, axis] * _ROUNDING
        if diagnostics is not None and over.any():
            diagnostics.warning(
                "simulate.links",
                row.dimension,
                "concurrent transfers exceed the bandwidth: each transfer is timed as if it ran alone",
                count=int(over.sum()),
            )
    return NetworkUtilization(
        table_from_rows(LinkRow, list(rows.values())), table_from_rows(LinkTrafficRow, counted.by_kind())
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Transfers:
    """Network transfers of one op graph, as rows: its collectives, followed by the messages that it sends.

    Collectives of one kind and group set have the same ``key``, and so have messages of one permutation.
    ``row_of`` maps a node to its row (-1: none).
    """

    graph: OpGraph
    node: IntArray
    size_bytes: FloatArray
    key: IntArray
    collectives: list[tuple[CollectiveKind, int]]
    permutations: list[int]
    row_of: IntArray

    @classmethod
    def of(cls, graph: OpGraph) -> _Transfers:
        table, messages = graph.collectives, graph.p2p
        sent = np.flatnonzero(between_ranks(graph) & (graph.kind[messages.node] != int(NodeKind.RECV)))
        pairs, of_pair = np.unique(
            np.stack((table.kind.astype(np.int64), table.group_set)), axis=1, return_inverse=True
        )
        peers, of_peers = np.unique(messages.permutation[sent], return_inverse=True)
        node = np.concatenate((table.node, messages.node[sent])).astype(np.int64)
        row_of = np.full(len(graph), -1, np.int64)
        row_of[node] = np.arange(len(node))
        return cls(
            graph=graph,
            node=node,
            size_bytes=np.concatenate((table.comm_bytes, messages.comm_bytes[sent])).astype(np.float64),
            key=np.concatenate((of_pair.reshape(-1), pairs.shape[1] + of_peers.reshape(-1))),
            collectives=[(CollectiveKind(kind), row) for kind, row in pairs.T.tolist()],
            permutations=peers.tolist(),
            row_of=row_of,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _RankTransfers:
    """Simulated transfers of one rank, which represents all ranks that behave alike.

    Columns per span: ``row`` is the row in :class:`_Transfers`, ``start_ns`` and ``end_ns`` are the times
    without waiting. Columns per row of :class:`_Transfers`: ``count`` is the number of runs, ``mean_ns`` the
    mean duration of a run. ``later`` is the number of runs without a span, because their loop iterations were
    not simulated.
    """

    row: IntArray
    start_ns: FloatArray
    end_ns: FloatArray
    count: FloatArray
    later: FloatArray
    mean_ns: FloatArray

    @classmethod
    def of(cls, timeline: Timeline, spans: IntArray, transfers: _Transfers) -> _RankTransfers:
        own = spans[timeline.node[spans] >= 0]
        row = transfers.row_of[timeline.node[own]]
        own, row = own[row >= 0], row[row >= 0]
        start_ns, end_ns = timeline.start_ns[own] + timeline.wait_ns[own], timeline.end_ns[own]
        size = len(transfers.node)
        shown = np.bincount(row, minlength=size).astype(np.float64)
        total_ns = np.bincount(row, end_ns - start_ns, size)
        stated_ns = transfers.graph.duration_ns[transfers.node]
        mean_ns = np.where(shown > 0, total_ns / np.maximum(shown, 1), stated_ns)
        later = np.zeros(size)
        if len(own) < len(spans) and bool((timeline.node[spans] < 0).any()):
            runs = transfers.graph.executions[transfers.node].astype(np.float64)
            later = np.where(np.isfinite(runs), np.maximum(runs - shown, 0.0), 0.0)
        return cls(row, start_ns, end_ns, shown + later, later, mean_ns)


@dataclass(slots=True, eq=False)
class _TrafficCount:
    """Counter of the network traffic per rank and dimension: sent bytes, time in use, and ``capacity``, the
    bytes that could have been sent during the time in use.
    """

    workload: Workload
    timeline: Timeline
    system: System
    sent: FloatArray = field(init=False)
    in_use_ns: FloatArray = field(init=False)
    capacity: FloatArray = field(init=False)
    kinds: dict[tuple[int, str, str], list[float]] = field(
        default_factory=dict[tuple[int, str, str], list[float]]
    )
    placements: dict[GroupSet, PlacedGroups] = field(default_factory=dict["GroupSet", "PlacedGroups"])
    distances: dict[Permutation | None, IntArray] = field(
        default_factory=dict["Permutation | None", IntArray]
    )

    def __post_init__(self) -> None:
        shape = (self.workload.num_ranks, len(self.system.dimensions))
        self.sent, self.in_use_ns, self.capacity = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def count(self) -> None:
        """Count the transfers of all ranks. Ranks that behave alike are counted together."""
        per_class = [_Transfers.of(graph) for graph in self.workload.classes]
        # the ranks that one rank represents, and the spans of that rank
        timeline = self.timeline
        by_rank = np.argsort(timeline.rank, kind="stable")
        rank_of_span = timeline.rank[by_rank]
        by_shown = np.argsort(timeline.shown_by, kind="stable")
        shown_by = timeline.shown_by[by_shown]
        for shown in np.unique(shown_by[shown_by >= 0]).tolist():
            ranks = by_shown[slice(*np.searchsorted(shown_by, (shown, shown + 1)).tolist())].astype(np.int64)
            spans = by_rank[slice(*np.searchsorted(rank_of_span, (shown, shown + 1)).tolist())]
            transfers = per_class[int(self.workload.rank_class[ranks[0]])]
            if not len(transfers.node):
                continue
            ran = _RankTransfers.of(self.timeline, spans, transfers)
            columns = [
                self._placement(transfers.graph, row).which[ranks][:, None]
                for _, row in transfers.collectives
            ]
            columns += [self._distances(transfers.graph, row)[ranks] for row in transfers.permutations]
            keys = np.concatenate(columns, axis=1)
            _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
            for number, index in enumerate(first.tolist()):
                self._add(transfers, ran, ranks[group.reshape(-1) == number], int(ranks[index]))

    def _placement(self, graph: OpGraph, row: int) -> PlacedGroups:
        ranks = self.workload.num_ranks
        groups = graph.group_sets[row] if row >= 0 else StridedGroups.all_ranks(ranks)
        if groups not in self.placements:
            self.placements[groups] = place_groups(groups, self.system, ranks)
        return self.placements[groups]

    def _distances(self, graph: OpGraph, row: int) -> IntArray:
        """Return the distance between sender and receiver of each rank's message along each dimension, shape
        ``(ranks, dimensions)``; -1 if unknown. ``row`` is the number of the permutation.
        """
        permutation = graph.permutations[row] if row >= 0 else None
        if permutation not in self.distances:
            ranks = self.workload.num_ranks
            unknown: IntArray = np.full((ranks, len(self.system.dimensions)), -1, np.int64)
            self.distances[permutation] = (
                unknown if permutation is None else place_messages(permutation, self.system, ranks)[0]
            )
        return self.distances[permutation]

    def _add(self, transfers: _Transfers, ran: _RankTransfers, ranks: IntArray, rank: int) -> None:
        """Add the transfers of ``ranks``. All of them send over the same distances as ``rank``, which is used
        to compute the traffic.
        """
        axes = len(self.system.dimensions)
        sent, most = (np.zeros((axes, len(transfers.node))) for _ in range(2))
        for key in range(len(transfers.collectives) + len(transfers.permutations)):
            rows = np.flatnonzero((transfers.key == key) & (ran.count > 0))
            if not len(rows):
                continue
            kind, names, sent[:, rows], most[:, rows] = self._traffic(transfers, ran, key, rows, rank)
            runs = ran.count[rows] * len(ranks)
            for name in dict.fromkeys(names):
                of_name = np.array([algorithm == name for algorithm in names])
                for axis in np.flatnonzero((sent[:, rows] != 0).any(axis=1)).tolist():
                    sums = self.kinds.setdefault((axis, kind, name), [0.0, 0.0])
                    sums[0] += float(runs[of_name].sum())
                    sums[1] += float((sent[axis, rows] * runs)[of_name].sum())
        self.sent[ranks] = sent @ ran.count
        for axis in range(axes):
            used = sent[axis] != 0
            spans = used[ran.row]
            shown = Intervals.union(ran.start_ns[spans], ran.end_ns[spans]).length_ns
            self.in_use_ns[ranks, axis] = shown + float((ran.later * ran.mean_ns)[used].sum())
            self.capacity[ranks, axis] = float((most[axis] * ran.count * ran.mean_ns)[used].sum())

    def _traffic(
        self, transfers: _Transfers, ran: _RankTransfers, key: int, rows: IntArray, rank: int
    ) -> tuple[str, list[str], FloatArray, FloatArray]:
        """Return the traffic of the transfers ``rows``, which have the same ``key``, on ``rank``: their kind,
        their algorithms, the sent bytes, and the bandwidth available to them [bytes/ns].
        """
        size, number = transfers.size_bytes[rows], key - len(transfers.collectives)
        bandwidths = np.array([dimension.bandwidth_bytes_per_s / 1e9 for dimension in self.system.dimensions])
        if number >= 0:
            distances = self._distances(transfers.graph, transfers.permutations[number])[rank]
            is_known = not (distances < 0).any()
            sent = message_traffic(self.system, distances.tolist(), size if is_known else size * np.nan)
            return _MESSAGE, ["direct"] * len(rows), sent, bandwidths[:, None]
        kind, row = transfers.collectives[key]
        placement = self._placement(transfers.graph, row)
        index = int(placement.which[rank])
        if index < 0:
            nothing = np.zeros((len(self.system.dimensions), len(rows)))
            return kind.name.lower(), [""] * len(rows), nothing, bandwidths[:, None]
        footprint, mean_ns = placement.footprints[index], ran.mean_ns[rows]
        names, sent, most = chosen_traffic(self.system, kind, footprint, size, mean_ns)
        return kind.name.lower(), names, sent, most[:, None]

    def link(self, axis: int, present: IntArray) -> LinkRow:
        """Return the utilization of network dimension ``axis``: means and maxima over the ranks in
        ``present``.
        """
        dimension, sent = self.system.dimensions[axis], self.sent[present, axis]
        rate, capacity = dimension.bandwidth_bytes_per_s / 1e9, float(self.capacity[present, axis].sum())
        carried = rate * self.timeline.step_ns
        mean = float(sent.mean()) if len(sent) else float("nan")
        in_use_ns = self.in_use_ns[present, axis]
        return LinkRow(
            dimension=dimension.name,
            topology=dimension.topology,
            bandwidth_gbytes_per_s=rate,
            sent_bytes=mean,
            most_sent_bytes=float(sent.max(initial=0.0)),
            in_use_ns=float(in_use_ns.mean()) if len(sent) else float("nan"),
            most_in_use_ns=float(in_use_ns.max(initial=0.0)),
            utilization_share=mean / carried if carried > 0 else float("nan"),
            in_use_utilization_share=float(sent.sum()) / capacity if capacity > 0 else float("nan"),
        )

    def by_kind(self) -> list[LinkTrafficRow]:
        """Return the traffic of each dimension by kind and algorithm, most bytes first."""
        ranks = max(int((self.timeline.shown_by >= 0).sum()), 1)
        whole = np.zeros(len(self.system.dimensions))
        for (axis, _, _), (_, sent) in self.kinds.items():
            whole[axis] += sent
        order = sorted(self.kinds.items(), key=lambda item: (item[0][0], -item[1][1]))
        return [
            LinkTrafficRow(
                dimension=self.system.dimensions[axis].name,
                kind=kind,
                algorithm=algorithm,
                transfers=runs / ranks,
                sent_bytes=sent / ranks,
                share=sent / float(whole[axis]),
            )
            for (axis, kind, algorithm), (runs, sent) in order
        ]
