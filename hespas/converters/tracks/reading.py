"""What readers of timelines share: what names of tracks tell, and which slices count twice.

Names are those that our writers give (``rank 3: H100``, ``stream 7``); others' are taken the same way.
"""

from __future__ import annotations

import re
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import overlapping
from hespas.graph import Findings, OpClass
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = [
    "OP_CLASSES",
    "agreeing",
    "ops_and_kernels",
    "rank_and_device",
    "report_halves",
    "report_nested",
    "stream_in_name",
]

OP_CLASSES = MappingProxyType({member.name.lower(): int(member) for member in OpClass})
"""The class of an operation by its name in an argument."""

_RANK = re.compile(r"(?:\A|\s)(?:rank (\d{1,9})|unknown rank)(?:: (.*))?\Z", re.DOTALL)
_STREAM = re.compile(r"(?i:\bstream) #?(\d{1,18})(?!\w)")
_NO_STREAM = "no stream"
_LEAST_SHOWN_NS = 2.0


def rank_and_device(process: str) -> tuple[int, str] | None:
    """The rank (-1: unknown) and the device that a process is named after; None where it names no rank."""
    found = _RANK.search(process)
    return (int(found[1] or -1), found[2] or "") if found else None


def stream_in_name(track: str) -> int | None:
    """The number of the stream that a track is named after, -1 for none; None for other names."""
    if track == _NO_STREAM:
        return -1
    found = _STREAM.search(track)
    return int(found[1]) if found else None


def ops_and_kernels(
    name: SmallIntArray | IntArray, op: SmallIntArray, kernel: SmallIntArray, *, ours: bool
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Operations and kernels. A slice of ours is named by its kernel, else by its operation; of a slice of
    others nothing tells whether its name is the one or the other, so it is both.
    """
    if not ours:
        return np.where(op > 0, op, name), np.where(kernel > 0, kernel, name)
    return op, np.where(kernel > 0, kernel, np.where(op == name, 0, name))


def agreeing(stated_ns: FloatArray, shown_ns: FloatArray | IntArray) -> BoolArray:
    """Which times an argument states as the slice shows them, in whole ns: not where it was edited."""
    agrees: BoolArray = np.abs(stated_ns - shown_ns) < _LEAST_SHOWN_NS
    return agrees


def report_halves(findings: Findings, what: str, unfinished: int, orphans: int) -> None:
    """Say which slices (``what``: how the format calls them) lack their end or their begin."""
    findings.warning("unfinished", f"{what} that do not end are counted to the end of the trace", unfinished)
    findings.warning("end-without-begin", f"{what} end that did not begin, and are left out", orphans)


def report_nested(findings: Findings, track: IntArray, start_ns: IntArray, duration_ns: IntArray) -> None:
    """Say how much time counts more than once."""
    inside = overlapping(track, start_ns, duration_ns)
    twice_ns = int(np.maximum(duration_ns[inside], 0).sum())
    message = f"slices run inside or over others of their track: {twice_ns:,} ns are counted more than once"
    findings.warning("nested", message, int(inside.sum()))
