"""Critical path of a measured step, walked backwards from its last device event.

An event starts when the previous event on its stream has ended, when an event of another stream that it
waits for has ended, or when it has been launched: whichever is last. Before a launch, the path continues on
the host, back to the last moment at which the host waited for the device. This is the critical path
analysis of Holistic Trace Analysis without recorded dependencies between streams: an event that starts when
an event of another stream ends is assumed to have waited for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.device_use import KERNEL_DELAY_NS
from hespas.analysis.recording import DeviceEventKind, Recording
from hespas.analysis.table import AnalysisRow, RowTable, joined_tables, listed, table_of
from hespas.analysis.tree import callers_of
from hespas.converters.linking import exclusive
from hespas.files.documents import Count, Figure
from hespas.graph import Diagnostics
from hespas.graph.columns import IntArray
from hespas.graph.timeline import Intervals

__all__ = ["CriticalPaths", "PathRow", "SegmentRow", "critical_paths"]

_MAX_SEGMENTS = 20_000
_DEVICE_KINDS = frozenset(kind.word for kind in DeviceEventKind)
_HOST, _LAUNCH, _SYNCHRONISATION = "host", "launch", "synchronisation"
_STREAM, _OTHER_STREAM, _UNKNOWN = "kernel delay", "stream wait", "unknown"


class SegmentRow(AnalysisRow, frozen=True, kw_only=True):
    """Segment of the critical path, in order of time. All segments together cover the step without a gap.

    ``kind`` is one of: compute, communication or memory (device events; ``name`` is their operation); kernel
    delay (a gap on a stream); stream wait (a gap after an event of another stream); launch (from the call to
    the start of the operation ``name``); host; synchronisation (from the end of an event to the return of the
    host call that waited for it); unknown.
    """

    rank: int
    step: int
    kind: str
    name: str
    start_ns: Figure
    duration_ns: Figure


class PathRow(AnalysisRow, frozen=True, kw_only=True):
    """Time that the critical path of a rank spends in work of one kind and name. Host time is listed by the
    innermost host operation or function. ``share`` is relative to the length of the path.
    """

    rank: int
    step: int
    kind: str
    name: str
    count: Count
    total_ns: Figure
    share: Figure


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPaths:
    """Critical paths of all ranks. ``events`` are the device events of the path of each rank, as rows of its
    recording.
    """

    totals: RowTable[PathRow]
    segments: RowTable[SegmentRow]
    events: Mapping[int, IntArray]


def critical_paths(recordings: Sequence[Recording], diagnostics: Diagnostics) -> CriticalPaths:
    """Return the critical path of each rank through its step of median duration.

    Recordings without steps are analysed as one step. O(events log events).
    """
    totals: list[RowTable[PathRow]] = []
    segments: list[RowTable[SegmentRow]] = []
    events: dict[int, IntArray] = {}
    for recording in recordings:
        if not len(recording):
            continue
        # the step of median length and its events; -1 and all events without steps
        numbers, step_of = np.unique(recording.profile.run[recording.rows], return_inverse=True)
        begin, end = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
        np.minimum.at(begin, step_of, recording.start_ns)
        np.maximum.at(end, step_of, recording.end_ns)
        steps = np.flatnonzero(numbers >= 0)
        step, rows = -1, np.arange(len(recording))
        if len(steps):
            by_span = steps[np.argsort((end - begin)[steps], kind="stable")]
            median = by_span[(len(steps) - 1) // 2]
            step, rows = int(numbers[median]), np.flatnonzero(step_of == median)
        starts = _StartConditions.of(recording, float(recording.start_ns[rows].min()))
        path = starts.path_to(int(rows[np.argmax(recording.end_ns[rows])]))
        # the operation (or kernel) of each segment that is a device event or launches one
        profile = recording.profile
        event_rows = recording.rows[np.maximum(np.array(path.event, np.int64), 0)]
        named = np.where(
            profile.op_id[event_rows] > 0, profile.op_id[event_rows], profile.kernel_id[event_rows]
        )
        names = [
            profile.strings[row] if event >= 0 else ""
            for row, event in zip(listed(named), path.event, strict=True)
        ]
        totals.append(_totals(recording, step, path, names))
        events[recording.rank] = np.array(
            [event for kind, event in zip(path.kind, path.event, strict=True) if kind in _DEVICE_KINDS],
            np.int64,
        )
        count = len(path.kind)
        if count <= _MAX_SEGMENTS:
            segments.append(
                table_of(
                    SegmentRow,
                    rank=np.full(count, recording.rank),
                    step=np.full(count, step),
                    kind=path.kind[::-1],
                    name=names[::-1],
                    start_ns=path.start[::-1],
                    duration_ns=(np.array(path.end) - np.array(path.start))[::-1],
                )
            )
        message = f"its critical path has {count:,} segments, which are not listed one by one"
        diagnostics.info("analysis.long-path", recording.name, message, count=int(count > _MAX_SEGMENTS))
    return CriticalPaths(joined_tables(PathRow, totals), joined_tables(SegmentRow, segments), events)


@dataclass(slots=True)
class _BackwardPath:
    """Segments of a critical path in reverse order, while the path is followed backwards. ``event`` is the
    device event that is the segment or that the segment launches (-1: none).
    """

    kind: list[str] = field(default_factory=list[str])
    event: list[int] = field(default_factory=list[int])
    start: list[float] = field(default_factory=list[float])
    end: list[float] = field(default_factory=list[float])
    thread: list[int] = field(default_factory=list[int])

    def add(self, kind: str, start: float, end: float, event: int = -1, thread: int = 0) -> None:
        """Add a segment, but skip an empty one unless it is a device event."""
        if end > start or event >= 0:
            self.kind.append(kind)
            self.event.append(event)
            self.start.append(start)
            self.end.append(end)
            self.thread.append(thread)


@dataclass(frozen=True, slots=True, eq=False)
class _StartConditions:
    """Possible reasons for the start time of each device event: earlier events and launches, as lists
    (``-inf`` and -1: none).

    ``before`` is the previous event on the same stream. ``ended`` is an event of any stream that ended when
    the event started. ``launch`` is the time of the launch call. Waits of the host are sorted by their ends;
    ``wait_event`` is the device event whose end released a wait.
    """

    begin: float
    kind: list[int]
    start: list[float]
    end: list[float]
    before: list[int]
    ended: list[int]
    launch: list[float]
    thread: list[int]
    wait_end: list[float]
    wait_event: list[int]

    @classmethod
    def of(cls, recording: Recording, begin: float) -> _StartConditions:
        """Return the start conditions of the events of one rank, for a path that starts at the time
        ``begin``.
        """
        profile, rows = recording.profile, recording.rows
        start, end = recording.start_ns, recording.end_ns
        by_end = np.argsort(end, kind="stable")
        ended = by_end[np.maximum(np.searchsorted(end[by_end], start, side="right") - 1, 0)]
        close = (end[ended] <= start) & (start - end[ended] < KERNEL_DELAY_NS) & (start[ended] < start)
        launch = np.fmin(profile.launch_start_ns[rows], start)
        # ends of the host's waits, and the last event that ended during each wait; a call that returns after
        # its own work has ended has waited for that work
        until = profile.waits.start_ns + profile.waits.duration_ns
        last_ended = np.searchsorted(end[by_end], until, side="right") - 1
        released = by_end[np.maximum(last_ended, 0)] if len(by_end) else last_ended
        in_wait = (last_ended >= 0) & (end[released] >= profile.waits.start_ns)
        blocking = np.flatnonzero(profile.launch_end_ns[rows] >= end)
        wait_end = np.concatenate((until[in_wait], profile.launch_end_ns[rows][blocking]))
        wait_event = np.concatenate((released[in_wait], blocking))
        by_wait_end = np.argsort(wait_end, kind="stable")
        stream = profile.stream[rows]
        before = np.full(len(end), -1, np.int64)
        for number in np.unique(stream).tolist():
            own = np.flatnonzero(stream == number)
            reached = np.maximum.accumulate(end[own])
            last = np.maximum.accumulate(np.where(end[own] >= reached, np.arange(len(own)), 0))
            before[own[1:]] = own[last[:-1]]
        return cls(
            begin,
            listed(recording.kind),
            start.tolist(),
            end.tolist(),
            listed(before),
            listed(np.where(close, ended, -1)),
            np.where(np.isnan(profile.launch_start_ns[rows]), -np.inf, launch).tolist(),
            listed(profile.launch_thread_id[rows]),
            wait_end[by_wait_end].tolist(),
            listed(wait_event[by_wait_end]),
        )

    def path_to(self, event: int) -> _BackwardPath:
        """Return the critical path that ends with ``event``, walked backwards. O(segments log waits)."""
        path, until = _BackwardPath(), self.end[event]
        while event >= 0 and until > self.begin:
            begun = max(self.start[event], self.begin)
            path.add(DeviceEventKind(self.kind[event]).word, begun, until, event)
            if begun <= self.begin:
                break
            event, until = self._cause(path, event)
        return path

    def _cause(self, path: _BackwardPath, event: int) -> tuple[int, float]:
        """Return the event that delayed the start of ``event``, and the time at which it ended. Add the
        segments between the two events to ``path``. If no event did, return -1 and the start of the step.
        """
        begun, before, ended = self.start[event], self.before[event], self.ended[event]
        on_stream = min(self.end[before], begun) if before >= 0 else -np.inf
        elsewhere = self.end[ended] if ended >= 0 else -np.inf
        launched = self.launch[event]
        if launched > max(on_stream, elsewhere):
            path.add(_LAUNCH, max(launched, self.begin), begun, event)
            # on the host, back to the event that it last waited for before the launch
            thread, wait = self.thread[event], bisect_right(self.wait_end, launched) - 1
            while wait >= 0 and self.start[self.wait_event[wait]] >= begun:
                wait -= 1
            if wait < 0 or self.wait_end[wait] <= self.begin:
                path.add(_HOST, self.begin, launched, thread=thread)
                return -1, self.begin
            awaited, waited = self.wait_event[wait], self.wait_end[wait]
            path.add(_HOST, waited, launched, thread=thread)
            done = min(self.end[awaited], waited)
            path.add(_SYNCHRONISATION, max(done, self.begin), waited)
            return awaited, done
        if on_stream >= elsewhere and before >= 0:
            path.add(_STREAM, max(on_stream, self.begin), begun)
            return before, on_stream
        if ended >= 0:
            path.add(_OTHER_STREAM, max(elsewhere, self.begin), begun)
            return ended, elsewhere
        path.add(_UNKNOWN, self.begin, begun)
        return -1, self.begin


def _totals(recording: Recording, step: int, path: _BackwardPath, names: Sequence[str]) -> RowTable[PathRow]:
    """Return the time that the critical path spends in each kind and name of work, most time first."""
    sums: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, name: str, time_ns: float, times: int = 1) -> None:
        entry = sums.setdefault((kind, name), [0, 0.0])
        entry[0] += times
        entry[1] += time_ns

    for kind, name, start, end in zip(path.kind, names, path.start, path.end, strict=True):
        if kind != _HOST:
            add(kind, name, end - start)
    for name, times, time_ns in _host_totals(recording, path):
        add(_HOST, name, time_ns, times)
    whole = sum(time_ns for _, time_ns in sums.values()) or np.nan
    total = np.array([time_ns for _, time_ns in sums.values()])
    return table_of(
        PathRow,
        rank=np.full(len(sums), recording.rank),
        step=np.full(len(sums), step),
        kind=[kind for kind, _ in sums],
        name=[name for _, name in sums],
        count=[int(times) for times, _ in sums.values()],
        total_ns=total,
        share=total / whole,
    ).largest("total_ns")


def _host_totals(recording: Recording, path: _BackwardPath) -> list[tuple[str, int, float]]:
    """Return name, calls and time [ns] of the innermost host operations that run in host segments of the
    critical path. Time without a host operation has an empty name.
    """
    rows = [row for row, kind in enumerate(path.kind) if kind == _HOST]
    if not rows:
        return []
    start, end = (np.array([column[row] for row in rows]) for column in (path.start, path.end))
    thread = np.array([path.thread[row] for row in rows], np.int64)
    callers = callers_of(recording.profile)
    callers = callers.take(
        np.isin(callers.thread, thread) & (callers.end > start.min()) & (callers.start < end.max())
    )
    callers = callers.take(np.lexsort((-callers.end, callers.start, callers.thread)))
    begin, until = np.zeros(len(callers.start), np.int64), np.zeros(len(callers.start), np.int64)
    for number in np.unique(thread).tolist():
        # on a clock that runs on the path alone, exclusive time is exclusive time on the path
        clock = Intervals.union(start[thread == number], end[thread == number])
        own_calls = np.flatnonzero(callers.thread == number)
        begin[own_calls] = clock.elapsed_ns(callers.start[own_calls].astype(np.float64))
        until[own_calls] = clock.elapsed_ns(callers.end[own_calls].astype(np.float64))
    on_path = np.flatnonzero(until > begin)
    callers = callers.take(on_path)
    own = exclusive(callers.thread.astype(np.int64), begin[on_path], until[on_path])
    names, group = np.unique(callers.name_id, return_inverse=True)
    times = np.bincount(group, own, len(names))
    counts = np.bincount(group, own > 0, len(names)).astype(np.int64)
    texts = [recording.profile.strings[row] for row in listed(names)]
    totals = [row for row in zip(texts, listed(counts), times.tolist(), strict=True) if row[2] > 0]
    rest = float((end - start).sum()) - sum(time_ns for _, _, time_ns in totals)
    return [*totals, ("", len(rows), rest)] if rest > 0 else totals
