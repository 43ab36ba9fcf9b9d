"""Results of analyses as columns; each row has a type, which is also what a document holds of it."""

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

__all__ = ["Moments", "Row", "Table", "joined_tables", "listed", "table_from_rows", "table_of"]


class Row(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row of a table. Unknown numbers are NaN (-1 for whole ones), unknown texts are empty."""


_RowT = TypeVar("_RowT", bound=Row)


@dataclass(frozen=True, slots=True, eq=False)
class Table(Generic[_RowT]):
    """Columns of one length under the names of the fields of ``row``, which says what they mean."""

    row: type[_RowT]
    columns: Mapping[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def take(self, rows: IntArray | BoolArray) -> Table[_RowT]:
        """Some rows, by number or by mask."""
        return Table(self.row, {name: column[rows] for name, column in self.columns.items()})

    def largest(self, name: str) -> Table[_RowT]:
        """The same, the largest figures of a column first; unknown ones last, equal ones as they were."""
        return self.take(np.argsort(-self.columns[name], kind="stable"))

    def rows(self) -> list[_RowT]:
        """One value per row, for documents."""
        listed = [column.tolist() for column in self.columns.values()]
        names = list(self.columns)
        return [self.row(**dict(zip(names, each, strict=True))) for each in zip(*listed, strict=True)]

    def to_pandas(self) -> pd.DataFrame:
        """The columns as a frame."""
        import pandas as pd

        # pandas would store texts as Arrow strings, which cannot hold the lone surrogates that ours may have
        kept = {
            name: pd.Series(column, dtype=object) if column.dtype == np.object_ else column
            for name, column in self.columns.items()
        }
        return pd.DataFrame(kept)


def listed(column: NDArray[np.integer]) -> list[int]:
    """A column as Python numbers, for loops."""
    numbers: list[int] = column.tolist()
    return numbers


def table_of(row: type[_RowT], **columns: NDArray[Any] | Sequence[Any]) -> Table[_RowT]:
    """A table of all columns of ``row``, in the types it states."""
    if set(columns) != set(row.__struct_fields__):
        wrong = sorted(set(columns) ^ set(row.__struct_fields__))
        raise InvariantError(f"{row.__name__}: columns {', '.join(wrong)} are missing or not its own")
    made = {name: _column(columns[name], dtype) for name, dtype in _dtypes(row).items()}
    check_lengths(row.__name__, len(next(iter(made.values()))), made)
    return Table(row, made)


def table_from_rows(row: type[_RowT], rows: Sequence[_RowT]) -> Table[_RowT]:
    """A table of a few rows."""
    return table_of(row, **{name: [getattr(each, name) for each in rows] for name in row.__struct_fields__})


def joined_tables(row: type[_RowT], parts: Sequence[Table[_RowT]]) -> Table[_RowT]:
    """The rows of all parts, one part after the other."""
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


def _dtypes(row: type[Row]) -> dict[str, type[np.generic]]:
    """The types of columns by what the annotations of a row state."""
    return {name: _DTYPES[str(row.__annotations__[name])] for name in row.__struct_fields__}


def _column(values: NDArray[Any] | Sequence[Any], dtype: type[np.generic]) -> NDArray[Any]:
    if dtype is np.object_:
        return np.fromiter(values, np.object_, len(values))
    return np.asarray(values, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Count, sum, least, most and the sum of squares around the mean of each group, shape ``(groups,)``."""

    count: IntArray
    total: FloatArray
    least: FloatArray
    most: FloatArray
    squares: FloatArray

    @classmethod
    def of(cls, values: FloatArray, group: IntArray, groups: int) -> Moments:
        """Of values by group, in two passes: no digits cancel. O(values + groups)."""
        count = np.bincount(group, minlength=groups).astype(np.int64)
        total = np.bincount(group, values, groups).astype(np.float64)
        mean = total / np.maximum(count, 1)
        squares = np.bincount(group, (values - mean[group]) ** 2, groups).astype(np.float64)
        least, most = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(least, group, values)
        np.maximum.at(most, group, values)
        return cls(count, total, least, most, squares)

    def merged(self, group: IntArray, groups: int) -> Moments:
        """Of groups that are put together (Chan, Golub, LeVeque 1979)."""
        count = np.bincount(group, self.count, groups).astype(np.int64)
        total = np.bincount(group, self.total, groups).astype(np.float64)
        mean = total / np.maximum(count, 1)
        apart = self.total / np.maximum(self.count, 1) - mean[group]
        squares = np.bincount(group, self.squares + self.count * apart**2, groups).astype(np.float64)
        least, most = np.full(groups, np.inf), np.full(groups, -np.inf)
        np.minimum.at(least, group, self.least)
        np.maximum.at(most, group, self.most)
        return Moments(count, total, least, most, squares)

    @property
    def mean(self) -> FloatArray:
        """Sum over count."""
        return self.total / np.maximum(self.count, 1)

    @property
    def deviation(self) -> FloatArray:
        """The standard deviation of a sample; NaN for one value."""
        with np.errstate(invalid="ignore", divide="ignore"):
            found: FloatArray = np.where(self.count > 1, np.sqrt(self.squares / (self.count - 1)), np.nan)
        return found
