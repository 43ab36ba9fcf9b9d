"""Is it sound? Coded rules over any input, for itself, as a Chakra trace, or for a simulator."""

from __future__ import annotations

from hespas.validators.check import CheckOptions, check, check_workload
from hespas.validators.document import to_json
from hespas.validators.job import Profile, Rule, Scope
from hespas.validators.result import CheckedInput, CheckResult, Violation
from hespas.validators.table import RULES

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
    "check_workload",
    "to_json",
]
