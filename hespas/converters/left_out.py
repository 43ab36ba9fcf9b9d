"""Folders that hold more than the set of files they are read as: what is left out is told."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

from hespas.converters.format import Format
from hespas.converters.registry import BUILTIN, is_recognised, sniff
from hespas.graph import Diagnostics

__all__ = ["note_left_out"]

_RANK_FILE = re.compile(r"\.[0-9]+\.(et|json)(\.gz)?$")
_MOST_FILES = 200
"""So many files beside the rank files are looked into."""


def note_left_out(path: Path, chosen: Format, diagnostics: Diagnostics) -> None:
    """Report workloads and profiles of other formats in a folder that is read as ``chosen``; nothing of a
    file, or of formats whose folders hold files of another.
    """
    if not path.is_dir():
        return
    beside = (entry for entry in sorted(path.iterdir()) if entry.is_file() and not _is_part(entry, chosen))
    others = [(entry, sniff(entry)) for entry in islice(beside, _MOST_FILES) if is_recognised(entry)]
    found = [f"{entry.name} ({form.name})" for entry, form in others if not _is_kin(form, chosen)]
    shown = ", ".join(found[:3]) + (" ..." if len(found) > 3 else "")
    diagnostics.warning(
        "input.left-out", str(path), f"read as {chosen.name}, without {shown}", count=len(found)
    )


def _is_part(entry: Path, chosen: Format) -> bool:
    return chosen.flat and _RANK_FILE.search(entry.name) is not None


def _is_kin(form: Format, chosen: Format) -> bool:
    """Whether files of a format belong into folders of the other: both are of the same tool."""
    home = BUILTIN.get(chosen.name, "").partition(":")[0]
    return form.name == chosen.name or (not chosen.flat and BUILTIN.get(form.name, "").startswith(f"{home}:"))
