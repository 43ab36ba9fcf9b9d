"""Sections of docs/accuracy/index.md: targets with results, and errors outside the measured range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hespas.estimators.learned.serialization import Card, cards_in, shipped_folder
from tools.figures import Errors, Section

__all__ = ["architecture_left_out", "goals_section", "growth_section", "left_out_section", "shipped_cards"]

_TEXT = """## Targets and results

This table compares the errors with the targets of the project. Figures are MAPE unless stated otherwise.
For tables of measurements they are means over devices and number formats. Each profile is a row of its own.
Figures for devices that were left out of a fit come from the cards of the learned models.
"""
_PROFILES = """
Profiles miss the targets for two reasons: each device has few recorded programs, and some kernels of a
program are in no other. On the H100 these are a patch convolution and many tiny products; on the MI300X
also transposes to odd rows and kernels of a few elements. Copies of one number also differ: their time
differs up to sevenfold between two recordings with two versions of ROCm.
"""
_INTERVALS = (0.85, 0.95)
_ON_OTHERS = "calibrated on the other profiles"
_FEWEST_ROWS = 20


@dataclass(frozen=True, slots=True)
class _Goal:
    """Target: ``reached`` may be at most ``limit``. If it is larger, the page prints ``why``."""

    what: str
    limit: float
    reached: float | None
    why: str = ""


_NO_SIBLING = "the architecture left out was measured with other kernels"


def goals_section(tables: Sequence[Section], profiles: Sequence[Section], cards: Iterable[Card]) -> str:
    """Return the table of targets; empty without figures."""
    found = [*_of_tables(tables), *_of_cards(list(cards)), *_of_profiles(profiles)]
    lines = [_line(goal) for goal in found if goal.reached is not None]
    lines += _of_intervals(tables)
    if not lines:
        return ""
    head = "| what | target | reached | |\n| --- | --- | --- | --- |\n"
    below = _PROFILES if any("see below" in line for line in lines) else ""
    return "".join((_TEXT, "\n", head, *lines, below))


def _line(goal: _Goal) -> str:
    reached = goal.reached if goal.reached is not None else float("nan")
    verdict = "" if reached <= goal.limit else f"missed: {goal.why}" if goal.why else "missed"
    return f"| {goal.what} | {goal.limit:.1%} | {reached:.1%} | {verdict} |\n"


def _of_tables(tables: Sequence[Section]) -> list[_Goal]:
    gemm, attention = "aiconfigurator_gemm.", "aiconfigurator_attention_"
    single, tpu = "neusight_perop.", "tpuv4_"

    def mape(table: str, op_class: Callable[[str], bool], estimator: str) -> float | None:
        rows = [row for each in tables if each.name.startswith(table) for row in each.rows]
        known = [
            row.errors[estimator].mape for row in rows if op_class(row.op_class) and estimator in row.errors
        ]
        figures = [value for value in known if value is not None]
        return fmean(figures) if figures else None

    def of(name: str) -> Callable[[str], bool]:
        return lambda op_class: op_class == name

    def every(op_class: str) -> bool:
        return bool(op_class)

    return [
        _Goal("matmuls in bf16, calibrated", 0.13, mape(gemm, of("matmul bf16"), "calibrated")),
        _Goal("matmuls in bf16, learned", 0.05, mape(gemm, of("matmul bf16"), "learned")),
        _Goal("matmuls in fp8, calibrated", 0.14, mape(gemm, of("matmul fp8"), "calibrated")),
        _Goal("matmuls in fp8, learned", 0.037, mape(gemm, of("matmul fp8"), "learned")),
        _Goal("attention of prompts, learned", 0.033, mape(f"{attention}context", every, "learned")),
        _Goal("attention of one token, learned", 0.07, mape(f"{attention}generation", every, "learned")),
        _Goal(
            "vector operations in f32, calibrated", 0.09, mape(single, of("vector f32_full"), "calibrated")
        ),
        _Goal("vector operations in f32, learned", 0.02, mape(single, of("vector f32_full"), "learned")),
        _Goal("matmuls of a TPU v4, calibrated", 0.09, mape(f"{tpu}matmul", every, "calibrated")),
        _Goal("matmuls of a TPU v4, learned", 0.05, mape(f"{tpu}matmul", every, "learned")),
        _Goal("vector operations of a TPU v4, learned", 0.025, mape(tpu, of("vector f16"), "learned")),
        _Goal("collectives, fitted", 0.11, mape("aiconfigurator_collectives", every, "collectives")),
        _Goal("collectives of another source, fitted", 0.11, mape("vidur_network", every, "collectives")),
        _Goal(
            "collectives, interpolated",
            0.05,
            mape("aiconfigurator_collectives", every, "database"),
            "equal bytes in two number formats take different times in the table itself",
        ),
        _Goal("collectives of another source, interpolated", 0.05, mape("vidur_network", every, "database")),
    ]


def architecture_left_out(cards: Iterable[Card]) -> list[float]:
    """Return the MAPE of matmuls in bf16 on each architecture that was left out of the fit."""
    rows = [row for card in cards if card.name == "gemm-bf16" for row in card.left_out]
    return [row.mape for row in rows if not row.siblings]


def _of_cards(cards: Sequence[Card]) -> list[_Goal]:
    rows = [row for card in cards if card.name == "gemm-bf16" for row in card.left_out]
    beside = [row.mape for row in rows if row.siblings]
    alone = architecture_left_out(cards)
    return [
        _Goal("matmuls in bf16, the device left out", 0.08, fmean(beside) if beside else None),
        _Goal(
            "matmuls in bf16, its architecture left out (median)",
            0.18,
            median(alone) if alone else None,
            _NO_SIBLING,
        ),
    ]


def _of_profiles(profiles: Sequence[Section]) -> list[_Goal]:
    limits = {"H100-SXM": 0.20, "MI300X": 0.28}
    found: list[_Goal] = []
    for section in profiles:
        for row in section.rows:
            errors = row.errors.get(_ON_OTHERS)
            if errors is not None and errors.mape is not None and row.hardware in limits:
                what = f"`{section.name}` by the other profiles"
                why = "" if errors.median_ape is None else f"median {errors.median_ape:.1%}, see below"
                found.append(_Goal(what, limits[row.hardware], errors.mape, why))
    return found


def _of_intervals(tables: Sequence[Section]) -> list[str]:
    """Return lines with the share of measurements in 90 % intervals, and the number of classes near 90 %."""
    lines: list[str] = []
    rows = [row for section in tables for row in section.rows]
    low, high = _INTERVALS
    for name in dict.fromkeys(name for row in rows for name in row.errors):
        known = [
            (errors.n, errors.interval_coverage)
            for row in rows
            if (errors := row.errors.get(name)) is not None and errors.interval_coverage is not None
        ]
        if not known:
            continue
        share = sum(n * held for n, held in known) / sum(n for n, _ in known)
        large = [held for n, held in known if n >= _FEWEST_ROWS]
        near = sum(low <= held <= high for held in large)
        verdict = "" if low <= share <= high else "missed; "
        lines.append(
            f"| rows in 90 % intervals, {name} | {low:.0%} to {high:.0%} | {share:.1%} | {verdict}"
            f"{near} of {len(large)} classes on a device are in this range |\n"
        )
    return lines


_GROWTH = """## Errors outside the measured range

