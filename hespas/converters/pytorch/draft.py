"""A graph while it is put together: columns, dependencies, and what communicates with whom."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops import EventCosts, Launches, tell_waits, with_waits
from hespas.converters.pytorch.communication import Communication, Groups, Members, payload_bytes
from hespas.graph import (
    CollectiveKind,
    CollectiveTable,
    Diagnostics,
    ExplicitGroups,
    ExtraTable,
    Findings,
    GroupSet,
    NodeKind,
    OpClass,
    OpGraph,
    P2pTable,
    Permutation,
    RaggedArray,
    RegionTable,
    Resource,
    StringTable,
)
from hespas.graph.columns import BoolArray, FloatArray, IntArray, constant
from hespas.graph.errors import FormatError

__all__ = ["Draft", "Edges", "Rank", "assembled", "chain", "flow_of"]

# Who needs whose data: from the storages that operations read and write, in order of execution.


class Edges(NamedTuple):
    """Dependencies as pairs: ``consumer`` waits for ``producer``."""

    consumer: IntArray
    producer: IntArray

    @classmethod
    def empty(cls) -> Self:
        """No dependency."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Self:
        """Those of pairs of consumer and producer."""
        consumer, producer = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls(consumer, producer)

    @classmethod
    def joined(cls, *several: Edges) -> Self:
        """All of them."""
        return cls(
            np.concatenate([each.consumer for each in several]),
            np.concatenate([each.producer for each in several]),
        )

    def where(self, mask: BoolArray) -> Edges:
        """Those of the mask."""
        return Edges(self.consumer[mask], self.producer[mask])

    def possible(self, queue: IntArray, start_ns: IntArray, end_ns: IntArray) -> BoolArray:
        """Which are within a queue, or allowed by measured times."""
        found: BoolArray = queue[self.consumer] == queue[self.producer]
        return found | (end_ns[self.producer] <= start_ns[self.consumer])

    def distinct(self, nodes: int) -> Edges:
        """Each pair once, by consumer and producer; nobody waits for itself."""
        keys = np.unique((self.consumer * max(nodes, 1) + self.producer)[self.consumer != self.producer])
        return Edges(keys // max(nodes, 1), keys % max(nodes, 1))

    def without(self, others: Edges, nodes: int) -> Edges:
        """Those that are not among ``others``."""
        keys = self.consumer * max(nodes, 1) + self.producer
        return self.where(~np.isin(keys, others.consumer * max(nodes, 1) + others.producer))

    def latest(self, queue: IntArray) -> Edges:
        """Of several producers in one queue, the last: nodes of a queue follow each other; -1 is none."""
        place = queue[self.producer]
        alone = place < 0
        rows = np.flatnonzero(~alone)
        rows = rows[np.lexsort((self.producer[rows], place[rows], self.consumer[rows]))]
        consumer, where = self.consumer[rows], place[rows]
        last = np.ones(len(rows), np.bool_)
        last[:-1] = (consumer[1:] != consumer[:-1]) | (where[1:] != where[:-1])
        kept = np.concatenate([np.flatnonzero(alone), rows[last]])
        return Edges(self.consumer[kept], self.producer[kept])

    def csr(self, nodes: int) -> RaggedArray:
        """As ragged rows, by consumer."""
        return RaggedArray.from_pairs(self.consumer, self.producer, nodes)


def chain(queue: IntArray) -> Edges:
    """Each node waits for the one before it in its queue; queue -1 is none."""
    rows = np.flatnonzero(queue >= 0)
    rows = rows[np.argsort(queue[rows], kind="stable")]
    same = queue[rows[1:]] == queue[rows[:-1]]
    return Edges(rows[1:][same], rows[:-1][same])


class _Flow(NamedTuple):
    """``data``: a reader waits for the last writer. ``order``: a writer waits for earlier readers and writers
    of the same storage.
    """

    data: Edges
    order: Edges


def flow_of(reads: RaggedArray, writes: RaggedArray) -> _Flow:
    """Dependencies between operations that stand in order of execution. O(reads + writes)."""
    data, order = (array("q"), array("q")), (array("q"), array("q"))
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node, (read, written) in enumerate(zip(reads.to_lists(), writes.to_lists(), strict=True)):
        for storage in read:
            made = writer.get(storage, -1)
            if made >= 0:
                data[0].append(node)
                data[1].append(made)
        for storage in written:
            before = readers.pop(storage, [])
            made = writer.get(storage, -1)
            if made >= 0:
                before.append(made)
            order[0].extend([node] * len(before))
            order[1].extend(before)
            writer[storage] = node
        for storage in read:
            readers.setdefault(storage, []).append(node)
    return _Flow(_edges(data), _edges(order))


def _edges(pairs: tuple[array[int], array[int]]) -> Edges:
    return Edges(np.array(pairs[0], np.int64), np.array(pairs[1], np.int64))


_MOST_LISTED = 1 << 23
"""Members of all groups that have to be listed one by one."""


@dataclass(frozen=True, slots=True)
class Rank:
    """Which rank of which job a trace is of. ``path`` names it in findings."""

    number: int
    groups: Groups
    path: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Draft:
    """Nodes in order of execution, and what they cost. ``talks`` says which of them communicate.

    ``start_ns`` is when nodes started after the first of them (NaN: not measured; None: none was), and
    ``launches`` what the host did for them. ``data`` and ``control`` are dependencies; those that run against
    the order are dropped by :func:`assembled`, with a finding. Nodes of a ``queue`` (-1: none) all follow
    each other in ``control``.
    """

    name: str
    strings: StringTable
    id: NDArray[np.uint64]
    name_row: NDArray[np.integer]
    op_row: NDArray[np.integer]
    framework_row: NDArray[np.integer]
    costs: EventCosts
    stream: IntArray
    queue: IntArray
    duration_ns: FloatArray
    data: Edges
    control: Edges
    talks: dict[int, Communication] = field(default_factory=dict[int, Communication])
    start_ns: FloatArray | None = None
    launches: Launches | None = None

    def __len__(self) -> int:
        return len(self.name_row)


def assembled(draft: Draft, rank: Rank, diagnostics: Diagnostics) -> OpGraph:
    """The graph, with waits where starts are known (:mod:`hespas.converters.measured_ops.waits`). Findings:
    groups and peers that nobody names, dependencies against the order of time.
    """
    nodes = len(draft)
    backward = draft.data.producer >= draft.data.consumer
    findings = diagnostics.about(rank.path, "pytorch")
    count = int((backward & (draft.data.producer != draft.data.consumer)).sum())
    findings.info("backward-dependency", "data dependencies against the order of time are left out", count)
    data = draft.data.where(~backward).distinct(nodes)
    control = draft.control.where(draft.control.producer < draft.control.consumer).distinct(nodes)
    control = control.latest(draft.queue).without(data, nodes)
    kind, costs = np.zeros(nodes, np.uint8), draft.costs
    op_class, tables = costs.op_class.copy(), _Tables(rank)
    for node, talk in sorted(draft.talks.items()):
        kind[node] = talk.meaning.node
        op_class[node] = OpClass.COLLECTIVE if talk.meaning.node is NodeKind.COLLECTIVE else OpClass.P2P
        tables.add(node, talk)
    tables.report(findings)
    graph = OpGraph(
        name=draft.name,
        strings=draft.strings,
        types=costs.types,
        group_sets=tuple(tables.group_sets),
        permutations=tuple(tables.permutations),
        id=draft.id,
        name_row=draft.name_row.astype(np.int32, copy=False),
        op_row=draft.op_row.astype(np.int32, copy=False),
        kind=kind,
        op_class=op_class,
        resource=np.broadcast_to(np.uint8(Resource.DEVICE), (nodes,)),
        stream=np.where((draft.stream >= 0) & (draft.stream < 1 << 31), draft.stream, -1).astype(np.int32),
        region=np.broadcast_to(np.int32(-1), (nodes,)),
        rate_dtype=costs.rate_dtype,
        source_row=np.broadcast_to(np.int32(0), (nodes,)),
        framework_row=draft.framework_row.astype(np.int32, copy=False),
        flops=costs.flops,
        useful_flops=costs.useful_flops,
        transcendentals=costs.transcendentals,
        bytes_read=costs.bytes_read,
        bytes_written=costs.bytes_written,
        duration_ns=draft.duration_ns,
        multiplicity=constant(1.0, nodes),
        data_deps=data.csr(nodes),
        control_deps=control.csr(nodes),
        operands=costs.operands,
        results=costs.results,
        collectives=CollectiveTable.from_rows(tables.collectives),
        p2p=P2pTable.from_rows(tables.messages),
        contractions=costs.contractions,
        regions=RegionTable.empty(),
        extra=ExtraTable.empty(),
    )
    if draft.start_ns is None:
        return graph
    graph = with_waits(graph, draft.start_ns, draft.launches)
    tell_waits(graph, findings)
    return graph


class _Tables:
    """The communication of one rank, as rows of :class:`CollectiveTable` and :class:`P2pTable`."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.group_sets: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}
        self.collectives: list[tuple[float, ...]] = []
        self.messages: list[tuple[float, ...]] = []
        self._no_group: dict[str, int] = {}
        self._rows: dict[Members, int] = {}
        self._listed = 0
        self._no_kind = self._no_peer = self._assumed = 0

    def add(self, node: int, talk: Communication) -> None:
        """Take one communication."""
        groups = self.rank.groups
        members = groups.find(talk.group, talk.ranks, talk.group_size)
        if members is None and talk.is_anonymous and not groups.members and groups.world > 1:
            members = ()
            self._assumed += 1
        if members is None and (talk.meaning.node is NodeKind.COLLECTIVE or talk.peer < 0):
            self._no_group[talk.group] = self._no_group.get(talk.group, 0) + 1
        size = talk.group_size if members is None else len(members) or groups.world
        if talk.meaning.node is NodeKind.COLLECTIVE:
            row = -1 if members is None else self._group_row(members)
            kind = talk.meaning.collective
            if talk.ragged and kind is CollectiveKind.ALL_TO_ALL:
                kind = CollectiveKind.RAGGED_ALL_TO_ALL
            self._no_kind += kind is CollectiveKind.UNKNOWN
            payload = payload_bytes(talk, size)
            sizes = payload, talk.operand_bytes, talk.result_bytes
            self.collectives.append((node, kind, row, *sizes, -1, 0))  # no channel, no reduction
            return
        way, payload = self._way(talk, members), payload_bytes(talk, size)
        self.messages.append((node, way, payload, max(talk.tag, 0), False))

    def _group_row(self, members: Members) -> int:
        """The row of the group set of these members. Raises ``FormatError`` for far too many."""
        row = self._rows.get(members)
        if row is None:
            found = self.rank.groups.group_set(members)
            self._listed += len(members) if isinstance(found, ExplicitGroups) else 0
            if self._listed > _MOST_LISTED:
                raise FormatError(
                    f"its process groups have more than {_MOST_LISTED:,} members",
                    path=self.rank.path,
                    position=f"process group {len(self._rows) + 1} of those that are used",
                    hint="was the trace edited? record it again",
                )
            row = self._rows[members] = self.group_sets.setdefault(found, len(self.group_sets))
        return row

    def _way(self, talk: Communication, members: Members | None) -> int:
        """The permutation of a message, -1 where the peer is not known."""
        peer, world, own = talk.peer, self.rank.groups.world, self.rank.number
        if peer < 0 and members is not None:
            local = talk.local_peer
            peer = local if not members else members[local] if 0 <= local < len(members) else -1
        if not (0 <= peer < world and own < world):
            self._no_peer += 1
            return -1
        pair = (own, peer) if talk.meaning.node is NodeKind.SEND else (peer, own)
        return self.permutations.setdefault(Permutation.from_pairs([pair], world), len(self.permutations))

    def report(self, findings: Findings) -> None:
        """Say what nobody stated."""
        everybody = f"taken for all {self.rank.groups.world:,} ranks"
        assumed = f"no process group is stated, here or in a list: {everybody}"
        findings.warning("group-assumed", assumed, self._assumed)
        names = ", ".join(sorted(self._no_group)[:4]) or "no name"
        message = f"communications of process groups that no list holds ({names}): taken for all ranks"
        findings.info("group-not-stated", message, sum(self._no_group.values()))
        message = "communication kernels whose operation is not recorded"
        findings.warning("unknown-collective", message, self._no_kind)
        findings.warning("peer-not-stated", "messages whose peer is not recorded", self._no_peer)
