"""Where the time of each rank and step went: computing, communicating or copying beside that, or nothing.

As the temporal breakdown and the overlap analysis of Holistic Trace Analysis: an event counts while it runs,
moments at which several run count once, and computation comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

from hespas.analysis.recording import Kind, Recording
from hespas.analysis.table import Row, Table, table_from_rows
from hespas.files.documents import Figure

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
    """One row per rank, then its steps in order. O(events log events) for each rank and step."""
    rows: list[BreakdownRow] = []
    for recording in recordings:
        if not len(recording):
            continue
        rows.append(_row(recording, ALL_STEPS))
        run = recording.profile.run[recording.rows]
        steps = [_row(recording, step) for step in np.unique(run[run >= 0]).tolist()]
        rows.extend(
            replace(step, period_ns=after.start_ns - step.start_ns) for step, after in pairwise(steps)
        )
        rows.extend(steps[-1:])
    return table_from_rows(BreakdownRow, rows)


def _row(recording: Recording, step: int) -> BreakdownRow:
    chosen = np.ones(len(recording), np.bool_)
    if step != ALL_STEPS:
        chosen = recording.profile.run[recording.rows] == step
    start, end = float(recording.start_ns[chosen].min()), float(recording.end_ns[chosen].max())
    compute = recording.busy(Kind.COMPUTE, chosen=chosen)
    talk = recording.busy(Kind.COMMUNICATION, chosen=chosen)
    both = compute.joined(talk).length_ns
    busy = recording.busy(chosen=chosen).length_ns
    compute_ns, talk_ns = compute.length_ns, talk.length_ns
    exposed = both - compute_ns
    return BreakdownRow(
        rank=recording.rank,
        step=step,
        start_ns=start,
        span_ns=end - start,
        busy_ns=busy,
        compute_ns=compute_ns,
        communication_ns=talk_ns,
        exposed_communication_ns=exposed,
        memory_ns=recording.busy(Kind.MEMORY, chosen=chosen).length_ns,
        exposed_memory_ns=busy - both,
        idle_ns=(end - start) - busy,
        overlap=(talk_ns - exposed) / talk_ns if talk_ns else np.nan,
        period_ns=np.nan,
    )
