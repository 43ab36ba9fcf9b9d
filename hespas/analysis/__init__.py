"""Analyses of measured profiles: pure functions of device events that return tables of columns.

Definitions are those of the field's tools where they exist (Holistic Trace Analysis, TraceLens, XProf);
each module names its source.
"""

from __future__ import annotations

from hespas.analysis.run import AnalysisTables, analysis_tables, device_of

__all__ = ["AnalysisTables", "analysis_tables", "device_of"]
