"""Process groups and peers of one rank, as rules that hold for all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import prod

import numpy as np

from hespas.captures.mesh import Mesh
from hespas.graph import ExplicitGroups, GroupSet, Permutation, StridedGroups
from hespas.graph.errors import InvariantError
from hespas.graph.groups import Digit, digits_of

__all__ = ["MeshRule", "apart"]


class MeshRule:
    """Says of one group of ranks, or one pair of them, what it is on the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.strides = [prod(mesh.sizes[axis + 1 :]) for axis in range(len(mesh.sizes))]

    def coordinates(self, rank: int) -> list[int]:
        """Where a rank stands on each axis."""
        pairs = zip(self.strides, self.mesh.sizes, strict=True)
        return [rank // stride % size for stride, size in pairs]

    def group_set(self, ranks: Sequence[int], rank: int) -> tuple[GroupSet, str]:
        """All groups of which ``ranks``, with ``rank`` among them, is one; and how that is known: ``mesh``
        for those that vary over axes of the mesh, ``strides`` for ones that tile the ranks otherwise,
        ``alone`` for a group of which no rule is known, which then is the only one.
        """
        wanted = tuple(ranks)
        for count in range(1, len(self.mesh.sizes) + 1):
            for axes in combinations(range(len(self.mesh.sizes)), count):
                if prod(self.mesh.sizes[axis] for axis in axes) != len(wanted):
                    continue
                groups = StridedGroups.from_mesh(self.mesh.sizes, axes)
                if tuple(groups.members(groups.group_of(rank)).tolist()) == wanted:
                    return groups, "mesh"
        tiled = self._tiled(np.array(wanted, np.int64), rank)
        if tiled is not None:
            return tiled, "strides"
        return ExplicitGroups((wanted,)), "alone"

    def _tiled(self, ranks: np.ndarray[tuple[int], np.dtype[np.int64]], rank: int) -> GroupSet | None:
        members = digits_of(ranks - ranks[0])
        if members is None:
            return None
        left: list[Digit] = []
        reached = 1
        for size, stride in sorted(members, key=lambda digit: digit[1]):
            if stride % reached:
                return None
            left.insert(0, (stride // reached, reached))
            reached = size * stride
        if self.mesh.num_devices % reached:
            return None
        left.insert(0, (self.mesh.num_devices // reached, reached))
        try:
            groups = StridedGroups(tuple(left), members)
        except InvariantError:
            return None
        same = np.array_equal(groups.members(groups.group_of(rank)), ranks)
        return groups if same else None

    def message(self, source: int, target: int) -> Permutation:
        """The permutation of a message: the same step along the axis of the mesh on which its ends differ.
        Ends that differ on several axes are this one pair.
        """
        ends = zip(self.coordinates(source), self.coordinates(target), strict=True)
        moved = [axis for axis, (here, there) in enumerate(ends) if here != there]
        if len(moved) != 1:
            return Permutation.from_pairs([(source, target)], self.mesh.num_devices)
        axis = moved[0]
        stride = self.strides[axis]
        return Permutation(
            self.mesh.num_devices, (self.mesh.sizes[axis], stride), (target - source) // stride, wraps=False
        )


def apart(groups: GroupSet, communicator: int) -> GroupSet:
    """The same ranks in another process group."""
    return replace(groups, communicator=communicator) if communicator else groups
