"""Graphs of typed nodes with a cost, and their flattening into sequences of tokens.

A flattened graph lists its nodes depth first, each after all its parents. The *frontier* is the list of
earlier nodes that still have children to come. A token has the type of a node, its number of children, and
its parents as positions in the frontier, counted from the newest entry. Chains and trees therefore need few
distinct tokens, and every sequence whose tokens the frontier admits and that leaves no frontier is an acyclic
graph.

The order of children depends on the structure alone, so graphs that differ in node numbers only have the same
tokens (except for some highly symmetric graphs).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import nan
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import IntArray
from hespas.graph.errors import InvariantError, UsageError

__all__ = [
    "SIGNATURE_ENTRIES",
    "Frontier",
    "Signature",
    "Token",
    "TypedDag",
    "depths_of",
    "flatten",
    "structure_key",
    "unflatten",
]

SIGNATURE_ENTRIES = 8
"""Newest frontier entries in a signature."""
_MOST_DESCENDANTS = 1 << 40
_ROUNDS = 3

Signature = tuple[tuple[int, int], ...]
"""Type and number of pending children of the newest frontier entries, oldest first."""


class Token(NamedTuple):
    """Node of a flattened graph. ``parents`` are pairs of frontier position (0: newest) and type."""

    type: int
    fan_out: int
    parents: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class TypedDag:
    """Acyclic graph of typed nodes. Edge k leads from node ``sources[k]`` to node ``targets[k]``, and
    ``sources[k] < targets[k]``. ``cost`` is a positive label of the graph (NaN: unknown).
    """

    types: IntArray
    sources: IntArray
    targets: IntArray
    cost: float = nan

    def __len__(self) -> int:
        return len(self.types)

    @classmethod
    def from_edges(
        cls, types: Iterable[int], edges: Iterable[tuple[int, int]], cost: float = nan
    ) -> TypedDag:
        """Return the graph of these edges. Nodes are renumbered if an edge leads to a lower number."""
        columns = np.array(list(types), dtype=np.int64)
        pairs = np.array(sorted(set(edges)), dtype=np.int64).reshape(-1, 2)
        if len(pairs) and not 0 <= pairs.min() <= pairs.max() < len(columns):
            raise UsageError(
                f"an edge leads outside of nodes 0 to {len(columns) - 1}", hint="check the edges"
            )
        if (pairs[:, 0] < pairs[:, 1]).all():
            return cls(columns, pairs[:, 0], pairs[:, 1], cost)
        order = _topological_order(len(columns), pairs.tolist())
        if len(order) < len(columns):
            raise UsageError(
                f"{len(columns) - len(order)} nodes are on or behind a cycle", hint="remove an edge"
            )
        number = np.empty(len(columns), dtype=np.int64)
        number[order] = np.arange(len(columns))
        return cls(columns[order], number[pairs[:, 0]], number[pairs[:, 1]], cost)

    def edges(self) -> list[tuple[int, int]]:
        """Return the edges as pairs of nodes."""
        sources: list[int] = self.sources.tolist()
        targets: list[int] = self.targets.tolist()
        return list(zip(sources, targets, strict=True))

    def neighbours(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the parents and the children of each node."""
        parents: list[list[int]] = [[] for _ in range(len(self))]
        children: list[list[int]] = [[] for _ in range(len(self))]
        for source, target in self.edges():
            parents[target].append(source)
            children[source].append(target)
        return parents, children


def _topological_order(count: int, edges: Sequence[Sequence[int]]) -> list[int]:
    children: list[list[int]] = [[] for _ in range(count)]
    pending = [0] * count
    for source, target in edges:
        children[source].append(target)
        pending[target] += 1
    order = [node for node in range(count) if not pending[node]]
    for node in order:
        for child in children[node]:
            pending[child] -= 1
            if not pending[child]:
                order.append(child)
    return order


def depths_of(dag: TypedDag) -> IntArray:
    """Return the number of edges on the longest path to each node."""
    depths = [0] * len(dag)
    for source, target in sorted(dag.edges(), key=itemgetter(1)):
        depths[target] = max(depths[target], depths[source] + 1)
    return np.array(depths, dtype=np.int64)


