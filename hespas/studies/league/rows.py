"""Rows of a league table: cells, checked measurements, and the prediction of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Annotated

import msgspec

from hespas.estimators.step_intervals import Level
from hespas.files.limits import limits
from hespas.files.tables import Column, read_table, typed_row
from hespas.graph.errors import FormatError
from hespas.simulator.memory import fits_memory

__all__ = ["NEEDED", "LeagueRow", "Refusal", "RowAssumption", "StepPrediction", "read_runs"]

NEEDED = ("accelerator", "global_batch", "model", "num_accelerators", "seq_len")
"""Required columns, whose values cannot be assumed."""
_TIMES = ("step_time_lo_ms", "step_time_ms", "step_time_hi_ms")
"""Columns of step times, in ascending order of their values."""
_Measurement = Annotated[float, Column(is_open=True, high=1e12)]
"""Measured value: at most 30 years in milliseconds."""


class _MeasuredColumns(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a table of training runs that hold measured figures."""

    step_time_lo_ms: _Measurement = nan
    step_time_ms: _Measurement = nan
    step_time_hi_ms: _Measurement = nan
    mfu_pct: _Measurement = nan
    peak_memory_gib: _Measurement = nan
    rows_with_same_config: _Measurement = nan


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Reason why a row is not predicted, with the position of the cause (in the row or in another file) and a
    fix.

    ``supported`` is True if the row has an error, and False if this version of Hespas does not support the
    row.
    """

    message: str
    position: str = ""
    hint: str = ""
    supported: bool = True


class RowAssumption(msgspec.Struct, frozen=True, kw_only=True):
    """Assumption or omission in the prediction of a row, as the code and message of a diagnostic."""

    code: str
    message: str


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted time of a step [ns] with its split by component [ns], or the refusal.

    ``parts`` splits the time of the last pipeline stage to finish, including its idle time (bubble). ``path``
    splits the critical path of the step. Both sum to the step time. ``layout`` is a text that is equal for
    rows with equal layouts, even if the rows write them differently. ``level`` is the extrapolation level of
    the device. ``assumed`` lists settings that the row does not have, and assumptions of its estimator.
    ``device_memory_bytes`` is the memory that the device must have at the peak, ``reserved_memory_bytes`` the
    memory that the allocator reserves (-1: unknown, because JSON of the cache has no NaN), ``capacity_bytes``
    the memory of a device (NaN: unknown).
    """

    time_ns: float = nan
    parts: dict[str, float] = {}
    path: dict[str, float] = {}
    peak_memory_bytes: float = nan
    device_memory_bytes: float = nan
    reserved_memory_bytes: float = -1.0
    capacity_bytes: float = nan
    assumed: list[RowAssumption] = []
    refusal: Refusal | None = None
    family: str = ""
    kind: str = ""
    layout: str = ""
    level: Level = "measured"

    @property
    def refused(self) -> str:
        """Return the reason why the row is not predicted; empty if it is predicted."""
        return self.refusal.message if self.refusal else ""

    @property
    def fits(self) -> bool | None:
        """Return True if the run fits in the memory of the device; None if one of the sizes is unknown."""
        return fits_memory(self.device_memory_bytes, self.capacity_bytes)

    @property
    def assumptions(self) -> list[str]:
        """Return the codes of the row's assumptions: settings that it does not state, and kernels without a
        time.
        """
        return [assumption.code for assumption in self.assumed if assumption.code.startswith("row.")]


@dataclass(frozen=True, slots=True)
class LeagueRow:
    """Row of a league table with its prediction. Rows are numbered from 0. The cell ``accelerator`` has the
    name of the device instead of the text in the table.
    """

    number: int
    cells: Mapping[str, str]
    predicted: StepPrediction

    @property
    def position(self) -> str:
        """Return the position for messages about a missing prediction: the row, and its column or key that is
        the reason.
        """
        refusal = self.predicted.refusal
        return f"row {self.number}{refusal.position if refusal else ''}"

    @property
    def compared_memory_bytes(self) -> float:
        """Return the predicted memory [B] of the kind that the row publishes: at the peak allocated, or
        reserved by the allocator. NaN if unknown.
        """
        if self.cells.get("peak_memory_kind") != "reserved":
            return self.predicted.peak_memory_bytes
        reserved = self.predicted.reserved_memory_bytes
        return reserved if reserved >= 0 else nan

    def number_of(self, column: str) -> float:
        """Return the number in a cell; NaN if the cell is empty. Raises ``FormatError`` if it is not a
        number.
        """
        text = self.cells.get(column, "")
        try:
            return float(text) if text else nan
        except ValueError:
            raise FormatError(
                f"{text!r} is not a number",
                position=f"row {self.number}, column {column}",
                hint="write a number, or leave the cell empty",
            ) from None


def read_runs(table: Path) -> list[Mapping[str, str]]:
    """Read the rows of a table of training runs; spaces around cells are removed.

    Raises ``FormatError`` for a file that is not such a table, a table without rows, a measured value that is
    not a number above 0, and quantiles of step times that are not in ascending order.
    """

    rows: list[Mapping[str, str]] = []
    for row in read_table(table, NEEDED, max_bytes=limits().report_bytes):
        measured = typed_row(row, _MeasuredColumns)
        times = [(name, getattr(measured, name)) for name in _TIMES if getattr(measured, name) > 0]
        for (lower, low), (upper, high) in pairwise(times):
            if low > high:
                raise row.fault(upper, f"is {high:g}, below {lower} with {low:g}", "times in ascending order")
        rows.append(row.cells)
    if not rows:
        raise FormatError("no row below the header", path=str(table), hint="write one row per run")
    return rows
