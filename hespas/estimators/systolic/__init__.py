"""Systolic arrays: exact cycle counts of products, and lines that turn them into time on TPUs."""

from __future__ import annotations

from hespas.estimators.systolic.array import Array
from hespas.estimators.systolic.bandwidth import Backing, stall_cycles
from hespas.estimators.systolic.closed_form import FoldCounts, fold_counts, fold_cycles
from hespas.estimators.systolic.model import Systolic
from hespas.estimators.systolic.several import shared_cycles

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
