"""Measured times of operations: tables of many spellings as one value that models are fitted on."""

from __future__ import annotations

from hespas.estimators.measurements.columns import Columns
from hespas.estimators.measurements.model import Measurements
from hespas.estimators.measurements.read import columns_measured, read_measurements

__all__ = ["Columns", "Measurements", "columns_measured", "read_measurements"]
