"""The comparison as JSON: ``hespas/schemas/accuracy.schema.json``."""

from __future__ import annotations

from dataclasses import asdict
from math import nan

import msgspec
import numpy as np

from hespas._version import __version__
from hespas.files.documents import document_bytes
from hespas.graph import Diagnostics
from hespas.validators.accuracy.coverage import Coverage
from hespas.validators.accuracy.result import Accuracy, Step, SummaryRow, Thresholds

__all__ = ["SCHEMA_ID", "accuracy_json", "diagnostics_json", "summary_json"]

SCHEMA_ID = "hespas.accuracy/1"
"""What a document of this version says in ``schema``."""

_NO_STEP = Step(span_ns=nan, busy_ns=nan, is_simulated=False)


@np.errstate(over="ignore", invalid="ignore")  # sums past what a float holds are null
def accuracy_json(done: Accuracy, limits: Thresholds) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline; unknown figures are null."""
    document = {
        "schema": SCHEMA_ID,
        "hespas_version": __version__,
        "inputs": done.inputs,
        "estimators": done.estimators,
        "thresholds": asdict(limits),
        "exceeded": done.exceeded(limits),
        "summary": [summary_json(row) for row in done.summary],
        "end_to_end": [asdict(run) | {"relative_error": run.relative_error} for run in done.end_to_end],
        "noise": [{"hardware": name, **asdict(floor)} for name, floor in done.noise.items()],
        "sources": [
            {
                "source": cases.source,
                "workload": cases.workload,
                "hardware": cases.hardware,
                "cases": len(cases),
                "shapes": len(cases.shapes),
                "measured_ns": float(cases.measured_ns.sum()),
                "device_share": cases.share,
                "span_ns": step.span_ns,
                "busy_ns": step.busy_ns,
                "is_simulated": step.is_simulated,
            }
            for cases in done.cases
            for step in (done.steps.get(cases.source, _NO_STEP),)
        ],
        "coverage": [_coverage(source, found) for source, found in done.coverage.items()],
        "joins": [
            {"source": source, **asdict(join)} for source, joins in done.joins.items() for join in joins
        ],
        "speed_ups": [asdict(row) for row in done.speed_ups],
        "trends": [asdict(row) for row in done.trends],
        "contributions": [asdict(row) for row in done.contributions],
        "lint": [asdict(finding) for finding in done.lint],
        "diagnostics": diagnostics_json(done.diagnostics),
    }
    return document_bytes(document)


def diagnostics_json(diagnostics: Diagnostics) -> list[dict[str, object]]:
    """Findings as rows; ``count`` is of all with the same code."""
    counts = diagnostics.counts()
    return [
        {
            "code": found.code,
            "severity": found.severity.value,
            "path": found.path,
            "location": found.location,
            "message": found.message,
            "count": counts[found.code],
        }
        for found in diagnostics
    ]


def summary_json(row: SummaryRow) -> dict[str, object]:
    """A row with the figures of its errors beside it."""
    told: dict[str, object] = asdict(row)
    del told["errors"]
    return told | asdict(row.errors)


def _coverage(source: str, found: Coverage) -> dict[str, object]:
    told: dict[str, object] = msgspec.to_builtins(found)
    return {"source": source, "time_share": found.time_share, "count_share": found.count_share, **told}
