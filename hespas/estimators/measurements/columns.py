"""A table file as typed columns: numbers with NaN for nothing, texts as labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hespas.estimators.operations import Labels
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import FormatError, HespasError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Columns", "read_columns"]

_MOST_BYTES = 4 << 30


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
        """The same columns, their names without case and outer blanks."""
        return Columns(self.path, self._frame.rename(columns=lambda name: str(name).strip().casefold()))

    def numbers(self, name: str, default: float | None = None) -> FloatArray:
        """A column of numbers; ``default`` where the table has no such column."""
        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return np.full(len(self), default)
        try:
            return np.asarray(self._frame[name].astype("float64").to_numpy(), np.float64)
        except (TypeError, ValueError) as error:
            raise FormatError(f"column {name!r} holds no numbers: {error}", path=str(self.path)) from error

    def texts(self, name: str, default: str | None = None) -> Labels:
        """A column of texts; ``default`` where the table has no such column."""
        import pandas as pd

        if name not in self.names:
            if default is None:
                raise self._absent(name)
            return Labels.constant(default, len(self))
        codes, values = pd.factorize(self._frame[name].astype("object"))
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
    import pandas as pd

    if not path.is_file():
        raise FormatError("no such file", path=str(path))
    if path.stat().st_size > _MOST_BYTES:
        raise FormatError("larger than 4 GiB: not a table of operations", path=str(path))
    try:
        is_parquet = path.suffix == ".parquet"
        frame = pd.read_parquet(path) if is_parquet else pd.read_csv(path, low_memory=False)
    except HespasError:
        raise
    except Exception as error:  # the readers raise a dozen classes of their own for one thing: not a table
        raise FormatError(
            f"not a table: {error}", path=str(path), hint="CSV, CSV.gz or Parquet with one header row"
        ) from error
    return Columns(path, frame)
