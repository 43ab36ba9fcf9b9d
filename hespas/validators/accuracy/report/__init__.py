"""Reports of a comparison: one offline HTML page, Markdown and CSV."""

from __future__ import annotations

from hespas.validators.accuracy.report.page import FileFact, ReportProvenance, accuracy_html, provenance_of
from hespas.validators.accuracy.report.tables import (
    CSV_COLUMNS,
    accuracy_csv,
    accuracy_markdown,
    speed_up_csv,
)

__all__ = [
    "CSV_COLUMNS",
    "FileFact",
    "ReportProvenance",
    "accuracy_csv",
    "accuracy_html",
    "accuracy_markdown",
    "provenance_of",
    "speed_up_csv",
]
