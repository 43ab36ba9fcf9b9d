"""Servers of language models: predicted times of measured runs, beside what clients saw."""

from __future__ import annotations

from hespas.validators.serving.document import ServingAccuracyDocument, serving_json
from hespas.validators.serving.fit import Fitted
from hespas.validators.serving.judge import CALIBRATIONS, Calibrate, Judged, Judgement, Summary, judge
from hespas.validators.serving.predict import Predictor
from hespas.validators.serving.recorded import Replay, read_recorded, replayed
from hespas.validators.serving.rows import Row, read_rows, refuse_empty_split

__all__ = [
    "CALIBRATIONS",
    "Calibrate",
    "Fitted",
    "Judged",
    "Judgement",
    "Predictor",
    "Replay",
    "Row",
    "ServingAccuracyDocument",
    "Summary",
    "judge",
    "read_recorded",
    "read_rows",
    "refuse_empty_split",
    "replayed",
    "serving_json",
]
