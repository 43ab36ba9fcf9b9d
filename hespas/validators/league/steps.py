"""The step of a published run by the simulator, and its parts by component.

Once the pipeline is full, each group of micro-batches adds the same time to a step. So steps of few
micro-batches are simulated and longer ones extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.graph import Diagnostics, Timeline
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.graph.timeline import united
from hespas.simulator import Simulation, Simulator, simulate
from hespas.simulator.schedule import covered
from hespas.simulator.streams import COMPUTE
from hespas.validators.league import parts
from hespas.validators.league.parts import COMPONENTS, components_of
from hespas.validators.league.runs import TimedRun

__all__ = ["Step", "step_of"]

_FEW = 4
"""Micro-batches of a step without a pipeline behind which each adds the same time."""
_EXACT = 1e-6
"""Relative differences of times below are errors of rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step [ns] and its parts by component [ns], shape ``(components,)``: ``path_ns`` of the critical path,
    which crosses stages, and ``spent_ns`` of the rank that is the last to finish, with its idle time as its
    bubble. Both are 0 or more and sum to the time.
    """

    time_ns: float
    path_ns: FloatArray
    spent_ns: FloatArray


def step_of(timed: TimedRun, diagnostics: Diagnostics, simulator: Simulator | None = None) -> Step:
    """Return the step that :func:`hespas.simulator.simulate` gives a run. O(nodes of few micro-batches)."""
    count, pp = timed.micro_batches, timed.settings.layout.pp
    fewer = _FEW if pp == 1 else pp + count % pp
    more = fewer + pp
    if count <= more + pp:
        return _account(_simulated(timed, count, diagnostics, simulator))
    longer = _simulated(timed, more, diagnostics, simulator)
    last = int(np.argmax(longer.timeline.finish_ns))
    high = _account(longer, last)
    low = _account(_simulated(timed, fewer, diagnostics, simulator), last)
    groups = (count - more) / pp
    time_ns = high.time_ns + groups * (high.time_ns - low.time_ns)
    return Step(
        time_ns,
        _settled(high.path_ns + groups * (high.path_ns - low.path_ns), time_ns),
        _settled(high.spent_ns + groups * (high.spent_ns - low.spent_ns), time_ns),
    )


def _simulated(
    timed: TimedRun, count: int, diagnostics: Diagnostics, simulator: Simulator | None
) -> Simulation:
    return simulate(
        timed.workload(count), device=timed.settings.device, simulator=simulator, diagnostics=diagnostics
    )


def _settled(parts_ns: FloatArray, time_ns: float) -> FloatArray:
    """Return parts with none below zero, which differences of two steps may have, that sum to the time."""
    kept = np.maximum(parts_ns, 0.0)
    whole = float(kept.sum())
    return kept * (time_ns / whole) if whole > 0 else kept


def _account(done: Simulation, rank: int = -1) -> Step:
    """Return a simulated step; ``rank`` is the one whose parts are shown (-1: the last to finish)."""
    spans = _spans(done)
    if rank < 0:
        rank = int(np.argmax(done.timeline.finish_ns))
    shown = done.timeline.rank == done.timeline.shown_by[rank]
    return Step(
        done.step_ns, _path(spans, done.critical_path, done.step_ns), _spent(spans, shown, done.step_ns)
    )


class _Spans(NamedTuple):
    """A timeline with, for each span, the component of its node and the time of its node alone [ns]."""

    timeline: Timeline
    component: IntArray
    alone_ns: FloatArray


def _spans(done: Simulation) -> _Spans:
    timeline, workload = done.timeline, done.workload
    component = np.full(len(timeline.node), parts.BUBBLE, np.int64)
    alone_ns = np.zeros(len(timeline.node))
    classes = workload.rank_class[timeline.rank]
    for number, graph in enumerate(workload.classes):
        mine = np.flatnonzero(classes == number)
        node = timeline.node[mine]
        component[mine] = components_of(graph)[node]
        alone_ns[mine] = graph.duration_ns[node]
    return _Spans(timeline, component, alone_ns)


def _sums(component: IntArray, time_ns: FloatArray) -> FloatArray:
    return np.bincount(component, time_ns, len(COMPONENTS)).astype(np.float64)


def _own(lasts_ns: FloatArray, alone_ns: FloatArray) -> FloatArray:
    """Return the time of kernels without what communication beside them adds. Times are differences of sums,
    so that a kernel may seem slightly longer than it is.
    """
    return np.where(lasts_ns <= alone_ns * (1.0 + _EXACT), lasts_ns, alone_ns)


def _path(spans: _Spans, path: IntArray, time_ns: float) -> FloatArray:
    """Return the time that the critical path spends in each component: from the start of a span to that of
    the next.
    """
    start_ns = spans.timeline.start_ns[path]
    spent_ns = np.diff(np.append(start_ns, time_ns))
    kernel = spans.timeline.resource[path] == COMPUTE
    own_ns = np.where(kernel, _own(spent_ns, spans.alone_ns[path]), spent_ns)
    found = _sums(spans.component[path], own_ns)
    found[parts.OVERLAP] += float((spent_ns - own_ns).sum())
    found[parts.BUBBLE] += float(start_ns[0]) if len(path) else time_ns
    return found


def _spent(spans: _Spans, shown: BoolArray, time_ns: float) -> FloatArray:
    """Return the time of one rank by component: its kernels, communication and copies while none of them
    runs, waits for the host that launches the next of these, and waits for other ranks.
    """
    timeline = spans.timeline
    start_ns, end_ns = timeline.start_ns + timeline.wait_ns, timeline.end_ns
    kernels = np.flatnonzero(shown & (timeline.resource == COMPUTE))
    lasts_ns = end_ns[kernels] - start_ns[kernels]
    own_ns = _own(lasts_ns, spans.alone_ns[kernels])
    found = _sums(spans.component[kernels], own_ns)
    found[parts.OVERLAP] += float((lasts_ns - own_ns).sum())
    talks = np.flatnonzero(shown & (timeline.resource != COMPUTE) & (spans.component != parts.HOST))
    talks = talks[np.argsort(start_ns[talks], kind="stable")]
    until_ns = end_ns[talks]
    before_ns = np.maximum.accumulate(np.append(0.0, until_ns))[:-1]
    from_ns = np.minimum(np.maximum(start_ns[talks], before_ns), until_ns)
    busy = united(start_ns[kernels], end_ns[kernels])
    beside_ns = covered(*busy, until_ns) - covered(*busy, from_ns)
    found += _sums(spans.component[talks], np.maximum(until_ns - from_ns - beside_ns, 0.0))
    works = np.concatenate([kernels, talks])
    found[parts.HOST] += _waits_for_host(spans, works, united(start_ns[works], end_ns[works]))
    found[parts.BUBBLE] += max(time_ns - float(found.sum()), 0.0)
    return _settled(found, time_ns)


def _waits_for_host(spans: _Spans, works: IntArray, busy: tuple[FloatArray, FloatArray]) -> float:
    """Return the idle time before work that starts when the host has launched it."""
    cause = spans.timeline.cause[works]
    launched = (cause >= 0) & (spans.component[cause] == parts.HOST)
    starts_ns = np.unique(spans.timeline.start_ns[works[launched]])
    from_ns, until_ns = busy
    idle_ns = from_ns - np.append(0.0, until_ns[:-1])[: len(from_ns)]
    return float(idle_ns[np.isin(from_ns, starts_ns)].sum())
