"""JSON document of an accuracy comparison; its types define ``hespas/schemas/accuracy.schema.json``."""

from __future__ import annotations

from dataclasses import fields
from math import nan
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.validators.accuracy.coverage import UnmatchedName
from hespas.validators.accuracy.lint import LintFinding
from hespas.validators.accuracy.result import (
    Accuracy,
    Contribution,
    MeasuredStep,
    SpeedUp,
    SummaryRow,
    Thresholds,
    Trend,
)

__all__ = [
    "SCHEMA_ID",
    "AccuracyDocument",
    "DiagnosticJson",
    "SummaryJson",
    "accuracy_json",
    "diagnostics_json",
    "summary_json",
]

SCHEMA_ID: Final = "hespas.accuracy/1"
"""Value of ``schema`` in documents of this version."""

_NO_STEP = MeasuredStep(span_ns=nan, busy_ns=nan, is_simulated=False)


class SummaryJson(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one estimator on one device in the JSON document, over all cases or over one part."""

    estimator: str
    hardware: str
    level: Annotated[
        Literal["instance", "shape"],
        Meta(description="instance: every case; shape: each distinct shape once"),
    ]
    op_class: Annotated[str, Meta(description="all, or one class")]
    size: Annotated[str, Meta(description="all, or one bucket of measured time")]
    n: Count
    of: Count
    shapes: Count
    coverage: Annotated[
        Figure,
        Meta(description="share of the measured time; in rows over all, of all device time, matched or not"),
    ]
    mape: Figure
    median_ape: Figure
    p90_ape: Figure
    bias: Annotated[Figure, Meta(description="mean signed error")]
    sum_error: Annotated[Figure, Meta(description="error of the sums")]
    rmse_ns: Figure
    log_ratio: Annotated[Figure, Meta(description="median of ln(predicted / measured)")]
    ci_low: Annotated[
        Figure, Meta(description="lower end of the 95 % interval of mape, bootstrap over shapes")
    ]
    ci_high: Figure
    interval_n: Annotated[Count, Meta(description="cases with an interval")]
    interval_coverage: Annotated[
        Figure, Meta(description="share of them with the measurement inside of the interval")
    ]


class DiagnosticJson(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnostic of a run in the JSON document. ``count`` is the number of all diagnostics with the same
    code.
    """

    code: str
    severity: Literal["info", "warning", "error"]
    path: str
    location: str
    message: str
    count: Count


class _EndToEndJson(msgspec.Struct, frozen=True, kw_only=True):
    workload: str
    source: str
    hardware: str
    estimator: str
    basis: Annotated[
        Literal["span", "busy", "sum of operations"],
        Meta(description="sum of operations: sums of the predictions and of the mean measured times"),
    ]
    predicted_ns: Figure
    measured_ns: Figure
    is_lower_bound: bool
    coverage: Annotated[
        Figure, Meta(description="share of the source's device time that the estimator covers")
    ]
    steps: Annotated[
        Figure,
        Meta(
            description="number of steps in the sum: a recording without its program is added up as a whole; "
            "null if unknown"
        ),
    ]
    relative_error: Figure


class _NoiseJson(msgspec.Struct, frozen=True, kw_only=True):
    hardware: str
    n: Count
    mape: Annotated[
        Figure,
        Meta(
            description="mean over repeated cases of the distance from the median of equal work and of the "
            "distance between runs"
        ),
    ]
    median_ape: Figure
    p90_ape: Figure


class _SourceJson(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    workload: str
    hardware: str
    cases: Count
    shapes: Count
    measured_ns: Figure
    device_share: Annotated[Figure, Meta(description="share of the device time that the cases represent")]
    span_ns: Annotated[Figure, Meta(description="measured, median over runs")]
    busy_ns: Annotated[Figure, Meta(description="measured, median over ranks and runs")]
    is_simulated: Annotated[
        bool, Meta(description="the program was simulated; otherwise operations are added up")
    ]


class _CoverageJson(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    time_share: Figure
    count_share: Figure
    events: Count
    matched_events: Count
    time_ns: Figure
    matched_time_ns: Figure
    compared_time_ns: Figure
    nodes: Count
    matched_nodes: Count
    by_rule: Annotated[dict[str, Figure], Meta(description="matched time [ns] by rule")]
    inferred_time_ns: Figure
    unmatched_events: tuple[UnmatchedName, ...]
    unmatched_nodes: tuple[UnmatchedName, ...]
    unlisted_events: Annotated[Count, Meta(description="names of unmatched events that are not listed")]
    unlisted_nodes: Annotated[Count, Meta(description="names of unmatched operations that are not listed")]


class _JoinJson(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    module: str
    instruction: str
    rule: Annotated[str, Meta(description="rule that matched it; empty: unmatched")]
    inferred: Annotated[
        bool,
        Meta(description="created by the compiler; has the operations of the instructions that it serves"),
    ]
    operations: tuple[str, ...]
    events: Count
    time_ns: Figure
    group: Annotated[int, Meta(ge=-1, description="instructions of one group are one case; -1: no group")]


class AccuracyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Document that hespas-validate accuracy --json writes; null is unknown, errors are relative."""

    schema: Literal["hespas.accuracy/1"] = SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    estimators: Annotated[
        tuple[str, ...],
        Meta(
            description="requested ones; datasheet-roofline, one-efficiency and overhead+two-efficiencies "
            "are naive baselines"
        ),
    ]
    thresholds: Thresholds
    exceeded: Annotated[tuple[str, ...], Meta(description="a sentence for each exceeded threshold")]
    summary: list[SummaryJson]
    end_to_end: list[_EndToEndJson]
    noise: list[_NoiseJson]
    sources: list[_SourceJson]
    coverage: list[_CoverageJson]
    joins: Annotated[
        list[_JoinJson], Meta(description="operations of each instruction that ran, most time first")
    ]
    speed_ups: tuple[SpeedUp, ...]
    trends: tuple[Trend, ...]
    contributions: tuple[Contribution, ...]
    lint: tuple[LintFinding, ...]
    diagnostics: list[DiagnosticJson]


@np.errstate(over="ignore", invalid="ignore")  # sums beyond the range of a float become null
def accuracy_json(result: Accuracy, limits: Thresholds) -> bytes:
    """Return the document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    document = AccuracyDocument(
        inputs=result.inputs,
        estimators=result.estimators,
        thresholds=limits,
        exceeded=result.exceeded(limits),
        summary=[summary_json(row) for row in result.summary],
        end_to_end=[
            _EndToEndJson(**_columns(run), relative_error=run.relative_error) for run in result.end_to_end
        ],
        noise=[_NoiseJson(hardware=name, **_columns(floor)) for name, floor in result.noise.items()],
        sources=[
            _SourceJson(
                source=cases.source,
                workload=cases.workload,
                hardware=cases.hardware,
                cases=len(cases),
                shapes=len(cases.shapes),
                measured_ns=float(cases.measured_ns.sum()),
                device_share=cases.share,
                **_columns(result.steps.get(cases.source, _NO_STEP)),
            )
            for cases in result.cases
        ],
        coverage=[
            _CoverageJson(
                source=source,
                time_share=coverage.time_share,
                count_share=coverage.count_share,
                **_columns(coverage),
            )
            for source, coverage in result.coverage.items()
        ],
        joins=[
            _JoinJson(source=source, **_columns(join))
            for source, joins in result.joins.items()
            for join in joins
        ],
        speed_ups=result.speed_ups,
        trends=result.trends,
        contributions=result.contributions,
        lint=result.lint,
        diagnostics=diagnostics_json(result.diagnostics),
    )
    return document_bytes(document)


def diagnostics_json(diagnostics: Diagnostics) -> list[DiagnosticJson]:
    """Return the diagnostics of a run for a document."""
    counts = diagnostics.counts()
    return [
        DiagnosticJson(
            code=diagnostic.code,
            severity=diagnostic.severity.value,
            path=diagnostic.path,
            location=diagnostic.location,
            message=diagnostic.message,
            count=counts[diagnostic.code],
        )
        for diagnostic in diagnostics
    ]


def summary_json(row: SummaryRow) -> SummaryJson:
    """Return a summary row in the form of the JSON document, with its error figures as columns."""
    columns = _columns(row)
    return SummaryJson(**_columns(columns.pop("errors")), **columns)


def _columns(row: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {field.name: getattr(row, field.name) for field in fields(row)}
