"""Text workloads of ASTRA-sim 1.0: https://github.com/astra-sim/astra-sim, ``inputs/workload/ASTRA-sim-1.0``.

Importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value
from hespas.graph import Diagnostics

__all__ = ["FORMAT"]


def _sniff(head: Head) -> int:
    from hespas.converters.astra_text.grammar import score

    return 0 if head.is_directory else score(head.data)


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.astra_text.reader import read_astra_text

    return read_astra_text(path, options, diagnostics)


FORMAT = Format(
    name="astra-text",
    title="ASTRA-sim 1.0 workload, text",
    suffixes=(".txt",),
    specification="https://github.com/astra-sim/astra-sim/tree/ASTRA-sim-1.0/inputs/workload",
    sniff=_sniff,
    read=_read,
    flat=True,
)
