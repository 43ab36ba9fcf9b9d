"""Traces of PyTorch's profiler (Kineto): https://github.com/pytorch/kineto. Chrome-trace JSON, often gzipped.

Importing this module is cheap.
"""

from __future__ import annotations

import re
from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value
from hespas.graph import Diagnostics

__all__ = ["FORMAT"]

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[\s*\{[^{}]*"ph"\s*:')
_SIGNS = (b'"schemaVersion"', b'"deviceProperties"', b'"cat": "cpu_op"', b'"trace_id"', b'"distributedInfo"')


def _sniff(head: Head) -> int:
    """By the fields that only this profiler writes; any other Chrome trace is less likely one."""
    if head.is_directory or head.data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] not in (b"{", b"["):
        return 0
    signs = sum(sign in head.data for sign in _SIGNS)
    if _EVENTS.search(head.data):
        return 95 if signs else 60
    return 60 if signs > 1 else 0


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.kineto.profile import read_kineto

    return read_kineto(path, options, diagnostics)


FORMAT = Format(
    name="kineto",
    title="PyTorch profiler trace (Kineto)",
    suffixes=(".pt.trace.json", ".trace.json"),
    specification="https://github.com/pytorch/kineto",
    sniff=_sniff,
    read=_read,
)
