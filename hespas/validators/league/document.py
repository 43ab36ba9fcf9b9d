"""The league as a value and as the JSON document ``hespas.league/1``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import nan
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import canonical_name
from hespas.validators.accuracy.statistics import error_figures
from hespas.validators.league.fit import Factor, factors_of
from hespas.validators.league.judged import Calibration, JudgedRow, Status, facts_of, judged
from hespas.validators.league.parts import COMPONENTS
from hespas.validators.league.predict import LeagueRow, league_rows
from hespas.validators.league.summaries import (
    NOISE_FLOOR,
    Baseline,
    Group,
    LayoutSet,
    Scaled,
    Speedup,
    baselines,
    group_of,
    group_rows,
    layout_sets,
    scaling,
    speedups,
)

__all__ = [
    "FactorsDocument",
    "League",
    "LeagueDocument",
    "MemoryErrors",
    "factors_json",
    "league_document",
    "league_json",
    "league_of",
    "read_factors",
    "refusals",
    "row_json",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Relative errors of the peak of memory of ``n`` rows: mean and median of their sizes, and their mean."""

    n: int
    mean_ape: float
    median_ape: float
    bias: float


@dataclass(frozen=True, slots=True, kw_only=True)
class League:
    """Rows of a table, judged in one mode of calibration, and what is said of them together."""

    table: str
    estimator: str
    calibrate: Calibration
    rows: tuple[JudgedRow, ...]
    groups: tuple[Group, ...]
    baselines: tuple[Baseline, ...]
    layouts: tuple[LayoutSet, ...]
    scaling: tuple[Scaled, ...]
    speedups: tuple[Speedup, ...]
    factors: tuple[Factor, ...]

    @property
    def whole(self) -> Group | None:
        """The errors of all rows; None where none counts."""
        return next((each for each in self.groups if each.by == "all"), None)

    @property
    def memory(self) -> MemoryErrors:
        """How far the peak of memory is off where it was published."""
        peaks = [(row.row.predicted.peak_memory_bytes / 2**30, row.row.number_of("peak_memory_gib"))
                 for row in self.rows]  # fmt: skip
        error = np.array([said / real - 1 for said, real in peaks if said > 0 and real > 0])
        figures = error_figures(error)
        return MemoryErrors(
            n=len(error),
            mean_ape=figures["mape"],
            median_ape=figures["median_ape"],
            bias=figures["bias"],
        )


def league_of(
    table: str,
    rows: Sequence[LeagueRow],
    calibrate: Calibration,
    factors: Sequence[Factor] = (),
    *,
    estimator: str = "composite",
) -> League:
    """Judge the rows of a table that ``estimator`` has predicted; ``factors`` are those of the mode of that
    name.
    """
    found = judged(rows, calibrate, factors)
    if calibrate not in {"none", "factors"}:
        factors = factors_of(facts_of(league_rows(rows)))
    return League(
        table=table,
        estimator=estimator,
        calibrate=calibrate,
        rows=tuple(found),
        groups=tuple(group_rows(found, calibrate)),
        baselines=tuple(each for each in baselines(found) if each.n),
        layouts=tuple(layout_sets(found, calibrate)),
        scaling=tuple(scaling(found, calibrate)),
        speedups=tuple(speedups(found, calibrate)),
        factors=tuple(factors),
    )


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    row: Count
    source: str
    model: str
    accelerator: str
    num_accelerators: Figure
    group: str
    status: Status
    reason: str
    position: str
    assumptions: list[str]
    predicted_ms: Figure
    low_ms: Figure
    high_ms: Figure
    published_ms: Figure
    published_low_ms: Figure
    published_high_ms: Figure
    relative_error: Figure
    peak_memory_gib: Figure
    published_memory_gib: Figure
    capacity_gib: Figure
    fits: bool | None
    parts: dict[str, float]
    error_parts: dict[str, float]
    dominant: str


class _Group(msgspec.Struct, frozen=True, kw_only=True):
    calibrate: Calibration
    by: str
    value: str
    n: Count
    mean_ape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Figure
    interval_coverage: Figure


