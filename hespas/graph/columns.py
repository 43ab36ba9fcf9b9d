"""Columns the graph is made of: tables, ragged rows (CSR) and interned strings.

Both hold two flat arrays whatever the number of rows, so a million rows cost bytes and not objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BoolArray",
    "ColumnTable",
    "Csr",
    "FloatArray",
    "IntArray",
    "SmallIntArray",
    "StringTable",
    "StringTableBuilder",
    "constant",
    "constant_if_equal",
    "is_every_row",
    "is_one_value",
    "taken",
]

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
SmallIntArray = NDArray[np.int32]

_Scalar = TypeVar("_Scalar", bound=np.generic)


def constant(value: float, rows: int) -> FloatArray:
    """A float column that holds one value everywhere and takes no memory."""
    return np.broadcast_to(np.float64(value), (rows,))


def is_one_value(column: NDArray[np.generic]) -> bool:
    """Whether a column holds one value everywhere by its very form: see :func:`constant`."""
    return column.strides == (0,)


def constant_if_equal(column: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """The same column, in constant memory where it holds one value (or only NaN)."""
    if len(column) < 2:
        return column
    first = column[0]
    same = np.isnan(column) if np.isnan(first) else column == first
    return np.broadcast_to(first, column.shape) if same.all() else column


def taken(column: NDArray[_Scalar], rows: IntArray) -> NDArray[_Scalar]:
    """Some rows of a column; of one that takes no memory, without memory."""
    return np.broadcast_to(column[:1], rows.shape) if is_one_value(column) and len(column) else column[rows]


def is_every_row(rows: IntArray, count: int) -> bool:
    """Whether ``rows`` are all ``count`` rows in their order: then nothing need be copied."""
    if len(rows) != count:
        return False
    return not count or (rows[0] == 0 and rows[-1] == count - 1 and bool((rows[1:] > rows[:-1]).all()))


class ColumnTable:
    """Columns of one length: ``DTYPES`` lists them in order with their types."""

    __slots__ = ()
    DTYPES: ClassVar[Mapping[str, type[np.generic]]]

    if TYPE_CHECKING:

        def __init__(self, **columns: NDArray[Any]) -> None: ...

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[float, ...]]) -> Self:
        """A table of rows, each with its values in order of the columns."""
        columns = zip(*rows, strict=True) if rows else repeat(())
        return cls(
            **{
                name: np.array(column, dtype)
                for (name, dtype), column in zip(cls.DTYPES.items(), columns, strict=False)
            }
        )

    @classmethod
    def empty(cls) -> Self:
        """A table without rows."""
        return cls.from_rows(())

    def __len__(self) -> int:
        return len(getattr(self, next(iter(self.DTYPES))))

    def take(self, rows: NDArray[np.integer | np.bool_], node: SmallIntArray | None = None) -> Self:
        """Some rows, by number or by mask; ``node`` says which nodes they are of in another graph."""
        columns = {name: getattr(self, name)[rows] for name in self.DTYPES}
        return type(self)(**columns if node is None else {**columns, "node": node})


@dataclass(frozen=True, slots=True, eq=False)
class Csr:
    """Ragged rows: row ``i`` is ``values[offsets[i]:offsets[i + 1]]``.

    ``offsets`` has shape ``(rows + 1,)``, starts at 0 and never falls; ``values`` is int32 or int64.
    """

    offsets: IntArray
    values: SmallIntArray

    @classmethod
    def empty(cls, rows: int) -> Csr:
        """``rows`` empty rows in constant memory."""
        return cls(np.broadcast_to(np.int64(0), (rows + 1,)), np.empty(0, np.int32))

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]]) -> Csr:
        """Ragged rows from nested sequences; O(total)."""
        lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
        flat = np.fromiter((value for row in rows for value in row), np.int32, int(lengths.sum()))
        return cls.from_lengths(lengths, flat)

    @classmethod
    def from_lengths(cls, lengths: NDArray[np.integer], values: NDArray[np.integer]) -> Csr:
        """Ragged rows from each row's length and all values in row order."""
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return cls(offsets, values.astype(np.int32, copy=False))

    @classmethod
    def from_pairs(cls, rows: NDArray[np.integer], values: NDArray[np.integer], num_rows: int) -> Csr:
        """Ragged rows from (row, value) pairs; the order of pairs within a row is kept."""
        order = np.argsort(rows, kind="stable")
        return cls.from_lengths(np.bincount(rows, minlength=num_rows), values[order])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> SmallIntArray:
        """The values of one row."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> IntArray:
        """Number of values in each row."""
        return np.diff(self.offsets)

    @property
    def row_ids(self) -> IntArray:
        """The row of each value, shape ``(len(values),)``."""
        return np.repeat(np.arange(len(self), dtype=np.int64), self.lengths)

    def to_lists(self) -> list[list[int]]:
        """Nested Python lists, for loops that must be sequential."""
        flat: list[int] = self.values.tolist()
        bounds: list[int] = self.offsets.tolist()
        return [flat[start:end] for start, end in pairwise(bounds)]

    def take(self, rows: NDArray[np.integer]) -> Csr:
        """The given rows, in the given order."""
        lengths = self.lengths[rows]
        starts = self.offsets[:-1][rows]
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total, dtype=np.int64) - np.repeat(ends - lengths - starts, lengths)
        return Csr.from_lengths(lengths, self.values[positions])

    def transpose(self, num_columns: int) -> Csr:
        """Rows become values: from predecessors to successors and back. ``values`` must be < num_columns."""
        return Csr.from_pairs(self.values, self.row_ids, num_columns)

    def segment_sum(self, column: FloatArray) -> FloatArray:
        """Per row, the sum of ``column[value]`` over its values; 0 for an empty row."""
        sums = np.bincount(self.row_ids, weights=column[self.values], minlength=len(self))
        return sums.astype(np.float64, copy=False)

    def equals(self, other: Csr) -> bool:
        """Same rows with the same values in the same order."""
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.values, other.values)


@dataclass(frozen=True, slots=True, eq=False)
class StringTable:
    """Strings as one UTF-8 buffer (it may be a memory map) and offsets of shape ``(count + 1,)``.

    Row 0 is always ``""``. Builders intern; a table read from a file may hold a string twice.
    """

    buffer: bytes | memoryview[int]
    offsets: IntArray

    @classmethod
    def from_strings(cls, strings: Iterable[str]) -> StringTable:
        """A table holding exactly these strings in this order; the first must be empty."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)), out=offsets[1:])
        return cls(b"".join(encoded), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"<StringTable: {len(self):,} texts, {len(self.buffer):,} bytes>"

    def __getitem__(self, index: int) -> str:
        row = self.buffer[self.offsets[index] : self.offsets[index + 1]]
        return bytes(row).decode("utf-8", "surrogatepass")

    def __iter__(self) -> Iterator[str]:
        bounds: list[int] = self.offsets.tolist()
        for start, end in pairwise(bounds):
            yield bytes(self.buffer[start:end]).decode("utf-8", "surrogatepass")

    def find(self, text: str) -> int:
        """The row of a string, or -1. O(table size): for occasional look-ups."""
        wanted = text.encode("utf-8", "surrogatepass")
        rows = np.flatnonzero(np.diff(self.offsets) == len(wanted))
        for row in rows.tolist():
            if self.buffer[self.offsets[row] : self.offsets[row + 1]] == wanted:
                return int(row)
        return -1


class StringTableBuilder:
    """Interns strings: equal strings get one row. Row 0 is ``""``."""

    __slots__ = ("_rows", "_strings")

    def __init__(self, table: StringTable | None = None) -> None:
        """Start empty, or continue a finished ``table`` whose rows keep their numbers."""
        self._strings: list[str] = [""] if table is None else list(table)
        self._rows: dict[str, int] = {}
        for row, text in enumerate(self._strings):
            self._rows.setdefault(text, row)

    def add(self, text: str) -> int:
        """The row of ``text``, new or old."""
        row = self._rows.setdefault(text, len(self._strings))
        if row == len(self._strings):
            self._strings.append(text)
        return row

    def __getitem__(self, row: int) -> str:
        return self._strings[row]

    def build(self) -> StringTable:
        """The finished table."""
        return StringTable.from_strings(self._strings)
