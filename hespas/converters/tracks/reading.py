"""Names of tracks as readers of timelines interpret them, and slices that count more than once.

Names that Hespas writes (``rank 3: H100``, ``stream 7``) and names of other tools are interpreted in the same
way.
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
"""Operation class by its name in an argument."""

_RANK = re.compile(r"(?:\A|\s)(?:rank (\d{1,9})|unknown rank)(?:: (.*))?\Z", re.DOTALL)
_STREAM = re.compile(r"(?i:\bstream) #?(\d{1,18})(?!\w)")
_NO_STREAM = "no stream"
_LEAST_SHOWN_NS = 2.0


def rank_and_device(process: str) -> tuple[int, str] | None:
    """Return rank (-1: unknown) and device in the name of a process, None if it names no rank."""
    match = _RANK.search(process)
    return (int(match[1] or -1), match[2] or "") if match else None


def stream_in_name(track: str) -> int | None:
    """Return the number of the stream in the name of a track, -1 for no stream, None for other names."""
    if track == _NO_STREAM:
        return -1
    match = _STREAM.search(track)
    return int(match[1]) if match else None


def ops_and_kernels(
    name: SmallIntArray | IntArray, op: SmallIntArray, kernel: SmallIntArray, *, ours: bool
) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Return the operation and the kernel of each slice.

    A slice that Hespas wrote (``ours``) is named after its kernel, or after its operation if it has no
    kernel. The name of another tool's slice may be either, so it is used as both.
    """
    if not ours:
        return np.where(op > 0, op, name), np.where(kernel > 0, kernel, name)
    return op, np.where(kernel > 0, kernel, np.where(op == name, 0, name))


def agreeing(stated_ns: FloatArray, shown_ns: FloatArray | IntArray) -> BoolArray:
    """Return a mask of the exact times (in the arguments of slices) that equal the shown times of the slices
    to the ns. They differ if the trace was edited.
    """
    agrees: BoolArray = np.abs(stated_ns - shown_ns) < _LEAST_SHOWN_NS
    return agrees


def report_halves(findings: Findings, what: str, unfinished: int, orphans: int) -> None:
    """Report slices without an end or without a begin; ``what`` is the format's name for them."""
    findings.warning("unfinished", f"{what} without an end are counted to the end of the trace", unfinished)
    findings.warning("end-without-begin", f"{what} without a begin are dropped", orphans)


def report_nested(findings: Findings, track: IntArray, start_ns: IntArray, duration_ns: IntArray) -> None:
    """Report the time that is counted more than once because slices of a track are nested."""
    inside = overlapping(track, start_ns, duration_ns)
    twice_ns = int(np.maximum(duration_ns[inside], 0).sum())
    message = f"slices nest in or overlap others of their track: {twice_ns:,} ns are counted more than once"
    findings.warning("nested", message, int(inside.sum()))
