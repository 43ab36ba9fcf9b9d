"""Use of each device: time breakdown, idle gaps by cause, launches, queue depth, and allocator memory.

The analyses follow Holistic Trace Analysis (HTA). Breakdown: an event counts while it runs. A moment at which
several events run counts once, and computation takes precedence. Idle causes: a gap in which the host had not
launched the next event is host wait; otherwise a gap below a threshold is kernel wait. Two of these causes
are divided further. A gap of host wait that passed mostly after the launching call is launch delay. Among the
other gaps, a gap that ends when an event of another stream ends has waited for that event. Queue depth: the
queue of a stream grows when a launch is called, and shrinks when the work starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.analysis.recording import DeviceEventKind, Recording
from hespas.analysis.table import AnalysisRow, GroupStatistics, RowTable, joined_tables, table_of
from hespas.files.documents import Count, Figure
from hespas.graph import Profile
from hespas.graph.columns import FloatArray, IntArray, distinct_rows
from hespas.graph.timeline import Intervals

__all__ = [
    "ALL_STEPS",
    "KERNEL_DELAY_NS",
    "WHOLE_DEVICE",
    "BreakdownRow",
    "GapRow",
    "IdleCause",
    "IdleLengthRow",
    "IdleRow",
    "LaunchRow",
    "MemoryPointRow",
    "MemoryRow",
    "QueuePointRow",
    "QueueRow",
    "breakdown",
    "gap_lengths",
    "gaps_before",
    "idle",
    "idle_lengths",
    "launches",
    "memory",
    "memory_points",
    "queue_points",
    "queues",
]

ALL_STEPS = -1
"""``step`` of a row of a whole rank."""
WHOLE_DEVICE = -1
"""``stream`` of a row of the whole device."""
KERNEL_DELAY_NS = 30_000.0
"""Shorter gaps are the device's own delay between kernels that were launched in time: the threshold of
Holistic Trace Analysis.
"""
_QUEUE_LIMIT = 1024
"""Launches that a stream of CUDA takes before a call blocks."""
_QUEUE_POINTS, _MEMORY_POINTS = 200, 500


class BreakdownRow(AnalysisRow, frozen=True, kw_only=True):
    """Time breakdown of one rank. It covers the whole recording (``step`` -1) or one step, from the first
    start to the last end of its events.

    ``span_ns`` = ``compute_ns`` + ``exposed_communication_ns`` + ``exposed_memory_ns`` + ``idle_ns``. Exposed
    communication is the time of communication without computation. Exposed memory is the time of copies
    without computation or communication. ``busy_ns`` is the time in which anything ran. ``communication_ns``
    and ``memory_ns`` include time that is not exposed. ``overlap`` is the share of the communication time in
    which the device also computes (0 to 1). ``period_ns`` is the time from the start of a step to the start
    of the next one.
    """

    rank: int
    step: int
    start_ns: Figure
    span_ns: Figure
    busy_ns: Figure
    compute_ns: Figure
    communication_ns: Figure
    exposed_communication_ns: Figure
    memory_ns: Figure
    exposed_memory_ns: Figure
    idle_ns: Figure
    overlap: Figure
    period_ns: Figure


def breakdown(recordings: Sequence[Recording]) -> RowTable[BreakdownRow]:
    """Return one row per rank, then its steps in order. O(events log events)."""
    parts: list[RowTable[BreakdownRow]] = []
    for recording in recordings:
        if not len(recording):
            continue
        parts.append(_breakdown_by(recording, np.full(len(recording), ALL_STEPS)))
        parts.append(_breakdown_by(recording, recording.profile.run[recording.rows], least=0))
    return joined_tables(BreakdownRow, parts)


def _breakdown_by(
    recording: Recording, step: NDArray[np.integer], *, least: int = ALL_STEPS
) -> RowTable[BreakdownRow]:
    """Return the time breakdown of one rank, with one row per step. ``step`` is the step of each event. Steps
    below ``least`` are left out.
    """
    chosen = np.flatnonzero(step >= least)
    start, end = recording.start_ns[chosen], recording.end_ns[chosen]
    steps, group = np.unique(step[chosen], return_inverse=True)
    count = len(steps)
    begin, until = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(begin, group, start)
    np.maximum.at(until, group, end)
    span = until - begin
    # steps are moved one after another on a common clock, so that one union covers all of them
    at = np.append(0.0, np.cumsum(span))[:-1]
    shift = (at - begin)[group]

    def ran_ns(*kinds: DeviceEventKind) -> FloatArray:
        mask = np.isin(recording.kind[chosen], kinds)
        return Intervals.union((start + shift)[mask], (end + shift)[mask]).within_ns(at, at + span)

    compute, communication = ran_ns(DeviceEventKind.COMPUTE), ran_ns(DeviceEventKind.COMMUNICATION)
    both, busy = ran_ns(DeviceEventKind.COMPUTE, DeviceEventKind.COMMUNICATION), ran_ns(*DeviceEventKind)
    exposed = both - compute
    with np.errstate(invalid="ignore"):
        overlap = (communication - exposed) / communication
    return table_of(
        BreakdownRow,
        rank=np.full(count, recording.rank),
        step=steps,
        start_ns=begin,
        span_ns=span,
        busy_ns=busy,
        compute_ns=compute,
        communication_ns=communication,
        exposed_communication_ns=exposed,
        memory_ns=ran_ns(DeviceEventKind.MEMORY),
        exposed_memory_ns=busy - both,
        idle_ns=span - busy,
        overlap=overlap,
        period_ns=np.append(np.diff(begin), np.full(min(count, 1), np.nan)),
    )


class IdleCause(IntEnum):
    """Cause of idle time: why no device event ran in a gap between two events."""

    HOST = 0
    """The event after the gap was launched after the previous one had ended, when most of the gap was over.
    """
    LAUNCH = 1
    """It was launched after the previous one had ended, and most of the gap is after that call."""
    KERNEL_DELAY = 2
    """It was launched in time, and the gap is short."""
    COMMUNICATION = 3
    """It was launched in time, and started when communication on another stream ended."""
    OTHER_STREAM = 4
    """It was launched in time, and started when a kernel or a copy of another stream ended."""
    OTHER = 5
    """It was launched in time, and the recording shows no cause."""
    UNKNOWN = 6
    """Its launch was not recorded."""


_CAUSE_LABELS = (
    "host-bound",
    "launch delay",
    "kernel delay",
    "communication",
    "other stream",
    "other",
    "launch unknown",
)


class IdleRow(AnalysisRow, frozen=True, kw_only=True):
    """Gaps of one cause between the events of a stream. If ``stream`` is -1, the gaps are the times in which
    no stream of the device runs.

    ``share`` is relative to all gaps of the stream (0 to 1). ``before_launch_ns`` is the part of ``total_ns``
    before the call that launched the next event.
    """

    rank: int
    stream: int
    cause: str
    count: Count
    total_ns: Figure
    share: Figure
    mean_ns: Figure
    max_ns: Figure
    before_launch_ns: Figure


class GapRow(AnalysisRow, frozen=True, kw_only=True):
    """Idle time (gaps between device events) of one cause before one ``operation``, which ran after the gap
    (its kernel, if its operation is unknown).
    """

    rank: int
    cause: str
    operation: str
    count: Count
    total_ns: Figure
    share: Figure
    max_ns: Figure


class IdleLengthRow(AnalysisRow, frozen=True, kw_only=True):
    """Gaps of one cause with a length from ``from_ns`` to ``to_ns``, on all ranks together. In a gap of a
    recording, no stream of the device runs; in a gap of a simulated step, nothing computes.
    """

    cause: str
    from_ns: Figure
    to_ns: Figure
    count: Count
    total_ns: Figure


def gap_lengths(
    causes: Sequence[str], cause: IntArray, length_ns: FloatArray, weight: FloatArray
) -> RowTable[IdleLengthRow]:
    """Return the distribution of the lengths of gaps by cause; ``cause`` are indices in ``causes``, and
    ``weight`` are the numbers of ranks with the gap.
    """
    edges = np.array([digit * 10.0**power for power in range(13) for digit in (1, 2, 5)])
    edges[0] = 0.0
    count, total = np.zeros((2, len(causes), len(edges)))
    bin_of = np.searchsorted(edges, length_ns, side="right") - 1
    np.add.at(count, (cause, bin_of), weight)
    np.add.at(total, (cause, bin_of), length_ns * weight)
    rows, bins = np.nonzero(count)
    return table_of(
        IdleLengthRow,
        cause=[causes[code] for code in rows.tolist()],
        from_ns=edges[bins],
        to_ns=np.append(edges[1:], 1e13)[bins],
        count=np.rint(count[rows, bins]).astype(np.int64),
        total_ns=total[rows, bins],
    )


def idle_lengths(recordings: Sequence[Recording]) -> RowTable[IdleLengthRow]:
    """Return the distribution of the lengths of gaps by cause. O(events log events)."""
    lengths, causes = [np.empty(0)], [np.empty(0, np.int64)]
    for recording in recordings:
        by_end = np.argsort(recording.end_ns, kind="stable")
        _, length, cause = _gaps(recording, np.arange(len(recording)), by_end)
        lengths.append(length)
        causes.append(cause)
    length_ns = np.concatenate(lengths)
    return gap_lengths(_CAUSE_LABELS, np.concatenate(causes), length_ns, np.ones(len(length_ns)))


def idle(recordings: Sequence[Recording]) -> RowTable[IdleRow]:
    """Return the idle time by cause: of each rank's device, then of each of its known streams. O(events log
    events).
    """
    parts: list[RowTable[IdleRow]] = []
    for recording in recordings:
        by_end = np.argsort(recording.end_ns, kind="stable")
        streams = [(WHOLE_DEVICE, np.arange(len(recording))), *recording.streams()] if len(recording) else []
        for stream, events in streams:
            after, length, cause = _gaps(recording, events, by_end)
            launch, start = (
                recording.profile.launch_start_ns[recording.rows[after]],
                recording.start_ns[after],
            )
            launched_late = (cause == IdleCause.HOST) | (cause == IdleCause.LAUNCH)
            before_launch = np.where(launched_late, np.minimum(launch, start) - (start - length), 0.0)
            moments = GroupStatistics.of(length, cause, len(IdleCause))
            used = np.flatnonzero(moments.count)
            order = used[np.argsort(-moments.total[used], kind="stable")]
            with np.errstate(invalid="ignore", divide="ignore"):
                share = moments.total[order] / moments.total.sum()
            parts.append(
                table_of(
                    IdleRow,
                    rank=np.full(len(order), recording.rank),
                    stream=np.full(len(order), stream),
                    cause=[_CAUSE_LABELS[code] for code in order.tolist()],
                    count=moments.count[order],
                    total_ns=moments.total[order],
                    share=share,
                    mean_ns=moments.mean[order],
                    max_ns=moments.most[order],
                    before_launch_ns=np.bincount(cause, before_launch, len(IdleCause))[order],
                )
            )
    return joined_tables(IdleRow, parts)


def _gaps(recording: Recording, events: IntArray, by_end: IntArray) -> tuple[IntArray, FloatArray, IntArray]:
    """Return the events that follow a gap, the lengths of these gaps, and their causes.

    ``events`` are in order of their starts. ``by_end`` are all events of the rank, in order of their ends,
    from which the cause of a gap is found.
    """
    start, end = recording.start_ns[events], recording.end_ns[events]
    length = start[1:] - np.maximum.accumulate(end)[:-1] if len(events) else np.empty(0)
    has_gap = np.flatnonzero(length > 0)
    after, length = events[has_gap + 1], length[has_gap]
    start = recording.start_ns[after]
    launch = recording.profile.launch_start_ns[recording.rows[after]]
    began = start - length
    # the last end of any stream before the end of the gap: of another stream if it is inside the gap
    ends = recording.end_ns[by_end]
    last = np.maximum(np.searchsorted(ends, start, side="right") - 1, 0)
    waited = (ends[last] > began) & (start - ends[last] < KERNEL_DELAY_NS)
    communicated = recording.kind[by_end][last] == DeviceEventKind.COMMUNICATION
    causes = {
        IdleCause.UNKNOWN: np.isnan(launch),
        IdleCause.LAUNCH: (launch > began) & (start - launch > launch - began),
        IdleCause.HOST: launch > began,
        IdleCause.KERNEL_DELAY: length < KERNEL_DELAY_NS,
        IdleCause.COMMUNICATION: waited & communicated,
        IdleCause.OTHER_STREAM: waited,
    }
    cause = np.select(list(causes.values()), list(causes), IdleCause.OTHER).astype(np.int64)
    return after, length, cause


def gaps_before(recordings: Sequence[Recording]) -> RowTable[GapRow]:
    """Return the idle time of each device by cause and by the operation that ran after the gap, longest total
    time first within each rank.
    """
    parts: list[RowTable[GapRow]] = []
    for recording in recordings:
        if not len(recording):
            continue
        by_end = np.argsort(recording.end_ns, kind="stable")
        after, length, cause = _gaps(recording, np.arange(len(recording)), by_end)
        if not len(after):
            continue
        profile, rows = recording.profile, recording.rows[after]
        name = np.where(profile.op_id[rows] > 0, profile.op_id[rows], profile.kernel_id[rows])
        distinct, group = distinct_rows(cause, name)
        moments = GroupStatistics.of(length, group, len(distinct))
        parts.append(
            table_of(
                GapRow,
                rank=np.full(len(distinct), recording.rank),
                cause=[_CAUSE_LABELS[code] for code, _ in distinct],
                operation=[profile.strings[row] for _, row in distinct],
                count=moments.count,
                total_ns=moments.total,
                share=moments.total / moments.total.sum(),
                max_ns=moments.most,
            ).largest("total_ns")
        )
    return joined_tables(GapRow, parts)


class LaunchRow(AnalysisRow, frozen=True, kw_only=True):
    """Launches of one operation on one rank.

    ``call_mean_ns`` is the mean duration of the launch calls. ``delay_mean_ns`` is the mean time from the
    return of the call to the start of the kernel (negative if the kernel starts first). ``short`` is the
    number of launches whose kernel took less time than the call.
    """

    rank: int
    operation: str
    count: Count
    call_total_ns: Figure
    call_mean_ns: Figure
    call_max_ns: Figure
    delay_mean_ns: Figure
    delay_max_ns: Figure
    work_mean_ns: Figure
    short: Count


class QueueRow(AnalysisRow, frozen=True, kw_only=True):
    """Queue depth of a stream: the number of launches whose work has not started. The row covers the time
    from the first launch to the last start. Means and medians are over time.

    ``empty_share`` is the share of that time in which the queue is empty, ``blocked_ns`` the time in which it
    is full (1,024 launches).
    """

    rank: int
    stream: int
    count: Count
    mean_length: Figure
    median_length: Figure
    max_length: int
    empty_share: Figure
    blocked_ns: Figure


class QueuePointRow(AnalysisRow, frozen=True, kw_only=True):
    """Point of the curve of a stream's queue depth (launched kernels that have not started) over time."""

    rank: int
    stream: int
    time_ns: Figure
    length: int


