"""Measured times of operations: tables of many spellings as one value that models are fitted on."""

from __future__ import annotations

from hespas.measurements.columns import Columns, text_batches
from hespas.measurements.model import LeftOut, Measurements, joined
from hespas.measurements.read import columns_measured, read_measurements

__all__ = [
    "Columns",
    "LeftOut",
    "Measurements",
    "columns_measured",
    "joined",
    "read_measurements",
    "text_batches",
]
