"""What a simulator is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hespas.graph import Diagnostics, Workload
from hespas.simulator.result import Simulation

__all__ = ["Simulator"]


@runtime_checkable
class Simulator(Protocol):
    """A model of what happens when a workload runs: a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """What reports call the model."""
        ...

    def run(self, workload: Workload, diagnostics: Diagnostics) -> Simulation:
        """Run one step of every rank from time 0; ``workload`` is not changed.

        All nodes that run have a time (finite, 0 or more, 0 for what costs nothing) and all trip counts are
        whole numbers: :func:`hespas.simulator.simulate` sees to it. Raises ``FormatError`` where dependencies
        form a cycle.
        """
        ...
