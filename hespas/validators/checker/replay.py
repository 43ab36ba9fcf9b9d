"""Deadlocks of communication: a replay by ASTRA-sim's issue rule, and cycles of issue orders.

In a replay, ranks issue nodes as in :mod:`hespas.simulator.astra.events`, with one event queue for all of
them (network model, section 7). A communication takes a constant time. The second check builds a graph from
the issue orders and dependencies of all ranks and their collectives and messages. A cycle in it is a deadlock
that some timing produces, even if a replay finishes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hespas.graph import NodeKind, OpGraph, RaggedArray, Resource
from hespas.graph.passes import all_deps
from hespas.simulator.astra.events import EventQueue, IssuingRank, Slot

__all__ = [
    "BlockedNode",
    "CommNode",
    "IssueOrder",
    "MessageKey",
    "NodeProgram",
    "ReplayOutcome",
    "ReplayTask",
    "issue_order",
    "order_cycle",
    "replay",
]

_MAX_DURATION_NS = 10**15

MessageKey = Hashable
"""Key by which a send and a receive match."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeProgram:
    """Graph as plain lists, which are fast in sequential loops. Nodes are numbered by position, in ascending
    order of their ids.

    ``node`` is the node at each position. ``slot`` is the slot that a node without communication occupies.
    ``num_deps`` is its number of dependencies. The nodes that depend on it are ``targets[bounds[position] :
    bounds[position + 1]]``.
    """

    node: list[int]
    slot: list[int]
    num_deps: list[int]
    bounds: list[int]
    targets: list[int]
    compute_ns: list[int]

    @classmethod
    def of(cls, graph: OpGraph) -> NodeProgram:
        """Convert a graph to a program for the replay of deadlocks; unknown and zero durations become 1 ns.
        O(nodes + edges).
        """
        order = np.argsort(graph.id, kind="stable")
        position = np.empty(len(graph), np.int64)
        position[order] = np.arange(len(graph))
        deps = all_deps(graph).take(order)
        dependents = RaggedArray(deps.offsets, position[deps.values].astype(np.int32)).transpose(len(graph))
        uses_memory = np.isin(graph.kind, (int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))
        on_host = graph.resource == int(Resource.HOST)
        slot = np.where(on_host, Slot.CPU, np.where(uses_memory, Slot.COMMUNICATION, Slot.COMPUTE))
        duration_ns = np.nan_to_num(graph.duration_ns, nan=1.0, posinf=_MAX_DURATION_NS, neginf=1.0)
        return cls(
            node=order.tolist(),
            slot=slot[order].tolist(),
            num_deps=deps.lengths.tolist(),
            bounds=dependents.offsets.tolist(),
            targets=dependents.values.tolist(),
            compute_ns=np.clip(duration_ns[order], 1, _MAX_DURATION_NS).astype(np.int64).tolist(),
        )

    def __len__(self) -> int:
        return len(self.slot)

    def dependents(self, position: int) -> list[int]:
        """Return the positions of the nodes that depend on the node at a position."""
        return self.targets[self.bounds[position] : self.bounds[position + 1]]

    def positions(self) -> dict[int, int]:
        """Return a map from nodes to positions."""
        return {node: position for position, node in enumerate(self.node)}


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTask:
    """Program of one rank for a replay. ``channel`` maps the position of each collective to the number of its
    process group, ``sends`` and ``receives`` map the positions of messages to their keys.

    A position in both ``sends`` and ``receives`` is a permute. Nodes at ``skipped`` positions complete at
    once.
    """

    program: NodeProgram
    channel: dict[int, int]
    sends: dict[int, MessageKey]
    receives: dict[int, MessageKey]
    skipped: frozenset[int] = frozenset()

    def communicates(self, position: int) -> bool:
        """Return True if the node is a collective or a message."""
        return position in self.channel or position in self.sends or position in self.receives


