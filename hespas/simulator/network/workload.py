"""A workload on a system: collectives and messages take what the network makes of where their ranks lie.

Ranks of a class run the same graph, but a group that lies in one node is faster than one across two: classes
are parted where ranks get other times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hespas.estimators.interface import takes_no_time
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    Estimate,
    GroupSet,
    NodeKind,
    OpGraph,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.passes import with_durations
from hespas.operations import Labels, between_ranks, operations_of
from hespas.simulator.network.model import Network
from hespas.simulator.network.placement import Placed, place_groups, place_messages

__all__ = ["on_system"]

_NAME = "network"
"""What reports call the model."""


def on_system(
    workload: Workload,
    estimates: Sequence[Estimate] | None,
    network: Network,
    diagnostics: Diagnostics | None = None,
) -> tuple[Workload, tuple[Estimate, ...] | None]:
    """The workload and its estimates with the times that communication takes on the system; without estimates
    those of the graphs themselves are replaced. Collectives that no rule covers keep their times.

    O(ranks log ranks) for each group set and permutation, and O(nodes) for each class.
    """
    told = diagnostics if diagnostics is not None else Diagnostics()
    found = told if estimates is None else Diagnostics()  # estimates have told of their device already
    places = _Places(network, workload.num_ranks, {}, {})
    graphs, said, rank_class = list[OpGraph](), list[Estimate](), workload.rank_class.copy()
    for index, graph in enumerate(workload.classes):
        ranks = np.flatnonzero(workload.rank_class == index)
        timed = _Timed(graph, operations_of(graph).scheme, network, places, found)
        for mine, times in timed.parts(ranks):
            rank_class[mine] = len(graphs)
            if estimates is None:
                durations = np.where(np.isnan(times[0]), graph.duration_ns, times[0])
                graphs.append(with_durations(graph, durations))
            else:
                graphs.append(graph)
                said.append(_replaced(estimates[index], times))
    told.info(
        "simulate.network",
        network.system.name,
        "collectives and messages take what the system's network makes of where their ranks lie",
        count=sum(len(graph.collectives) + len(graph.p2p) for graph in workload.classes),
    )
    parted = replace(workload, classes=tuple(graphs), rank_class=rank_class)
    return parted, None if estimates is None else tuple(said)


def _replaced(estimate: Estimate, times: FloatArray) -> Estimate:
    """An estimate with other times where there are any."""
    known = ~np.isnan(times[0])
    names = estimate.estimators if _NAME in estimate.estimators else (*estimate.estimators, _NAME)
    duration, low, high = (
        np.where(known, new, old)
        for new, old in zip(times, (estimate.duration_ns, estimate.low_ns, estimate.high_ns), strict=True)
    )
    return replace(
        estimate,
        estimators=names,
        duration_ns=duration,
        low_ns=low,
        high_ns=high,
        estimator=np.where(known, names.index(_NAME), estimate.estimator).astype(np.int8),
    )


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the groups and messages of all classes lie, found once."""

    network: Network
    num_ranks: int
    groups: dict[GroupSet, Placed]
    messages: dict[Permutation, tuple[IntArray, IntArray]]

    def of_groups(self, groups: GroupSet) -> Placed:
        if groups not in self.groups:
            self.groups[groups] = place_groups(groups, self.network.system, self.num_ranks)
        return self.groups[groups]

    def of_messages(self, permutation: Permutation) -> tuple[IntArray, IntArray]:
        if permutation not in self.messages:
            self.messages[permutation] = place_messages(permutation, self.network.system, self.num_ranks)
        return self.messages[permutation]


@dataclass(frozen=True, slots=True)
class _Timed:
    """The communication of one graph; ``scheme`` is the number format of each node."""

    graph: OpGraph
    scheme: Labels
    network: Network
    places: _Places
    found: Diagnostics

    def parts(self, ranks: IntArray) -> list[tuple[IntArray, FloatArray]]:
        """Ranks whose communication takes the same, and the times of all nodes [ns] and their intervals, of
        shape ``(3, nodes)``, NaN where the network says nothing. All ranks once, also where there are none.
        """
        keys = [*self._group_keys(ranks), *self._message_keys(ranks)]
        if not keys or not len(ranks):
            return [(ranks, np.full((3, len(self.graph)), np.nan))]
        distinct, place = np.unique(np.concatenate(keys, axis=1), axis=0, return_inverse=True)
        found: dict[bytes, tuple[list[IntArray], FloatArray]] = {}
        for number in range(len(distinct)):
            mine = ranks[place.reshape(-1) == number]
            times = self._times(int(mine[0]))
            found.setdefault(times.tobytes(), ([], times))[0].append(mine)
        return [(np.concatenate(parts), times) for parts, times in found.values()]

    def _sets(self) -> list[GroupSet]:
        """The group sets, and all ranks for collectives that state none."""
        return [*self.graph.group_sets, StridedGroups.all_ranks(self.places.num_ranks)]

    def _group_keys(self, ranks: IntArray) -> list[IntArray]:
        used: list[int] = np.unique(self.graph.collectives.group_set).tolist()
        sets = self._sets()
        return [self.places.of_groups(sets[row]).which[ranks][:, None] for row in used]

    def _message_keys(self, ranks: IntArray) -> list[IntArray]:
        used: list[int] = np.unique(self.graph.p2p.permutation).tolist()
        columns = (self.places.of_messages(self.graph.permutations[row]) for row in used if row >= 0)
        return [side[ranks] for sides in columns for side in sides]

    def _times(self, rank: int) -> FloatArray:
        """The times of all nodes as one rank has them."""
        times = np.full((3, len(self.graph)), np.nan)
        self._collectives(rank, times)
        self._messages(rank, times)
        times[:, takes_no_time(self.graph)] = np.nan
        return times

    def _collectives(self, rank: int, times: FloatArray) -> None:
        table, sets = self.graph.collectives, self._sets()
        key = np.stack([table.kind.astype(np.int64), table.group_set, self.scheme.row[table.node]])
        distinct, place = np.unique(key, axis=1, return_inverse=True)
        keys: list[list[int]] = distinct.T.tolist()
        for number, (kind, row, name) in enumerate(keys):
            placed = self.places.of_groups(sets[row])
            which = int(placed.which[rank])
            if which < 0:
                continue
            mine = np.flatnonzero(place.reshape(-1) == number)
            op = CollectiveKind(kind).name.lower()
            times[:, table.node[mine]] = self.network.collectives(
                op, self.scheme.names[name], placed.footprints[which], table.comm_bytes[mine], self.found
            )

    def _messages(self, rank: int, times: FloatArray) -> None:
        table = self.graph.p2p
        rows = np.flatnonzero(between_ranks(self.graph) & (table.permutation >= 0))
        receives = self.graph.kind[table.node] == int(NodeKind.RECV)
        key = np.stack([table.permutation.astype(np.int64), receives, self.scheme.row[table.node]])[:, rows]
        distinct, place = np.unique(key, axis=1, return_inverse=True)
        keys: list[list[int]] = distinct.T.tolist()
        for number, (row, incoming, name) in enumerate(keys):
            away = self.places.of_messages(self.graph.permutations[row])[incoming][rank]
            if not away.any():
                continue
            mine = rows[place.reshape(-1) == number]
            times[:, table.node[mine]] = self.network.messages(
                self.scheme.names[name], away.tolist(), table.comm_bytes[mine], self.found
            )
