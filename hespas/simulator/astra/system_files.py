"""A system as ASTRA-sim's configuration files: system.json, network.yml, remote_memory.json.

What the analytical simulator makes of each figure (518bd51): a bandwidth of network.yml is in GiB/s, of one
link of a ring or of a pair that is joined directly, of all links of a device behind a switch. A message
through a switch is charged the latency twice, so that half of it is written. A ring of chunks goes one way
around. Per-device oversubscription has no word there: its share of the bandwidth is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isnan, prod

from hespas.graph import Diagnostics
from hespas.graph.errors import UnsupportedError, UsageError
from hespas.hardware import Device, Dimension, System, load_device
from hespas.simulator.astra.configuration import IMPLEMENTATION_KEYS, Topology

__all__ = ["FILE_NAMES", "astra_sim_files"]

FILE_NAMES = ("system.json", "network.yml", "remote_memory.json")

_GIB = 1 << 30
_BYTES_PER_GIGA = 1e9
_TOPOLOGIES: Mapping[str, Topology] = {
    "ring": "Ring",
    "fully_connected": "FullyConnected",
    "switch": "Switch",
}
_HOPS = {"Ring": 1, "FullyConnected": 1, "Switch": 2}
_SPLITS = 4
"""Chunks of a collective, so that one dimension works on a chunk while the next has the one before."""
_ENDPOINT_DELAY_NS = 10
"""ASTRA-sim's own."""


def astra_sim_files(system: System, diagnostics: Diagnostics) -> Mapping[str, str]:
    """The text of each of :data:`FILE_NAMES` for a sized system. Dimensions of one device are left out.

    Raises ``UsageError`` for one device and where devices do not fill the dimensions, ``UnsupportedError``
    where a latency is not known. What ASTRA-sim has no word for is told.
    """
    capacity = prod(system.shape)
    if system.devices < 0:
        raise UsageError(f"how many devices of {system.name}?", hint="add `devices=64`, or their shape")
    if capacity != system.devices:
        full = prod(system.shape[:-1])
        raise UsageError(
            f"ASTRA-sim runs whole systems: {system.devices:,} devices do not fill "
            f"{'x'.join(map(str, system.shape))} of {system.name}",
            hint=f"{system.devices // full * full or capacity:,} or {capacity:,} devices",
        )
    if system.devices == 1:
        raise UsageError(
            f"one device of {system.name} has no network, and ASTRA-sim runs no other job",
            hint="2 devices or more; `mode=hespas` simulates one",
        )
    used = [each for each in system.dimensions if each.size > 1]
    for each in used:
        _check(each, system, diagnostics)
    return {
        "system.json": _system_json(system, used),
        "network.yml": _network_yml(system, used),
        "remote_memory.json": _remote_memory_json(system),
    }


def _check(each: Dimension, system: System, diagnostics: Diagnostics) -> None:
    if isnan(each.latency_ns):
        raise UnsupportedError(
            f"the latency of {each.name} is not known",
            position=system.name,
            hint="state one: `hespas hardware system NAME > my-system.toml`",
        )
    untold = {
        "system.line-as-ring": each.topology == "ring" and not each.is_closed(system.devices),
        "system.reduction-left-out": bool(each.reduction),
        "system.oversubscription-shared-out": each.oversubscription > 1,
        "system.slower-direction": each.received_bytes_per_s != each.bandwidth_bytes_per_s,
    }
    texts = {
        "system.line-as-ring": f"a line of {each.size} is written as a ring: ASTRA-sim knows no lines",
        "system.reduction-left-out": f"ASTRA-sim knows no reductions in the network ({each.reduction})",
        "system.oversubscription-shared-out": "each device gets its share of an oversubscribed level",
        "system.slower-direction": "both directions get the bandwidth of the slower one",
    }
    for code, is_so in untold.items():
        if is_so:
            diagnostics.info(code, f"{system.name}: {each.name}", texts[code])


def _bandwidth_gib_per_s(each: Dimension) -> float:
    whole = min(each.bandwidth_bytes_per_s, each.received_bytes_per_s) / each.oversubscription
    return whole / _GIB if each.topology == "switch" else whole / each.links_per_device / _GIB


def _network_yml(system: System, used: Sequence[Dimension]) -> str:
    topology = [_TOPOLOGIES[each.topology] for each in used]
    latency = [each.latency_ns / _HOPS[name] for each, name in zip(used, topology, strict=True)]
    lists: Mapping[str, Sequence[object]] = {
        "topology": topology,
        "npus_count": [each.size for each in used],
        "bandwidth": [_bandwidth_gib_per_s(each) for each in used],
        "latency": latency,
    }
    lines = [
        f"# {system.name}, {system.devices:,} devices",
        *(f"# {each.name}: {system.source_text(each.source)}" for each in used),
        "# innermost first; GiB/s of a link (ring, fully connected) or a device (switch), ns per hop",
        *(f"{key}: [ {', '.join(map(str, values))} ]" for key, values in lists.items()),
    ]
    return "\n".join(lines) + "\n"


def _system_json(system: System, used: Sequence[Dimension]) -> str:
    """Rings on rings and switches, direct sends between those that are joined directly. Through a switch an
    all-to-all sends one message at a time: without congestion several would each have the whole bandwidth.
    """
    implementations = {
        key: ["direct" if each.topology == "fully_connected" else "ring" for each in used]
        for key in IMPLEMENTATION_KEYS.values()
    }
    implementations["all-to-all-implementation"] = [
        {"fully_connected": "direct", "switch": "direct1", "ring": "ring"}[each.topology] for each in used
    ]
    stated: dict[str, object] = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": _ENDPOINT_DELAY_NS,
        "active-chunks-per-dimension": 1,
        "preferred-dataset-splits": _SPLITS,
        "collective-optimization": "localBWAware",
        **implementations,
    }
    if system.device:
        stated |= _of_device(load_device(system.device))
    return json.dumps(stated, indent=2) + "\n"


def _remote_memory_json(system: System) -> str:
    """The memory of the host behind each device's link to it, so that load and store nodes of traces run."""
    link = load_device(system.device).link("pcie") if system.device else None
    stated: dict[str, object] = {"memory-type": "NO_MEMORY_EXPANSION"}
    if link is not None and link.bandwidth_bytes_per_s >= _BYTES_PER_GIGA:
        stated = {
            "memory-type": "PER_NPU_MEMORY_EXPANSION",
            "remote-mem-latency": 0 if isnan(link.latency_ns) else int(link.latency_ns),
            "remote-mem-bw": int(link.bandwidth_bytes_per_s / _BYTES_PER_GIGA),
        }
    return json.dumps(stated, indent=2) + "\n"


def _of_device(device: Device) -> dict[str, object]:
    """Its memory [10^9 B/s] and its best dense rate of two-byte floats [TFLOP/s]; traces have the times."""
    rates = [
        peak.flops_per_s
        for peak in device.peaks
        if peak.dtype in ("bf16", "f16") and peak.unit == "matrix" and peak.density == "dense"
    ]
    peak = {"peak-perf": max(rates) / 1e12} if rates else {}
    return {
        "local-mem-bw": device.main_memory.bandwidth_bytes_per_s / 1e9,
        **peak,
        "roofline-enabled": 0,
    }
