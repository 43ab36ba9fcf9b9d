"""The rows of a table as columns, while batches are read."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hespas.converters.ops_table.arrow_binding import Arrow, ArrowArray, ArrowBatch, ArrowType, load_arrow
from hespas.converters.ops_table.layout import COLUMNS, Kind
from hespas.graph import OpClass, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray
from hespas.graph.errors import FormatError

__all__ = ["Collected"]

_CLASSES = {member.name.lower(): int(member) for member in OpClass} | {"": 0}
_MOST_CHARACTERS = 1 << 20
"""Of one text; the longest names of kernels have some ten thousand."""


class Collected:
    """Columns of all batches; a column that the table does not have is unknown everywhere."""

    def __init__(self, path: str, read: Callable[[str], str] = str) -> None:
        """``read`` gives the text of a cell."""
        self.rows = 0
        self._read = read
        self.strings = StringTableBuilder()
        self._path = path
        self._arrow: Arrow = load_arrow()
        self._parts: dict[str, list[NDArray[np.generic]]] = {}

    def add(self, batch: ArrowBatch) -> None:
        """Take one batch. Raises ``FormatError`` for numbers that are not whole where they should be, and
        for bytes that are no text.
        """
        try:
            batch.validate(full=True)
        except MemoryError:  # Arrow's is one of its own errors, too
            raise
        except self._arrow.ArrowException as error:
            raise FormatError(
                f"broken table: {str(error)[:300]}", path=self._path, position=f"row {self.rows} or later",
                hint="copy the file again",
            ) from error  # fmt: skip
        for index, (name, found) in enumerate(zip(batch.schema.names, batch.schema.types, strict=True)):
            if self._arrow.types.is_null(found):
                continue
            try:
                values = self._values(name, batch.column(index), found)
            except MemoryError:  # Arrow's is one of its own errors, too
                raise
            except (self._arrow.ArrowException, UnicodeDecodeError) as error:
                raise self._refused(name, f"makes no sense: {error}") from error
            self._parts.setdefault(name, []).append(values)
        self.rows += batch.num_rows

    def _values(self, name: str, column: ArrowArray, found: ArrowType) -> NDArray[np.generic]:
        match COLUMNS.get(name, Kind.NUMBER):
            case Kind.TEXT:
                return self._texts(name, column)
            case Kind.WHOLE if self._arrow.types.is_integer(found):
                whole = column.cast(self._arrow.int64()).fill_null(-1)
                return np.maximum(_numpy(whole).astype(np.int64), -1)
            case Kind.WHOLE:
                return self._wholes(name, _numpy(column).astype(np.float64))
            case Kind.NUMBER:
                return _numpy(column).astype(np.float64)

    def _texts(self, name: str, column: ArrowArray) -> SmallIntArray:
        encoded = column if hasattr(column, "indices") else column.dictionary_encode()
        texts = [text or "" for text in encoded.dictionary.to_pylist()]
        strings = [text for text in texts if isinstance(text, str)]
        if len(strings) < len(texts):
            raise self._refused(name, "holds other things than texts")
        if max(map(len, strings), default=0) > _MOST_CHARACTERS:
            raise self._refused(name, f"holds a text of more than {_MOST_CHARACTERS:,} characters")
        rows = np.array([self.strings.add(self._read(text)) for text in strings] or [0], np.int32)
        places = _numpy(encoded.indices.fill_null(-1)).astype(np.int64)
        return np.where(places < 0, 0, rows[places]).astype(np.int32)

    def _wholes(self, name: str, numbers: FloatArray) -> IntArray:
        """Whole numbers written as floats, -1 for what is missing or negative."""
        known = ~np.isnan(numbers)
        if (numbers[known] != np.floor(numbers[known])).any() or (np.abs(numbers[known]) >= 2**53).any():
            raise self._refused(name, "holds numbers that are not whole")
        return np.maximum(np.nan_to_num(numbers, nan=-1.0), -1).astype(np.int64)

    def _refused(self, name: str, what: str) -> FormatError:
        return FormatError(
            f"column {name} {what}", path=self._path, position=f"column {name!r}", hint="convert the column"
        )

    def _column(self, name: str) -> NDArray[np.generic] | None:
        parts = self._parts.get(name)
        return np.concatenate(parts) if parts else None

    def text(self, name: str) -> SmallIntArray:
        """String rows, 0 where unknown."""
        column = self._column(name)
        return np.zeros(self.rows, np.int32) if column is None else column.astype(np.int32)

    def whole(self, name: str) -> IntArray:
        """Whole numbers, -1 where unknown."""
        column = self._column(name)
        return np.full(self.rows, -1, np.int64) if column is None else column.astype(np.int64)

    def number(self, name: str) -> FloatArray:
        """Numbers, NaN where unknown."""
        column = self._column(name)
        return np.full(self.rows, np.nan) if column is None else column.astype(np.float64)

    def devices(self) -> tuple[tuple[str, ...], SmallIntArray]:
        """The devices in order of appearance, and the one of each row."""
        rows = self.text("hardware")
        used, first, place = np.unique(rows, return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(order), np.int32)
        number[order] = np.arange(len(order))
        table = self.strings.build()
        return tuple(table[int(row)] for row in used[order].tolist()), number[place.reshape(-1)]

    def op_class(self) -> tuple[NDArray[np.int8], int]:
        """Codes of operation classes, and for how many rows the class is none of ours."""
        rows = self.text("op_class")
        used, place = np.unique(rows, return_inverse=True)
        table = self.strings.build()
        codes = [_CLASSES.get(table[int(row)].lower(), -1) for row in used.tolist()]
        found = np.array(codes, np.int8)[place.reshape(-1)]
        return np.maximum(found, 0), int((found < 0).sum())


def _numpy(column: ArrowArray) -> NDArray[np.generic]:
    return column.to_numpy(zero_copy_only=False)
