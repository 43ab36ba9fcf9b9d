"""What each rank runs, as ASTRA-sim takes it from a Chakra trace: nodes in ascending order of their ids."""

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
from hespas.simulator.astra.mailbox import TAG_SPACE

__all__ = [
    "Action",
    "Collective",
    "GroupNames",
    "JobTraces",
    "Message",
    "RankTrace",
    "Roofline",
    "Slot",
    "StatedCosts",
    "Statistic",
    "Trace",
]

GroupNames = Callable[[GroupSet, int], int]
"""The number of the process group that a rank belongs to in a group set; 0 for all ranks."""

_MICRO_NS, _LARGEST_NS = 1000, 1 << 62
_NS_PER_S, _FLOPS_PER_TERA, _BYTES_PER_GIGA = 1e9, 1e12, 1e9
_INVOLVED = "involved_dim"


class StatedCosts(NamedTuple):
    """Costs that the traces of a rank class state: durations in whole microseconds [ns], and the operations
    and bytes of roofline mode. NaN where a trace states none.
    """

    duration_ns: FloatArray
    num_ops: FloatArray
    tensor_bytes: FloatArray


class Slot(IntEnum):
    """What a node occupies: a rank runs one node of each of the first three at a time."""

    CPU = 0
    COMPUTE = 1
    COMMUNICATION = 2
    RECEIVE = 3
    """Occupies nothing."""


class Action(IntEnum):
    """What happens when a node is issued."""

    WAIT = 0
    """It takes a time that is known."""
    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3
    MEMORY = 4
    SKIP = 5
    """It ends at once. Its dependents are issued when another node ends."""


class Statistic(IntEnum):
    """The class whose time a node counts to."""

    CPU = 0
    GPU = 1
    COMMUNICATION = 2
    REMOTE_MEMORY = 3
    NONE = 4


class Collective(NamedTuple):
    """A collective as stated; ``row`` is the graph's group set (-1: all ranks)."""

    kind: CollectiveKind
    size: int
    row: int
    involved: tuple[bool, ...] | None


class Message(NamedTuple):
    """A send or receive as stated; ``row`` is the graph's permutation."""

    row: int
    size: int
    tag: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the roofline says of one node: utilisations are of the peaks, 0..1."""

    intensity: float
    compute_utilization: float
    memory_utilization: float
    is_compute_bound: bool


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One rank class. Columns have an entry per node, in ascending order of ids; ``node`` is its number in
    the graph. ``waiting`` counts dependencies; ``bounds`` and ``targets`` list dependents.

    ``delay_ns`` is what a node takes by itself; ``counted`` are the nodes whose delay is computation of the
    device.
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
    collectives: dict[int, Collective]
    messages: dict[int, Message]
    memory_bytes: dict[int, int]
    roofline: dict[int, Roofline]

    def __len__(self) -> int:
        return len(self.node)

    @property
    def is_summed(self) -> bool:
        """True where ASTRA-sim sums up a rank's times: computation and communication of the device only."""
        return {Statistic.GPU, Statistic.COMMUNICATION}.issuperset(self.statistic)

    def group_rows(self) -> list[int]:
        """Group sets that its collectives use, ascending."""
        return sorted({each.row for each in self.collectives.values() if each.row >= 0})

    def label(self, place: int) -> str:
        """The node for people: its id, and its name."""
        node = self.node[place]
        name = self.graph.node_name(node) or self.graph.op_name(node)
        return f"node {int(self.graph.id[node])} ({name})" if name else f"node {int(self.graph.id[node])}"


@dataclass(frozen=True, slots=True, eq=False)
class RankTrace:
    """One rank: its class, and with whom it talks."""

    rank: int
    trace: Trace
    groups: Mapping[int, tuple[int, tuple[int, ...]]]
    """Row of a group set -> the number of the rank's group, and its ranks in ring order."""
    peers: Mapping[int, int]
    """Place of a send or receive -> the other rank."""


