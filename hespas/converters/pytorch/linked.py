"""One rank's profile joined with its execution trace: the input of device graphs and host graphs.

An operation appears in both records. Operations are matched by ``Record function id`` if ids are unique and
most names agree, then by ``External id`` (or that number minus 1) in the same way. The rest is matched by
order: per thread, the longest common sequence of names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hespas.converters.linking import EventNesting, common_order
from hespas.converters.pytorch.communication import TraceCommunication, recorded_communication
from hespas.converters.pytorch.events import HostEvents, KinetoTrace
from hespas.converters.pytorch.host_trace import HostTrace
from hespas.converters.pytorch.kernel_communications import (
    KernelCommunications,
    host_communications,
    kernel_communications,
)
from hespas.converters.pytorch.links import DeviceLinks, thread_key
from hespas.converters.pytorch.profile import profile_of
from hespas.graph import Profile, StringTableBuilder
from hespas.graph.columns import IntArray, at_rows

__all__ = ["HostColumns", "LinkedTrace", "TraceJoin", "match_operations"]

_MIN_AGREEMENT = 0.9
"""Minimum share of names that agree; an id below it counts something else."""


class HostColumns(NamedTuple):
    """Columns of host events: first all operations, then all named ranges. ``key`` numbers the thread."""

    name_id: IntArray
    key: IntArray
    start_ns: IntArray
    duration_ns: IntArray
    record_id: IntArray
    external_id: IntArray

    @classmethod
    def of(cls, *parts: HostEvents) -> HostColumns:
        """Concatenate the columns of several kinds of events."""
        names = ("start_ns", "duration_ns", "record_id", "external_id")
        return cls(
            np.concatenate([part.name_id for part in parts]).astype(np.int64),
            np.concatenate([thread_key(part) for part in parts]),
            *(np.concatenate([getattr(part, name) for part in parts]) for name in names),
        )


class TraceJoin(NamedTuple):
    """Result of matching the host events of a profile with an execution trace. ``row`` is the row of the
    execution trace for each host event (-1: none). The other fields count the matches by rule, and the events
    without a match.
    """

    row: IntArray
    by_record_id: int
    by_external_id: int
    by_order: int
    unmatched: int


def match_operations(events: HostColumns, trace: HostTrace) -> TraceJoin:
    """Match events with operations of the execution trace, one to one. O(n log n)."""
    row = np.full(len(events.name_id), -1, np.int64)
    counts = [0, 0]
    for rule, (ids, offsets) in enumerate(((events.record_id, (0,)), (events.external_id, (0, 1)))):
        for offset in offsets:
            new_rows = _by_id(events, ids - offset, trace, row)
            counts[rule] += int((new_rows >= 0).sum())
            row = np.where(new_rows >= 0, new_rows, row)
    by_id = int((row >= 0).sum())
    # The rest is matched by the order of names, thread by thread. Threads are paired by the number of names
    # in common, most first.
    rest = np.flatnonzero(row < 0)
    matched = np.zeros(len(trace), np.bool_)
    matched[row[row >= 0]] = True
    open_rows = np.flatnonzero(~matched & ~trace.structural)
    if len(rest) and len(open_rows):
        rest = rest[np.lexsort((-events.duration_ns[rest], events.start_ns[rest], events.key[rest]))]
        row = row.copy()
        rows_of = {
            key: open_rows[trace.thread[open_rows] == key]
            for key in np.unique(trace.thread[open_rows]).tolist()
        }
        events_of = {key: rest[events.key[rest] == key] for key in np.unique(events.key[rest]).tolist()}
        names = {key: Counter[int](events.name_id[part].tolist()) for key, part in events_of.items()}
        scored = sorted(
            (
                (sum((Counter[int](trace.name_id[rows].tolist()) & names[key]).values()), -thread, -key)
                for thread, rows in rows_of.items()
                for key in events_of
            ),
            reverse=True,
        )
        paired: dict[int, int] = {}
        for score, thread, key in scored:
            if score and -thread not in paired and -key not in paired.values():
                paired[-thread] = -key
        for thread, key in paired.items():
            left, right = events_of[key], rows_of[thread]
            pairs = common_order(events.name_id[left].tolist(), trace.name_id[right].tolist())
            places = np.array(pairs, np.int64).reshape(-1, 2)
            row[left[places[:, 0]]] = right[places[:, 1]]
    structural = int(trace.structural.sum())
    num_matched = int((row >= 0).sum())
    num_left = max(len(trace) - structural - num_matched, 0)
    return TraceJoin(row, counts[0], counts[1], num_matched - by_id, num_left)


def _by_id(events: HostColumns, ids: IntArray, trace: HostTrace, matched: IntArray) -> IntArray:
    """Match events with the execution trace by ``ids``. Return the row of the trace for each newly matched
    event, -1 for all others.

    ``matched`` are the matches so far. If most events with equal ids differ in name, nothing is matched,
    because ``ids`` then number something else than the record ids of the trace.
    """
    row = np.full(len(ids), -1, np.int64)
    order = np.argsort(trace.record_id, kind="stable")
    trace_ids = trace.record_id[order]
    if not len(trace_ids):
        return row
    unmatched_ids = np.where(matched < 0, ids, -1)
    event_ids, event, count = np.unique(unmatched_ids, return_index=True, return_counts=True)
    first = np.searchsorted(trace_ids, event_ids)
    is_unique = np.searchsorted(trace_ids, event_ids, side="right") - first == 1
    first = np.minimum(first, len(trace_ids) - 1)
    both = (event_ids > 0) & (count == 1) & is_unique & (trace_ids[first] == event_ids)
    event, rows = event[both], order[first[both]]
    is_new = ~np.isin(rows, matched[matched >= 0])
    agrees = (trace.name_id[rows] == events.name_id[event]) & is_new
    if len(rows) and agrees.sum() >= _MIN_AGREEMENT * len(rows):
        row[event[agrees]] = rows[agrees]
    return row


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinkedTrace:
    """A Kineto trace with its links and, if there is one, its execution trace.

    ``events`` are the host operations followed by the named ranges. ``join`` maps them to rows of the
    execution trace ``trace``.
    """

    kineto: KinetoTrace
    nesting: EventNesting
    links: DeviceLinks
    events: HostColumns
    trace: HostTrace | None
    join: TraceJoin | None
    strings: StringTableBuilder

    @property
    def rows(self) -> IntArray:
        """Row of the execution trace of each event, -1 for none."""
        return self.join.row if self.join else np.full(len(self.events.name_id), -1, np.int64)

    def profile(self, name: str) -> Profile:
        """Return the profile of the device work.

        Inputs of operations come from the execution trace if it has the operation, because it records more
        inputs.
        """
        profile = profile_of(name, self.kineto, self.nesting, self.links, self.kernel_communications())
        if self.trace is None:
            return profile
        trace, host = self.trace, profile.host
        rows = self.rows[: len(host)]
        rows = np.where(at_rows(trace.shapes_id, rows, 0) > 0, rows, -1)
        if not (rows >= 0).any():
            return profile
        strides = at_rows(trace.strides_id, rows, 0)
        host = replace(
            host,
            shapes_id=np.where(rows >= 0, at_rows(trace.shapes_id, rows, 0), host.shapes_id),
            dtype_id=np.where(rows >= 0, at_rows(trace.types_id, rows, 0), host.dtype_id),
            values_id=np.where(rows >= 0, at_rows(trace.values_id, rows, 0), host.values_id),
            strides_id=np.where(strides > 0, strides, host.strides_id),
        )
        return replace(profile, strings=self.strings.build(), host=host)

    def kernel_communications(self) -> KernelCommunications:
        """Return the communication of each kernel."""
        return kernel_communications(self.kineto, self.nesting, self.links, self.host_communications())

    def host_communications(self) -> dict[int, TraceCommunication]:
        """Return the communications that host operations start, by operation.

        A communication is read from the execution trace if that has the operation, else from the profile.
        """

        def find(event: int) -> TraceCommunication | None:
            row = int(self.rows[event])
            if self.trace is not None and row in self.trace.communications:
                return self.trace.communications[row]
            return recorded_communication(self.kineto, event)

        return host_communications(self.kineto, self.nesting, find)
