"""A measured profile with host operations as an op graph of its device work, each operation with its cost."""

from __future__ import annotations

from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.measured_ops.owners import resolve_owners
from hespas.converters.measured_ops.spread import EventCosts, event_costs

__all__ = ["CostedOps", "EventCosts", "costed_ops", "event_costs", "resolve_owners"]
