"""The names of rank files."""

from __future__ import annotations

import re

__all__ = ["MAX_RANK_DIGITS", "RANK_FILE"]

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.e[tg](?:\.gz)?$")
"""The name of one rank's file; those of schema 0.0.1 end in ``.eg``."""
MAX_RANK_DIGITS = 9
