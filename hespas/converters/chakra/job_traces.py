"""A workload on its way out: which ranks run which nodes, in batches that share an encoded trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.expansion import ClassWriter
from hespas.converters.chakra.lowering import (
    Expanded,
    expand,
    host_transfers,
    measured_work,
    report_refused,
)
from hespas.converters.chakra.own_metadata import texts_of_class, with_metadata
from hespas.converters.chakra.rank_values import RankValues, Ways, used_slots
from hespas.converters.chakra.wire import Bools, Longs
from hespas.graph import Diagnostics, NodeKind, OpGraph, Permutation, Workload
from hespas.graph.diagnostics import Severity

__all__ = ["Account", "Batch", "Change", "JobTraces", "Runs"]

Change = Callable[[OpGraph], OpGraph]
"""What is done to a graph before it is encoded."""

_RANKS_AT_ONCE = 4096
"""Ranks of a class that are looked at together: bounds memory."""


class Runs(NamedTuple):
    """Ranks of one class that run the same nodes; how many nodes of the class they do not run, and how long
    the estimate says those take.
    """

    of_class: int
    pattern: bytes
    writer: ClassWriter
    idle: int
    idle_ns: float
    is_empty: bool


class Batch(NamedTuple):
    """Ranks that run the same nodes, ascending, whose values take the same bytes: one template is theirs."""

    runs: Runs
    ranks: Longs
    values: RankValues
    widths: tuple[int, ...]


_FINDINGS = {
    "chakra.idle": "messages and collectives are left out where a rank has no part in them "
    "(ranks: {ranks:,}; time they were given there: {idle_us:,.3f} us)",
    "chakra.empty-rank": "ranks have nothing to do; each is written as one node 'idle' of no time",
    "chakra.sub-microsecond": "computations share a microsecond with their neighbours and state 0 in "
    "duration_micros, of which ASTRA-sim makes 1 ns; duration_nanos holds the exact time",
    "chakra.named": "nodes have neither name nor anything else and are named: others read an empty frame as "
    "the end",
    "chakra.longest-time": "times of 146 years and more are rounded to us, or to the longest that a trace "
    "states",
}
"""What the ranks written may not have, or have only roughly."""
_WARNINGS = frozenset({"chakra.empty-rank", "chakra.longest-time"})


@dataclass(slots=True)
class Account:
    """What the ranks written so far do not have, or have only roughly; sums over ranks."""

    ranks: int = 0
    idle_ns: float = 0.0
    found: Counter[str] = field(default_factory=Counter[str])

    def add(self, runs: Runs, ranks: int) -> None:
        """Count ranks that run the same, once one of them is encoded."""
        self.ranks += ranks * (runs.idle > 0)
        self.idle_ns += ranks * runs.idle_ns
        of_one = {**runs.writer.found, "chakra.idle": runs.idle, "chakra.empty-rank": int(runs.is_empty)}
        self.found.update({code: count * ranks for code, count in of_one.items() if count})

    def join(self, other: Account) -> Self:
        """Count what another one has."""
        self.ranks += other.ranks
        self.idle_ns += other.idle_ns
        self.found.update(other.found)
        return self

    def report(self, name: str, diagnostics: Diagnostics) -> None:
        """Say it."""
        for code, text in _FINDINGS.items():
            severity = Severity.WARNING if code in _WARNINGS else Severity.INFO
            message = text.format(ranks=self.ranks, idle_us=self.idle_ns / 1e3)
            diagnostics.add(code, severity, name, message, count=self.found[code])


@dataclass(slots=True, eq=False)
class JobTraces:
    """Graphs as ranks run them, after ``change``, and where each permutation leads. The ``workload`` has no
    loops (see :func:`hespas.converters.chakra.lowering.unrolled`).
    """

    workload: Workload
    groups: GroupIds
    diagnostics: Diagnostics
    change: Change
    _expanded: dict[int, Expanded] = field(default_factory=dict[int, Expanded])
    _runs: dict[tuple[int, bytes], Runs] = field(default_factory=dict[tuple[int, bytes], Runs])
    _ways: dict[Permutation, Ways] = field(default_factory=dict[Permutation, Ways])

    def batches(self, ranks: Longs) -> Iterator[Batch]:
        """The batches of ranks, which are ascending, class by class. O(classes x nodes + ranks x slots)."""
        for runs, members in self.alike(ranks):
            values = RankValues.of(runs.writer.graph, members, self.groups, self._ways)
            for widths, rows in values.alike():
                yield Batch(runs, members[rows], values.take(rows), widths)

    def alike(self, ranks: Longs) -> Iterator[tuple[Runs, Longs]]:
        """Ranks by what they run, class by class, some thousand at a time."""
        class_of = self.workload.rank_class[ranks]
        for number in np.unique(class_of).tolist():
            mine = ranks[class_of == number]
            for start in range(0, len(mine), _RANKS_AT_ONCE):
                some = mine[start : start + _RANKS_AT_ONCE]
                patterns, first, which = np.unique(
                    self._idle_slots(number, some), axis=0, return_index=True, return_inverse=True
                )
                for place in np.argsort(first, kind="stable").tolist():
                    runs = self._runs_of(number, patterns[place])
                    yield runs, some[which.reshape(-1) == place]
            self._runs.clear()  # with the templates of a class: bounds memory

    def least_ranks(self, rank: int, groups: Mapping[int, Sequence[int]]) -> int:
        """How many ranks a reader of one rank's file takes its job to have, where nobody says more."""
        graph = self.graph(int(self.workload.rank_class[rank])).graph
        table = graph.p2p
        addressed = table.permutation >= 0
        sends = graph.kind[table.node[addressed]] == NodeKind.SEND
        ways: list[int] = table.permutation[addressed].tolist()
        used = set(zip(ways, sends.tolist(), strict=True))
        alone = np.array([rank])
        peers = [int(self._way(graph.permutations[way]).peers(alone, sends=sent)[0]) for way, sent in used]
        return 1 + max([rank, *peers, *(max(members) for members in groups.values())])

    def graph(self, number: int) -> Expanded:
        """Return a class without permutes; the workload has no loops."""
        if number not in self._expanded:
            flat = measured_work(self.workload.classes[number], self.diagnostics)
            expanded = expand(host_transfers(flat, self.diagnostics))
            report_refused(expanded.graph, self.diagnostics)
            message = (
                "permutes are written as SEND and RECV; their time is that of the SEND, "
                "on a rank that only receives of the RECV"
            )
            self.diagnostics.info("chakra.permute", flat.name, message, count=len(expanded.halves))
            self._expanded[number] = expanded
        return self._expanded[number]

    def _way(self, permutation: Permutation) -> Ways:
        return self._ways.setdefault(permutation, Ways(permutation))

    def _idle_slots(self, number: int, ranks: Longs) -> Bools:
        """Which group sets and directions of permutations have nothing to do on ranks, shape (ranks, slots);
        none that no node has. A permute to itself is a local copy, while a message to itself is a fault that
        is not hidden.
        """
        expanded = self.graph(number)
        graph, used = expanded.graph, used_slots(expanded.graph)
        idle = np.zeros((len(ranks), len(graph.group_sets) + 2 * len(graph.permutations)), np.bool_)
        for slot in np.flatnonzero(used.groups).tolist():
            idle[:, slot] = self.groups.are_idle(graph.group_sets[slot], ranks)
        for place in np.flatnonzero(used.ways).tolist():
            way = self._way(graph.permutations[place])
            for side, sends in enumerate((True, False)):
                peers = way.peers(ranks, sends=sends)
                to_itself = (peers == ranks) & bool(len(expanded.halves))
                idle[:, len(graph.group_sets) + 2 * place + side] = (peers < 0) | to_itself
        return idle

    def _runs_of(self, number: int, pattern: Bools) -> Runs:
        """What ranks of a class do under a pattern. A permute is left out where both its halves are."""
        key = (number, pattern.tobytes())
        if key in self._runs:
            return self._runs[key]
        expanded = self.graph(number)
        idle = _idle_nodes(expanded.graph, pattern)
        graph = expanded.for_rank(idle)
        gone = idle.copy()
        gone[expanded.halves] &= idle[expanded.halves + 1]
        gone[expanded.halves + 1] = False
        self._runs[key] = Runs(
            *key,
            ClassWriter(self.change(with_metadata(graph, {}, texts_of_class(self.workload, number, graph)))),
            int(gone.sum()),
            float(np.nansum(expanded.graph.duration_ns[gone])),
            is_empty=bool(idle.all()),
        )
        return self._runs[key]


def _idle_nodes(graph: OpGraph, pattern: Bools) -> Bools:
    """The nodes that do nothing under a pattern."""
    flags = pattern if len(pattern) else np.zeros(1, np.bool_)
    idle = np.zeros(len(graph), np.bool_)
    table = graph.collectives
    grouped = table.group_set >= 0
    idle[table.node[grouped]] = flags[table.group_set[grouped]]
    addressed = graph.p2p.permutation >= 0
    nodes = graph.p2p.node[addressed]
    receives = (graph.kind[nodes] == NodeKind.RECV).astype(np.int64)
    idle[nodes] = flags[len(graph.group_sets) + 2 * graph.p2p.permutation[addressed] + receives]
    return idle
