"""How far a simulated step uses the network of its system: bytes, time and utilisation of each dimension.

What is sent is that of :mod:`hespas.simulator.network.traffic`, by the algorithm that fits the time that each
transfer takes. A message counts where it is sent, waiting for other ranks is no use of a link, and trips of a
loop that were not run one by one count as those that were.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.intervals import Intervals
from hespas.analysis.table import Row, Table, table_from_rows
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
from hespas.hardware import System
from hespas.operations import between_ranks
from hespas.simulator.network.placement import Placed, place_groups, place_messages
from hespas.simulator.network.traffic import chosen_traffic, message_traffic

__all__ = ["LinkRow", "LinkTrafficRow", "LinkUse", "link_use"]

_MESSAGE = "send/recv"
_ROUNDING = 1 + 1e-6


class LinkRow(Row, frozen=True, kw_only=True):
    """One dimension of the system. ``bandwidth_gbytes_per_s`` (10^9 bytes/s) is what a device sends into it
    in one direction, ``sent_bytes`` what a device sends in a step, ``in_use_ns`` how long any transfer of a
    device uses it, both in the mean over the ranks; ``most_sent_bytes`` and ``most_in_use_ns`` are of the
    rank that has most. ``utilization_share`` is ``sent_bytes`` over bandwidth and step, and
    ``in_use_utilization_share`` over what the device could have sent during its transfers.
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


class LinkTrafficRow(Row, frozen=True, kw_only=True):
    """What operations of one kind and algorithm send over one dimension: ``transfers`` and ``sent_bytes`` of
    a device in a step, in the mean over the ranks.
    """

    dimension: str
    kind: str
    algorithm: str
    transfers: Figure
    sent_bytes: Figure
    share: Figure


@dataclass(frozen=True, slots=True, eq=False)
class LinkUse:
    """The tables of a step: a row per dimension, and one per kind and algorithm in it."""

    links: Table[LinkRow]
    traffic: Table[LinkTrafficRow]

    def tables(self) -> dict[str, Table[LinkRow] | Table[LinkTrafficRow]]:
        """Both under their names."""
        return {"links": self.links, "link_traffic": self.traffic}


