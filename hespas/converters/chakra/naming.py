"""Names that the files of one job share: rank files, and what a file kept without its set says of itself."""

from __future__ import annotations

import re

__all__ = ["GROUPS_ATTRIBUTE", "RANK_ATTRIBUTE", "RANK_FILE"]

RANK_ATTRIBUTE, GROUPS_ATTRIBUTE = "rank", "comm_group"
"""Metadata attributes of a file that was written without the rest of its set."""

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>\d{1,9})\.et(?:\.gz)?$")
"""The name of one rank's file."""
