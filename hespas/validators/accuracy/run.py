"""Comparison of estimators with measured profiles: the function behind ``hespas-validate accuracy``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import nan

import numpy as np

from hespas.estimators import Estimator, load_estimator
from hespas.estimators.configuration import default_configuration
from hespas.estimators.interface import CasePrediction, estimate_with, for_job
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device
from hespas.simulator import simulate
from hespas.validators.accuracy.baselines import fitted_baselines, naive_ns
from hespas.validators.accuracy.cases import Cases, CaseSource, covered_ns
from hespas.validators.accuracy.lint import lint_cases, lint_profile
from hespas.validators.accuracy.matching import NO_MODULE, NO_NAMES, WITH_NAMES
from hespas.validators.accuracy.result import Accuracy, EndToEnd, MeasuredStep
from hespas.validators.accuracy.sources import HOLDS_NO_PROGRAM, by_device, sources_of
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
    """Compare estimators with measured profiles, next to the naive baselines and the noise floor.

    ``hardware`` has names or files of the devices of the profiles. Without ``workload``, each profile is
    compared with the programs or operations in it: see
    :func:`~hespas.validators.accuracy.sources.sources_of`. Raises ``UsageError`` for unknown names, and if
    nothing can be compared.
    """
    if not profiles or not hardware:
        missing = "device" if profiles else "profile"
        raise UsageError(f"no {missing} to compare", hint="give at least one profile and one device")
    diagnostics = diagnostics if diagnostics is not None else Diagnostics()
    devices = {name: load_device(name) for name in hardware}
    models = [load_estimator(spelling) for spelling in estimators]
    sources: list[tuple[CaseSource, str]] = []
    names = _unique_names(profile.name for profile in profiles)
    profiles = [replace(profile, name=name) for profile, name in zip(profiles, names, strict=True)]
    for index, profile in enumerate(profiles):
        parts = by_device(profile, devices, diagnostics)
        profiles[index] = parts[0][0] if len(parts) == 1 else profile
        for part, name in parts:
            device_sources = sources_of(part, workload, devices[name].name, diagnostics)
            sources.extend((source, name) for source in device_sources)
    if not any(len(source.cases) for source, _ in sources):
        raise _nothing_compared(profiles, [source for source, _ in sources], diagnostics)
    # Graphs that carry times are named like their rank classes, which may be equal.
    names = _unique_names(source.cases.source for source, _ in sources)
    sources = [
        (replace(source, cases=replace(source.cases, source=name)), device)
        for (source, device), name in zip(sources, names, strict=True)
    ]
    cases = _cases_with_predictions(sources, devices, models, diagnostics)
    runs = tuple(
        run
        for source_cases, (source, name) in zip(cases, sources, strict=True)
        for run in end_to_end(replace(source, cases=source_cases), devices[name], models, diagnostics)
    )
    lint = [
        finding for profile in profiles if isinstance(profile, Profile) for finding in lint_profile(profile)
    ]
    for source_cases, (source, name) in zip(cases, sources, strict=True):
        lint.extend(lint_cases(source_cases, _naive_ns(source, devices[name]), source.times, devices[name]))
    result = accuracy_of_cases(
        cases,
        inputs,
        [model.name for model in models],
        diagnostics,
        [device.name for device in devices.values()],
    )
    return replace(
        result,
        end_to_end=runs,
        trends=tuple(trends(runs)),
        coverage={
            source.cases.source: source.coverage for source, _ in sources if source.coverage is not None
        },
        lint=tuple(lint),
        joins={source.cases.source: source.joins for source, _ in sources if source.joins},
        steps={source.cases.source: _measured_step(source) for source, _ in sources},
        programs={source.cases.source: source.program for source, _ in sources if source.program is not None},
    )


def _nothing_compared(
    profiles: Sequence[Profile | Workload], sources: Sequence[CaseSource], diagnostics: Diagnostics
) -> UsageError:
    """Return the error that reports why no profile has a case to compare."""
    if all(isinstance(profile, Workload) for profile in profiles):
        return UsageError(
            "a program without measured times cannot be compared",
            path=profiles[0].name,
            hint="give it with `workload`, and the profile of its run with `profiles`",
        )
    if any(source.coverage is not None for source in sources) or not sources:
        hint = (
            HOLDS_NO_PROGRAM if NO_MODULE in diagnostics.counts() else "check that it is the program that ran"
        )
        if NO_NAMES in diagnostics.counts():
            hint = f"add names to its operations: {WITH_NAMES}"
        return UsageError("no event of the profiles belongs to the program", path=profiles[0].name, hint=hint)
    return UsageError(
        "no operation of the profiles took any time", hint="give profiles with known durations above 0"
    )


def _unique_names(names: Iterable[str]) -> list[str]:
    """Return names in which repeated ones have a number appended, because figures are found by name."""
    counts = Counter[str]()
    unique: list[str] = []
    for name in names:
        counts[name] += 1
        unique.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return unique


def _naive_ns(source: CaseSource, device: Device) -> FloatArray:
    """Return the data-sheet roofline of one execution of each case [ns]."""
    return naive_ns(source.graph, device, num_ranks=source.num_ranks)[source.node]


def _cases_with_predictions(
    sources: Sequence[tuple[CaseSource, str]],
    devices: dict[str, Device],
    models: Sequence[Estimator],
    diagnostics: Diagnostics,
) -> list[Cases]:
    """Return the cases of each source with the predictions of the estimators and the baselines.

    Warns of sources for which an estimator has no prediction, and therefore no errors.
    """
    cases: list[Cases] = []
    for source, name in sources:
        predictions: list[CasePrediction] = []
        for model in models:
            job_model = for_job(model, source.num_ranks)
            estimate = estimate_with(job_model, source.graph, devices[name], diagnostics)
            node, times = source.node, source.times
            prediction = CasePrediction(
                estimator=model.name,
                duration_ns=estimate.duration_ns[node] * times,
                low_ns=estimate.low_ns[node] * times,
                high_ns=estimate.high_ns[node] * times,
            )
            predictions.append(prediction)
            if len(node) and not np.isfinite(prediction.duration_ns).any():
                diagnostics.warning(
                    "accuracy.nothing-estimated",
                    source.cases.source,
                    f"{prediction.estimator} has no estimate for any of its {len(node):,} cases: nothing is "
                    "compared",
                )
        cases.append(source.cases.with_predictions(predictions))
    for name, device in devices.items():
        indices = [index for index, (_, spelling) in enumerate(sources) if spelling == name]
        naive = [_naive_ns(sources[index][0], device) for index in indices]
        if not indices:
            continue
        case_times = [sources[index][0].times for index in indices]
        rows = fitted_baselines([cases[index] for index in indices], naive, case_times)
        for index, baselines in zip(indices, rows, strict=True):
            cases[index] = cases[index].with_predictions(baselines)
    return cases


def span_ns(profile: Profile) -> float:
    """Return the duration of a run [ns]: the time from the first start to the last end on any rank, as the
    median over runs.

    The result is NaN without events. Ranks of one profile share a clock; events without run numbers count as
    one run. Ranks whose spans overlap by less than half of the shorter span count as separate runs: they ran
    the program one after another (devices without collectives), or their recordings start one run apart.
    """
    spans: dict[int, list[tuple[float, float]]] = {}
    for run, start, end in _runs_of(profile):
        spans.setdefault(run, []).append((float(start.min()), float(end.max())))
    times: list[float] = []
    for ranks in spans.values():
        joined: list[tuple[float, float]] = []
        # Spans that share at least half of the shorter one are one run.
        for first, last in sorted(ranks):
            before = joined[-1] if joined else (first, first)
            shared = min(before[1], last) - first
            if joined and 2.0 * shared >= min(before[1] - before[0], last - first):
                joined[-1] = (before[0], max(before[1], last))
            else:
                joined.append((first, last))
        times.extend(last - first for first, last in joined)
    return float(np.median(times)) if times else float("nan")


def busy_ns(profile: Profile) -> float:
    """Return the median over ranks and runs of the time during which any event runs [ns]; NaN without
    events.
    """
    times: list[float] = []
    for _, start, end in _runs_of(profile):
        order = np.argsort(start, kind="stable")
        times.append(covered_ns(start[order], end[order]))
    return float(np.median(times)) if times else float("nan")


def _runs_of(profile: Profile) -> Iterator[tuple[int, FloatArray, FloatArray]]:
    """Yield starts and ends of each run on each rank.

    Events outside of runs count only in profiles without runs.
    """
    inside = profile.run >= 0
    chosen = np.flatnonzero(inside) if bool(inside.any()) else np.arange(len(profile))
    rank, run = profile.rank[chosen].astype(np.int64), profile.run[chosen].astype(np.int64)
    keys, index = np.unique(rank << 32 | run & 0xFFFFFFFF, return_inverse=True)
    order = np.argsort(index, kind="stable")
    bounds = np.searchsorted(index[order], np.arange(len(keys) + 1))
    for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        rows = chosen[order[first:last]]
        ends = profile.start_ns[rows] + np.maximum(profile.duration_ns[rows], 0.0)
        yield int(profile.run[rows[0]]), profile.start_ns[rows], ends


def end_to_end(
    source: CaseSource, device: Device, models: Sequence[Estimator], diagnostics: Diagnostics
) -> Iterator[EndToEnd]:
    """Yield the end-to-end rows of one source.

    A program is simulated and compared with the span and the busy time of its profile, or of the recorded
    steps of a recorded graph. In any case the sum of the predictions is compared with the sum of the measured
    times.
    """
    cases = source.cases
    total_ns = float(cases.weights_ns.sum()) + cases.outside_ns
    shares: dict[str, float] = {}
    for prediction in cases.predictions:
        is_covered = np.isfinite(prediction.duration_ns) & (cases.measured_ns > 0)
        covered_ns = float(cases.weights_ns[is_covered].sum())
        shares[prediction.estimator] = covered_ns / total_ns if total_ns else nan
    step = _measured_step(source)
    if source.program is not None and step.is_simulated:
        # A recording may contain several steps, and work outside of them.
        recorded = source.recorded
        step_share = 1.0 if recorded is None else recorded.inside / recorded.count
        for model in models:
            job_model = for_job(model, source.num_ranks)
            estimates = [estimate_with(job_model, graph, device) for graph in source.program.classes]
            settings = default_configuration(source.program, device, model.name)
            simulated = simulate(
                source.program, estimates, device=device, configuration=settings, diagnostics=diagnostics
            )
            for basis, measured in (("span", step.span_ns), ("busy", step.busy_ns)):
                yield EndToEnd(
                    workload=cases.workload,
                    source=cases.source if source.profile is None else source.profile.name,
                    hardware=cases.hardware,
                    estimator=model.name,
                    basis=basis,
                    predicted_ns=simulated.step_ns * step_share,
                    measured_ns=measured,
                    is_lower_bound=simulated.is_lower_bound,
                    coverage=shares.get(model.name, nan),
                    steps=1.0,
                )
    mean_ns = cases.measured_ns if cases.mean_ns is None else cases.mean_ns
    for prediction in cases.predictions:
        is_covered = np.isfinite(prediction.duration_ns) & (cases.measured_ns > 0)
        if is_covered.any():
            yield EndToEnd(
                workload=cases.workload,
                source=cases.source,
                hardware=cases.hardware,
                estimator=prediction.estimator,
                basis="sum of operations",
                predicted_ns=float(prediction.duration_ns[is_covered].sum()),
                measured_ns=float(mean_ns[is_covered].sum()),
                is_lower_bound=not bool(is_covered.all()),
                coverage=shares[prediction.estimator],
                steps=cases.steps,
            )


def _measured_step(source: CaseSource) -> MeasuredStep:
    """Return the measured time of a step; unknown for graphs that have times of nodes but no recorded
    steps.
    """
    span, busy = nan, nan
    if source.profile is not None:
        span, busy = span_ns(source.profile), busy_ns(source.profile)
    elif source.recorded is not None:
        span = float(np.median(source.recorded.span_ns))
        busy = float(np.median(source.recorded.busy_ns))
    is_timed = source.profile is not None or source.recorded is not None
    return MeasuredStep(span_ns=span, busy_ns=busy, is_simulated=is_timed and source.program is not None)
