"""Which step of the training loop an event is part of: ranges that the profiler names ``ProfilerStep#N``."""

from __future__ import annotations

import re

import numpy as np

from hespas.converters.pytorch.events import KinetoTrace
from hespas.converters.pytorch.linking import Links
from hespas.graph.columns import IntArray, SmallIntArray

__all__ = ["host_steps_of", "steps_of"]

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")


def steps_of(trace: KinetoTrace, links: Links) -> SmallIntArray:
    """The number of the step that launched each device event; -1 where none did, or nobody knows."""
    return _during(trace, _when(trace, links))


def host_steps_of(trace: KinetoTrace, start_ns: IntArray) -> SmallIntArray:
    """The number of the step that runs when something of the host starts; -1 for none."""
    return _during(trace, start_ns)


def _during(trace: KinetoTrace, at_ns: IntArray) -> SmallIntArray:
    """The number of the step that runs at each moment, -1 for none."""
    ranges: list[tuple[int, int, int]] = []
    note = trace.annotation
    numbers = {row: _STEP.fullmatch(trace.strings[row]) for row in np.unique(note.name_row).tolist()}
    rows = np.flatnonzero(np.isin(note.name_row, [row for row, found in numbers.items() if found]))
    for row in rows.tolist():
        found = numbers[int(note.name_row[row])]
        if found:
            ranges.append((int(note.start_ns[row]), int(note.end_ns[row]), int(found[1])))
    if not ranges or not len(at_ns):
        return np.full(len(at_ns), -1, np.int32)
    ranges.sort()
    starts = np.array([start for start, _, _ in ranges], np.int64)
    place = np.searchsorted(starts, at_ns, side="right") - 1
    safe = np.maximum(place, 0)
    inside = (place >= 0) & (at_ns <= np.array([end for _, end, _ in ranges], np.int64)[safe])
    return np.where(inside, np.array([number for _, _, number in ranges])[safe], -1).astype(np.int32)


def _when(trace: KinetoTrace, links: Links) -> IntArray:
    """When each event was launched; before everything where no launch is recorded."""
    never = np.full(len(links.launch), np.iinfo(np.int64).min, np.int64)
    if not len(trace.launch):
        return never
    return np.where(links.launch >= 0, trace.launch.start_ns[np.maximum(links.launch, 0)], never)
