"""Conversion between tables of device events and tables of operations.

An event is costed by its name and recorded operands, with the cost table of PyTorch operations. In the other
direction, an operation becomes one event. Matrix products and PyTorch's elementwise operations are written
with operands, and read back as the same operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from hespas.costs.aten import aten_cost, find_aten_rule
from hespas.costs.operation import add_costed
from hespas.graph import GraphBuilder, find_dtype
from hespas.graph.columns import FloatArray
from hespas.measurements.columns import Columns
from hespas.measurements.model import Measurements
from hespas.measurements.tidy import Dialect, MeasuredRows, measured_rows
from hespas.operations import CLASS_OF_KIND, KINDS, Operations, numbered, operations_of

__all__ = ["EVENTS", "event_columns"]

_CALL_COLUMNS = ("op", "shapes", "dtype", "strides", "values")
_UNFIT = ("other", "collective")
"""Kinds that cannot be fitted: collectives wait for other ranks."""
_BINARY = frozenset({"add", "sub", "mul", "div", "pow", "maximum", "minimum"})


def _read_events(columns: Columns) -> MeasuredRows:
    """Return the operations of a table of device events. The first event of an operation has the total time
    of all events of the operation; the other rows have no operation.
    """
    calls = [columns.texts(name, "") for name in _CALL_COLUMNS]
    _, first, index = np.unique(
        numbered(column.row for column in calls), return_index=True, return_inverse=True
    )
    graph = GraphBuilder("events")
    for row in first.tolist():
        name, shapes, dtype, strides, values = (column[row] for column in calls)
        answer = aten_cost(name, shapes, dtype, strides=strides, values=values)
        add_costed(graph, name, answer.cost, operands=answer.operands, results=answer.results)
    ops = operations_of(graph.build()).take(index.reshape(-1))

    duration_ns, number = columns.numbers("duration_ns").copy(), columns.numbers("operation", np.nan)
    is_first = np.ones(len(columns), np.bool_)
    numbered_rows = np.flatnonzero(number >= 0)
    _, first, index = np.unique(number[numbered_rows], return_index=True, return_inverse=True)
    is_first[numbered_rows] = False
    is_first[numbered_rows[first]] = True
    total_ns = np.bincount(index.reshape(-1), duration_ns[numbered_rows], len(first))
    duration_ns[numbered_rows[first]] = total_ns

    usable = np.isfinite(ops.flops + ops.bytes_moved)
    usable[ops.kind.where(*_UNFIT)] = False
    usable[ops.scheme.where("")] = False
    rows = measured_rows(ops, duration_ns / 1e3, kept=is_first & usable)
    return replace(rows, duration_ns=duration_ns)


EVENTS = Dialect(
    title="a table of device events",
    marks=frozenset({"op_class", "kernel", "shapes", "duration_ns"}),
    make=_read_events,
    provenance="the table itself",
    left_out="a further event of an operation, or an event whose cost is unknown or depends on others",
    is_recording=True,
)
"""Table of device events, as profiles are written (:data:`hespas.measurements.COLUMNS`).

It is read as a whole, because the events of one operation may be in any rows.
"""


def _call(ops: Operations, row: int) -> tuple[str, str, str]:
    """Return the operation of a row in the form that PyTorch's profiler records: name, types and extents of
    operands. Operations outside PyTorch have no extents.
    """
    kind, op, scheme = ops.kind[row], ops.op[row], ops.scheme[row]
    sizes = {name: float(ops.dim(name)[row]) for name in KINDS[kind]}
    is_exact = find_dtype(scheme) is not None and all(size.is_integer() for size in sizes.values())
    name = f"aten::{op}"
    operands: list[list[float]] = []
    if is_exact and kind == "matmul":
        name = "aten::mm" if sizes["batch"] == 1 else "aten::bmm"
        batch = [] if sizes["batch"] == 1 else [sizes["batch"]]
        operands = [[*batch, sizes["m"], sizes["k"]], [*batch, sizes["k"], sizes["n"]]]
    elif is_exact and kind == "vector" and find_aten_rule(name) is not None:
        operands = [[sizes["rows"], sizes["columns"]]] * (2 if op in _BINARY else 1)
    if not operands:
        return op or kind, scheme, ""
    extents = [[int(size) for size in operand] for operand in operands]
    types, shapes = (msgspec.json.encode(column).decode() for column in ([scheme] * len(extents), extents))
    return name, types, shapes


def event_columns(table: Measurements) -> dict[str, Sequence[str] | FloatArray]:
    """Return a table of operations as the columns of :data:`hespas.measurements.COLUMNS`, with one event per
    operation.
    """
    ops = table.ops
    distinct, index = ops.distinct_rows()
    calls = [_call(ops, row) for row in distinct.tolist()]
    rows: list[int] = index.tolist()

    def texts(field: int) -> Sequence[str]:
        return [calls[row][field] for row in rows]

    return {
        "hardware": list(table.hardware),
        "op": texts(0),
        "op_class": [CLASS_OF_KIND[kind].name.lower() for kind in ops.kind],
        "kernel": list(ops.variant),
        "duration_ns": table.duration_ns,
        "dtype": texts(1),
        "shapes": texts(2),
    }
