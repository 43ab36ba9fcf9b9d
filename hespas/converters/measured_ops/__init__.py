"""A measured profile with host operations as an op graph of its device work, each operation with its cost."""

from __future__ import annotations

from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.measured_ops.host_costs import host_costs
from hespas.converters.measured_ops.owners import resolve_owners
from hespas.converters.measured_ops.recorded import (
    RECORDED_STEPS,
    RecordedSteps,
    recorded_steps,
    recorded_steps_of,
)
from hespas.converters.measured_ops.spread import EventCosts, event_costs

__all__ = [
    "RECORDED_STEPS",
    "CostedOps",
    "EventCosts",
    "RecordedSteps",
    "costed_ops",
    "event_costs",
    "host_costs",
    "recorded_steps",
    "recorded_steps_of",
    "resolve_owners",
]
