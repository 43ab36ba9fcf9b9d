"""Sums of decision trees as flat columns, evaluated without the library that grew them.

A tree's leaves are numbered left to right. Each inner node says which column it looks at, the split, and
which leaves hang below its left branch; where an operation goes right, those are out. What is left of all
leaves after every node has spoken, lowest first, is the leaf: "QuickScorer" (Lucchese et al., SIGIR 2015).
Per tree and column the verdict of all its nodes is one table over the column's interval number.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray
from hespas.graph.errors import InvariantError

__all__ = ["MOST_LEAVES", "Forest"]

MOST_LEAVES = 64
"""Leaves of one tree: bits of a word."""

_ROWS_AT_ONCE = 4096
_TREES_AT_ONCE = 128
_CODES = 257
_PRIME = 67
"""Powers of two below 2^64 differ modulo 67, so a single bit tells its place by one division."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Forest:
    """``baseline`` plus the leaf of each tree.

    ``column``, ``split``, ``first`` and ``last`` are of shape ``(inner nodes,)``: an operation whose number
    in ``column`` is at most ``edges[split]`` goes left, to the leaves ``first`` to ``last - 1``.
    ``node_offsets``, ``leaf_offsets`` (trees + 1) and ``edge_offsets`` (columns + 1) delimit them; ``leaf``
    times ``scale`` is a leaf's value.
    """

    column: NDArray[np.uint8]
    split: NDArray[np.uint8]
    first: NDArray[np.uint8]
    last: NDArray[np.uint8]
    node_offsets: NDArray[np.int32]
    leaf: NDArray[np.int16]
    leaf_offsets: NDArray[np.int32]
    edges: NDArray[np.float32]
    edge_offsets: NDArray[np.int32]
    scale: float
    baseline: float

    def __post_init__(self) -> None:
        """Check what evaluation relies on, so that a damaged file is an error and not a wrong time."""
        nodes = np.diff(self.node_offsets)
        leaves = np.diff(self.leaf_offsets)
        edges = np.diff(self.edge_offsets)
        if not (len(self.node_offsets) and len(self.leaf_offsets) and len(self.edge_offsets)):
            raise InvariantError("Forest: columns are empty")
        whole = (
            self.node_offsets[0] == self.leaf_offsets[0] == self.edge_offsets[0] == 0
            and self.node_offsets[-1] == len(self.column) == len(self.split)
            and len(self.first) == len(self.last) == len(self.column)
            and self.leaf_offsets[-1] == len(self.leaf)
            and self.edge_offsets[-1] == len(self.edges)
        )
        if not whole or len(nodes) != len(leaves) or bool((leaves != nodes + 1).any()):
            raise InvariantError("Forest: columns differ in length")
        if (len(leaves) and int(leaves.max()) > MOST_LEAVES) or bool((edges < 0).any()):
            raise InvariantError(f"Forest: a tree of more than {MOST_LEAVES} leaves")
        if len(self.column) and int(self.column.max()) >= len(edges):
            raise InvariantError("Forest: a node looks at a column that is not there")
        if bool((self.split >= edges[self.column]).any()):
            raise InvariantError("Forest: a node splits where no edge is")
        most = np.repeat(leaves, nodes)
        if bool(((self.first >= self.last) | (self.last >= most)).any()):
            raise InvariantError("Forest: a node leads to leaves that are not there")
        same_column = np.repeat(np.arange(len(edges)), edges)
        rising = (np.diff(self.edges) > 0) | (np.diff(same_column) > 0)
        if not bool(np.isfinite(self.edges).all()) or not bool(rising.all()):
            raise InvariantError("Forest: the edges of a column do not rise")

    @property
    def trees(self) -> int:
        """Number of trees."""
        return len(self.leaf_offsets) - 1

    def predict(self, table: NDArray[np.float32]) -> FloatArray:
        """The sum for each row of ``table`` (ops, columns), without NaN. About 2 us per row and 300 trees."""
        if table.shape[1] != len(self.edge_offsets) - 1:
            raise InvariantError(f"Forest: {table.shape[1]} columns, made for {len(self.edge_offsets) - 1}")
        total = np.full(len(table), self.baseline)
        codes = self._codes(table)
        for start in range(0, self.trees, _TREES_AT_ONCE):
            verdicts = _Verdicts.of(self, start, min(start + _TREES_AT_ONCE, self.trees))
            for row in range(0, len(table), _ROWS_AT_ONCE):
                verdicts.add(codes[:, row : row + _ROWS_AT_ONCE], total[row : row + _ROWS_AT_ONCE])
        return total

    def _codes(self, table: NDArray[np.float32]) -> NDArray[np.uint8]:
        """How many edges of its column each value is above; shape (columns, ops)."""
        codes = np.zeros((table.shape[1], len(table)), np.uint8)
        for column in range(table.shape[1]):
            edges = self.edges[self.edge_offsets[column] : self.edge_offsets[column + 1]]
            if len(edges):
                codes[column] = np.searchsorted(edges, np.ascontiguousarray(table[:, column]), side="left")
        return codes


@dataclass(frozen=True, slots=True, eq=False)
class _Verdicts:
    """Some trees ready to run: ``leaves`` that stay, of shape (pairs of tree and column, codes)."""

    leaves: NDArray[np.uint64]
    column: list[int]
    offsets: list[int]
    value: FloatArray

    @classmethod
    def of(cls, forest: Forest, start: int, stop: int) -> _Verdicts:
        nodes = slice(int(forest.node_offsets[start]), int(forest.node_offsets[stop]))
        tree = np.repeat(np.arange(stop - start), np.diff(forest.node_offsets[start : stop + 1]))
        key = tree.astype(np.int64) * 256 + forest.column[nodes]
        pairs, place = np.unique(key, return_inverse=True)
        one = np.uint64(1)
        below = (one << forest.last[nodes].astype(np.uint64)) - (one << forest.first[nodes].astype(np.uint64))
        leaves = np.full((len(pairs), _CODES), np.iinfo(np.uint64).max, np.uint64)
        np.bitwise_and.at(leaves, (place.reshape(-1), forest.split[nodes].astype(np.int64) + 1), ~below)
        np.bitwise_and.accumulate(leaves, axis=1, out=leaves)
        value = np.zeros((stop - start, _PRIME))
        bounds: list[int] = forest.leaf_offsets[start : stop + 1].tolist()
        slots = np.array([pow(2, bit, _PRIME) for bit in range(MOST_LEAVES)])
        for number, (low, high) in enumerate(pairwise(bounds)):
            value[number, slots[: high - low]] = forest.leaf[low:high] * forest.scale
        offsets = np.searchsorted(pairs, np.arange(stop - start + 1) * 256)
        return cls(leaves, (pairs % 256).tolist(), offsets.tolist(), value)

    def add(self, codes: NDArray[np.uint8], total: FloatArray) -> None:
        """Add these trees' leaves to ``total``; ``codes`` of shape (columns, ops)."""
        place = codes.astype(np.intp)
        alive, verdict = np.empty(len(total), np.uint64), np.empty(len(total), np.uint64)
        for tree, (low, high) in enumerate(pairwise(self.offsets)):
            alive[:] = np.iinfo(np.uint64).max
            for pair in range(low, high):
                np.take(self.leaves[pair], place[self.column[pair]], out=verdict, mode="clip")
                np.bitwise_and(alive, verdict, out=alive)
            np.bitwise_and(alive, ~alive + np.uint64(1), out=alive)
            total += self.value[tree].take((alive % np.uint64(_PRIME)).astype(np.intp))
