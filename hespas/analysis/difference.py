"""Differences between two recordings: by part of the step time, operation, shape and kernel.

The difference of an operation is the exact sum of two effects. The count effect is the change of its number
of runs, times its mean time in the first recording. The time effect is the rest: the change of its mean time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from hespas.analysis.device_use import ALL_STEPS, BreakdownRow
from hespas.analysis.operations import KernelRow, OperationRow
from hespas.analysis.table import AnalysisRow, RowTable, table_from_rows, table_of
from hespas.files.documents import Count, Figure
from hespas.graph.columns import FloatArray

__all__ = [
    "ChangeRow",
    "ComparedTables",
    "PartRow",
    "RecordingDifference",
    "changes",
    "difference_of",
    "parts",
]


class PartRow(AnalysisRow, frozen=True, kw_only=True):
    """Component of the time span (such as compute or idle time) in two recordings, summed over ranks. All
    components add up to the span.
    """

    part: str
    before_ns: Figure
    after_ns: Figure
    delta_ns: Figure


class ChangeRow(AnalysisRow, frozen=True, kw_only=True):
    """Change of an operation, an operation with its shapes, or a kernel between two recordings. ``change`` is
    added, gone, slower, faster or same.

    ``delta_ns`` = ``count_delta_ns`` + ``mean_delta_ns``. ``count_delta_ns`` is the change of the number of
    runs, times the mean time before. ``mean_delta_ns`` is due to the change of the mean time. ``share`` is
    relative to the difference of all device time.
    """

    name: str
    shapes: str
    dtypes: str
    change: str
    before_count: Count
    after_count: Count
    before_ns: Figure
    after_ns: Figure
    delta_ns: Figure
    count_delta_ns: Figure
    mean_delta_ns: Figure
    share: Figure


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RecordingDifference:
    """Tables of the comparison of two recordings."""

    parts: RowTable[PartRow]
    by_operation: RowTable[ChangeRow]
    by_shape: RowTable[ChangeRow]
    by_kernel: RowTable[ChangeRow]

    def tables(self) -> Mapping[str, RowTable[Any]]:
        """Return the tables by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}


_PARTS = {
    "compute_ns": "compute",
    "exposed_communication_ns": "exposed communication",
    "exposed_memory_ns": "copies",
    "idle_ns": "idle",
    "span_ns": "span",
}


def parts(before: RowTable[BreakdownRow], after: RowTable[BreakdownRow]) -> RowTable[PartRow]:
    """Return the time of each component of the span (compute, exposed communication, idle, ...) in both
    recordings, summed over ranks.
    """
    rows: list[PartRow] = []
    for name, label in _PARTS.items():
        old, new = (float(table[name][table["step"] == ALL_STEPS].sum()) for table in (before, after))
        rows.append(PartRow(part=label, before_ns=old, after_ns=new, delta_ns=new - old))
    return table_from_rows(PartRow, rows)


_ChangeKey = tuple[str, str, str]


def changes(
    before: Mapping[_ChangeKey, tuple[int, float]], after: Mapping[_ChangeKey, tuple[int, float]]
) -> RowTable[ChangeRow]:
    """Return the changes between two recordings in the number and time of runs by name, shapes and types,
    largest change first.
    """
    keys = list(dict.fromkeys((*before, *after)))
    absent = (0, 0.0)
    old, new = (np.array([sums.get(key, absent) for key in keys]).reshape(-1, 2) for sums in (before, after))
    delta = new[:, 1] - old[:, 1]
    whole = float(new[:, 1].sum() - old[:, 1].sum())
    with np.errstate(invalid="ignore", divide="ignore"):
        mean: FloatArray = np.where(old[:, 0] > 0, old[:, 1] / old[:, 0], new[:, 1] / new[:, 0])
        more = np.where(old[:, 0] == new[:, 0], 0.0, (new[:, 0] - old[:, 0]) * mean)
        gone_or_added = (old[:, 0] == 0) | (new[:, 0] == 0)
        more = np.where(gone_or_added, delta, more)
        share = delta / whole if whole else np.full(len(keys), np.nan)
    change = np.select(
        [old[:, 0] == 0, new[:, 0] == 0, new[:, 1] == old[:, 1], new[:, 1] > old[:, 1]],
        ["added", "gone", "same", "slower"],
        "faster",
    )
    order = np.argsort(-np.abs(delta), kind="stable")
    return table_of(
        ChangeRow,
        name=[key[0] for key in keys],
        shapes=[key[1] for key in keys],
        dtypes=[key[2] for key in keys],
        change=change.tolist(),
        before_count=old[:, 0],
        after_count=new[:, 0],
        before_ns=old[:, 1],
        after_ns=new[:, 1],
        delta_ns=delta,
        count_delta_ns=more,
        mean_delta_ns=delta - more,
        share=share,
    ).take(order)


def _sums(table: RowTable[Any], *columns: str) -> dict[_ChangeKey, tuple[int, float]]:
    """Return the count and total time of the rows of ``table`` by the texts in ``columns``."""
    sums: dict[_ChangeKey, tuple[int, float]] = {}
    blank = [""] * len(table)
    texts = [table[name].tolist() if name else blank for name in columns]
    for *key, count, total in zip(*texts, table["count"].tolist(), table["total_ns"].tolist(), strict=True):
        name, shapes, dtypes = key
        before = sums.get((name, shapes, dtypes), (0, 0.0))
        sums[name, shapes, dtypes] = (before[0] + count, before[1] + total)
    return sums


class ComparedTables(Protocol):
    """Protocol of the tables of one recording that a comparison needs."""

    @property
    def breakdown(self) -> RowTable[BreakdownRow]:
        """Return the time breakdown of the recording."""
        ...

    @property
    def operations(self) -> RowTable[OperationRow]:
        """Return the operations by name and shapes."""
        ...

    @property
    def kernels(self) -> RowTable[KernelRow]:
        """Return the kernels by name."""
        ...


def difference_of(before: ComparedTables, after: ComparedTables) -> RecordingDifference:
    """Compare two recordings of the same job. O(rows log rows)."""
    operation, shape = ("operation", "", ""), ("operation", "shapes", "dtypes")
    return RecordingDifference(
        parts=parts(before.breakdown, after.breakdown),
        by_operation=changes(_sums(before.operations, *operation), _sums(after.operations, *operation)),
        by_shape=changes(_sums(before.operations, *shape), _sums(after.operations, *shape)),
        by_kernel=changes(_sums(before.kernels, "kernel", "", ""), _sums(after.kernels, "kernel", "", "")),
    )