def launches(recordings: Sequence[Recording]) -> RowTable[LaunchRow]:
    """Return the launches of device work by rank and host operation, most time in launch calls first.
    O(events log events).
    """
    parts: list[RowTable[LaunchRow]] = []
    for recording in recordings:
        profile = recording.profile
        rows = recording.rows
        call = profile.launch_end_ns[rows] - profile.launch_start_ns[rows]
        known = ~np.isnan(call)
        rows, call, work = rows[known], call[known], recording.duration_ns[known]
        delay = recording.start_ns[known] - profile.launch_end_ns[rows]
        name = np.where(profile.op_id[rows] > 0, profile.op_id[rows], profile.kernel_id[rows])
        distinct, group = distinct_rows(name)
        groups = len(distinct)
        calls, delays = GroupStatistics.of(call, group, groups), GroupStatistics.of(delay, group, groups)
        parts.append(
            table_of(
                LaunchRow,
                rank=np.full(groups, recording.rank),
                operation=[profile.strings[row] for (row,) in distinct],
                count=calls.count,
                call_total_ns=calls.total,
                call_mean_ns=calls.mean,
                call_max_ns=calls.most,
                delay_mean_ns=delays.mean,
                delay_max_ns=delays.most,
                work_mean_ns=GroupStatistics.of(work, group, groups).mean,
                short=np.bincount(group, work < call, groups),
            ).largest("call_total_ns")
        )
    return joined_tables(LaunchRow, parts)


