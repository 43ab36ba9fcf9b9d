"""Which nodes of a program each measured event carries out, and which of either nobody matches."""

from __future__ import annotations

from hespas.validators.matching.coverage import Coverage, coverage_of
from hespas.validators.matching.groups import RULES, Matching
from hespas.validators.matching.match import match_program

__all__ = ["RULES", "Coverage", "Matching", "coverage_of", "match_program"]
