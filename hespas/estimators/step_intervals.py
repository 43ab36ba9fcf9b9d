"""Interval of a predicted step time, the extrapolation level of the prediction, and its step factor.

The 90 % interval follows from residuals of predicted steps and programs that were measured:
``step_intervals.toml`` has the factors between which the measured time lies, by kind of workload and
extrapolation level. ``python -m tools.fits`` creates the file and scores it on left-out groups. A device
file may have step factors, which measured steps of the device justify (:func:`applied_factor`).
:func:`weighed` reports the part of an estimated step that is not based on measurements of its device, its
sizes or its kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from math import exp, inf, log, nan, sqrt
from pathlib import Path
from typing import Literal, get_args

import msgspec
import numpy as np

from hespas.estimators.configuration import AUTO, Configuration, WorkloadKind, default_configuration
from hespas.estimators.learned.extrapolation import expected_deviation
from hespas.estimators.learned.selection import OperationLabels, select_model
from hespas.estimators.learned.serialization import cards_in, shipped_folder
from hespas.graph import Diagnostics, Estimate, OpClass, OpGraph, Workload, reference_basis, step_facts
from hespas.graph.errors import UsageError, clipped
from hespas.hardware import Device, StepFactor
from hespas.hardware.kernel_shares import training_shares

__all__ = [
    "DATA",
    "LEVELS",
    "NO_FACTOR",
    "RECORDED",
    "Level",
    "StepInterval",
    "StepIntervals",
    "adds_intervals",
    "applied_factor",
    "basis_shares",
    "basis_text",
    "corrected_bounds",
    "device_level",
    "interval_factors",
    "step_intervals",
    "weighed",
]

DATA = Path(__file__).with_name("step_intervals.toml")
"""The file of the intervals."""

Level = Literal["measured", "new device"]
"""Extrapolation levels: kernels of the device (for training steps, of its family) were measured, or not."""
LEVELS: tuple[Level, ...] = get_args(Level)
_USUAL_DEVIATION = 0.236
"""Expected deviation of matmuls in bf16 on devices whose architecture is left out, the median [log time]."""
_USUAL_SCHEMES = ("bf16", "f16", "f32")
_COMPARED = frozenset({"composite", "training"})
"""Estimators whose steps have been compared with measured ones."""
_BOUNDED = frozenset({"imc"})
"""Estimators whose intervals are bounds of each operation, which add up to bounds of the step."""


class StepInterval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Factors on the predicted step time; 90 % of measured times are between ``low`` and ``high`` times the
    prediction.

    They were fitted to ``rows`` residuals in ``groups`` groups; ``source`` names the data. ``coverage``,
    ``width`` (``high`` / ``low``) and ``score`` (the interval score of the logarithm) are measured on
    left-out groups.
    """

    kind: WorkloadKind
    level: Level
    low: float
    high: float
    rows: int
    groups: int
    coverage: float = nan
    width: float = nan
    score: float = nan
    source: str


