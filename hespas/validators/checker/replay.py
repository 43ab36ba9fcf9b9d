"""Replay of the communication of ranks by ASTRA-sim's issue rule, to find ranks that deadlock.

One CPU operation, one device operation and one communication are in flight per rank, and any number of
receives. Whenever an operation completes, ready nodes are issued in ascending id (network model, section 7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

import numpy as np

from hespas.graph import NodeKind, OpGraph, Resource
from hespas.graph.passes import all_deps

__all__ = [
    "COMM_SLOT",
    "CPU_SLOT",
    "DEVICE_SLOT",
    "BlockedNode",
    "IssueOrder",
    "MessageKey",
    "NodeProgram",
    "ReplayOutcome",
    "ReplayTask",
    "issue_order",
    "replay",
]

CPU_SLOT, DEVICE_SLOT, COMM_SLOT = range(3)
_NO_SLOT: Final = -1

_MAX_DURATION_NS = 10**15

MessageKey = Hashable
"""Key by which a send and a receive match."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeProgram:
    """Graph as plain lists, for sequential loops.

    ``slot`` is the slot of a node that does not communicate. ``priority`` is the position of each node in id
    order, ``by_priority`` the inverse. ``num_deps`` counts the dependencies of each node; its dependents are
    ``targets[bounds[node] : bounds[node + 1]]``.
    """

    slot: list[int]
    priority: list[int]
    by_priority: list[int]
    num_deps: list[int]
    bounds: list[int]
    targets: list[int]
    compute_ns: list[int]

    @classmethod
    def of(cls, graph: OpGraph) -> NodeProgram:
        """Convert a graph; unknown and zero durations become 1 ns. O(nodes + edges)."""
        nodes = len(graph)
        deps = all_deps(graph)
        dependents = deps.transpose(nodes)
        order = np.argsort(graph.id, kind="stable")
        priority = np.empty(nodes, np.int64)
        priority[order] = np.arange(nodes)
        uses_memory = np.isin(graph.kind, (int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))
        on_host = graph.resource == int(Resource.HOST)
        slot = np.where(uses_memory, COMM_SLOT, np.where(on_host, CPU_SLOT, DEVICE_SLOT))
        duration_ns = np.nan_to_num(graph.duration_ns, nan=1.0, posinf=_MAX_DURATION_NS, neginf=1.0)
        return cls(
            slot=slot.tolist(),
            priority=priority.tolist(),
            by_priority=order.tolist(),
            num_deps=deps.lengths.tolist(),
            bounds=dependents.offsets.tolist(),
            targets=dependents.values.tolist(),
            compute_ns=np.clip(duration_ns, 1, _MAX_DURATION_NS).astype(np.int64).tolist(),
        )

    def __len__(self) -> int:
        return len(self.slot)

    def dependents(self, node: int) -> list[int]:
        """Return the nodes that depend on a node."""
        return self.targets[self.bounds[node] : self.bounds[node + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTask:
    """Program of one rank: the ``channel`` of each collective and the message keys of sends and receives.

    A node in both ``sends`` and ``receives`` is a permute. ``skipped`` nodes complete at once.
    """

    program: NodeProgram
    channel: dict[int, int]
    sends: dict[int, MessageKey]
    receives: dict[int, MessageKey]
    skipped: frozenset[int] = frozenset()

    def communicates(self, node: int) -> bool:
        """Return True if the node is a collective or a message."""
        return node in self.channel or node in self.sends or node in self.receives


@dataclass(frozen=True, slots=True)
class BlockedNode:
    """Node that was issued and never completed: a collective on ``channel`` at which only the tasks
    ``arrived`` are, or a receive of the message ``key``.
    """

    task: int
    node: int
    channel: int = -1
    arrived: frozenset[int] = frozenset()
    key: MessageKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReplayOutcome:
    """Result of a replay, by task: ``issued`` collectives and sends in issue order, and the number of
    ``unfinished`` nodes. ``blocked`` lists the unfinished nodes that were issued.
    """

    issued: list[list[int]]
    unfinished: list[int]
    blocked: list[BlockedNode]


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Collectives of a class in the order in which a rank issues them if it never waits for others.

    ``by_time`` follows the issue rule with the durations of the graph, ``by_id`` the ids alone. They differ
    only if independent collectives race: then the real order depends on timing.
    """

    by_time: tuple[int, ...]
    by_id: tuple[int, ...]


def replay(
    tasks: Sequence[ReplayTask], needed: Sequence[int], *, comm_ns: int, use_durations: bool = True
) -> ReplayOutcome:
    """Run all tasks until no node can proceed. O(nodes log nodes).

    A collective on a channel completes once ``needed[channel]`` tasks have arrived; with a number above that
    of its tasks it never does. Every communication takes ``comm_ns``. Every computation takes 1 ns without
    ``use_durations``.
    """
    engine = _ReplayEngine(tasks, needed, comm_ns, use_durations)
    engine.run()
    return engine.outcome()


def issue_order(graph: OpGraph) -> IssueOrder:
    """Return the issue order of the collectives of one graph. O(nodes log nodes)."""
    runs = graph.executions != 0
    table = graph.collectives
    nodes = table.node[runs[table.node]]
    by_id: list[int] = nodes[np.argsort(graph.id[nodes], kind="stable")].tolist()
    if len(by_id) < 2:
        return IssueOrder(tuple(by_id), tuple(by_id))
    task = ReplayTask(NodeProgram.of(graph), dict.fromkeys(by_id, 0), {}, {})
    issued = replay([task], [1], comm_ns=1).issued[0]
    return IssueOrder(tuple(issued), tuple(by_id))


_Endpoint = tuple[int, int]
"""Rank and node."""


@dataclass(slots=True, eq=False)
class _ReplayRank:
    """State of one rank: dependencies left per node, ready nodes and occupancy per slot."""

    task: ReplayTask
    deps_left: list[int]
    nodes_left: int
    ready: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    busy: list[bool] = field(default_factory=lambda: [False, False, False])
    rounds: dict[int, int] = field(default_factory=dict[int, int])
    """Channel -> collectives issued on it."""
    halves_left: dict[int, int] = field(default_factory=dict[int, int])
    """Message node -> halves (send, receive) that are not complete."""
    issued: list[int] = field(default_factory=list[int])


_COMPLETE, _DELIVER = range(2)


class _ReplayEngine:
    """Event loop of a replay: nodes complete and messages are delivered in order of time."""

    def __init__(
        self, tasks: Sequence[ReplayTask], needed: Sequence[int], comm_ns: int, use_durations: bool
    ) -> None:
        self.states = [_ReplayRank(task, task.program.num_deps.copy(), len(task.program)) for task in tasks]
        self.needed = needed
        self.comm_ns = comm_ns
        self.use_durations = use_durations
        self.now_ns = 0
        self.num_events = 0
        self.events: list[tuple[int, int, int, int, int]] = []
        self.rendezvous: dict[tuple[int, int], list[_Endpoint]] = {}
        """Channel and round -> arrived endpoints of a pending collective."""
        self.delivered: dict[MessageKey, int] = {}
        """Messages that no receive has taken yet."""
        self.posted: dict[MessageKey, deque[_Endpoint]] = {}
        """Receives that wait for a message, oldest first."""

    def run(self) -> None:
        """Issue all nodes without dependencies, then process events until none is left."""
        for rank, state in enumerate(self.states):
            for node in state.task.program.by_priority:
                if not state.deps_left[node]:
                    self._make_ready(rank, node)
            self._fill_slots(rank)
        while self.events:
            self.now_ns, _, event, rank, node = heappop(self.events)
            state = self.states[rank]
            task = state.task
            if event == _COMPLETE:
                state.nodes_left -= 1
                slot = self._slot(task, node)
                is_permute = node in task.sends and node in task.receives
                if slot != _NO_SLOT and not is_permute:
                    state.busy[slot] = False
                for dependent in task.program.dependents(node):
                    state.deps_left[dependent] -= 1
                    if not state.deps_left[dependent]:
                        self._make_ready(rank, dependent)
                self._fill_slots(rank)
            else:
                # The send completes, and so does the oldest receive that waits for the message.
                key = task.sends[node]
                self._complete_half(rank, node)
                if node in task.receives:  # a permute frees the slot while it waits for its own message
                    state.busy[COMM_SLOT] = False
                    self._fill_slots(rank)
                receives = self.posted.get(key)
                if receives:
                    self._complete_half(*receives.popleft())
                else:
                    self.delivered[key] = self.delivered.get(key, 0) + 1

    def outcome(self) -> ReplayOutcome:
        """Return the issue orders and the blocked nodes."""
        blocked: list[BlockedNode] = []
        for (channel, _), endpoints in self.rendezvous.items():
            arrived = frozenset(rank for rank, _ in endpoints)
            blocked += [BlockedNode(rank, node, channel, arrived) for rank, node in endpoints]
        for key, queue in self.posted.items():
            blocked += [BlockedNode(rank, node, key=key) for rank, node in queue]
        issued = [state.issued for state in self.states]
        return ReplayOutcome(issued, [state.nodes_left for state in self.states], blocked)

    def _schedule(self, delay_ns: int, event: int, rank: int, node: int) -> None:
        self.num_events += 1
        heappush(self.events, (self.now_ns + delay_ns, self.num_events, event, rank, node))

    @staticmethod
    def _slot(task: ReplayTask, node: int) -> int:
        """Return the slot that a node occupies; receives and skipped nodes have none."""
        if node in task.channel or node in task.sends:
            return COMM_SLOT
        if node in task.receives or node in task.skipped:
            return _NO_SLOT
        return task.program.slot[node]

    def _make_ready(self, rank: int, node: int) -> None:
        """Queue a node for its slot; issue it at once if it has none."""
        state = self.states[rank]
        slot = self._slot(state.task, node)
        if slot == _NO_SLOT:
            self._issue(rank, node)
        else:
            heappush(state.ready[slot], state.task.program.priority[node])

    def _fill_slots(self, rank: int) -> None:
        """Issue the ready node of lowest id for every free slot."""
        state = self.states[rank]
        for slot, ready in enumerate(state.ready):
            if ready and not state.busy[slot]:
                state.busy[slot] = True
                self._issue(rank, state.task.program.by_priority[heappop(ready)])

    def _issue(self, rank: int, node: int) -> None:
        state = self.states[rank]
        task = state.task
        if node in task.channel:
            state.issued.append(node)
            channel = task.channel[node]
            number = state.rounds.get(channel, 0)
            state.rounds[channel] = number + 1
            endpoints = self.rendezvous.setdefault((channel, number), [])
            endpoints.append((rank, node))
            if len(endpoints) == self.needed[channel]:
                for member, member_node in self.rendezvous.pop((channel, number)):
                    self._schedule(self.comm_ns, _COMPLETE, member, member_node)
        elif node in task.sends or node in task.receives:
            state.halves_left[node] = (node in task.sends) + (node in task.receives)
            if node in task.sends:
                state.issued.append(node)
                self._schedule(self.comm_ns, _DELIVER, rank, node)
            if node in task.receives:
                key = task.receives[node]
                if self.delivered.get(key, 0):
                    self.delivered[key] -= 1
                    self._complete_half(rank, node)
                else:
                    self.posted.setdefault(key, deque()).append((rank, node))
        elif node in task.skipped:
            self._schedule(0, _COMPLETE, rank, node)
        else:
            duration_ns = task.program.compute_ns[node] if self.use_durations else 1
            self._schedule(duration_ns, _COMPLETE, rank, node)

    def _complete_half(self, rank: int, node: int) -> None:
        halves_left = self.states[rank].halves_left
        halves_left[node] -= 1
        if not halves_left[node]:
            self._schedule(0, _COMPLETE, rank, node)
