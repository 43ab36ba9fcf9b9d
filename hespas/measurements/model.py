"""Tables of measured operations: classes, and the concatenation of large tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray, constant, is_every_row, is_one_value, taken
from hespas.graph.errors import InvariantError, UsageError
from hespas.hardware import Device
from hespas.operations import Labels, Operations, numbered

__all__ = ["LeftOut", "Measurements", "joined", "rows_of_split", "rows_on"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Reason for which rows of a table were skipped, their number, and one of these rows as an example (from
    1; 0: none).
    """

    reason: str
    count: int
    row: int = 0

    def __str__(self) -> str:
        """Return the reason for which rows were skipped, with the number of one such row."""
        return f"{self.reason} (as in row {self.row:,})" if self.row else self.reason


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measurements:
    """Table of measured operations: columns of shape ``(rows,)``.

    ``duration_ns`` is the median of repeats, ``spread_ns`` their standard deviation (NaN unknown).
    ``hardware`` is the name of the device in the hardware library, or the name in the table if the library
    lacks the device. ``split`` is the data split of a row (``calib``, ``devval``; empty: none). ``name`` and
    ``provenance`` describe the source. ``left_out`` counts the skipped rows of the source by reason.
    ``recorded`` is True if rows are from a recorded program and not from a sweep of sizes.
    """

    name: str
    provenance: str
    ops: Operations
    duration_ns: FloatArray
    spread_ns: FloatArray
    hardware: Labels
    split: Labels
    left_out: tuple[LeftOut, ...] = ()
    recorded: bool = False

    def __post_init__(self) -> None:
        """Check that all columns have one row per operation."""
        columns = (self.duration_ns, self.spread_ns, self.hardware, self.split)
        if any(len(column) != len(self.ops) for column in columns):
            raise InvariantError("Measurements: columns differ in length")

    def __len__(self) -> int:
        return len(self.ops)

    def describe_left_out(self) -> str:
        """Return a text with the reasons and counts of skipped rows; empty if no row was skipped."""
        return "; ".join(f"{reason.count:,}: {reason}" for reason in self.left_out)

    def take(self, rows: IntArray) -> Measurements:
        """Return the given rows, in that order."""
        if is_every_row(rows, len(self)):
            return self
        return Measurements(
            name=self.name,
            provenance=self.provenance,
            ops=self.ops.take(rows),
            duration_ns=taken(self.duration_ns, rows),
            spread_ns=taken(self.spread_ns, rows),
            hardware=self.hardware.take(rows),
            split=self.split.take(rows),
            left_out=self.left_out,
            recorded=self.recorded,
        )

    def on(self, hardware: str) -> Measurements:
        """Return the rows that were measured on one device."""
        return self.take(self.hardware.where(hardware))

    def part(self, split: str) -> Measurements:
        """Return the rows of one split of the table, such as ``devval``."""
        return self.take(self.split.where(split))

    def shape_group(self) -> IntArray:
        """Number of the kind, operation and sizes of each row, shape ``(rows,)``. Rows that differ only in
        device, number format or library have the same number.

        Rows with the same number must be in one split of fitting and testing.
        """
        labels = (column.row for column in (self.ops.kind, self.ops.op))
        sizes = (size for size in self.ops.dims.values() if not is_one_value(size))
        return numbered(chain(labels, (np.nan_to_num(size, nan=-1.0) for size in sizes)))


def joined(parts: Iterable[Measurements], name: str) -> Measurements:
    """Concatenate tables into one. Only one part is in memory at a time. Raises ``InvariantError`` without
    parts.
    """
    labels, numbers = _LabelColumns(), _NumberColumns()
    left_out: dict[str, LeftOut] = {}
    provenance: dict[str, None] = {}
    recorded = True
    for part in parts:
        ops = part.ops
        numbers.add({"duration_ns": part.duration_ns, "spread_ns": part.spread_ns}, len(part))
        numbers.add({"flops": ops.flops, "transcendentals": ops.transcendentals}, 0)
        numbers.add({"bytes_moved": ops.bytes_moved}, 0)
        numbers.add({f"dims.{dim}": column for dim, column in ops.dims.items()}, 0)
        labels.add({"hardware": part.hardware, "split": part.split})
        labels.add({"kind": ops.kind, "op": ops.op, "scheme": ops.scheme, "variant": ops.variant})
        for rows in part.left_out:
            before = left_out.get(rows.reason, LeftOut(rows.reason, 0, rows.row))
            left_out[rows.reason] = LeftOut(rows.reason, before.count + rows.count, before.row)
        provenance[part.provenance] = None
        recorded = recorded and part.recorded
    if not provenance:
        raise InvariantError("no table to join")
    ops = Operations(
        kind=labels.done("kind"),
        op=labels.done("op"),
        scheme=labels.done("scheme"),
        variant=labels.done("variant"),
        dims={name.removeprefix("dims."): numbers.done(name) for name in numbers.names("dims.")},
        flops=numbers.done("flops"),
        transcendentals=numbers.done("transcendentals"),
        bytes_moved=numbers.done("bytes_moved"),
    )
    return Measurements(
        name=name,
        provenance="; ".join(provenance),
        ops=ops,
        duration_ns=numbers.done("duration_ns"),
        spread_ns=numbers.done("spread_ns"),
        hardware=labels.done("hardware"),
        split=labels.done("split"),
        left_out=tuple(rows for rows in left_out.values() if rows.count),
        recorded=recorded,
    )


