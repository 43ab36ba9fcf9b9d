"""Analyses of measured profiles: pure functions of device events that return tables of columns.

Definitions are from Holistic Trace Analysis, TraceLens or XProf where these define a figure; each module
names its source.
"""

from __future__ import annotations

from hespas.analysis.run import AnalysisTables, analysis_tables, device_of

__all__ = ["AnalysisTables", "analysis_tables", "device_of"]
