"""Whether the orders in which ranks issue their communication fit together: is their union free of cycles?

Vertices are nodes of each kind of rank, with matching collectives as one vertex and the sending half of a
permute as its own. Edges: dependencies, the one communication slot of a rank in issue order, and each message
from its send to its receive. A cycle is a deadlock whenever ranks issue in these orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hespas.validators.replay import Key, Task

__all__ = ["Place", "order_cycle"]


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
