"""Nsight Systems profiles exported to SQLite: ``nsys export --type sqlite``. Schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference

Importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value
from hespas.converters.gpu_trace.tables import has_table
from hespas.graph import Diagnostics

__all__ = ["FORMAT"]

_TABLES = frozenset({"nvtx_events", "meta_data_export", "target_info_gpu"})
_SIGNS = (b"CUPTI_ACTIVITY_KIND_", b"TABLE NVTX_EVENTS", b"TABLE META_DATA_EXPORT")


def _is_wanted(table: str) -> bool:
    return table.lower().startswith("cupti_activity_kind_") or table.lower() in _TABLES


def _sniff(head: Head) -> int:
    """By the tables: all are optional, but a profile worth reading has one of these."""
    return 95 if has_table(head, _is_wanted, _SIGNS) else 0


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.nsys.export import read_nsys

    return read_nsys(path, options, diagnostics)


FORMAT = Format(
    name="nsys",
    title="Nsight Systems profile (SQLite export)",
    suffixes=(".sqlite", ".nsys-rep", ".qdrep"),
    specification="https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference",
    sniff=_sniff,
    read=_read,
)
