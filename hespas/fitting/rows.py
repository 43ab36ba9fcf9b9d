"""Selection of the rows of measurement tables that fits may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hespas.estimators.rates import roof_ns
from hespas.graph.columns import BoolArray
from hespas.hardware import Device
from hespas.measurements import Measurements, joined
from hespas.operations import Labels, Operations

__all__ = [
    "FITTED_SPLITS",
    "has_several",
    "is_possible",
    "known_variants",
    "may_be_fitted",
    "one_table",
    "rows_to_fit",
]

FITTED_SPLITS = ("calib", "")
"""Splits that fits may use: the one made for it, and no split."""
_BELOW_ROOF = 1.1
"""Tolerance of the roofline, for higher clocks and caches that the data sheet does not describe."""


def may_be_fitted(measured: Measurements) -> Measurements:
    """Return the rows that are not reserved for testing."""
    return measured.take(measured.split.where(*FITTED_SPLITS))


def is_possible(measured: Measurements, device: Device) -> BoolArray:
    """Return a mask of the rows whose time is at least the roofline time, shape ``(rows,)``.

    A shorter time was not measured for the work of its row: it covers only a part of the work, or is from
    another number format or device.
    """
    return roof_ns(measured.ops, device) <= _BELOW_ROOF * measured.duration_ns


def rows_to_fit(measured: Measurements, device: Device) -> Measurements:
    """Return the rows of a device that may be fitted: not reserved for testing, and not faster than the
    roofline of the device.
    """
    mine = may_be_fitted(measured).on(device.name)
    return mine.take(np.flatnonzero(is_possible(mine, device)))


def one_table(tables: Sequence[Measurements]) -> Measurements | None:
    """Return the rows of all tables as one table; None without rows."""
    filled = [table for table in tables if len(table)]
    if len(filled) > 1:
        return joined(filled, " ".join(table.name for table in filled))
    return next(iter(filled), None)


def has_several(table: Measurements, kinds: Sequence[str]) -> bool:
    """Return True if ``table`` has several operations of one of the ``kinds``."""
    return any(len(table.ops.op.take(table.ops.kind.where(kind)).used()) > 1 for kind in kinds)


def known_variants(ops: Operations, known: set[str]) -> Operations:
    """Return the operations without variant names that have no fit, so that these operations use the default
    variant. ``known`` are the variants that have a fit.
    """
    names = tuple(name if name in known else "" for name in ops.variant.names)
    return replace(ops, variant=Labels(ops.variant.row, names))
