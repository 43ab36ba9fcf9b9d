"""Steps of a recording: their times, as a document that stays with the graph, whose nodes have no starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose

import msgspec
import numpy as np

from hespas.graph import OpGraph, Profile, StepRanges
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = [
    "RECORDED_STEPS",
    "RecordedSteps",
    "recorded_steps",
    "recorded_steps_of",
    "recording_text",
    "steps_since",
]

RECORDED_STEPS = "measured/steps.json"
"""The name of the document among the attachments of a graph."""

_LONGEST_NS = 2.0**65
"""From the first start that 64 bits hold to the last end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Per step of one rank the time from first start to last end, and that during which anything ran. Without
    annotated steps the whole recording is one. ``inside`` is the share of its device time in steps, 0..1.
    ``period_ns`` is from the start of a step to that of the next, of a single step its length with its range
    on the host; -1 unknown. ``times_ns`` is the sum of the times in the graph that they stay with, -1
    unknown. ``is_annotated`` is False where the recording has no steps and is counted as one.
    """

    span_ns: list[float]
    busy_ns: list[float]
    inside: float
    period_ns: float = -1.0
    times_ns: float = -1.0
    is_annotated: bool = True

    def of(self, graph: OpGraph) -> RecordedSteps:
        """The same, to stay with a graph of what was recorded."""
        return replace(self, times_ns=_known_ns(graph))

    def describes(self, graph: OpGraph) -> bool:
        """Return True if a graph has the times that were recorded, and not those of an estimate. A trace
        rounds the time of each operation to whole nanoseconds.
        """
        rounded = 0.5 * float(np.abs(graph.multiplicity).sum())
        known = _known_ns(graph)
        return self.times_ns < 0 or isclose(self.times_ns, known, rel_tol=1e-9, abs_tol=rounded)

    @property
    def count(self) -> int:
        """How many steps there are."""
        return len(self.span_ns)

    def document(self) -> bytes:
        """The steps as JSON."""
        return msgspec.json.encode(self)


def _known_ns(graph: OpGraph) -> float:
    """The sum of all times that are known."""
    return float(np.nansum(graph.duration_ns * graph.multiplicity))


def recorded_steps(
    start_ns: FloatArray | IntArray,
    duration_ns: FloatArray | IntArray,
    step: SmallIntArray,
    ranges: StepRanges | None = None,
) -> RecordedSteps | None:
    """Return the steps of one rank's events, None without any. ``step`` numbers them, -1 is outside; events
    outside count only where there is no step. Starts in ``ranges`` count from the first start of an event.
    O(events log events).
    """
    if not len(start_ns):
        return None
    length = np.maximum(duration_ns, 0).astype(np.float64)
    begin = _since_first(start_ns)
    inside = step >= 0
    rows = np.flatnonzero(inside) if inside.any() else np.arange(len(step))
    order = rows[np.lexsort((begin[rows], step[rows]))]
    first = np.flatnonzero(np.append(True, np.diff(step[order]) != 0))
    begins: list[float] = []
    spans: list[float] = []
    busy: list[float] = []
    for part in np.split(order, first[1:]):
        reached = np.maximum.accumulate(begin[part] + length[part])
        before = np.append(begin[part][0], reached[:-1])
        idle = float(np.maximum(begin[part] - before, 0.0).sum())
        begins.append(float(begin[part][0]))
        spans.append(float(reached[-1] - begin[part][0]))
        busy.append(max(0.0, spans[-1] - idle))
    total = float(length.sum())
    share = float(length[rows].sum()) / total if total else 1.0
    annotated = bool(inside.any())
    return RecordedSteps(
        span_ns=spans,
        busy_ns=busy,
        inside=min(share, 1.0),
        period_ns=_period_ns(step[order[first]], begins, spans, ranges),
        is_annotated=annotated,
    )


def _period_ns(
    number: SmallIntArray, begin_ns: list[float], span_ns: list[float], ranges: StepRanges | None
) -> float:
    """Return the time from the start of a step to that of the next, of a single step its length; -1 unknown.
    Steps start with their ranges where these are known, else with their first event.
    """
    known = StepRanges.empty() if ranges is None else ranges
    if len(number) == 1:
        rows = known.number == number[0]
        begin = float(known.start_ns[rows].min(initial=begin_ns[0]))
        end = known.start_ns[rows] + known.duration_ns[rows]
        return float(end.max(initial=begin_ns[0] + span_ns[0])) - begin
    first, last = (known.start_ns[known.number == each] for each in (number[0], number[-1]))
    if len(first) and len(last):
        # Steps between the two that were not recorded took their time too.
        period = float(last.min() - first.min()) / int(number[-1] - number[0])
    else:
        period = (max(begin_ns) - min(begin_ns)) / (len(number) - 1)
    return period if period > 0 else -1.0


def steps_since(profile: Profile, rows: IntArray) -> StepRanges:
    """Return the ranges of steps of a profile, with starts counted from the first of the events ``rows``."""
    origin_ns = profile.start_ns[rows].min(initial=np.inf)
    return replace(profile.steps, start_ns=profile.steps.start_ns - origin_ns)


def recording_text(count: int, period_text: str) -> str:
    """Return the number of recorded steps and how often one starts (empty: unknown) for a summary line."""
    if count == 1:
        return f"1 recorded step of {period_text}" if period_text else "1 recorded step"
    return f"{count:,} recorded steps" + (f", a step every {period_text}" if period_text else "")


def _since_first(start_ns: FloatArray | IntArray) -> FloatArray:
    """Time since the first start, also where whole numbers lie further apart than fit their type."""
    since: FloatArray
    if start_ns.dtype.kind == "f":
        since = (start_ns - start_ns.min()).astype(np.float64)
    else:
        whole = start_ns.astype(np.int64)
        since = (whole.view(np.uint64) - whole.min().view(np.uint64)).astype(np.float64)
    return since


def recorded_steps_of(attachments: Mapping[str, bytes], name: str) -> RecordedSteps | None:
    """The steps that stayed with a graph ``name``, None where there are none. Raises ``FormatError`` for a
    document that is none of ours.
    """
    document = attachments.get(RECORDED_STEPS)
    if document is None:
        return None
    try:
        found = msgspec.json.decode(document, type=RecordedSteps)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _broken(name, str(error)) from error
    times = [*found.span_ns, *found.busy_ns]
    if not found.span_ns or len(found.span_ns) != len(found.busy_ns) or not 0 <= found.inside <= 1:
        raise _broken(name, "spans, busy times and their share do not fit together")
    if found.period_ns != -1:
        times.append(found.period_ns)
    if not all(0 <= each <= _LONGEST_NS for each in times):
        raise _broken(name, "a time is negative, or longer than any")
    if any(busy > span for span, busy in zip(found.span_ns, found.busy_ns, strict=True)):
        raise _broken(name, "a step is busy for longer than it is")
    return found


def _broken(name: str, why: str) -> FormatError:
    return FormatError(
        f"the recorded steps are malformed: {why}",
        path=name,
        position=f"attachment {RECORDED_STEPS}",
        hint="convert the traces again",
    )
