"""Is it sound? Coded rules over any input, for itself, as a Chakra trace, or for a simulator."""

from __future__ import annotations

from hespas.validators.check import CheckOptions, check, check_workload
from hespas.validators.document import to_json
from hespas.validators.job import Profile, Rule, Scope
from hespas.validators.result import CheckedInput, CheckResult, Violation
from hespas.validators.roundtrip import (
    Cell,
    ColumnResult,
    RoundTrips,
    cell_text,
    roundtrip,
    roundtrip_html,
    roundtrip_json,
)
from hespas.validators.table import RULES

__all__ = [
    "RULES",
    "Cell",
    "CheckOptions",
    "CheckResult",
    "CheckedInput",
    "ColumnResult",
    "Profile",
    "RoundTrips",
    "Rule",
    "Scope",
    "Violation",
    "cell_text",
    "check",
    "check_workload",
    "roundtrip",
    "roundtrip_html",
    "roundtrip_json",
    "to_json",
]
