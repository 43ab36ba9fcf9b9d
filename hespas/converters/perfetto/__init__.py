"""Perfetto's protobuf traces: https://perfetto.dev/docs/reference/trace-packet-proto.

Importing this module is cheap.
"""

from __future__ import annotations

from hespas.converters.format import Format, Head, lazily

__all__ = ["FORMAT"]


def _sniff(head: Head) -> int:
    """Return the confidence that an input is a Perfetto trace, from its first packets."""
    if head.is_directory or not head.data.startswith(b"\x0a"):
        return 0
    from hespas.converters.perfetto.packets import likelihood

    return likelihood(head.data)


FORMAT = Format(
    name="perfetto",
    title="Perfetto trace",
    suffixes=(".pftrace", ".perfetto-trace", ".perfetto"),
    specification="https://perfetto.dev/docs/reference/trace-packet-proto",
    sniff=_sniff,
    never_json=True,
    read=lazily("hespas.converters.perfetto.reader:read_perfetto"),
    write=lazily("hespas.converters.perfetto.writer:write_perfetto"),
    profiles=True,
)
