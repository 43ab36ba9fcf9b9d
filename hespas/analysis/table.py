"""Tables of analyses: columns with a row type, which documents use too, and statistics of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import BoolArray, FloatArray, IntArray, check_lengths
from hespas.graph.errors import InvariantError
from hespas.report.tables import Column, Kind, Table, column_of
from hespas.report.texts import UNKNOWN

__all__ = [
    "AnalysisRow",
    "GroupStatistics",
    "RowTable",
    "joined_tables",
    "listed",
    "rate_of",
    "table_from_rows",
    "table_of",
]


class AnalysisRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the row types of analysis tables. Unknown numbers are NaN (-1 for whole numbers), unknown texts
    are empty.
    """


_RowT = TypeVar("_RowT", bound=AnalysisRow)


@dataclass(frozen=True, slots=True, eq=False)
class RowTable(Table, Generic[_RowT]):
    """Table with one column per field of the row type ``row``. The docstring of the row type describes the
    columns.
    """

    columns: Mapping[str, NDArray[Any]]
    row: type[_RowT]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def take(self, rows: IntArray | BoolArray) -> RowTable[_RowT]:
        """Return the selected rows; ``rows`` are row numbers or a mask."""
        return _row_table(self.row, {name: column[rows] for name, column in self.columns.items()})

    def largest(self, name: str) -> RowTable[_RowT]:
        """Return the rows sorted by column ``name``, largest first and unknown values last. The sort is
        stable.
        """
        return self.take(np.argsort(-self.columns[name], kind="stable"))

    def rows(self) -> list[_RowT]:
        """Return the rows as a list of row objects, from which JSON documents are made."""
        columns = [column.tolist() for column in self.columns.values()]
        names = list(self.columns)
        return [self.row(**dict(zip(names, cells, strict=True))) for cells in zip(*columns, strict=True)]


def _row_table(row: type[_RowT], columns: Mapping[str, NDArray[Any]]) -> RowTable[_RowT]:
    return RowTable(_header(row), columns, row)


_IDS = frozenset({"rank", "sequence", "first_rank", "last_rank", "node", "parent", "depth"})
"""Columns of whole numbers that identify something."""
_MOMENTS = frozenset({"start_ns", "end_ns", "peak_time_ns"})
"""Columns of moments on the clock of the recording."""
_ALL = {"step": "all", "stream": "device", "device": "host"}
"""Columns of whole numbers that identify something -> text of -1."""
_CODES = frozenset({"name", "operation", "kernel", "program", "first_operation", "last_operation"})
"""Columns of names from files."""
_SHORT_DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "f16", "float": "f32", "double": "f64", "int": "i32",
    "long int": "i64", "long": "i64", "unsigned char": "u8", "signed char": "i8", "Scalar": UNKNOWN,
    "ScalarList": UNKNOWN, "": UNKNOWN,
}  # fmt: skip


@cache
def _header(row: type[AnalysisRow]) -> tuple[Column, ...]:
    """Return the column declarations of a row type, made from the names and annotations of its fields."""
    return tuple(_declared(name, str(row.__annotations__[name])) for name in row.__struct_fields__)


def _declared(name: str, annotation: str) -> Column:
    if name in _ALL:
        text_of_all = _ALL[name]
        return Column(name, kind="id", write=lambda value: text_of_all if value == -1 else str(value))
    if name in {"shapes", "dtypes"}:
        return Column(name, write=_shapes_text if name == "shapes" else _dtypes_text)
    kinds: dict[Kind, bool] = {
        "code": name in _CODES,
        "text": annotation == "str",
        "flag": annotation == "bool",
        "id": name in _IDS,
        "count": annotation in {"int", "Count"},
    }
    stated: list[Kind] = [kind for kind, applies in kinds.items() if applies]
    declared = column_of(name, stated[0] if stated else "number")
    return replace(declared, kind="moment") if name in _MOMENTS else declared


def _shapes_text(text: str) -> str:
    """Return shapes given as JSON in the form ``8 x 4, (2 x 3, 5)``. Text that is not a JSON list is returned
    unchanged.
    """

    def extents(shape: object) -> str:
        if not isinstance(shape, list):
            return str(shape)
        parts = cast("list[object]", shape)
        if any(isinstance(part, list) for part in parts):
            return f"({', '.join(map(extents, parts))})"
        return "\N{MULTIPLICATION SIGN}".join(map(str, parts)) or UNKNOWN

    return _listed_text(text, extents)