class StepIntervals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of the data file ``step_intervals.toml``."""

    interval: list[StepInterval]


@cache
def step_intervals() -> dict[tuple[WorkloadKind, Level], StepInterval]:
    """Return the step intervals that ship with the package, by kind of workload and extrapolation level."""
    document = msgspec.toml.decode(DATA.read_bytes(), type=StepIntervals)
    return {(interval.kind, interval.level): interval for interval in document.interval}


def device_level(kind: WorkloadKind, device: Device) -> Level:
    """Return the extrapolation level of step predictions for a device: ``measured``, or ``new device``
    without fits or published training figures.
    """
    if device.fits:
        return "measured"
    if kind == "training" and (device.kind == "tpu" or training_shares(device).covers(device)):
        return "measured"
    return "new device"


def interval_factors(kind: WorkloadKind, device: Device, estimator: str) -> tuple[float, float]:
    """Return the factors on the predicted step time for the lower and upper end of its interval. They are NaN
    for estimators that were not compared with measurements. For devices without measurements they are farther
    apart with the distance of the reference devices.

    ``estimator`` is the name of an estimator, with options.
    """
    if estimator.partition(":")[0] not in _COMPARED:
        return nan, nan
    level = device_level(kind, device)
    interval, measured = (step_intervals().get((kind, name)) for name in (level, LEVELS[0]))
    if interval is None or measured is None:
        return nan, nan
    if level == LEVELS[0]:
        return interval.low, interval.high
    # The file has the interval of a device with the usual deviation of left-out architectures.
    middle = log(measured.low * measured.high) / 2
    least, usual = (log(bounds.high / bounds.low) / 2 for bounds in (measured, interval))
    ratio = _matmul_deviation(device) / _USUAL_DEVIATION
    half = sqrt(least**2 + (usual**2 - least**2) * ratio**2)
    return exp(middle - half), exp(middle + half)


def _matmul_deviation(device: Device) -> float:
    """Return the expected deviation [log time] of matmuls that the shipped models predict from reference
    devices; the usual deviation without such devices.
    """
    for scheme in _USUAL_SCHEMES:
        labels = OperationLabels("matmul", "", scheme, "")
        selection = select_model(cards_in(shipped_folder()), labels, device)
        if not isinstance(selection, str):
            references = selection.references
            return 0.0 if references is None else float(expected_deviation(references))
    return _USUAL_DEVIATION


NO_FACTOR = "none"
"""Choice of no step factor."""
_NORMAL = 1.645
"""Standard deviations between the median and the ends of the 90 % interval of a normal error."""


def applied_factor(
    workload: Workload, device: Device, settings: Configuration, diagnostics: Diagnostics
) -> StepFactor | None:
    """Return the step factor of the device file for a workload; None without one. ``diagnostics`` receive the
    reason if the file has step factors and none of them is applied.

    ``settings.step_factor`` is a choice: :data:`AUTO` selects the factor of the framework and phase that the
    metadata of the workload state, :data:`NO_FACTOR` none, and a text like ``torch:training`` the factor of
    that name. A factor is applied only to times of the estimator that it was fitted with, and only if
    held-out workloads justify it. Raises ``UsageError`` for a name that the file does not have.
    """
    choice, factors = settings.step_factor, {factor.name.casefold(): factor for factor in device.step_factors}
    if choice == NO_FACTOR or (choice == AUTO and not factors):
        return None
    report, listed = diagnostics.info, ", ".join(factors)
    if choice == AUTO:
        facts = step_facts(workload.metadata)
        framework = (facts.framework if facts else "") or workload.metadata.get("framework", "")
        phase = facts.phase if facts else ""
        choice = f"{framework}:{phase}"
        if not (framework and phase):
            unknown = " and ".join(
                name for name, text in (("framework", framework), ("phase", phase)) if not text
            )
            diagnostics.warning(
                "simulate.no-step-factor",
                workload.name,
                f"no step factor is applied, because the workload does not state its {unknown}: choose one "
                f"with `step_factor` ({listed}), or {NO_FACTOR}",
            )
            return None
    elif choice.casefold() not in factors:
        raise UsageError(
            f"the device file of {device.name} has no step factor {clipped(repr(choice))}",
            hint=f"use one of {listed}" if factors else "fit one: hespas-validate calibrate --end-to-end",
        )
    factor = factors.get(choice.casefold())
    if factor is None:
        reason = f"the device file has none of {clipped(choice)} (it has {listed})"
    elif not factor.share:
        reason = f"the measured workloads of {factor.name} ({factor.workloads:,}) do not justify one"
    elif default_configuration(workload, device, factor.estimator).estimator != settings.estimator:
        report = diagnostics.warning
        reason = f"{factor.name} was fitted with the estimator {factor.estimator}, not {settings.estimator}"
    else:
        return factor
    report("simulate.no-step-factor", workload.name, f"no step factor is applied: {reason}")
    return None


def corrected_bounds(bounds: tuple[float, float], factor: StepFactor | None) -> tuple[float, float]:
    """Return the interval ``bounds`` of a prediction without a step factor as an interval around the
    prediction with ``factor``. It is wider by the standard error of the factor.
    """
    low, high = bounds
    if factor is None:
        return bounds
    if not 0 < low <= high < inf:
        return low * factor.factor, high * factor.factor
    middle, half = log(low * high) / 2, log(high / low) / 2
    half = sqrt(half**2 + (_NORMAL * factor.std_error) ** 2)
    return factor.factor * exp(middle - half), factor.factor * exp(middle + half)


def adds_intervals(estimator: str) -> bool:
    """Return True if the interval of a step is the sum of the intervals of its operations."""
    return estimator.partition(":")[0] in _BOUNDED


_FINDINGS: Mapping[str, str] = {
    "calibrated.carried": "calibrated",
    "calibrated.outside-support": "calibrated",
    "calibrated.unseen-device": "calibrated",
    "collectives.carried": "collectives",
    "collectives.data-sheet": "collectives",
    "collectives.kin": "collectives",
    "database.not-near": "database",
    "database.other-device": "database",
    "learned.stand-in": "learned",
    "learned.unseen-device": "learned",
    "composite.unseen-device": "",
}
"""Diagnostics about times beyond measurements, and the estimator that reports them (empty:
matmuls of any).
"""
_DATA_SHEET = "roofline"
_NOTED = 0.1
"""Share of the time from which a diagnostic is a warning, because it may change the answer."""


def weighed(
    reported: Diagnostics, workload: Workload, estimates: Sequence[Estimate], hardware: str
) -> Diagnostics:
    """Return the diagnostics of estimators. A diagnostic becomes a warning if it concerns a tenth of the step
    time or more.

    If all times are from one estimator, the user chose it, so its use of the data sheet is not reported.
    """
    by_estimator, of_products, on_data_sheet = _shares(workload, estimates)
    notes: dict[str, str] = {}
    for code, estimator in _FINDINGS.items():
        share = by_estimator[estimator] if estimator else of_products
        if share >= _NOTED:
            what = f"{estimator} gives" if estimator else "matmuls are"
            notes[code] = f"{what} {share:.0%} of the time"
    findings = reported.as_warnings(notes)
    total = sum(on_data_sheet.values())
    if total > 0:
        names = ", ".join(sorted(on_data_sheet, key=lambda name: -on_data_sheet[name]))
        text = f"{total:.0%} of the time follows from the data sheet: no measurement of {names} covers it"
        add = findings.warning if total >= _NOTED else findings.info
        add("estimate.data-sheet", hardware, text)
    return findings


RECORDED = "recorded"
"""Basis of the times that a step takes from its input file."""


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def basis_shares(
    workload: Workload, timed: Sequence[OpGraph], estimates: Sequence[Estimate]
) -> Mapping[str, float]:
    """Return the share of each basis (:class:`~hespas.graph.Estimate`) in the time of a step, summed over
    operations and ranks; the largest share first. ``timed`` are the rank classes with the times of the step.
    Times without an estimate have the basis :data:`RECORDED`, estimates that state none the empty one.
    """
    sums: defaultdict[str, float] = defaultdict(float)
    for graph, estimate, count in zip(timed, estimates, workload.class_sizes, strict=True):
        names = (*estimate.bases, "", RECORDED)
        code = np.where(estimate.basis < 0, len(estimate.bases), estimate.basis)
        code = np.where(estimate.estimator < 0, len(estimate.bases) + 1, code)
        time_ns = np.nan_to_num(graph.duration_ns * graph.executions, posinf=0.0) * count
        for name, sum_ns in zip(names, np.bincount(code, time_ns, len(names)).tolist(), strict=True):
            sums[name] += sum_ns
    whole = sum(sums.values())
    if not 0 < whole < np.inf:
        return {}
    return {name: sums[name] / whole for name in sorted(sums, key=lambda name: -sums[name]) if sums[name]}


_LISTED_DEVICES = 4
"""Limit of reference devices that a text names."""
_SHOWN, _WHOLE = 0.005, 0.995
"""Least share that a text shows, and least share that counts as all."""


def basis_text(shares: Mapping[str, float]) -> str:
    """Return the shares of each basis of a time as text, with all sets of reference devices as one. Empty if
    no basis is stated. ``shares`` are as returned by :func:`basis_shares`.
    """
    if set(shares) <= {"", RECORDED}:
        return ""
    start = reference_basis(())
    listed: dict[str, float] = defaultdict(float)
    names = dict.fromkeys(
        name for text in shares if text.startswith(start) for name in text.removeprefix(start).split(", ")
    )
    more = f" and {len(names) - _LISTED_DEVICES} more" if len(names) > _LISTED_DEVICES else ""
    references = reference_basis(list(names)[:_LISTED_DEVICES]) + more
    for text, share in shares.items():
        listed[references if text.startswith(start) else text or "not stated"] += share
    ordered = sorted(listed.items(), key=lambda entry: -entry[1])
    return "; ".join(
        text if share >= _WHOLE else f"{share:.0%} {text}" for text, share in ordered if share >= _SHOWN
    )


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are infinite
def _shares(
    workload: Workload, estimates: Sequence[Estimate]
) -> tuple[Mapping[str, float], float, Mapping[str, float]]:
    """Return shares of the predicted step time: the share of each estimator, the share of matmuls that do not
    use the data sheet, and for each operation class the share that uses only the data sheet.
    """
    ranks = workload.class_sizes
    by_estimator: defaultdict[str, float] = defaultdict(float)
    on_data_sheet: defaultdict[str, float] = defaultdict(float)
    of_products = whole = 0.0
    for graph, estimate, count in zip(workload.classes, estimates, ranks, strict=True):
        time_ns = np.nan_to_num(estimate.duration_ns * graph.executions, posinf=0.0) * count
        whole += float(time_ns.sum())
        products = (graph.op_class == OpClass.CONTRACTION) & (time_ns > 0)
        for number, spelling in enumerate(estimate.estimators):
            of_estimator = (estimate.estimator == number) & (time_ns > 0)
            name = spelling.partition(":")[0]
            by_estimator[name] += float(time_ns[of_estimator].sum())
            if name != _DATA_SHEET:
                of_products += float(time_ns[of_estimator & products].sum())
            elif len(estimate.estimators) > 1:
                for code in np.unique(graph.op_class[of_estimator]).tolist():
                    of_class = of_estimator & (graph.op_class == code)
                    on_data_sheet[OpClass(code).name.lower()] += float(time_ns[of_class].sum())
    if not 0 < whole < np.inf:
        return defaultdict(float), 0.0, {}
    for sums in (by_estimator, on_data_sheet):
        for name in sums:
            sums[name] /= whole
    return by_estimator, of_products / whole, on_data_sheet