@dataclass(frozen=True, slots=True)
class BlockedNode:
    """Node that was issued in a replay and never completed. It is a collective on ``channel`` that only the
    tasks in ``arrived`` have issued. If ``channel`` is -1, it is a receive of the message ``key``.
    """

    task: int
    position: int
    channel: int = -1
    arrived: frozenset[int] = frozenset()
    key: MessageKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReplayOutcome:
    """Result of a replay. ``issued`` has for each task its collectives and sends in issue order,
    ``unfinished`` its number of unfinished nodes. ``blocked`` lists nodes of all tasks that were issued and
    never completed.
    """

    issued: list[list[int]]
    unfinished: list[int]
    blocked: list[BlockedNode]


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """Collectives of a rank class, in the order in which a rank issues them if it never waits for other
    ranks.

    ``by_time`` is the order with the durations of the graph, ``by_id`` the order by node ids only. They
    differ only if independent collectives become ready at about the same time; the real order then depends on
    timing.
    """

    by_time: tuple[int, ...]
    by_id: tuple[int, ...]


def replay(
    tasks: Sequence[ReplayTask], needed: Sequence[int], *, comm_ns: int, use_durations: bool = True
) -> ReplayOutcome:
    """Run all tasks until no node can proceed. O(nodes log nodes).

    A collective on a channel (process group) completes when ``needed[channel]`` tasks have arrived. It never
    completes if fewer tasks than that run on the channel. Every communication takes ``comm_ns``. If
    ``use_durations`` is False, every computation takes 1 ns.
    """
    channels = _Channels(needed, comm_ns)
    ranks = [_ReplayRank(number, task, channels, use_durations) for number, task in enumerate(tasks)]
    for rank in ranks:
        rank.begin()
    channels.queue.run()
    return ReplayOutcome(
        [rank.issued for rank in ranks], [rank.num_left for rank in ranks], channels.blocked()
    )


def issue_order(graph: OpGraph) -> IssueOrder:
    """Return the issue order of the collectives of one graph. O(nodes log nodes)."""
    runs = graph.executions != 0
    table = graph.collectives
    nodes = table.node[runs[table.node]]
    by_id: list[int] = nodes[np.argsort(graph.id[nodes], kind="stable")].tolist()
    if len(by_id) < 2:
        return IssueOrder(tuple(by_id), tuple(by_id))
    program = NodeProgram.of(graph)
    position = program.positions()
    task = ReplayTask(program, {position[node]: 0 for node in by_id}, {}, {})
    issued = replay([task], [1], comm_ns=1).issued[0]
    return IssueOrder(tuple(program.node[at] for at in issued), tuple(by_id))


class _Channels:
    """Process groups and messages between the ranks of a replay, with the collectives and messages that wait
    for other ranks.
    """

    def __init__(self, needed: Sequence[int], comm_ns: int) -> None:
        self.queue = EventQueue()
        self.comm_ns = comm_ns
        self._needed = needed
        self._rendezvous: dict[tuple[int, int], list[tuple[_ReplayRank, int]]] = {}
        """Channel and round -> arrived ranks and positions of a pending collective."""
        self._delivered: dict[MessageKey, int] = {}
        """Messages that no receive has taken yet."""
        self._posted: dict[MessageKey, deque[tuple[_ReplayRank, int]]] = {}
        """Receives that wait for a message, oldest first."""

    def arrive(self, rank: _ReplayRank, position: int, channel: int, number: int) -> None:
        """Issue a collective of one rank. It completes ``comm_ns`` after the last of its needed ranks issues
        it.
        """
        arrived = self._rendezvous.setdefault((channel, number), [])
        arrived.append((rank, position))
        if len(arrived) == self._needed[channel]:
            over_ns = self.queue.now_ns + self.comm_ns
            for member, member_position in self._rendezvous.pop((channel, number)):
                self.queue.enter(over_ns, member.complete, member_position)

    def deliver(self, key: MessageKey) -> None:
        """Complete the oldest receive that waits for a message, or store the message."""
        receives = self._posted.get(key)
        if receives:
            rank, position = receives.popleft()
            rank.complete_half(position)
        else:
            self._delivered[key] = self._delivered.get(key, 0) + 1

    def receive(self, rank: _ReplayRank, position: int, key: MessageKey) -> None:
        """Issue a receive, which completes with its message."""
        if self._delivered.get(key, 0):
            self._delivered[key] -= 1
            rank.complete_half(position)
        else:
            self._posted.setdefault(key, deque()).append((rank, position))

    def blocked(self) -> list[BlockedNode]:
        """Return the collectives and receives that were issued and never completed."""
        blocked: list[BlockedNode] = []
        for (channel, _), arrived in self._rendezvous.items():
            numbers = frozenset(rank.number for rank, _ in arrived)
            blocked += [BlockedNode(rank.number, position, channel, numbers) for rank, position in arrived]
        for key, receives in self._posted.items():
            blocked += [BlockedNode(rank.number, position, key=key) for rank, position in receives]
        return blocked


