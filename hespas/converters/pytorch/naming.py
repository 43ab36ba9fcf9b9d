"""What file names say: the rank, and which of several jobs a file is of."""

from __future__ import annotations

import re

__all__ = ["job_name", "rank_in_name"]

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
