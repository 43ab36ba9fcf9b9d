"""Estimator for systolic arrays: exact cycle counts of products, and fitted linear functions that convert
them to time on TPUs.
"""

from __future__ import annotations

from hespas.estimators.systolic.cycles import (
    Array,
    Backing,
    FoldCounts,
    fold_counts,
    fold_cycles,
    shared_cycles,
    stall_cycles,
)
from hespas.estimators.systolic.model import Systolic

__all__ = [
    "Array",
    "Backing",
    "FoldCounts",
    "Systolic",
    "fold_counts",
    "fold_cycles",
    "shared_cycles",
    "stall_cycles",
]
