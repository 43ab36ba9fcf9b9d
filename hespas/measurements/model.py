"""What was measured of single operations, on which device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import FloatArray, IntArray, constant, is_every_row, is_one_value, taken
from hespas.graph.errors import InvariantError
from hespas.operations import Labels, Operations, numbered

__all__ = ["LeftOut", "Measurements", "joined"]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows of a table that are no measured operation: why, how many, and one of them (from 1; 0: no row)."""

    reason: str
    count: int
    row: int = 0

    def __str__(self) -> str:
        """The reason, with where to look."""
        return f"{self.reason} (as in row {self.row:,})" if self.row else self.reason


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measurements:
    """Columns of shape ``(rows,)``. ``duration_ns`` is the median of repeats, ``spread_ns`` their deviation
    (NaN unknown). ``hardware`` is a device's name in the library (as the table spells it where the library
    has none); ``split`` the part of the data a row belongs to (``calib``, ``devval``; empty: not stated).
    ``name`` and ``provenance`` say where all of it comes from; ``left_out`` counts the rows of the table that
    are not here, by reason. ``recorded``: they are of a program that ran, not of a sweep of sizes.
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

    def told_left_out(self) -> str:
        """How many rows of the table are not here, and why; empty where all are."""
        return "; ".join(f"{each.count:,}: {each}" for each in self.left_out)

    def take(self, rows: IntArray) -> Measurements:
        """Some rows, in the order given; all of them are this table itself."""
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
        """The rows of one device."""
        return self.take(self.hardware.where(hardware))

    def part(self, split: str) -> Measurements:
        """The rows of one split."""
        return self.take(self.split.where(split))

    def shape_group(self) -> IntArray:
        """A number per distinct shape, whatever the device, number format and library: what must not be torn
        apart between fitting and testing. Shape ``(rows,)``.
        """
        labels = (each.row for each in (self.ops.kind, self.ops.op))
        sizes = (size for size in self.ops.dims.values() if not is_one_value(size))
        return numbered(chain(labels, (np.nan_to_num(size, nan=-1.0) for size in sizes)))


def joined(parts: Iterable[Measurements], name: str) -> Measurements:
    """Several tables, or parts of one, as one. Each is let go once its columns are taken: parts that are made
    as they are asked for never stand in memory twice. Raises ``InvariantError`` for none.
    """
    labels, numbers = _Texts(), _Numbers()
    left_out: dict[str, LeftOut] = {}
    provenance: dict[str, None] = {}
    recorded = True
    for part in parts:
        ops = part.ops
        numbers.add({"duration_ns": part.duration_ns, "spread_ns": part.spread_ns}, len(part))
        numbers.add({"flops": ops.flops, "transcendentals": ops.transcendentals}, 0)
        numbers.add({"bytes_moved": ops.bytes_moved}, 0)
        numbers.add({f"dims.{each}": column for each, column in ops.dims.items()}, 0)
        labels.add({"hardware": part.hardware, "split": part.split})
        labels.add({"kind": ops.kind, "op": ops.op, "scheme": ops.scheme, "variant": ops.variant})
        for each in part.left_out:
            before = left_out.get(each.reason, LeftOut(each.reason, 0, each.row))
            left_out[each.reason] = LeftOut(each.reason, before.count + each.count, before.row)
        provenance[part.provenance] = None
        recorded = recorded and part.recorded
    if not provenance:
        raise InvariantError("no table to join")
    together = Operations(
        kind=labels.done("kind"),
        op=labels.done("op"),
        scheme=labels.done("scheme"),
        variant=labels.done("variant"),
        dims={each.removeprefix("dims."): numbers.done(each) for each in numbers.names("dims.")},
        flops=numbers.done("flops"),
        transcendentals=numbers.done("transcendentals"),
        bytes_moved=numbers.done("bytes_moved"),
    )
    return Measurements(
        name=name,
        provenance="; ".join(provenance),
        ops=together,
        duration_ns=numbers.done("duration_ns"),
        spread_ns=numbers.done("spread_ns"),
        hardware=labels.done("hardware"),
        split=labels.done("split"),
        left_out=tuple(each for each in left_out.values() if each.count),
        recorded=recorded,
    )


@dataclass(slots=True)
class _Growing:
    """A column that grows in place: parts that are kept and then joined would stand in memory twice. While
    all of it is one value (NaN is equal to itself), it takes none. ``first`` is its first row.
    """

    first: NDArray[np.generic]
    rows: int = 0
    values: NDArray[np.generic] | None = None

    def add(self, part: NDArray[np.generic]) -> None:
        """Further rows."""
        if not len(part):
            return
        if not self.rows:
            self.first = part[:1].astype(self.first.dtype)
        rows = self.rows + len(part)
        if self.values is None and not self._is_all(part):
            self.values = np.empty(rows, self.first.dtype)
            self.values[: self.rows] = self.first
        if self.values is not None:
            if rows > len(self.values):
                self.values.resize(rows + rows // 4, refcheck=False)
            self.values[self.rows : rows] = part
        self.rows = rows

    def _is_all(self, part: NDArray[np.generic]) -> bool:
        other = part != self.first
        return not bool((other & ((part == part) | (self.first == self.first))).any())  # noqa: PLR0124 (NaN)

    def done(self) -> NDArray[np.generic]:
        """The whole column."""
        if self.values is None:
            return np.broadcast_to(self.first, (self.rows,)) if self.rows else self.first
        self.values.resize(self.rows, refcheck=False)
        return self.values


@dataclass(slots=True)
class _Numbers:
    """Columns of numbers in parts; a column that a part lacks is NaN there."""

    rows: int = 0
    columns: dict[str, _Growing] = field(default_factory=dict[str, _Growing])

    def add(self, columns: Mapping[str, FloatArray], rows: int) -> None:
        """Columns of one part of ``rows`` rows (0: further columns of the last)."""
        self.rows += rows
        for name, part in columns.items():
            column = self.columns.setdefault(name, _Growing(np.empty(0, np.float64)))
            self._fill(column, self.rows - len(part))
            column.add(part)

    def _fill(self, column: _Growing, rows: int) -> None:
        column.add(constant(np.nan, rows - column.rows))

    def names(self, prefix: str) -> list[str]:
        """The columns whose names begin so, in order of appearance."""
        return [name for name in self.columns if name.startswith(prefix)]

    def done(self, name: str) -> FloatArray:
        """The whole column."""
        column = self.columns.pop(name)
        self._fill(column, self.rows)
        return np.asarray(column.done(), np.float64)


@dataclass(slots=True)
class _Texts:
    """Columns of labels in parts, the names of which are numbered anew."""

    places: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    columns: dict[str, _Growing] = field(default_factory=dict[str, _Growing])

    def add(self, columns: Mapping[str, Labels]) -> None:
        """Columns of one part."""
        for name, column in columns.items():
            place = self.places.setdefault(name, {})
            number = np.array([place.setdefault(text, len(place)) for text in column.names], np.int32)
            self.columns.setdefault(name, _Growing(np.empty(0, np.int32))).add(number[column.row])

    def done(self, name: str) -> Labels:
        """The whole column."""
        row = np.asarray(self.columns.pop(name).done(), np.int32)
        return Labels(row, tuple(self.places[name]))
