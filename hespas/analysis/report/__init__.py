"""The analyses as a folder: a page that needs nothing else, a CSV file per table, and the JSON document."""

from __future__ import annotations

from hespas.analysis.report.folder import check_folder, write_report
from hespas.analysis.report.page import analysis_html

__all__ = ["analysis_html", "check_folder", "write_report"]
