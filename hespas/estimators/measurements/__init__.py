"""Measured times of operations: tables of many spellings as one value that models are fitted on."""

from __future__ import annotations

from hespas.estimators.measurements.model import Measurements
from hespas.estimators.measurements.read import read_measurements

__all__ = ["Measurements", "read_measurements"]
