"""Is it sound? Coded rules over any input, for itself, as a Chakra trace, or for a simulator."""

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