def link_use(
    workload: Workload, timeline: Timeline, system: System, diagnostics: Diagnostics | None = None
) -> LinkUse:
    """The use of each dimension of a sized system that has several devices. O(spans log spans), and
    O(ranks log ranks) for each group set and permutation.
    """
    counted = _Counted(workload, timeline, system)
    counted.count()
    present = np.flatnonzero(timeline.shown_by >= 0)
    rows = {axis: counted.link(axis, present) for axis, each in enumerate(system.dimensions) if each.size > 1}
    for axis, row in rows.items():
        reach = system.dimensions[axis].devices_per_nic * row.bandwidth_gbytes_per_s
        over = counted.sent[present, axis] > reach * counted.in_use_ns[present, axis] * _ROUNDING
        if diagnostics is not None and over.any():
            diagnostics.warning(
                "simulate.links",
                row.dimension,
                "transfers that run at once take more than it carries: each is timed as if it ran alone",
                count=int(over.sum()),
            )
    return LinkUse(
        table_from_rows(LinkRow, list(rows.values())), table_from_rows(LinkTrafficRow, counted.by_kind())
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Transfers:
    """The collectives, then the messages that are sent, of one graph. ``key`` numbers those of one kind and
    group set, behind them those of one permutation; ``row_of`` is the transfer of each node (-1: none).
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
class _Ran:
    """What one rank, and others like it, did: ``row``, ``start_ns`` and ``end_ns`` of its transfers, without
    waiting; per transfer of the graph how often it ran, of which ``later`` without a span, and how long one
    takes.
    """

    row: IntArray
    start_ns: FloatArray
    end_ns: FloatArray
    count: FloatArray
    later: FloatArray
    mean_ns: FloatArray

    @classmethod
    def of(cls, timeline: Timeline, spans: IntArray, found: _Transfers) -> _Ran:
        own = spans[timeline.node[spans] >= 0]
        row = found.row_of[timeline.node[own]]
        own, row = own[row >= 0], row[row >= 0]
        start_ns, end_ns = timeline.start_ns[own] + timeline.wait_ns[own], timeline.end_ns[own]
        size = len(found.node)
        shown = np.bincount(row, minlength=size).astype(np.float64)
        total_ns = np.bincount(row, end_ns - start_ns, size)
        mean_ns = np.where(shown > 0, total_ns / np.maximum(shown, 1), found.graph.duration_ns[found.node])
        later = np.zeros(size)
        if len(own) < len(spans) and bool((timeline.node[spans] < 0).any()):
            runs = found.graph.multiplicity[found.node].astype(np.float64)
            later = np.where(np.isfinite(runs), np.maximum(runs - shown, 0.0), 0.0)
        return cls(row, start_ns, end_ns, shown + later, later, mean_ns)


@dataclass(slots=True, eq=False)
class _Counted:
    """Per rank and dimension: bytes, time in use, and what could have been sent [bytes]."""

    workload: Workload
    timeline: Timeline
    system: System
    sent: FloatArray = field(init=False)
    in_use_ns: FloatArray = field(init=False)
    room: FloatArray = field(init=False)
    kinds: dict[tuple[int, str, str], list[float]] = field(
        default_factory=dict[tuple[int, str, str], list[float]]
    )
    placed: dict[GroupSet, Placed] = field(default_factory=dict["GroupSet", "Placed"])
    away: dict[Permutation | None, IntArray] = field(default_factory=dict["Permutation | None", IntArray])

    def __post_init__(self) -> None:
        shape = (self.workload.num_ranks, len(self.system.dimensions))
        self.sent, self.in_use_ns, self.room = np.zeros(shape), np.zeros(shape), np.zeros(shape)

    def count(self) -> None:
        """All ranks, those that do the same at once."""
        transfers = [_Transfers.of(graph) for graph in self.workload.classes]
        for ranks, spans in self._alike():
            found = transfers[int(self.workload.rank_class[ranks[0]])]
            if not len(found.node):
                continue
            ran = _Ran.of(self.timeline, spans, found)
            keys = np.concatenate(list(self._keys(found, ranks)), axis=1)
            _, first, place = np.unique(keys, axis=0, return_index=True, return_inverse=True)
            for number, one in enumerate(first.tolist()):
                self._add(found, ran, ranks[place.reshape(-1) == number], int(ranks[one]))

    def _alike(self) -> Iterator[tuple[IntArray, IntArray]]:
        """Ranks that are shown by one, and the spans of that one."""
        timeline = self.timeline
        by_rank = np.argsort(timeline.rank, kind="stable")
        rank = timeline.rank[by_rank]
        shown_by = np.argsort(timeline.shown_by, kind="stable")
        sorted_by = timeline.shown_by[shown_by]
        for one in np.unique(sorted_by[sorted_by >= 0]).tolist():
            ranks = shown_by[slice(*np.searchsorted(sorted_by, (one, one + 1)).tolist())]
            yield ranks.astype(np.int64), by_rank[slice(*np.searchsorted(rank, (one, one + 1)).tolist())]

    def _groups(self, graph: OpGraph, row: int) -> Placed:
        ranks = self.workload.num_ranks
        groups = graph.group_sets[row] if row >= 0 else StridedGroups.all_ranks(ranks)
        if groups not in self.placed:
            self.placed[groups] = place_groups(groups, self.system, ranks)
        return self.placed[groups]

    def _away(self, graph: OpGraph, row: int) -> IntArray:
        """How far each rank sends along each dimension; -1 where nobody knows."""
        permutation = graph.permutations[row] if row >= 0 else None
        if permutation not in self.away:
            ranks = self.workload.num_ranks
            nowhere: IntArray = np.full((ranks, len(self.system.dimensions)), -1, np.int64)
            self.away[permutation] = (
                nowhere if permutation is None else place_messages(permutation, self.system, ranks)[0]
            )
        return self.away[permutation]

    def _keys(self, found: _Transfers, ranks: IntArray) -> Iterator[IntArray]:
        for _, row in found.collectives:
            yield self._groups(found.graph, row).which[ranks][:, None]
        for row in found.permutations:
            yield self._away(found.graph, row)[ranks]

    def _add(self, found: _Transfers, ran: _Ran, ranks: IntArray, one: int) -> None:
        """Count what ranks do whose groups and peers lie as those of one of them."""
        axes = len(self.system.dimensions)
        sent, most = np.zeros((axes, len(found.node))), np.zeros((axes, len(found.node)))
        for key in range(len(found.collectives) + len(found.permutations)):
            rows = np.flatnonzero((found.key == key) & (ran.count > 0))
            if not len(rows):
                continue
            kind, names, sent[:, rows], most[:, rows] = self._of_key(found, ran, key, rows, one)
            runs = ran.count[rows] * len(ranks)
            for name in dict.fromkeys(names):
                mine = np.array([each == name for each in names])
                for axis in np.flatnonzero((sent[:, rows] != 0).any(axis=1)).tolist():
                    sums = self.kinds.setdefault((axis, kind, name), [0.0, 0.0])
                    sums[0] += float(runs[mine].sum())
                    sums[1] += float((sent[axis, rows] * runs)[mine].sum())
        self.sent[ranks] = sent @ ran.count
        for axis in range(axes):
            used = sent[axis] != 0
            spans = used[ran.row]
            shown = Intervals.union(ran.start_ns[spans], ran.end_ns[spans]).length_ns
            self.in_use_ns[ranks, axis] = shown + float((ran.later * ran.mean_ns)[used].sum())
            self.room[ranks, axis] = float((most[axis] * ran.count * ran.mean_ns)[used].sum())

    def _of_key(
        self, found: _Transfers, ran: _Ran, key: int, rows: IntArray, one: int
    ) -> tuple[str, list[str], FloatArray, FloatArray]:
        """Kind, algorithms, bytes and what there is room for, of transfers of one key as a rank has them."""
        size, number = found.size_bytes[rows], key - len(found.collectives)
        if number >= 0:
            away = self._away(found.graph, found.permutations[number])[one]
            known = not (away < 0).any()
            sent = message_traffic(self.system, away.tolist(), size if known else size * np.nan)
            names, most = ["direct"] * len(rows), self._bandwidths()
            return _MESSAGE, names, sent, most[:, None]
        kind, row = found.collectives[key]
        placed = self._groups(found.graph, row)
        which = int(placed.which[one])
        if which < 0:
            nothing = np.zeros((len(self.system.dimensions), len(rows)))
            return kind.name.lower(), [""] * len(rows), nothing, self._bandwidths()[:, None]
        place, mean_ns = placed.footprints[which], ran.mean_ns[rows]
        names, sent, most = chosen_traffic(self.system, kind, place, size, mean_ns)
        return kind.name.lower(), names, sent, most[:, None]

    def _bandwidths(self) -> FloatArray:
        """What a device sends into each dimension [bytes/ns]."""
        return np.array([each.bandwidth_bytes_per_s / 1e9 for each in self.system.dimensions])

    def link(self, axis: int, present: IntArray) -> LinkRow:
        """One dimension, over the ranks that are here."""
        each, sent = self.system.dimensions[axis], self.sent[present, axis]
        rate, room = each.bandwidth_bytes_per_s / 1e9, float(self.room[present, axis].sum())
        carried = rate * self.timeline.step_ns
        mean = float(sent.mean()) if len(sent) else float("nan")
        in_use_ns = self.in_use_ns[present, axis]
        return LinkRow(
            dimension=each.name,
            topology=each.topology,
            bandwidth_gbytes_per_s=rate,
            sent_bytes=mean,
            most_sent_bytes=float(sent.max(initial=0.0)),
            in_use_ns=float(in_use_ns.mean()) if len(sent) else float("nan"),
            most_in_use_ns=float(in_use_ns.max(initial=0.0)),
            utilization_share=mean / carried if carried > 0 else float("nan"),
            in_use_utilization_share=float(sent.sum()) / room if room > 0 else float("nan"),
        )

    def by_kind(self) -> list[LinkTrafficRow]:
        """Kinds and algorithms of each dimension, those that send most first."""
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
