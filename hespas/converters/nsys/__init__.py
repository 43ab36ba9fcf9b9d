"""Nsight Systems profiles exported to SQLite with ``nsys export --type sqlite``. Schema:
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference

Importing this module is cheap.
"""

from __future__ import annotations

from hespas.converters.format import Format, Head, lazily

__all__ = ["FORMAT"]

_TABLES = frozenset({"nvtx_events", "meta_data_export", "target_info_gpu"})
_SIGNS = (b"CUPTI_ACTIVITY_KIND_", b"TABLE NVTX_EVENTS", b"TABLE META_DATA_EXPORT")


def _sniff(head: Head) -> int:
    """Return the confidence that an input is an Nsight Systems export, from its database tables. A useful
    export has at least one of the known tables.
    """
    from hespas.files.sqlite import has_table

    def is_wanted(table: str) -> bool:
        return table.lower().startswith("cupti_activity_kind_") or table.lower() in _TABLES

    return 95 if has_table(head.path, head.data, is_wanted, _SIGNS) else 0


FORMAT = Format(
    name="nsys",
    title="Nsight Systems profile (SQLite export)",
    suffixes=(".sqlite", ".nsys-rep", ".qdrep"),
    specification="https://docs.nvidia.com/nsight-systems/UserGuide/index.html#sqlite-schema-reference",
    sniff=_sniff,
    never_json=True,
    read=lazily("hespas.converters.nsys.export:read_nsys"),
)
