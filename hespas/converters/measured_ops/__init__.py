"""A measured profile with host operations as an op graph of its device work, each operation with its cost."""

from __future__ import annotations

from hespas.converters.measured_ops.bounds import KernelBounds, kernel_bounds
from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.measured_ops.costs import EventCosts, event_costs, host_costs
from hespas.converters.measured_ops.steps import (
    RECORDED_STEPS,
    RecordedSteps,
    recorded_steps,
    recorded_steps_of,
    recording_text,
    steps_since,
)
from hespas.converters.measured_ops.waits import (
    Launches,
    clock_ns,
    lanes_of,
    tell_waits,
    with_delays_alone,
    with_waits,
)
from hespas.converters.measured_ops.workload import measured_workload

__all__ = [
    "RECORDED_STEPS",
    "CostedOps",
    "EventCosts",
    "KernelBounds",
    "Launches",
    "RecordedSteps",
    "clock_ns",
    "costed_ops",
    "event_costs",
    "host_costs",
    "kernel_bounds",
    "lanes_of",
    "measured_workload",
    "recorded_steps",
    "recorded_steps_of",
    "recording_text",
    "steps_since",
    "tell_waits",
    "with_delays_alone",
    "with_waits",
]
