"""Numbers that describe graphs, and distances between graphs.

The *star* of a node is its type with the types of its parents and of its children. The distance of two graphs
is 1 - (common stars) / (nodes of the larger graph): 0 for equal graphs, 1 for graphs without a common star.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from hespas.generators.synth.sequences import TypedDag, depths_of
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["StarTable", "descriptors", "stars_of"]

_Star = tuple[int, tuple[int, ...], tuple[int, ...]]


def descriptors(dags: Sequence[TypedDag], num_types: int) -> FloatArray:
    """Return a row per graph: nodes, edges, depth, width, and the number of nodes of each type below
    ``num_types``.
    """
    rows = np.zeros((len(dags), 4 + num_types))
    for row, dag in zip(rows, dags, strict=True):
        depths = depths_of(dag)
        row[:4] = len(dag), len(dag.sources), depths.max() + 1, np.bincount(depths).max()
        row[4:] = np.bincount(dag.types[dag.types < num_types], minlength=num_types)
    return rows


def stars_of(dag: TypedDag) -> Counter[_Star]:
    """Count the stars of a graph."""
    types: list[int] = dag.types.tolist()
    parents, children = dag.neighbours()
    return Counter(
        (
            types[node],
            tuple(sorted(types[parent] for parent in parents[node])),
            tuple(sorted(types[child] for child in children[node])),
        )
        for node in range(len(types))
    )


class StarTable:
    """Star counts of a set of graphs, for distances from other graphs to all of them."""

    def __init__(self, dags: Sequence[TypedDag]) -> None:
        counts = [stars_of(dag) for dag in dags]
        self._column = {star: column for column, star in enumerate(sorted(set[_Star]().union(*counts)))}
        self._counts = np.zeros((len(self._column), len(dags)), dtype=np.int32)
        for row, stars in enumerate(counts):
            for star, count in stars.items():
                self._counts[self._column[star], row] = count
        self._sizes: IntArray = np.array([len(dag) for dag in dags], dtype=np.int64)

    def distances(self, dag: TypedDag) -> FloatArray:
        """Return the distance from a graph to each graph of the table."""
        columns: list[int] = []
        counts: list[int] = []
        for star, count in stars_of(dag).items():
            if (column := self._column.get(star)) is not None:
                columns.append(column)
                counts.append(count)
        common = np.minimum(self._counts[columns], np.array(counts, dtype=np.int32)[:, None]).sum(axis=0)
        shares: FloatArray = common / np.maximum(self._sizes, len(dag))
        return 1.0 - shares

    def matrix(self, dags: Iterable[TypedDag]) -> FloatArray:
        """Return the distance from each graph (row) to each graph of the table (column)."""
        rows = [self.distances(dag) for dag in dags]
        return np.array(rows).reshape(len(rows), len(self._sizes))
