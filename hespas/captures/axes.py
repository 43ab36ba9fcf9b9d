"""Groups of ranks told as axes of the mesh: ``model`` for those that vary over that axis alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hespas.captures.mesh import Mesh
from hespas.graph import GroupSet, Permutation, StridedGroups

__all__ = ["CollectiveRow", "axes_of", "axis_of_shift"]


class CollectiveRow(NamedTuple):
    """Collectives of one kind over the same axes: how many a rank runs in a step, and their payload."""

    kind: str
    axes: str
    groups: int
    group_size: int
    times: float
    size_bytes: float


def axes_of(groups: GroupSet, mesh: Mesh) -> str:
    """The axes over which each group varies, with commas: ``data,model``. A part of an axis is told as
    Shardy does, ``data:(2)4``: of the axis cut into 2, 4 and a rest, the 4. Nothing where a group has one
    rank, ``?`` where groups do not follow the mesh. The order of ranks within a group is not looked at.
    """
    if groups.group_size == 1:
        return ""
    if not isinstance(groups, StridedGroups) or groups.num_ranks != mesh.num_devices:
        return "?"
    named = dict[int, str]()
    for size, stride in _spans(groups.member_digits):
        for place, text in _along(size, stride, mesh):
            named[place] = text
    return ",".join(named[place] for place in sorted(named)) if -1 not in named else "?"


def axis_of_shift(permutation: Permutation, mesh: Mesh) -> tuple[str, int]:
    """The axis along which ranks hand on, and how many ranks there are along it; ``?`` and all of them where
    messages do not follow one axis.
    """
    size, stride = permutation.digit
    if permutation.pairs is not None or permutation.num_ranks != mesh.num_devices:
        return "?", mesh.num_devices
    found = [text for _, text in _along(size, stride, mesh)]
    return (found[0], size) if len(found) == 1 and "?" not in found else ("?", mesh.num_devices)


def _spans(digits: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Digits joined where one goes on where another ends, so that equal sets of members have equal spans."""
    spans: list[tuple[int, int]] = []
    for size, stride in sorted((digit for digit in digits if digit[0] > 1), key=lambda digit: digit[1]):
        if spans and spans[-1][0] * spans[-1][1] == stride:
            spans[-1] = (spans[-1][0] * size, spans[-1][1])
        else:
            spans.append((size, stride))
    return spans


def _along(size: int, stride: int, mesh: Mesh) -> Iterator[tuple[int, str]]:
    """The places of the axes that a span of members runs along, with what to call them; -1 for none."""
    reached = 1  # the stride of the axis
    for place in reversed(range(len(mesh.sizes))):
        extent = mesh.sizes[place]
        if size > 1 and reached <= stride < reached * extent:
            offset = stride // reached
            taken = min(size, extent // offset)
            if extent % (offset * taken) or size % taken or stride % reached:
                yield -1, "?"
                return
            name = mesh.names[place]
            yield place, name if taken == extent else f"{name}:({extent // (offset * taken)}){taken}"
            size, stride = size // taken, stride * taken
        reached *= extent
    if size > 1:
        yield -1, "?"
