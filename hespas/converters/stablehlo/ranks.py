"""Lists of ranks as text: ``0-3,8-14/2`` is 0, 1, 2, 3, 8, 10, 12, 14."""

from __future__ import annotations

import re

import numpy as np

from hespas.converters.format import WriteOptions
from hespas.converters.replica_groups import MAX_DEVICES
from hespas.graph import Workload
from hespas.graph.columns import IntArray

__all__ = ["chosen_classes", "parsed_ranks", "ranks_text"]

_RUN = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?:/(\d{1,9}))?)?")
_SHORTEST = 3
"""Of ranks that are written as a run with a step."""


def ranks_text(ranks: IntArray) -> str:
    """Ascending ranks as runs of equal steps. O(ranks)."""
    runs: list[str] = []
    listed: list[int] = ranks.tolist()
    place = 0
    while place < len(listed):
        end = _end_of_run(listed, place)
        first, last = listed[place], listed[end - 1]
        step = listed[place + 1] - first if end - place > 1 else 1
        if end - place < _SHORTEST and step > 1:
            end, last = place + 1, first
        runs.append(f"{first}" if last == first else f"{first}-{last}" + (f"/{step}" if step > 1 else ""))
        place = end
    return ",".join(runs)


def _end_of_run(listed: list[int], place: int) -> int:
    """One past the last rank that continues the step between the first two."""
    end = min(place + 2, len(listed))
    while end < len(listed) and listed[end] - listed[end - 1] == listed[place + 1] - listed[place]:
        end += 1
    return end


def parsed_ranks(text: str) -> IntArray:
    """The ranks of a text. Raises ``ValueError`` for one that is no such list or names more than 2**24."""
    parts: list[IntArray] = []
    left = MAX_DEVICES
    for run in text.split(","):
        found = _RUN.fullmatch(run)
        if found is None:
            raise ValueError(f"{run[:40]!r} is no run of ranks")
        first = int(found[1])
        last, step = int(found[2] or first), int(found[3] or 1)
        count = (last - first) // step + 1 if step and last >= first else 0
        if not 0 < count <= left or last >= MAX_DEVICES:
            raise ValueError(f"{run!r} is no run of ranks below {MAX_DEVICES:,}")
        left -= count
        parts.append(np.arange(first, last + 1, step, dtype=np.int64))
    return np.concatenate(parts)


# Which rank classes are written: known before jaxlib is loaded, since the destination depends on it.


def chosen_classes(workload: Workload, options: WriteOptions) -> list[int]:
    """The classes of the chosen ranks, ascending."""
    ranks = options.ranks if options.ranks is not None else range(workload.num_ranks)
    return [row for row, size in enumerate(workload.sizes_within(ranks)) if size]
