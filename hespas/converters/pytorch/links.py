"""Links from device events to the host: the launch call, the operation and the training step of each event.

The rules apply in order. The correlation id identifies the launch call in the same trace. The innermost
operation around the launch on the same thread is the cause. Without a launch record, the ``External id``
identifies the operation. Events to which no rule applies stay unlinked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.converters.linking import EventNesting, around_launch, match_rows, nearest
from hespas.converters.pytorch.events import Events, HostEvents, KinetoTrace
from hespas.graph import StepRanges
from hespas.graph.columns import IntArray, SmallIntArray, at_rows, mapped

__all__ = [
    "DeviceLinks",
    "LinkedBy",
    "batches_of",
    "host_steps_of",
    "link_device_events",
    "nesting_of",
    "owner_with_shapes",
    "step_ranges",
    "steps_of",
    "thread_key",
]

_STEP = re.compile(r"ProfilerStep#(\d{1,9})")
_BATCH = "execute_"
_NEVER = np.iinfo(np.int64).min


class LinkedBy(IntEnum):
    """Rule by which a device event was linked to its operation."""

    NOTHING = 0
    CORRELATION = 1
    EXTERNAL_ID = 2
    CAPTURE = 3


@dataclass(frozen=True, slots=True, eq=False)
class DeviceLinks:
    """Links of each device event to the host: its launch, its innermost host operation (-1: none), and the
    rule that found the operation.
    """

    launch: IntArray
    host: IntArray
    linked_by: NDArray[np.uint8]


def thread_key(events: Events) -> IntArray:
    """Return one number for each pair of process and thread, the same for all events of the pair."""
    return (events.process.astype(np.int64) << 32) | events.thread


def nesting_of(events: Events) -> EventNesting:
    """Return the nesting of the host events of each thread."""
    return EventNesting.of(thread_key(events), events.start_ns, events.end_ns)


def link_device_events(trace: KinetoTrace, nesting: EventNesting) -> DeviceLinks:
    """Find the launch and the host operation of every device event. ``nesting`` is the nesting of the host
    events.
    """
    device, calls = trace.device, trace.launch
    launch = match_rows((calls.correlation,), (device.correlation,))
    host = around_launch(nesting, launch, thread_key(calls), calls.start_ns)
    by_id = match_rows((trace.host.external_id,), (device.external_id,))
    fallback = (host < 0) & (by_id >= 0)
    linked_by = np.where(host >= 0, LinkedBy.CORRELATION, LinkedBy.NOTHING).astype(np.uint8)
    linked_by[fallback] = LinkedBy.EXTERNAL_ID
    return DeviceLinks(launch, np.where(fallback, by_id, host), linked_by)


def owner_with_shapes(host: HostEvents, nesting: EventNesting, of: IntArray) -> IntArray:
    """Return, for each operation in ``of``, the innermost operation with recorded input shapes among the
    operation itself and the operations around it; -1 if none has recorded shapes.
    """
    return nearest(host.dims_id > 0, nesting.parent, of)


def steps_of(trace: KinetoTrace, links: DeviceLinks) -> SmallIntArray:
    """Return the number of the step that launched each device event, -1 if unknown."""
    return host_steps_of(trace, at_rows(trace.launch.start_ns, links.launch, _NEVER))


def step_ranges(trace: KinetoTrace, base_ns: int) -> StepRanges:
    """Return the ranges of recorded steps, with times relative to ``base_ns``."""
    note, numbers = trace.annotation, _step_numbers(trace)
    rows = np.flatnonzero(numbers >= 0)
    return StepRanges.of(
        number=numbers[rows], start_ns=note.start_ns[rows] - base_ns, duration_ns=note.duration_ns[rows]
    )


def host_steps_of(trace: KinetoTrace, start_ns: IntArray) -> SmallIntArray:
    """Return the number of the step that runs at each start on the host, -1 for none."""
    numbers = _step_numbers(trace)
    return at_rows(numbers, _running_range(trace, numbers, start_ns), -1)


def _step_numbers(trace: KinetoTrace) -> SmallIntArray:
    """Return the step number of each named range (``ProfilerStep#N``), -1 for other ranges."""

    def number(row: int) -> int:
        match = _STEP.fullmatch(trace.strings[row])
        return int(match[1]) if match else -1

    return mapped(trace.annotation.name_id, number, np.int32)


def batches_of(trace: KinetoTrace, links: DeviceLinks) -> SmallIntArray:
    """Return, for each device event, the name of the range that states the batch of its step, as a row of the
    string table (0: none).

    Serving engines name such a range ``execute_32_context_0(...)``. It is the range that runs when the event
    is launched.
    """
    names = trace.annotation.name_id
    states_batch = mapped(names, lambda row: trace.strings[row].startswith(_BATCH), np.bool_)
    numbers = np.where(states_batch, names, -1).astype(np.int32)
    start_ns = at_rows(trace.launch.start_ns, links.launch, _NEVER)
    return at_rows(numbers, _running_range(trace, numbers, start_ns), 0)


def _running_range(trace: KinetoTrace, numbers: SmallIntArray, start_ns: IntArray) -> IntArray:
    """Return for each time the named range that runs then and has a number of 0 or more in ``numbers``; -1
    for none.
    """
    note = trace.annotation
    rows = np.flatnonzero(numbers >= 0)
    rows = rows[np.lexsort((numbers[rows], note.end_ns[rows], note.start_ns[rows]))]
    last = np.searchsorted(note.start_ns[rows], start_ns, side="right") - 1
    inside = start_ns <= at_rows(note.end_ns[rows], last, _NEVER)
    return at_rows(rows, np.where(inside, last, -1), -1)