def _queue_changes(recording: Recording, events: IntArray) -> tuple[FloatArray, IntArray]:
    """Return the times at which the queue depth of ``events`` changed, and the new depth at each time. Both
    are empty if no launch is known.
    """
    launch = recording.profile.launch_start_ns[recording.rows[events]]
    known = ~np.isnan(launch)
    launch, start = launch[known], recording.start_ns[events[known]]
    time = np.concatenate((launch, start))
    change = np.repeat(np.array([1, -1], np.int64), len(launch))
    order = np.lexsort((-change, time))
    return time[order], np.cumsum(change[order])


def queues(recordings: Sequence[Recording]) -> RowTable[QueueRow]:
    """Return one row per known stream of each rank with statistics of its queue depth (launched work that has
    not started). O(events log events).
    """
    rows: list[tuple[float, ...]] = []
    for recording in recordings:
        for stream, events in recording.streams():
            time, length = _queue_changes(recording, events)
            if not len(time):
                continue
            lasted = np.diff(time)
            length, whole = length[:-1], float(lasted.sum())
            by_length = np.argsort(length, kind="stable")
            middle = np.searchsorted(np.cumsum(lasted[by_length]), whole / 2)
            rows.append(
                (
                    recording.rank,
                    stream,
                    (len(lasted) + 1) // 2,
                    float((lasted * length).sum() / whole) if whole else np.nan,
                    float(length[by_length][min(int(middle), len(length) - 1)]),
                    float(length.max()),
                    float(lasted[length <= 0].sum() / whole) if whole else np.nan,
                    float(lasted[length >= _QUEUE_LIMIT].sum()),
                )
            )
    names = QueueRow.__struct_fields__
    return table_of(QueueRow, **{name: [row[column] for row in rows] for column, name in enumerate(names)})


