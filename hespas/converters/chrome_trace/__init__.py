"""Chrome-trace JSON, which Perfetto's viewer and chrome://tracing open. Importing this module is cheap.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
Any profile can be written; :mod:`.writer` also writes simulated runs and several values next to each other.
The reader accepts any such trace that is not recognised as the format of a specific profiler.
"""

from __future__ import annotations

import re

from hespas.converters.format import Format, Head, lazily

__all__ = ["FORMAT"]

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[\s*\{[^{}]*"ph"\s*:')
_OTHERS = (
    b'"schemaVersion"',
    b'"deviceProperties"',
    b'"distributedInfo"',
    b'"trace_id"',
    b'"Ev Idx"',
    b'"External id"',
    b'"cpu_op"',
    b'"cuda_runtime"',
    b'"gpu_memcpy"',
    b'"/device:',
    b'"/host:',
    b'"hlo_op"',
)
"""Keys written by the profilers of PyTorch and JAX, which have readers of their own."""


def _sniff(head: Head) -> int:
    """Return the confidence that an input is a Chrome trace: 100 for files of Hespas, 65 for other traces, 20
    for traces of a known profiler.
    """
    data = head.data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if head.is_directory or data[:1] not in (b"{", b"["):
        return 0
    if b'"hespas.chrome-trace/' in data:
        return 100
    if not _EVENTS.search(data):
        return 0
    return 20 if any(sign in data for sign in _OTHERS) else 65


FORMAT = Format(
    name="chrome-trace",
    title="Chrome trace (for Perfetto's viewer)",
    suffixes=(".chrome.json", ".trace.json", ".json"),
    specification="https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU",
    sniff=_sniff,
    read=lazily("hespas.converters.chrome_trace.reader:read_chrome_trace"),
    write=lazily("hespas.converters.chrome_trace.writer:write_chrome_trace"),
    profiles=True,
)
