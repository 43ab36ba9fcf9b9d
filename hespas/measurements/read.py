"""Reader of tables of measured operations and of lists of operations to estimate.

The columns of a table determine its format. A list of products has columns ``m``, ``n``, ``k`` and optionally
``batch`` and ``dtype``; a list of convolutions has the columns of SCALE-Sim's topology files. Column names of
lists are case-insensitive.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from hespas.graph.columns import BoolArray
from hespas.graph.errors import FormatError, UsageError, clipped
from hespas.hardware import canonical_name
from hespas.measurements.columns import Columns, column_batches
from hespas.measurements.events import EVENTS
from hespas.measurements.model import LeftOut, Measurements, joined
from hespas.measurements.research import RESEARCH_TABLES
from hespas.measurements.tidy import (
    TIDY,
    Dialect,
    MeasuredRows,
    check_sizes,
    scheme_of,
    size_faults,
    tidy_operations,
)
from hespas.operations import Labels, Operations, build

__all__ = [
    "DEFAULT_DTYPE",
    "OperationRows",
    "columns_measured",
    "find_dialect",
    "read_measurements",
    "read_operations",
]

_LEAST_NS = 1e-6
_MOST_NS = 2.0**63

DEFAULT_DTYPE = "bf16"
"""Element type of lists of operations that do not state one."""

_CONVOLUTION: Mapping[str, str] = {
    "height": "ifmap height",
    "width": "ifmap width",
    "kernel_height": "filter height",
    "kernel_width": "filter width",
    "channels": "channels",
    "filters": "num filter",
    "stride": "strides",
}
"""Size -> column of SCALE-Sim's topology files."""

_DIALECTS: tuple[Dialect, ...] = (TIDY, EVENTS, *RESEARCH_TABLES)


def read_measurements(path: str | os.PathLike[str], *, split: str = "", hardware: str = "") -> Measurements:
    """Return the measured operations of a table (CSV, CSV.gz, Parquet). ``split`` and ``hardware`` select one
    data split or device (empty: all).

    The table is read in batches. Rows with an impossible time or size are skipped and counted. Raises
    ``FormatError`` for a malformed file or an unknown table, ``UsageError`` if no row has ``split`` or
    ``hardware``.
    """
    file = Path(path)
    selection = _Selection(split, hardware)
    batches = (_measured(*batch, file.name) for batch in selection.batches(file))
    return _not_empty(joined(batches, file.name), file)


def columns_measured(columns: Columns, *, name: str, provenance: str) -> Measurements:
    """Return the measured operations in ``columns``. The column names must belong to a known table format.

    Raises ``FormatError`` for an unknown table format.
    """
    dialect = replace(_dialect(columns), provenance=provenance)
    devices = _devices(columns.texts(dialect.hardware_column))
    return _not_empty(_measured(columns, dialect, devices, name), columns.path)


@dataclass(slots=True)
class _Selection:
    """Selection of the rows of a table by split and device (empty: all). ``splits`` and ``devices`` are the
    values that occur in the table, for messages. ``count`` is the number of selected rows.
    """

    split: str
    hardware: str
    count: int = 0
    splits: set[str] = field(default_factory=set[str])
    devices: set[str] = field(default_factory=set[str])

    def batches(self, path: Path) -> Iterator[tuple[Columns, Dialect, Labels]]:
        """Yield the selected rows of a table in batches, each with the format of the table and the device of
        each row. Raises ``UsageError`` if no row is selected.
        """
        device = canonical_name(self.hardware) or self.hardware
        for columns in _table_batches(path):
            dialect = _dialect(columns)
            is_selected = np.ones(len(columns), np.bool_)
            if self.split:
                labels = columns.texts("split", "")
                self.splits.update(labels.used())
                is_selected &= _equals(labels, self.split)
            devices = _devices(columns.texts(dialect.hardware_column))
            if self.hardware:
                self.devices.update(devices.take(np.flatnonzero(is_selected)).used())
                is_selected &= _equals(devices, device)
            rows = np.flatnonzero(is_selected)
            self.count += len(rows)
            if len(rows) or not len(columns):  # the caller reports a table without rows
                yield columns.take(rows), dialect, devices.take(rows)
        if self.count or not (self.split or self.hardware):
            return
        if self.split and self.split not in self.splits:
            error = f"no row of {path.name} has split {self.split!r}"
            listed = clipped(", ".join(sorted(self.splits - {""})))
            hint = f"use one of its splits: {listed}" if listed else "leave `split` out: the table has none"
        else:
            error = f"no row of {path.name} has hardware {self.hardware!r}"
            listed = clipped(", ".join(sorted(self.devices - {""})))
            hint = (
                f"use one of its devices: {listed}" if listed else "leave `hardware` out: the table has none"
            )
        raise UsageError(error, hint=hint)


