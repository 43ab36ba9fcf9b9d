"""What was measured of single operations, on which device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.estimators.operations import Labels, Operations
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import InvariantError

__all__ = ["Measurements"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measurements:
    """Columns of shape ``(rows,)``. ``duration_ns`` is the median of repeats, ``spread_ns`` their deviation
    (NaN unknown). ``hardware`` is a device's name in the library (as the table spells it where the library
    has none); ``split`` the part of the data a row belongs to (``calib``, ``devval``; empty: not stated).
    ``name`` and ``provenance`` say where all of it comes from; ``left_out`` counts rows of the table that no
    operation stands for, by reason. ``recorded``: they are of a program that ran, not of a sweep of sizes.
    """

    name: str
    provenance: str
    ops: Operations
    duration_ns: FloatArray
    spread_ns: FloatArray
    hardware: Labels
    split: Labels
    left_out: tuple[tuple[str, int], ...] = ()
    recorded: bool = False

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation."""
        columns = (self.duration_ns, self.spread_ns, self.hardware, self.split)
        if any(len(column) != len(self.ops) for column in columns):
            raise InvariantError("Measurements: columns differ in length")

    def __len__(self) -> int:
        return len(self.ops)

    def take(self, rows: IntArray) -> Measurements:
        """Some rows, in the order given."""
        return Measurements(
            name=self.name,
            provenance=self.provenance,
            ops=self.ops.take(rows),
            duration_ns=self.duration_ns[rows],
            spread_ns=self.spread_ns[rows],
            hardware=self.hardware.take(rows),
            split=self.split.take(rows),
            left_out=self.left_out,
            recorded=self.recorded,
        )

    def on(self, hardware: str) -> Measurements:
        """The rows of one device."""
        return self.take(self.hardware.where(hardware))

    def part(self, split: str) -> Measurements:
        """The rows of one split."""
        return self.take(self.split.where(split))

    def shape_group(self) -> IntArray:
        """A number per distinct shape, whatever the device, number format and library: what must not be torn
        apart between fitting and testing. Shape ``(rows,)``.
        """
        labels = (self.ops.kind.row.astype(np.float64), self.ops.op.row.astype(np.float64))
        packed = np.nan_to_num(np.stack((*labels, *self.ops.dims.values()), axis=1), nan=-1.0)
        _, group = np.unique(packed, axis=0, return_inverse=True)
        return group.reshape(-1).astype(np.int64)
