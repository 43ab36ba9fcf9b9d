"""Text workloads of ASTRA-sim 1.0: https://github.com/astra-sim/astra-sim, ``inputs/workload/ASTRA-sim-1.0``.

Importing this module is cheap.
"""

from __future__ import annotations

from hespas.converters.format import Format, Head, lazily

__all__ = ["FORMAT"]


def _sniff(head: Head) -> int:
    """Return the confidence, from 0 to 100, that the first words of an input are those of a text workload."""
    from hespas.converters.astra_text.grammar import score

    return 0 if head.is_directory else score(head.data)


FORMAT = Format(
    name="astra-text",
    title="ASTRA-sim 1.0 workload, text",
    suffixes=(".txt",),
    specification="https://github.com/astra-sim/astra-sim/tree/ASTRA-sim-1.0/inputs/workload",
    sniff=_sniff,
    never_json=True,
    read=lazily("hespas.converters.astra_text.reader:read_astra_text"),
    flat=True,
)
