"""Meshes of devices as they are written in commands: ``data=64,model=8``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from hespas.graph.errors import UsageError

__all__ = ["Mesh"]

_MAX_DEVICES = 1 << 24
"""Beyond this many devices a number is taken for a mistake."""


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
    def of(cls, axes: str | Mapping[str, int] | Mesh) -> Mesh:
        """From ``data=64,model=8`` or a mapping. Raises ``UsageError`` for anything else."""
        if isinstance(axes, Mesh):
            return axes
        if isinstance(axes, Mapping):
            for axis, extent in axes.items():
                if type(axis) is not str or type(extent) is not int:
                    raise UsageError(
                        f"mesh: {axis!r}: {extent!r} is no axis",
                        hint="names are text, sizes whole numbers: {'data': 64, 'model': 8}",
                    )
            return cls(tuple(axes), tuple(axes.values()))
        names: list[str] = []
        sizes: list[int] = []
        for part in axes.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not name or not equals or not size.isascii() or not size.isdigit() or len(size) > 9:
                raise UsageError(f"mesh: {part[:40]!r} is not AXIS=N; a mesh is written as data=64,model=8")
            names.append(name)
            sizes.append(int(size))
        return cls(tuple(names), tuple(sizes))

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by names."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        """Product of the sizes."""
        return prod(self.sizes)
