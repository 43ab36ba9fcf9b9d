"""Predicted TTFT and TPOT of LLM servers against measured runs."""

from __future__ import annotations

from hespas.studies.serving.evaluation import (
    CALIBRATIONS,
    Calibrate,
    EvaluatedRun,
    ServingAccuracyDocument,
    ServingErrors,
    ServingErrorSummary,
    evaluate_runs,
    serving_json,
)
from hespas.studies.serving.fit import EngineFit
from hespas.studies.serving.predict import ServingPredictor, capacity_of
from hespas.studies.serving.recorded import RunReplay, read_recorded, replay_runs
from hespas.studies.serving.rows import ServingRow, read_rows, refuse_empty_split

__all__ = [
    "CALIBRATIONS",
    "Calibrate",
    "EngineFit",
    "EvaluatedRun",
    "RunReplay",
    "ServingAccuracyDocument",
    "ServingErrorSummary",
    "ServingErrors",
    "ServingPredictor",
    "ServingRow",
    "capacity_of",
    "evaluate_runs",
    "read_recorded",
    "read_rows",
    "refuse_empty_split",
    "replay_runs",
    "serving_json",
]
