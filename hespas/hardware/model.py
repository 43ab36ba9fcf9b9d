"""What a device is to an estimator or a simulator: rates, memories, links and fitted efficiencies.

Every figure is per device (one GPU, one TPU chip, one CPU socket set), in base units (FLOP/s, bytes, bytes/s,
ns), dense unless marked, and names its source. Unknown is NaN (real numbers) or -1 (counts).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Literal

from hespas.hardware.fit import Fit

__all__ = [
    "Density",
    "Device",
    "DeviceKind",
    "Efficiency",
    "Link",
    "LinkKind",
    "Memory",
    "MemoryLevel",
    "Peak",
    "Source",
    "SubbyteStorage",
    "SystolicArray",
    "Topology",
    "Unit",
]

Unit = Literal["matrix", "vector"]
"""``matrix``: tensor core, matrix core, MXU, or BLAS on a CPU: contractions only. ``vector``: the rest."""

Density = Literal["dense", "sparse"]
DeviceKind = Literal["gpu", "tpu", "cpu"]
MemoryLevel = Literal["main", "cache", "scratchpad"]
LinkKind = Literal["scale_up", "scale_out", "pcie"]
Topology = Literal["switch", "ring", "fully_connected", "torus2d", "torus3d"]
SubbyteStorage = Literal["packed", "byte"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where figures come from: ``key`` is what rows refer to, ``text`` names the document and its column."""

    key: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The highest rate of one unit for one operand type; a multiply and an add are two FLOPs.

    ``dtype`` is the operand type in MLIR's spelling: it decides the rate, not the result's type.
    ``rhs_dtype`` is the right-hand operand's where a unit multiplies two unlike types (2-bit weights by 8-bit
    activations), empty where both are ``dtype``.
    ``accumulator`` is empty where the rate does not depend on it or the source does not say. The energy is
    that of the arithmetic alone: no registers, no wires, no clock tree.
    """

    unit: Unit
    dtype: str
    flops_per_s: float
    density: Density
    source: str
    accumulator: str = ""
    note: str = ""
    energy_pj_per_flop: float = nan
    energy_source: str = ""
    rhs_dtype: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One level. ``capacity_bytes`` is the device's total (-1 unknown); bandwidth NaN where unpublished.

    The energy is that of moving a byte between this level and the chip.
    """

    level: MemoryLevel
    name: str
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    source: str
    note: str = ""
    energy_pj_per_byte: float = nan
    energy_source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One way out of the device.

    ``bandwidth_bytes_per_s`` is one direction, all ``links_per_device`` of the device together, so a single
    torus link has that divided by ``links_per_device``. ``devices_per_domain`` counts the devices reached
    without leaving this kind of link (-1: no fixed bound). ``pcie`` is the link to the host, whatever it is.
    """

    name: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_ns: float
    topology: Topology
    links_per_device: int
    devices_per_domain: int
    source: str
    latency_source: str
    note: str = ""

    @property
    def link_bandwidth_bytes_per_s(self) -> float:
        """One direction of one link; NaN where the number of links is unknown."""
        return self.bandwidth_bytes_per_s / self.links_per_device if self.links_per_device > 0 else nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fitted reach of the peaks: time = t0_ns + max(flops / (compute x peak), bytes / (memory x bandwidth)).

    ``op_class`` and ``dtype`` may be ``*``. Values above 1 are legal: a warm cache beats the memory.
    ``provenance`` names data, version and date of the fit; ``samples`` and ``mape`` (a fraction, on data
    outside the fit) say how far to trust it.
    """

    op_class: str
    dtype: str
    compute: float
    memory: float
    t0_ns: float
    provenance: str
    samples: int = -1
    mape: float = nan


@dataclass(frozen=True, slots=True, kw_only=True)
class SystolicArray:
    """Shape of the matrix units: ``arrays`` grids of ``rows`` x ``columns`` multiply-accumulate cells."""

    rows: int
    columns: int
    arrays: int
    clock_hz: float
    dataflow: Literal["os", "ws", "is"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device as data. ``units`` counts its ``unit_name`` (SM, CU, TensorCore, core).

    ``launch_overhead_ns`` is the shortest time any kernel takes, however little it does. ``subbyte_storage``
    says whether element types under 8 bits are packed in memory or take a byte each. ``own_fits`` are the
    file's; ``fits_of`` names the shipped device whose fits hold for this one too (empty: none). ``own_lines``
    are the file's fits of a systolic array's forms, which speak of the same classes and are kept apart.
    ``learned_models`` are the absolute paths of the cards of its own learned models. ``tdp_w`` is the power
    the board may draw without end, in watts.
    """

    name: str
    vendor: str
    family: str
    kind: DeviceKind
    description: str
    aliases: tuple[str, ...]
    units: int
    unit_name: str
    launch_overhead_ns: float
    launch_overhead_source: str
    subbyte_storage: SubbyteStorage
    sources: tuple[Source, ...]
    peaks: tuple[Peak, ...]
    memories: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    efficiencies: tuple[Efficiency, ...] = ()
    systolic: SystolicArray | None = None
    own_fits: tuple[Fit, ...] = ()
    fits_of: str = ""
    own_lines: tuple[Fit, ...] = ()
    learned_models: tuple[str, ...] = ()
    tdp_w: float = nan
    tdp_source: str = ""

    @property
    def fits(self) -> tuple[Fit, ...]:
        """The device's own fits, then the shipped ones of other classes. The shipped are read when asked for:
        decoding hundreds takes longer than all else of a device.
        """
        if not self.fits_of:
            return self.own_fits
        from hespas.hardware.fits_file import shipped_fits

        mine = {fit.key for fit in self.own_fits}
        return (*self.own_fits, *(fit for fit in shipped_fits(self.fits_of) if fit.key not in mine))

    @property
    def main_memory(self) -> Memory:
        """The memory that holds tensors (HBM, GDDR, DRAM); the loader guarantees exactly one."""
        return next(memory for memory in self.memories if memory.level == "main")

    def link(self, kind: LinkKind) -> Link | None:
        """The first link of a kind (files list the innermost first), or None."""
        return next((link for link in self.links if link.kind == kind), None)

    def source_text(self, key: str) -> str:
        """What a row's ``source`` key stands for; raises ``KeyError`` for a key the device does not have."""
        for source in self.sources:
            if source.key == key:
                return source.text
        raise KeyError(key)

    def efficiency(self, op_class: str, dtype: str) -> Efficiency | None:
        """The most specific fit: class and type, then class, then type, then ``*``; None if nothing fits."""
        wanted = ((op_class, dtype), (op_class, "*"), ("*", dtype), ("*", "*"))
        table = {(row.op_class, row.dtype): row for row in self.efficiencies}
        return next((table[key] for key in wanted if key in table), None)
