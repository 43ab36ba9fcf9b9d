"""Operations of the host as a table tells them: which rows one of them caused, and its inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.ops_table.rows import Collected
from hespas.graph import HostOps
from hespas.graph.columns import SmallIntArray

__all__ = ["Operations", "operations_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """Operations in order of their first rows, and the one of each row (-1 none)."""

    host: HostOps
    of_row: SmallIntArray


def operations_of(found: Collected, names: tuple[str, ...]) -> Operations:
    """The operations of a table that has a column ``operation``, or inputs that belong to one; else none.

    An operation is what the first of its rows says; nothing is known of its time and of what is around it.
    """
    if not {"operation", "strides", "values"} & set(names):
        return Operations(HostOps.empty(), np.full(found.rows, -1, np.int32))
    op_row, shapes_row = found.text("op"), found.text("shapes")
    number = found.whole("operation")
    if "operation" not in names:
        number = np.where((op_row > 0) & (shapes_row > 0), np.arange(found.rows), -1)
    known = np.flatnonzero(number >= 0)
    _, first, place = np.unique(number[known], return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order))
    of_row = np.full(found.rows, -1, np.int32)
    of_row[known] = rank[place.reshape(-1)]
    rows = known[first[order]]
    unknown = np.full(len(rows), np.nan)
    return Operations(
        HostOps(
            name_row=op_row[rows],
            thread_row=np.zeros(len(rows), np.int32),
            parent=np.full(len(rows), -1, np.int32),
            start_ns=unknown,
            duration_ns=unknown,
            sequence=np.full(len(rows), -1, np.int64),
            shapes_row=shapes_row[rows],
            dtype_row=found.text("dtype")[rows],
            strides_row=found.text("strides")[rows],
            values_row=found.text("values")[rows],
        ),
        of_row,
    )