@dataclass(frozen=True, slots=True, eq=False)
class JobTraces:
    """The traces of a job: one per rank class that has ranks. ``group_number`` tells the number of a rank's
    process group.
    """

    workload: Workload
    classes: Mapping[int, Trace]
    group_number: GroupNames

    @classmethod
    def of(
        cls,
        workload: Workload,
        system: SystemConfig,
        stated: Sequence[StatedCosts],
        group_number: GroupNames,
    ) -> JobTraces:
        """Return the traces of a job; ``stated`` are the costs of each class.

        Raises ``UnsupportedError`` for nodes that ASTRA-sim does not run, ``FormatError`` for what a node
        must state and does not.
        """
        traces = {
            index: _trace(workload.classes[index], index, system, stated[index])
            for index, count in enumerate(workload.class_sizes)
            if count
        }
        return cls(workload, traces, group_number)

    def of_ranks(self, ranks: Iterable[int]) -> list[RankTrace]:
        """The traces of some ranks. Raises ``FormatError`` for a rank that is no member of a group it uses,
        or whose message has no other end.
        """
        peers, members = _Peers(), _Members(self.group_number)
        rank_class = self.workload.rank_class.tolist()
        found: list[RankTrace] = []
        for rank in ranks:
            trace = self.classes[rank_class[rank]]
            groups = {row: members.of(trace.graph.group_sets[row], rank) for row in trace.group_rows()}
            others = {place: peers.of(trace, place, rank) for place in trace.messages}
            found.append(RankTrace(rank, trace, groups, others))
        return found


class _Members:
    """Groups of ranks, each listed once."""

    def __init__(self, number: GroupNames) -> None:
        self._number = number
        self._found: dict[tuple[GroupSet, int], tuple[int, tuple[int, ...]]] = {}

    def of(self, groups: GroupSet, rank: int) -> tuple[int, tuple[int, ...]]:
        """The number and the ranks of a rank's group. Raises ``FormatError`` where it has none."""
        place = groups.group_of(rank)
        if place < 0:
            raise FormatError(
                f"rank {rank} uses a process group that it is no member of", code="ET019",
                hint="list the rank in the group, or take the collective out of its trace",
            )  # fmt: skip
        found = self._found.get((groups, place))
        if found is None:
            listed = tuple(groups.members(place).tolist())
            found = self._found[groups, place] = self._number(groups, rank), listed
        return found


class _Peers:
    """Sources and targets of permutations, each looked up once."""

    def __init__(self) -> None:
        self._targets: dict[Permutation, dict[int, int]] = {}
        self._sources: dict[Permutation, dict[int, int]] = {}

    def of(self, trace: Trace, place: int, rank: int) -> int:
        """The other end of a message. Raises ``FormatError`` where nobody says."""
        row = trace.messages[place].row
        sends = trace.action[place] == Action.SEND
        peer = -1
        if row >= 0:
            permutation = trace.graph.permutations[row]
            if permutation.pairs is None:
                peer = permutation.target_of(rank) if sends else permutation.source_of(rank)
            else:
                peer = self._listed(permutation, permutation.pairs, sends=sends).get(rank, -1)
        if peer < 0:
            end = "receiver" if sends else "sender"
            raise FormatError(
                f"rank {rank}: {trace.label(place)} states no {end} of its message", code="ET014",
                hint="state comm_src and comm_dst",
            )  # fmt: skip
        return peer

    def _listed(
        self, permutation: Permutation, pairs: Sequence[tuple[int, int]], *, sends: bool
    ) -> dict[int, int]:
        known = self._targets if sends else self._sources
        found = known.get(permutation)
        if found is None:
            found = dict(pairs) if sends else {target: source for source, target in pairs}
            known[permutation] = found
        return found


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
_TALKS = (Action.COLLECTIVE, Action.SEND, Action.RECEIVE)


