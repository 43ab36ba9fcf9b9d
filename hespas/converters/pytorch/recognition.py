"""Return the start of the first event, which is time 0 of the profile."""

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
_PROFILE_FIELDS = (
    b'"schemaVersion"',
    b'"deviceProperties"',
    b'"cat": "cpu_op"',
    b'"trace_id"',
    b'"distributedInfo"',
)
_SCHEMA = re.compile(rb'"schema"\s*:\s*"1\.\d{1,2}\.\d{1,2}[^"]{0,40}"')
_NODES = re.compile(rb'"nodes"\s*:\s*\[')
_NODE_FIELDS = (b'"rf_id"', b'"ctrl_deps"', b'"op_schema"', b'"fw_parent"')
_CERTAIN, _DIRECTORY, _LIKELY, _NO = 95, 92, 60, 0
_MAX_INSPECTED = 64

_RANK_WORD = re.compile(r"(?:rank|worker|gpu|device)[-_.]?(\d{1,9})(?!\d)", re.IGNORECASE)
_SUFFIXES = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", re.IGNORECASE)
_NUMBER = re.compile(r"(?:^|[-_.])(\d{1,6})(?=$|[-_.])")
_DOTTED_NUMBER = re.compile(r"\.(\d{1,6})(?=$|\.)")
_FILE_KINDS = re.compile(
    r"(?:et[-_]host|execution[-_]trace|kineto|pytorch[-_]et|host[-_]et|(?<![a-z])(?:et|eg)(?![a-z]))",
    re.IGNORECASE,
)


def _text(data: bytes) -> bytes:
    return data.removeprefix(b"\xef\xbb\xbf").lstrip()


def score_profile(head: Head) -> int:
    """Return the confidence, from 0 to 100, that a file is a profile of PyTorch, from the fields that only
    its profiler writes.
    """
    if head.is_directory or _text(head.data)[:1] not in (b"{", b"["):
        return _NO
    num_fields = sum(name in head.data for name in _PROFILE_FIELDS)
    if _EVENTS.search(head.data):
        return _CERTAIN if num_fields else _LIKELY
    return _LIKELY if num_fields > 1 else _NO


def is_profile(data: bytes) -> bool:
    """Return True if a file with these first bytes is a profile of PyTorch."""
    has_field = any(name in data for name in _PROFILE_FIELDS)
    return _text(data)[:1] == b"{" and has_field and not is_execution_trace(data)


def is_execution_trace(data: bytes) -> bool:
    """Return True if a file with these first bytes is an execution trace of PyTorch."""
    if _text(data)[:1] != b"{":
        return False
    num_fields = sum(name in data for name in _NODE_FIELDS)
    return bool(_NODES.search(data)) and (num_fields > 1 or _SCHEMA.search(data) is not None)


def score_execution_trace(head: Head) -> int:
    """Return the confidence, from 0 to 100, that an input is an execution trace of PyTorch, from its schema
    and its nodes.
    """
    if head.is_directory or not is_execution_trace(head.data):
        return _NO
    return _CERTAIN if _SCHEMA.search(head.data) else _LIKELY


def score_folder(head: Head) -> int:
    """Return the confidence, from 0 to 100, that a folder contains PyTorch traces of one job.

    The folder contains a PyTorch trace, or each of its sub-folders with JSON files contains one (one
    sub-folder per rank or run). A folder that mixes PyTorch traces with other JSON files scores 0.
    """
    if not head.is_directory:
        return _NO
    folders: list[bool] = []
    for name in head.names[:_MAX_INSPECTED]:
        entry = head.path / name
        try:
            files = sorted(entry.iterdir())[:4] if entry.is_dir() else [entry]
        except OSError:
            continue
        json_files = [path for path in files if ".json" in path.suffixes]
        heads = [first_bytes(path, HEAD_BYTES) for path in json_files]
        has_trace = any(is_profile(data) or is_execution_trace(data) for data in heads)
        if files == [entry]:
            if has_trace:
                return _DIRECTORY
        elif json_files:
            folders.append(has_trace)
    return _DIRECTORY if folders and all(folders) else _NO


def rank_in_name(name: str, *, alone: bool = False) -> int:
    """Return the rank in a file name, -1 without a rank.

    The rank is the number after ``rank`` or ``worker``, else the last number of the name. If the file is the
    only one (``alone``), only a number between dots counts, because the number in ``run_2024`` may be a year
    or a run.
    """
    stem = _SUFFIXES.sub("", name)
    rank_word = _RANK_WORD.search(stem)
    if rank_word:
        return int(rank_word[1])
    numbers = (_DOTTED_NUMBER if alone else _NUMBER).findall(stem)
    return int(numbers[-1]) if numbers else -1


def job_name(name: str) -> str:
    """Return a name for the job: the file name without rank, suffixes and the kind of trace."""
    stem = _FILE_KINDS.sub("", _RANK_WORD.sub("", _SUFFIXES.sub("", name)))
    cleaned = re.sub(r"([-_.])[-_.]+", r"\1", stem).strip("-_. ")
    return cleaned or "trace"
