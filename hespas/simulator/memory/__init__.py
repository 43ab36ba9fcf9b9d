"""Memory of a rank over a step: liveness of its values in the execution order of its nodes."""

from __future__ import annotations

from hespas.simulator.memory.buffers import Moments, in_order, in_time
from hespas.simulator.memory.snapshot import PICKLE_START, snapshot_bytes
from hespas.simulator.memory.use import (
    Allocations,
    LiveValue,
    MemoryUse,
    ProgramBytes,
    RankMemory,
    capacity_of,
    fits_memory,
    memory_by_class,
    memory_use,
)

__all__ = [
    "PICKLE_START",
    "Allocations",
    "LiveValue",
    "MemoryUse",
    "Moments",
    "ProgramBytes",
    "RankMemory",
    "capacity_of",
    "fits_memory",
    "in_order",
    "in_time",
    "memory_by_class",
    "memory_use",
    "snapshot_bytes",
]
