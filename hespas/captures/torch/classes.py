"""Which ranks of a mesh run the same program, from a few ranks that were recorded.

Along each axis the first rank, the last and the one in the middle are recorded. Where two of them differ,
the ranks between are halved until the border is found: what differs between ranks (stages of a pipeline, the
last shard of an uneven split) does so in stretches. Stretches of several axes are combined, and each
combination is recorded once. Ranks inside a stretch are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np

from hespas.captures.mesh import Mesh
from hespas.graph import OpGraph
from hespas.graph.columns import SmallIntArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.workload import graphs_equal

__all__ = ["MOST_RECORDED", "RankClasses", "find_classes"]

MOST_RECORDED = 256
"""Ranks that are recorded at most."""


class RankClasses:
    """The classes found so far: ``graphs``, and of each the rank it was recorded on (``first``)."""

    def __init__(self, mesh: Mesh, graph_at: Callable[[int], OpGraph]) -> None:
        self.mesh = mesh
        self.graphs: list[OpGraph] = []
        self.first: list[int] = []
        self._graph_at = graph_at
        self._known: dict[int, int] = {}

    @property
    def num_recorded(self) -> int:
        """Ranks that were recorded."""
        return len(self._known)

    def of(self, coordinates: tuple[int, ...]) -> int:
        """The class of the rank at a place of the mesh, which is recorded where it was not yet."""
        rank = 0
        for place, size in zip(coordinates, self.mesh.sizes, strict=True):
            rank = rank * size + place
        found = self._known.get(rank)
        if found is None:
            if len(self._known) >= MOST_RECORDED:
                raise UnsupportedError(
                    f"mesh {self.mesh}: {MOST_RECORDED} ranks were recorded and still others differ",
                    hint="make what differs between ranks (shapes, branches) the same on most of them",
                )
            found = self._known[rank] = self._class_of(self._graph_at(rank), rank)
        return found

    def _class_of(self, graph: OpGraph, rank: int) -> int:
        for index, known in enumerate(self.graphs):
            if not graphs_equal(known, graph):
                return index
        self.graphs.append(graph)
        self.first.append(rank)
        return len(self.graphs) - 1

    def starts_on(self, axis: int) -> list[int]:
        """The first place of each stretch of equal ranks along an axis, at the origin of the others."""
        size = self.mesh.sizes[axis]

        def at(place: int) -> int:
            return self.of(tuple(place if each == axis else 0 for each in range(len(self.mesh.sizes))))

        starts = {0}
        looked = sorted({0, size // 2, size - 1})
        todo = list(pairwise(looked))
        while todo:
            low, high = todo.pop()
            if at(low) == at(high):
                continue
            if high - low == 1:
                starts.add(high)
                continue
            middle = (low + high) // 2
            todo += [(low, middle), (middle, high)]
        return sorted(starts)


def find_classes(mesh: Mesh, graph_at: Callable[[int], OpGraph]) -> tuple[RankClasses, SmallIntArray]:
    """The classes of a mesh, in order of their first ranks, and the class of each rank, ``(ranks,)``.

    Records 1 + 2 x axes ranks where all are equal, and O(classes x log ranks) more where they are not. Raises
    ``UnsupportedError`` past :data:`MOST_RECORDED`.
    """
    classes = RankClasses(mesh, graph_at)
    starts = [classes.starts_on(axis) for axis in range(len(mesh.sizes))]
    shape = tuple(map(len, starts))
    if max(shape) == 1:
        return classes, np.broadcast_to(np.int32(0), (mesh.num_devices,))
    table = np.zeros(shape, np.int32)
    for place in product(*map(range, shape)):
        table[place] = classes.of(tuple(firsts[at] for firsts, at in zip(starts, place, strict=True)))
    stretches = [
        np.searchsorted(np.array(firsts), np.arange(size), side="right") - 1
        for firsts, size in zip(starts, mesh.sizes, strict=True)
    ]
    rank_class = np.ascontiguousarray(table[np.ix_(*stretches)].reshape(-1))
    _, first = np.unique(rank_class, return_index=True)
    order = np.argsort(first)
    classes.graphs = [classes.graphs[index] for index in order]
    classes.first = [classes.first[index] for index in order]
    return classes, np.argsort(order).astype(np.int32)[rank_class]
