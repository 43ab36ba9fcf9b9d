"""Tables of measured runs as rows of cells: each says where it stands, and none is guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path

from hespas.graph.errors import FormatError, clipped
from hespas.measurements.columns import text_batches

__all__ = ["Cells", "read_cells"]

_MOST = 1e15
"""Of any count: beyond it not every whole number is one of float64."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A row of a table; rows count from 0, the header not counted. Raises ``FormatError`` with file, row and
    column for what a cell cannot hold.
    """

    path: Path
    row: int
    values: Mapping[str, object]

    def text(self, name: str) -> str:
        """The text of a cell; empty where there is no such column or nothing in it."""
        value = self.values.get(name)
        return "" if value is None or value != value else str(value).strip()  # noqa: PLR0124 # NaN: empty

    def stated(self, name: str, what: str = "a text") -> str:
        """The same of a cell that must not be empty."""
        text = self.text(name)
        if not text:
            raise self.fault(name, "is empty", what)
        return text

    def number(self, name: str, otherwise: float | None = nan, what: str = "a number of 0 or more") -> float:
        """A number of 0 or more; ``otherwise`` where the cell is empty (None: it must not be)."""
        text = self.text(name)
        if not text and otherwise is not None:
            return otherwise
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not isfinite(value) or value < 0:
            raise self.fault(name, f"is {clipped(text)!r}" if text else "is empty", what)
        return value

    def count(self, name: str, otherwise: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``, which tables may write as 8.0; ``otherwise`` where the cell
        is empty (None: it must not be).
        """
        what = f"a whole number of {least} or more"
        if otherwise is not None and not self.text(name):
            return otherwise
        value = self.number(name, None, what)
        if not least <= value <= _MOST or not value.is_integer():
            raise self.fault(name, f"is {clipped(self.text(name))!r}", what)
        return int(value)

    def fault(self, name: str, problem: str, what: str) -> FormatError:
        """The error of a cell that should hold ``what``."""
        return FormatError(
            f"{name} {problem}", path=str(self.path), position=f"row {self.row}, column {name}",
            hint=f"{what}; rows count from 0, the header not counted",
        )  # fmt: skip


def read_cells(path: Path, needed: Sequence[str]) -> list[Cells]:
    """The rows of a CSV(.gz) or Parquet table, as they are written. Raises ``FormatError`` for anything else,
    a table without rows, and one that lacks a ``needed`` column.
    """
    found: list[Cells] = []
    for frame in text_batches(path):
        missing = [name for name in needed if name not in frame.columns]
        if missing:
            raise FormatError(
                f"no column {missing[0]!r}", path=str(path), position="header",
                hint=f"needed are {', '.join(needed)}",
            )  # fmt: skip
        names = [str(name) for name in frame.columns]
        rows = zip(*(frame[name].tolist() for name in names), strict=True)
        start = len(found)
        found += [Cells(path, start + at, dict(zip(names, row, strict=True))) for at, row in enumerate(rows)]
    if not found:
        raise FormatError("no rows", path=str(path), hint="a row for each run or request")
    return found
