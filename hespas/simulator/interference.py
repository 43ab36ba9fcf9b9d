"""Contention between communication and kernels of one rank: slow-down factors.

A collective kernel occupies some compute units of a GPU (channels) from its start to its end, also while it
waits for other ranks. A compute-bound kernel runs on the other units. While a collective transfers data, it
reads and writes each byte in memory. A memory-bound kernel has the rest of the bandwidth, and the collective
loses the same share. :mod:`hespas.hardware.kernel_shares` converts shares to slow-down factors. Recorded
times already include these effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hespas.estimators.roofline import Roofline
from hespas.graph import CollectiveKind, Diagnostics, Estimate, NodeKind, OpGraph, Resource, Workload
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray
from hespas.hardware import Device
from hespas.hardware.kernel_shares import held_units, interference_factor
from hespas.simulator.streams import COMMUNICATION, COMMUNICATION_KINDS, COMPUTE, kinds_of, stream_codes

__all__ = ["Pressure", "pressures_of", "uniform_pressures"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Pressure:
    """Contention factors by which overlapping communication and computation slow each other down. Columns
    have shape ``(nodes,)`` or ``(tasks,)``; 0 means no effect.

    A computation task that overlaps with communication takes ``1 + by_units x (sum of holds) + by_memory x
    (sum of moves)`` times as long. The sums run over the overlapping communication tasks. ``holds`` counts
    from the start of a communication task, also while it waits for other ranks. ``moves`` counts only while
    its bytes are transferred. A communication task with ``stretches`` takes ``1 + moves x (sum of by_memory,
    at most 1)`` times as long during computation.
    """

    holds: FloatArray
    moves: FloatArray
    by_units: FloatArray
    by_memory: FloatArray
    stretches: BoolArray

    def __len__(self) -> int:
        return len(self.holds)

    @property
    def matters(self) -> bool:
        """Return True if contention changes anything: some communication and some computation affect each
        other.
        """
        communicating = (self.holds > 0) | (self.moves > 0)
        return bool(communicating.any()) and bool(((self.by_units > 0) | (self.by_memory > 0)).any())

    def take(self, rows: IntArray | SmallIntArray, valid: BoolArray | None = None) -> Pressure:
        """Return the factors of some rows. Rows that are not ``valid`` get factors without effect."""
        mask = np.ones(len(rows), np.bool_) if valid is None else valid
        rows = np.where(mask, rows, 0)
        if not len(self):
            return Pressure.none(len(rows))
        return Pressure(**{column.name: getattr(self, column.name)[rows] * mask for column in fields(self)})

    @classmethod
    def none(cls, count: int) -> Pressure:
        """Return factors without effect for ``count`` nodes."""
        nothing = np.zeros(count)
        return cls(
            holds=nothing,
            moves=nothing,
            by_units=nothing,
            by_memory=nothing,
            stretches=np.zeros(count, np.bool_),
        )

    @classmethod
    def joined(cls, parts: Sequence[Pressure]) -> Pressure:
        """Return the concatenated factors of several parts."""
        parts = [cls.none(0), *parts]
        names = [column.name for column in fields(cls)]
        return cls(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


_MOST_TAKEN = 0.5
"""Largest share of the units and of the memory bandwidth that the formula covers; there are no data beyond
it.
"""

_TIMES = {
    CollectiveKind.ALL_REDUCE: 2.0,
    CollectiveKind.ALL_GATHER: 1.0,
    CollectiveKind.REDUCE_SCATTER: 1.0,
    CollectiveKind.ALL_TO_ALL: 1.0,
}
"""Number of times that the buffer of a collective leaves a rank, in the limit of many ranks; 1 for other
kinds.
"""


def pressures_of(
    workload: Workload, estimates: Sequence[Estimate], device: Device, diagnostics: Diagnostics
) -> tuple[Pressure, ...] | None:
    """Return the contention factors of the nodes of each rank class. None if communication uses no resources
    that kernels of the device need.
    """
    held = held_units(device)
    if held is None:
        return None
    pressures = tuple(
        _of_class(graph, estimate, device, held.units)
        for graph, estimate in zip(workload.classes, estimates, strict=True)
    )
    compute, memory = interference_factor(device, "compute"), interference_factor(device, "memory")
    diagnostics.info(
        "simulate.interference",
        device.name,
        f"during a collective, which occupies {held.units} of {device.units} {device.unit_name}s "
        f"({_from(held.source, held.distance(device))}), kernels run slower by factors "
        f"{compute.value:.2f} +- {compute.std_error:.2f} (arithmetic) and "
        f"{memory.value:.2f} +- {memory.std_error:.2f} (memory) of the share that it uses "
        f"({_from(memory.source, memory.distance)})",
        count=int(any(pressure.matters for pressure in pressures)),
    )
    return pressures


def uniform_pressures(
    workload: Workload, estimates: Sequence[Estimate], share: float
) -> tuple[Pressure, ...]:
    """Return contention factors that make every estimated kernel slower by the same ``share`` during
    communication.
    """
    pressures: list[Pressure] = []
    for graph, estimate in zip(workload.classes, estimates, strict=True):
        computes, communicates = _sides(graph, estimate)
        moves = np.where(communicates, share, 0.0)
        no_effect = Pressure.none(len(graph))
        pressures.append(replace(no_effect, moves=moves, by_memory=computes.astype(np.float64)))
    return tuple(pressures)


def _sides(graph: OpGraph, estimate: Estimate) -> tuple[BoolArray, BoolArray]:
    """Return two masks: of the kernels with estimated times, and of the communication nodes."""
    kinds = kinds_of(stream_codes(graph))
    computes = (kinds == COMPUTE) & (graph.resource != int(Resource.HOST)) & (estimate.duration_ns > 0)
    return computes, (kinds == COMMUNICATION) & np.isin(graph.kind, COMMUNICATION_KINDS)


def _from(source: str, distance: str) -> str:
    """Return the source of a figure as text, and its distance if it comes from a reference device."""
    return f"{source}: {distance}" if distance else source


def _of_class(graph: OpGraph, estimate: Estimate, device: Device, units: int) -> Pressure:
    computes, communicates = _sides(graph, estimate)
    peaks = Roofline().estimate(graph, device, Diagnostics())
    limits = np.array([name == "compute" for name in peaks.bounds])[peaks.bound]
    arithmetic = np.where(peaks.bound < 0, 0.5, limits.astype(np.float64))
    share = min(units / device.units, _MOST_TAKEN)
    taken = np.minimum(_bandwidth_share(graph, estimate.duration_ns, device), _MOST_TAKEN)
    moves = interference_factor(device, "memory").value * taken / (1.0 - taken)
    holds = interference_factor(device, "compute").value * share / (1.0 - share)
    return Pressure(
        holds=np.where(communicates, holds, 0.0),
        moves=np.where(communicates, moves, 0.0),
        by_units=np.where(computes, arithmetic, 0.0),
        by_memory=np.where(computes, 1.0 - arithmetic, 0.0),
        stretches=(graph.kind == int(NodeKind.COLLECTIVE)) & (estimate.duration_ns > 0),
    )


def _bandwidth_share(graph: OpGraph, duration_ns: FloatArray, device: Device) -> FloatArray:
    """Return the share of the memory bandwidth that each communication node uses for its transfer; 0 if
    unknown.
    """
    sent = np.zeros(len(graph))
    table = graph.collectives
    times = np.array([_TIMES.get(kind, 1.0) for kind in sorted(CollectiveKind)])[table.kind]
    payload = np.fmax(table.comm_bytes, np.fmax(table.operand_bytes, table.result_bytes))
    sent[table.node] = np.nan_to_num(times * payload)
    sent[graph.p2p.node] = np.nan_to_num(graph.p2p.comm_bytes)
    bytes_per_s = device.main_memory.bandwidth_bytes_per_s
    links = max((link.bandwidth_bytes_per_s for link in device.links if link.kind != "pcie"), default=np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.minimum(np.where(duration_ns > 0, sent / duration_ns * 1e9, 0.0), links)
        return np.nan_to_num(2.0 * rate / bytes_per_s)
