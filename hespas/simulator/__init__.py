"""End-to-end time: what a rank does when, on which of its streams, and what the step waits for."""

from __future__ import annotations

from hespas.simulator.entry import simulate
from hespas.simulator.job import JobScheduler
from hespas.simulator.list_scheduler import ListScheduler
from hespas.simulator.results import Segment, segments
from hespas.simulator.schedule import ClassResult, CriticalPath, Simulation, Simulator, node_label

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
