"""Which system a published run stands in, and how its ranks fill it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isnan, nan

from msgspec import structs

from hespas.generators.llm.published import PublishedRun
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import Device, Dimension, System, load_system
from hespas.hardware.typed_toml import FigureSource

__all__ = ["SYSTEMS", "system_of"]

SYSTEMS: Mapping[str, str] = {
    "A100-SXM-40GB": "dgx-a100",
    "A100-SXM-80GB": "dgx-a100",
    "H100-SXM": "dgx-h100",
    "H200-SXM": "dgx-h200",
    "B200-SXM": "dgx-b200",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "MI300X": "hgx-mi300x",
    "TPU-v4": "tpu-v4",
    "TPU-v5e": "tpu-v5e",
    "TPU-v5p": "tpu-v5p",
    "TPU-v6e": "tpu-v6e",
    "TPU-v7x": "tpu-v7x",
}
"""The system that an accelerator stands in; any other is joined by the links of its file."""
_SLICES_NS = 10_000.0
"""From host to host of two slices, where nobody says: a round figure of networks of data centers, without a
source.
"""


def system_of(run: PublishedRun, stated: System | None, device: Device) -> System:
    """The system of a row, as ``stated`` or by its device, sized to its ranks: of slices of a torus where one
    has fewer.
    """
    ranks = run.layout.ranks
    name = SYSTEMS.get(device.name)
    found = stated or (_of_links(device) if name is None else load_system(name))
    found = _in_nodes(found, run.row.get("gpus_per_node", ""))
    if 0 < found.most < ranks:
        return _in_slices(found, device, ranks)
    return found.sized(_even(found, ranks))


_FABRIC_BYTES_PER_S, _FABRIC_NS, _INSIDE_NS = 50.0e9, 2_700.0, 1_000.0
"""Of devices whose files name no fabric: a port of 400 Gb/s each, as in a DGX H100, and latencies of networks
and inside a node (PCIe) by NCCL's tuning constants; their sources are in
``hespas/hardware/systems/dgx-h100.toml``.
"""


def _of_links(device: Device) -> System:
    """A device's own links: those between the devices of a node, and a switch between nodes, of 400 Gb/s
    where its file names none.
    """
    inside, outside = device.link("scale_up") or device.link("pcie"), device.link("scale_out")
    if inside is None:
        raise UsageError(f"{device.name} has no links", hint="add them to its file")
    size = inside.devices_per_domain if inside.devices_per_domain > 1 else _NODE
    dimensions = (
        Dimension(
            name=inside.name,
            topology="fully_connected" if inside.topology == "fully_connected" else "switch",
            size=size,
            bandwidth_bytes_per_s=inside.bandwidth_bytes_per_s,
            latency_ns=_INSIDE_NS if isnan(inside.latency_ns) else inside.latency_ns,
            links_per_device=1,
            source="device",
            latency_source="device",
        ),
        Dimension(
            name="fabric" if outside is None else outside.name,
            topology="switch",
            size=-1,
            bandwidth_bytes_per_s=_FABRIC_BYTES_PER_S if outside is None else outside.bandwidth_bytes_per_s,
            latency_ns=_FABRIC_NS if outside is None or isnan(outside.latency_ns) else outside.latency_ns,
            links_per_device=1,
            source="device",
            latency_source="device",
        ),
    )
    return System(
        name=f"nodes of {device.name}",
        description="",
        device=device.name,
        aliases=(),
        placement="fill",
        max_devices=-1,
        dimensions=dimensions,
        sources=(_source(device),),
    )


_NODE = 8
"""Devices of a node where nobody says."""


def _source(device: Device) -> FigureSource:
    return FigureSource(key="device", text=f"the file of {device.name}")


def _in_nodes(found: System, stated: str) -> System:
    """A system with nodes of fewer devices where a row says so; larger domains than nodes stay."""
    inner = found.dimensions[0]
    size = _devices_of(stated)
    if found.placement != "fill" or inner.size != _NODE or not 0 < size < _NODE:
        return found
    return replace(found, dimensions=(structs.replace(inner, size=size), *found.dimensions[1:]))


def _devices_of(stated: str) -> int:
    """Devices of a node, which tables may write as 4.0; 0 where nobody says. Raises ``FormatError``."""
    try:
        size = float(stated or 0)
    except ValueError:
        size = nan
    if (stated and not size > 0) or not size.is_integer():
        raise FormatError(f"{clipped(stated)!r} is no count", position="column gpus_per_node")
    return int(size)


def _in_slices(found: System, device: Device, ranks: int) -> System:
    """Whole slices, or as many equal ones as hold the job, joined by the network of the data center."""
    outside = device.link("scale_out")
    if outside is None:
        raise UsageError(f"{found.name} has {found.most:,} devices, and nothing joins several")
    slices = next(count for count in range(-(-ranks // found.most), ranks + 1) if ranks % count == 0)
    one = found.sized(ranks // slices)
    between = Dimension(
        name=outside.name,
        topology="switch",
        size=slices,
        bandwidth_bytes_per_s=outside.bandwidth_bytes_per_s,
        latency_ns=_SLICES_NS if isnan(outside.latency_ns) else outside.latency_ns,
        links_per_device=1,
        source="device",
        latency_source="device",
    )
    return replace(
        one,
        dimensions=(*one.dimensions, between),
        devices=ranks,
        max_devices=-1,
        sources=(*one.sources, _source(device)),
    )


def _even(found: System, ranks: int) -> int | tuple[int, int]:
    """Ranks of a job, or of each domain and domains: a job that does not fill whole domains takes as many
    devices of each, so that groups of a power of two stay inside of one.
    """
    inner = found.shape[0]
    if found.placement != "fill" or inner < 0 or ranks <= inner or ranks % inner == 0:
        return ranks
    domains = -(-ranks // inner)
    return ranks if ranks % domains else (ranks // domains, domains)
