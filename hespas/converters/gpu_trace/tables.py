"""Telling a database by its tables. Importing this module is cheap: formats use it to sniff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hespas.converters.format import Head
from hespas.files.streams import first_bytes, open_input
from hespas.graph.errors import HespasError

__all__ = ["SQLITE_MAGIC", "has_table"]

SQLITE_MAGIC = b"SQLite format 3\x00"
_PEEK_BYTES = 8 << 20


def has_table(head: Head, wanted: Callable[[str], bool], signs: tuple[bytes, ...]) -> bool:
    """Whether an input is an SQLite database with a table that is ``wanted``.

    A plain file is asked for its tables. A compressed or damaged one is searched for the ``signs``, which
    stand in the statements that made its tables: among its first pages in practice.
    """
    if head.is_directory or not head.data.startswith(SQLITE_MAGIC):
        return False
    names = _names(head.path)
    if names is not None:
        return any(wanted(name) for name in names)
    return _holds(head.data, signs) or _holds(first_bytes(head.path, _PEEK_BYTES), signs)


def _names(path: Path) -> tuple[str, ...] | None:
    """The names of a plain file's tables; None where they cannot be told."""
    from hespas.converters.gpu_trace.database import opened_plainly

    try:
        with open_input(path) as stream:
            if stream.read(len(SQLITE_MAGIC)) != SQLITE_MAGIC:
                return None
        with opened_plainly(path) as database:
            return database.tables
    except (OSError, HespasError):
        return None


def _holds(data: bytes, signs: tuple[bytes, ...]) -> bool:
    return any(sign in data for sign in signs)
