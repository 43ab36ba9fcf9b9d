"""Results of a comparison of estimators with measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import Annotated

from msgspec import Meta

from hespas.files.documents import Count, Figure
from hespas.fitting.statistics import ErrorSummary, NoiseFloor
from hespas.graph import Diagnostics, Workload
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.coverage import Coverage, InstructionJoin
from hespas.validators.accuracy.lint import LintFinding

__all__ = [
    "LEAST_OF_A_STEP",
    "Accuracy",
    "Contribution",
    "EndToEnd",
    "MeasuredStep",
    "SpeedUp",
    "SummaryRow",
    "Thresholds",
    "Trend",
]

LEAST_OF_A_STEP = 0.9
"""Least share of the device time that operations must cover to represent a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """Errors of one estimator on one device, over all cases, over one operation class, or over one range of
    times.

    ``level`` is ``instance`` (every case) or ``shape`` (each distinct shape once). ``op_class`` and ``size``
    are the names of the class and of the range, or ``all``.
    """

    estimator: str
    hardware: str
    level: str
    op_class: str
    size: str
    errors: ErrorSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """Predicted and measured time of one step.

    ``basis`` is one of three. ``span``: the simulated step, and the time from the first start to the last
    end. ``busy``: the simulated step, and the time during which the device works. ``sum of operations``: the
    sum of the predictions, and the sum of the measured times of the same cases (means over their runs).
    ``coverage`` is the share of the source's device time that the estimator covers. ``steps`` is the number
    of steps in a sum (NaN: unknown).
    """

    workload: str
    source: str
    hardware: str
    estimator: str
    basis: str
    predicted_ns: float
    measured_ns: float
    is_lower_bound: bool
    coverage: float = nan
    steps: float = nan

    @property
    def basis_text(self) -> str:
        """Return the basis of the comparison as text, with the number of steps if the sum covers several."""
        return f"{self.basis}, {self.steps:g} steps" if self.steps > 1 else self.basis

    @property
    def relative_error(self) -> float:
        """Return (predicted - measured) / measured; NaN without a measured time."""
        return (self.predicted_ns - self.measured_ns) / self.measured_ns if self.measured_ns > 0 else nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Contribution of the cases of one shape to the error of a source.

    ``share`` is the error of these cases over the measured time of the source, with its sign. For the first
    of the ``count`` cases, ``instructions`` is the number of its compiled instructions, and ``operations``
    the number of program operations that they carry out.
    """

    source: str
    hardware: str
    estimator: str
    label: str
    shape: str
    op_class: str
    count: Count
    predicted_ns: Figure
    measured_ns: Figure
    share: Annotated[Figure, Meta(description="signed, of the measured time of the source")]
    instructions: Annotated[Count, Meta(description="compiled instructions of the first case")] = 1
    operations: Annotated[Count, Meta(description="program operations that they carry out")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Measured time of a step of one source.

    ``span_ns`` is the median over runs of the time from the first start to the last end. ``busy_ns`` is the
    median of the time during which the device works (NaN: unknown). ``is_simulated``: the program was
    simulated and is compared with these times; for other sources the times of operations are added up.
    """

    span_ns: float
    busy_ns: float
    is_simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Agreement of predicted and measured times over the sources of one device.

    ``rank`` is Kendall's tau between predicted and measured times of steps. If fewer than three steps are
    simulated, the times are sums of operations. ``slope`` is the slope of ln(predicted) against ln(measured).
    It is 1 if predicted times grow in proportion to measured times.
    """

    estimator: str
    hardware: str
    n: Count
    rank: Annotated[Figure, Meta(description="Kendall's tau")]
    slope: Annotated[Figure, Meta(description="of ln(predicted) over ln(measured)")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Errors of predicted speed-ups over ``n`` shapes that were measured on two devices.

    ``sign`` is the share of shapes for which the faster device is predicted correctly; ``sign_long`` is the
    same for the ``n_long`` shapes above 20 us. ``median_error`` is the median of |predicted / measured - 1|
    of the time ratios. ``rank`` is Kendall's tau of predicted and measured ratios. ``constant_error`` and
    ``constant_sign`` are the figures of a prediction by one constant ratio for all shapes.
    """

    estimator: str
    hardware: str
    other: str
    n: Count
    n_long: Count
    sign: Figure
    sign_long: Figure
    median_error: Figure
    rank: Annotated[Figure, Meta(description="Kendall's tau")]
    constant_error: Figure
    constant_sign: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits that a user sets; NaN means no limit. Shares and relative errors: 0.1 is 10 %."""

    max_mape: Figure
    max_e2e: Figure
    min_coverage: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Result of a comparison of estimators with measurements.

    ``noise`` has an entry per hardware. ``coverage``, ``joins``, ``steps`` and ``programs`` have an entry per
    source. ``joins`` are the operations that each instruction carries out, for sources matched with a
    program. ``programs`` are the simulated programs.
    """

    inputs: tuple[str, ...]
    estimators: tuple[str, ...]
    cases: tuple[Cases, ...]
    summary: tuple[SummaryRow, ...]
    contributions: tuple[Contribution, ...]
    noise: Mapping[str, NoiseFloor]
    diagnostics: Diagnostics
    end_to_end: tuple[EndToEnd, ...] = ()
    speed_ups: tuple[SpeedUp, ...] = ()
    trends: tuple[Trend, ...] = ()
    lint: tuple[LintFinding, ...] = ()
    coverage: Mapping[str, Coverage] = field(default_factory=dict[str, "Coverage"])
    joins: Mapping[str, tuple[InstructionJoin, ...]] = field(
        default_factory=dict[str, "tuple[InstructionJoin, ...]"]
    )
    steps: Mapping[str, MeasuredStep] = field(default_factory=dict[str, MeasuredStep])
    programs: Mapping[str, Workload] = field(default_factory=dict[str, Workload])

    def exceeded(self, limits: Thresholds) -> tuple[str, ...]:
        """Return a sentence for each limit that an estimator exceeds; an unknown error exceeds all limits."""
        sentences: list[str] = []
        for row in self.summary:
            is_whole = row.op_class == "all" and row.size == "all"
            if not is_whole or row.estimator not in self.estimators:
                continue
            subject = f"{row.estimator} on {row.hardware}"
            mape, coverage = row.errors.mape, row.errors.coverage
            if row.level == "shape" and not isnan(limits.max_mape) and not mape <= limits.max_mape:
                sentences.append(f"MAPE of {subject} is {mape:.1%}, the limit is {limits.max_mape:.1%}")
            is_limited = row.level == "instance" and not isnan(limits.min_coverage)
            if is_limited and not coverage >= limits.min_coverage:
                sentences.append(
                    f"{subject} covers {coverage:.1%} of the time, the limit is {limits.min_coverage:.1%}"
                )
        if not isnan(limits.max_e2e):
            compared = {(run.source, run.estimator, run.hardware) for run in self.end_to_end}
            incomplete = [
                f"end to end of {cases.source}, {estimator} on {cases.hardware}: nothing could be compared"
                for cases in self.cases
                for estimator in self.estimators
                if len(cases) and (cases.source, estimator, cases.hardware) not in compared
            ]
            simulated = {(run.workload, run.estimator) for run in self.end_to_end if run.basis == "span"}
            for run in self.end_to_end:
                is_sum = (run.workload, run.estimator) not in simulated and run.estimator in self.estimators
                if is_sum and run.coverage < LEAST_OF_A_STEP:
                    incomplete.append(
                        f"end to end of {run.source}, {run.estimator} on {run.hardware}: estimates cover "
                        "only "
                        f"{run.coverage:.1%} of the device time, not a whole step"
                    )
            sentences.extend(incomplete)
            sentences.extend(
                f"end to end ({run.basis}) of {run.source}, {run.estimator} on {run.hardware}: "
                f"{run.relative_error:+.1%}, the limit is {limits.max_e2e:.1%}"
                for run in self.end_to_end
                if run.estimator in self.estimators and not abs(run.relative_error) <= limits.max_e2e
            )
        return tuple(sentences)
