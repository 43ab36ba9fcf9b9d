"""How much memory a rank needs over a step: liveness of its values in the order in which its nodes run."""

from __future__ import annotations

from hespas.simulator.memory.moments import Moments, in_order, in_time
from hespas.simulator.memory.of_run import RankMemory, memory_by_class
from hespas.simulator.memory.use import LiveValue, MemoryUse, ProgramBytes, memory_use

__all__ = [
    "LiveValue",
    "MemoryUse",
    "Moments",
    "ProgramBytes",
    "RankMemory",
    "in_order",
    "in_time",
    "memory_by_class",
    "memory_use",
]
