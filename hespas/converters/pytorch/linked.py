"""One rank's profile joined with its execution trace: what graphs of devices and of hosts are made from."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hespas.converters.common_order import common_order
from hespas.converters.linking import Nesting
from hespas.converters.pytorch.communication import Communication
from hespas.converters.pytorch.events import HostEvents, KinetoTrace
from hespas.converters.pytorch.host_trace import HostTrace
from hespas.converters.pytorch.kernels import (
    KernelTalks,
    Links,
    host_communications,
    kernel_talks,
    thread_key,
)
from hespas.converters.pytorch.profile import profile_of
from hespas.converters.pytorch.recorded_comms import recorded_communication
from hespas.graph import Profile, StringTableBuilder
from hespas.graph.columns import IntArray, at_rows

__all__ = ["HostColumns", "Join", "LinkedTrace", "join"]

# The same operation in two records: the profiler's events of the host, and the execution trace.
#
# By ``Record function id``, where it is told apart and names agree; else by ``External id``, where that
# counts like the trace does; else by order: per thread, the longest common sequence of names.

_GOOD_SHARE = 0.9
"""An id that agrees with fewer names than this is another counter."""


class HostColumns(NamedTuple):
    """Events of the host, operations and named ranges together."""

    name_row: IntArray
    key: IntArray
    start_ns: IntArray
    duration_ns: IntArray
    record_id: IntArray
    external_id: IntArray

    @classmethod
    def of(cls, *parts: HostEvents) -> HostColumns:
        """The columns of several kinds, one behind the other."""
        names = ("start_ns", "duration_ns", "record_id", "external_id")
        return cls(
            np.concatenate([part.name_row for part in parts]).astype(np.int64),
            np.concatenate([thread_key(part) for part in parts]),
            *(np.concatenate([getattr(part, name) for part in parts]) for name in names),
        )


class Join(NamedTuple):
    """``row``: the row of the execution trace per event (-1: none), and how many were found in which way."""

    row: IntArray
    by_record_id: int
    by_external_id: int
    by_order: int
    unmatched: int


def join(events: HostColumns, trace: HostTrace) -> Join:
    """Match events with operations, one to one. O(n log n)."""
    row = np.full(len(events.name_row), -1, np.int64)
    counts = [0, 0]
    for way, (ids, offsets) in enumerate(((events.record_id, (0,)), (events.external_id, (0, 1)))):
        for offset in offsets:
            found = _by_id(events, ids - offset, trace, row)
            counts[way] += int((found >= 0).sum())
            row = np.where(found >= 0, found, row)
    left = int((row >= 0).sum())
    row = _by_order(events, trace, row)
    structural = int(trace.structural.sum())
    matched = int((row >= 0).sum())
    return Join(row, counts[0], counts[1], matched - left, max(len(trace) - structural - matched, 0))


def _by_id(events: HostColumns, ids: IntArray, trace: HostTrace, known: IntArray) -> IntArray:
    """New matches by an id, none where it does not count what the trace counts."""
    nothing = np.full(len(ids), -1, np.int64)
    free = known < 0
    ours, place, times = np.unique(np.where(free, ids, -1), return_index=True, return_counts=True)
    usable = (ours > 0) & (times == 1)
    order = np.argsort(trace.record_id, kind="stable")
    theirs = trace.record_id[order]
    at = np.searchsorted(theirs, ours)
    safe = np.minimum(at, max(len(theirs) - 1, 0))
    if not len(theirs):
        return nothing
    once = np.searchsorted(theirs, ours, side="right") - at == 1
    met = usable & once & (theirs[safe] == ours)
    rows = order[safe[met]]
    taken = np.isin(rows, known[known >= 0])
    same = (trace.name_row[rows] == events.name_row[place[met]]) & ~taken
    if not len(rows) or same.sum() < _GOOD_SHARE * len(rows):
        return nothing
    nothing[place[met][same]] = rows[same]
    return nothing


def _by_order(events: HostColumns, trace: HostTrace, row: IntArray) -> IntArray:
    """Match what is left by the order of names, thread by thread."""
    rest = np.flatnonzero(row < 0)
    taken = np.zeros(len(trace), np.bool_)
    taken[row[row >= 0]] = True
    open_rows = np.flatnonzero(~taken & ~trace.structural)
    if not len(rest) or not len(open_rows):
        return row
    rest = rest[np.lexsort((-events.duration_ns[rest], events.start_ns[rest], events.key[rest]))]
    row = row.copy()
    theirs = {
        key: open_rows[trace.thread[open_rows] == key] for key in np.unique(trace.thread[open_rows]).tolist()
    }
    ours = {key: rest[events.key[rest] == key] for key in np.unique(events.key[rest]).tolist()}
    for thread, key in _threads(trace, theirs, events, ours):
        left, right = ours[key], theirs[thread]
        pairs = common_order(events.name_row[left].tolist(), trace.name_row[right].tolist())
        places = np.array(pairs, np.int64).reshape(-1, 2)
        row[left[places[:, 0]]] = right[places[:, 1]]
    return row


def _threads(
    trace: HostTrace, theirs: dict[int, IntArray], events: HostColumns, ours: dict[int, IntArray]
) -> list[tuple[int, int]]:
    """Which thread of the trace is which of the profiler: those with most names in common first."""
    names = {key: Counter[int](events.name_row[rows].tolist()) for key, rows in ours.items()}
    scored = sorted(
        (
            (sum((Counter[int](trace.name_row[rows].tolist()) & names[key]).values()), -thread, -key)
            for thread, rows in theirs.items()
            for key in ours
        ),
        reverse=True,
    )
    found: dict[int, int] = {}
    for score, thread, key in scored:
        if score and -thread not in found and -key not in found.values():
            found[-thread] = -key
    return list(found.items())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LinkedTrace:
    """``events`` are the operations of the host followed by its named ranges; ``join`` finds their rows in
    ``trace``, which is None where there is a profile only.
    """

    kineto: KinetoTrace
    nesting: Nesting
    links: Links
    events: HostColumns
    trace: HostTrace | None
    join: Join | None
    strings: StringTableBuilder

    @property
    def rows(self) -> IntArray:
        """The row of the execution trace of each event, -1 for none."""
        return self.join.row if self.join else np.full(len(self.events.name_row), -1, np.int64)

    def profile(self, name: str) -> Profile:
        """The profile of the device work. Inputs of operations are those of the execution trace, which spells
        out more, where it has the operation.
        """
        found = profile_of(name, self.kineto, self.nesting, self.links, self.kernel_talks())
        if self.trace is None:
            return found
        trace, host = self.trace, found.host
        rows = self.rows[: len(host)]
        rows = np.where(at_rows(trace.shapes_row, rows, 0) > 0, rows, -1)
        if not (rows >= 0).any():
            return found
        strides = at_rows(trace.strides_row, rows, 0)
        host = replace(
            host,
            shapes_row=np.where(rows >= 0, at_rows(trace.shapes_row, rows, 0), host.shapes_row),
            dtype_row=np.where(rows >= 0, at_rows(trace.types_row, rows, 0), host.dtype_row),
            values_row=np.where(rows >= 0, at_rows(trace.values_row, rows, 0), host.values_row),
            strides_row=np.where(strides > 0, strides, host.strides_row),
        )
        return replace(found, strings=self.strings.build(), host=host)

    def kernel_talks(self) -> KernelTalks:
        """Return the communication of each kernel."""
        return kernel_talks(self.kineto, self.nesting, self.links, self.communications())

    def communications(self) -> dict[int, Communication]:
        """By operation of the host: what starts a communication."""
        return host_communications(self.kineto, self.nesting, self._stated)

    def _stated(self, event: int) -> Communication | None:
        """What the execution trace says of a communication, else what the profile does."""
        row = int(self.rows[event])
        if self.trace is not None and row in self.trace.communications:
            return self.trace.communications[row]
        return recorded_communication(self.kineto, event)
