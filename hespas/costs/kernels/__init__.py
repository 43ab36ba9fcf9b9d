"""What the names of library kernels say of their work, for profiles without host operations."""

from __future__ import annotations

from hespas.costs.kernels.bounds import UNBOUNDED, WorkBounds, launch_of, work_bounds
from hespas.costs.kernels.facts import Cover, KernelFacts
from hespas.costs.kernels.table import kernel_facts

__all__ = [
    "UNBOUNDED",
    "Cover",
    "KernelFacts",
    "WorkBounds",
    "kernel_facts",
    "launch_of",
    "work_bounds",
]
