"""Memory in use over time, where the profiler recorded it (``profile_memory`` of PyTorch's)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.analysis.table import Row, Table, joined_tables, table_of
from hespas.files.documents import Count, Figure
from hespas.graph import Profile
from hespas.graph.columns import IntArray

__all__ = ["MemoryPointRow", "MemoryRow", "memory", "memory_points"]

_POINTS = 500


class MemoryRow(Row, frozen=True, kw_only=True):
    """What the allocator of a device gave out and held at most (``device`` -1: the host), when that was, and
    what was in use at the end. ``taken_bytes`` is the sum of all that was taken.
    """

    rank: int
    device: int
    changes: Count
    peak_allocated_bytes: Figure
    peak_time_ns: Figure
    peak_reserved_bytes: Figure
    last_allocated_bytes: Figure
    taken_bytes: Figure


class MemoryPointRow(Row, frozen=True, kw_only=True):
    """Memory in use at a moment: the largest until the next one."""

    rank: int
    device: int
    time_ns: Figure
    allocated_bytes: Figure
    reserved_bytes: Figure


def _allocators(profile: Profile) -> list[tuple[int, IntArray]]:
    """Each device with the rows of its changes in order of time."""
    found = profile.memory
    order = np.argsort(found.time_ns, kind="stable")
    numbers: list[int] = np.unique(found.device).tolist()
    return [(number, order[found.device[order] == number]) for number in numbers]


def _rank(profile: Profile) -> int:
    return int(profile.rank[0]) if len(profile) else 0


def memory(profiles: Sequence[Profile]) -> Table[MemoryRow]:
    """The most of each allocator."""
    parts: list[Table[MemoryRow]] = []
    for profile in profiles:
        for device, rows in _allocators(profile):
            found = profile.memory.take(rows)
            used = np.nan_to_num(found.allocated_bytes, nan=-1.0)
            peak = int(used.argmax())
            parts.append(
                table_of(
                    MemoryRow,
                    rank=[_rank(profile)],
                    device=[device],
                    changes=[len(rows)],
                    peak_allocated_bytes=found.allocated_bytes[[peak]],
                    peak_time_ns=found.time_ns[[peak]],
                    peak_reserved_bytes=[np.fmax.reduce(found.reserved_bytes)],
                    last_allocated_bytes=found.allocated_bytes[-1:],
                    taken_bytes=[np.maximum(found.change_bytes, 0.0).sum()],
                )
            )
    return joined_tables(MemoryRow, parts)


def memory_points(profiles: Sequence[Profile]) -> Table[MemoryPointRow]:
    """Memory over time, at no more than five hundred moments for each allocator."""
    parts: list[Table[MemoryPointRow]] = []
    for profile in profiles:
        for device, rows in _allocators(profile):
            firsts = np.linspace(0, len(rows), min(_POINTS, len(rows)), endpoint=False).astype(np.int64)
            found = profile.memory.take(rows)
            parts.append(
                table_of(
                    MemoryPointRow,
                    rank=np.full(len(firsts), _rank(profile)),
                    device=np.full(len(firsts), device),
                    time_ns=found.time_ns[firsts],
                    allocated_bytes=np.fmax.reduceat(found.allocated_bytes, firsts),
                    reserved_bytes=np.fmax.reduceat(found.reserved_bytes, firsts),
                )
            )
    return joined_tables(MemoryPointRow, parts)
