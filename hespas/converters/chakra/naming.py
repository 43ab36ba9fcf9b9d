"""The names of rank files."""

from __future__ import annotations

import re

__all__ = ["MAX_RANK_DIGITS", "RANK_FILE"]

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.et(?:\.gz)?$")
"""The name of one rank's file."""
MAX_RANK_DIGITS = 9
