"""Format ``hlo``: XLA's HLO as text or serialised ``HloModuleProto``, before or after optimisation.

Text format: https://github.com/openxla/xla/tree/main/xla/hlo/parser; messages: ``xla/service/hlo.proto``.
Text is read without jaxlib.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions
from hespas.graph import Diagnostics, Workload

__all__ = ["FORMAT"]


def _sniff(head: Head) -> int:
    from hespas.converters.hlo.sniff import sniff

    return sniff(head)


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Workload:
    from hespas.converters.hlo.reader import read_hlo

    return read_hlo(path, options, diagnostics)


FORMAT = Format(
    name="hlo",
    title="HLO (XLA), text or HloModuleProto",
    suffixes=(".hlo", ".txt", ".pb"),
    specification="https://openxla.org/xla/operation_semantics",
    sniff=_sniff,
    read=_read,
)
