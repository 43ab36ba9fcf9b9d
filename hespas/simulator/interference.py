"""How much communication and kernels beside each other slow each other down, from what is known of both.

A collective holds units of a GPU (channels) from its start to its end, also while it waits for others: a
kernel limited by arithmetic has the rest. While its bytes move, each is read from and written to memory: a
kernel limited by memory has the rest of the bandwidth, and the collective loses as much beside it. Shares
become slow-downs by the factors of :mod:`hespas.hardware.kernel_shares`. Recorded times
have all this in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hespas.estimators import kept_durations
from hespas.estimators.roofline import Roofline
from hespas.graph import CollectiveKind, Diagnostics, Estimate, NodeKind, OpGraph, Resource, Workload
from hespas.graph.columns import BoolArray, FloatArray
from hespas.hardware import Device
from hespas.hardware.kernel_shares import held_units, interference_factor
from hespas.simulator.progress import Pressure
from hespas.simulator.streams import COMMUNICATION, COMPUTE, kinds_of, stream_codes

__all__ = ["pressures_of", "uniform_pressures"]

_MOST_TAKEN = 0.5
"""Of the units and of the bandwidth of the memory of a device: beyond, the form has no data."""
_TALKING = (int(NodeKind.COLLECTIVE), int(NodeKind.SEND), int(NodeKind.RECV), int(NodeKind.PERMUTE))
_TIMES = {
    CollectiveKind.ALL_REDUCE: 2.0,
    CollectiveKind.ALL_GATHER: 1.0,
    CollectiveKind.REDUCE_SCATTER: 1.0,
    CollectiveKind.ALL_TO_ALL: 1.0,
}
"""How often the buffer of a collective leaves a rank, in the limit of many ranks; any other: once."""


def pressures_of(
    workload: Workload, estimates: Sequence[Estimate], device: Device, diagnostics: Diagnostics
) -> tuple[Pressure, ...] | None:
    """Per rank class, of its nodes; None where communication takes nothing from the kernels of a device."""
    held = held_units(device)
    if held is None:
        return None
    found = tuple(
        _of_class(graph, estimate, device, held.units)
        for graph, estimate in zip(workload.classes, estimates, strict=True)
    )
    compute, memory = interference_factor(device, "compute"), interference_factor(device, "memory")
    diagnostics.info(
        "simulate.interference",
        device.name,
        f"beside a collective, which holds {held.units} of {device.units} {device.unit_name}s "
        f"({_from(held.source, held.distance(device))}), kernels run slower by factors "
        f"{compute.value:.2f} +- {compute.std_error:.2f} (arithmetic) and "
        f"{memory.value:.2f} +- {memory.std_error:.2f} (memory) of the share it takes "
        f"({_from(memory.source, memory.distance)})",
        count=int(any(pressure.matters for pressure in found)),
    )
    return found


def uniform_pressures(
    workload: Workload, estimates: Sequence[Estimate], share: float
) -> tuple[Pressure, ...]:
    """Return pressures by which all estimated kernels are slower by one ``share`` beside communication."""
    return tuple(
        _uniform(graph, estimate, share) for graph, estimate in zip(workload.classes, estimates, strict=True)
    )


def _uniform(graph: OpGraph, estimate: Estimate, share: float) -> Pressure:
    computes, talks = _sides(graph, estimate)
    none = Pressure.none(len(graph))
    return replace(none, moves=np.where(talks, share, 0.0), by_memory=computes.astype(np.float64))


def _sides(graph: OpGraph, estimate: Estimate) -> tuple[BoolArray, BoolArray]:
    """Return which nodes are estimated kernels, and which communicate."""
    estimated = (estimate.duration_ns > 0) & ~kept_durations(graph, estimate)
    kinds = kinds_of(stream_codes(graph))
    computes = (kinds == COMPUTE) & (graph.resource != int(Resource.HOST)) & estimated
    return computes, (kinds == COMMUNICATION) & np.isin(graph.kind, _TALKING)


def _from(source: str, distance: str) -> str:
    """Where a figure is from, and how far that stands from the device."""
    return f"{source}: {distance}" if distance else source


def _of_class(graph: OpGraph, estimate: Estimate, device: Device, units: int) -> Pressure:
    computes, talks = _sides(graph, estimate)
    estimated = (estimate.duration_ns > 0) & ~kept_durations(graph, estimate)
    arithmetic = _arithmetic_share(graph, device)
    share = min(units / device.units, _MOST_TAKEN)
    taken = np.clip(_bandwidth_share(graph, estimate.duration_ns, device), 0.0, _MOST_TAKEN)
    moves = interference_factor(device, "memory").value * taken / (1.0 - taken)
    holds = interference_factor(device, "compute").value * share / (1.0 - share)
    return Pressure(
        holds=np.where(talks, holds, 0.0),
        moves=np.where(talks, moves, 0.0),
        by_units=np.where(computes, arithmetic, 0.0),
        by_memory=np.where(computes, 1.0 - arithmetic, 0.0),
        stretches=(graph.kind == int(NodeKind.COLLECTIVE)) & estimated,
    )


def _arithmetic_share(graph: OpGraph, device: Device) -> FloatArray:
    """1 where arithmetic limits a node, 0 where memory does, half where nobody knows."""
    peaks = Roofline().estimate(graph, device, Diagnostics())
    limits = np.array([name == "compute" for name in peaks.bounds])[peaks.bound]
    return np.where(peaks.bound < 0, 0.5, limits.astype(np.float64))


def _bandwidth_share(graph: OpGraph, duration_ns: FloatArray, device: Device) -> FloatArray:
    """The share of the memory's bandwidth that the bytes a node sends and receives take, 0 where unknown."""
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
