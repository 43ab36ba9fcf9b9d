"""Discrete-event simulation of one step: when each node of each rank runs, and which path determines the step
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.simulator.entry import simulate
    from hespas.simulator.job import JobScheduler
    from hespas.simulator.list_scheduler import ListScheduler
    from hespas.simulator.results import ClassResult, CriticalPath, Segment, Simulation, Simulator, segments
    from hespas.simulator.schedule import node_label

__all__ = [
    "ClassResult",
    "CriticalPath",
    "JobScheduler",
    "ListScheduler",
    "Segment",
    "Simulation",
    "Simulator",
    "node_label",
    "segments",
    "simulate",
]

__getattr__ = lazy_names(
    __name__,
    entry=("simulate",),
    job=("JobScheduler",),
    list_scheduler=("ListScheduler",),
    results=(
        "ClassResult",
        "CriticalPath",
        "Segment",
        "Simulation",
        "Simulator",
        "segments",
    ),
    schedule=("node_label",),
)
