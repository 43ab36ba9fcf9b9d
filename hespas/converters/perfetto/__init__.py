"""Perfetto's protobuf traces: https://perfetto.dev/docs/reference/trace-packet-proto.

Importing this module is cheap.
"""

from __future__ import annotations

from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value, WriteOptions
from hespas.graph import Diagnostics

__all__ = ["FORMAT"]


def _sniff(head: Head) -> int:
    if head.is_directory or not head.data.startswith(b"\x0a"):
        return 0
    from hespas.converters.perfetto.telling import likelihood

    return likelihood(head.data)


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.perfetto.reader import read_perfetto

    return read_perfetto(path, options, diagnostics)


def _write(value: Value, path: Path, options: WriteOptions, diagnostics: Diagnostics) -> None:
    from hespas.converters.perfetto.writer import write_perfetto

    write_perfetto(value, path, options, diagnostics)


FORMAT = Format(
    name="perfetto",
    title="Perfetto trace",
    suffixes=(".pftrace", ".perfetto-trace", ".perfetto"),
    specification="https://perfetto.dev/docs/reference/trace-packet-proto",
    sniff=_sniff,
    read=_read,
    write=_write,
    profiles=True,
)
