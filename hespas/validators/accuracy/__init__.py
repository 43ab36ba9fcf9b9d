"""How far estimates are from measurements: per operation, per class, end to end, across devices."""

from __future__ import annotations

from hespas.validators.accuracy.compare import Comparison, compare_reports, comparison_json
from hespas.validators.accuracy.document import accuracy_json
from hespas.validators.accuracy.result import Accuracy, Thresholds
from hespas.validators.accuracy.run import accuracy
from hespas.validators.accuracy.tables import accuracy_of_tables

__all__ = [
    "Accuracy",
    "Comparison",
    "Thresholds",
    "accuracy",
    "accuracy_json",
    "accuracy_of_tables",
    "compare_reports",
    "comparison_json",
]
