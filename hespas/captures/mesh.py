"""Meshes of devices as they are written in commands: ``data=64,model=8``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import index
from typing import Protocol, SupportsIndex, cast

from hespas.graph.errors import UsageError

__all__ = ["Mesh", "Shaped"]

_MAX_DEVICES = 1 << 24
"""Beyond this many devices a number is taken for a mistake."""


class Shaped(Protocol):
    """``jax.sharding.Mesh`` or ``AbstractMesh``: sizes of axes by name."""

    @property
    def shape(self) -> Mapping[str, int]:
        """Sizes by names, outermost axis first."""
        ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """Axes of devices, outermost first: ``names`` and ``sizes`` belong together.

    Device ids are row-major over the axes, as ``jax.sharding.AbstractMesh`` and Shardy count them.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.sizes):
            raise UsageError("a mesh has at least one axis, and a size for each: for example data=64,model=8")
        if len(set(self.names)) != len(self.names):
            raise UsageError(f"mesh {self}: an axis is named twice; give every axis a name of its own")
        if min(self.sizes) < 1:
            raise UsageError(f"mesh {self}: the size of an axis is 1 or more")
        if self.num_devices > _MAX_DEVICES:
            raise UsageError(f"mesh {self}: {self.num_devices:,} devices, at most {_MAX_DEVICES:,} are taken")

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))

    @classmethod
    def of(cls, axes: str | Mapping[str, int] | Mesh | Shaped) -> Mesh:
        """From ``data=64,model=8``, a mapping, or a mesh of JAX. Raises ``UsageError`` for anything else."""
        if isinstance(axes, Mesh):
            return axes
        if not isinstance(axes, str):
            return cls._of_sizes(axes)
        names: list[str] = []
        sizes: list[int] = []
        for part in axes.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not name or not equals or not size.isascii() or not size.isdigit() or len(size) > 9:
                raise UsageError(f"mesh: {part[:40]!r} is not AXIS=N; a mesh is written as data=64,model=8")
            names.append(name)
            sizes.append(int(size))
        return cls(tuple(names), tuple(sizes))

    @classmethod
    def _of_sizes(cls, axes: object) -> Mesh:
        kind = type(axes).__name__
        sizes: object = cast("object", axes) if isinstance(axes, Mapping) else getattr(axes, "shape", None)
        if not isinstance(sizes, Mapping):
            raise UsageError(f"mesh: {kind} is none; give {{'data': 64, 'model': 8}}, for example")
        found = dict[str, int]()
        for name, size in cast("Mapping[object, object]", sizes).items():
            if not isinstance(name, str) or not isinstance(size, SupportsIndex) or isinstance(size, bool):
                raise UsageError(
                    f"mesh: {name!r}: {size!r} is no axis; it has a name and a whole number of devices"
                )
            found[name] = index(size)
        return cls(tuple(found), tuple(found.values()))

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by names."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """Product of the sizes."""
        return prod(self.sizes)