@dataclass(slots=True)
class _GrowingColumn:
    """Column to which rows are appended in place, to avoid a second copy in memory.

    While all values are equal (NaN is equal to itself), only ``first`` and the number of rows are stored.
    """

    first: NDArray[np.generic]
    rows: int = 0
    values: NDArray[np.generic] | None = None

    def add(self, part: NDArray[np.generic]) -> None:
        """Append an array to the column."""
        if not len(part):
            return
        if not self.rows:
            self.first = part[:1].astype(self.first.dtype)
        rows = self.rows + len(part)
        # Not equal, and not both NaN.
        differs = (part != self.first) & ((part == part) | (self.first == self.first))  # noqa: PLR0124
        if self.values is None and bool(differs.any()):
            self.values = np.empty(rows, self.first.dtype)
            self.values[: self.rows] = self.first
        if self.values is not None:
            if rows > len(self.values):
                self.values.resize(rows + rows // 4, refcheck=False)
            self.values[self.rows : rows] = part
        self.rows = rows

    def done(self) -> NDArray[np.generic]:
        """Return the finished column."""
        if self.values is None:
            return np.broadcast_to(self.first, (self.rows,)) if self.rows else self.first
        self.values.resize(self.rows, refcheck=False)
        return self.values


@dataclass(slots=True)
class _NumberColumns:
    """Columns of numbers that grow as parts of a table are appended. A column that a part lacks is NaN in its
    rows.
    """

    rows: int = 0
    columns: dict[str, _GrowingColumn] = field(default_factory=dict[str, _GrowingColumn])

    def add(self, columns: Mapping[str, FloatArray], rows: int) -> None:
        """Append the columns of a part with ``rows`` rows (0: more columns of the last part)."""
        self.rows += rows
        for name, part in columns.items():
            column = self.columns.setdefault(name, _GrowingColumn(np.empty(0, np.float64)))
            self._fill(column, self.rows - len(part))
            column.add(part)

    def _fill(self, column: _GrowingColumn, rows: int) -> None:
        column.add(constant(np.nan, rows - column.rows))

    def names(self, prefix: str) -> list[str]:
        """Return the names of the columns that start with ``prefix``, in order of appearance."""
        return [name for name in self.columns if name.startswith(prefix)]

    def done(self, name: str) -> FloatArray:
        """Return the whole column."""
        column = self.columns.pop(name)
        self._fill(column, self.rows)
        return np.asarray(column.done(), np.float64)


@dataclass(slots=True)
class _LabelColumns:
    """Columns of labels that grow as parts of a table are appended, with one list of distinct texts per
    column.
    """

    indices: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    columns: dict[str, _GrowingColumn] = field(default_factory=dict[str, _GrowingColumn])

    def add(self, columns: Mapping[str, Labels]) -> None:
        """Append the columns of a part of the table."""
        for name, column in columns.items():
            index = self.indices.setdefault(name, {})
            number = np.array([index.setdefault(text, len(index)) for text in column.names], np.int32)
            self.columns.setdefault(name, _GrowingColumn(np.empty(0, np.int32))).add(number[column.row])

    def done(self, name: str) -> Labels:
        """Return the whole column."""
        row = np.asarray(self.columns.pop(name).done(), np.int32)
        return Labels(row, tuple(self.indices[name]))


def rows_on(table: Measurements, device: Device) -> IntArray:
    """Return the indices of the rows that were measured on ``device``. Names and aliases of the device are
    compared without case and punctuation.
    """

    def folded(name: str) -> str:
        return "".join(letter for letter in name.casefold() if letter.isalnum())

    spellings = {folded(name) for name in (device.name, *device.aliases)}
    return table.hardware.where(*(name for name in table.hardware.names if folded(name) in spellings))


def rows_of_split(table: Measurements, split: str) -> IntArray:
    """Return the numbers of the rows of a split. Raises ``UsageError`` if the table has none."""
    rows = table.split.where(split)
    if not len(rows):
        listed = ", ".join(sorted(name for name in table.split.used() if name))
        hint = f"choose from {listed}" if listed else "leave `split` empty: the table has no splits"
        raise UsageError(f"no row of {table.name} has split {split!r}", hint=hint)
    return rows
