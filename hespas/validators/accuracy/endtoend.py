"""A step end to end: what the simulator says, against the time between first and last event, and the time
the device works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import nan

import numpy as np

from hespas.estimators import Estimator
from hespas.estimators.settings import for_job
from hespas.graph import Diagnostics, Profile
from hespas.graph.columns import FloatArray
from hespas.hardware import Device
from hespas.simulator import simulate
from hespas.validators.accuracy.cases import Cases, Prediction, covered_ns
from hespas.validators.accuracy.result import EndToEnd, Step
from hespas.validators.accuracy.sources import Source

__all__ = ["busy_ns", "end_to_end", "span_ns", "step_of"]


def span_ns(profile: Profile) -> float:
    """Median over runs of the time from the first start to the last end of any rank [ns]; NaN without events.

    Ranks of one profile share a clock; profiles without runs count as one. Ranks that are out of step ran it
    one after another, as devices without collectives do, or began to be recorded a run apart: each is a run
    of its own.
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    for run, start, end in _by_run(profile):
        spans.setdefault(run, []).append((float(start.min()), float(end.max())))
    times = [last - first for ranks in spans.values() for first, last in _in_step(ranks)]
    return float(np.median(times)) if times else float("nan")


def _in_step(ranks: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans of ranks joined where they share at least half of the shorter one."""
    found: list[tuple[float, float]] = []
    for first, last in sorted(ranks):
        before = found[-1] if found else (first, first)
        shared = min(before[1], last) - first
        if found and 2.0 * shared >= min(before[1] - before[0], last - first):
            found[-1] = (before[0], max(before[1], last))
        else:
            found.append((first, last))
    return found


def busy_ns(profile: Profile) -> float:
    """Median over ranks and runs of the time during which any event runs [ns]; NaN without events."""
    times: list[float] = []
    for _, start, end in _by_run(profile):
        order = np.argsort(start, kind="stable")
        times.append(covered_ns(start[order], end[order]))
    return float(np.median(times)) if times else float("nan")


def _by_run(profile: Profile) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Starts and ends of each run on each rank; events outside of any run count only where there is none."""
    inside = profile.run >= 0
    chosen = np.flatnonzero(inside) if bool(inside.any()) else np.arange(len(profile))
    rank, run = profile.rank[chosen].astype(np.int64), profile.run[chosen].astype(np.int64)
    keys, place = np.unique(rank << 32 | run & 0xFFFFFFFF, return_inverse=True)
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(len(keys) + 1))
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = chosen[order[first:last]]
        ends = profile.start_ns[rows] + np.maximum(profile.duration_ns[rows], 0.0)
        yield int(profile.run[rows[0]]), profile.start_ns[rows], ends


def end_to_end(
    source: Source, device: Device, models: Sequence[Estimator], diagnostics: Diagnostics
) -> Iterator[EndToEnd]:
    """Rows of one source. A program is simulated and set against the span and the busy time of its profile;
    so is a recorded graph, against those of its recorded steps. In any case the sum of what is predicted is
    set against the time measured for the same cases.
    """
    cases = source.cases
    shares = {said.estimator: _share_said(cases, said) for said in cases.predictions}
    step = step_of(source)
    if source.program is not None and step.is_simulated:
        for model in models:
            asked = for_job(model, source.num_ranks)
            estimates = [asked.estimate(graph, device) for graph in source.program.classes]
            done = simulate(source.program, estimates, diagnostics=diagnostics)
            for basis, measured in (("span", step.span_ns), ("busy", step.busy_ns)):
                yield EndToEnd(
                    workload=cases.workload,
                    source=cases.source if source.profile is None else source.profile.name,
                    hardware=cases.hardware,
                    estimator=model.name,
                    basis=basis,
                    predicted_ns=done.step_ns * _one_step(source),
                    measured_ns=measured,
                    is_lower_bound=done.is_lower_bound,
                    coverage=shares.get(model.name, nan),
                    steps=1.0,
                )
    mean_ns = cases.measured_ns if cases.mean_ns is None else cases.mean_ns
    for said in cases.predictions:
        known = np.isfinite(said.duration_ns) & (cases.measured_ns > 0)
        if known.any():
            yield EndToEnd(
                workload=cases.workload,
                source=cases.source,
                hardware=cases.hardware,
                estimator=said.estimator,
                basis="sum of operations",
                predicted_ns=float(said.duration_ns[known].sum()),
                measured_ns=float(mean_ns[known].sum()),
                is_lower_bound=not bool(known.all()),
                coverage=shares[said.estimator],
                steps=cases.steps,
            )


def step_of(source: Source) -> Step:
    """How long a step took; unknown for graphs that carry times and not when those were."""
    if source.profile is not None:
        return Step(
            span_ns=span_ns(source.profile),
            busy_ns=busy_ns(source.profile),
            is_simulated=source.program is not None,
        )
    if source.recorded is None:
        return Step(span_ns=nan, busy_ns=nan, is_simulated=False)
    return Step(
        span_ns=float(np.median(source.recorded.span_ns)),
        busy_ns=float(np.median(source.recorded.busy_ns)),
        is_simulated=source.program is not None,
    )


def _one_step(source: Source) -> float:
    """What one step is of all that is simulated: a recording may be of several, and of work beside them."""
    return 1.0 if source.recorded is None else source.recorded.inside / source.recorded.count


def _share_said(cases: Cases, said: Prediction) -> float:
    """The share of the device time that a prediction speaks of; NaN where no time was measured."""
    known = np.isfinite(said.duration_ns) & (cases.measured_ns > 0)
    total = float(cases.weights_ns.sum()) + cases.outside_ns
    return float(cases.weights_ns[known].sum()) / total if total else nan
