"""How work reached the device: calls that launch, the delay until it starts, and how much waits in queues.

As the launch statistics and the queue length of Holistic Trace Analysis: a stream's queue grows as a launch
is called and shrinks as the work starts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.analysis.recording import Recording
from hespas.analysis.table import Moments, Row, Table, joined_tables, table_of
from hespas.files.documents import Count, Figure
from hespas.graph.columns import FloatArray, IntArray, distinct_rows

__all__ = ["LaunchRow", "QueuePointRow", "QueueRow", "launches", "queue_points", "queues"]

_QUEUE_LIMIT = 1024
"""Launches that a stream of CUDA takes before a call blocks."""
_POINTS = 200


class LaunchRow(Row, frozen=True, kw_only=True):
    """Launches of an operation's work on one rank, where they were recorded. ``call_mean_ns`` is how long the
    calls took, ``delay_mean_ns`` how long after their return the work started (below 0: before it);
    ``short`` counts work that ran for less time than its launch took.
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


class QueueRow(Row, frozen=True, kw_only=True):
    """Work that was launched and had not started, over the time from the first launch to the last start;
    means and medians are over time. ``empty_share`` is the share of that time with an empty queue,
    ``blocked_ns`` how long it held as much as a stream takes (1,024).
    """

    rank: int
    stream: int
    count: Count
    mean_length: Figure
    median_length: Figure
    max_length: int
    empty_share: Figure
    blocked_ns: Figure


class QueuePointRow(Row, frozen=True, kw_only=True):
    """The length of a stream's queue at a moment."""

    rank: int
    stream: int
    time_ns: Figure
    length: int


def launches(recordings: Sequence[Recording]) -> Table[LaunchRow]:
    """Launches by rank and operation, most time in calls first. O(events log events)."""
    parts: list[Table[LaunchRow]] = []
    for recording in recordings:
        profile = recording.profile
        rows = recording.rows
        call = profile.launch_end_ns[rows] - profile.launch_start_ns[rows]
        known = ~np.isnan(call)
        rows, call, work = rows[known], call[known], recording.duration_ns[known]
        delay = recording.start_ns[known] - profile.launch_end_ns[rows]
        name = np.where(profile.op_row[rows] > 0, profile.op_row[rows], profile.kernel_row[rows])
        distinct, place = distinct_rows(name)
        groups = len(distinct)
        calls, delays = Moments.of(call, place, groups), Moments.of(delay, place, groups)
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
                work_mean_ns=Moments.of(work, place, groups).mean,
                short=np.bincount(place, work < call, groups),
            ).largest("call_total_ns")
        )
    return joined_tables(LaunchRow, parts)


def _changes(recording: Recording, events: IntArray) -> tuple[FloatArray, IntArray]:
    """When the length of the queue of some events changed, and what it was from then on; no rows where no
    launch is known.
    """
    launch = recording.profile.launch_start_ns[recording.rows[events]]
    known = ~np.isnan(launch)
    launch, start = launch[known], recording.start_ns[events[known]]
    time = np.concatenate((launch, start))
    step = np.repeat(np.array([1, -1], np.int64), len(launch))
    order = np.lexsort((-step, time))
    return time[order], np.cumsum(step[order])


def queues(recordings: Sequence[Recording]) -> Table[QueueRow]:
    """The queue of each known stream of each rank. O(events log events)."""
    rows: list[tuple[float, ...]] = []
    for recording in recordings:
        for stream, events in recording.streams():
            time, length = _changes(recording, events)
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
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    return table_of(QueueRow, **columns)


def queue_points(recordings: Sequence[Recording]) -> Table[QueuePointRow]:
    """The length of each queue over time, at no more than two hundred moments: the longest between them."""
    parts: list[Table[QueuePointRow]] = []
    for recording in recordings:
        for stream, events in recording.streams():
            time, length = _changes(recording, events)
            if not len(time):
                continue
            firsts = np.linspace(0, len(time), min(_POINTS, len(time)), endpoint=False).astype(np.int64)
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
