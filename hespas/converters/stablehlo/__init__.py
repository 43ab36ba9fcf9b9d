"""StableHLO programs: https://openxla.org/stablehlo/spec. Read only; jaxlib's bindings are loaded on the
first read.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, ReadOptions
from hespas.converters.stablehlo.sniffing import sniff
from hespas.graph import Diagnostics, Workload

__all__ = ["FORMAT"]


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    """Load the reader when something is read: telling formats apart does not need it."""
    from hespas.converters.stablehlo.reader import read

    return read(path, options, diagnostics)


FORMAT = Format(
    name="stablehlo",
    title="StableHLO program (text, bytecode, VHLO portable artifact, jax.export file)",
    suffixes=(".mlir", ".stablehlo", ".mlirbc", ".vhlo", ".jaxexport", ".jax_export"),
    specification="https://openxla.org/stablehlo/spec",
    sniff=sniff,
    read=_read,
    extra="stablehlo",
)
