"""A graph as plain lists, for the loops of a replay, and the slots that its nodes occupy."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from hespas.graph import NodeKind, OpGraph, Resource
from hespas.graph.passes import all_deps

__all__ = [
    "COMM_SLOT",
    "CPU_SLOT",
    "DEVICE_SLOT",
    "Key",
    "NodeProgram",
    "Outcome",
    "Place",
    "Task",
    "Waiting",
    "order_cycle",
    "replay",
]

CPU_SLOT, DEVICE_SLOT, COMM_SLOT = range(3)

_LONGEST_NS = 10**15


@dataclass(frozen=True, slots=True, eq=False)
class NodeProgram:
    """A graph as lists, for loops that must be sequential.

    ``slot`` is what a node occupies if it does not talk to others; ``priority`` its place in id order and
    ``by_priority`` the inverse; ``waiting`` counts dependencies; ``bounds`` and ``targets`` list dependents.
    """

    slot: list[int]
    priority: list[int]
    by_priority: list[int]
    waiting: list[int]
    bounds: list[int]
    targets: list[int]
    compute_ns: list[int]

    @classmethod
    def of(cls, graph: OpGraph) -> NodeProgram:
        """The lists of one graph; unknown and zero durations count as 1 ns. O(nodes + edges)."""
        nodes = len(graph)
        deps = all_deps(graph)
        dependents = deps.transpose(nodes)
        order = np.argsort(graph.id, kind="stable")
        priority = np.empty(nodes, np.int64)
        priority[order] = np.arange(nodes)
        memory = np.isin(graph.kind, (int(NodeKind.MEM_LOAD), int(NodeKind.MEM_STORE)))
        on_host = graph.resource == int(Resource.HOST)
        slot = np.where(memory, COMM_SLOT, np.where(on_host, CPU_SLOT, DEVICE_SLOT))
        time = np.nan_to_num(graph.duration_ns, nan=1.0, posinf=_LONGEST_NS, neginf=1.0)
        return cls(
            slot=slot.tolist(),
            priority=priority.tolist(),
            by_priority=order.tolist(),
            waiting=deps.lengths.tolist(),
            bounds=dependents.offsets.tolist(),
            targets=dependents.values.tolist(),
            compute_ns=np.clip(time, 1, _LONGEST_NS).astype(np.int64).tolist(),
        )

    def __len__(self) -> int:
        return len(self.slot)


Key = Hashable
"""What a message is matched by."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One rank: its nodes, the channel of each collective, the keys of what nodes send and receive.

    A node in ``sends`` and ``receives`` both is a permute. Communication in none of the three ends at once.
    """

    program: NodeProgram
    channel: dict[int, int]
    sends: dict[int, Key]
    receives: dict[int, Key]
    skipped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A node that never ended: on ``channel`` with the tasks that ``arrived``, or for a message ``key``."""

    task: int
    node: int
    channel: int = -1
    arrived: frozenset[int] = frozenset()
    key: Key | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """``issued``: collectives and sends of each task in issue order.

    ``unfinished`` counts the nodes of each task that never ended; ``waiting`` are those that were issued.
    """

    issued: list[list[int]]
    unfinished: list[int]
    waiting: list[Waiting]


@dataclass(slots=True, eq=False)
class _Rank:
    task: Task
    left: list[int]
    remaining: int
    ready: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    busy: list[bool] = field(default_factory=lambda: [False, False, False])
    rounds: dict[int, int] = field(default_factory=dict[int, int])
    parts: dict[int, int] = field(default_factory=dict[int, int])
    issued: list[int] = field(default_factory=list[int])


_END, _ARRIVE = range(2)


