"""Traces of ranks as ASTRA-sim reads them from Chakra: nodes in ascending order of their ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind, GroupSet, NodeKind, OpGraph, Permutation, Resource, Workload
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, UnsupportedError
from hespas.graph.passes import all_deps
from hespas.simulator.astra.configuration import SystemConfig
from hespas.simulator.astra.events import Slot
from hespas.simulator.astra.network import TAG_SPACE

__all__ = [
    "Action",
    "AstraTraces",
    "ClassTrace",
    "GroupNames",
    "NodeRoofline",
    "RankTrace",
    "StatedCosts",
    "Statistic",
    "TraceCollective",
    "TraceMessage",
]

GroupNames = Callable[[GroupSet, int], int]
"""Function that returns the number of a rank's process group in a group set; 0 for all ranks."""

_MICRO_NS, _LARGEST_NS = 1000, 1 << 62
_NS_PER_S, _FLOPS_PER_TERA, _BYTES_PER_GIGA = 1e9, 1e12, 1e9
_INVOLVED = "involved_dim"


class StatedCosts(NamedTuple):
    """Costs in the traces of a rank class: durations [ns] in whole microseconds, and operations and bytes for
    roofline mode. NaN if a trace does not have a cost.
    """

    duration_ns: FloatArray
    num_ops: FloatArray
    tensor_bytes: FloatArray


class Action(IntEnum):
    """Action that ASTRA-sim takes when it issues a node, such as a computation or a collective."""

    WAIT = 0
    """Takes a known time."""
    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3
    MEMORY = 4
    SKIP = 5
    """Ends at once. Its dependents are issued when another node ends."""


class Statistic(IntEnum):
    """Statistic of ASTRA-sim to which the time of a node is added."""

    CPU = 0
    GPU = 1
    COMMUNICATION = 2
    REMOTE_MEMORY = 3
    NONE = 4


class TraceCollective(NamedTuple):
    """Collective in a trace. ``row`` is the number of its group set in the graph (-1: all ranks)."""

    kind: CollectiveKind
    size: int
    row: int
    involved: tuple[bool, ...] | None


class TraceMessage(NamedTuple):
    """Send or receive in a trace. ``row`` is the number of its permutation in the graph."""

    row: int
    size: int
    tag: int


@dataclass(frozen=True, slots=True)
class NodeRoofline:
    """Roofline figures of one node. Utilizations are shares of the peaks, 0..1."""

    intensity: float
    compute_utilization: float
    memory_utilization: float
    is_compute_bound: bool


@dataclass(frozen=True, slots=True, eq=False)
class ClassTrace:
    """Trace of one rank class, as columns with an entry per node in ascending order of ids.

    ``node`` is the index of the node in ``graph``. ``waiting`` is its number of dependencies. The dependents
    of entry ``i`` are ``targets[bounds[i] : bounds[i + 1]]``. ``delay_ns`` is the time that the node itself
    takes. ``counted`` is True if this time is device computation.
    """

    rank_class: int
    graph: OpGraph
    node: list[int]
    slot: list[int]
    action: list[int]
    statistic: list[int]
    delay_ns: list[int]
    counted: list[bool]
    waiting: list[int]
    bounds: list[int]
    targets: list[int]
    collectives: dict[int, TraceCollective]
    messages: dict[int, TraceMessage]
    memory_bytes: dict[int, int]
    roofline: dict[int, NodeRoofline]

    def __len__(self) -> int:
        return len(self.node)

    @property
    def is_summed(self) -> bool:
        """Return True if ASTRA-sim computes the overlap of the rank: it has device computation and
        communication only.
        """
        return {Statistic.GPU, Statistic.COMMUNICATION}.issuperset(self.statistic)

    def group_rows(self) -> list[int]:
        """Return the numbers of the group sets that its collectives use, ascending."""
        return sorted({collective.row for collective in self.collectives.values() if collective.row >= 0})

    def label(self, position: int) -> str:
        """Return the id and the name of a node, for messages."""
        node = self.node[position]
        name = self.graph.node_name(node) or self.graph.op_name(node)
        return f"node {int(self.graph.id[node])} ({name})" if name else f"node {int(self.graph.id[node])}"


