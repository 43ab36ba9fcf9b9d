"""A matching as columns, and how many-to-many links become groups that can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hespas.graph.columns import BoolArray, IntArray
from hespas.graph.errors import InvariantError

__all__ = ["RULES", "EventKey", "Matching", "group_keys"]

RULES: tuple[str, ...] = ("instruction", "op-name", "source-line", "signature", "order")
"""How an event was matched, strongest first: by the name of the compiled instruction; by the framework's name
of the operation; by source line; by operation and shapes, in order; by operation alone, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKey:
    """What equal events have in common: an instruction of a module, or a place in a run. ``nodes`` are those
    it carries out, all or in part; ``rule`` indexes :data:`RULES`. ``inferred`` says that the compiler made
    the instruction up and that the nodes are those it serves; ``communicates`` that it talks to other ranks.
    """

    module: str
    op: str
    nodes: tuple[int, ...] = ()
    rule: int = -1
    inferred: bool = False
    communicates: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Matching:
    """Which nodes each event carries out, and groups of both that can be compared: a fusion is one event for
    many nodes, a node that was split is several events.

    ``event_key`` has shape ``(events,)`` and indexes ``keys`` (-1: the event names nothing). ``node_group``
    has shape ``(nodes,)``, ``event_group`` ``(events,)``; -1 is in no group.
    """

    keys: tuple[EventKey, ...]
    event_key: IntArray
    event_group: IntArray
    node_group: IntArray
    num_groups: int

    def __post_init__(self) -> None:
        """Check that groups are numbered from 0."""
        for column in (self.node_group, self.event_group):
            if len(column) and int(column.max()) >= self.num_groups:
                raise InvariantError("Matching: a group has no number")

    def __len__(self) -> int:
        return self.num_groups

    @property
    def matched(self) -> BoolArray:
        """Events that carry out some node, shape ``(events,)``."""
        has_nodes = np.array([*(bool(key.nodes) for key in self.keys), False], np.bool_)
        return has_nodes[self.event_key]


def group_keys(keys: Sequence[EventKey], shared: BoolArray, talks: BoolArray) -> tuple[IntArray, IntArray]:
    """Groups of keys, shape ``(keys,)``, and of nodes, shape ``(nodes,)``; -1 is in none.

    Keys that carry out the same node form one group, unless compilers copy such nodes freely: those that are
    ``shared`` go to one key, rather one that does nothing else, and hold no keys together that have work of
    their own. A key that communicates is in a group only with nodes that do (``talks``): the partitioner's
    collectives are no part of a program that has none. Other keys leave such nodes alone where they have any
    else. Nearly O(links).
    """
    forest = _Forest(len(keys), len(shared))
    is_shared, is_talk = shared.tolist(), talks.tolist()
    usable = [_usable(key, is_talk) for key in keys]
    for number, nodes in enumerate(usable):
        for node in nodes:
            if not is_shared[node]:
                forest.join(number, node)
    owner: dict[int, int] = {}
    for number in sorted(range(len(keys)), key=forest.holds.__getitem__):
        for node in usable[number]:
            if is_shared[node]:
                owner.setdefault(node, number)
    for node, number in owner.items():
        forest.join(number, node)
    for number, nodes in enumerate(usable):
        if nodes and not forest.holds[number]:
            forest.join(number, nodes[0])
    groups = forest.groups()
    return groups[: len(keys)], groups[len(keys) :]


def _usable(key: EventKey, is_talk: Sequence[bool]) -> Sequence[int]:
    """The nodes that a key may share a group with."""
    same = [node for node in key.nodes if is_talk[node] == key.communicates]
    return same or ([] if key.communicates else key.nodes)


class _Forest:
    """Keys and nodes joined into trees (union-find with path halving); ``holds`` marks keys that were."""

    def __init__(self, num_keys: int, num_nodes: int) -> None:
        self.holds = [False] * num_keys
        self._parent = list(range(num_keys + num_nodes))

    def root(self, item: int) -> int:
        """What stands for the tree of a key or, past the keys, of a node."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def join(self, key: int, node: int) -> None:
        """Put a key and a node into one tree."""
        one, two = self.root(key), self.root(len(self.holds) + node)
        self._parent[max(one, two)] = min(one, two)
        self.holds[key] = True

    def groups(self) -> IntArray:
        """The group of each key, then of each node, numbered by first key; -1 for trees without keys."""
        roots = [self.root(item) for item in range(len(self._parent))]
        used = sorted({roots[key] for key, holds in enumerate(self.holds) if holds})
        place = {item: number for number, item in enumerate(used)}
        return np.array([place.get(item, -1) for item in roots], np.int64)
