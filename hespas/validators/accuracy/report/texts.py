"""Texts of a report: figures, threshold checks and summary lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isnan, nan

from hespas.fitting.statistics import ErrorSummary, NoiseFloor
from hespas.report.texts import UNKNOWN
from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.result import Accuracy, EndToEnd, SummaryRow, Thresholds

__all__ = [
    "SummaryLine",
    "ThresholdCheck",
    "limits_of",
    "percent",
    "rate_text",
    "summary_lines",
    "time_text",
    "verdict_of",
    "whole_rows",
]

_RATES = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def percent(value: float, *, signed: bool = False) -> str:
    """Return ``12.3%`` for 0.123; from 1000 % on without decimals."""
    if isnan(value):
        return UNKNOWN
    places = 0 if abs(value) >= 10 else 1
    return f"{value:{'+' if signed else ''},.{places}%}"


def time_text(time_ns: float, *, signed: bool = False) -> str:
    """Return a time in the unit (ns, us, ms, s) in which it has three or four digits."""
    if isnan(time_ns):
        return UNKNOWN
    sign = "+" if signed else ""
    for size, unit in _TIMES:
        if abs(time_ns) >= size:
            value = time_ns / size
            places = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
            return f"{value:{sign},.{places}f} {unit}"
    return f"{time_ns:{sign}.3g} ns"


def rate_text(flops_per_s: float) -> str:
    """Return a rate in the unit (such as TFLOP/s) in which it has three or four digits."""
    if isnan(flops_per_s):
        return UNKNOWN
    size, unit = next((row for row in _RATES if flops_per_s >= row[0]), _RATES[-1])
    return f"{flops_per_s / size:,.4g} {unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdCheck:
    """Result of checking one limit that the user set: the limit, the worst value, and ``status``, which is
    ``pass``, ``fail``, or ``unknown`` (no value to check).
    """

    name: str
    required: str
    worst: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryLine:
    """Summary of one estimator on one device.

    ``run`` is the source with the largest end-to-end error among ``runs`` sources. ``best_baseline`` is the
    naive baseline with the smallest MAPE. ``matched`` is the share of the device time that belongs to the
    program (NaN without a program).
    """

    estimator: str
    hardware: str
    shape: ErrorSummary
    instance: ErrorSummary
    noise: NoiseFloor
    run: EndToEnd | None
    runs: int
    best_baseline: str
    baseline_mape: float
    matched: float


def verdict_of(limits: tuple[ThresholdCheck, ...]) -> str:
    """Return ``pass``, ``fail``, ``unknown`` (a limit could not be checked) or ``none`` (no limit was
    set).
    """
    statuses = {limit.status for limit in limits}
    return next((status for status in ("fail", "unknown", "pass") if status in statuses), "none")


def limits_of(result: Accuracy, limits: Thresholds) -> tuple[ThresholdCheck, ...]:
    """Return the check of each threshold that the user set."""

    def worst_of(values: list[float], worse: Callable[[list[float]], float]) -> float:
        return nan if not values or any(map(isnan, values)) else worse(values)

    def largest(values: list[float]) -> float:
        return max(values, key=abs)

    rows = [row for row in result.summary if _is_whole(row) and row.estimator in result.estimators]
    mapes = [row.errors.mape for row in rows if row.level == "shape"]
    shares = [row.errors.coverage for row in rows if row.level == "instance"]
    errors = [run.relative_error for run in result.end_to_end if run.estimator in result.estimators]
    checks = (
        ("MAPE over shapes", "max_mape", "at most", percent(worst_of(mapes, largest)), mapes),
        ("End-to-end error", "max_e2e", "at most", percent(worst_of(errors, largest), signed=True), errors),
        ("Coverage of time", "min_coverage", "at least", percent(worst_of(shares, min)), shares),
    )
    none = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
    results: list[ThresholdCheck] = []
    for name, field, word, worst, values in checks:
        limit: float = getattr(limits, field)
        if not isnan(limit):
            fails = result.exceeded(replace(none, **{field: limit}))
            status = "fail" if fails else "pass" if values else "unknown"
            required = f"{word} {percent(limit)}"
            results.append(ThresholdCheck(name=name, required=required, worst=worst, status=status))
    return tuple(results)


def _is_whole(row: SummaryRow) -> bool:
    return row.op_class == "all" and row.size == "all"


def whole_rows(result: Accuracy, estimator: str, hardware: str) -> dict[str, SummaryRow]:
    """Return the summary rows over all cases of one estimator on one device, by level."""
    return {
        row.level: row
        for row in result.summary
        if _is_whole(row) and row.estimator == estimator and row.hardware == hardware
    }


def summary_lines(result: Accuracy) -> Iterator[SummaryLine]:
    """Yield one line per device and requested estimator."""

    def distance(run: EndToEnd) -> float:
        error = abs(run.relative_error)
        return float("inf") if isnan(error) else error

    for hardware in dict.fromkeys(row.hardware for row in result.summary):
        naive = {
            name: rows["shape"].errors.mape
            for name in BASELINES
            if "shape" in (rows := whole_rows(result, name, hardware))
        }
        with_mape = {name: mape for name, mape in naive.items() if not isnan(mape)}
        best = min(with_mape, key=with_mape.__getitem__, default="")
        for estimator in result.estimators:
            rows = whole_rows(result, estimator, hardware)
            if not {"shape", "instance"} <= rows.keys():
                continue
            # One run per source: the simulated one with a measured span, otherwise the sum of its operations.
            runs: dict[str, EndToEnd] = {}
            for run in result.end_to_end:
                is_own = run.estimator == estimator and run.hardware == hardware
                if is_own and (run.basis == "span" or run.source not in runs):
                    runs[run.source] = run
            coverages = [
                result.coverage[cases.source]
                for cases in result.cases
                if cases.hardware == hardware and cases.source in result.coverage
            ]
            total = sum(coverage.time_ns for coverage in coverages)
            yield SummaryLine(
                estimator=estimator,
                hardware=hardware,
                shape=rows["shape"].errors,
                instance=rows["instance"].errors,
                noise=result.noise.get(hardware, NoiseFloor(0, nan, nan, nan)),
                run=max(runs.values(), key=distance, default=None),
                runs=len(runs),
                best_baseline=best,
                baseline_mape=with_mape.get(best, nan),
                matched=(sum(coverage.matched_time_ns for coverage in coverages) / total if total else nan),
            )
