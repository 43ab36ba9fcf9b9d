"""The names of rank files in JSON."""

from __future__ import annotations

import re

__all__ = ["RANK_FILE", "bare_name"]

RANK_FILE = re.compile(r"^(?P<name>.+)\.(?P<rank>[0-9]+)\.json(?:\.gz)?$")
"""The name of one rank's file; ``comm_group.json`` is none."""


def bare_name(name: str) -> str:
    """A name without ``.json`` and ``.gz``."""
    return name.removesuffix(".gz").removesuffix(".json")
