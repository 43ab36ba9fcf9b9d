"""The names of rank files."""

from __future__ import annotations

import re

__all__ = ["RANK_FILE"]

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>\d{1,9})\.et(?:\.gz)?$")
"""The name of one rank's file."""
