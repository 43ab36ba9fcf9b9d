"""The table of runs as it is read: what was measured is checked before anything is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import nan
from pathlib import Path

from hespas.generators.llm.published import rows_of
from hespas.graph.errors import FormatError, clipped

__all__ = ["NEEDED", "read_runs"]

NEEDED = ("accelerator", "global_batch", "model", "num_accelerators", "seq_len")
"""Columns that no run is without, and what no assumption stands for."""
_TIMES = ("step_time_lo_ms", "step_time_ms", "step_time_hi_ms")
"""In the order that their figures have."""
_MEASURED = (*_TIMES, "mfu_pct", "peak_memory_gib", "rows_with_same_config")
_MOST = 1e12
"""Beyond, a figure is no measurement: 30 years of milliseconds."""
_HINT = "correct the cell, or leave it empty where nothing was measured; rows count from 0, below the header"


def read_runs(table: Path) -> list[Mapping[str, str]]:
    """The rows of a table of runs, cells without blanks around them. Raises ``FormatError`` for what is no
    such table or has no row, and for measured figures that cannot be: no number, none above 0, times out of
    order.
    """
    rows: list[Mapping[str, str]] = []
    for number, cells in enumerate(rows_of(table, NEEDED)):
        row = {name: text.strip() for name, text in cells.items()}
        figures = {name: _figure(row, name, number, table) for name in _MEASURED}
        known = [(name, figures[name]) for name in _TIMES if figures[name] > 0]
        for (before, least), (name, most) in pairwise(known):
            if least > most:
                raise _fault(f"{name} is {most:g}, below {before} with {least:g}", name, number, table)
        rows.append(row)
    if not rows:
        raise FormatError("no row below the header", path=str(table), hint="a row for each run")
    return rows


def _figure(row: Mapping[str, str], name: str, number: int, table: Path) -> float:
    """A measured figure; NaN where the cell is empty."""
    text = row.get(name, "")
    try:
        value = float(text) if text else nan
    except ValueError:
        raise _fault(f"{clipped(text)!r} is no number", name, number, table) from None
    if text and not 0 < value < _MOST:
        raise _fault(f"{clipped(text)} is no measurement: expected a number above 0", name, number, table)
    return value


def _fault(message: str, column: str, number: int, table: Path) -> FormatError:
    return FormatError(message, path=str(table), position=f"row {number}, column {column}", hint=_HINT)
