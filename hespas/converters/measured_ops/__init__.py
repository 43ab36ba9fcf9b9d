"""A measured profile with host operations as an op graph of its device work, each operation with its cost."""

from __future__ import annotations

from hespas.converters.measured_ops.build import CostedOps, costed_ops, resolve_owners
from hespas.converters.measured_ops.costs import (
    RECORDED_STEPS,
    EventCosts,
    RecordedSteps,
    event_costs,
    host_costs,
    recorded_steps,
    recorded_steps_of,
)

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
