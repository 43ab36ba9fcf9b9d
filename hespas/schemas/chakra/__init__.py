"""Chakra execution trace schema: ``et_def.proto`` for readers, and :mod:`.tables` for all versions.

This module has the version labels, which cost nothing to import.
"""

from __future__ import annotations

__all__ = ["CURRENT", "EARLY", "LATEST_VERSIONS", "READ_VERSIONS"]

CURRENT, EARLY = "0.0.4", "0.0.4-2023-10-10"

LATEST_VERSIONS = (CURRENT, "1.0.0")
"""Labels of the versions that can be written."""

READ_VERSIONS = (
    "0.0.1",
    "0.0.2",
    "0.0.3",
    "0.0.3-2023-07-07",
    "0.0.3-2023-08-02",
    "0.0.3-2023-08-05",
    "0.0.3-2023-08-07",
    EARLY,
    *LATEST_VERSIONS,
)
"""Labels that users can select, oldest first; :data:`.tables.NAMED` defines them."""
