"""Whether a file is a table of measured operations: by the names of its columns."""

from __future__ import annotations

import csv
from contextlib import suppress

from hespas.converters.format import Head
from hespas.converters.ops_table.layout import COLUMNS, DURATIONS, SCHEMA_ID
from hespas.files.streams import open_input

__all__ = ["likelihood"]

_PARQUET = b"PAR1"
_TAIL_BYTES = 64 << 10
"""The names of a Parquet file's columns stand at its end."""


def likelihood(head: Head) -> int:
    """0..100 by the first line of a text, or by the end of a Parquet file."""
    if head.is_directory:
        return 0
    if head.data.startswith(_PARQUET):
        return _of_parquet(head)
    line = head.data.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    if b"," not in line or line.lstrip()[:1] in {b"{", b"[", b"<", b"/", b"#"}:
        return 0
    try:
        names = next(csv.reader([line.decode("utf-8").rstrip("\r")]), list[str]())
    except (UnicodeDecodeError, csv.Error):
        return 0
    durations = sum(name in DURATIONS for name in names)
    known = sum(name in COLUMNS or name in DURATIONS for name in names)
    if not durations or known < 2:
        return 0
    return 92 if {"op", "kernel"} & set(names) else 60


def _of_parquet(head: Head) -> int:
    tail = b""
    with suppress(OSError), open_input(head.path) as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - _TAIL_BYTES))
        tail = stream.read(_TAIL_BYTES)
    if SCHEMA_ID.encode() in tail:
        return 100
    return 85 if any(name.encode() in tail for name in DURATIONS) else 55
