"""What stands first in a report: pass or fail, and the few figures that say how good an estimator is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, nan

from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.report.texts import percent
from hespas.validators.accuracy.result import Accuracy, EndToEnd, SummaryRow, Thresholds
from hespas.validators.accuracy.statistics import ErrorSummary, NoiseFloor

__all__ = ["Headline", "Limit", "headlines", "limits_of", "verdict_of", "whole_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One threshold: what was asked, the worst that was found, and ``status``: ``pass``, ``fail``, or
    ``unknown`` where nothing can be held against it.
    """

    name: str
    asked: str
    worst: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One asked estimator on one device. ``run`` is the source whose time it misses most, of ``runs``;
    ``best_baseline`` the naive model with the least MAPE. ``matched`` is the share of the device time that
    belongs to the program (NaN without a program).
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


def verdict_of(limits: tuple[Limit, ...]) -> str:
    """``pass``, ``fail``, ``unknown`` (a limit could not be checked) or ``none`` (no limit was set)."""
    found = {limit.status for limit in limits}
    return next((status for status in ("fail", "unknown", "pass") if status in found), "none")


def limits_of(done: Accuracy, limits: Thresholds) -> tuple[Limit, ...]:
    """The thresholds that were set, each held against the comparison on its own."""
    rows = [row for row in done.summary if _is_whole(row) and row.estimator in done.estimators]
    mapes = [row.errors.mape for row in rows if row.level == "shape"]
    shares = [row.errors.coverage for row in rows if row.level == "instance"]
    errors = [run.relative_error for run in done.end_to_end if run.estimator in done.estimators]
    mape, e2e, least = limits.max_mape, limits.max_e2e, limits.min_coverage
    told = (
        ("MAPE over shapes", mape, "at most", percent(_farthest(mapes)), _only(max_mape=mape), mapes),
        (
            "End-to-end error",
            e2e,
            "at most",
            percent(_farthest(errors), signed=True),
            _only(max_e2e=e2e),
            errors,
        ),
        ("Coverage of time", least, "at least", percent(_least(shares)), _only(min_coverage=least), shares),
    )
    return tuple(
        Limit(
            name=name,
            asked=f"{word} {percent(asked)}",
            worst=worst,
            status="fail" if done.exceeded(only) else "pass" if values else "unknown",
        )
        for name, asked, word, worst, only, values in told
        if not isnan(asked)
    )


def _only(*, max_mape: float = nan, max_e2e: float = nan, min_coverage: float = nan) -> Thresholds:
    return Thresholds(max_mape=max_mape, max_e2e=max_e2e, min_coverage=min_coverage)


def _farthest(values: list[float]) -> float:
    """The value farthest from 0; NaN where any is unknown."""
    return nan if not values or any(map(isnan, values)) else max(values, key=abs)


def _least(values: list[float]) -> float:
    return nan if not values or any(map(isnan, values)) else min(values)


def _is_whole(row: SummaryRow) -> bool:
    return row.op_class == "all" and row.size == "all"


def whole_rows(done: Accuracy, estimator: str, hardware: str) -> dict[str, SummaryRow]:
    """The row over everything of one estimator on one device, by level."""
    return {
        row.level: row
        for row in done.summary
        if _is_whole(row) and row.estimator == estimator and row.hardware == hardware
    }


def headlines(done: Accuracy) -> Iterator[Headline]:
    """One per device and asked estimator."""
    for hardware in dict.fromkeys(row.hardware for row in done.summary):
        naive = {
            name: rows["shape"].errors.mape
            for name in BASELINES
            if "shape" in (rows := whole_rows(done, name, hardware))
        }
        known = {name: mape for name, mape in naive.items() if not isnan(mape)}
        best = min(known, key=known.__getitem__, default="")
        matched = _matched(done, hardware)
        for estimator in done.estimators:
            rows = whole_rows(done, estimator, hardware)
            if not {"shape", "instance"} <= rows.keys():
                continue
            runs = _chief_runs(done, estimator, hardware)
            yield Headline(
                estimator=estimator,
                hardware=hardware,
                shape=rows["shape"].errors,
                instance=rows["instance"].errors,
                noise=done.noise.get(hardware, NoiseFloor(0, nan, nan, nan)),
                run=max(runs, key=_distance, default=None),
                runs=len(runs),
                best_baseline=best,
                baseline_mape=known.get(best, nan),
                matched=matched,
            )


def _distance(run: EndToEnd) -> float:
    error = abs(run.relative_error)
    return float("inf") if isnan(error) else error


def _chief_runs(done: Accuracy, estimator: str, hardware: str) -> list[EndToEnd]:
    """One run per source: against the span where it was simulated, else the sum of its operations."""
    chosen: dict[str, EndToEnd] = {}
    for run in done.end_to_end:
        if run.estimator != estimator or run.hardware != hardware:
            continue
        if run.basis == "span" or run.source not in chosen:
            chosen[run.source] = run
    return list(chosen.values())


def _matched(done: Accuracy, hardware: str) -> float:
    found = [
        done.coverage[each.source]
        for each in done.cases
        if each.hardware == hardware and each.source in done.coverage
    ]
    total = sum(each.time_ns for each in found)
    return sum(each.matched_time_ns for each in found) / total if total else nan