@dataclass(frozen=True, slots=True, eq=False)
class RankTrace:
    """Trace of one rank: its class, groups and message peers."""

    rank: int
    trace: ClassTrace
    groups: Mapping[int, tuple[int, tuple[int, ...]]]
    """Row of a group set -> the number of the rank's group, and its ranks in ring order."""
    peers: Mapping[int, int]
    """Position of a send or receive -> the other rank."""


@dataclass(frozen=True, slots=True, eq=False)
class AstraTraces:
    """Traces of a job, one per rank class that has ranks. ``group_number`` returns the number of a rank's
    process group.
    """

    workload: Workload
    classes: Mapping[int, ClassTrace]
    group_number: GroupNames

    @classmethod
    def of(
        cls,
        workload: Workload,
        system: SystemConfig,
        costs: Sequence[StatedCosts],
        group_number: GroupNames,
    ) -> AstraTraces:
        """Return the traces of a job; ``costs`` are the costs of each class.

        Raises ``UnsupportedError`` for nodes that ASTRA-sim does not run, ``FormatError`` for missing
        properties of a node.
        """
        traces = {
            index: _trace(workload.classes[index], index, system, costs[index])
            for index, count in enumerate(workload.class_sizes)
            if count
        }
        return cls(workload, traces, group_number)

    def of_ranks(self, ranks: Iterable[int]) -> list[RankTrace]:
        """Return the traces of some ranks.

        Raises ``FormatError`` for a rank that is in no group of a collective it runs, and for a message
        without a peer.
        """
        peers, members = _MessagePeers(), _GroupMembers(self.group_number)
        rank_class = self.workload.rank_class.tolist()
        traces: list[RankTrace] = []
        for rank in ranks:
            trace = self.classes[rank_class[rank]]
            groups = {row: members.of(trace.graph.group_sets[row], rank) for row in trace.group_rows()}
            others = {position: peers.of(trace, position, rank) for position in trace.messages}
            traces.append(RankTrace(rank, trace, groups, others))
        return traces


class _GroupMembers:
    """Cache of the members of groups."""

    def __init__(self, number: GroupNames) -> None:
        self._number = number
        self._groups: dict[tuple[GroupSet, int], tuple[int, tuple[int, ...]]] = {}

    def of(self, groups: GroupSet, rank: int) -> tuple[int, tuple[int, ...]]:
        """Return the number and the ranks of the group of ``rank``. Raises ``FormatError`` if the rank is in
        no group.
        """
        position = groups.group_of(rank)
        if position < 0:
            raise FormatError(
                f"rank {rank} uses a process group without being a member", code="ET019",
                hint="list the rank in the group, or remove the collective from its trace",
            )  # fmt: skip
        group = self._groups.get((groups, position))
        if group is None:
            listed = tuple(groups.members(position).tolist())
            group = self._groups[groups, position] = self._number(groups, rank), listed
        return group


class _MessagePeers:
    """Cache of the sources and targets of permutations."""

    def __init__(self) -> None:
        self._targets: dict[Permutation, dict[int, int]] = {}
        self._sources: dict[Permutation, dict[int, int]] = {}

    def of(self, trace: ClassTrace, position: int, rank: int) -> int:
        """Return the peer of ``rank`` in a message. Raises ``FormatError`` if the trace has none."""
        row = trace.messages[position].row
        sends = trace.action[position] == Action.SEND
        peer = -1
        if row >= 0:
            permutation = trace.graph.permutations[row]
            if permutation.pairs is None:
                peer = permutation.target_of(rank) if sends else permutation.source_of(rank)
            else:
                cache = self._targets if sends else self._sources
                peers = cache.get(permutation)
                if peers is None:
                    peers = (
                        dict(permutation.pairs)
                        if sends
                        else {target: source for source, target in permutation.pairs}
                    )
                    cache[permutation] = peers
                peer = peers.get(rank, -1)
        if peer < 0:
            end = "receiver" if sends else "sender"
            raise FormatError(
                f"rank {rank}: {trace.label(position)} states no {end} of its message", code="ET014",
                hint="state comm_src and comm_dst",
            )  # fmt: skip
        return peer


_ACTIONS = {
    NodeKind.COMPUTE: Action.WAIT,
    NodeKind.COLLECTIVE: Action.COLLECTIVE,
    NodeKind.SEND: Action.SEND,
    NodeKind.RECV: Action.RECEIVE,
    NodeKind.MEM_LOAD: Action.MEMORY,
    NodeKind.MEM_STORE: Action.MEMORY,
    NodeKind.METADATA: Action.SKIP,
    NodeKind.INVALID: Action.SKIP,
}
_COMMUNICATION = (Action.COLLECTIVE, Action.SEND, Action.RECEIVE)


