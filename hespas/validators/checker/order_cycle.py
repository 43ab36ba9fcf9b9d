"""Cycles in the union of all ranks' issue orders, dependencies, collectives and messages.

A cycle is a deadlock that some timing produces, also if a replay finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hespas.validators.checker.replay import MessageKey, ReplayTask

__all__ = ["CommNode", "order_cycle"]


@dataclass(frozen=True, slots=True)
class CommNode:
    """Communication on a cycle: the position of a node of the representative of a kind of rank."""

    task: int
    position: int


class _OrderGraph:
    """Union graph: one vertex per node, two for a permute, one for all members of a collective."""

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
        """Return the vertex where a node starts: the sending half of a permute, else the node."""
        return self.send_vertex[task].get(position, self.vertex[task][position])

    def merge_collectives(self, orders: Sequence[Sequence[int]]) -> None:
        """Let the k-th collectives of all tasks on one channel share a vertex."""
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
        """Add the dependencies within each task, and the order of its one communication slot."""
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
        """Return, per vertex, True if it is on a cycle or behind one, so that no order reaches it."""
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
    """Return the communication on one cycle of the union, empty if it has none. O(nodes + edges).

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
