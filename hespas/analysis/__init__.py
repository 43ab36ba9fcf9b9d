"""Analyses of measured profiles: pure functions of device events, each giving a table of columns.

Definitions are those of the field's tools where they have one (Holistic Trace Analysis, TraceLens, XProf);
every module says which.
"""

from __future__ import annotations

from hespas.analysis.run import Analyses, analyses_of, device_of

__all__ = ["Analyses", "analyses_of", "device_of"]