def _trace(graph: OpGraph, index: int, system: SystemConfig, stated: StatedCosts) -> Trace:
    order = np.argsort(graph.id, kind="stable")
    place = np.empty(len(graph), np.int64)
    place[order] = np.arange(len(graph))
    deps = all_deps(graph)
    dependents = deps.transpose(len(graph)).take(order)
    kinds = [NodeKind(code) for code in graph.kind[order].tolist()]
    if NodeKind.PERMUTE in kinds:
        raise UnsupportedError("permutes are no nodes of traces: they are a send and a receive there")
    if NodeKind.METADATA in kinds:
        node = int(graph.id[order[kinds.index(NodeKind.METADATA)]])
        raise UnsupportedError(
            f"node {node} of type METADATA: ASTRA-sim's statistics abort", code="ET009",
            hint="leave metadata nodes out of traces for ASTRA-sim",
        )  # fmt: skip
    on_cpu: list[bool] = (graph.resource[order] == int(Resource.HOST)).tolist()
    action = [int(_ACTIONS[kind]) for kind in kinds]
    trace = Trace(
        rank_class=index,
        graph=graph,
        node=order.tolist(),
        slot=[_slot(each, cpu) for each, cpu in zip(action, on_cpu, strict=True)],
        action=action,
        statistic=[_statistic(each, cpu) for each, cpu in zip(action, on_cpu, strict=True)],
        delay_ns=_delays(stated.duration_ns[order]),
        counted=[not cpu for cpu in on_cpu],
        waiting=deps.lengths[order].tolist(),
        bounds=dependents.offsets.tolist(),
        targets=place[dependents.values].tolist(),
        collectives={},
        messages={},
        memory_bytes={},
        roofline={},
    )
    if system.replays_only:
        _replay(trace)
        return trace
    _describe(trace, place, on_cpu)
    if system.roofline:
        _apply_roofline(trace, system, stated, on_cpu)
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
    if action in _TALKS:
        return int(Statistic.COMMUNICATION)
    return int(Statistic.REMOTE_MEMORY if action == Action.MEMORY else Statistic.NONE)


def _delays(stated_ns: FloatArray) -> list[int]:
    """Whole microseconds; what is 0 or not known takes 1 ns."""
    micros = np.clip(np.nan_to_num(stated_ns / _MICRO_NS, nan=0.0), 0.0, _LARGEST_NS / _MICRO_NS)
    delays: list[int] = np.maximum(np.rint(micros).astype(np.int64) * _MICRO_NS, 1).tolist()
    return delays


def _describe(trace: Trace, place: IntArray, on_cpu: list[bool]) -> None:
    """Fill in what collectives, messages and memory nodes state."""
    graph = trace.graph
    involved = _involved(graph)
    table = graph.collectives
    for node, kind, row, size in zip(
        table.node.tolist(), table.kind.tolist(), table.group_set.tolist(), table.comm_bytes.tolist(),
        strict=True,
    ):  # fmt: skip
        at = int(place[node])
        broadcast = kind == CollectiveKind.BROADCAST
        trace.collectives[at] = Collective(
            CollectiveKind(kind), 0 if broadcast else _size(trace, at, size), row, involved.get(node)
        )
    p2p = graph.p2p
    for node, row, size, tag in zip(
        p2p.node.tolist(), p2p.permutation.tolist(), p2p.comm_bytes.tolist(), p2p.tag.tolist(), strict=True
    ):
        at = int(place[node])
        trace.messages[at] = Message(row, _message_size(trace, at, size), _tag(trace, at, tag))
    for at, action in enumerate(trace.action):
        if action in _TALKS:
            _check_described(trace, at, on_cpu[at])
        elif action == Action.MEMORY:
            trace.memory_bytes[at] = _size(trace, at, float(graph.bytes_moved[trace.node[at]]))


def _check_described(trace: Trace, at: int, on_cpu: bool) -> None:
    if at not in trace.collectives and at not in trace.messages:
        raise FormatError(
            f"{trace.label(at)} communicates and does not say what", code="ET011",
            hint="state comm_type and comm_size, or comm_src, comm_dst and comm_size",
        )  # fmt: skip
    if on_cpu:
        raise UnsupportedError(
            f"{trace.label(at)} communicates on the CPU: ASTRA-sim aborts", code="ET016",
            hint="set is_cpu_op to false on communication",
        )  # fmt: skip


