"""The comparison as JSON: these types are ``hespas/schemas/accuracy.schema.json``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from math import nan
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from hespas._version import __version__
from hespas.files.documents import Count, Figure, document_bytes
from hespas.graph import Diagnostics
from hespas.validators.accuracy.coverage import Coverage, Unmatched
from hespas.validators.accuracy.lint import LintFinding
from hespas.validators.accuracy.result import (
    Accuracy,
    Contribution,
    SpeedUp,
    Step,
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
"""What a document of this version says in ``schema``."""

_NO_STEP = Step(span_ns=nan, busy_ns=nan, is_simulated=False)


class SummaryJson(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one estimator on one device, over all cases or over a part of them."""

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
    ci_low: Annotated[Figure, Meta(description="of mape, 95 %, bootstrap over shapes")]
    ci_high: Figure
    interval_n: Annotated[Count, Meta(description="cases with an interval")]
    interval_coverage: Annotated[
        Figure, Meta(description="share of them whose interval holds the measurement")
    ]


class DiagnosticJson(msgspec.Struct, frozen=True, kw_only=True):
    """A finding; ``count`` is of all with the same code."""

    code: str
    severity: Literal["info", "warning", "error"]
    path: str
    location: str
    message: str
    count: Count


class _EndToEnd(msgspec.Struct, frozen=True, kw_only=True):
    workload: str
    source: str
    hardware: str
    estimator: str
    basis: Annotated[
        Literal["span", "busy", "sum of operations"],
        Meta(description="sum of operations: of predictions, and of the means of what was measured"),
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
            description="how many steps are compared: a recording without its program is summed as a whole; "
            "null where nobody knows"
        ),
    ]
    relative_error: Figure


class _Noise(msgspec.Struct, frozen=True, kw_only=True):
    hardware: str
    n: Count
    mape: Annotated[
        Figure,
        Meta(
            description="mean over cases that were repeated: distance from the median of equal work, and "
            "between runs"
        ),
    ]
    median_ape: Figure
    p90_ape: Figure


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    workload: str
    hardware: str
    cases: Count
    shapes: Count
    measured_ns: Figure
    device_share: Annotated[Figure, Meta(description="share of the device time that the cases stand for")]
    span_ns: Annotated[Figure, Meta(description="measured, median over runs")]
    busy_ns: Annotated[Figure, Meta(description="measured, median over ranks and runs")]
    is_simulated: Annotated[
        bool, Meta(description="the program was simulated; of others operations are added up")
    ]


class _Coverage(msgspec.Struct, frozen=True, kw_only=True):
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
    unmatched_events: tuple[Unmatched, ...]
    unmatched_nodes: tuple[Unmatched, ...]
    unlisted_events: Annotated[Count, Meta(description="further kinds of unmatched events")]
    unlisted_nodes: Annotated[Count, Meta(description="further kinds of unmatched operations")]


class _Join(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    module: str
    instruction: str
    rule: Annotated[str, Meta(description="how it was matched; empty: not at all")]
    inferred: Annotated[bool, Meta(description="the compiler made it up; operations are those it serves")]
    operations: tuple[str, ...]
    events: Count
    time_ns: Figure
    group: Annotated[int, Meta(ge=-1, description="instructions of one group are one case; -1: in none")]


class AccuracyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What hespas-validate accuracy --json writes: null is unknown, errors are relative to the
    measurement.
    """

    schema: Literal["hespas.accuracy/1"] = SCHEMA_ID
    hespas_version: str = __version__
    inputs: tuple[str, ...]
    estimators: Annotated[
        tuple[str, ...],
        Meta(
            description="those asked for; datasheet-roofline, one-efficiency and overhead+two-efficiencies "
            "are naive baselines"
        ),
    ]
    thresholds: Thresholds
    exceeded: Annotated[tuple[str, ...], Meta(description="a sentence for each threshold passed")]
    summary: list[SummaryJson]
    end_to_end: list[_EndToEnd]
    noise: list[_Noise]
    sources: list[_Source]
    coverage: list[_Coverage]
    joins: Annotated[
        list[_Join], Meta(description="what each instruction that ran carries out, most time first")
    ]
    speed_ups: tuple[SpeedUp, ...]
    trends: tuple[Trend, ...]
    contributions: tuple[Contribution, ...]
    lint: tuple[LintFinding, ...]
    diagnostics: list[DiagnosticJson]


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are null
def accuracy_json(done: Accuracy, limits: Thresholds) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    document = AccuracyDocument(
        inputs=done.inputs,
        estimators=done.estimators,
        thresholds=limits,
        exceeded=done.exceeded(limits),
        summary=[summary_json(row) for row in done.summary],
        end_to_end=[_EndToEnd(**_columns(run), relative_error=run.relative_error) for run in done.end_to_end],
        noise=[_Noise(hardware=name, **_columns(floor)) for name, floor in done.noise.items()],
        sources=list(_sources(done)),
        coverage=[_coverage(source, found) for source, found in done.coverage.items()],
        joins=[
            _Join(source=source, **_columns(join)) for source, joins in done.joins.items() for join in joins
        ],
        speed_ups=done.speed_ups,
        trends=done.trends,
        contributions=done.contributions,
        lint=done.lint,
        diagnostics=diagnostics_json(done.diagnostics),
    )
    return document_bytes(document)


def diagnostics_json(diagnostics: Diagnostics) -> list[DiagnosticJson]:
    """The findings of a run."""
    counts = diagnostics.counts()
    return [
        DiagnosticJson(
            code=found.code,
            severity=found.severity.value,
            path=found.path,
            location=found.location,
            message=found.message,
            count=counts[found.code],
        )
        for found in diagnostics
    ]


def summary_json(row: SummaryRow) -> SummaryJson:
    """A row with the figures of its errors beside it."""
    columns = _columns(row)
    return SummaryJson(**_columns(columns.pop("errors")), **columns)


def _sources(done: Accuracy) -> Iterator[_Source]:
    for cases in done.cases:
        step = done.steps.get(cases.source, _NO_STEP)
        yield _Source(
            source=cases.source,
            workload=cases.workload,
            hardware=cases.hardware,
            cases=len(cases),
            shapes=len(cases.shapes),
            measured_ns=float(cases.measured_ns.sum()),
            device_share=cases.share,
            **_columns(step),
        )


def _coverage(source: str, found: Coverage) -> _Coverage:
    return _Coverage(
        source=source, time_share=found.time_share, count_share=found.count_share, **_columns(found)
    )


def _columns(row: Any) -> dict[str, Any]:
    """The fields of a dataclass by name."""
    return {each.name: getattr(row, each.name) for each in fields(row)}
