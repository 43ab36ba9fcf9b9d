"""Tables of measured operations: CSV (also gzipped) or Parquet, by the columns of :mod:`hespas.measurements`.

The writer writes one row per device event. The reader reads such tables, and tables of operations by kind and
sizes, both as a profile.
Importing this module is cheap.
"""

from __future__ import annotations

import csv
from contextlib import suppress

from hespas.converters.format import Format, Head, lazily
from hespas.files.streams import open_input
from hespas.measurements import COLUMNS, DURATIONS, OF_OPERATIONS

__all__ = ["FORMAT", "SCHEMA_ID"]

SCHEMA_ID = "hespas.ops-table/1"
"""Metadata of the Parquet files that Hespas writes."""

_PARQUET = b"PAR1"
_TAIL_BYTES = 64 << 10
"""Bytes to read at the end of a Parquet file, which has the names of its columns."""


def _sniff(head: Head) -> int:
    """Return the confidence that an input is a table of operations, from the names of its columns. They are
    in the first line of a text, or at the end of a Parquet file.
    """
    if head.is_directory:
        return 0
    if head.data.startswith(_PARQUET):
        tail = b""
        with suppress(OSError), open_input(head.path) as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            tail = stream.read(_TAIL_BYTES)
        if SCHEMA_ID.encode() in tail:
            return 100
        return 85 if any(name.encode() in tail for name in DURATIONS) else 55
    line = head.data.removeprefix(b"\xef\xbb\xbf").partition(b"\n")[0]
    if b"," not in line or line.lstrip()[:1] in {b"{", b"[", b"<", b"/", b"#"}:
        return 0
    try:
        names = set(next(csv.reader([line.decode("utf-8").rstrip("\r")]), list[str]()))
    except (UnicodeDecodeError, csv.Error):
        return 0
    if not names & set(DURATIONS) or len(names & {*COLUMNS, *DURATIONS}) < 2:
        return 0
    return 92 if names & {"op", "kernel"} or names >= OF_OPERATIONS else 60


FORMAT = Format(
    name="ops-table",
    title="Table of measured operations",
    suffixes=(".csv", ".parquet"),
    specification="hespas/measurements/__init__.py",
    sniff=_sniff,
    never_json=True,
    read=lazily("hespas.converters.ops_table.reader:read_ops_table"),
    write=lazily("hespas.converters.ops_table.writer:write_ops_table"),
    profiles=True,
)
