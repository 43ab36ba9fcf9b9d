"""Systems: devices and the networks that join them, as a table and as ASTRA-sim's configuration files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from hespas.api.arguments import checked
from hespas.api.io import Document, Result, findings
from hespas.files.documents import Figure, document_bytes
from hespas.files.output import write_atomically
from hespas.graph import Diagnostics
from hespas.graph.errors import UsageError
from hespas.hardware import System, load_system
from hespas.simulator.astra.system_files import astra_sim_files

if TYPE_CHECKING:
    import pandas

__all__ = [
    "DimensionRow",
    "SystemDocument",
    "SystemResult",
    "dimension_rows",
    "sized_for",
    "system",
]


class DimensionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One level of the network of a system: figures are per device, one direction."""

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
    """What hespas hardware system --json writes."""

    schema: Literal["hespas.system/1"] = "hespas.system/1"
    name: str
    description: str
    device: str
    devices: int
    dimensions: list[DimensionRow]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SystemResult(Result):
    """A system; sized where a number of devices was asked for."""

    system: System
    diagnostics: Diagnostics

    def headline(self) -> str:
        """What it is, and its shape."""
        shape = "x".join("any" if size < 0 else str(size) for size in self.system.shape)
        return f"{self.system.name}, {shape} {self.system.device or 'devices'}"

    def to_json(self) -> bytes:
        """The document of ``--json``: ``hespas.system/1``."""
        return document_bytes(self.document())

    def document(self) -> SystemDocument:
        """The same as a value."""
        return SystemDocument(
            inputs=[self.system.name],
            diagnostics=findings(self.diagnostics),
            name=self.system.name,
            description=self.system.description,
            device=self.system.device,
            devices=self.system.devices,
            dimensions=dimension_rows(self.system),
        )

    def to_pandas(self) -> pandas.DataFrame:
        """One row per dimension, innermost first."""
        import pandas as pd

        rows = [msgspec.structs.astuple(row) for row in dimension_rows(self.system)]
        return pd.DataFrame(rows, columns=list(DimensionRow.__struct_fields__))

    def write_astra_sim(self, folder: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Write ``system.json``, ``network.yml`` and ``remote_memory.json`` into a folder; returns their
        paths. What ASTRA-sim has no word for is added to ``diagnostics``.

        Raises ``UsageError`` where the system is not sized or not filled, ``UnsupportedError`` for a latency
        that is not known, ``OutputError`` for a folder that holds files, without ``overwrite``; others stay.
        """
        place, files = Path(folder), astra_sim_files(self.system, self.diagnostics)

        def fill(temporary: Path) -> None:
            temporary.mkdir()
            for name, text in files.items():
                (temporary / name).write_text(text, encoding="utf-8")

        write_atomically(place, fill, overwrite=overwrite, directory=True)
        return [place / name for name in files]


@checked()
def system(
    name: str | os.PathLike[str],
    devices: int | Sequence[int] | None = None,
    *,
    diagnostics: Diagnostics | None = None,
) -> SystemResult:
    """A system that ships with the package, or one of your own (a TOML file).

    ``devices`` is how many a job takes, or the sizes of the dimensions, innermost first. Raises
    ``UsageError`` for an unknown name or a number of devices that there is not, ``FormatError`` for a
    damaged file.
    """
    found = load_system(name)
    return SystemResult(
        system=found if devices is None else found.sized(devices),
        diagnostics=diagnostics if diagnostics is not None else Diagnostics(),
    )


def sized_for(named: str | os.PathLike[str] | System | None, ranks: int) -> System | None:
    """A system with a device for each rank; one that has a size is taken as it is, and none for None.

    Raises ``UsageError`` where that has fewer, and as :func:`system` does.
    """
    if named is None:
        return None
    found = named if isinstance(named, System) else load_system(named)
    if found.devices < 0:
        return found.sized(ranks)
    if found.devices < ranks:
        raise UsageError(
            f"{found.name} is sized to {found.devices:,} devices, and the job has {ranks:,} ranks",
            hint=f"a system of {ranks:,}",
        )
    return found


def dimension_rows(found: System) -> list[DimensionRow]:
    """The dimensions of a system as rows of a document."""
    return [
        DimensionRow(
            name=each.name,
            topology=each.topology,
            size=each.size,
            bandwidth_bytes_per_s=each.bandwidth_bytes_per_s,
            down_bandwidth_bytes_per_s=each.received_bytes_per_s,
            link_bandwidth_bytes_per_s=each.link_bytes_per_s,
            latency_ns=each.latency_ns,
            oversubscription=each.oversubscription,
            reduction=each.reduction,
            reduction_share=each.reduction_share,
            source=found.source_text(each.source),
        )
        for each in found.dimensions
    ]
