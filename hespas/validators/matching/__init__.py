"""Which nodes of a program each measured event carries out, and which of either nobody matches."""

from __future__ import annotations

from hespas.validators.matching.coverage import Coverage, Join, coverage_of, joins_of, node_text
from hespas.validators.matching.groups import RULES, Matching
from hespas.validators.matching.identity import check_program
from hespas.validators.matching.match import NO_MODULE, NO_NAMES, WITH_NAMES, match_program

__all__ = [
    "NO_MODULE",
    "NO_NAMES",
    "RULES",
    "WITH_NAMES",
    "Coverage",
    "Join",
    "Matching",
    "check_program",
    "coverage_of",
    "joins_of",
    "match_program",
    "node_text",
]
