"""Operations apart from any graph: what models of time are fitted on, and what they are asked."""

from __future__ import annotations

from hespas.estimators.operations.from_graph import canonical_op, operations_of, timed_with_events
from hespas.estimators.operations.model import (
    KINDS,
    MATRIX_KINDS,
    SCHEMES,
    STRIDED,
    Labels,
    Operations,
    PeakTimes,
    Scheme,
    chosen,
    find_scheme,
    numbered,
    peak_times,
    rate_flops_per_s,
)

__all__ = [
    "KINDS",
    "MATRIX_KINDS",
    "SCHEMES",
    "STRIDED",
    "Labels",
    "Operations",
    "PeakTimes",
    "Scheme",
    "canonical_op",
    "chosen",
    "find_scheme",
    "numbered",
    "operations_of",
    "peak_times",
    "rate_flops_per_s",
    "timed_with_events",
]
