"""Compares estimators with measurements: the function behind ``hespas-validate accuracy``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hespas.estimators import Estimator, load_estimator
from hespas.estimators.settings import for_job
from hespas.graph import Diagnostics, Profile, Workload
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device, load_device
from hespas.validators.accuracy.across import speed_ups
from hespas.validators.accuracy.baselines import fitted_baselines, naive_ns
from hespas.validators.accuracy.cases import Cases, Prediction
from hespas.validators.accuracy.devices import by_device
from hespas.validators.accuracy.endtoend import end_to_end, step_of
from hespas.validators.accuracy.lint import lint_cases, lint_profile
from hespas.validators.accuracy.result import Accuracy, EndToEnd
from hespas.validators.accuracy.sources import HOLDS_NO_PROGRAM, Source, sources_of
from hespas.validators.accuracy.summaries import contributions, noise_of, summaries, trends
from hespas.validators.matching import NO_MODULE, NO_NAMES, WITH_NAMES

__all__ = ["accuracy"]


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
    profiles = _named_apart(profiles)
    for profile in profiles:
        for part, name in by_device(profile, devices, found):
            sources.extend((each, name) for each in sources_of(part, workload, devices[name].name, found))
    if not any(len(source.cases) for source, _ in sources):
        raise _nothing_compared(profiles, [source for source, _ in sources], found)
    sources = _sources_apart(sources)
    cases = _predicted(sources, devices, models, found)
    _tell_silent(cases, models, found)
    runs = tuple(_end_to_end(sources, cases, devices, models, found))
    measured = [profile for profile in profiles if isinstance(profile, Profile)]
    lint = [finding for profile in measured for finding in lint_profile(profile)]
    for each, (source, name) in zip(cases, sources, strict=True):
        lint.extend(lint_cases(each, _naive(source, devices[name]), source.times, devices[name]))
    return Accuracy(
        inputs=tuple(inputs),
        estimators=tuple(model.name for model in models),
        cases=tuple(cases),
        summary=tuple(summaries(cases)),
        end_to_end=runs,
        contributions=tuple(row for each in cases for row in contributions(each)),
        speed_ups=tuple(speed_ups(cases)),
        trends=tuple(trends(runs)),
        noise={device.name: noise_of(cases, device.name) for device in devices.values()},
        coverage={
            source.cases.source: source.coverage for source, _ in sources if source.coverage is not None
        },
        lint=tuple(lint),
        diagnostics=found,
        joins={source.cases.source: source.joins for source, _ in sources if source.joins},
        steps={source.cases.source: step_of(source) for source, _ in sources},
        programs={source.cases.source: source.program for source, _ in sources if source.program is not None},
    )


def _nothing_compared(
    profiles: Sequence[Profile | Workload], sources: Sequence[Source], found: Diagnostics
) -> UsageError:
    if all(isinstance(each, Workload) for each in profiles):
        return UsageError(
            "a program without measured times is nothing to compare with",
            path=profiles[0].name,
            hint="give it with --workload, and the profile of its run with --measured",
        )
    if any(source.coverage is not None for source in sources) or not sources:
        hint = HOLDS_NO_PROGRAM if NO_MODULE in found.counts() else "is it the program that ran?"
        if NO_NAMES in found.counts():
            hint = f"its operations have no names: {WITH_NAMES}"
        return UsageError("no event of the profiles belongs to the program", path=profiles[0].name, hint=hint)
    return UsageError(
        "no operation of the profiles took any time", hint="are the durations known, and above 0?"
    )


def _named_apart(profiles: Sequence[Profile | Workload]) -> list[Profile | Workload]:
    """The same profiles, with a number behind a name that came before: figures are told by these names."""
    counts = Counter[str]()
    found: list[Profile | Workload] = []
    for each in profiles:
        counts[each.name] += 1
        number = counts[each.name]
        found.append(each if number == 1 else replace(each, name=f"{each.name} ({number})"))
    return found


def _sources_apart(sources: Sequence[tuple[Source, str]]) -> list[tuple[Source, str]]:
    """The same for sources: graphs that carry times are called as their rank classes are."""
    counts = Counter[str]()
    found: list[tuple[Source, str]] = []
    for source, device in sources:
        name = source.cases.source
        counts[name] += 1
        number = counts[name]
        cases = source.cases if number == 1 else replace(source.cases, source=f"{name} ({number})")
        found.append((replace(source, cases=cases), device))
    return found


def _naive(source: Source, device: Device) -> FloatArray:
    """p0 of one execution of each case [ns]."""
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
        said = [_said(model, source, devices[name], found) for model in models]
        cases.append(source.cases.with_predictions(said))
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
        for said in each.predictions:
            if said.estimator in names and len(each) and not np.isfinite(said.duration_ns).any():
                found.warning(
                    "accuracy.nothing-estimated",
                    each.source,
                    f"{said.estimator} gives no time of any of its {len(each):,} cases: nothing is compared",
                )


def _said(model: Estimator, source: Source, device: Device, found: Diagnostics) -> Prediction:
    estimated = for_job(model, source.num_ranks).estimate(source.graph, device, found)
    node, times = source.node, source.times
    return Prediction(
        estimator=model.name,
        duration_ns=estimated.duration_ns[node] * times,
        low_ns=estimated.low_ns[node] * times,
        high_ns=estimated.high_ns[node] * times,
    )


def _end_to_end(
    sources: Sequence[tuple[Source, str]],
    cases: Sequence[Cases],
    devices: dict[str, Device],
    models: Sequence[Estimator],
    found: Diagnostics,
) -> list[EndToEnd]:
    runs: list[EndToEnd] = []
    for each, (source, name) in zip(cases, sources, strict=True):
        runs.extend(end_to_end(replace(source, cases=each), devices[name], models, found))
    return runs