def _equals(labels: Labels, text: str) -> BoolArray:
    is_equal = np.zeros(len(labels), np.bool_)
    is_equal[labels.where(text)] = True
    return is_equal


def _measured(columns: Columns, dialect: Dialect, devices: Labels, name: str) -> Measurements:
    """Return those rows of a batch that are valid measured operations; there may be none."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # such rows are skipped below
        rows_read = dialect.make(columns)
        faults = list(_faults(rows_read, dialect, columns))
    is_valid = np.ones(len(columns), np.bool_)
    left_out: list[LeftOut] = []
    for reason, wrong in faults:  # a row counts for its first fault
        rows = np.flatnonzero(wrong & is_valid)
        if len(rows):
            left_out.append(LeftOut(reason, len(rows), columns.row(int(rows[0]))))
            is_valid[rows] = False
    result = Measurements(
        name=name,
        provenance=dialect.provenance,
        ops=rows_read.ops,
        duration_ns=rows_read.duration_ns,
        spread_ns=rows_read.spread_ns,
        hardware=devices,
        split=columns.texts("split", ""),
        left_out=tuple(left_out),
        recorded=dialect.is_recording,
    )
    return result if is_valid.all() else result.take(np.flatnonzero(is_valid))


def _faults(rows: MeasuredRows, dialect: Dialect, columns: Columns) -> Iterator[tuple[str, BoolArray]]:
    """Yield each reason for which rows are not measured operations, with a mask of these rows."""
    time = rows.duration_ns
    yield dialect.left_out, ~rows.kept
    yield "no duration, or NaN", np.isnan(time)
    yield "a duration of 0", time == 0
    yield "a negative duration", time < 0
    yield "an infinite duration", np.isinf(time)
    yield "a duration below 1 fs or above 292 years", (time < _LEAST_NS) | (time > _MOST_NS)
    if rows.contradicts is not None:
        yield "times that contradict other columns or rows", rows.contradicts
    yield from size_faults(rows.ops, columns.names)


def _not_empty(table: Measurements, path: Path) -> Measurements:
    """Return ``table`` unchanged. Raises ``FormatError`` if it has no row."""
    if len(table):
        return table
    reasons = "; ".join(f"{reason}: {reason.count:,}" for reason in table.left_out) or "the table is empty"
    first = min((reason.row for reason in table.left_out), default=1)
    raise FormatError(
        f"no row is a measured operation ({reasons})",
        path=str(path),
        position=f"row {first}",
        hint="use a table with times above 0 and sizes of 1 or more",
    )


def _table_batches(path: Path) -> Iterator[Columns]:
    """Yield the rows of a table in batches; a recording is one batch."""
    batches = column_batches(path)
    for columns in batches:
        dialect = find_dialect(columns)
        is_recording = dialect is not None and dialect.is_recording
        yield columns.with_rows_of(batches) if is_recording else columns


def find_dialect(columns: Columns) -> Dialect | None:
    """Return the known table format that these columns belong to, or None."""
    return next((dialect for dialect in _DIALECTS if dialect.marks <= columns.names), None)


def _dialect(columns: Columns) -> Dialect:
    dialect = find_dialect(columns)
    if dialect is not None:
        return dialect
    listed = "; ".join(f"{known.title}: {', '.join(sorted(known.marks))}" for known in _DIALECTS)
    raise FormatError(
        "the columns do not match any known table of measured operations",
        path=str(columns.path),
        position=f"columns {', '.join(sorted(columns.names)[:12])}",
        hint=f"use the columns of a known table: {listed}",
    )


def _devices(labels: Labels) -> Labels:
    """Return labels with the canonical names of known devices. Names of unknown devices do not change."""
    return Labels(labels.row, tuple(canonical_name(name) or name for name in labels.names))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class OperationRows:
    """Batch of operations to estimate, one per row of a table.

    ``kept`` is False for rows that do not describe an operation. ``assumed_dtype`` is True if the table has
    no element types, so that a type was assumed.
    """

    ops: Operations
    kept: BoolArray
    assumed_dtype: bool = False


def read_operations(path: str | os.PathLike[str]) -> Iterator[OperationRows]:
    """Yield the operations of a table (CSV, CSV.gz, Parquet) in batches, one operation per row, in the order
    of the rows.

    Raises ``FormatError`` for a malformed file or an unknown table.
    """
    for columns in _table_batches(Path(path)):
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # such sizes raise below
            rows = _operation_rows(columns)
        check_sizes(rows.ops, columns)
        yield rows


def _operation_rows(columns: Columns) -> OperationRows:
    if not len(columns):
        raise FormatError(
            "the table has no rows",
            path=str(columns.path),
            position="row 1",
            hint="check that the file is complete",
        )
    if columns.names >= {"kind", "dtype"}:
        return _all_kept(tidy_operations(columns))
    dialect = find_dialect(columns)
    if dialect is not None:
        rows = dialect.make(columns)
        return OperationRows(ops=rows.ops, kept=rows.kept)
    folded = columns.folded()
    for marks, make in _LISTS.items():
        if folded.names >= marks:
            return make(folded)
    raise FormatError(
        "the columns do not match any known table of operations",
        path=str(columns.path),
        position=f"columns {', '.join(sorted(columns.names)[:12])}",
        hint="name the columns m, n, k, or kind, dtype and the sizes of the kind (docs/how-to/calibrate.md)",
    )


def _all_kept(ops: Operations, *, assumed_dtype: bool = False) -> OperationRows:
    return OperationRows(ops=ops, kept=np.ones(len(ops), np.bool_), assumed_dtype=assumed_dtype)


def _scheme(columns: Columns) -> tuple[Labels, bool]:
    """Return the number format of each row, and True if it is assumed because the table states none."""
    if "dtype" in columns.names:
        return scheme_of(columns), False
    return Labels.constant(DEFAULT_DTYPE, len(columns)), True


def _products(columns: Columns) -> OperationRows:
    scheme, assumed = _scheme(columns)
    m, n, k = (columns.numbers(name) for name in "mnk")
    ops = build.matmuls(scheme, batch=columns.numbers("batch", 1.0), m=m, n=n, k=k)
    return _all_kept(ops, assumed_dtype=assumed)


def _convolutions(columns: Columns) -> OperationRows:
    scheme, assumed = _scheme(columns)
    sizes = {name: columns.numbers(title) for name, title in _CONVOLUTION.items()}
    wrong = np.flatnonzero(sizes["stride"] <= 0)
    if len(wrong):
        raise FormatError(
            f"strides is {sizes['stride'][wrong[0]]:g}",
            path=str(columns.path),
            position=f"row {columns.row(int(wrong[0]))}",
            hint="use strides of 1 or more",
        )
    product = build.convolution_product(**sizes)
    ops = build.matmuls(scheme, batch=product.batch, m=product.m, n=product.n, k=product.k)
    # Windows overlap, and the input is moved once, not once per window.
    windows = product.m * product.k
    inputs = np.minimum(sizes["height"] * sizes["width"] * sizes["channels"], windows)
    others = product.k * product.n + product.m * product.n
    moved = ops.bytes_moved * (inputs + others) / np.maximum(windows + others, 1.0)
    kind = Labels.constant("convolution", len(ops))
    return _all_kept(replace(ops, kind=kind, bytes_moved=moved), assumed_dtype=assumed)


_LISTS: Mapping[frozenset[str], Callable[[Columns], OperationRows]] = {
    frozenset({"m", "n", "k"}): _products,
    frozenset(_CONVOLUTION.values()): _convolutions,
}