def queue_points(recordings: Sequence[Recording]) -> RowTable[QueuePointRow]:
    """Return the depth of each queue at up to 200 moments. Each point shows the largest depth until the next
    one.
    """
    parts: list[RowTable[QueuePointRow]] = []
    for recording in recordings:
        for stream, events in recording.streams():
            time, length = _queue_changes(recording, events)
            if not len(time):
                continue
            firsts = np.linspace(0, len(time), min(_QUEUE_POINTS, len(time)), endpoint=False).astype(np.int64)
            count = len(firsts)
            parts.append(
                table_of(
                    QueuePointRow,
                    rank=np.full(count, recording.rank),
                    stream=np.full(count, stream),
                    time_ns=time[firsts],
                    length=np.maximum.reduceat(length, firsts),
                )
            )
    return joined_tables(QueuePointRow, parts)


class MemoryRow(AnalysisRow, frozen=True, kw_only=True):
    """Memory that the allocator of one device uses (``device`` -1: the host): peaks of allocated and reserved
    memory, the time of the peak, and the allocated memory at the end.

    ``taken_bytes`` is the sum of all allocations. Profilers record memory on request only (PyTorch:
    ``profile_memory``).
    """

    rank: int
    device: int
    changes: Count
    peak_allocated_bytes: Figure
    peak_time_ns: Figure
    peak_reserved_bytes: Figure
    last_allocated_bytes: Figure
    taken_bytes: Figure