class _ReplayRank(IssuingRank):
    """State of one rank in a replay: its ``issued`` collectives and sends, and the number of nodes that are
    not complete.
    """

    __slots__ = (
        "_channels",
        "_halves_left",
        "_rounds",
        "_task",
        "_use_durations",
        "issued",
        "num_left",
        "number",
    )

    def __init__(self, number: int, task: ReplayTask, channels: _Channels, use_durations: bool) -> None:
        program = task.program
        slot = program.slot.copy()
        for position in (*task.skipped, *task.receives):
            slot[position] = Slot.RECEIVE
        for position in (*task.channel, *task.sends):
            slot[position] = Slot.COMMUNICATION
        super().__init__(slot, program.num_deps, program.bounds, program.targets)
        self.number, self.num_left = number, len(program)
        self.issued: list[int] = []
        self._task, self._channels, self._use_durations = task, channels, use_durations
        self._rounds: dict[int, int] = {}
        """Channel -> collectives issued on it."""
        self._halves_left: dict[int, int] = {}
        """Position of a message -> halves (send, receive) that are not complete."""

    def complete(self, position: int) -> None:
        """End a node, and issue the nodes that waited for it or for its slot."""
        task = self._task
        self.num_left -= 1
        if position not in task.sends or position not in task.receives:
            self._busy[self._slot[position]] = False
        self._release(position)
        self._issue_ready()

    def complete_half(self, position: int) -> None:
        """Complete the send or the receive of a node. A permute ends when both are complete."""
        self._halves_left[position] -= 1
        if not self._halves_left[position]:
            queue = self._channels.queue
            queue.enter(queue.now_ns, self.complete, position)

    def _issue(self, position: int, slot: int) -> None:
        task, channels, queue = self._task, self._channels, self._channels.queue
        self._busy[slot] = slot != Slot.RECEIVE
        if position in task.channel:
            self.issued.append(position)
            channel = task.channel[position]
            number = self._rounds.get(channel, 0)
            self._rounds[channel] = number + 1
            channels.arrive(self, position, channel, number)
        elif position in task.sends or position in task.receives:
            self._halves_left[position] = (position in task.sends) + (position in task.receives)
            if position in task.sends:
                self.issued.append(position)
                queue.enter(queue.now_ns + channels.comm_ns, self._sent, position)
            if position in task.receives:
                channels.receive(self, position, task.receives[position])
        else:
            takes_ns = task.program.compute_ns[position] if self._use_durations else 1
            queue.enter(queue.now_ns + (0 if position in task.skipped else takes_ns), self.complete, position)

    def _sent(self, position: int) -> None:
        task = self._task
        self.complete_half(position)
        if position in task.receives:  # a permute frees the slot while it waits for its own message
            self._busy[Slot.COMMUNICATION] = False
            self._issue_ready()
        self._channels.deliver(task.sends[position])


@dataclass(frozen=True, slots=True)
class CommNode:
    """Communication node on a cycle of the issue order: its ``position`` in the program of ``task``, the
    index of a task.
    """

    task: int
    position: int


