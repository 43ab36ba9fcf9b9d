"""Which operation on the host caused a piece of device work: by correlation, then by time on the thread.

The rules, in order: the correlation id names the launching call of the same trace; the launch stands inside
operations of its own thread, of which the innermost is the cause; where there is no launch record, the
``External id`` names the operation. Work without any of these stays, unlinked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import Nesting, around_launch, match_rows, nearest
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.graph.columns import IntArray, SmallIntArray

__all__ = [
    "LinkedBy",
    "Links",
    "host_steps_of",
    "link",
    "nesting_of",
    "owner_with_shapes",
    "steps_of",
    "thread_key",
]


class LinkedBy(IntEnum):
    """How a piece of device work found its operation."""

    NOTHING = 0
    CORRELATION = 1
    EXTERNAL_ID = 2


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Per device event: its launch and its innermost host operation (-1: none), and how that was found."""

    launch: IntArray
    host: IntArray
    linked_by: NDArray[np.uint8]


def thread_key(events: Events) -> IntArray:
    """One number per (process, thread)."""
    return (events.process.astype(np.int64) << 32) | events.thread


def nesting_of(events: Events) -> Nesting:
    """The events of each thread as a forest."""
    return Nesting.of(thread_key(events), events.start_ns, events.end_ns)


def link(trace: KinetoTrace, nesting: Nesting) -> Links:
    """Find the launch and the operation of every device event; ``nesting`` is that of the host's."""
    device, calls = trace.device, trace.launch
    launch = match_rows((calls.correlation,), (device.correlation,))
    host = around_launch(nesting, launch, thread_key(calls), calls.start_ns)
    by_id = match_rows((trace.host.external_id,), (device.external_id,))
    fallback = (host < 0) & (by_id >= 0)
    linked_by = np.where(host >= 0, LinkedBy.CORRELATION, LinkedBy.NOTHING).astype(np.uint8)
    linked_by[fallback] = LinkedBy.EXTERNAL_ID
    return Links(launch, np.where(fallback, by_id, host), linked_by)


def owner_with_shapes(host: HostEvents, nesting: Nesting, of: IntArray) -> IntArray:
    """From each operation (-1: none) outwards to the first whose input shapes are recorded, -1 for none."""
    return nearest(host.dims_row > 0, nesting.parent, of)


# Which step of the training loop an event is part of: ranges that the profiler names ``ProfilerStep#N``.

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
