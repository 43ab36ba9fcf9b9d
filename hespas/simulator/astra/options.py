"""The system that a job runs on, as ASTRA-sim's files and command line state it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hespas.graph.errors import UsageError
from hespas.simulator.astra.configuration import MemoryConfig, NetworkConfig, SystemConfig

__all__ = ["AstraOptions", "Backend"]

Backend = Literal["unaware", "aware"]
"""ASTRA-sim's analytical networks: without congestion, and with it."""

_MOST_QUEUES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AstraOptions:
    """Files as read, the network's backend, and how many queues each of its dimensions has."""

    system: SystemConfig
    network: NetworkConfig
    memory: MemoryConfig | None = None
    backend: Backend = "unaware"
    queues_per_dim: int = 1

    def __post_init__(self) -> None:
        """Check the options; raises ``UsageError``."""
        if self.backend not in get_args(Backend):
            raise UsageError(f"unknown backend {self.backend!r}", hint="one of: unaware, aware")
        if not 1 <= self.queues_per_dim <= _MOST_QUEUES:
            raise UsageError(
                f"`queues_per_dim={self.queues_per_dim}`", hint=f"a whole number from 1 to {_MOST_QUEUES}"
            )
