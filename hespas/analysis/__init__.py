"""Analyses of measured profiles: pure functions of device events that return tables of columns.

Definitions are from Holistic Trace Analysis, TraceLens or XProf where these define a figure; each module
names its source.
"""

from __future__ import annotations

from hespas.graph.deprecation import moved_names

__all__: list[str] = []

__getattr__ = moved_names(
    __name__, dict.fromkeys(("AnalysisTables", "analysis_tables", "device_of"), "hespas.analysis.run")
)