@dataclass(slots=True)
class Frontier:
    """Nodes of a growing graph that still have children to come, oldest first. Numbers of nodes increase."""

    nodes: list[int] = field(default_factory=list[int])
    types: list[int] = field(default_factory=list[int])
    pending: list[int] = field(default_factory=list[int])

    def __len__(self) -> int:
        return len(self.nodes)

    def signature(self) -> Signature:
        """Return the types and pending children of the newest entries."""
        return tuple(zip(self.types[-SIGNATURE_ENTRIES:], self.pending[-SIGNATURE_ENTRIES:], strict=True))

    def admits(self, token: Token) -> bool:
        """Return True if all parents of the token are in the frontier and have their types."""
        count = len(self.nodes)
        return all(slot < count and self.types[-1 - slot] == kind for slot, kind in token.parents)

    def append(self, node: int, token: Token) -> list[int]:
        """Add a node and return its parents. The frontier must admit the token."""
        indices = [len(self.nodes) - 1 - slot for slot, _ in token.parents]
        parents = [self.nodes[index] for index in indices]
        for index in indices:
            self.pending[index] -= 1
        for index in sorted(indices, reverse=True):
            if not self.pending[index]:
                del self.nodes[index], self.types[index], self.pending[index]
        if token.fan_out:
            self.nodes.append(node)
            self.types.append(token.type)
            self.pending.append(token.fan_out)
        return parents


def _hashed(*parts: Iterable[int]) -> int:
    text = ";".join(",".join(map(str, part)) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _colours(
    types: Sequence[int], parents: Sequence[Sequence[int]], children: Sequence[Sequence[int]]
) -> list[int]:
    """Return a hash of the surroundings of each node that does not depend on node numbers."""
    count = len(types)
    above, below = [0] * count, [0] * count
    for node in range(count):
        above[node] = _hashed((types[node],), sorted(above[parent] for parent in parents[node]))
    for node in range(count - 1, -1, -1):
        below[node] = _hashed((types[node],), sorted(below[child] for child in children[node]))
    colours = [_hashed(pair) for pair in zip(above, below, strict=True)]
    for _ in range(_ROUNDS):
        colours = [
            _hashed(
                (colours[node],),
                sorted(colours[parent] for parent in parents[node]),
                sorted(colours[child] for child in children[node]),
            )
            for node in range(count)
        ]
    return colours


def structure_key(dag: TypedDag) -> int:
    """Return a hash of types and edges that is equal for graphs that differ in node numbers only."""
    return _hashed(sorted(_colours(dag.types.tolist(), *dag.neighbours())))


def flatten(dag: TypedDag) -> list[Token]:
    """Return the tokens of a graph."""
    types: list[int] = dag.types.tolist()
    parents, children = dag.neighbours()
    colours = _colours(types, parents, children)
    descendants = [1] * len(dag)
    for node in range(len(dag) - 1, -1, -1):
        total = 1 + sum(descendants[child] for child in children[node])
        descendants[node] = min(total, _MOST_DESCENDANTS)

    def late_first(nodes: Iterable[int]) -> list[int]:
        return sorted(nodes, key=lambda node: (descendants[node], types[node], colours[node]), reverse=True)

    pending = [len(row) for row in parents]
    stack = late_first(node for node in range(len(dag)) if not pending[node])
    number = [-1] * len(dag)
    tokens: list[Token] = []
    frontier = Frontier()
    while stack:
        node = stack.pop()
        number[node] = len(tokens)
        edges = sorted(
            (len(frontier) - 1 - bisect_left(frontier.nodes, number[parent]), types[parent])
            for parent in parents[node]
        )
        token = Token(types[node], len(children[node]), tuple(edges))
        frontier.append(number[node], token)
        tokens.append(token)
        ready: list[int] = []
        for child in children[node]:
            pending[child] -= 1
            if not pending[child]:
                ready.append(child)
        stack += late_first(ready)
    return tokens


def unflatten(tokens: Sequence[Token], cost: float = nan) -> TypedDag:
    """Return the graph of a sequence of tokens."""
    frontier = Frontier()
    sources: list[int] = []
    targets: list[int] = []
    for node, token in enumerate(tokens):
        if not frontier.admits(token):
            raise InvariantError(f"token {node} has a parent that is not in the frontier")
        parents = frontier.append(node, token)
        sources += parents
        targets += [node] * len(parents)
    if len(frontier):
        raise InvariantError(f"{len(frontier)} nodes have fewer children than declared")
    types = np.array([token.type for token in tokens], dtype=np.int64)
    return TypedDag(types, np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64), cost)
