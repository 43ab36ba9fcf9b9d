"""Check of workloads by coded rules: soundness, the Chakra contract, and the needs of ASTRA-sim."""

from __future__ import annotations

from hespas.validators.checker.check import CheckOptions, check, check_workload
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
