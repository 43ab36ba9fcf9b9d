"""Catalogue of devices, systems and estimators: documents, and a system's ASTRA-sim files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from hespas.api.arguments import checked
from hespas.api.documents import Document, Result, findings
from hespas.estimators.registry import ListedEstimator
from hespas.files.documents import Figure, document_bytes
from hespas.files.output import write_atomically
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import Device, System
from hespas.hardware import load_system as read_system
from hespas.report import Table, table_from_records
from hespas.simulator.astra.configuration import astra_sim_files

__all__ = [
    "DevicesDocument",
    "DimensionRow",
    "EstimatorsDocument",
    "SystemDocument",
    "SystemResult",
    "devices_document",
    "estimators_document",
    "load_system",
    "sized_for",
]


class DimensionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One dimension of the network of a system; figures are per device and direction."""

    name: str
    topology: str
    size: int
    bandwidth_bytes_per_s: Figure
    down_bandwidth_bytes_per_s: Figure
    link_bandwidth_bytes_per_s: Figure
    latency_ns: Figure
    oversubscription: Figure
    reduction: str
    reduction_share: Figure
    source: str


class SystemDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas hardware system --json``."""

    schema: Literal["hespas.system/1"] = "hespas.system/1"
    name: str
    description: str
    device: str
    devices: int
    dimensions: list[DimensionRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SystemResult(Result):
    """A system: devices and the network that connects them, with a fixed size if one was requested."""

    system: System
    diagnostics: Diagnostics

    def headline(self) -> str:
        """Return the summary line: the name, the shape and the device."""
        shape = "x".join("any" if size < 0 else str(size) for size in self.system.shape)
        return f"{self.system.name}, {shape} {self.system.device or 'devices'}"

    def to_json(self) -> bytes:
        """Return the JSON document that ``--json`` writes, of schema ``hespas.system/1``."""
        return document_bytes(self.document())

    def document(self) -> SystemDocument:
        """Return the content of the command's ``--json`` as a typed value."""
        return SystemDocument(
            inputs=[self.system.name],
            diagnostics=findings(self.diagnostics),
            name=self.system.name,
            description=self.system.description,
            device=self.system.device,
            devices=self.system.devices,
            dimensions=_dimension_rows(self.system),
        )

    def table(self) -> Table:
        """Return the result as a table with one row per dimension, innermost first."""
        rows = [msgspec.structs.asdict(row) for row in _dimension_rows(self.system)]
        return table_from_records(rows, DimensionRow.__struct_fields__)

    def write_astra_sim(self, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Write ``system.json``, ``network.yml`` and ``remote_memory.json`` into a folder and return their
        paths. Properties that ASTRA-sim cannot represent are added to ``diagnostics``.

        Raises ``UsageError`` if the number of devices is not set or does not fill the dimensions,
        ``UnsupportedError`` for an unknown latency, ``OutputError`` for a folder with files if ``overwrite``
        is false. Other files stay.
        """
        path, files = Path(folder), astra_sim_files(self.system, self.diagnostics)

        def fill(temporary: Path) -> None:
            temporary.mkdir()
            for name, text in files.items():
                (temporary / name).write_text(text, encoding="utf-8")

        write_atomically(path, fill, overwrite=overwrite, directory=True)
        return [path / name for name in files]


@checked()
def load_system(
    name: str | os.PathLike[str],
    devices: int | Sequence[int] | None = None,
    *,
    diagnostics: Diagnostics | None = None,
) -> SystemResult:
    """Load a system of the catalogue by name, or a system of your own from a TOML file.

    ``devices`` is the number of devices of a job, or the sizes of the dimensions, innermost first. Raises
    ``UsageError`` for an unknown name or an impossible number of devices, ``FormatError`` for a damaged file.

    Examples:
        >>> hespas.load_system("dgx-h100", devices=64)
        <SystemResult: dgx-h100, 8x8 H100-SXM>
    """
    system = read_system(name)
    return SystemResult(
        system=system if devices is None else system.sized(devices),
        diagnostics=diagnostics if diagnostics is not None else Diagnostics(),
    )


def sized_for(source: str | os.PathLike[str] | System | None, ranks: int) -> System | None:
    """Return a system with one device per rank. A system of fixed size is returned unchanged. If ``source``
    is None, return None.

    Raises ``UsageError`` if the fixed size is smaller than the job, and the errors of :func:`load_system`.
    """
    if source is None:
        return None
    system = source if isinstance(source, System) else read_system(source)
    if system.devices < 0:
        return system.sized(ranks)
    if system.devices < ranks:
        raise UsageError(
            f"system {system.name} has {system.devices:,} devices, but the job has {ranks:,} ranks",
            hint=f"use a system of {ranks:,} or more devices",
        )
    return system


def _dimension_rows(system: System) -> list[DimensionRow]:
    return [
        DimensionRow(
            name=dimension.name,
            topology=dimension.topology,
            size=dimension.size,
            bandwidth_bytes_per_s=dimension.bandwidth_bytes_per_s,
            down_bandwidth_bytes_per_s=dimension.received_bytes_per_s,
            link_bandwidth_bytes_per_s=dimension.link_bytes_per_s,
            latency_ns=dimension.latency_ns,
            oversubscription=dimension.oversubscription,
            reduction=dimension.reduction,
            reduction_share=dimension.reduction_share,
            source=system.source_text(dimension.source),
        )
        for dimension in system.dimensions
    ]


class EstimatorsDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas estimators --json``."""

    schema: Literal["hespas.estimators/1"] = "hespas.estimators/1"
    estimators: list[ListedEstimator]


def estimators_document(rows: Sequence[ListedEstimator]) -> msgspec.Struct:
    """Return the list of estimators: ``hespas.estimators/1``."""
    return EstimatorsDocument(inputs=[], diagnostics=[], estimators=list(rows))


class _ListedPeak(msgspec.Struct, frozen=True):
    unit: str
    dtype: str
    density: str
    flops_per_s: Figure


class _ListedMemory(msgspec.Struct, frozen=True):
    level: str
    name: str
    capacity_bytes: int
    bandwidth_bytes_per_s: Figure


class _ListedLink(msgspec.Struct, frozen=True):
    name: str
    kind: str
    bandwidth_bytes_per_s: Figure
    latency_ns: Figure
    links_per_device: int
    devices_per_domain: int


class _ListedDevice(msgspec.Struct, frozen=True):
    name: str
    vendor: str
    family: str
    kind: str
    description: str
    aliases: tuple[str, ...]
    tdp_w: Figure
    peaks: tuple[_ListedPeak, ...]
    memories: tuple[_ListedMemory, ...]
    links: tuple[_ListedLink, ...]


class _ListedSystem(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str
    device: str
    aliases: tuple[str, ...]
    max_devices: int
    dimensions: list[DimensionRow]


class DevicesDocument(Document, frozen=True, kw_only=True):
    """JSON document of ``hespas hardware list --json``."""

    schema: Literal["hespas.devices/1"] = "hespas.devices/1"
    devices: list[_ListedDevice]
    systems: list[_ListedSystem]


def devices_document(devices: Sequence[Device], systems: Sequence[System] = ()) -> msgspec.Struct:
    """Return the document of devices and systems: ``hespas.devices/1``. A maximum of -1 means no limit. A
    peak is per device, with its ``density`` (dense or sparse); ``hespas hardware show`` prints the sources.
    """
    return DevicesDocument(
        inputs=[],
        diagnostics=[],
        devices=msgspec.convert(list(devices), list[_ListedDevice], from_attributes=True),
        systems=[
            _ListedSystem(
                name=system.name,
                description=system.description,
                device=system.device,
                aliases=system.aliases,
                max_devices=system.most,
                dimensions=_dimension_rows(system),
            )
            for system in systems
        ],
    )
