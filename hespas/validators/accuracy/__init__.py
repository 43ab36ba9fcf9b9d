"""Errors of estimates against measurements: per operation, per class, end to end, across devices.

Names are imported on first use: a comparison of reports needs no estimators, and profiles need no tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

__all__ = [
    "Accuracy",
    "Comparison",
    "Joined",
    "Thresholds",
    "accuracy",
    "accuracy_json",
    "accuracy_of_tables",
    "compare_reports",
    "comparison_json",
    "join_program",
]

if TYPE_CHECKING:
    from hespas.validators.accuracy.compare import Comparison, compare_reports, comparison_json
    from hespas.validators.accuracy.document import accuracy_json
    from hespas.validators.accuracy.programs import Joined, join_program
    from hespas.validators.accuracy.result import Accuracy, Thresholds
    from hespas.validators.accuracy.run import accuracy
    from hespas.validators.accuracy.tables import accuracy_of_tables

__getattr__ = lazy_names(
    __name__,
    compare=("Comparison", "compare_reports", "comparison_json"),
    document=("accuracy_json",),
    programs=("Joined", "join_program"),
    result=("Accuracy", "Thresholds"),
    run=("accuracy",),
    tables=("accuracy_of_tables",),
)
