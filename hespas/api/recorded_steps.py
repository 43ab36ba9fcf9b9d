"""Steps of the recording behind a workload: what was recorded is a span, and a step is a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from hespas.converters.measured_ops import recorded_steps_of
from hespas.graph import Workload

__all__ = ["RecordedStep", "recorded_step_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """``count`` steps were recorded (0: a recording without annotated steps). ``step_ns`` is the median time
    of one over all ranks, ``period_ns`` the median time from the start of a step to that of the next (of a
    single step its length); NaN without steps and where times are estimated.
    """

    count: int
    step_ns: float
    period_ns: float


def recorded_step_of(workload: Workload, *, estimated: bool) -> RecordedStep | None:
    """The recorded steps that a workload is made of, None for one that is not made of a recording. With
    ``estimated`` its times are not as recorded.
    """
    count, spans, as_recorded = 0, list[float](), not estimated
    periods: list[float] = []
    found = [recorded_steps_of(graph.attachments, graph.name) for graph in workload.classes]
    if not found or any(steps is None for steps in found):
        return None
    ranks = np.bincount(workload.rank_class[workload.rank_class >= 0], minlength=len(found)).tolist()
    for graph, steps, times in zip(workload.classes, found, ranks, strict=True):
        if steps is not None and steps.is_annotated:
            count = max(count, steps.count)
            spans += steps.span_ns * times
            periods += [steps.period_ns] * times if steps.period_ns >= 0 else []
            as_recorded &= steps.describes(graph)
    return RecordedStep(
        count=count,
        step_ns=float(np.median(spans)) if spans and as_recorded else nan,
        period_ns=float(np.median(periods)) if periods and as_recorded else nan,
    )
