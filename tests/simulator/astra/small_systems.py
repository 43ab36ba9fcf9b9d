"""Small systems and jobs for mode astra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hespas.graph import CollectiveKind, Diagnostics, Workload
from hespas.simulator.astra import (
    AstraOptions,
    AstraSimulation,
    MemoryConfig,
    NetworkConfig,
    SystemConfig,
)
from hespas.simulator.astra.configuration import Topology
from hespas.validators.checker.execution import run_traces
from tests.validators.checker.small_jobs import Steps, job_of

__all__ = ["collective", "finishes", "network", "run", "system"]

KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_TO_ALL,
)


def system(*algorithms: str, **changes: object) -> SystemConfig:
    """4 splits, 1,600 GB/s of memory, 10 ns of endpoint delay; the same algorithm for all collectives."""
    made = SystemConfig(
        path="system.json",
        scheduling_policy="LIFO",
        dataset_splits=4,
        active_chunks_per_dimension=1,
        local_memory_gb_per_s=1600.0,
        peak_tflops=0.0,
        roofline=False,
        tracks_local_memory=False,
        implementations=dict.fromkeys(KINDS, algorithms or ("ring",)),
        custom=frozenset(),
        optimization="localBWAware",
    )
    return replace(made, **changes)  # type: ignore[arg-type] # the fields of the class


def network(
    *dimensions: tuple[Topology, int], gib_per_s: float = 50.0, latency_ns: float = 500.0
) -> NetworkConfig:
    """Dimensions by topology and ranks, all of one bandwidth and latency."""
    return NetworkConfig(
        path="network.yml",
        topology=tuple(name for name, _ in dimensions),
        npus=tuple(ranks for _, ranks in dimensions),
        bandwidth_gib_per_s=(gib_per_s,) * len(dimensions),
        latency_ns=(latency_ns,) * len(dimensions),
    )


def run(
    workload: Workload,
    wires: NetworkConfig,
    machine: SystemConfig | None = None,
    *,
    memory: MemoryConfig | None = None,
    backend: str = "unaware",
    queues: int = 1,
    diagnostics: Diagnostics | None = None,
) -> AstraSimulation:
    """A workload as its traces would be run."""
    options = AstraOptions(
        system=machine or system(*("ring",) * len(wires.npus)),
        network=wires,
        memory=memory,
        backend="aware" if backend == "aware" else "unaware",
        queues_per_dim=queues,
    )
    return run_traces(workload, options, diagnostics if diagnostics is not None else Diagnostics())


def finishes(done: AstraSimulation) -> list[int]:
    """Return the finish time of each rank [ns]."""
    found: list[int] = done.statistics.finish_ns.tolist()
    return found


def collective(
    kind: CollectiveKind, size: float, ranks: int, starts_ns: Mapping[int, float] | None = None
) -> Workload:
    """One collective of all ranks, on some of them after a computation."""
    steps = [Steps(ranks) for _ in range(ranks)]
    for rank, each in enumerate(steps):
        before = [each.compute(ns=starts_ns[rank])] if starts_ns and rank in starts_ns else []
        each.coll(*before, kind=kind, size=size)
    return job_of(*steps)
