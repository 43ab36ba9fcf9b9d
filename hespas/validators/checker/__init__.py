"""Check of workloads by coded rules: soundness, the Chakra contract, and the needs of ASTRA-sim."""

from __future__ import annotations

from hespas.validators.checker.check import CheckOptions, check, check_workload
from hespas.validators.checker.job import (
    CheckedInput,
    CheckResult,
    Profile,
    Rule,
    Scope,
    Violation,
    check_json,
)
from hespas.validators.checker.rules import RULES

__all__ = [
    "RULES",
    "CheckOptions",
    "CheckResult",
    "CheckedInput",
    "Profile",
    "Rule",
    "Scope",
    "Violation",
    "check",
    "check_json",
    "check_workload",
]
