"""Tables of analyses: columns with a row type, which documents use too, and statistics of groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray, check_lengths
from hespas.graph.errors import InvariantError

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "AnalysisRow",
    "GroupStatistics",
    "Table",
    "joined_tables",
    "listed",
    "table_from_rows",
    "table_of",
]


class AnalysisRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of table rows. Unknown numbers are NaN (-1 for whole numbers), unknown texts are empty."""


_RowT = TypeVar("_RowT", bound=AnalysisRow)


@dataclass(frozen=True, slots=True, eq=False)
class Table(Generic[_RowT]):
    """Table of columns of equal length. Their names are the fields of ``row``, whose docstring describes
    them.
    """

    row: type[_RowT]
    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def take(self, rows: IntArray | BoolArray) -> Table[_RowT]:
        """Return the selected rows; ``rows`` are numbers or a mask."""
        return Table(self.row, {name: column[rows] for name, column in self.columns.items()})

    def largest(self, name: str) -> Table[_RowT]:
        """Return the rows sorted by a column, largest first, unknown last. The sort is stable."""
        return self.take(np.argsort(-self.columns[name], kind="stable"))

    def rows(self) -> list[_RowT]:
        """Return the rows as a list, for documents."""
        columns = [column.tolist() for column in self.columns.values()]
        names = list(self.columns)
        return [self.row(**dict(zip(names, cells, strict=True))) for cells in zip(*columns, strict=True)]

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a data frame."""
        import pandas as pd

        # pandas would store texts as Arrow strings, which cannot hold the lone surrogates that ours may have
        columns = {
            name: pd.Series(column, dtype=object) if column.dtype == np.object_ else column
            for name, column in self.columns.items()
        }
        return pd.DataFrame(columns)


def listed(column: NDArray[np.integer]) -> list[int]:
    """Return a column as a list of int, for loops."""
    numbers: list[int] = column.tolist()
    return numbers


def table_of(row: type[_RowT], **columns: NDArray[Any] | Sequence[Any]) -> Table[_RowT]:
    """Return a table with all columns of ``row``, in the types of its annotations."""
    if set(columns) != set(row.__struct_fields__):
        wrong = sorted(set(columns) ^ set(row.__struct_fields__))
        raise InvariantError(f"{row.__name__}: columns {', '.join(wrong)} are missing or not its own")
    arrays: dict[str, NDArray[Any]] = {}
    for name in row.__struct_fields__:
        values, dtype = columns[name], _DTYPES[str(row.__annotations__[name])]
        if dtype is np.object_:
            arrays[name] = np.fromiter(values, np.object_, len(values))
        else:
            arrays[name] = np.asarray(values, dtype)
    check_lengths(row.__name__, len(next(iter(arrays.values()))), arrays)
    return Table(row, arrays)


def table_from_rows(row: type[_RowT], rows: Sequence[_RowT]) -> Table[_RowT]:
    """Return a table of a few rows."""
    columns = {name: [getattr(value, name) for value in rows] for name in row.__struct_fields__}
    return table_of(row, **columns)


def joined_tables(row: type[_RowT], parts: Sequence[Table[_RowT]]) -> Table[_RowT]:
    """Return the rows of all parts, one part after the other."""
    if not parts:
        return table_from_rows(row, [])
    names = row.__struct_fields__
    return Table(row, {name: np.concatenate([part.columns[name] for part in parts]) for name in names})


_DTYPES: Mapping[str, type[np.generic]] = {
    "int": np.int64,
    "Count": np.int64,
    "Figure": np.float64,
    "bool": np.bool_,
    "str": np.object_,
}
"""Annotations of row fields -> types of columns."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupStatistics:
    """Statistics of groups, shape ``(groups,)``: count, sum, minimum, maximum, sum of squares around the
    mean.
    """

    count: IntArray
    total: FloatArray
    least: FloatArray
    most: FloatArray
    squares: FloatArray

    @classmethod
    def of(cls, values: FloatArray, group: IntArray, groups: int) -> GroupStatistics:
        """Return the statistics of values by group, in two passes, without cancellation. O(values +
        groups).
        """
        count = np.bincount(group, minlength=groups).astype(np.int64)
        total = np.bincount(group, values, groups).astype(np.float64)
        mean = total / np.maximum(count, 1)
        squares = np.bincount(group, (values - mean[group]) ** 2, groups).astype(np.float64)
        least, most = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(least, group, values)
        np.maximum.at(most, group, values)
        return cls(count, total, least, most, squares)

    def merged(self, group: IntArray, groups: int) -> GroupStatistics:
        """Return the statistics of merged groups (Chan, Golub, LeVeque 1979)."""
        count = np.bincount(group, self.count, groups).astype(np.int64)
        total = np.bincount(group, self.total, groups).astype(np.float64)
        mean = total / np.maximum(count, 1)
        offset = self.total / np.maximum(self.count, 1) - mean[group]
        squares = np.bincount(group, self.squares + self.count * offset**2, groups).astype(np.float64)
        least, most = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(least, group, self.least)
        np.maximum.at(most, group, self.most)
        return GroupStatistics(count, total, least, most, squares)

    @property
    def mean(self) -> FloatArray:
        """Return the mean."""
        return self.total / np.maximum(self.count, 1)

    @property
    def deviation(self) -> FloatArray:
        """Return the standard deviation of a sample; NaN for one value."""
        with np.errstate(invalid="ignore", divide="ignore"):
            deviation: FloatArray = np.where(self.count > 1, np.sqrt(self.squares / (self.count - 1)), np.nan)
        return deviation
