"""The comparison for people and for scripts: one offline HTML page, Markdown, CSV."""

from __future__ import annotations

from hespas.validators.accuracy.report.page import FileFact, Provenance, accuracy_html, provenance_of
from hespas.validators.accuracy.report.rows import CSV_COLUMNS, accuracy_csv, accuracy_markdown, speed_up_csv

__all__ = [
    "CSV_COLUMNS",
    "FileFact",
    "Provenance",
    "accuracy_csv",
    "accuracy_html",
    "accuracy_markdown",
    "provenance_of",
    "speed_up_csv",
]
