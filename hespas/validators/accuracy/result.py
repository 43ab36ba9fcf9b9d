"""What a comparison of estimators with measurements found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from hespas.files.documents import Count, Figure
from hespas.graph import Diagnostics, Workload
from hespas.validators.accuracy.cases import Cases
from hespas.validators.accuracy.lint import LintFinding
from hespas.validators.accuracy.statistics import ErrorSummary, NoiseFloor

if TYPE_CHECKING:
    from hespas.validators.accuracy.coverage import Coverage, Join

__all__ = [
    "LEAST_OF_A_STEP",
    "Accuracy",
    "Contribution",
    "EndToEnd",
    "SpeedUp",
    "Step",
    "SummaryRow",
    "Thresholds",
    "Trend",
]

LEAST_OF_A_STEP = 0.9
"""Operations that are less than this share of the device time say nothing of a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryRow:
    """Errors of one estimator on one device. ``level`` is ``instance`` or ``shape`` (each distinct shape
    once); ``op_class`` and ``size`` are ``all`` or the part that is summarised.
    """

    estimator: str
    hardware: str
    level: str
    op_class: str
    size: str
    errors: ErrorSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class EndToEnd:
    """One step. ``basis`` says what is compared: the simulated step with ``span`` (first start to last end)
    or ``busy`` (the time the device works), or ``sum of operations``: the sum of what is predicted with that
    of what was measured for the same cases, the means over their runs. ``coverage`` is the share of the
    source's device time that the estimator covers, ``steps`` how many steps a sum spans (NaN: unknown).
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
    def what(self) -> str:
        """The basis, and how many steps are summed where that is not one."""
        return f"{self.basis}, {self.steps:g} steps" if self.steps > 1 else self.basis

    @property
    def relative_error(self) -> float:
        """(predicted - measured) / measured; NaN where nothing was measured."""
        return (self.predicted_ns - self.measured_ns) / self.measured_ns if self.measured_ns > 0 else nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """How much the cases of one shape add to the error of a whole source; ``share`` is signed, of the
    measured time. The first of its ``count`` cases is of ``instructions`` compiled instructions, which carry
    out ``operations`` of the program.
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
    instructions: Annotated[Count, Meta(description="compiled instructions that the first case is of")] = 1
    operations: Annotated[Count, Meta(description="operations of the program that they carry out")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How long a step of one source took: the median over runs of the time from first start to last end, and
    of the time during which the device worked (NaN: unknown). ``is_simulated`` says that the program was
    simulated and set against these; of other sources operations are added up.
    """

    span_ns: float
    busy_ns: float
    is_simulated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """Over the sources of one device: Kendall's tau of predicted and measured steps (sums of operations where
    fewer than three are simulated), and the slope of ln(predicted) over ln(measured): 1 where the estimator
    scales as the device does.
    """

    estimator: str
    hardware: str
    n: Count
    rank: Annotated[Figure, Meta(description="Kendall's tau")]
    slope: Annotated[Figure, Meta(description="of ln(predicted) over ln(measured)")]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUp:
    """Over ``n`` shapes measured on both devices. ``sign`` is the share whose faster device is named right
    (``sign_long``: among the ``n_long`` shapes above 20 us); ``median_error`` that of the ratio of times,
    |predicted / measured - 1|; ``rank`` Kendall's tau of predicted and measured ratios;
    ``constant_error`` and ``constant_sign`` what one ratio for all shapes would reach.
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
    """Limits a user set; NaN is none. Shares and relative errors, 0.1 is 10 %."""

    max_mape: Figure
    max_e2e: Figure
    min_coverage: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The whole. ``noise`` is by hardware; ``coverage``, ``joins`` (what each instruction carries out, of
    sources matched with a program), ``steps`` and ``programs`` (what was simulated) are by source.
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
    joins: Mapping[str, tuple[Join, ...]] = field(default_factory=dict[str, "tuple[Join, ...]"])
    steps: Mapping[str, Step] = field(default_factory=dict[str, Step])
    programs: Mapping[str, Workload] = field(default_factory=dict[str, Workload])

    def exceeded(self, limits: Thresholds) -> tuple[str, ...]:
        """A sentence for each limit that an asked estimator passes; an error that is unknown passes every
        limit.
        """
        told: list[str] = []
        for row in self.summary:
            whole = row.op_class == "all" and row.size == "all"
            if not whole or row.estimator not in self.estimators:
                continue
            where = f"{row.estimator} on {row.hardware}"
            if row.level == "shape" and not isnan(limits.max_mape) and not row.errors.mape <= limits.max_mape:
                told.append(f"MAPE of {where} is {row.errors.mape:.1%}, the limit {limits.max_mape:.1%}")
            coverage = row.errors.coverage
            if (
                row.level == "instance"
                and not isnan(limits.min_coverage)
                and not coverage >= limits.min_coverage
            ):
                told.append(
                    f"{where} covers {coverage:.1%} of the time, the limit is {limits.min_coverage:.1%}"
                )
        if not isnan(limits.max_e2e):
            told.extend(f"end to end of {what}: nothing could be compared" for what in self._without_steps())
            told.extend(self._partial_steps())
        for run in self.end_to_end:
            error = abs(run.relative_error)
            if run.estimator in self.estimators and not isnan(limits.max_e2e) and not error <= limits.max_e2e:
                told.append(
                    f"end to end ({run.basis}) of {run.source}, {run.estimator} on {run.hardware}: "
                    f"{run.relative_error:+.1%}, the limit {limits.max_e2e:.1%}"
                )
        return tuple(told)

    def _partial_steps(self) -> Iterator[str]:
        """What stands for a step and is only a part of it: operations added up, many of them without an
        estimate.
        """
        whole = {(run.workload, run.estimator) for run in self.end_to_end if run.basis == "span"}
        for run in self.end_to_end:
            is_sum = (run.workload, run.estimator) not in whole and run.estimator in self.estimators
            if is_sum and run.coverage < LEAST_OF_A_STEP:
                yield (
                    f"end to end of {run.source}, {run.estimator} on {run.hardware}: estimates cover "
                    f"{run.coverage:.1%} of the device time, which is no whole step"
                )

    def _without_steps(self) -> list[str]:
        """What was measured and has no row end to end of an asked estimator: it predicts nothing of it."""
        there = {(run.source, run.estimator, run.hardware) for run in self.end_to_end}
        return [
            f"{each.source}, {estimator} on {each.hardware}"
            for each in self.cases
            for estimator in self.estimators
            if len(each) and (each.source, estimator, each.hardware) not in there
        ]