def _trace(graph: OpGraph, index: int, system: SystemConfig, costs: StatedCosts) -> ClassTrace:
    order = np.argsort(graph.id, kind="stable")
    position = np.empty(len(graph), np.int64)
    position[order] = np.arange(len(graph))
    deps = all_deps(graph)
    dependents = deps.transpose(len(graph)).take(order)
    kinds = [NodeKind(code) for code in graph.kind[order].tolist()]
    if NodeKind.PERMUTE in kinds:
        node = int(graph.id[order[kinds.index(NodeKind.PERMUTE)]])
        raise UnsupportedError(
            f"node {node} is a permute, which ASTRA-sim's traces do not have",
            hint="write it as a send and a receive: hespas-convert does this",
        )
    if NodeKind.METADATA in kinds:
        node = int(graph.id[order[kinds.index(NodeKind.METADATA)]])
        raise UnsupportedError(
            f"node {node} of type METADATA: ASTRA-sim's statistics abort", code="ET009",
            hint="leave metadata nodes out of traces for ASTRA-sim",
        )  # fmt: skip
    on_cpu: list[bool] = (graph.resource[order] == int(Resource.HOST)).tolist()
    action = [int(_ACTIONS[kind]) for kind in kinds]
    micros = np.clip(
        np.nan_to_num(costs.duration_ns[order] / _MICRO_NS, nan=0.0), 0.0, _LARGEST_NS / _MICRO_NS
    )
    delays: list[int] = np.maximum(np.rint(micros).astype(np.int64) * _MICRO_NS, 1).tolist()
    trace = ClassTrace(
        rank_class=index,
        graph=graph,
        node=order.tolist(),
        slot=[_slot(node_action, cpu) for node_action, cpu in zip(action, on_cpu, strict=True)],
        action=action,
        statistic=[_statistic(node_action, cpu) for node_action, cpu in zip(action, on_cpu, strict=True)],
        delay_ns=delays,
        counted=[not cpu for cpu in on_cpu],
        waiting=deps.lengths[order].tolist(),
        bounds=dependents.offsets.tolist(),
        targets=position[dependents.values].tolist(),
        collectives={},
        messages={},
        memory_bytes={},
        roofline={},
    )
    if system.replays_only:
        trace.action[:] = [int(Action.WAIT)] * len(trace)
        return trace
    _describe(trace, position, on_cpu)
    if system.roofline:
        _apply_roofline(trace, system, costs, on_cpu)
    return trace


def _slot(action: int, on_cpu: bool) -> int:
    if on_cpu:
        return int(Slot.CPU)
    if action == Action.WAIT:
        return int(Slot.COMPUTE)
    return int(Slot.RECEIVE if action == Action.RECEIVE else Slot.COMMUNICATION)


def _statistic(action: int, on_cpu: bool) -> int:
    if action == Action.WAIT:
        return int(Statistic.CPU if on_cpu else Statistic.GPU)
    if action in _COMMUNICATION:
        return int(Statistic.COMMUNICATION)
    return int(Statistic.REMOTE_MEMORY if action == Action.MEMORY else Statistic.NONE)


