"""Why nothing ran: each gap on a stream, and each on the device as a whole, by what it waited for.

The rules are those of Holistic Trace Analysis (host wait, then kernel wait below a threshold), and two of its
answers are looked at further: of its host wait, gaps that passed mostly behind the call that launched are
launch delay; of what is left, a gap that ends as an event of another stream ends has waited for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hespas.analysis.recording import Kind, Recording
from hespas.analysis.table import Moments, Row, Table, joined_tables, table_of
from hespas.files.documents import Count, Figure
from hespas.graph.columns import FloatArray, IntArray, distinct_rows

__all__ = ["KERNEL_DELAY_NS", "WHOLE_DEVICE", "Cause", "GapRow", "IdleRow", "gaps_before", "idle"]

KERNEL_DELAY_NS = 30_000.0
"""Gaps below this are the device's own delay between kernels that were launched in time: the threshold that
Holistic Trace Analysis uses.
"""
WHOLE_DEVICE = -1


class Cause(IntEnum):
    """What a gap waited for."""

    HOST = 0
    """The event behind the gap was launched when the one before had ended, and most of the gap was over."""
    LAUNCH = 1
    """It was launched when the one before had ended, and most of the gap lies behind that call."""
    KERNEL_DELAY = 2
    """It was launched in time, and the gap is short."""
    COMMUNICATION = 3
    """It was launched in time, and started as communication on another stream ended."""
    OTHER_STREAM = 4
    """The same, with a kernel or a copy of another stream."""
    OTHER = 5
    """It was launched in time, and nothing tells what kept it."""
    UNKNOWN = 6
    """Its launch is not in the recording."""


_WORDS = (
    "host-bound",
    "launch delay",
    "kernel delay",
    "communication",
    "other stream",
    "other",
    "launch unknown",
)


class IdleRow(Row, frozen=True, kw_only=True):
    """The gaps of one cause between the events of a stream (``stream`` -1: of the device, when no stream ran
    anything). ``share`` is of all gaps of the stream (0..1). ``before_launch_ns`` is the part of
    ``total_ns`` before the launch of the next event was even called.
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


class GapRow(Row, frozen=True, kw_only=True):
    """Gaps of the device by cause and by what ran after them; ``operation`` is the one that ended the gap,
    ``kernel`` where no operation is known.
    """

    rank: int
    cause: str
    operation: str
    count: Count
    total_ns: Figure
    share: Figure
    max_ns: Figure


def idle(recordings: Sequence[Recording]) -> Table[IdleRow]:
    """Gaps of each rank: of the device, then of the streams that are known. O(events log events)."""
    parts: list[Table[IdleRow]] = []
    for recording in recordings:
        if not len(recording):
            continue
        ends = np.sort(recording.end_ns)
        kind_at_end = recording.kind[np.argsort(recording.end_ns, kind="stable")]
        whole = np.arange(len(recording))
        parts.append(_of_stream(recording, whole, WHOLE_DEVICE, ends, kind_at_end))
        parts.extend(
            _of_stream(recording, events, number, ends, kind_at_end) for number, events in recording.streams()
        )
    return joined_tables(IdleRow, parts)


def _of_stream(
    recording: Recording, events: IntArray, stream: int, ends: FloatArray, kind_at_end: NDArray[np.uint8]
) -> Table[IdleRow]:
    behind, length = _gaps(recording, events)
    launch = recording.profile.launch_start_ns[recording.rows[behind]]
    start = recording.start_ns[behind]
    cause = _causes(start, length, launch, ends, kind_at_end)
    after_call = (cause == Cause.HOST) | (cause == Cause.LAUNCH)
    late = np.where(after_call, np.minimum(launch, start) - (start - length), 0.0)
    moments = Moments.of(length, cause, len(Cause))
    used = np.flatnonzero(moments.count)
    order = used[np.argsort(-moments.total[used], kind="stable")]
    places: list[int] = order.tolist()
    with np.errstate(invalid="ignore", divide="ignore"):
        return table_of(
            IdleRow,
            rank=np.full(len(order), recording.rank),
            stream=np.full(len(order), stream),
            cause=[_WORDS[place] for place in places],
            count=moments.count[order],
            total_ns=moments.total[order],
            share=moments.total[order] / moments.total.sum(),
            mean_ns=moments.mean[order],
            max_ns=moments.most[order],
            before_launch_ns=np.bincount(cause, late, len(Cause))[order],
        )


def _gaps(recording: Recording, events: IntArray) -> tuple[IntArray, FloatArray]:
    """Which of some events (in order of start) have a gap before them, and how long that is."""
    start, end = recording.start_ns[events], recording.end_ns[events]
    length = start[1:] - np.maximum.accumulate(end)[:-1] if len(events) else np.empty(0)
    behind = np.flatnonzero(length > 0)
    return events[behind + 1], length[behind]


def _causes(
    start: FloatArray,
    length: FloatArray,
    launch: FloatArray,
    ends: FloatArray,
    kind_at_end: NDArray[np.uint8],
) -> IntArray:
    """The cause of each gap that ends at ``start``; ``ends`` are the ends of all events of the rank, sorted.

    The last end before the gap's own end is of another stream where it lies inside the gap.
    """
    began = start - length
    last = np.maximum(np.searchsorted(ends, start, side="right") - 1, 0)
    waited = (ends[last] > began) & (start - ends[last] < KERNEL_DELAY_NS)
    talked = kind_at_end[last] == Kind.COMMUNICATION
    return np.select(
        [
            np.isnan(launch),
            (launch > began) & (start - launch > launch - began),
            launch > began,
            length < KERNEL_DELAY_NS,
            waited & talked,
            waited,
        ],
        [
            Cause.UNKNOWN,
            Cause.LAUNCH,
            Cause.HOST,
            Cause.KERNEL_DELAY,
            Cause.COMMUNICATION,
            Cause.OTHER_STREAM,
        ],
        Cause.OTHER,
    ).astype(np.int64)


def gaps_before(recordings: Sequence[Recording]) -> Table[GapRow]:
    """Gaps of the device by cause and the operation that ended them, most time first in each rank."""
    parts: list[Table[GapRow]] = []
    for recording in recordings:
        behind, length = _gaps(recording, np.arange(len(recording)))
        if not len(behind):
            continue
        profile = recording.profile
        rows, start = recording.rows[behind], recording.start_ns[behind]
        order = np.argsort(recording.end_ns, kind="stable")
        launch = profile.launch_start_ns[rows]
        cause = _causes(start, length, launch, recording.end_ns[order], recording.kind[order])
        name = np.where(profile.op_row[rows] > 0, profile.op_row[rows], profile.kernel_row[rows])
        distinct, place = distinct_rows(cause, name)
        moments = Moments.of(length, place, len(distinct))
        parts.append(
            table_of(
                GapRow,
                rank=np.full(len(distinct), recording.rank),
                cause=[_WORDS[code] for code, _ in distinct],
                operation=[profile.strings[row] for _, row in distinct],
                count=moments.count,
                total_ns=moments.total,
                share=moments.total / moments.total.sum(),
                max_ns=moments.most,
            ).largest("total_ns")
        )
    return joined_tables(GapRow, parts)
