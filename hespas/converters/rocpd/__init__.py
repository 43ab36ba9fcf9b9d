"""Profiles of AMD's rocprofv3: its database (rocpd, schema 3) and its JSON.

Schemas: https://github.com/ROCm/rocprofiler-sdk, ``source/share/rocprofiler-sdk-rocpd/rocpd_tables.sql`` and
``source/lib/output/generateJSON.cpp``. Importing this module is cheap.
"""

from __future__ import annotations

import re

from hespas.converters.format import Format, Head, lazily

__all__ = ["FORMAT", "FORMAT_JSON"]

_TOOL = re.compile(rb'\s*\{\s*"rocprofiler-sdk-tool"\s*:\s*\[')


def _sniff(head: Head) -> int:
    """Return the confidence that an input is a rocpd database, from the names of its tables, which may have a
    suffix per recording.
    """
    from hespas.files.sqlite import has_table

    signs = (b"`rocpd_", b'"rocpd_', b"TABLE rocpd_", b"EXISTS rocpd_")
    return (
        95 if has_table(head.path, head.data, lambda table: table.lower().startswith("rocpd_"), signs) else 0
    )


def _sniff_json(head: Head) -> int:
    """Return the confidence that an input is a document of rocprofv3, certain if it has the single key that
    rocprofv3 writes.
    """
    return 97 if not head.is_directory and _TOOL.match(head.data.removeprefix(b"\xef\xbb\xbf")) else 0


FORMAT = Format(
    name="rocpd",
    title="rocprofv3 profile (rocpd database)",
    suffixes=(".db", ".rocpd"),
    specification="https://github.com/ROCm/rocprofiler-sdk/tree/amd-mainline/source/share/rocprofiler-sdk-rocpd",
    sniff=_sniff,
    never_json=True,
    read=lazily("hespas.converters.rocpd.recording:read_rocpd"),
)

FORMAT_JSON = Format(
    name="rocprofv3",
    title="rocprofv3 profile (JSON)",
    suffixes=(".rocprofv3.json",),
    specification="https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocprofv3.html",
    sniff=_sniff_json,
    read=lazily("hespas.converters.rocpd.document:read_rocprofv3"),
)