class MemoryPointRow(AnalysisRow, frozen=True, kw_only=True):
    """Point of the curve of memory in use over time: the largest value from this point to the next."""

    rank: int
    device: int
    time_ns: Figure
    allocated_bytes: Figure
    reserved_bytes: Figure


def _allocators(profile: Profile) -> list[tuple[int, int, IntArray]]:
    """Return rank, device and event rows of each memory allocator. The rows are its allocations and frees in
    order of time.
    """
    changes = profile.memory
    rank = int(profile.rank[0]) if len(profile) else 0
    order = np.argsort(changes.time_ns, kind="stable")
    devices: list[int] = np.unique(changes.device).tolist()
    return [(rank, device, order[changes.device[order] == device]) for device in devices]


def memory(profiles: Sequence[Profile]) -> RowTable[MemoryRow]:
    """Return one row per memory allocator with its peaks."""
    parts: list[RowTable[MemoryRow]] = []
    for profile in profiles:
        for rank, device, rows in _allocators(profile):
            changes = profile.memory.take(rows)
            peak = int(np.nan_to_num(changes.allocated_bytes, nan=-1.0).argmax())
            parts.append(
                table_of(
                    MemoryRow,
                    rank=[rank],
                    device=[device],
                    changes=[len(rows)],
                    peak_allocated_bytes=changes.allocated_bytes[[peak]],
                    peak_time_ns=changes.time_ns[[peak]],
                    peak_reserved_bytes=[np.fmax.reduce(changes.reserved_bytes)],
                    last_allocated_bytes=changes.allocated_bytes[-1:],
                    taken_bytes=[np.maximum(changes.change_bytes, 0.0).sum()],
                )
            )
    return joined_tables(MemoryRow, parts)


def memory_points(profiles: Sequence[Profile]) -> RowTable[MemoryPointRow]:
    """Return the memory in use over time, at up to 500 moments for each allocator."""
    parts: list[RowTable[MemoryPointRow]] = []
    for profile in profiles:
        for rank, device, rows in _allocators(profile):
            firsts = np.linspace(0, len(rows), min(_MEMORY_POINTS, len(rows)), endpoint=False).astype(
                np.int64
            )
            changes = profile.memory.take(rows)
            parts.append(
                table_of(
                    MemoryPointRow,
                    rank=np.full(len(firsts), rank),
                    device=np.full(len(firsts), device),
                    time_ns=changes.time_ns[firsts],
                    allocated_bytes=np.fmax.reduceat(changes.allocated_bytes, firsts),
                    reserved_bytes=np.fmax.reduceat(changes.reserved_bytes, firsts),
                )
            )
    return joined_tables(MemoryPointRow, parts)
