"""Model of ASTRA-sim's analytical simulator, exact to the nanosecond: files, networks, collectives, issue
rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.simulator.astra.configuration import (
        AstraOptions,
        Backend,
        MemoryConfig,
        NetworkConfig,
        SystemConfig,
        read_memory_config,
        read_network_config,
        read_system_config,
    )
    from hespas.simulator.astra.entry import AstraSimulation, simulate_astra
    from hespas.simulator.astra.statistics import RankStatistics
    from hespas.simulator.astra.traces import StatedCosts

__all__ = [
    "AstraOptions",
    "AstraSimulation",
    "Backend",
    "MemoryConfig",
    "NetworkConfig",
    "RankStatistics",
    "StatedCosts",
    "SystemConfig",
    "read_memory_config",
    "read_network_config",
    "read_system_config",
    "simulate_astra",
]

__getattr__ = lazy_names(
    __name__,
    configuration=(
        "AstraOptions",
        "Backend",
        "MemoryConfig",
        "NetworkConfig",
        "SystemConfig",
        "read_memory_config",
        "read_network_config",
        "read_system_config",
    ),
    entry=(
        "AstraSimulation",
        "simulate_astra",
    ),
    statistics=("RankStatistics",),
    traces=("StatedCosts",),
)
