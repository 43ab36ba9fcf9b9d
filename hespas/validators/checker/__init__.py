"""Check of workloads by coded rules: soundness, the Chakra contract, and the needs of ASTRA-sim."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hespas.graph.plugins import lazy_names

if TYPE_CHECKING:
    from hespas.validators.checker.inputs import CheckOptions, check, check_workload
    from hespas.validators.checker.job import (
        CheckedInput,
        CheckResult,
        CheckRule,
        Profile,
        Scope,
        Violation,
        check_json,
    )
    from hespas.validators.checker.rules import RULES

__all__ = [
    "RULES",
    "CheckOptions",
    "CheckResult",
    "CheckRule",
    "CheckedInput",
    "Profile",
    "Scope",
    "Violation",
    "check",
    "check_json",
    "check_workload",
]

__getattr__ = lazy_names(
    __name__,
    inputs=(
        "CheckOptions",
        "check",
        "check_workload",
    ),
    job=(
        "CheckedInput",
        "CheckResult",
        "CheckRule",
        "Profile",
        "Scope",
        "Violation",
        "check_json",
    ),
    rules=("RULES",),
)
