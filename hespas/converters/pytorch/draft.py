"""Drafts of op graphs: nodes as columns, dependencies, and the communication of each node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hespas.converters.measured_ops.costs import EventCosts
from hespas.converters.measured_ops.waits import LaunchTimes, report_waits, with_waits
from hespas.converters.pytorch.communication import JobGroups, Members, TraceCommunication, payload_bytes
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

__all__ = ["GraphDraft", "NodeEdges", "TraceRank", "assembled", "chain", "flow_of"]


class NodeEdges(NamedTuple):
    """Dependencies between nodes, as columns of pairs: ``consumer`` waits for ``producer``."""

    consumer: IntArray
    producer: IntArray

    @classmethod
    def empty(cls) -> Self:
        """Return an empty table of dependencies."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def of(cls, pairs: Sequence[tuple[int, int]]) -> Self:
        """Return dependencies from pairs of consumer and producer."""
        consumer, producer = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls(consumer, producer)

    @classmethod
    def joined(cls, *parts: NodeEdges) -> Self:
        """Return the dependencies of all ``parts`` in one table."""
        return cls(
            np.concatenate([part.consumer for part in parts]),
            np.concatenate([part.producer for part in parts]),
        )

    def where(self, mask: BoolArray) -> NodeEdges:
        """Return the dependencies that a mask selects."""
        return NodeEdges(self.consumer[mask], self.producer[mask])

    def possible(self, queue: IntArray, start_ns: IntArray, end_ns: IntArray) -> BoolArray:
        """Return a mask of the dependencies that measured times do not contradict. Producer and consumer are
        on the same queue, or the producer ended before the consumer started.
        """
        same_queue: BoolArray = queue[self.consumer] == queue[self.producer]
        return same_queue | (end_ns[self.producer] <= start_ns[self.consumer])

    def distinct(self, nodes: int) -> NodeEdges:
        """Return each pair once, sorted by consumer and producer, without nodes that wait for themselves."""
        keys = np.unique((self.consumer * max(nodes, 1) + self.producer)[self.consumer != self.producer])
        return NodeEdges(keys // max(nodes, 1), keys % max(nodes, 1))

    def without(self, others: NodeEdges, nodes: int) -> NodeEdges:
        """Return the dependencies that are not in ``others``."""
        keys = self.consumer * max(nodes, 1) + self.producer
        return self.where(~np.isin(keys, others.consumer * max(nodes, 1) + others.producer))

    def latest(self, queue: IntArray) -> NodeEdges:
        """Return, for each consumer, only the dependency on the last producer of each queue.

        The other dependencies are redundant, because nodes of a queue run in order. Producers without a queue
        (-1) all remain.
        """
        queue_of = queue[self.producer]
        without_queue = queue_of < 0
        rows = np.flatnonzero(~without_queue)
        rows = rows[np.lexsort((self.producer[rows], queue_of[rows], self.consumer[rows]))]
        consumer, queues = self.consumer[rows], queue_of[rows]
        last = np.ones(len(rows), np.bool_)
        last[:-1] = (consumer[1:] != consumer[:-1]) | (queues[1:] != queues[:-1])
        selected = np.concatenate([np.flatnonzero(without_queue), rows[last]])
        return NodeEdges(self.consumer[selected], self.producer[selected])

    def csr(self, nodes: int) -> RaggedArray:
        """Return the producers of each consumer as ragged rows."""
        return RaggedArray.from_pairs(self.consumer, self.producer, nodes)


def chain(queue: IntArray) -> NodeEdges:
    """Return dependencies that make each node wait for the one before it in its queue; queue -1 means no
    queue.
    """
    rows = np.flatnonzero(queue >= 0)
    rows = rows[np.argsort(queue[rows], kind="stable")]
    same = queue[rows[1:]] == queue[rows[:-1]]
    return NodeEdges(rows[1:][same], rows[:-1][same])


class _StorageFlow(NamedTuple):
    """Dependencies that result from reads and writes of storages (memory of tensors).

    ``data``: a reader waits for the last writer. ``order``: a writer waits for earlier readers and writers of
    the same storage.
    """

    data: NodeEdges
    order: NodeEdges


def flow_of(reads: RaggedArray, writes: RaggedArray) -> _StorageFlow:
    """Return the dependencies between operations through storages (memory) that they read and write.
    Operations are in order of execution. O(reads + writes).
    """
    data, order = (array("q"), array("q")), (array("q"), array("q"))
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node, (read, written) in enumerate(zip(reads.to_lists(), writes.to_lists(), strict=True)):
        for storage in read:
            last_writer = writer.get(storage, -1)
            if last_writer >= 0:
                data[0].append(node)
                data[1].append(last_writer)
        for storage in written:
            before = readers.pop(storage, [])
            last_writer = writer.get(storage, -1)
            if last_writer >= 0:
                before.append(last_writer)
            order[0].extend([node] * len(before))
            order[1].extend(before)
            writer[storage] = node
        for storage in read:
            readers.setdefault(storage, []).append(node)
    return _StorageFlow(_edges(data), _edges(order))


def _edges(pairs: tuple[array[int], array[int]]) -> NodeEdges:
    return NodeEdges(np.array(pairs[0], np.int64), np.array(pairs[1], np.int64))


_MAX_LISTED = 1 << 23
"""Maximum number of members that all groups list one by one."""


@dataclass(frozen=True, slots=True)
class TraceRank:
    """Rank whose trace is converted, with the process groups of its job. ``path`` names the trace in
    diagnostics.
    """

    number: int
    groups: JobGroups
    path: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GraphDraft:
    """Nodes in order of execution, with their costs and dependencies, from which a graph is assembled.
    ``communications`` are by node.

    ``start_ns`` are starts relative to the first node (NaN: not measured; None: no node was measured).
    ``launches`` are the host calls that launched nodes. ``data`` and ``control`` are dependencies;
    :func:`assembled` drops and reports dependencies against the order of execution. All nodes of a ``queue``
    (-1: none) are chained by ``control``.
    """

    name: str
    strings: StringTable
    id: NDArray[np.uint64]
    name_id: NDArray[np.integer]
    op_id: NDArray[np.integer]
    framework_id: NDArray[np.integer]
    costs: EventCosts
    stream: IntArray
    queue: IntArray
    duration_ns: FloatArray
    data: NodeEdges
    control: NodeEdges
    communications: dict[int, TraceCommunication] = field(default_factory=dict[int, TraceCommunication])
    start_ns: FloatArray | None = None
    launches: LaunchTimes | None = None

    def __len__(self) -> int:
        return len(self.name_id)


def assembled(draft: GraphDraft, rank: TraceRank, diagnostics: Diagnostics) -> OpGraph:
    """Return the graph of a draft. If starts are known, waits are added
    (:mod:`hespas.converters.measured_ops.waits`).

    Diagnostics report groups and peers that the trace does not name, and dependencies against the order of
    time.
    """
    nodes = len(draft)
    backward = draft.data.producer >= draft.data.consumer
    findings = diagnostics.about(rank.path, "pytorch")
    count = int((backward & (draft.data.producer != draft.data.consumer)).sum())
    findings.info("backward-dependency", "data dependencies against the order of time are dropped", count)
    data = draft.data.where(~backward).distinct(nodes)
    control = draft.control.where(draft.control.producer < draft.control.consumer).distinct(nodes)
    control = control.latest(draft.queue).without(data, nodes)
    kind, costs = np.zeros(nodes, np.uint8), draft.costs
    op_class, tables = costs.op_class.copy(), _TraceCommunicationTables(rank)
    for node, comm in sorted(draft.communications.items()):
        kind[node] = comm.kind.node
        op_class[node] = OpClass.COLLECTIVE if comm.kind.node is NodeKind.COLLECTIVE else OpClass.P2P
        tables.add(node, comm)
    tables.report(findings)
    graph = OpGraph(
        name=draft.name,
        strings=draft.strings,
        types=costs.types,
        group_sets=tuple(tables.group_sets),
        permutations=tuple(tables.permutations),
        id=draft.id,
        name_id=draft.name_id.astype(np.int32, copy=False),
        op_id=draft.op_id.astype(np.int32, copy=False),
        kind=kind,
        op_class=op_class,
        resource=np.broadcast_to(np.uint8(Resource.DEVICE), (nodes,)),
        stream=np.where((draft.stream >= 0) & (draft.stream < 1 << 31), draft.stream, -1).astype(np.int32),
        region=np.broadcast_to(np.int32(-1), (nodes,)),
        rate_dtype=costs.rate_dtype,
        source_id=np.broadcast_to(np.int32(0), (nodes,)),
        framework_id=draft.framework_id.astype(np.int32, copy=False),
        flops=costs.flops,
        useful_flops=costs.useful_flops,
        transcendentals=costs.transcendentals,
        bytes_read=costs.bytes_read,
        bytes_written=costs.bytes_written,
        duration_ns=draft.duration_ns,
        executions=constant(1.0, nodes),
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
    report_waits(graph, findings)
    return graph


class _TraceCommunicationTables:
    """Communication of one rank, as rows of :class:`CollectiveTable` and :class:`P2pTable`."""

    def __init__(self, rank: TraceRank) -> None:
        self.rank = rank
        self.group_sets: dict[GroupSet, int] = {}
        self.permutations: dict[Permutation, int] = {}
        self.collectives: list[tuple[float, ...]] = []
        self.messages: list[tuple[float, ...]] = []
        self._no_group: dict[str, int] = {}
        self._rows: dict[Members, int] = {}
        self._listed = 0
        self._no_kind = self._no_peer = self._assumed = 0

    def add(self, node: int, comm: TraceCommunication) -> None:
        """Append one communication."""
        groups = self.rank.groups
        members = groups.find(comm.group, comm.ranks, comm.group_size)
        if members is None and comm.is_anonymous and not groups.members and groups.world > 1:
            members = ()
            self._assumed += 1
        if members is None and (comm.kind.node is NodeKind.COLLECTIVE or comm.peer < 0):
            self._no_group[comm.group] = self._no_group.get(comm.group, 0) + 1
        size = comm.group_size if members is None else len(members) or groups.world
        if comm.kind.node is NodeKind.COLLECTIVE:
            row = -1 if members is None else self._group_id(members)
            kind = comm.kind.collective
            if comm.ragged and kind is CollectiveKind.ALL_TO_ALL:
                kind = CollectiveKind.RAGGED_ALL_TO_ALL
            self._no_kind += kind is CollectiveKind.UNKNOWN
            payload = payload_bytes(comm, size)
            sizes = payload, comm.operand_bytes, comm.result_bytes
            self.collectives.append((node, kind, row, *sizes, -1, 0))  # no channel, no reduction
            return
        peer, world, own = comm.peer, self.rank.groups.world, self.rank.number
        if peer < 0 and members is not None:
            local = comm.local_peer
            peer = local if not members else members[local] if 0 <= local < len(members) else -1
        if not (0 <= peer < world and own < world):
            self._no_peer += 1
            permutation_row = -1
        else:
            pair = (own, peer) if comm.kind.node is NodeKind.SEND else (peer, own)
            permutation_row = self.permutations.setdefault(
                Permutation.from_pairs([pair], world), len(self.permutations)
            )
        permutation, payload = permutation_row, payload_bytes(comm, size)
        self.messages.append((node, permutation, payload, max(comm.tag, 0), False))

    def _group_id(self, members: Members) -> int:
        """Return the row of the group set of these members. Raises ``FormatError`` for too many members."""
        row = self._rows.get(members)
        if row is None:
            group_set = self.rank.groups.group_set(members)
            self._listed += len(members) if isinstance(group_set, ExplicitGroups) else 0
            if self._listed > _MAX_LISTED:
                raise FormatError(
                    f"the process groups have more than {_MAX_LISTED:,} members",
                    path=self.rank.path,
                    position=f"used process group {len(self._rows) + 1}",
                    hint="record the trace again; its groups may have been edited",
                )
            row = self._rows[members] = self.group_sets.setdefault(group_set, len(self.group_sets))
        return row

    def report(self, findings: Findings) -> None:
        """Report groups, kinds and peers that the trace does not state."""
        assumed = f"no process group is stated, so a group of all {self.rank.groups.world:,} ranks is assumed"
        findings.warning("group-assumed", assumed, self._assumed)
        names = ", ".join(sorted(self._no_group)[:4]) or "no name"
        message = f"communications of unlisted process groups ({names}): all ranks are assumed"
        findings.info("group-not-stated", message, sum(self._no_group.values()))
        message = "communication kernels whose operation is not recorded"
        findings.warning("unknown-collective", message, self._no_kind)
        findings.warning("peer-not-stated", "messages whose peer is not recorded", self._no_peer)
