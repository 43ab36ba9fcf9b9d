"""Reports of a comparison: one offline HTML page, Markdown and CSV."""

from __future__ import annotations

from hespas.validators.accuracy.report.csv_tables import CSV_COLUMNS, accuracy_csv, speed_up_csv
from hespas.validators.accuracy.report.markdown import accuracy_markdown
from hespas.validators.accuracy.report.page import FileFact, ReportProvenance, accuracy_html, provenance_of

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
