"""What an estimator is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from hespas.graph import Diagnostics, Estimate, OpGraph
from hespas.hardware import Device

__all__ = ["Estimator"]


@runtime_checkable
class Estimator(Protocol):
    """A model of time: a frozen dataclass whose fields are its options.

    A node it does not cover gets NaN, never 0; a node that costs nothing gets 0, and no other does.
    """

    @property
    def name(self) -> str:
        """What the registry and reports call the model."""
        ...

    def estimate(self, graph: OpGraph, device: Device, diagnostics: Diagnostics | None = None) -> Estimate:
        """The time of one execution of each node on ``device``; ``graph`` is not changed.

        ``diagnostics`` is told which nodes have no estimate, why, and what was assumed for the others.
        """
        ...
