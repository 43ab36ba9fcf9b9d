"""Measured profiles with host operations as op graphs of their device work, each operation with its cost."""

from __future__ import annotations

from hespas.converters.measured_ops.build import CostedOps, costed_ops
from hespas.converters.measured_ops.costs import EventCosts, event_costs, host_costs
from hespas.converters.measured_ops.device_events import KernelBounds, kernel_bounds
from hespas.converters.measured_ops.steps import (
    RECORDED_STEPS,
    RecordedSteps,
    recorded_steps,
    recorded_steps_of,
    recording_text,
    steps_since,
)
from hespas.converters.measured_ops.waits import (
    LaunchTimes,
    clock_ns,
    lanes_of,
    report_waits,
    with_delays_alone,
    with_waits,
)
from hespas.converters.measured_ops.workload import measured_workload

__all__ = [
    "RECORDED_STEPS",
    "CostedOps",
    "EventCosts",
    "KernelBounds",
    "LaunchTimes",
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
    "report_waits",
    "steps_since",
    "with_delays_alone",
    "with_waits",
]
