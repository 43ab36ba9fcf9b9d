"""Operations apart from any graph: what models of time are fitted on, and what they are asked."""

from __future__ import annotations

from hespas.estimators.operations.from_graph import operations_of
from hespas.estimators.operations.model import KINDS, STRIDED, Labels, Operations, chosen, numbered
from hespas.estimators.operations.naming import canonical_op, timed_with_events
from hespas.estimators.operations.rates import MATRIX_KINDS, PeakTimes, peak_times, rate_flops_per_s
from hespas.estimators.operations.schemes import SCHEMES, Scheme, find_scheme

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
