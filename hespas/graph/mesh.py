"""Device meshes (``data=64,model=8``), and groups of ranks described by the mesh axes that they span."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Protocol, SupportsIndex, cast

from hespas.graph.errors import UsageError
from hespas.graph.groups import Digit, GroupSet, Permutation, StridedGroups

__all__ = ["JaxMesh", "Mesh", "axes_of", "axis_of_shift"]

_MAX_DEVICES = 1 << 24
"""Limit on the number of devices; a larger number is a mistake."""
_EXAMPLE = "data=64,model=8"
_EXAMPLE_MAPPING = "{'data': 64, 'model': 8}"


class JaxMesh(Protocol):
    """Protocol of ``jax.sharding.Mesh`` and ``AbstractMesh``: axis sizes by name."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Size of each axis by name, outermost axis first."""
        ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes of a mesh of devices or ranks, outermost first: ``names`` and ``sizes`` have equal length.

    Device ids are row-major over the axes, as in ``jax.sharding.AbstractMesh`` and Shardy: rank = sum of
    coordinate x stride, the last axis with stride 1. A mesh without axes is one device.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes):
            raise UsageError(
                f"mesh: {len(self.names)} axes but {len(self.sizes)} sizes", hint=f"write {_EXAMPLE}"
            )
        if len(set(self.names)) != len(self.names):
            repeated = next(name for name in self.names if self.names.count(name) > 1)
            raise UsageError(f"mesh {self}: axis {repeated} is named twice", hint="name each axis once")
        if min(self.sizes, default=1) < 1:
            axis = self.names[self.sizes.index(min(self.sizes))]
            raise UsageError(
                f"mesh {self}: the size of axis {axis} is {min(self.sizes)}", hint="use sizes of 1 or more"
            )
        if self.num_devices > _MAX_DEVICES:
            raise UsageError(
                f"mesh {self}: {self.num_devices:,} devices exceed the limit of {_MAX_DEVICES:,}",
                hint="use smaller sizes",
            )

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @classmethod
    def of(cls, axes: str | Mapping[str, int] | Mesh | JaxMesh) -> Mesh:
        """Return the mesh given as ``data=64,model=8``, a mapping, or a JAX mesh.

        Raises ``UsageError`` for anything else.
        """
        if isinstance(axes, Mesh):
            return axes
        if isinstance(axes, str):
            names: list[str] = []
            sizes: list[int] = []
            for part in axes.split(","):
                name, equals, text = (piece.strip() for piece in part.partition("="))
                if not name or not equals or not text.isascii() or not text.isdigit() or len(text) > 9:
                    raise UsageError(f"mesh: {part[:40]!r} is not AXIS=N", hint=f"write {_EXAMPLE}")
                names.append(name)
                sizes.append(int(text))
            return cls(tuple(names), tuple(sizes))
        shape: object = axes if isinstance(axes, Mapping) else getattr(axes, "shape", None)
        if not isinstance(shape, Mapping):
            type_name = type(axes).__name__
            raise UsageError(f"mesh: {type_name} is not a mesh", hint=f"pass {_EXAMPLE_MAPPING}")
        size_of = dict[str, int]()
        for axis, size in cast("Mapping[object, object]", shape).items():
            if not isinstance(axis, str) or not isinstance(size, SupportsIndex) or isinstance(size, bool):
                raise UsageError(
                    f"mesh: {axis!r}: {size!r} is not a name and a whole number of devices",
                    hint=f"pass {_EXAMPLE_MAPPING}",
                )
            size_of[axis] = index(size)
        if not size_of:
            raise UsageError("mesh: no axis is given", hint=f"write {_EXAMPLE}")
        return cls(tuple(size_of), tuple(size_of.values()))

    @property
    def axes(self) -> dict[str, int]:
        """Axis sizes by name."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """Number of devices, the product of the axis sizes."""
        return prod(self.sizes)

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance of neighbouring ranks along each axis."""
        return tuple(prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes)))

    def resized(self, sizes: Mapping[str, int]) -> Mesh:
        """Return the mesh with other sizes of some axes."""
        return Mesh(self.names, tuple(sizes.get(name, size) for name, size in self.axes.items()))

    def covered(self, digit: Digit) -> tuple[str, ...] | None:
        """Return the names of the mesh axes that a digit (size, stride) of rank numbers covers, outermost
        first.

        Return None if the digit covers only part of an axis.
        """
        labels = [label for _, label in _axes_of_span(*digit, self)]
        return tuple(reversed(labels)) if set(labels) <= set(self.names) else None

    def groups(self, names: Sequence[str], communicator: int) -> GroupSet:
        """Return the groups of ranks that differ only in their coordinates on the axes ``names``.

        Members are ordered by these axes, in the given order. ``communicator`` distinguishes process groups
        of the same ranks.
        """
        groups = StridedGroups.from_mesh(self.sizes, [self.names.index(name) for name in names])
        return StridedGroups(groups.group_digits, groups.member_digits, 0, communicator)


def axes_of(groups: GroupSet, mesh: Mesh) -> str:
    """Return the axes over which the ranks of a group vary, separated by commas: ``data,model``.

    Part of an axis is written as in Shardy: ``data:(2)4`` means that the axis is divided into 2 x 4 x rest,
    and ranks vary over the 4. Groups of one rank give an empty text; groups that do not follow the mesh give
    ``?``. The order of ranks within a group is ignored.
    """
    if groups.group_size == 1:
        return ""
    if not isinstance(groups, StridedGroups) or groups.num_ranks != mesh.num_devices:
        return "?"
    # Join digits that continue each other, so that equal sets of members have equal spans.
    spans: list[tuple[int, int]] = []
    for size, stride in sorted(
        (digit for digit in groups.member_digits if digit[0] > 1), key=lambda digit: digit[1]
    ):
        if spans and spans[-1][0] * spans[-1][1] == stride:
            spans[-1] = (spans[-1][0] * size, spans[-1][1])
        else:
            spans.append((size, stride))
    labels = dict[int, str]()
    for size, stride in spans:
        labels.update(_axes_of_span(size, stride, mesh))
    return ",".join(labels[axis] for axis in sorted(labels)) if -1 not in labels else "?"


def axis_of_shift(permutation: Permutation, mesh: Mesh) -> tuple[str, int]:
    """Return the axis along which ranks send to their neighbours, and the number of ranks along that axis.

    Return ``?`` and the number of devices if the messages do not follow one axis.
    """
    size, stride = permutation.digit
    if permutation.pairs is not None or permutation.num_ranks != mesh.num_devices:
        return "?", mesh.num_devices
    labels = [label for _, label in _axes_of_span(size, stride, mesh)]
    return (labels[0], size) if len(labels) == 1 and "?" not in labels else ("?", mesh.num_devices)


def _axes_of_span(size: int, stride: int, mesh: Mesh) -> Iterator[tuple[int, str]]:
    """Yield the index and label of each mesh axis over which rank numbers vary if they take ``size`` values
    at distance ``stride``.

    If the values do not follow the axes, yield index -1 and ``?``.
    """
    axis_stride = 1
    for axis in reversed(range(len(mesh.sizes))):
        extent = mesh.sizes[axis]
        if size > 1 and axis_stride <= stride < axis_stride * extent:
            offset = stride // axis_stride
            covered = min(size, extent // offset)
            if extent % (offset * covered) or size % covered or stride % axis_stride:
                yield -1, "?"
                return
            name = mesh.names[axis]
            yield axis, name if covered == extent else f"{name}:({extent // (offset * covered)}){covered}"
            size, stride = size // covered, stride * covered
        axis_stride *= extent
    if size > 1:
        yield -1, "?"
