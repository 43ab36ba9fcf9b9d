"""A job of another size from the trace of a small one: axes of its mesh made longer or shorter."""

from __future__ import annotations

from hespas.generators.rescale.mesh import Mesh, find_mesh
from hespas.generators.rescale.resize import Rescale, parse_sizes

__all__ = ["Mesh", "Rescale", "find_mesh", "parse_sizes"]
