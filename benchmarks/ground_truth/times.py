"""Device times per execution of a trace, and removal of host names from a trace."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hespas.graph import Profile
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError

__all__ = ["busy_ns", "without_host_names"]

_HOST_NAMES = 4
"""Number of the field ``hostnames`` of XSpace (xplane.proto of https://github.com/openxla/xla)."""
_LENGTH_DELIMITED = 2


def busy_ns(profile: Profile) -> list[float]:
    """Return the busy time of the first device in each execution of the program [ns], in order. Overlapping
    kernels count once. The program is the module with the most device time. Empty without executions.
    """
    own = (profile.rank == profile.rank.min(initial=0)) & (profile.run >= 0)
    rows = np.flatnonzero(own)
    if not len(rows):
        return []
    time = np.bincount(profile.module_id[rows], np.nan_to_num(profile.duration_ns[rows]))
    rows = rows[profile.module_id[rows] == int(time.argmax())]
    runs: list[int] = np.unique(profile.run[rows]).tolist()
    return [_covered_ns(profile, rows[profile.run[rows] == run]) for run in runs]


def _covered_ns(profile: Profile, rows: IntArray) -> float:
    """Return the length of the union of the events' intervals [ns]."""
    start: FloatArray = profile.start_ns[rows]
    end: FloatArray = start + np.maximum(np.nan_to_num(profile.duration_ns[rows]), 0.0)
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    before = np.concatenate((start[:1], end[:-1]))
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())


def without_host_names(space: bytes) -> bytes:
    """Return a serialised XSpace without the names of hosts. Raises ``FormatError`` for other bytes."""
    return b"".join(part for number, part in _fields(space) if number != _HOST_NAMES)


def _fields(space: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes (with the key) of each field. XSpace has only length-delimited fields."""
    at = 0
    while at < len(space):
        key, after = _varint(space, at)
        size, body = _varint(space, after)
        if key & 7 != _LENGTH_DELIMITED or body + size > len(space):
            raise FormatError("not an XSpace", position=f"byte {at}")
        yield key >> 3, space[at : body + size]
        at = body + size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise FormatError("not an XSpace", position=f"byte {at}")
