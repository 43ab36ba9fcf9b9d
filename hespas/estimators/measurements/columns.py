"""A table file as typed columns: numbers with NaN for nothing, texts as labels."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from hespas.estimators.operations import Labels
from hespas.files.limits import limits
from hespas.files.packed import PackedInput
from hespas.files.source import refuse_special_files
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, HespasError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Columns", "read_columns"]

_BLOCK_BYTES = 1 << 20
_VALUE_BYTES = 8


class Columns:
    """The columns of one table; ``FormatError`` names a column that is absent or of another kind."""

    def __init__(self, path: Path, frame: pd.DataFrame) -> None:
        """Columns of a data frame read from ``path``."""
        self.path = path
        self._frame = frame

    def __len__(self) -> int:
        return len(self._frame)

    @property
    def names(self) -> frozenset[str]:
        """Names of all columns."""
        return frozenset(str(name) for name in self._frame.columns)

    def take(self, rows: IntArray) -> Columns:
        """Some rows."""
        return Columns(self.path, self._frame.iloc[rows])

    def folded(self) -> Columns:
        """The same columns, their names without case and outer blanks. Raises ``FormatError`` where two then
        have one name.
        """
        folded = self._frame.rename(columns=lambda name: str(name).strip().casefold())
        _refuse_repeated([str(name) for name in folded.columns], self.path)
        return Columns(self.path, folded)

    def numbers(self, name: str, default: float | None = None) -> FloatArray:
        """A column of numbers; ``default`` where the table has no such column."""
        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return np.full(len(self), default)
        column = self._frame[name]
        if column.dtype.kind == "b":
            raise self._no_numbers(name, "it says true and false")
        try:
            return np.asarray(column.astype("float64").to_numpy(), np.float64)
        except (TypeError, ValueError) as error:
            raise self._no_numbers(name, str(error)) from error

    def _no_numbers(self, name: str, why: str) -> FormatError:
        """The error, with the first row that holds something else than a number."""
        import pandas as pd

        column = self._frame[name]
        wrong = np.flatnonzero((pd.to_numeric(column, errors="coerce").isna() & column.notna()).to_numpy())
        return FormatError(
            f"column {name!r} holds no numbers: {why}",
            path=str(self.path),
            position=f"row {int(wrong[0]) + 1}" if len(wrong) else None,
            hint="write numbers as 1024 or 1.5e3; leave unknown ones empty",
        )

    def texts(self, name: str, default: str | None = None) -> Labels:
        """A column of texts; ``default`` where the table has no such column."""
        import pandas as pd

        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return Labels.constant(default, len(self))
        try:
            codes, values = pd.factorize(self._frame[name].astype("object"))
        except TypeError as error:
            raise FormatError(
                f"column {name!r} holds no texts: {error}", path=str(self.path), hint="one text per row"
            ) from error
        texts = tuple(str(value) for value in values)
        row = np.asarray(codes, np.int32)
        return Labels(np.where(row < 0, len(texts), row).astype(np.int32), (*texts, ""))

    def joined(self, *names: str) -> Labels:
        """Several columns of texts as one, a space between."""
        parts = [self.texts(name, "") for name in names]
        key = np.zeros(len(self), np.int64)
        for part in parts:
            key = key * len(part.names) + part.row
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        rows: list[int] = first.tolist()
        texts = tuple(" ".join(text for part in parts if (text := part[row])) for row in rows)
        return Labels(place.reshape(-1).astype(np.int32), texts)

    def _absent(self, name: str) -> FormatError:
        listed = ", ".join(sorted(self.names))
        return FormatError(f"no column {name!r}", path=str(self.path), hint=f"the table has {listed}")


def read_columns(path: Path) -> Columns:
    """A CSV(.gz) or Parquet file. Raises ``FormatError`` for anything else, and where it is not readable."""
    refuse_special_files(path)
    if not path.is_file():
        raise FormatError("no such file", path=str(path))
    if path.stat().st_size > limits().table_bytes:
        raise _too_large(path)
    try:
        frame = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except HespasError:
        raise
    except Exception as error:  # the readers raise a dozen classes of their own for one thing: not a table
        raise FormatError(
            f"not a table: {error}", path=str(path), hint="CSV, CSV.gz or Parquet with one header row"
        ) from error
    _refuse_repeated([str(name) for name in frame.columns], path)
    return Columns(path, frame)


def _read_parquet(path: Path) -> pd.DataFrame:
    import pandas as pd
    from pyarrow import parquet

    stated = parquet.read_metadata(path)  # pyright: ignore[reportUnknownMemberType]
    if stated.num_rows * max(stated.num_columns, 1) * _VALUE_BYTES > limits().table_bytes:
        raise _too_large(path)
    return pd.read_parquet(path)


def _read_csv(path: Path) -> pd.DataFrame:
    """pandas takes the first of too many fields as names of rows, and renames the second of two columns."""
    import pandas as pd

    packed: Literal["gzip"] | None = "gzip" if path.suffix == ".gz" else None
    if packed:
        _refuse_bomb(path)
    header = pd.read_csv(path, header=None, nrows=1, dtype=str, compression=packed)
    _refuse_repeated([str(name) for name in header.iloc[0].dropna()], path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            return pd.read_csv(path, low_memory=False, index_col=False, compression=packed)
    except pd.errors.ParserWarning as error:
        raise FormatError(
            f"rows have more fields than the {header.shape[1]} of the header",
            path=str(path),
            position="row 1",
            hint="name every column, and quote what holds commas",
        ) from error


def _refuse_bomb(path: Path) -> None:
    """A small file may unpack to anything."""
    with PackedInput(path, limits().table_bytes) as file:
        while file.read(_BLOCK_BYTES):
            pass


def _refuse_repeated(names: list[str], path: Path) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise FormatError(
            f"several columns are called {repeated[0]!r}",
            path=str(path),
            position="header",
            hint="give each a name of its own; case and blanks around it do not count",
        )


def _too_large(path: Path) -> FormatError:
    return FormatError(
        f"larger than {limits().table_bytes:,} bytes: not a table of operations",
        path=str(path),
        hint="give a part of its rows",
    )
