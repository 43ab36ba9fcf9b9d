"""A measured profile with host operations as an op graph of its device work, each operation with its cost."""

from __future__ import annotations

from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.measured_ops.owners import resolve_owners

__all__ = ["CostedOps", "costed_ops", "resolve_owners"]
