"""Tables of measured operations, one row per device event: CSV (also gzipped) or Parquet.

The columns are those of :mod:`.layout`; a table read may lack some, and may state durations in other units.
Importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value, WriteOptions
from hespas.graph import Diagnostics

__all__ = ["FORMAT"]


def _sniff(head: Head) -> int:
    from hespas.converters.ops_table.telling import likelihood

    return likelihood(head)


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.ops_table.reader import read_ops_table

    return read_ops_table(path, options, diagnostics)


def _write(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    from hespas.converters.ops_table.writer import write_ops_table

    write_ops_table(value, path, options, diagnostics)


FORMAT = Format(
    name="ops-table",
    title="Table of measured operations",
    suffixes=(".csv", ".parquet"),
    specification="hespas/converters/ops_table/layout.py",
    sniff=_sniff,
    read=_read,
    write=_write,
    profiles=True,
)
