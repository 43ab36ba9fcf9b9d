"""Analyses, and simulated steps, as a folder: a page that needs nothing else, CSV files, and the document."""

from __future__ import annotations

from hespas.analysis.report.folder import check_folder, write_report
from hespas.analysis.report.page import SIMULATED, analysis_html

__all__ = ["SIMULATED", "analysis_html", "check_folder", "write_report"]
