"""Conversion of measured profiles with host operations to op graphs of device work with costs."""

from __future__ import annotations

from hespas.graph.deprecation import moved_names

__all__: list[str] = []

__getattr__ = moved_names(
    __name__,
    {
        "costed_ops": f"{__name__}.build",
        "host_costs": f"{__name__}.costs",
        "kernel_bounds": f"{__name__}.device_events",
        "measured_workload": f"{__name__}.workload",
        "recorded_steps": f"{__name__}.steps",
    },
)
