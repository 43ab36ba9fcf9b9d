"""Graphs of a workload as ranks write them to traces, in batches of ranks whose traces differ only in a few
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.expansion import ClassWriter, PeerLookup, RankValues, used_slots
from hespas.converters.chakra.forms import TraceForm
from hespas.converters.chakra.losses import report_refused
from hespas.converters.chakra.lowering import ExpandedGraph, expand, host_transfers, measured_work
from hespas.converters.chakra.own_metadata import texts_of_class, with_metadata
from hespas.converters.chakra.wire import Bools, Longs, equal_rows
from hespas.graph import Diagnostics, NodeKind, OpGraph, Permutation, Workload
from hespas.graph.diagnostics import Severity

__all__ = ["Change", "RankBatch", "RankTraces", "RankVariant", "TraceAccount"]

Change = Callable[[OpGraph], OpGraph]
"""Change of a graph before it is encoded."""

_RANKS_AT_ONCE = 4096
"""Ranks of a class that are processed together: bounds memory."""


class RankVariant(NamedTuple):
    """Ranks of one class that run the same nodes. Nodes of the class that have no work on these ranks are
    omitted: ``idle`` is their number, and ``idle_ns`` their estimated time.
    """

    of_class: int
    pattern: bytes
    writer: ClassWriter
    idle: int
    idle_ns: float
    is_empty: bool


class RankBatch(NamedTuple):
    """Ascending ranks that run the same nodes of a class, and whose rank-dependent values have equal encoded
    widths. Their traces share one template (:class:`.expansion.TraceTemplate`).
    """

    runs: RankVariant
    ranks: Longs
    values: RankValues
    widths: tuple[int, ...]


_FINDINGS = {
    "chakra.idle": "messages and collectives are omitted on ranks that do not take part "
    "(ranks: {ranks:,}; their time there: {idle_us:,.3f} us)",
    "chakra.empty-rank": "ranks have no work; each is written as one node 'idle' without duration",
    "chakra.sub-microsecond": "computations share a microsecond with their neighbours and state 0 in "
    "duration_micros, which ASTRA-sim reads as 1 ns; duration_nanos holds the exact time",
    "chakra.named": "nodes without any field get a name: other readers interpret an empty frame as "
    "the end of the file",
    "chakra.longest-time": "times of 146 years and more are rounded to us, or to the longest time that a "
    "trace states",
}
"""Messages about parts of a workload that the written ranks lack or hold only approximately, by code."""
_WARNINGS = frozenset({"chakra.empty-rank", "chakra.longest-time", "chakra-json.nan-payload"})


@dataclass(slots=True)
class TraceAccount:
    """Losses in the written traces, summed over ranks. ``idle_ns`` is the estimated time of omitted nodes.
    ``counts`` maps a diagnostic code to the number of values that the traces lack or hold only approximately.
    """

    ranks: int = 0
    idle_ns: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])

    def add(self, runs: RankVariant, ranks: int) -> None:
        """Add the losses of ``ranks`` ranks that run the same nodes. Call it after one of them was
        encoded.
        """
        self.ranks += ranks * (runs.idle > 0)
        self.idle_ns += ranks * runs.idle_ns
        of_one = {**runs.writer.inexact, "chakra.idle": runs.idle, "chakra.empty-rank": int(runs.is_empty)}
        self.counts.update({code: count * ranks for code, count in of_one.items() if count})

    def join(self, other: TraceAccount) -> Self:
        """Add the losses in another account."""
        self.ranks += other.ranks
        self.idle_ns += other.idle_ns
        self.counts.update(other.counts)
        return self

    def report(self, name: str, diagnostics: Diagnostics, form: TraceForm) -> None:
        """Report the losses as diagnostics, and the properties that other readers of the form misread."""
        for code, text in (*_FINDINGS.items(), *form.findings):
            severity = Severity.WARNING if code in _WARNINGS else Severity.INFO
            message = text.format(ranks=self.ranks, idle_us=self.idle_ns / 1e3)
            diagnostics.add(code, severity, name, message, count=self.counts[code])


@dataclass(slots=True, eq=False)
class RankTraces:
    """Graphs of the ranks of a workload, made on request. The function ``change`` is applied to each graph
    before it is written. The ``workload`` has no loops (see
    :func:`hespas.converters.chakra.lowering.unrolled`).
    """

    workload: Workload
    groups: GroupIds
    diagnostics: Diagnostics
    change: Change
    _expanded: dict[int, ExpandedGraph] = field(default_factory=dict[int, ExpandedGraph])
    _runs: dict[tuple[int, bytes], RankVariant] = field(default_factory=dict[tuple[int, bytes], RankVariant])
    _ways: dict[Permutation, PeerLookup] = field(default_factory=dict[Permutation, PeerLookup])

    def batches(self, ranks: Longs) -> Iterator[RankBatch]:
        """Yield the batches of ranks that share a template, class by class, ranks ascending. O(classes x
        nodes + ranks x slots).
        """
        for runs, members in self.rank_variants(ranks):
            values = RankValues.of(runs.writer.graph, members, self.groups, self._ways)
            for widths, rows in values.groups_by_widths():
                yield RankBatch(runs, members[rows], values.take(rows), widths)

    def rank_variants(self, ranks: Longs) -> Iterator[tuple[RankVariant, Longs]]:
        """Yield ranks grouped by class and by the nodes that they run, at most :data:`_RANKS_AT_ONCE` per
        group.
        """
        class_of = self.workload.rank_class[ranks]
        for number in np.unique(class_of).tolist():
            mine = ranks[class_of == number]
            for start in range(0, len(mine), _RANKS_AT_ONCE):
                some = mine[start : start + _RANKS_AT_ONCE]
                for pattern, rows in equal_rows(self._idle_slots(number, some)):
                    yield self._runs_of(number, pattern), some[rows]
            self._runs.clear()  # with the templates of a class: bounds memory

    def least_ranks(self, rank: int, groups: Mapping[int, Sequence[int]]) -> int:
        """Return the number of ranks that a reader infers from one rank's file alone: one more than the
        highest rank among the rank itself, its peers and its ``groups``.
        """
        graph = self.graph(int(self.workload.rank_class[rank])).graph
        table = graph.p2p
        addressed = table.permutation >= 0
        sends = graph.kind[table.node[addressed]] == NodeKind.SEND
        ways: list[int] = table.permutation[addressed].tolist()
        used = set(zip(ways, sends.tolist(), strict=True))
        alone = np.array([rank])
        peers = [int(self._way(graph.permutations[way]).peers(alone, sends=sent)[0]) for way, sent in used]
        return 1 + max([rank, *peers, *(max(members) for members in groups.values())])

    def graph(self, number: int) -> ExpandedGraph:
        """Return the graph of a class with each permute split into a SEND and a RECV."""
        if number not in self._expanded:
            flat = measured_work(self.workload.classes[number], self.diagnostics)
            expanded = expand(host_transfers(flat, self.diagnostics))
            report_refused(expanded.graph, self.diagnostics)
            message = (
                "permutes are written as SEND and RECV; the SEND has their time, "
                "or the RECV on ranks that only receive"
            )
            self.diagnostics.info("chakra.permute", flat.name, message, count=len(expanded.halves))
            self._expanded[number] = expanded
        return self._expanded[number]

    def _way(self, permutation: Permutation) -> PeerLookup:
        return self._ways.setdefault(permutation, PeerLookup(permutation))

    def _idle_slots(self, number: int, ranks: Longs) -> Bools:
        """Return a mask of shape (ranks, slots). A slot is a group set, or one direction (send, receive) of a
        permutation. An entry is True if the rank has no work in the slot. A permute of a rank to itself
        counts as no work, because it is a local copy. A SEND or RECV to itself is a fault and is written.
        """
        expanded = self.graph(number)
        graph, used = expanded.graph, used_slots(expanded.graph)
        idle = np.zeros((len(ranks), len(graph.group_sets) + 2 * len(graph.permutations)), np.bool_)
        for slot in np.flatnonzero(used.groups).tolist():
            idle[:, slot] = self.groups.are_idle(graph.group_sets[slot], ranks)
        for row in np.flatnonzero(used.ways).tolist():
            way = self._way(graph.permutations[row])
            for side, sends in enumerate((True, False)):
                peers = way.peers(ranks, sends=sends)
                to_itself = (peers == ranks) & bool(len(expanded.halves))
                idle[:, len(graph.group_sets) + 2 * row + side] = (peers < 0) | to_itself
        return idle

    def _runs_of(self, number: int, pattern: bytes) -> RankVariant:
        """Return the variant of class ``number`` for a pattern of idle slots (see :meth:`_idle_slots`). A
        permute is omitted if both of its directions are idle.
        """
        key = (number, pattern)
        if key in self._runs:
            return self._runs[key]
        expanded = self.graph(number)
        flags = np.frombuffer(pattern or b"\0", np.bool_)
        idle = np.zeros(len(expanded.graph), np.bool_)
        table = expanded.graph.collectives
        grouped = table.group_set >= 0
        idle[table.node[grouped]] = flags[table.group_set[grouped]]
        addressed = expanded.graph.p2p.permutation >= 0
        nodes = expanded.graph.p2p.node[addressed]
        receives = (expanded.graph.kind[nodes] == NodeKind.RECV).astype(np.int64)
        idle[nodes] = flags[
            len(expanded.graph.group_sets) + 2 * expanded.graph.p2p.permutation[addressed] + receives
        ]
        graph = expanded.for_rank(idle)
        gone = idle.copy()
        gone[expanded.halves] &= idle[expanded.halves + 1]
        gone[expanded.halves + 1] = False
        self._runs[key] = RankVariant(
            *key,
            ClassWriter(self.change(with_metadata(graph, {}, texts_of_class(self.workload, number, graph)))),
            int(gone.sum()),
            float(np.nansum(expanded.graph.duration_ns[gone])),
            is_empty=bool(idle.all()),
        )
        return self._runs[key]
