"""The mesh behind the groups of a job: axes with sizes, outermost first, and what moves along each.

Rank = sum of coordinate x stride, the last axis with stride 1. Every group set must be the ranks that differ
in some of the axes and agree in the others; whatever is not of that form proves that there is no such mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from hespas.graph import GroupSet, Permutation, StridedGroups, Workload
from hespas.graph.columns import IntArray
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.graph.groups import Digit, digits_of, groups_text, member_rows

__all__ = ["Mesh", "find_mesh", "group_axes", "permutation_axes", "stated_mesh"]

_NAME_THEM = "name the axes, outermost first: `mesh=dp=2,tp=4`"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes by name with their sizes, outermost first: the last one counts ranks that follow each other."""

    axes: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Their sizes."""
        return tuple(size for _, size in self.axes)

    @property
    def strides(self) -> tuple[int, ...]:
        """How far ranks are apart that are neighbours along each axis."""
        return tuple(prod(self.sizes[place + 1 :]) for place in range(len(self.axes)))

    @property
    def num_ranks(self) -> int:
        """Ranks of the job."""
        return prod(self.sizes)

    def size(self, name: str) -> int:
        """The size of one axis."""
        return dict(self.axes)[name]

    def resized(self, sizes: Mapping[str, int]) -> Mesh:
        """The same axes, some of them in another size."""
        return Mesh(tuple((name, sizes.get(name, size)) for name, size in self.axes))

    def covered(self, digit: Digit) -> tuple[str, ...] | None:
        """The axes that a digit runs over, outermost first; None where it cuts one."""
        size, stride = digit
        inside = [
            (name, extent)
            for (name, extent), step in zip(self.axes, self.strides, strict=True)
            if stride <= step < stride * size and extent > 1
        ]
        steps = [step for step in self.strides if stride <= step < stride * size]
        whole = prod(extent for _, extent in inside) == size and min(steps, default=0) == stride
        return tuple(name for name, _ in inside) if whole else None

    def groups(self, names: Sequence[str], communicator: int) -> GroupSet:
        """The groups of all ranks that vary over some axes, in that order of the members."""
        place = {name: row for row, name in enumerate(self.names)}
        made = StridedGroups.from_mesh(self.sizes, [place[name] for name in names])
        return StridedGroups(made.group_digits, made.member_digits, 0, communicator)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def stated_mesh(text: str, num_ranks: int) -> Mesh:
    """The mesh that somebody states: ``dp=2,tp=4``. Raises ``UsageError`` where it has other ranks."""
    axes: list[tuple[str, int]] = []
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not name or not equals or not (size.isascii() and size.isdigit()) or not int(size):
            raise UsageError(f"`mesh={text}`: {part!r} is no NAME=SIZE", hint=_NAME_THEM)
        axes.append((name, int(size)))
    mesh = Mesh(tuple(axes))
    if len(set(mesh.names)) < len(axes):
        raise UsageError(f"`mesh={text}` names an axis twice", hint=_NAME_THEM)
    if mesh.num_ranks != num_ranks:
        raise UsageError(
            f"`mesh={text}` has {mesh.num_ranks:,} ranks, the job {num_ranks:,}",
            hint="give the mesh of the trace itself, not that of the job to be",
        )
    return mesh


def find_mesh(workload: Workload) -> Mesh:
    """The one mesh whose axes explain all groups and permutations; axes are called ``axis0``, ... from the
    outermost. Raises ``UnsupportedError`` where there is none.
    """
    marks = {1, workload.num_ranks}
    for groups in workload.group_sets:
        for size, stride in _member_digits(groups, workload.num_ranks):
            marks |= {stride, stride * size}
    for permutation in _permutations(workload):
        if permutation.pairs is None:
            size, stride = permutation.digit
            marks |= {stride, stride * size}
    ordered = sorted(marks)
    wrong = next((pair for pair in pairwise(ordered) if pair[1] % pair[0]), None)
    if wrong is not None:
        raise UnsupportedError(
            f"no mesh explains the groups: one splits the ranks every {wrong[0]}, another every {wrong[1]}. "
            f"Found: {_listed(workload)}",
            position="process groups",
            hint="rescale a job whose groups are the axes of one mesh",
        )
    sizes = [high // low for low, high in reversed(list(pairwise(ordered)))]
    return Mesh(tuple((f"axis{place}", size) for place, size in enumerate(sizes)))


def _member_digits(groups: GroupSet, num_ranks: int) -> tuple[Digit, ...]:
    """The digits that the members of each group run over, slowest first."""
    rows = groups if isinstance(groups, StridedGroups) else member_rows(groups)
    if isinstance(rows, StridedGroups):
        digits, starts = rows.member_digits, _starts(rows)
    else:
        first = np.array(rows[0] if len(rows) else (), np.int64)
        shape = digits_of(first - first[0]) if len(first) else ()
        starts = np.array([row[0] for row in rows if len(row)], np.int64)
        alike = shape is not None and all(
            len(row) == len(first) and np.array_equal(np.array(row) - row[0], first - first[0])
            for row in rows
        )
        digits = (shape or ()) if alike else ()
        if not alike:
            raise _no_axis(groups, num_ranks)
    aligned = all(not (starts // stride % size).any() for size, stride in digits)
    if not aligned:
        raise _no_axis(groups, num_ranks)
    return digits


def _starts(groups: StridedGroups) -> IntArray:
    starts = np.full(1, groups.base, np.int64)
    for size, stride in groups.group_digits:
        starts = (starts[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return starts


def _no_axis(groups: GroupSet, num_ranks: int) -> UnsupportedError:
    return UnsupportedError(
        f"the ranks of a process group are no axes of a mesh: {groups_text(groups, num_ranks)}",
        position="process groups",
        hint="rescale a job whose groups are the axes of one mesh",
    )


def _listed(workload: Workload) -> str:
    shown = [groups_text(groups, workload.num_ranks) for groups in workload.group_sets[:6]]
    return "; ".join(shown) + ("; ..." if len(workload.group_sets) > 6 else "")


def _permutations(workload: Workload) -> Iterator[Permutation]:
    for graph in workload.classes:
        yield from graph.permutations


def group_axes(groups: GroupSet, mesh: Mesh) -> tuple[str, ...]:
    """The axes that the members of a group set vary over, in ring order. Raises ``UnsupportedError``."""
    names: list[str] = []
    for digit in _member_digits(groups, mesh.num_ranks):
        covered = mesh.covered(digit)
        if covered is None:
            raise UnsupportedError(
                f"a group set is not made of the axes {mesh}: {groups_text(groups, mesh.num_ranks)}",
                position="process groups",
                hint=_NAME_THEM,
            )
        names += covered
    return tuple(names)


def permutation_axes(permutation: Permutation, mesh: Mesh) -> tuple[str, ...]:
    """The axes that messages go along. Raises ``UnsupportedError`` for pairs that follow none."""
    covered = None if permutation.pairs is not None else mesh.covered(permutation.digit)
    if covered is None:
        raise UnsupportedError(
            f"messages between ranks do not go along one axis of the mesh {mesh}",
            position="point-to-point messages",
            hint=_NAME_THEM,
        )
    return covered
