"""Times of recorded steps. A graph has them as an attached document, because its nodes have no start
times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose

import msgspec
import numpy as np

from hespas.graph import RECORDED_STEPS, OpGraph, Profile, StepRanges
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = [
    "RecordedSteps",
    "recorded_steps",
    "recorded_steps_of",
    "recording_text",
    "steps_since",
]

_LONGEST_NS = 2.0**65
"""Maximum time between the first start and the last end of a recording, whose times fit 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Steps of one rank, recorded by a profiler.

    ``span_ns`` is the time of each step from its first start to its last end. ``busy_ns`` is the time in
    which any event ran. A recording without annotated steps counts as one step, and ``is_annotated`` is then
    False. ``inside`` is the share of device time in steps, 0..1. ``period_ns`` is the time from the start of
    a step to the start of the next one (-1: unknown). For a single step it is the length of the step together
    with its range on the host. ``times_ns`` is the sum of the node times in the attached graph (-1: unknown).
    """

    span_ns: list[float]
    busy_ns: list[float]
    inside: float
    period_ns: float = -1.0
    times_ns: float = -1.0
    is_annotated: bool = True

    def of(self, graph: OpGraph) -> RecordedSteps:
        """Return the recorded steps for a graph that was made from the recorded work."""
        return replace(self, times_ns=_known_ns(graph))

    def describes(self, graph: OpGraph) -> bool:
        """Return True if the times of ``graph`` are the recorded times and not estimates. Times may differ by
        rounding to whole nanoseconds.
        """
        rounded = 0.5 * float(np.abs(graph.executions).sum())
        known = _known_ns(graph)
        return self.times_ns < 0 or isclose(self.times_ns, known, rel_tol=1e-9, abs_tol=rounded)

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.span_ns)

    def document(self) -> bytes:
        """Return the recorded steps as JSON, for the attachment of a graph."""
        return msgspec.json.encode(self)


def _known_ns(graph: OpGraph) -> float:
    """Return the sum of all known times of a graph [ns]."""
    return float(np.nansum(graph.duration_ns * graph.executions))


def recorded_steps(
    start_ns: FloatArray | IntArray,
    duration_ns: FloatArray | IntArray,
    step: SmallIntArray,
    ranges: StepRanges | None = None,
) -> RecordedSteps | None:
    """Return the recorded steps of one rank from its events, None without events. O(events log events).

    ``step`` is the step of each event (-1: outside of any step). Events outside of steps are ignored, unless
    no event is in a step. ``ranges`` are the host ranges of the steps; their starts are relative to the first
    start of an event.
    """
    if not len(start_ns):
        return None
    length = np.maximum(duration_ns, 0).astype(np.float64)
    if start_ns.dtype.kind == "f":
        begin = (start_ns - start_ns.min()).astype(np.float64)
    else:  # the difference of two whole numbers may not fit their type
        whole = start_ns.astype(np.int64)
        begin = (whole.view(np.uint64) - whole.min().view(np.uint64)).astype(np.float64)
    inside = step >= 0
    rows = np.flatnonzero(inside) if inside.any() else np.arange(len(step))
    order = rows[np.lexsort((begin[rows], step[rows]))]
    first = np.flatnonzero(np.append(True, np.diff(step[order]) != 0))
    begins: list[float] = []
    spans: list[float] = []
    busy: list[float] = []
    for part in np.split(order, first[1:]):
        reached = np.maximum.accumulate(begin[part] + length[part])
        previous = np.append(begin[part][0], reached[:-1])
        idle = float(np.maximum(begin[part] - previous, 0.0).sum())
        begins.append(float(begin[part][0]))
        spans.append(float(reached[-1] - begin[part][0]))
        busy.append(max(0.0, spans[-1] - idle))
    total = float(length.sum())
    share = float(length[rows].sum()) / total if total else 1.0
    annotated = bool(inside.any())
    number = step[order[first]]
    steps = StepRanges.empty() if ranges is None else ranges
    if len(number) == 1:
        of_step = steps.number == number[0]
        step_begin = float(steps.start_ns[of_step].min(initial=begins[0]))
        step_end = steps.start_ns[of_step] + steps.duration_ns[of_step]
        period_ns = float(step_end.max(initial=begins[0] + spans[0])) - step_begin
    else:
        of_first, of_last = (steps.start_ns[steps.number == end] for end in (number[0], number[-1]))
        if len(of_first) and len(of_last):
            # The time includes steps between the two that were not recorded.
            period = float(of_last.min() - of_first.min()) / int(number[-1] - number[0])
        else:
            period = (max(begins) - min(begins)) / (len(number) - 1)
        period_ns = period if period > 0 else -1.0
    return RecordedSteps(
        span_ns=spans,
        busy_ns=busy,
        inside=min(share, 1.0),
        period_ns=period_ns,
        is_annotated=annotated,
    )


def steps_since(profile: Profile, rows: IntArray) -> StepRanges:
    """Return the step ranges of a profile, with starts relative to the first of the events ``rows``."""
    origin_ns = profile.start_ns[rows].min(initial=np.inf)
    return replace(profile.steps, start_ns=profile.steps.start_ns - origin_ns)


def recording_text(count: int, period_text: str) -> str:
    """Return text about the recorded steps for a summary line: their number and their period (empty:
    unknown).
    """
    if count == 1:
        return f"1 recorded step of {period_text}" if period_text else "1 recorded step"
    return f"{count:,} recorded steps" + (f", a step every {period_text}" if period_text else "")


def recorded_steps_of(attachments: Mapping[str, bytes], name: str) -> RecordedSteps | None:
    """Return the recorded steps in the ``attachments`` of the graph ``name``, None if there are none.

    Raises ``FormatError`` for a malformed document.
    """
    document = attachments.get(RECORDED_STEPS)
    if document is None:
        return None
    try:
        steps = msgspec.json.decode(document, type=RecordedSteps)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _malformed(name, str(error)) from error
    times = [*steps.span_ns, *steps.busy_ns]
    if not steps.span_ns or len(steps.span_ns) != len(steps.busy_ns):
        counts = f"{len(steps.span_ns)} lengths of steps and {len(steps.busy_ns)} busy times"
        raise _malformed(name, f"{counts}, expected one of each per step")
    if not 0 <= steps.inside <= 1:
        raise _malformed(name, f"the share of work inside steps is {steps.inside:g}, expected 0 to 1")
    if steps.period_ns != -1:
        times.append(steps.period_ns)
    wrong = next((time_ns for time_ns in times if not 0 <= time_ns <= _LONGEST_NS), None)
    if wrong is not None:
        raise _malformed(name, f"a time is {wrong:g} ns, expected 0 to {_LONGEST_NS:g}")
    for number, (span, busy) in enumerate(zip(steps.span_ns, steps.busy_ns, strict=True)):
        if busy > span:
            fact = f"busy for {busy:g} ns, longer than its {span:g} ns"
            raise _malformed(name, f"step {number} is {fact}")
    return steps


def _malformed(name: str, reason: str) -> FormatError:
    return FormatError(
        f"the recorded steps are malformed: {reason}",
        path=name,
        position=f"attachment {RECORDED_STEPS}",
        hint="convert the traces again",
    )
