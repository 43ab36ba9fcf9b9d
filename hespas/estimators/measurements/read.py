"""Reading a table: its columns tell which of the known tables it is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hespas.estimators.measurements.aiconfigurator import AICONFIGURATOR
from hespas.estimators.measurements.columns import Columns, column_batches
from hespas.estimators.measurements.made import Dialect, Made, size_faults
from hespas.estimators.measurements.model import LeftOut, Measurements, joined
from hespas.estimators.measurements.research import RESEARCH
from hespas.estimators.measurements.tidy import TIDY
from hespas.estimators.operations import Labels
from hespas.graph.columns import BoolArray
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import canonical

__all__ = ["columns_measured", "find_dialect", "read_measurements"]

_LEAST_NS = 1e-6
_MOST_NS = 2.0**63

_DIALECTS: tuple[Dialect, ...] = (*TIDY, *RESEARCH, *AICONFIGURATOR)


def read_measurements(path: str | os.PathLike[str], *, split: str = "", hardware: str = "") -> Measurements:
    """The measured operations of a table (CSV, CSV.gz, Parquet), or those of one split or device.

    Rows are read some at a time: only what is kept of them grows with the table. Rows with a time or a size
    that none can have are left out and counted. Raises ``FormatError`` for a file that is none of
    the known tables or malformed, ``UsageError`` where ``split`` or ``hardware`` names nothing in it.
    """
    where = Path(path)
    wanted = _Wanted(split, hardware)
    return _some(joined((_measured(*part, where.name) for part in wanted.parts(where)), where.name), where)


def columns_measured(columns: Columns, *, name: str, provenance: str) -> Measurements:
    """The measured operations of columns that are called as in one of the known tables.

    Raises ``FormatError`` where they are of none.
    """
    dialect = replace(_dialect(columns), provenance=provenance)
    devices = _devices(columns.texts(dialect.hardware_column))
    return _some(_measured(columns, dialect, devices, name), columns.path)


@dataclass(slots=True)
class _Wanted:
    """Which rows are asked for (empty: all), and what was there instead."""

    split: str
    hardware: str
    found: int = 0
    splits: set[str] = field(default_factory=set[str])
    devices: set[str] = field(default_factory=set[str])

    def parts(self, path: Path) -> Iterator[tuple[Columns, Dialect, Labels]]:
        """The rows that are asked for, with their devices; part by part. Raises ``UsageError`` for none."""
        device = canonical(self.hardware) or self.hardware
        for columns in column_batches(path):
            dialect = _dialect(columns)
            wanted = np.ones(len(columns), np.bool_)
            if self.split:
                labels = columns.texts("split", "")
                self.splits.update(labels.used())
                wanted &= _is(labels, self.split)
            devices = _devices(columns.texts(dialect.hardware_column))
            if self.hardware:
                self.devices.update(devices.take(np.flatnonzero(wanted)).used())
                wanted &= _is(devices, device)
            rows = np.flatnonzero(wanted)
            self.found += len(rows)
            if len(rows) or not len(columns):  # a table without rows is told by whoever reads it
                yield columns.take(rows), dialect, devices.take(rows)
        if not self.found:
            raise self._nothing(path)

    def _nothing(self, path: Path) -> UsageError:
        """The error where there is nothing of what was asked for."""
        if self.split and self.split not in self.splits:
            listed = clipped(", ".join(sorted(self.splits - {""}))) or "no such column"
            return UsageError(f"no row of {path.name} has split {self.split!r}", hint=f"it has {listed}")
        listed = clipped(", ".join(sorted(self.devices - {""}))) or "no device"
        return UsageError(f"no row of {path.name} is of {self.hardware}", hint=f"it has {listed}")


def _is(labels: Labels, text: str) -> BoolArray:
    found = np.zeros(len(labels), np.bool_)
    found[labels.where(text)] = True
    return found


def _measured(columns: Columns, dialect: Dialect, devices: Labels, name: str) -> Measurements:
    """The rows that are measured operations; none where there is none."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what comes of it is left out below
        made = dialect.make(columns)
        faults = list(_faults(made, dialect, columns))
    known = np.ones(len(columns), np.bool_)
    left_out: list[LeftOut] = []
    for reason, wrong in faults:  # a row is counted for the first of its faults
        rows = np.flatnonzero(wrong & known)
        if len(rows):
            left_out.append(LeftOut(reason, len(rows), columns.row(int(rows[0]))))
            known[rows] = False
    result = Measurements(
        name=name,
        provenance=dialect.provenance,
        ops=made.ops,
        duration_ns=made.duration_ns,
        spread_ns=made.spread_ns,
        hardware=devices,
        split=columns.texts("split", ""),
        left_out=tuple(left_out),
    )
    return result if known.all() else result.take(np.flatnonzero(known))


def _faults(made: Made, dialect: Dialect, columns: Columns) -> Iterator[tuple[str, BoolArray]]:
    """Why rows are no measured operations, with the rows."""
    time = made.duration_ns
    yield dialect.left_out, ~made.kept
    yield "no duration, or NaN", np.isnan(time)
    yield "a duration of 0", time == 0
    yield "a negative duration", time < 0
    yield "an infinite duration", np.isinf(time)
    yield "a duration below 1 fs or beyond 292 years", (time < _LEAST_NS) | (time > _MOST_NS)
    if made.contradicts is not None:
        yield "columns of times that contradict each other", made.contradicts
    yield from size_faults(made.ops, columns.names)


def _some(found: Measurements, path: Path) -> Measurements:
    """The same. Raises ``FormatError`` where no row is left."""
    if len(found):
        return found
    told = "; ".join(f"{each}: {each.count:,}" for each in found.left_out) or "it has none"
    first = min((each.row for each in found.left_out), default=1)
    raise FormatError(
        f"no row is a measured operation ({told})",
        path=str(path),
        position=f"row {first}",
        hint="give a table with times above 0, and sizes of 1 or more",
    )


def find_dialect(columns: Columns) -> Dialect | None:
    """The known table whose columns these are; None for none."""
    return next((dialect for dialect in _DIALECTS if dialect.marks <= columns.names), None)


def _dialect(columns: Columns) -> Dialect:
    dialect = find_dialect(columns)
    if dialect is not None:
        return dialect
    listed = "; ".join(f"{each.title}: {', '.join(sorted(each.marks))}" for each in _DIALECTS)
    raise FormatError(
        "the columns are those of no known table of measured operations",
        path=str(columns.path),
        position=f"columns {', '.join(sorted(columns.names)[:12])}",
        hint=f"known are {listed}",
    )


def _devices(labels: Labels) -> Labels:
    """The library's names of devices; the spelling itself where the library has none."""
    return Labels(labels.row, tuple(canonical(name) or name for name in labels.names))
