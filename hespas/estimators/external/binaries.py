"""Simulators that users build themselves: found by path, or by name where programs are looked for."""

from __future__ import annotations

import shutil
from functools import lru_cache
from hashlib import file_digest
from pathlib import Path

from hespas.estimators.availability import Availability

__all__ = ["binary_availability", "binary_of"]


def binary_of(command: str, name: str) -> str | None:
    """The program: the one named, or one called ``name``; None where there is none that can be run."""
    found = shutil.which(command or name)
    return None if found is None else str(Path(found).resolve())


def binary_availability(command: str, name: str, install: str) -> Availability:
    """Whether the program is there. Such programs tell no version: their content stands for it."""
    found = binary_of(command, name)
    if found is None:
        return Availability(False, f"no program {command or name!r}", install)
    stat = Path(found).stat()
    return Availability(True, f"{found} ({_digest(found, stat.st_mtime_ns, stat.st_size)[:12]})")


@lru_cache(maxsize=8)
def _digest(path: str, changed_ns: int, size: int) -> str:
    """Of the content; time and size say when to look again."""
    with Path(path).open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