def _size(trace: Trace, at: int, size: float) -> int:
    if not 0 <= size < _LARGEST_NS:
        raise FormatError(
            f"{trace.label(at)} states no number of bytes", code="ET012",
            hint="state comm_size (tensor_size on a memory node)",
        )  # fmt: skip
    return int(size)


def _message_size(trace: Trace, at: int, size: float) -> int:
    found = _size(trace, at, size)
    if not found:
        raise UnsupportedError(
            f"{trace.label(at)} is a message of 0 bytes: ASTRA-sim aborts", code="ET012",
            hint="state a comm_size of at least 1, or leave the message out of the trace",
        )  # fmt: skip
    return found


def _tag(trace: Trace, at: int, tag: int) -> int:
    if tag < 0:
        raise FormatError(
            f"{trace.label(at)} states no tag of its message, without which ASTRA-sim stops", code="ET014",
            hint="state a comm_tag that is not negative",
        )  # fmt: skip
    return tag % TAG_SPACE


def _involved(graph: OpGraph) -> dict[int, tuple[bool, ...]]:
    """The dimensions that nodes say they involve: lists of booleans, kept as their message."""
    key = graph.strings.find(_INVOLVED)
    if key < 0:
        return {}
    extra = graph.extra
    rows = np.flatnonzero((extra.key == key) & (extra.node >= 0))
    return {int(extra.node[row]): _bools(extra.value(row)) for row in rows.tolist()}


def _bools(message: bytes) -> tuple[bool, ...]:
    """Field 1 of a protobuf message, booleans packed or one by one."""
    if message[:1] == b"\x0a":
        return tuple(bool(byte) for byte in message[2:])
    return tuple(bool(byte) for byte in message[1::2])


def _replay(trace: Trace) -> None:
    """All nodes take their recorded time."""
    trace.action[:] = [int(Action.WAIT)] * len(trace)


def _apply_roofline(trace: Trace, system: SystemConfig, stated: StatedCosts, on_cpu: list[bool]) -> None:
    """Set the times of computation on the device from its operations and bytes."""
    bandwidth = (system.local_memory_gb_per_s or 0.0) * _BYTES_PER_GIGA
    peak = system.peak_tflops * _FLOPS_PER_TERA
    if not bandwidth or not peak:
        raise UnsupportedError(
            "roofline-enabled needs local-mem-bw and peak-perf", code="ET026", path=system.path,
            position="roofline-enabled", hint="state both, or replay recorded times",
        )  # fmt: skip
    flops: list[float] = stated.num_ops.tolist()
    moved: list[float] = stated.tensor_bytes.tolist()
    for at, node in enumerate(trace.node):
        if trace.action[at] != Action.WAIT or on_cpu[at]:
            continue
        if not (flops[node] >= 0 and moved[node] >= 0):
            raise FormatError(
                f"{trace.label(at)} states no num_ops or no tensor_size, which roofline mode needs",
                code="ET024", hint="state both, or take roofline-enabled out of system.json",
            )  # fmt: skip
        if not moved[node]:
            trace.action[at] = int(Action.SKIP)
        elif not flops[node]:
            raise UnsupportedError(
                f"{trace.label(at)} states 0 num_ops: in roofline mode of ASTRA-sim it never ends",
                code="ET024", hint="state at least 1, or take roofline-enabled out of system.json",
            )  # fmt: skip
        else:
            _one_roofline(trace, at, (flops[node], moved[node]), (peak, bandwidth))


def _one_roofline(trace: Trace, at: int, work: tuple[float, float], peaks: tuple[float, float]) -> None:
    (num_ops, size), (peak, bandwidth) = work, peaks
    intensity = num_ops / size
    rate = min(bandwidth * intensity, peak)
    time_ns = num_ops / rate * _NS_PER_S
    trace.delay_ns[at] = int(min(time_ns, float(_LARGEST_NS)))
    trace.roofline[at] = Roofline(intensity, rate / peak, rate / intensity / bandwidth, rate >= peak)
