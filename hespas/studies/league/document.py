"""Result of a league, and its JSON documents ``hespas.league/1`` and ``hespas.league_factors/1``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import nan
from pathlib import Path
from typing import Literal

import msgspec

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.files.limits import limits
from hespas.files.streams import read_document
from hespas.fitting.effects import COMPONENTS, ComponentFactor, factors_of
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import canonical_name
from hespas.studies.errors import ErrorSizes
from hespas.studies.league.evaluation import (
    Calibration,
    EvaluatedRow,
    Status,
    evaluate_rows,
    fit_rows_of,
)
from hespas.studies.league.rows import LeagueRow
from hespas.studies.league.summaries import (
    NOISE_FLOOR,
    AcceleratorSpeedup,
    BaselineErrors,
    LayoutRanking,
    RowGroupErrors,
    ScalingPoint,
    group_errors,
    group_of,
    naive_baselines,
    rank_layouts,
    scaling_points,
    speedups,
)

__all__ = [
    "FactorsDocument",
    "League",
    "LeagueDocument",
    "PeakMemoryErrors",
    "evaluate_league",
    "factors_json",
    "league_document",
    "league_json",
    "read_factors",
    "refusals",
]


class PeakMemoryErrors(ErrorSizes, frozen=True, kw_only=True):
    """Errors of the peak memory of the rows that publish it."""

    bias: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class League:
    """Result of a league: the rows of a table of training runs, evaluated with one calibration, and their
    summaries.
    """

    table: str
    estimator: str
    calibrate: Calibration
    rows: tuple[EvaluatedRow, ...]
    groups: tuple[RowGroupErrors, ...]
    baselines: tuple[BaselineErrors, ...]
    layouts: tuple[LayoutRanking, ...]
    scaling: tuple[ScalingPoint, ...]
    speedups: tuple[AcceleratorSpeedup, ...]
    factors: tuple[ComponentFactor, ...]

    @property
    def whole(self) -> RowGroupErrors | None:
        """Return the errors of all rows; None if no row is both predicted and measured."""
        return next((group for group in self.groups if group.by == "all"), None)

    @property
    def memory(self) -> PeakMemoryErrors:
        """Return the errors of the predicted peak memory, for rows that publish their peak memory."""
        return PeakMemoryErrors.of(
            row.row.compared_memory_bytes / 2**30 / published - 1
            for row in self.rows
            if (published := row.row.number_of("peak_memory_gib")) > 0 < row.row.compared_memory_bytes
        )


def evaluate_league(
    table: str,
    rows: Sequence[LeagueRow],
    calibrate: Calibration,
    factors: Sequence[ComponentFactor] = (),
    *,
    estimator: str = "composite",
) -> League:
    """Return the league (errors of predicted step times) for the rows of a table, predicted by ``estimator``.
    ``factors`` are correction factors of components; they are used if ``calibrate`` is ``factors``.
    """
    evaluated = evaluate_rows(rows, calibrate, factors)
    if calibrate not in {"none", "factors"}:
        factors = factors_of(fit_rows_of([row for row in rows if not row.predicted.refused]))
    return League(
        table=table,
        estimator=estimator,
        calibrate=calibrate,
        rows=tuple(evaluated),
        groups=tuple(group_errors(evaluated, calibrate)),
        baselines=tuple(baseline for baseline in naive_baselines(evaluated) if baseline.n),
        layouts=tuple(rank_layouts(evaluated, calibrate)),
        scaling=tuple(scaling_points(evaluated, calibrate)),
        speedups=tuple(speedups(evaluated, calibrate)),
        factors=tuple(factors),
    )


class _LeagueRowJson(msgspec.Struct, frozen=True, kw_only=True):
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
    device_memory_gib: Figure
    capacity_gib: Figure
    fits: bool | None
    parts: dict[str, float]
    error_parts: dict[str, float]
    dominant: str


class _LeagueDiagnosticJson(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    count: Count


class LeagueDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate league."""

    schema: Literal["hespas.league/1"] = "hespas.league/1"
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[_LeagueDiagnosticJson]
    estimator: str
    calibrate: Calibration
    noise_floor: Figure
    rows: list[_LeagueRowJson]
    summary: Sequence[RowGroupErrors]
    peak_memory: PeakMemoryErrors
    baselines: Sequence[BaselineErrors]
    layouts: Sequence[LayoutRanking]
    scaling: Sequence[ScalingPoint]
    speedups: Sequence[AcceleratorSpeedup]
    factors: Sequence[ComponentFactor]


class FactorsDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Result of hespas-validate calibrate --end-to-end."""

    schema: Literal["hespas.league_factors/1"] = "hespas.league_factors/1"
    hespas_version: str = __version__
    inputs: list[str]
    diagnostics: list[_LeagueDiagnosticJson]
    hardware: str
    estimator: str
    factors: Sequence[ComponentFactor]
    summary: Sequence[RowGroupErrors]


class _StoredFactors(msgspec.Struct, frozen=True):
    """Fields of a factors document that are needed to apply its factors."""

    schema: Literal["hespas.league_factors/1", "hespas.league/1"]
    factors: list[ComponentFactor]
    estimator: str = "composite"
    """Documents of versions with one estimator do not have this field."""


_FACTORS_COMMAND = "hespas-validate calibrate --hardware NAME --end-to-end --table FILE.csv --out FILE.json"
_MAX_FACTOR = 1000.0
"""Limit of a factor, its inverse and its standard error: larger ones are errors in the file."""


def league_document(league: League) -> LeagueDocument:
    """Return the JSON document of a league. Its noise floor is NaN without submissions to MLPerf."""
    has_mlperf = any(row.row.cells.get("source") == "MLPerf-Training" for row in league.rows)
    rows: list[_LeagueRowJson] = []
    for row in league.rows:
        cells, predicted = row.row.cells, row.row.predicted
        rows.append(
            _LeagueRowJson(
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
                peak_memory_gib=row.row.compared_memory_bytes / 2**30,
                published_memory_gib=row.row.number_of("peak_memory_gib"),
                device_memory_gib=predicted.device_memory_bytes / 2**30,
                capacity_gib=predicted.capacity_bytes / 2**30,
                fits=predicted.fits,
                parts=row.parts,
                error_parts=row.error_parts,
                dominant=row.dominant,
            )
        )
    return LeagueDocument(
        inputs=[league.table],
        diagnostics=_diagnostics(league.rows),
        estimator=league.estimator,
        calibrate=league.calibrate,
        noise_floor=NOISE_FLOOR if has_mlperf else nan,
        rows=rows,
        summary=league.groups,
        peak_memory=league.memory,
        baselines=league.baselines,
        layouts=league.layouts,
        scaling=league.scaling,
        speedups=league.speedups,
        factors=league.factors,
    )


def league_json(league: League) -> bytes:
    """Return the document of a league as JSON text."""
    return document_bytes(league_document(league))


def factors_json(before: League, after: League, hardware: str) -> bytes:
    """Return JSON text with the component factors of an accelerator.

    It also has the errors ``before`` and ``after`` correction. The errors after correction are measured on
    groups of rows that were left out of the fit.
    """
    groups = [
        group
        for league in (before, after)
        for group in league.groups
        if group.by == "all" or (group.by == "accelerator" and group.value == hardware)
    ]
    return document_bytes(
        FactorsDocument(
            inputs=[after.table],
            diagnostics=_diagnostics(after.rows),
            hardware=hardware,
            estimator=after.estimator,
            factors=[factor for factor in after.factors if factor.accelerator == hardware],
            summary=groups,
        )
    )


def read_factors(path: Path, estimator: str) -> list[ComponentFactor]:
    """Read the factors in a document of ``hespas-validate calibrate --end-to-end`` or ``league``.

    Raises ``FormatError`` for another document, ``UsageError`` for factors of another estimator.
    """

    def fault(message: str, position: str | None = None) -> FormatError:
        return FormatError(
            message, path=str(path), position=position, hint=f"write factors: {_FACTORS_COMMAND}"
        )

    content = read_document(path, limits().report_bytes, "factors")
    try:
        document = msgspec.json.decode(content, type=_StoredFactors)
    except (ValueError, RecursionError) as error:
        reason = str(error).replace("`", "'")  # the command line shows text in backquotes as an option
        raise fault(f"not a factors file: {reason}") from error
    if not document.factors:
        raise fault("the file has no factors")
    keys: set[tuple[str, str, str]] = set()
    factors: list[ComponentFactor] = []
    for number, row in enumerate(document.factors):
        position = f"factors[{number}]"
        is_valid = 1 / _MAX_FACTOR <= row.factor <= _MAX_FACTOR and 0 <= row.std_error <= _MAX_FACTOR
        if row.component not in COMPONENTS or not is_valid:
            raise fault(
                f"invalid component {clipped(row.component)!r}, factor {row.factor} or std_error "
                f"{row.std_error}",
                position,
            )
        key = row.source, row.accelerator, row.component
        if key in keys:
            raise fault(f"duplicate factor of {clipped(', '.join(key))}", position)
        keys.add(key)
        factors.append(replace(row, accelerator=canonical_name(row.accelerator) or row.accelerator))
    if document.estimator != estimator:
        fitted = document.estimator
        raise UsageError(
            f"the factors are for the estimator {clipped(fitted)}, not for {clipped(estimator)}",
            path=str(path),
            hint=f"set `estimator={fitted}`, or fit them again with `estimator={estimator}`: "
            f"{_FACTORS_COMMAND}",
        )
    return factors


def refusals(rows: Iterable[EvaluatedRow]) -> list[tuple[str, str, int]]:
    """Return each reason for which rows are not predicted, with the position of the first such row and the
    number of rows.
    """
    refused: dict[str, list[LeagueRow]] = {}
    for row in rows:
        if row.row.predicted.refused:
            refused.setdefault(row.row.predicted.refused, []).append(row.row)
    return [(reason, members[0].position, len(members)) for reason, members in refused.items()]


def _diagnostics(rows: Sequence[EvaluatedRow]) -> list[_LeagueDiagnosticJson]:
    """Return diagnostics of rows that are not predicted, one per reason, and of rows with assumptions or
    omissions, one per code.
    """
    assumed: dict[str, _LeagueDiagnosticJson] = {}
    for row in rows:
        for assumption in row.row.predicted.assumed:
            code = assumption.code
            first = assumed.get(code)
            assumed[code] = _LeagueDiagnosticJson(
                code=f"league.{code}" if code.startswith("row.") else code,
                message=first.message if first else assumption.message,
                count=first.count + 1 if first else 1,
            )
    return [
        *(
            _LeagueDiagnosticJson(code="league.refused", message=f"{position}: {reason}", count=count)
            for reason, position, count in refusals(rows)
        ),
        *(assumed[code] for code in sorted(assumed)),
    ]
