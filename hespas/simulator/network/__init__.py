"""Network model of a system: times of collectives and messages by the placement of their ranks."""

from __future__ import annotations

from hespas.simulator.network.model import Network, collective_ns, on_system

__all__ = ["Network", "collective_ns", "on_system"]
