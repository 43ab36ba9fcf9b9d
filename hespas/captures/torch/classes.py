"""Rank classes of a mesh (ranks that run the same program), derived from a few recorded ranks.

The first, middle and last rank along each axis are recorded. Where two of them differ, the interval between
them is bisected until the border is located: ranks differ in contiguous intervals (stages of a pipeline, the
last shard of an uneven split). The intervals of all axes are combined, and each combination is recorded once.
Ranks inside an interval are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import numpy as np

from hespas.graph import OpGraph
from hespas.graph.columns import SmallIntArray
from hespas.graph.equality import graphs_equal
from hespas.graph.errors import UnsupportedError
from hespas.graph.mesh import Mesh

__all__ = ["MAX_RECORDED", "RankClasses", "find_classes"]

MAX_RECORDED = 256
"""Limit on the number of recorded ranks."""


class RankClasses:
    """Rank classes of a captured job. ``graphs`` has one graph per class, and ``first`` the rank on which it
    was recorded.
    """

    def __init__(self, mesh: Mesh, graph_at: Callable[[int], OpGraph]) -> None:
        self.mesh = mesh
        self.graphs: list[OpGraph] = []
        self.first: list[int] = []
        self._graph_at = graph_at
        self._class_of_rank: dict[int, int] = {}

    @property
    def num_recorded(self) -> int:
        """Number of ranks that were recorded."""
        return len(self._class_of_rank)

    def of(self, coordinates: tuple[int, ...]) -> int:
        """Return the class of the rank at these mesh coordinates. A rank whose class is not known yet is
        recorded.
        """
        rank = 0
        for coordinate, size in zip(coordinates, self.mesh.sizes, strict=True):
            rank = rank * size + coordinate
        if rank not in self._class_of_rank:
            if len(self._class_of_rank) >= MAX_RECORDED:
                raise UnsupportedError(
                    f"mesh {self.mesh}: more than {MAX_RECORDED} ranks differ from each other",
                    hint="make the shapes and branches that differ between ranks the same on most of them",
                )
            graph = self._graph_at(rank)
            equal = (index for index, other in enumerate(self.graphs) if not graphs_equal(other, graph))
            rank_class = next(equal, len(self.graphs))
            if rank_class == len(self.graphs):
                self.graphs.append(graph)
                self.first.append(rank)
            self._class_of_rank[rank] = rank_class
        return self._class_of_rank[rank]

    def starts_on(self, axis: int) -> list[int]:
        """Return the coordinates along an axis at which the class changes, with 0 first; all other
        coordinates are 0.
        """
        size = self.mesh.sizes[axis]

        def class_at(coordinate: int) -> int:
            return self.of(tuple(coordinate if index == axis else 0 for index in range(len(self.mesh.sizes))))

        starts = {0}
        intervals = list(pairwise(sorted({0, size // 2, size - 1})))
        while intervals:
            low, high = intervals.pop()
            if class_at(low) == class_at(high):
                continue
            if high - low == 1:
                starts.add(high)
                continue
            middle = (low + high) // 2
            intervals += [(low, middle), (middle, high)]
        return sorted(starts)


def find_classes(mesh: Mesh, graph_at: Callable[[int], OpGraph]) -> tuple[RankClasses, SmallIntArray]:
    """Return the rank classes of a mesh in order of their first ranks, and the class of each rank, shape
    ``(ranks,)``. ``graph_at(rank)`` records a rank.

    If all recorded ranks are equal, 1 + 2 x axes ranks are recorded. Otherwise O(classes x log ranks) more
    are recorded. Raises ``UnsupportedError`` beyond :data:`MAX_RECORDED`.
    """
    classes = RankClasses(mesh, graph_at)
    classes.of((0,) * len(mesh.sizes))  # records at least one rank, even if every axis has size 1
    starts = [classes.starts_on(axis) for axis in range(len(mesh.sizes))]
    shape = tuple(map(len, starts))
    if max(shape) == 1:
        return classes, np.broadcast_to(np.int32(0), (mesh.num_devices,))
    class_table = np.zeros(shape, np.int32)
    for cell in product(*map(range, shape)):
        class_table[cell] = classes.of(
            tuple(axis_starts[index] for axis_starts, index in zip(starts, cell, strict=True))
        )
    intervals = [
        np.searchsorted(np.array(axis_starts), np.arange(size), side="right") - 1
        for axis_starts, size in zip(starts, mesh.sizes, strict=True)
    ]
    rank_class = np.ascontiguousarray(class_table[np.ix_(*intervals)].reshape(-1))
    _, first = np.unique(rank_class, return_index=True)
    order = np.argsort(first)
    classes.graphs = [classes.graphs[index] for index in order]
    classes.first = [classes.first[index] for index in order]
    return classes, np.argsort(order).astype(np.int32)[rank_class]
