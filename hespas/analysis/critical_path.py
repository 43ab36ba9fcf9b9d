"""What the length of a step hangs on: from its last device event back, each start by what allowed it.

An event starts when the one before it on its stream has ended, when another stream has done what it waits
for, or when it has been launched: whichever was last. Behind a launch stands the host, back to the last
moment at which it waited for the device. It is the critical path analysis of Holistic Trace Analysis without
recorded dependences between streams: an event that starts right as one of another stream ends has waited for
that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hespas.analysis.idle import KERNEL_DELAY_NS
from hespas.analysis.intervals import Intervals
from hespas.analysis.recording import Kind, Recording
from hespas.analysis.table import Row, Table, joined_tables, listed, table_of
from hespas.analysis.tree import callers_of
from hespas.converters.linking import exclusive
from hespas.files.documents import Count, Figure
from hespas.graph import Diagnostics
from hespas.graph.columns import FloatArray, IntArray

__all__ = ["CriticalPaths", "PathRow", "SegmentRow", "critical_paths"]

_MOST_SEGMENTS = 20_000
_HOST, _LAUNCH, _SYNCHRONISATION = "host", "launch", "synchronisation"
_STREAM, _OTHER_STREAM, _UNKNOWN = "kernel delay", "stream wait", "unknown"


class SegmentRow(Row, frozen=True, kw_only=True):
    """One stretch of the path, in order of time; together they cover the step without a gap. ``kind`` is
    compute, communication, memory (device events: ``name`` is their operation), kernel delay (a gap on a
    stream), stream wait (a gap after another stream's event), launch (from the call to the start of what
    ``name`` says), host,
    synchronisation (from an event's end to the host going on), or unknown.
    """

    rank: int
    step: int
    kind: str
    name: str
    start_ns: Figure
    duration_ns: Figure


class PathRow(Row, frozen=True, kw_only=True):
    """The path's time by kind and name; that of the host by the innermost operation or function running
    then. ``share`` is of the path of the rank.
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
    """The paths of all ranks."""

    totals: Table[PathRow]
    segments: Table[SegmentRow]


def critical_paths(recordings: Sequence[Recording], diagnostics: Diagnostics) -> CriticalPaths:
    """The path through the step of median length of each rank; through all that was recorded where no step
    is known. O(events log events).
    """
    totals: list[Table[PathRow]] = []
    segments: list[Table[SegmentRow]] = []
    for recording in recordings:
        if not len(recording):
            continue
        step, rows = _window(recording)
        path = _Walk.of(recording, float(recording.start_ns[rows].min())).back_from(
            int(rows[np.argmax(recording.end_ns[rows])])
        )
        totals.append(_totals(recording, step, path))
        if len(path.kind) <= _MOST_SEGMENTS:
            segments.append(_segments(recording, step, path))
        message = f"its critical path has {len(path.kind):,} segments, which are not listed one by one"
        diagnostics.info(
            "analysis.long-path", recording.name, message, count=int(len(path.kind) > _MOST_SEGMENTS)
        )
    return CriticalPaths(joined_tables(PathRow, totals), joined_tables(SegmentRow, segments))


def _window(recording: Recording) -> tuple[int, IntArray]:
    """The step of median length, and its events; -1 and all events where there are no steps."""
    run = recording.profile.run[recording.rows]
    steps, step = np.unique(run, return_inverse=True)
    begin, end = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(begin, step, recording.start_ns)
    np.maximum.at(end, step, recording.end_ns)
    known = np.flatnonzero(steps >= 0)
    if not len(known):
        return -1, np.arange(len(recording))
    by_span = known[np.argsort((end - begin)[known], kind="stable")]
    chosen = by_span[(len(known) - 1) // 2]
    return int(steps[chosen]), np.flatnonzero(step == chosen)


@dataclass(slots=True)
class _Path:
    """Segments from the last to the first; ``event`` is what one is or launches (-1: nothing)."""

    kind: list[str] = field(default_factory=list[str])
    event: list[int] = field(default_factory=list[int])
    start: list[float] = field(default_factory=list[float])
    end: list[float] = field(default_factory=list[float])
    thread: list[int] = field(default_factory=list[int])

    def add(self, kind: str, start: float, end: float, event: int = -1, thread: int = 0) -> None:
        """Add what lasted any time, or is an event."""
        if end > start or event >= 0:
            self.kind.append(kind)
            self.event.append(event)
            self.start.append(start)
            self.end.append(end)
            self.thread.append(thread)


@dataclass(frozen=True, slots=True, eq=False)
class _Walk:
    """What may have allowed each event to start, as lists; ``-inf`` where nothing of the kind did. ``before``
    is the event of the same stream that ended last, ``ended`` that of any stream. Waits of the host are in
    order of their ends, with the event whose end let each go on.
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
    def of(cls, recording: Recording, begin: float) -> _Walk:
        """The lists of one rank; the path ends at ``begin``."""
        profile, rows = recording.profile, recording.rows
        start, end = recording.start_ns, recording.end_ns
        by_end = np.argsort(end, kind="stable")
        ended = by_end[np.maximum(np.searchsorted(end[by_end], start, side="right") - 1, 0)]
        close = (end[ended] <= start) & (start - end[ended] < KERNEL_DELAY_NS) & (start[ended] < start)
        launch = np.fmin(profile.launch_start_ns[rows], start)
        wait_end, wait_event = _waits(recording, by_end)
        return cls(
            begin,
            listed(recording.kind),
            start.tolist(),
            end.tolist(),
            listed(_before(profile.stream[rows], end)),
            listed(np.where(close, ended, -1)),
            np.where(np.isnan(profile.launch_start_ns[rows]), -np.inf, launch).tolist(),
            listed(profile.launch_thread_row[rows]),
            wait_end.tolist(),
            listed(wait_event),
        )

    def back_from(self, event: int) -> _Path:
        """The path that ends with an event. O(segments log waits)."""
        path, until = _Path(), self.end[event]
        while event >= 0 and until > self.begin:
            begun = max(self.start[event], self.begin)
            path.add(Kind(self.kind[event]).word, begun, until, event)
            if begun <= self.begin:
                break
            event, until = self._earlier(path, event)
        return path

    def _earlier(self, path: _Path, event: int) -> tuple[int, float]:
        """What allowed an event to start, and when that was done; -1 where the path ends."""
        begun, before, ended = self.start[event], self.before[event], self.ended[event]
        on_stream = min(self.end[before], begun) if before >= 0 else -np.inf
        elsewhere = self.end[ended] if ended >= 0 else -np.inf
        launched = self.launch[event]
        if launched > max(on_stream, elsewhere):
            path.add(_LAUNCH, max(launched, self.begin), begun, event)
            return self._host(path, launched, begun, self.thread[event])
        if on_stream >= elsewhere and before >= 0:
            path.add(_STREAM, max(on_stream, self.begin), begun)
            return before, on_stream
        if ended >= 0:
            path.add(_OTHER_STREAM, max(elsewhere, self.begin), begun)
            return ended, elsewhere
        path.add(_UNKNOWN, self.begin, begun)
        return -1, self.begin

    def _host(self, path: _Path, at: float, begun: float, thread: int) -> tuple[int, float]:
        """From a launch back to what the host last waited for."""
        place = bisect_right(self.wait_end, at) - 1
        while place >= 0 and self.start[self.wait_event[place]] >= begun:
            place -= 1
        if place < 0 or self.wait_end[place] <= self.begin:
            path.add(_HOST, self.begin, at, thread=thread)
            return -1, self.begin
        event, waited = self.wait_event[place], self.wait_end[place]
        path.add(_HOST, waited, at, thread=thread)
        done = min(self.end[event], waited)
        path.add(_SYNCHRONISATION, max(done, self.begin), waited)
        return event, done


def _before(stream: IntArray, end: FloatArray) -> IntArray:
    """Of the earlier events of the same stream the one that ended last, -1 for the first."""
    found = np.full(len(end), -1, np.int64)
    for number in np.unique(stream).tolist():
        rows = np.flatnonzero(stream == number)
        reached = np.maximum.accumulate(end[rows])
        last = np.maximum.accumulate(np.where(end[rows] >= reached, np.arange(len(rows)), 0))
        found[rows[1:]] = rows[last[:-1]]
    return found


def _waits(recording: Recording, by_end: IntArray) -> tuple[FloatArray, IntArray]:
    """When the host had waited for the device, sorted, and the event that each wait was for: the last to end
    in it. A call that returns after its own work has ended has waited for that.
    """
    profile, rows, end = recording.profile, recording.rows, recording.end_ns
    waits = profile.waits
    until = waits.start_ns + waits.duration_ns
    last = np.searchsorted(end[by_end], until, side="right") - 1
    released = by_end[np.maximum(last, 0)] if len(by_end) else last
    real = (last >= 0) & (end[released] >= waits.start_ns)
    returned = profile.launch_end_ns[rows]
    blocking = np.flatnonzero(returned >= end)
    ends = np.concatenate((until[real], returned[blocking]))
    events = np.concatenate((released[real], blocking))
    order = np.argsort(ends, kind="stable")
    return ends[order], events[order]


# --- What is told of a path


def _names(recording: Recording, path: _Path) -> list[str]:
    """The operation of each segment that is a device event or launches one, else its kernel."""
    profile = recording.profile
    rows = recording.rows[np.maximum(np.array(path.event, np.int64), 0)]
    named = np.where(profile.op_row[rows] > 0, profile.op_row[rows], profile.kernel_row[rows])
    texts = {row: profile.strings[row] for row in listed(np.unique(named))}
    return [texts[row] if event >= 0 else "" for row, event in zip(listed(named), path.event, strict=True)]


def _segments(recording: Recording, step: int, path: _Path) -> Table[SegmentRow]:
    count = len(path.kind)
    names = _names(recording, path)
    return table_of(
        SegmentRow,
        rank=np.full(count, recording.rank),
        step=np.full(count, step),
        kind=path.kind[::-1],
        name=names[::-1],
        start_ns=path.start[::-1],
        duration_ns=(np.array(path.end) - np.array(path.start))[::-1],
    )


def _totals(recording: Recording, step: int, path: _Path) -> Table[PathRow]:
    sums: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, name: str, time_ns: float, times: int = 1) -> None:
        entry = sums.setdefault((kind, name), [0, 0.0])
        entry[0] += times
        entry[1] += time_ns

    names = _names(recording, path)
    for kind, name, start, end in zip(path.kind, names, path.start, path.end, strict=True):
        if kind != _HOST:
            add(kind, name, end - start)
    for name, times, time_ns in _on_host(recording, path):
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


def _on_host(recording: Recording, path: _Path) -> list[tuple[str, int, float]]:
    """Name, calls and time of what was innermost on the host while it was on the path; the rest has no
    name.
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
        # on a clock that runs on the path alone, who has the time is who has it on the path
        clock = Intervals.union(start[thread == number], end[thread == number])
        mine = np.flatnonzero(callers.thread == number)
        begin[mine] = clock.elapsed_ns(callers.start[mine].astype(np.float64))
        until[mine] = clock.elapsed_ns(callers.end[mine].astype(np.float64))
    on_path = np.flatnonzero(until > begin)
    callers = callers.take(on_path)
    own = exclusive(callers.thread.astype(np.int64), begin[on_path], until[on_path])
    names, place = np.unique(callers.name_row, return_inverse=True)
    times = np.bincount(place, own, len(names))
    counts = np.bincount(place, own > 0, len(names)).astype(np.int64)
    texts = [recording.profile.strings[row] for row in listed(names)]
    found = [each for each in zip(texts, listed(counts), times.tolist(), strict=True) if each[2] > 0]
    rest = float((end - start).sum()) - sum(time_ns for _, _, time_ns in found)
    return [*found, ("", len(rows), rest)] if rest > 0 else found
