"""Where the time of each rank and step went: computing, communicating or copying beside that, or nothing.

As the temporal breakdown and the overlap analysis of Holistic Trace Analysis: an event counts while it runs,
moments at which several run count once, and computation comes first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hespas.analysis.intervals import Intervals
from hespas.analysis.recording import Kind, Recording
from hespas.analysis.table import Row, Table, joined_tables, table_of
from hespas.files.documents import Figure
from hespas.graph.columns import FloatArray

__all__ = ["ALL_STEPS", "BreakdownRow", "breakdown"]

ALL_STEPS = -1


class BreakdownRow(Row, frozen=True, kw_only=True):
    """One rank, as a whole (``step`` -1) or one step: what was launched in it, from the first start to the
    last end. ``span_ns`` = ``compute_ns`` + ``exposed_communication_ns`` + ``exposed_memory_ns`` +
    ``idle_ns``: exposed is what runs while nothing computes (copies: nor communicates). ``busy_ns`` is when
    anything ran; ``communication_ns`` and ``memory_ns`` count also what is hidden. ``overlap`` is the share
    of the communication that computation hides (0..1), ``period_ns`` from the start of a step to that of
    the next.
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


def breakdown(recordings: Sequence[Recording]) -> Table[BreakdownRow]:
    """One row per rank, then its steps in order. O(events log events)."""
    parts: list[Table[BreakdownRow]] = []
    for recording in recordings:
        if not len(recording):
            continue
        parts.append(_of_groups(recording, np.full(len(recording), ALL_STEPS)))
        parts.append(_of_groups(recording, recording.profile.run[recording.rows], least=0))
    return joined_tables(BreakdownRow, parts)


def _of_groups(
    recording: Recording, step: NDArray[np.integer], *, least: int = ALL_STEPS
) -> Table[BreakdownRow]:
    """One row for each number of ``step`` (one per event) from ``least`` on."""
    chosen = np.flatnonzero(step >= least)
    start, end = recording.start_ns[chosen], recording.end_ns[chosen]
    steps, group = np.unique(step[chosen], return_inverse=True)
    moments = len(steps)
    begin, until = np.full(moments, np.inf), np.full(moments, -np.inf)
    np.minimum.at(begin, group, start)
    np.maximum.at(until, group, end)
    span = until - begin
    # steps one behind the other on a clock of their own, so that one union is that of each
    at = np.append(0.0, np.cumsum(span))[:-1]
    shift = (at - begin)[group]

    def ran_ns(*kinds: Kind) -> FloatArray:
        mask = np.isin(recording.kind[chosen], kinds)
        return Intervals.union((start + shift)[mask], (end + shift)[mask]).within_ns(at, at + span)

    compute, talk = ran_ns(Kind.COMPUTE), ran_ns(Kind.COMMUNICATION)
    both, busy = ran_ns(Kind.COMPUTE, Kind.COMMUNICATION), ran_ns(*Kind)
    exposed = both - compute
    with np.errstate(invalid="ignore"):
        overlap = (talk - exposed) / talk
    return table_of(
        BreakdownRow,
        rank=np.full(moments, recording.rank),
        step=steps,
        start_ns=begin,
        span_ns=span,
        busy_ns=busy,
        compute_ns=compute,
        communication_ns=talk,
        exposed_communication_ns=exposed,
        memory_ns=ran_ns(Kind.MEMORY),
        exposed_memory_ns=busy - both,
        idle_ns=span - busy,
        overlap=overlap,
        period_ns=np.append(np.diff(begin), np.full(min(moments, 1), np.nan)),
    )