Estimates are most often needed for sizes and devices that were not measured. This table has the MAPE of
`learned` there, from the cards of the shipped models (files with the errors on held-out rows):

- *inside*: rows of `devval`, the part of each table that no fit uses;
- *beyond sizes*: rows in the two largest octaves of any swept size, all of which were held out of the fit;
- *sibling*: a device that was left out, while others of its architecture were in the fit (mean);
- *architecture*: all devices of an architecture left out (median).

A cell is empty if there is no sibling or architecture to leave out. Rows that are faster than the peaks of
their device permit (`calibrate.impossible-rows`) are left out.

| model | inside | beyond sizes | sibling | architecture |
| --- | --- | --- | --- | --- |
"""
_PROGRAMS = """
The next table has the error of `composite` on recorded programs. The model of a program is in no fit on any
device. *end to end* is the error of the sum of all times of a program, weighted by executions (mean
absolute value over the programs).

| device | programs | MAPE (mean) | worst | end to end |
| --- | --- | --- | --- | --- |
"""


def growth_section(profiles: Sequence[Section], cards: Iterable[Card]) -> str:
    """Return the section on errors at sizes, devices and programs outside a fit; empty without cards."""
    lines = [line for card in cards if (line := _growth(card))]
    if not lines:
        return ""
    by_device: dict[str, list[Errors]] = {}
    for section in profiles:
        for row in section.rows:
            errors = row.errors.get(_ON_OTHERS)
            if errors is not None and errors.mape is not None:
                by_device.setdefault(row.hardware, []).append(errors)
    programs = [_of_programs(name, found) for name, found in sorted(by_device.items())]
    return "".join((_GROWTH, *lines, *((_PROGRAMS, *programs) if programs else ())))


def _of_programs(device: str, found: Sequence[Errors]) -> str:
    errors = [each.mape for each in found if each.mape is not None]
    sums = [abs(each.sum_error) for each in found if each.sum_error is not None]
    whole = f"{fmean(sums):.1%}" if sums else "-"
    return f"| {device} | {len(found)} | {fmean(errors):.1%} | {max(errors):.1%} | {whole} |\n"


def _growth(card: Card) -> str:
    known = [(row.n, row.mape) for row in card.errors if row.mape is not None and row.n]
    if not known or (card.region is None and not card.left_out):
        return ""
    inside = sum(n * mape for n, mape in known) / sum(n for n, _ in known)
    siblings = [row.mape for row in card.left_out if row.siblings]
    architectures = [row.mape for row in card.left_out if not row.siblings]
    figures = (
        inside,
        None if card.region is None else card.region.mape,
        fmean(siblings) if siblings else None,
        median(architectures) if architectures else None,
    )
    shown = " | ".join("-" if each is None else f"{each:.1%}" for each in figures)
    return f"| {card.name} | {shown} |\n"


_LEFT_OUT_TEXT = """Errors of `learned` on devices that are predicted from others only, from the cards of the
shipped models. A sibling is another device of the same architecture. Without a sibling in the fit,
the model has no data of the architecture.
"""


def shipped_cards() -> list[Card]:
    """Return the cards of the shipped models, by name."""
    return sorted((card for _, card in cards_in(shipped_folder())), key=lambda card: card.name)


def left_out_section(cards: Iterable[Card]) -> str:
    """Return a table with a line per model and devices left out of its fit; empty without any."""
    lines = [
        f"| {card.name} | {', '.join(row.hardware)} | {'yes' if row.siblings else 'no'} | {row.n:,} "
        f"| {row.mape:.1%} | {row.median_ape:.1%} | {row.bias:+.1%} |\n"
        for card in cards
        for row in card.left_out
    ]
    if not lines:
        return ""
    head = "| model | left out | siblings in the fit | rows | MAPE | median | bias |\n"
    return "".join((_LEFT_OUT_TEXT, "\n", head, "| --- " * 7, "|\n", *lines))
