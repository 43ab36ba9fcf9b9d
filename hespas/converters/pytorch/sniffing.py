"""Telling PyTorch's files by their first bytes: profiles, execution traces, and folders of both."""

from __future__ import annotations

import re

from hespas.converters.format import HEAD_BYTES, Head
from hespas.files.streams import first_bytes

__all__ = [
    "is_execution_trace",
    "is_profile",
    "job_name",
    "rank_in_name",
    "score_execution_trace",
    "score_folder",
    "score_profile",
]

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[|\A\s*\[\s*\{[^{}]*"ph"\s*:')
_SIGNS = (b'"schemaVersion"', b'"deviceProperties"', b'"cat": "cpu_op"', b'"trace_id"', b'"distributedInfo"')
_SCHEMA = re.compile(rb'"schema"\s*:\s*"1\.\d{1,2}\.\d{1,2}[^"]{0,40}"')
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_NODE_FIELDS = (b'"rf_id"', b'"ctrl_deps"', b'"op_schema"', b'"fw_parent"')
_CERTAIN, _DIRECTORY, _LIKELY, _NO = 95, 92, 60, 0
_MOST_LOOKED_AT = 64


def _text(data: bytes) -> bytes:
    return data.removeprefix(b"\xef\xbb\xbf").lstrip()


def score_profile(head: Head) -> int:
    """By the fields that only this profiler writes; any other Chrome trace is less likely one."""
    if head.is_directory or _text(head.data)[:1] not in (b"{", b"["):
        return _NO
    signs = sum(sign in head.data for sign in _SIGNS)
    if _EVENTS.search(head.data):
        return _CERTAIN if signs else _LIKELY
    return _LIKELY if signs > 1 else _NO


def is_profile(data: bytes) -> bool:
    """Whether a file starts like a profile."""
    return _text(data)[:1] == b"{" and any(sign in data for sign in _SIGNS) and not is_execution_trace(data)


def is_execution_trace(data: bytes) -> bool:
    """Whether a file starts like an execution trace."""
    if _text(data)[:1] != b"{":
        return False
    fields = sum(field in data for field in _NODE_FIELDS)
    return bool(_NODES.search(data)) and (fields > 1 or _SCHEMA.search(data) is not None)


def score_execution_trace(head: Head) -> int:
    """By its schema and the fields of its nodes."""
    if head.is_directory or not is_execution_trace(head.data):
        return _NO
    return _CERTAIN if _SCHEMA.search(head.data) else _LIKELY


def score_folder(head: Head) -> int:
    """Whether a file of the folder, or of one right below it, is one of PyTorch's."""
    if not head.is_directory:
        return _NO
    looked = 0
    for name in head.names:
        entry = head.path / name
        try:
            inner = sorted(entry.iterdir())[:4] if entry.is_dir() else [entry]
        except OSError:
            continue
        for path in inner:
            if ".json" not in path.suffixes:
                continue
            looked += 1
            data = first_bytes(path, HEAD_BYTES)
            if is_profile(data) or is_execution_trace(data):
                return _DIRECTORY
            if looked >= _MOST_LOOKED_AT:
                return _NO
    return _NO


# What file names say: the rank, and which of several jobs a file is of.

_WORDED = re.compile(r"(?:rank|worker|gpu|device)[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", re.IGNORECASE)
_NUMBER = re.compile(r"(?:^|[-_.])(\d{1,6})(?=$|[-_.])")
_DOTTED = re.compile(r"\.(\d{1,6})(?=$|\.)")
_KINDS = re.compile(
    r"(?:et[-_]host|execution[-_]trace|kineto|pytorch[-_]et|host[-_]et|(?<![a-z])(?:et|eg)(?![a-z]))",
    re.IGNORECASE,
)


def rank_in_name(name: str, *, alone: bool = False) -> int:
    """The rank a file name states, -1 where none: behind ``rank`` or ``worker``, else its last number. Of a
    file ``alone`` only one between dots counts: ``run_2024`` was recorded in that year, or is a run.
    """
    stem = _SUFFIXES.sub("", name)
    worded = _WORDED.search(stem)
    if worded:
        return int(worded[1])
    numbers = (_DOTTED if alone else _NUMBER).findall(stem)
    return int(numbers[-1]) if numbers else -1


def job_name(name: str) -> str:
    """A name for the job: without rank, suffixes, and the words that tell the two kinds of file apart."""
    stem = _KINDS.sub("", _WORDED.sub("", _SUFFIXES.sub("", name)))
    cleaned = re.sub(r"([-_.])[-_.]+", r"\1", stem).strip("-_. ")
    return cleaned or "trace"
