"""StableHLO programs: https://openxla.org/stablehlo/spec. jaxlib's bindings are loaded on the first read or
write.

A graph that was read from a program is written as that program; any other as a replay, which does the same
work in the same order (:mod:`.replay`). Several rank classes are a folder of replays (:mod:`.reader`).
"""

from __future__ import annotations

from hespas.converters.format import Format, Value, WriteOptions, lazily
from hespas.graph import Workload

__all__ = ["FORMAT"]


def _writes_directory(value: Value, options: WriteOptions) -> bool:
    """Several rank classes are several programs."""
    if not isinstance(value, Workload) or len(value.classes) == 1:
        return False
    from hespas.converters.stablehlo.ranks import chosen_classes

    return len(chosen_classes(value, options)) > 1


_VERSIONS = ("0.9.0", *(f"1.{minor}.0" for minor in range(18)))
"""Versions of the portable artifact: the oldest that is read, and all since it is stable."""

_LOSSES = {
    "": ("attachments", "source_row"),
    "stablehlo.metadata": ("metadata",),
    "stablehlo.replay": ("*",),
    "stablehlo.replay-flops": ("flops", "useful_flops"),
    "stablehlo.replay-bytes": ("bytes_read", "bytes_written"),
    "stablehlo.comm-bytes": ("collectives", "p2p"),
    "stablehlo.reduction": ("collectives",),
    "stablehlo.durations": ("duration_ns",),
    "stablehlo.streams": ("stream", "resource"),
    "stablehlo.names": ("id", "name", "name_row", "framework_row", "regions.label"),
    "stablehlo.costs": (
        "op_class",
        "rate_dtype",
        "flops",
        "useful_flops",
        "transcendentals",
        "bytes_read",
        "bytes_written",
        "contractions",
        "collectives",
        "p2p",
    ),
    "stablehlo.trips": ("multiplicity", "regions"),
    "stablehlo.extra": ("extra",),
    "stablehlo.communicators": ("collectives",),
    "stablehlo.attachments": ("attachments",),
}
"""What a program does not keep, by what its writer reports."""

FORMAT = Format(
    name="stablehlo",
    title="StableHLO program (text, bytecode, VHLO portable artifact, jax.export file)",
    suffixes=(".mlir", ".stablehlo", ".mlirbc", ".bc", ".vhlo", ".jaxexport", ".jax_export"),
    specification="https://openxla.org/stablehlo/spec",
    sniff=lazily("hespas.converters.stablehlo.sniffing:sniff"),
    never_json=True,
    read=lazily("hespas.converters.stablehlo.reader:read"),
    write=lazily("hespas.converters.stablehlo.write:write"),
    writes_directory=_writes_directory,
    write_versions=_VERSIONS,
    timed=False,
    losses=_LOSSES,
    extra="stablehlo",
)