def _describe(trace: ClassTrace, position: IntArray, on_cpu: list[bool]) -> None:
    """Fill in the properties of collectives, messages and memory nodes of a trace."""
    graph = trace.graph
    involved = _involved(graph)
    table = graph.collectives
    for node, kind, row, size in zip(
        table.node.tolist(), table.kind.tolist(), table.group_set.tolist(), table.comm_bytes.tolist(),
        strict=True,
    ):  # fmt: skip
        at = int(position[node])
        broadcast = kind == CollectiveKind.BROADCAST
        trace.collectives[at] = TraceCollective(
            CollectiveKind(kind), 0 if broadcast else _size(trace, at, size), row, involved.get(node)
        )
    p2p = graph.p2p
    for node, row, size, tag in zip(
        p2p.node.tolist(), p2p.permutation.tolist(), p2p.comm_bytes.tolist(), p2p.tag.tolist(), strict=True
    ):
        at = int(position[node])
        message_bytes = _size(trace, at, size)
        if not message_bytes:
            raise UnsupportedError(
                f"{trace.label(at)} is a message of 0 bytes: ASTRA-sim aborts", code="ET012",
                hint="state a comm_size of at least 1, or leave the message out of the trace",
            )  # fmt: skip
        if tag < 0:
            raise FormatError(
                f"{trace.label(at)} states no tag of its message: ASTRA-sim would stop", code="ET014",
                hint="state a comm_tag of at least 0",
            )  # fmt: skip
        trace.messages[at] = TraceMessage(row, message_bytes, tag % TAG_SPACE)
    for at, action in enumerate(trace.action):
        if action in _COMMUNICATION:
            if at not in trace.collectives and at not in trace.messages:
                raise FormatError(
                    f"{trace.label(at)} communicates without type and size", code="ET011",
                    hint="state comm_type and comm_size, or comm_src, comm_dst and comm_size",
                )  # fmt: skip
            if on_cpu[at]:
                raise UnsupportedError(
                    f"{trace.label(at)} communicates on the CPU: ASTRA-sim aborts", code="ET016",
                    hint="set is_cpu_op to false on communication",
                )  # fmt: skip
        elif action == Action.MEMORY:
            trace.memory_bytes[at] = _size(trace, at, float(graph.bytes_moved[trace.node[at]]))


def _size(trace: ClassTrace, at: int, size: float) -> int:
    if not 0 <= size < _LARGEST_NS:
        raise FormatError(
            f"{trace.label(at)} states no number of bytes", code="ET012",
            hint="state comm_size (tensor_size on a memory node)",
        )  # fmt: skip
    return int(size)


def _involved(graph: OpGraph) -> dict[int, tuple[bool, ...]]:
    """Return a map from nodes to the network dimensions in which their collectives run: one flag per
    dimension.

    Only nodes whose trace restricts the dimensions are included. The graph stores the flags as a serialized
    protobuf message.
    """
    key = graph.strings.find(_INVOLVED)
    if key < 0:
        return {}
    extra = graph.extra
    rows = np.flatnonzero((extra.key == key) & (extra.node >= 0))
    involved: dict[int, tuple[bool, ...]] = {}
    for row in rows.tolist():
        message = extra.value(row)
        # Field 1 of a protobuf message: booleans, packed (one tag, one length) or separate (a tag each).
        values = message[2:] if message[:1] == b"\x0a" else message[1::2]
        involved[int(extra.node[row])] = tuple(bool(byte) for byte in values)
    return involved


def _apply_roofline(trace: ClassTrace, system: SystemConfig, costs: StatedCosts, on_cpu: list[bool]) -> None:
    """Set the times of device computation by the roofline of the system, from operations and bytes."""
    bandwidth = (system.local_memory_gb_per_s or 0.0) * _BYTES_PER_GIGA
    peak = system.peak_tflops * _FLOPS_PER_TERA
    if not bandwidth or not peak:
        raise UnsupportedError(
            "roofline-enabled needs local-mem-bw and peak-perf", code="ET026", path=system.path,
            position="roofline-enabled", hint="state both, or replay recorded times",
        )  # fmt: skip
    flops: list[float] = costs.num_ops.tolist()
    moved: list[float] = costs.tensor_bytes.tolist()
    for at, node in enumerate(trace.node):
        if trace.action[at] != Action.WAIT or on_cpu[at]:
            continue
        if not (flops[node] >= 0 and moved[node] >= 0):
            raise FormatError(
                f"{trace.label(at)} states no num_ops or no tensor_size, which roofline mode needs",
                code="ET024", hint="state both, or remove roofline-enabled from system.json",
            )  # fmt: skip
        if not moved[node]:
            trace.action[at] = int(Action.SKIP)
        elif not flops[node]:
            raise UnsupportedError(
                f"{trace.label(at)} states 0 num_ops: in roofline mode of ASTRA-sim it never ends",
                code="ET024", hint="state at least 1, or remove roofline-enabled from system.json",
            )  # fmt: skip
        else:
            intensity = flops[node] / moved[node]
            rate = min(bandwidth * intensity, peak)
            time_ns = flops[node] / rate * _NS_PER_S
            trace.delay_ns[at] = int(min(time_ns, float(_LARGEST_NS)))
            trace.roofline[at] = NodeRoofline(
                intensity, rate / peak, rate / intensity / bandwidth, rate >= peak
            )
