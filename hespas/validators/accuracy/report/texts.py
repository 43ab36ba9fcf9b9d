"""Names and figures as people read them. Names come from measured files: they may hold anything."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isnan, nan

from hespas.validators.accuracy.baselines import BASELINES
from hespas.validators.accuracy.result import Accuracy, EndToEnd, SummaryRow, Thresholds
from hespas.validators.accuracy.statistics import ErrorSummary, NoiseFloor

__all__ = [
    "UNKNOWN",
    "Headline",
    "Limit",
    "clip",
    "count_text",
    "headlines",
    "limits_of",
    "percent",
    "rate_text",
    "shown",
    "time_text",
    "verdict_of",
    "whole_rows",
]

UNKNOWN = "\N{EN DASH}"
"""Stands where nothing is known."""

_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_RATES = ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))
_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "us"))


def clip(text: str, limit: int) -> str:
    """A text of at most ``limit`` characters: its start and its end, ``…`` for what is left out between."""
    if len(text) <= limit:
        return text
    tail = max((limit - 1) // 3, 1)
    return f"{text[: limit - 1 - tail]}…{text[-tail:]}"


def shown(text: str, limit: int = 160) -> str:
    r"""A name cut to ``limit`` characters, whose control, bidirectional and unpaired ones are written as
    ``\u202e``: what would reorder, hide or break the text around it becomes visible.
    """
    cut = clip(text, limit)
    if cut.isprintable():
        return cut
    return "".join(
        _escaped(letter) if unicodedata.category(letter) in _INVISIBLE else letter for letter in cut
    )


def _escaped(letter: str) -> str:
    code = ord(letter)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def percent(value: float, *, signed: bool = False) -> str:
    """``12.3%`` of 0.123; without decimals from 1000 % on."""
    if isnan(value):
        return UNKNOWN
    places = 0 if abs(value) >= 10 else 1
    return f"{value:{'+' if signed else ''},.{places}%}"


def time_text(time_ns: float, *, signed: bool = False) -> str:
    """Nanoseconds in the unit that leaves three or four digits."""
    if isnan(time_ns):
        return UNKNOWN
    sign = "+" if signed else ""
    for size, unit in _TIMES:
        if abs(time_ns) >= size:
            return f"{_digits(time_ns / size, sign)} {unit}"
    return f"{time_ns:{sign}.3g} ns"


def _digits(value: float, sign: str) -> str:
    places = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:{sign},.{places}f}"


def rate_text(flops_per_s: float) -> str:
    """FLOP/s in the unit that leaves three or four digits."""
    if isnan(flops_per_s):
        return UNKNOWN
    size, unit = next((row for row in _RATES if flops_per_s >= row[0]), _RATES[-1])
    return f"{flops_per_s / size:,.4g} {unit}"


def count_text(value: float) -> str:
    """A count with separators; a dash for one nobody knows."""
    return UNKNOWN if isnan(value) else f"{value:,.0f}"


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
    checks = (
        ("MAPE over shapes", "max_mape", "at most", percent(_farthest(mapes)), mapes),
        ("End-to-end error", "max_e2e", "at most", percent(_farthest(errors), signed=True), errors),
        ("Coverage of time", "min_coverage", "at least", percent(_least(shares)), shares),
    )
    none = Thresholds(max_mape=nan, max_e2e=nan, min_coverage=nan)
    found: list[Limit] = []
    for name, field, word, worst, values in checks:
        asked: float = getattr(limits, field)
        if not isnan(asked):
            fails = done.exceeded(replace(none, **{field: asked}))
            status = "fail" if fails else "pass" if values else "unknown"
            found.append(Limit(name=name, asked=f"{word} {percent(asked)}", worst=worst, status=status))
    return tuple(found)


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