def _dtypes_text(text: str) -> str:
    """Return element types given as JSON in the form ``f32, bf16``. Text that is not a JSON list is returned
    unchanged.
    """
    return _listed_text(text, lambda dtype: _SHORT_DTYPES.get(str(dtype), str(dtype)))


def _listed_text(text: str, write: Callable[[object], str]) -> str:
    """Return the items of a JSON list as text, each formatted by ``write``; unknown items at the end are left
    out.
    """
    items: list[object] | None = None
    if text.startswith("["):
        with suppress(msgspec.DecodeError, RecursionError):
            items = msgspec.json.decode(text, type=list[object])
    if items is None:
        return text or UNKNOWN
    texts = [write(item) for item in items]
    while texts and texts[-1] == UNKNOWN:
        texts.pop()
    return ", ".join(texts) or UNKNOWN


def listed(column: NDArray[np.integer]) -> list[int]:
    """Return an integer column as a list of Python ints, which loops read faster than array elements."""
    numbers: list[int] = column.tolist()
    return numbers


def rate_of(amount: FloatArray, time_ns: FloatArray) -> FloatArray:
    """Return ``amount`` per ns; NaN where the time is 0 or unknown."""
    rates: FloatArray = np.full(len(amount), np.nan)
    np.divide(amount, time_ns, out=rates, where=time_ns > 0)
    return rates


def table_of(row: type[_RowT], **columns: NDArray[Any] | Sequence[Any]) -> RowTable[_RowT]:
    """Return a table of row type ``row`` from its columns, converted to the types of the annotations."""
    if set(columns) != set(row.__struct_fields__):
        missing = sorted(set(row.__struct_fields__) - set(columns))
        unknown = sorted(set(columns) - set(row.__struct_fields__))
        raise InvariantError(f"{row.__name__}: missing columns {missing}, unknown columns {unknown}")
    arrays: dict[str, NDArray[Any]] = {}
    for name in row.__struct_fields__:
        values, dtype = columns[name], _DTYPES[str(row.__annotations__[name])]
        if dtype is np.object_:
            arrays[name] = np.fromiter(values, np.object_, len(values))
        else:
            arrays[name] = np.asarray(values, dtype)
    check_lengths(row.__name__, len(next(iter(arrays.values()))), arrays)
    return _row_table(row, arrays)


def table_from_rows(row: type[_RowT], rows: Sequence[_RowT]) -> RowTable[_RowT]:
    """Return a table from row objects. Suitable for a few rows only."""
    columns = {name: [getattr(value, name) for value in rows] for name in row.__struct_fields__}
    return table_of(row, **columns)


def joined_tables(row: type[_RowT], parts: Sequence[RowTable[_RowT]]) -> RowTable[_RowT]:
    """Return one table with the rows of all ``parts``, in order."""
    if not parts:
        return table_from_rows(row, [])
    names = row.__struct_fields__
    return _row_table(row, {name: np.concatenate([part.columns[name] for part in parts]) for name in names})


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
    """Statistics of the values of each group, columns of shape ``(groups,)``: count, sum, minimum, maximum,
    and the sum of squared deviations from the mean.
    """

    count: IntArray
    total: FloatArray
    least: FloatArray
    most: FloatArray
    squares: FloatArray

    @classmethod
    def of(cls, values: FloatArray, group: IntArray, groups: int) -> GroupStatistics:
        """Return the statistics of ``values`` by group. The mean is computed first, because the variance
        would otherwise be inaccurate by cancellation. O(values + groups).
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
        """Return the statistics after merging groups (Chan, Golub, LeVeque 1979). ``group`` maps each old
        group to a new one.
        """
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
        """Return the mean of each group."""
        return self.total / np.maximum(self.count, 1)

    @property
    def deviation(self) -> FloatArray:
        """Return the sample standard deviation of each group; NaN for a single value."""
        with np.errstate(invalid="ignore", divide="ignore"):
            deviation: FloatArray = np.where(self.count > 1, np.sqrt(self.squares / (self.count - 1)), np.nan)
        return deviation