class _Baseline(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    n: Count
    mean_ape: Figure
    median_ape: Figure
    p90_ape: Figure


class _LayoutSet(msgspec.Struct, frozen=True, kw_only=True):
    calibrate: Calibration
    source: str
    model: str
    accelerator: str
    num_accelerators: str
    layouts: Count
    best_in_top_two: bool
    tau: Figure


class _Scaled(msgspec.Struct, frozen=True, kw_only=True):
    calibrate: Calibration
    source: str
    model: str
    accelerator: str
    precision: str
    base: Count
    num_accelerators: Count
    published_efficiency: Figure
    predicted_efficiency: Figure
    relative_error: Figure


class _Speedup(msgspec.Struct, frozen=True, kw_only=True):
    calibrate: Calibration
    source: str
    model: str
    precision: str
    base: str
    base_accelerators: Count
    accelerator: str
    num_accelerators: Count
    published: Figure
    predicted: Figure
    right_side: bool
    relative_error: Figure


class _Factor(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    accelerator: str
    component: str
    factor: Figure
    std_error: Figure
    prior_std: Figure
    share: Figure
    n: Count


class _Finding(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    count: Count


class _Memory(msgspec.Struct, frozen=True, kw_only=True):
    n: Count
    mean_ape: Figure
    median_ape: Figure
    bias: Figure


class LeagueDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate league --json writes."""

    schema: Literal["hespas.league/1"] = "hespas.league/1"
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[_Finding]
    estimator: str
    calibrate: Calibration
    noise_floor: Figure
    rows: list[_Row]
    summary: list[_Group]
    peak_memory: _Memory
    baselines: list[_Baseline]
    layouts: list[_LayoutSet]
    scaling: list[_Scaled]
    speedups: list[_Speedup]
    factors: list[_Factor]


def league_document(done: League) -> LeagueDocument:
    """The document of a league."""
    return LeagueDocument(
        inputs=[done.table],
        diagnostics=_findings(done.rows),
        estimator=done.estimator,
        calibrate=done.calibrate,
        noise_floor=NOISE_FLOOR if any(map(_is_of_mlperf, done.rows)) else nan,
        rows=[row_json(row) for row in done.rows],
        summary=[_Group(**asdict(each)) for each in done.groups],
        peak_memory=_Memory(**asdict(done.memory)),
        baselines=[_Baseline(**asdict(each)) for each in done.baselines],
        layouts=[_LayoutSet(**asdict(each)) for each in done.layouts],
        scaling=[_Scaled(**asdict(each)) for each in done.scaling],
        speedups=[_Speedup(**asdict(each)) for each in done.speedups],
        factors=[_Factor(**asdict(each)) for each in done.factors],
    )


def _is_of_mlperf(row: JudgedRow) -> bool:
    """Whether the noise floor, of submissions to MLPerf, says something of a row."""
    return row.row.cells.get("source") == "MLPerf-Training"


def league_json(done: League) -> bytes:
    """The same as JSON text."""
    return document_bytes(league_document(done))


class FactorsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate calibrate --end-to-end writes."""

    schema: Literal["hespas.league_factors/1"] = "hespas.league_factors/1"
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[_Finding]
    hardware: str
    estimator: str
    factors: list[_Factor]
    summary: list[_Group]


def read_factors(path: Path, estimator: str) -> list[Factor]:
    """The factors of a document that ``hespas-validate calibrate --end-to-end`` or ``league`` wrote. Raises
    ``FormatError`` for another, ``UsageError`` where they were fitted to what another estimator says.
    """
    content = read_document(path, limits().report_bytes, "factors")
    try:
        stated = msgspec.json.decode(content, type=_Stated)
    except (ValueError, RecursionError) as error:
        why = str(error).replace("`", "'")  # of what stands between backquotes the command makes an option
        raise FormatError(f"no factors: {why}", path=str(path), hint=_WRITES_FACTORS) from error
    rows, fitted = stated.factors, stated.estimator
    if not rows:
        raise FormatError("no factors in it", path=str(path), hint=_WRITES_FACTORS)
    seen: set[tuple[str, str, str]] = set()
    for number, each in enumerate(rows):
        is_any = 1 / _MOST <= each.factor <= _MOST and 0 <= each.std_error <= _MOST
        if each.component not in COMPONENTS or not is_any:
            raise FormatError(
                f"component {clipped(each.component)!r}, factor {each.factor}, std_error {each.std_error}",
                path=str(path), position=f"factors[{number}]", hint=_WRITES_FACTORS,
            )  # fmt: skip
        key = each.source, each.accelerator, each.component
        if key in seen:
            raise FormatError(
                f"a second factor of {clipped(', '.join(key))}",
                path=str(path), position=f"factors[{number}]", hint=_WRITES_FACTORS,
            )  # fmt: skip
        seen.add(key)
    if fitted != estimator:
        raise UsageError(
            f"factors of the estimator {clipped(fitted)}, and rows are predicted with {clipped(estimator)}",
            path=str(path),
            hint=f"`estimator={fitted}`, or fit them again with `estimator={estimator}`: {_WRITES_FACTORS}",
        )
    known = [Factor(**{name: getattr(each, name) for name in Factor.__dataclass_fields__}) for each in rows]
    return [replace(each, accelerator=canonical_name(each.accelerator) or each.accelerator) for each in known]


_WRITES_FACTORS = "hespas-validate calibrate --hardware NAME --end-to-end --table FILE.csv --out FILE.json"


_MOST = 1000.0
"""Of a factor and what it is off by: no part of a step is so far from what is predicted."""


class _Stated(msgspec.Struct, frozen=True):
    schema: Literal["hespas.league_factors/1", "hespas.league/1"]
    factors: list[_Factor]
    estimator: str = "composite"
    """Documents of versions that had no other do not say it."""


def factors_json(before: League, after: League, hardware: str) -> bytes:
    """Factors of an accelerator, and the errors before and on groups left out of the fit as JSON text."""
    groups = [
        each
        for done in (before, after)
        for each in done.groups
        if each.by == "all" or (each.by == "accelerator" and each.value == hardware)
    ]
    return document_bytes(
        FactorsDocument(
            inputs=[after.table],
            diagnostics=_findings(after.rows),
            hardware=hardware,
            estimator=after.estimator,
            factors=[_Factor(**asdict(each)) for each in after.factors if each.accelerator == hardware],
            summary=[_Group(**asdict(each)) for each in groups],
        )
    )


def refusals(rows: Iterable[JudgedRow]) -> list[tuple[str, str, int]]:
    """Why rows are not predicted, where the first is, and how many for that reason."""
    found: dict[str, list[LeagueRow]] = {}
    for row in rows:
        if row.row.predicted.refused:
            found.setdefault(row.row.predicted.refused, []).append(row.row)
    return [(reason, some[0].position, len(some)) for reason, some in found.items()]


def _findings(rows: Sequence[JudgedRow]) -> list[_Finding]:
    """Rows that are not predicted, by reason, and those of which something was assumed or left out."""
    assumed: dict[str, _Finding] = {}
    for row in rows:
        for each in row.row.predicted.assumed:
            before = assumed.get(each.code)
            code = f"league.{each.code}" if each.code.startswith("row.") else each.code
            message, count = (before.message, before.count) if before else (each.message, 0)
            assumed[each.code] = _Finding(code=code, message=message, count=count + 1)
    refused = refusals(rows)
    return [
        *(_Finding(code="league.refused", message=f"{place}: {why}", count=n) for why, place, n in refused),
        *(assumed[code] for code in sorted(assumed)),
    ]


def row_json(row: JudgedRow) -> _Row:
    """A row of the document."""
    cells, predicted = row.row.cells, row.row.predicted
    return _Row(
        row=row.row.number,
        source=cells.get("source", ""),
        model=cells.get("model", ""),
        accelerator=cells.get("accelerator", ""),
        num_accelerators=row.row.number_of("num_accelerators"),
        group=group_of(row),
        status=row.status,
        reason=predicted.refused,
        position=row.row.position if predicted.refused else "",
        assumptions=list(predicted.assumptions),
        predicted_ms=row.predicted_ms,
        low_ms=row.low_ms,
        high_ms=row.high_ms,
        published_ms=row.published_ms,
        published_low_ms=row.published_low_ms,
        published_high_ms=row.published_high_ms,
        relative_error=row.relative_error,
        peak_memory_gib=predicted.peak_memory_bytes / 2**30,
        published_memory_gib=row.row.number_of("peak_memory_gib"),
        capacity_gib=predicted.capacity_bytes / 2**30,
        fits=predicted.fits,
        parts=row.parts,
        error_parts=row.error_parts,
        dominant=row.dominant,
    )
