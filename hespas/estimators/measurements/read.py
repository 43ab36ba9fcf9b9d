"""Reading a table: its columns tell which of the known tables it is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from hespas.estimators.measurements.aiconfigurator import AICONFIGURATOR
from hespas.estimators.measurements.columns import Columns, read_columns
from hespas.estimators.measurements.made import Dialect, check_sizes
from hespas.estimators.measurements.model import Measurements
from hespas.estimators.measurements.research import RESEARCH
from hespas.estimators.measurements.tidy import TIDY
from hespas.estimators.operations import Labels
from hespas.graph.columns import IntArray
from hespas.graph.errors import FormatError, UsageError
from hespas.hardware import find

__all__ = ["columns_measured", "find_dialect", "read_measurements"]

_LEAST_NS = 1e-6
_MOST_NS = 2.0**63

_DIALECTS: tuple[Dialect, ...] = (*TIDY, *RESEARCH, *AICONFIGURATOR)


def read_measurements(path: str | os.PathLike[str], *, split: str = "", hardware: str = "") -> Measurements:
    """The measured operations of a table (CSV, CSV.gz, Parquet), or those of one split or device.

    Raises ``FormatError`` for a file that is none of the known tables or malformed, ``UsageError`` where
    ``split`` or ``hardware`` names nothing in it.
    """
    where = Path(path)
    columns = read_columns(where)
    dialect = _dialect(columns)
    wanted = np.arange(len(columns))
    if split:
        wanted = _named(columns, "split", split, wanted)
    devices = _devices(columns.texts(dialect.hardware_column))
    if hardware:
        wanted = wanted[np.isin(wanted, devices.where(_canonical(hardware)))]
        if not len(wanted):
            listed = ", ".join(sorted(devices.used()))
            raise UsageError(f"no row of {where.name} is of {hardware}", hint=f"it has {listed}")
    return _measured(columns.take(wanted), dialect, devices.take(wanted), where.name)


def columns_measured(columns: Columns, *, name: str, provenance: str) -> Measurements:
    """The measured operations of columns that are called as in one of the known tables.

    Raises ``FormatError`` where they are of none.
    """
    dialect = replace(_dialect(columns), provenance=provenance)
    return _measured(columns, dialect, _devices(columns.texts(dialect.hardware_column)), name)


def _measured(columns: Columns, dialect: Dialect, devices: Labels, name: str) -> Measurements:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # such sizes are refused below
        made = dialect.make(columns)
    check_sizes(made.ops, str(columns.path))
    positive = made.duration_ns > 0
    likely = (made.duration_ns >= _LEAST_NS) & (made.duration_ns <= _MOST_NS)
    known = likely & made.kept
    reasons = [
        ("no positive duration", int((~positive & made.kept).sum())),
        ("a duration below 1 fs or beyond 292 years", int((positive & ~likely & made.kept).sum())),
        (dialect.left_out, int((~made.kept).sum())),
    ]
    if not known.any():
        told = "; ".join(f"{reason}: {count:,}" for reason, count in reasons if count) or "it has none"
        raise FormatError(
            f"no row is a measured operation ({told})",
            path=str(columns.path),
            hint="give a table with times above 0",
        )
    result = Measurements(
        name=name,
        provenance=dialect.provenance,
        ops=made.ops,
        duration_ns=made.duration_ns,
        spread_ns=made.spread_ns,
        hardware=devices,
        split=columns.texts("split", ""),
        left_out=tuple((reason, count) for reason, count in reasons if count),
    )
    return result.take(np.flatnonzero(known))


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


def _named(columns: Columns, column: str, text: str, rows: IntArray) -> IntArray:
    labels = columns.texts(column, "")
    found = labels.where(text)
    if not len(found):
        listed = ", ".join(sorted(name for name in labels.names if name)) or "no such column"
        raise UsageError(f"no row of {columns.path.name} has {column} {text!r}", hint=f"it has {listed}")
    return rows[found]


def _devices(labels: Labels) -> Labels:
    return Labels(labels.row, tuple(_canonical(name) for name in labels.names))


def _canonical(name: str) -> str:
    """The library's name of a device; the spelling itself where the library has none."""
    try:
        return find(name)
    except UsageError:
        return name
