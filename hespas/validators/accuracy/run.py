"""Compares estimators with measurements: the function behind ``hespas-validate accuracy``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import nan

import numpy as np

from hespas.estimators import Estimator, load_estimator
from hespas.estimators.registry import estimate_with, for_job
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device
from hespas.simulator import simulate
from hespas.validators.accuracy.baselines import fitted_baselines, naive_ns
from hespas.validators.accuracy.cases import Cases, Prediction, covered_ns
from hespas.validators.accuracy.lint import lint_cases, lint_profile
from hespas.validators.accuracy.result import Accuracy, EndToEnd, Step
from hespas.validators.accuracy.sources import HOLDS_NO_PROGRAM, Source, by_device, sources_of
from hespas.validators.accuracy.summaries import accuracy_of_cases, trends

__all__ = ["accuracy", "busy_ns", "end_to_end", "span_ns"]


@np.errstate(over="ignore", invalid="ignore")  # figures past what a float holds are infinite or unknown
def accuracy(
    profiles: Sequence[Profile | Workload],
    hardware: Sequence[str],
    estimators: Sequence[str] = ("composite",),
    *,
    workload: Workload | None = None,
    inputs: Sequence[str] = (),
    diagnostics: Diagnostics | None = None,
) -> Accuracy:
    """How far each estimator is from what was measured, always beside the naive baselines and the noise.

    ``hardware`` are names or files of the devices the profiles were measured on. Without ``workload`` each
    profile is compared with itself: see :func:`~hespas.validators.accuracy.sources.sources_of`. Raises
    ``UsageError`` for unknown names and for profiles nothing can be compared with.
    """
    if not profiles or not hardware:
        raise UsageError("nothing to compare", hint="give at least one profile and one device")
    found = diagnostics if diagnostics is not None else Diagnostics()
    devices = {name: load_device(name) for name in hardware}
    models = [load_estimator(spelling) for spelling in estimators]
    sources: list[tuple[Source, str]] = []
    names = _told_apart(each.name for each in profiles)
    profiles = [replace(each, name=name) for each, name in zip(profiles, names, strict=True)]
    for place, profile in enumerate(profiles):
        parts = by_device(profile, devices, found)
        profiles[place] = parts[0][0] if len(parts) == 1 else profile
        for part, name in parts:
            sources.extend((each, name) for each in sources_of(part, workload, devices[name].name, found))
    if not any(len(source.cases) for source, _ in sources):
        raise _nothing_compared(profiles, [source for source, _ in sources], found)
    sources = _sources_apart(sources)
    cases = _predicted(sources, devices, models, found)
    _tell_silent(cases, models, found)
    runs = tuple(
        run
        for each, (source, name) in zip(cases, sources, strict=True)
        for run in end_to_end(replace(source, cases=each), devices[name], models, found)
    )
    lint = [finding for each in profiles if isinstance(each, Profile) for finding in lint_profile(each)]
    for each, (source, name) in zip(cases, sources, strict=True):
        lint.extend(lint_cases(each, _naive(source, devices[name]), source.times, devices[name]))
    done = accuracy_of_cases(
        cases,
        inputs,
        [model.name for model in models],
        found,
        [device.name for device in devices.values()],
    )
    return replace(
        done,
        end_to_end=runs,
        trends=tuple(trends(runs)),
        coverage={
            source.cases.source: source.coverage for source, _ in sources if source.coverage is not None
        },
        lint=tuple(lint),
        joins={source.cases.source: source.joins for source, _ in sources if source.joins},
        steps={source.cases.source: _step_of(source) for source, _ in sources},
        programs={source.cases.source: source.program for source, _ in sources if source.program is not None},
    )


def _nothing_compared(
    profiles: Sequence[Profile | Workload], sources: Sequence[Source], found: Diagnostics
) -> UsageError:
    if all(isinstance(each, Workload) for each in profiles):
        return UsageError(
            "a program without measured times is nothing to compare with",
            path=profiles[0].name,
            hint="give it with `workload`, and the profile of its run with `measured`",
        )
    if any(source.coverage is not None for source in sources) or not sources:
        from hespas.validators.accuracy.matching import NO_MODULE, NO_NAMES, WITH_NAMES

        hint = HOLDS_NO_PROGRAM if NO_MODULE in found.counts() else "is it the program that ran?"
        if NO_NAMES in found.counts():
            hint = f"its operations have no names: {WITH_NAMES}"
        return UsageError("no event of the profiles belongs to the program", path=profiles[0].name, hint=hint)
    return UsageError(
        "no operation of the profiles took any time", hint="are the durations known, and above 0?"
    )


def _told_apart(names: Iterable[str]) -> list[str]:
    """Names, with a number behind one that came before: figures are told by them."""
    counts = Counter[str]()
    found: list[str] = []
    for name in names:
        counts[name] += 1
        found.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return found


def _sources_apart(sources: Sequence[tuple[Source, str]]) -> list[tuple[Source, str]]:
    """The same for sources: graphs that carry times are called as their rank classes are."""
    names = _told_apart(source.cases.source for source, _ in sources)
    return [
        (replace(source, cases=replace(source.cases, source=name)), device)
        for (source, device), name in zip(sources, names, strict=True)
    ]


def _naive(source: Source, device: Device) -> FloatArray:
    """The data-sheet roofline of one execution of each case [ns]."""
    return naive_ns(source.graph, device, num_ranks=source.num_ranks)[source.node]


def _predicted(
    sources: Sequence[tuple[Source, str]],
    devices: dict[str, Device],
    models: Sequence[Estimator],
    found: Diagnostics,
) -> list[Cases]:
    """The cases of each source with what the estimators and the baselines say."""
    cases: list[Cases] = []
    for source, name in sources:
        predictions = [_prediction(model, source, devices[name], found) for model in models]
        cases.append(source.cases.with_predictions(predictions))
    for name, device in devices.items():
        places = [place for place, (_, each) in enumerate(sources) if each == name]
        naive = [_naive(sources[place][0], device) for place in places]
        if not places:
            continue
        times = [sources[place][0].times for place in places]
        rows = fitted_baselines([cases[place] for place in places], naive, times)
        for place, baselines in zip(places, rows, strict=True):
            cases[place] = cases[place].with_predictions(baselines)
    return cases


def _tell_silent(cases: Sequence[Cases], models: Sequence[Estimator], found: Diagnostics) -> None:
    """Warn of sources that an estimator says nothing of at all: they have no errors."""
    names = {model.name for model in models}
    for each in cases:
        for prediction in each.predictions:
            if prediction.estimator in names and len(each) and not np.isfinite(prediction.duration_ns).any():
                found.warning(
                    "accuracy.nothing-estimated",
                    each.source,
                    f"{prediction.estimator} gives no time of any of its {len(each):,} cases: nothing is "
                    "compared",
                )


def _prediction(model: Estimator, source: Source, device: Device, found: Diagnostics) -> Prediction:
    estimated = estimate_with(for_job(model, source.num_ranks), source.graph, device, found)
    node, times = source.node, source.times
    return Prediction(
        estimator=model.name,
        duration_ns=estimated.duration_ns[node] * times,
        low_ns=estimated.low_ns[node] * times,
        high_ns=estimated.high_ns[node] * times,
    )


# A step end to end: what the simulator says, against the time between first and last event, and the time
# the device works.


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
    shares = {prediction.estimator: _covered_share(cases, prediction) for prediction in cases.predictions}
    step = _step_of(source)
    if source.program is not None and step.is_simulated:
        for model in models:
            asked = for_job(model, source.num_ranks)
            estimates = [estimate_with(asked, graph, device) for graph in source.program.classes]
            done = simulate(source.program, estimates, device=device, diagnostics=diagnostics)
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
    for prediction in cases.predictions:
        known = np.isfinite(prediction.duration_ns) & (cases.measured_ns > 0)
        if known.any():
            yield EndToEnd(
                workload=cases.workload,
                source=cases.source,
                hardware=cases.hardware,
                estimator=prediction.estimator,
                basis="sum of operations",
                predicted_ns=float(prediction.duration_ns[known].sum()),
                measured_ns=float(mean_ns[known].sum()),
                is_lower_bound=not bool(known.all()),
                coverage=shares[prediction.estimator],
                steps=cases.steps,
            )


def _step_of(source: Source) -> Step:
    """How long a step took; unknown for graphs that carry times and not when those were."""
    span, busy = nan, nan
    if source.profile is not None:
        span, busy = span_ns(source.profile), busy_ns(source.profile)
    elif source.recorded is not None:
        span = float(np.median(source.recorded.span_ns))
        busy = float(np.median(source.recorded.busy_ns))
    is_timed = source.profile is not None or source.recorded is not None
    return Step(span_ns=span, busy_ns=busy, is_simulated=is_timed and source.program is not None)


def _one_step(source: Source) -> float:
    """What one step is of all that is simulated: a recording may be of several, and of work beside them."""
    return 1.0 if source.recorded is None else source.recorded.inside / source.recorded.count


def _covered_share(cases: Cases, prediction: Prediction) -> float:
    """The share of the device time that a prediction covers; NaN where no time was measured."""
    known = np.isfinite(prediction.duration_ns) & (cases.measured_ns > 0)
    total = float(cases.weights_ns.sum()) + cases.outside_ns
    return float(cases.weights_ns[known].sum()) / total if total else nan