class _OrderGraph:
    """Graph of the order of all nodes of all tasks, in which a cycle is a deadlock. It has one vertex per
    node, two for a permute (send and receive), and one for all members of a collective.
    """

    def __init__(self, tasks: Sequence[ReplayTask]) -> None:
        self.tasks = tasks
        self.edges: list[list[int]] = []
        self.owner: list[CommNode] = []
        self.vertex: list[list[int]] = []
        self.send_vertex: list[dict[int, int]] = []
        for number, task in enumerate(tasks):
            self.vertex.append([self._add_vertex(number, position) for position in range(len(task.program))])
            permutes = task.sends.keys() & task.receives.keys()
            self.send_vertex.append(
                {position: self._add_vertex(number, position) for position in sorted(permutes)}
            )

    def _add_vertex(self, task: int, position: int) -> int:
        self.edges.append([])
        self.owner.append(CommNode(task, position))
        return len(self.edges) - 1

    def start(self, task: int, position: int) -> int:
        """Return the vertex at which a node starts: the sending half of a permute, otherwise the node's
        vertex.
        """
        return self.send_vertex[task].get(position, self.vertex[task][position])

    def merge_collectives(self, orders: Sequence[Sequence[int]]) -> None:
        """Merge the k-th collectives of all tasks on each channel into one vertex."""
        shared: dict[tuple[int, int], int] = {}
        for number, task in enumerate(self.tasks):
            rounds: dict[int, int] = {}
            for position in orders[number]:
                channel = task.channel.get(position)
                if channel is None:
                    continue
                turn = rounds[channel] = rounds.get(channel, -1) + 1
                vertex = shared.setdefault((channel, turn), self.vertex[number][position])
                self.vertex[number][position] = vertex

    def add_tasks(self, orders: Sequence[Sequence[int]]) -> None:
        """Add edges for the dependencies within each task, and for the order in which its communication slot
        runs nodes.
        """
        for number, task in enumerate(self.tasks):
            vertex = self.vertex[number]
            for position in range(len(task.program)):
                for dependent in task.program.dependents(position):
                    self.edges[vertex[position]].append(self.start(number, dependent))
            for position, start in self.send_vertex[number].items():
                self.edges[start].append(vertex[position])
            for one, other in pairwise(orders[number]):
                # A permute frees the slot when its sending half completes.
                self.edges[self.start(number, one)].append(self.start(number, other))

    def add_messages(self, orders: Sequence[Sequence[int]]) -> None:
        """Add an edge from the k-th send of each key to its k-th receive."""
        sends: dict[MessageKey, list[int]] = {}
        for number, task in enumerate(self.tasks):
            for position in orders[number]:
                if position in task.sends:
                    sends.setdefault(task.sends[position], []).append(self.start(number, position))
        turns: dict[MessageKey, int] = {}
        for number, task in enumerate(self.tasks):
            for position in sorted(task.receives):
                key = task.receives[position]
                turn = turns[key] = turns.get(key, -1) + 1
                if turn < len(sends.get(key, ())):
                    self.edges[sends[key][turn]].append(self.vertex[number][position])

    def unreachable(self) -> list[bool]:
        """Return for each vertex True if it is on a cycle or depends on one, so that it is in no topological
        order.
        """
        num_before = [0] * len(self.edges)
        for followers in self.edges:
            for follower in followers:
                num_before[follower] += 1
        reached = [vertex for vertex, count in enumerate(num_before) if not count]
        for vertex in reached:  # grows while it is iterated: a queue
            for follower in self.edges[vertex]:
                num_before[follower] -= 1
                if not num_before[follower]:
                    reached.append(follower)
        unreachable = [True] * len(self.edges)
        for vertex in reached:
            unreachable[vertex] = False
        return unreachable


def order_cycle(tasks: Sequence[ReplayTask], orders: Sequence[Sequence[int]]) -> tuple[CommNode, ...]:
    """Return the communication nodes on one cycle of the order graph; empty without a cycle. O(nodes +
    edges).

    ``orders[task]`` lists the collectives and sends of a task in issue order.
    """
    graph = _OrderGraph(tasks)
    graph.merge_collectives(orders)
    graph.add_tasks(orders)
    graph.add_messages(orders)
    unreachable = graph.unreachable()
    if not any(unreachable):
        return ()
    # Every unreachable vertex has an unreachable predecessor, so a walk backwards ends in a cycle.
    before = [-1] * len(graph.edges)
    for vertex, followers in enumerate(graph.edges):
        if unreachable[vertex]:
            for follower in followers:
                before[follower] = vertex
    vertex = unreachable.index(True)
    position: dict[int, int] = {}
    walk: list[int] = []
    while vertex not in position:
        position[vertex] = len(walk)
        walk.append(vertex)
        vertex = before[vertex]
    owners = dict.fromkeys(graph.owner[vertex] for vertex in reversed(walk[position[vertex] :]))
    return tuple(owner for owner in owners if tasks[owner.task].communicates(owner.position))
