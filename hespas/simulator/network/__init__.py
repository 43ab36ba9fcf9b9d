"""The network of a system: how long collectives and messages take, wherever their ranks lie in it."""

from __future__ import annotations

from hespas.simulator.network.model import Network, collective_ns
from hespas.simulator.network.workload import on_system

__all__ = ["Network", "collective_ns", "on_system"]
