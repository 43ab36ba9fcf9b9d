"""Format ``hlo``: XLA's HLO as text or serialised ``HloModuleProto``, before or after optimisation.

Text format: https://github.com/openxla/xla/tree/main/xla/hlo/parser; messages: ``xla/service/hlo.proto``.
Text is read without jaxlib.
"""

from __future__ import annotations

from hespas.converters.format import Format, lazily

__all__ = ["FORMAT"]


FORMAT = Format(
    name="hlo",
    title="HLO (XLA), text or HloModuleProto",
    suffixes=(".hlo", ".txt", ".pb"),
    specification="https://openxla.org/xla/operation_semantics",
    sniff=lazily("hespas.converters.hlo.scan:sniff"),
    never_json=True,
    read=lazily("hespas.converters.hlo.reader:read_hlo"),
)
