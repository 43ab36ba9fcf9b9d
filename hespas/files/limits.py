"""How much an input may ask for: every limit of the readers and writers, in one place.

``HESPAS_MAX_INPUT_BYTES`` in the environment, or ``--max-input-bytes`` of a command, states how many bytes
of one input are trusted: it raises every limit in bytes that lies below it, of this process and its children.
Native parsers then get what an input of that size would.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from hespas.graph.errors import UsageError

__all__ = ["VARIABLE", "Limits", "limits"]

VARIABLE = "HESPAS_MAX_INPUT_BYTES"
"""The environment variable that raises the limits in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits in bytes end in ``_bytes``; only these are raised by :data:`VARIABLE`.

    A gzip stream may expand to ``packed_free_bytes``, and beyond to ``packed_ratio`` times the compressed
    bytes read so far: deflate reaches 1,032:1 on zeros, real programs and traces stay below 60:1. Columns of
    Parquet tables may unpack to ``table_free_bytes``, and beyond to ``table_ratio`` times the file: real ones
    stay below 30:1. Equal rows take no space there, so what rows take in memory (256 bytes of a table of
    operations, 80 of a profile) is bounded, too: by ``table_rows_bytes`` or ``profile_rows_bytes``, and 20
    times the file. How ``parser_bytes``, ``program_bytes``, ``program_cpu_s`` and ``parser_cpu_s`` grow with
    a program says :func:`hespas.files.sandbox.allowance`. The graph of a text workload takes up to 140 times
    its text. Real models have 400 trees, and have seen 10,000 octaves of sizes. XLA takes hours for programs
    of fewer operations than a replay may have.
    """

    input_bytes: int = 64 << 30
    trusted_bytes: int = 0
    packed_free_bytes: int = 8 << 20
    packed_ratio: int = 100
    compressed_packets_bytes: int = 8 << 20
    compressed_packets_ratio: int = 50
    configuration_bytes: int = 16 << 20
    device_bytes: int = 1 << 20
    report_bytes: int = 64 << 20
    groups_bytes: int = 256 << 20
    table_bytes: int = 4 << 30
    table_free_bytes: int = 64 << 20
    table_ratio: int = 50
    table_rows_bytes: int = 512 << 20
    table_columns: int = 1 << 12
    profile_rows_bytes: int = 200 << 20
    card_bytes: int = 64 << 20
    model_bytes: int = 64 << 20
    model_trees: int = 4096
    model_sizes: int = 1 << 17
    text_workload_bytes: int = 8 << 20
    cell_bytes: int = 16 << 20
    node_fields: int = 1 << 20
    parser_bytes: int = 150 << 20
    program_bytes: int = 10**9
    program_cpu_s: int = 6
    parser_cpu_s: float = 1.5
    replayed_operations: int = 200_000
    replayed_edges: int = 500_000
    replayed_characters: int = 32 << 20


def limits() -> Limits:
    """The limits in force. Raises ``UsageError`` where the environment states no number of bytes."""
    return _stated(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=4)
def _stated(text: str) -> Limits:
    if not text:
        return Limits()
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 19 and int(text)):
        raise UsageError(
            f"{VARIABLE} is {text[:60]!r}, no number of bytes", hint=f"{VARIABLE}=8000000000, for example"
        )
    size, own = int(text), Limits()
    names = [field.name for field in fields(own) if field.name.endswith("_bytes")]
    return replace(own, **{name: max(size, getattr(own, name)) for name in names})
