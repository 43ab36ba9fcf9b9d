"""Two paths change places in one step, where the system can do that: for replacing a folder as a whole."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

__all__ = ["exchange"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def exchange(one: Path, other: Path) -> bool:
    """Let both paths change places at once (``renameat2`` of Linux); False where that cannot be done."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    rename.restype = ctypes.c_int
    first, second = os.fsencode(one), os.fsencode(other)
    done: int = rename(_AT_FDCWD, first, _AT_FDCWD, second, _RENAME_EXCHANGE)
    return done == 0
