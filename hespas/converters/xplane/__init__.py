"""Traces of XLA's profiler, as JAX and TensorFlow write them: https://github.com/openxla/xprof.

``xplane`` is the protobuf file, ``jax-trace`` the Chrome-trace JSON derived from it, with less information.
Importing this module is cheap.
"""

from __future__ import annotations

import re
from pathlib import Path

from hespas.converters.format import Format, Head, ReadOptions, Value, lazily
from hespas.graph import Diagnostics
from hespas.graph.errors import FormatError, UsageError
from hespas.schemas.xplane import PLANE_PREFIXES

__all__ = ["FORMAT", "FORMAT_JSON"]

_SPACE = re.compile(
    rb"\A\x0a[\x80-\xff]{0,9}[\x00-\x7f](?:\x08[\x80-\xff]{0,9}[\x00-\x7f])?\x12[\x80-\xff]{0,2}[\x00-\x7f](?:"
    + b"|".join(re.escape(prefix.encode()) for prefix in PLANE_PREFIXES)
    + rb")"
)
"""First bytes of a file: a plane with one of the profiler's names."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_PROCESS = re.compile(
    rb'"process_name"[^{}]{0,80}"args"\s*:\s*\{\s*"name"\s*:\s*"(?:[^"]{0,64} )?/(?:host|device):'
)
_TICKS = re.compile(rb'"metadata"\s*:\s*\{\s*"highres-ticks"\s*:\s*true')
_CATEGORY = re.compile(rb'"cat"\s*:\s*"')


_RUN_GLOBS = ("plugins/profile/*/*", "profile/*/*")
"""Recordings in a log directory of JAX or TensorFlow, in one folder per run."""


def _sniff(head: Head) -> int:
    """Return the confidence that an input is an XLA profile, from the name of the first plane of a file, or
    from the files of a log directory.
    """
    if head.is_directory:
        return 90 if _recordings(head.path) else 0
    return 98 if _SPACE.match(head.data) else 0


def _recordings(folder: Path) -> list[Path]:
    """List the recordings in a log directory in the order of their runs, which are named by time."""
    for pattern in (*_RUN_GLOBS, *(("*",) if folder.resolve().parent.name == "profile" else ())):
        recordings = sorted(folder.glob(f"{pattern}.xplane.pb"))
        if recordings:
            return recordings
    return []


def _newest(folder: Path, diagnostics: Diagnostics) -> Path:
    """Return the recording of the newest run. Raises ``UsageError`` if several hosts recorded that run."""
    recordings = _recordings(folder)
    if not recordings:
        raise FormatError(
            "no *.xplane.pb in the directory", path=str(folder), hint="name the log directory or the file"
        )
    newest = [path for path in recordings if path.parent == recordings[-1].parent]
    if len(newest) > 1:
        raise UsageError(
            f"{len(newest)} hosts recorded this run; one file is read at a time",
            path=str(folder),
            hint=f"name one: {newest[0]}",
        )
    runs = len({path.parent for path in recordings})
    if runs > 1:
        diagnostics.warning(
            "xplane.newest-run", "", f"{runs} runs; the newest is read: {newest[0].name}", path=str(folder)
        )
    return newest[0]


def _sniff_json(head: Head) -> int:
    """Return the confidence, from 0 to 100, that JSON is a trace of JAX's profiler. It depends on the names
    of processes or the metadata of the writer. Events of JAX have no category.
    """
    if head.is_directory or head.data.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] != b"{":
        return 0
    if not _EVENTS.search(head.data) or _CATEGORY.search(head.data):
        return 0
    return 95 if _PROCESS.search(head.data) else 80 if _TICKS.search(head.data) else 0


def _read(path: Path, options: ReadOptions, diagnostics: Diagnostics) -> Value:
    from hespas.converters.xplane.profile import read_xplane

    if path.is_dir():
        path = _newest(path, diagnostics)
    return read_xplane(path, options, diagnostics)


FORMAT = Format(
    name="xplane",
    title="XLA profiler trace (XSpace)",
    suffixes=(".xplane.pb",),
    specification="https://github.com/openxla/xla/blob/main/xla/tsl/profiler/protobuf/xplane.proto",
    sniff=_sniff,
    never_json=True,
    read=_read,
)

FORMAT_JSON = Format(
    name="jax-trace",
    title="JAX profiler trace as Chrome-trace JSON",
    suffixes=(".trace.json",),
    specification="https://docs.jax.dev/en/latest/profiling.html",
    sniff=_sniff_json,
    read=lazily("hespas.converters.xplane.jax_trace:read_jax_trace"),
)
