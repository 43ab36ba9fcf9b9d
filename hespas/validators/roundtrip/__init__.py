"""What survives a conversion: every pair of formats tried on real files, there and back."""

from __future__ import annotations

from hespas.validators.roundtrip.matrix import (
    Cell,
    RoundTrips,
    cell_text,
    roundtrip,
    roundtrip_html,
    roundtrip_json,
)
from hespas.validators.roundtrip.pairs import (
    ColumnResult,
    FilePairs,
    Kept,
    Pair,
    PairStatus,
    columns_kept,
    file_pairs,
)

__all__ = [
    "Cell",
    "ColumnResult",
    "FilePairs",
    "Kept",
    "Pair",
    "PairStatus",
    "RoundTrips",
    "cell_text",
    "columns_kept",
    "file_pairs",
    "roundtrip",
    "roundtrip_html",
    "roundtrip_json",
]
