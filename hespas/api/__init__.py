"""What the commands do, as functions: each command is a thin shell around one of them."""

from __future__ import annotations

from hespas.api.conversion import Conservation, Conversion, Granularity, Missing, convert
from hespas.api.documents import Json, conversion_document, diagnostics_rows, estimate_document, write_json
from hespas.api.estimation import ClassTotals, NodeEstimates, class_totals, estimate, estimate_graph
from hespas.api.io import read, write
from hespas.api.tables import write_estimates_csv

__all__ = [
    "ClassTotals",
    "Conservation",
    "Conversion",
    "Granularity",
    "Json",
    "Missing",
    "NodeEstimates",
    "class_totals",
    "conversion_document",
    "convert",
    "diagnostics_rows",
    "estimate",
    "estimate_document",
    "estimate_graph",
    "read",
    "write",
    "write_estimates_csv",
    "write_json",
]
