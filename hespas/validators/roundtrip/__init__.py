"""Round trips: every pair of formats tried on real files, from one format through the other and back."""

from __future__ import annotations

from hespas.validators.roundtrip.columns import QUANTISED_TYPES, ColumnResult, ColumnStatus, compare_columns
from hespas.validators.roundtrip.matrix import (
    MatrixCell,
    RoundTrips,
    cell_text,
    matrix_table,
    roundtrip,
    roundtrip_html,
    roundtrip_json,
)
from hespas.validators.roundtrip.pairs import FilePairs, FormatPair, PairStatus, file_pairs

__all__ = [
    "QUANTISED_TYPES",
    "ColumnResult",
    "ColumnStatus",
    "FilePairs",
    "FormatPair",
    "MatrixCell",
    "PairStatus",
    "RoundTrips",
    "cell_text",
    "compare_columns",
    "file_pairs",
    "matrix_table",
    "roundtrip",
    "roundtrip_html",
    "roundtrip_json",
]