class _Engine:
    def __init__(
        self, tasks: Sequence[Task], needed: Sequence[int], comm_ns: int, use_durations: bool
    ) -> None:
        self.ranks = [_Rank(task, task.program.waiting.copy(), len(task.program)) for task in tasks]
        self.needed = needed
        self.comm_ns = comm_ns
        self.use_durations = use_durations
        self.now = 0
        self.count = 0
        self.events: list[tuple[int, int, int, int, int]] = []
        self.meetings: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.arrived: dict[Key, int] = {}
        self.posted: dict[Key, deque[tuple[int, int]]] = {}

    def run(self) -> None:
        for number, rank in enumerate(self.ranks):
            for node in rank.task.program.by_priority:
                if not rank.left[node]:
                    self.make_ready(number, node)
            self.scan(number)
        while self.events:
            self.now, _, what, number, node = heappop(self.events)
            if what == _END:
                self.end(number, node)
            else:
                self.arrive(number, node)

    def push(self, delay: int, what: int, number: int, node: int) -> None:
        self.count += 1
        heappush(self.events, (self.now + delay, self.count, what, number, node))

    def slot(self, task: Task, node: int) -> int:
        """The slot a node needs, -1 for none: receives, and communication that concerns nobody."""
        if node in task.channel or node in task.sends:
            return COMM_SLOT
        if node in task.receives or node in task.skipped:
            return -1
        return task.program.slot[node]

    def make_ready(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        slot = self.slot(rank.task, node)
        if slot < 0:
            self.issue(number, node)
        else:
            heappush(rank.ready[slot], rank.task.program.priority[node])

    def scan(self, number: int) -> None:
        rank = self.ranks[number]
        for slot, ready in enumerate(rank.ready):
            if ready and not rank.busy[slot]:
                rank.busy[slot] = True
                self.issue(number, rank.task.program.by_priority[heappop(ready)])

    def issue(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        task = rank.task
        if node in task.channel or node in task.sends:
            rank.issued.append(node)
        if node in task.channel:
            self.join(number, node, task.channel[node])
        elif node in task.sends or node in task.receives:
            rank.parts[node] = (node in task.sends) + (node in task.receives)
            if node in task.sends:
                self.push(self.comm_ns, _ARRIVE, number, node)
            if node in task.receives:
                self.post(number, node, task.receives[node])
        elif node in task.skipped:
            self.push(0, _END, number, node)
        else:
            self.push(task.program.compute_ns[node] if self.use_durations else 1, _END, number, node)

    def join(self, number: int, node: int, channel: int) -> None:
        rank = self.ranks[number]
        turn = rank.rounds.get(channel, 0)
        rank.rounds[channel] = turn + 1
        present = self.meetings.setdefault((channel, turn), [])
        present.append((number, node))
        if len(present) == self.needed[channel]:
            for member, its_node in self.meetings.pop((channel, turn)):
                self.push(self.comm_ns, _END, member, its_node)

    def post(self, number: int, node: int, key: Key) -> None:
        if self.arrived.get(key, 0):
            self.arrived[key] -= 1
            self.part(number, node)
        else:
            self.posted.setdefault(key, deque()).append((number, node))

    def arrive(self, number: int, node: int) -> None:
        """A message is there: its sender goes on, and the oldest receive that waits for it."""
        rank = self.ranks[number]
        key = rank.task.sends[node]
        self.part(number, node)
        if node in rank.task.receives:  # a permute gives the slot back while it waits for its own message
            rank.busy[COMM_SLOT] = False
            self.scan(number)
        waiting = self.posted.get(key)
        if waiting:
            self.part(*waiting.popleft())
        else:
            self.arrived[key] = self.arrived.get(key, 0) + 1

    def part(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        rank.parts[node] -= 1
        if not rank.parts[node]:
            self.push(0, _END, number, node)

    def end(self, number: int, node: int) -> None:
        rank = self.ranks[number]
        task = rank.task
        rank.remaining -= 1
        slot = self.slot(task, node)
        if slot >= 0 and not (node in task.sends and node in task.receives):
            rank.busy[slot] = False
        program = task.program
        for dependent in program.targets[program.bounds[node] : program.bounds[node + 1]]:
            rank.left[dependent] -= 1
            if not rank.left[dependent]:
                self.make_ready(number, dependent)
        self.scan(number)

    def outcome(self) -> Outcome:
        waiting: list[Waiting] = []
        for (channel, _), present in self.meetings.items():
            arrived = frozenset(number for number, _ in present)
            waiting += [Waiting(number, node, channel, arrived) for number, node in present]
        for key, queue in self.posted.items():
            waiting += [Waiting(number, node, key=key) for number, node in queue]
        return Outcome([rank.issued for rank in self.ranks], [rank.remaining for rank in self.ranks], waiting)


def replay(
    tasks: Sequence[Task], needed: Sequence[int], *, comm_ns: int, use_durations: bool = True
) -> Outcome:
    """Run all tasks until nothing moves any more.

    ``needed[channel]`` is the number of tasks a collective on a channel waits for (one more than there are:
    it never ends). ``use_durations`` false lets every computation take 1 ns. O(nodes log nodes) in all.
    """
    engine = _Engine(tasks, needed, comm_ns, use_durations)
    engine.run()
    return engine.outcome()


@dataclass(frozen=True, slots=True)
class Place:
    """A communication on a cycle: the node of the representative of a kind of rank."""

    task: int
    node: int


class _Graph:
    """The union graph, built task by task."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.edges: list[list[int]] = []
        self.owner: list[Place] = []
        self.meeting: dict[tuple[int, int], int] = {}
        self.vertex: list[list[int]] = []
        self.start: list[dict[int, int]] = []
        for number, task in enumerate(tasks):
            self.vertex.append([self.add(number, node) for node in range(len(task.program))])
            halves = task.sends.keys() & task.receives.keys()
            self.start.append({node: self.add(number, node) for node in sorted(halves)})

    def add(self, task: int, node: int) -> int:
        self.edges.append([])
        self.owner.append(Place(task, node))
        return len(self.edges) - 1

    def enter(self, task: int, node: int) -> int:
        """The vertex where a node starts: the sending half of a permute, else the node."""
        return self.start[task].get(node, self.vertex[task][node])


def order_cycle(tasks: Sequence[Task], orders: Sequence[Sequence[int]]) -> tuple[Place, ...]:
    """The communication on one cycle of the union, empty where there is none. O(nodes + edges).

    ``orders[task]`` lists the collectives and sends of a task in issue order.
    """
    graph = _Graph(tasks)
    _merge_meetings(graph, tasks, orders)
    for number, (task, order) in enumerate(zip(tasks, orders, strict=True)):
        _add_task(graph, number, task, order)
    _add_messages(graph, tasks, orders)
    return _cycle(graph, tasks)


def _add_task(graph: _Graph, number: int, task: Task, order: Sequence[int]) -> None:
    """Dependencies within a task, and its one communication slot."""
    program, vertex = task.program, graph.vertex[number]
    for node in range(len(program)):
        for dependent in program.targets[program.bounds[node] : program.bounds[node + 1]]:
            graph.edges[vertex[node]].append(graph.enter(number, dependent))
    for node, start in graph.start[number].items():
        graph.edges[start].append(vertex[node])
    for one, other in pairwise(order):
        # A permute gives the slot back when its sending half is through.
        graph.edges[graph.enter(number, one)].append(graph.enter(number, other))


def _add_messages(graph: _Graph, tasks: Sequence[Task], orders: Sequence[Sequence[int]]) -> None:
    """An edge from the k-th send of each key to its k-th receive."""
    sends: dict[Key, list[int]] = {}
    for number, task in enumerate(tasks):
        for node in orders[number]:
            if node in task.sends:
                sends.setdefault(task.sends[node], []).append(graph.enter(number, node))
    turns: dict[Key, int] = {}
    for number, task in enumerate(tasks):
        for node in sorted(task.receives, key=task.program.priority.__getitem__):
            key = task.receives[node]
            turn = turns[key] = turns.get(key, -1) + 1
            if turn < len(sends.get(key, ())):
                graph.edges[sends[key][turn]].append(graph.vertex[number][node])


def _merge_meetings(graph: _Graph, tasks: Sequence[Task], orders: Sequence[Sequence[int]]) -> None:
    """Let the k-th collectives of all tasks on one channel share a vertex."""
    for number, task in enumerate(tasks):
        rounds: dict[int, int] = {}
        for node in orders[number]:
            channel = task.channel.get(node)
            if channel is None:
                continue
            turn = rounds[channel] = rounds.get(channel, -1) + 1
            shared = graph.meeting.setdefault((channel, turn), graph.vertex[number][node])
            graph.vertex[number][node] = shared


def _cycle(graph: _Graph, tasks: Sequence[Task]) -> tuple[Place, ...]:
    stuck = _stuck(graph.edges)
    if not any(stuck):
        return ()
    # Every stuck vertex follows a stuck one; walking backwards therefore closes.
    before = [-1] * len(graph.edges)
    for vertex, followers in enumerate(graph.edges):
        if stuck[vertex]:
            for follower in followers:
                before[follower] = vertex
    vertex = next(number for number, is_stuck in enumerate(stuck) if is_stuck)
    place: dict[int, int] = {}
    walk: list[int] = []
    while vertex not in place:
        place[vertex] = len(walk)
        walk.append(vertex)
        vertex = before[vertex]
    owners = dict.fromkeys(graph.owner[number] for number in reversed(walk[place[vertex] :]))
    return tuple(owner for owner in owners if _talks(tasks[owner.task], owner.node))


def _talks(task: Task, node: int) -> bool:
    return node in task.channel or node in task.sends or node in task.receives


def _stuck(edges: list[list[int]]) -> list[bool]:
    """Vertices on a cycle or behind one."""
    waiting = [0] * len(edges)
    for followers in edges:
        for follower in followers:
            waiting[follower] += 1
    free = [vertex for vertex, count in enumerate(waiting) if not count]
    for vertex in free:  # grows while it is walked: a queue
        for follower in edges[vertex]:
            waiting[follower] -= 1
            if not waiting[follower]:
                free.append(follower)
    stuck = [True] * len(edges)
    for vertex in free:
        stuck[vertex] = False
    return stuck
