"""Chakra execution trace schema: ``et_def.proto`` for readers, :mod:`.tables` for the codec, and what they
were before in :mod:`.history`. Here are the labels of its versions, which cost nothing to import.
"""

from __future__ import annotations

__all__ = ["CURRENT", "EARLY", "LATEST_VERSIONS", "READ_VERSIONS"]

CURRENT, EARLY = "0.0.4", "0.0.4-2023-10-10"

LATEST_VERSIONS = (CURRENT, "1.0.0")
"""Labels that are written."""

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
"""What a user can name, oldest first: those that :data:`.history.NAMED` explains."""
