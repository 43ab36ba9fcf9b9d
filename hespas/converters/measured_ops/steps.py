"""Steps of a recording: their times, as a document that stays with the graph, whose nodes have no starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose

import msgspec
import numpy as np

from hespas.graph import OpGraph
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["RECORDED_STEPS", "RecordedSteps", "recorded_steps", "recorded_steps_of"]

RECORDED_STEPS = "measured/steps.json"
"""The name of the document among the attachments of a graph."""

_LONGEST_NS = 2.0**65
"""From the first start that 64 bits hold to the last end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Per step of one rank the time from first start to last end, and that during which anything ran. Without
    annotated steps the whole recording is one. ``inside`` is the share of its device time in steps, 0..1.
    ``times_ns`` is the sum of the times in the graph that they stay with, -1 unknown. ``is_annotated`` is
    False where the recording has no steps and is counted as one.
    """

    span_ns: list[float]
    busy_ns: list[float]
    inside: float
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
    start_ns: FloatArray | IntArray, duration_ns: FloatArray | IntArray, step: SmallIntArray
) -> RecordedSteps | None:
    """The steps of one rank's events, None without any. ``step`` numbers them, -1 is outside; what lies
    outside counts only where there is no step. O(events log events).
    """
    if not len(start_ns):
        return None
    length = np.maximum(duration_ns, 0).astype(np.float64)
    begin = _since_first(start_ns)
    inside = step >= 0
    rows = np.flatnonzero(inside) if inside.any() else np.arange(len(step))
    order = rows[np.lexsort((begin[rows], step[rows]))]
    first = np.flatnonzero(np.append(True, np.diff(step[order]) != 0))
    spans: list[float] = []
    busy: list[float] = []
    for part in np.split(order, first[1:]):
        reached = np.maximum.accumulate(begin[part] + length[part])
        before = np.append(begin[part][0], reached[:-1])
        idle = float(np.maximum(begin[part] - before, 0.0).sum())
        spans.append(float(reached[-1] - begin[part][0]))
        busy.append(max(0.0, spans[-1] - idle))
    total = float(length.sum())
    share = float(length[rows].sum()) / total if total else 1.0
    annotated = bool(inside.any())
    return RecordedSteps(span_ns=spans, busy_ns=busy, inside=min(share, 1.0), is_annotated=annotated)


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
