"""Tables of measured operations, one row per device event: CSV (also gzipped) or Parquet.

The columns are those of :mod:`.layout`; a table read may lack some, and may state durations in other units.
Importing this module is cheap.
"""

from __future__ import annotations

from hespas.converters.format import Format, lazily

__all__ = ["FORMAT"]


FORMAT = Format(
    name="ops-table",
    title="Table of measured operations",
    suffixes=(".csv", ".parquet"),
    specification="hespas/converters/ops_table/layout.py",
    sniff=lazily("hespas.converters.ops_table.telling:likelihood"),
    never_json=True,
    read=lazily("hespas.converters.ops_table.reader:read_ops_table"),
    write=lazily("hespas.converters.ops_table.writer:write_ops_table"),
    profiles=True,
)
