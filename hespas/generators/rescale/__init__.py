"""Rescaling of a traced job to another size, by resizing axes of its mesh."""

from __future__ import annotations

from hespas.generators.rescale.mesh import find_mesh
from hespas.generators.rescale.resize import Rescale, parse_sizes

__all__ = ["Rescale", "find_mesh", "parse_sizes"]
