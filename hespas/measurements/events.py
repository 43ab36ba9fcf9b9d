"""Rows of device events and rows of operations as each other: what is measured, and what a profile holds.

An event's operation is told by its name and the operands that the profiler wrote, and costed by the table of
PyTorch's operations. An operation of a known kind becomes one event; products and what PyTorch computes
element by element have operands there, so that they are read back as what they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from hespas.costs.aten import aten_cost, find_aten_rule
from hespas.costs.operation import add_costed
from hespas.graph import GraphBuilder, find_dtype
from hespas.graph.columns import BoolArray, FloatArray
from hespas.measurements.columns import Columns
from hespas.measurements.model import Measurements
from hespas.measurements.tidy import Dialect, Made, made_of
from hespas.operations import CLASS_OF_KIND, KINDS, Operations, numbered, operations_of

__all__ = ["EVENTS", "event_columns"]

_CALL = ("op", "shapes", "dtype", "strides", "values")
_UNFIT = ("other", "collective")
"""Kinds whose time the operation alone does not decide: messages wait for other ranks."""


def _events(columns: Columns) -> Made:
    """Each operation once, at its first event, with the time of all its events."""
    calls = [columns.texts(name, "") for name in _CALL]
    place = numbered(each.row for each in calls)
    _, first, place = np.unique(place, return_index=True, return_inverse=True)
    rows: list[int] = first.tolist()
    ops = _costed([tuple(each[row] for each in calls) for row in rows]).take(place.reshape(-1))
    is_first, duration_ns = _summed(columns)
    known = np.isfinite(ops.flops + ops.bytes_moved)
    known[ops.kind.where(*_UNFIT)] = False
    known[ops.scheme.where("")] = False
    return replace(made_of(ops, duration_ns / 1e3, kept=is_first & known), duration_ns=duration_ns)


def _costed(calls: Sequence[tuple[str, ...]]) -> Operations:
    """Operations that a profiler recorded, by the cost table; what it does not know is of kind ``other``."""
    graph = GraphBuilder("events")
    for name, shapes, dtype, strides, values in calls:
        priced = aten_cost(name, shapes, dtype, strides=strides, values=values)
        add_costed(graph, name, priced.cost, operands=priced.operands, results=priced.results)
    return operations_of(graph.build())


def _summed(columns: Columns) -> tuple[BoolArray, FloatArray]:
    """Whether each event is the first of its operation, and the time of all events of that [ns]."""
    time, number = columns.numbers("duration_ns"), columns.numbers("operation", np.nan)
    is_first = np.ones(len(columns), np.bool_)
    mine = np.flatnonzero(number >= 0)
    _, first, place = np.unique(number[mine], return_index=True, return_inverse=True)
    is_first[mine] = False
    is_first[mine[first]] = True
    total = time.copy()
    total[mine[first]] = np.bincount(place.reshape(-1), time[mine], len(first))
    return is_first, total


EVENTS = Dialect(
    title="a table of device events",
    marks=frozenset({"op_class", "kernel", "shapes", "duration_ns"}),
    make=_events,
    provenance="the table itself",
    left_out="a further event of an operation, or one whose cost is unknown or not its own",
    is_recording=True,
)
"""What profiles are written as: see :data:`hespas.measurements.COLUMNS`. Events of one operation belong
together wherever they stand, so such a table is read as a whole.
"""


# An operation as an event: what PyTorch calls it, and the extents of its operands.

_TWO_OPERANDS = frozenset({"add", "sub", "mul", "div", "pow", "maximum", "minimum"})


def _call(ops: Operations, row: int) -> tuple[str, str, str]:
    """Name, operands' types and extents. Without extents where PyTorch has no such operation."""
    kind, op, scheme = ops.kind[row], ops.op[row], ops.scheme[row]
    sizes = {name: float(ops.dim(name)[row]) for name in KINDS[kind]}
    known = find_dtype(scheme) is not None and all(size.is_integer() for size in sizes.values())
    name = f"aten::{op}"
    operands: list[list[float]] = []
    if known and kind == "matmul":
        name = "aten::mm" if sizes["batch"] == 1 else "aten::bmm"
        batch = [] if sizes["batch"] == 1 else [sizes["batch"]]
        operands = [[*batch, sizes["m"], sizes["k"]], [*batch, sizes["k"], sizes["n"]]]
    elif known and kind == "vector" and find_aten_rule(name) is not None:
        operands = [[sizes["rows"], sizes["columns"]]] * (2 if op in _TWO_OPERANDS else 1)
    if not operands:
        return op or kind, scheme, ""
    extents = [[int(size) for size in each] for each in operands]
    types, shapes = (msgspec.json.encode(each).decode() for each in ([scheme] * len(extents), extents))
    return name, types, shapes


def event_columns(table: Measurements) -> dict[str, Sequence[str] | FloatArray]:
    """Columns of :data:`hespas.measurements.COLUMNS`, one event for each measured operation."""
    ops = table.ops
    distinct, place = ops.distinct_rows()
    calls = [_call(ops, row) for row in distinct.tolist()]
    rows: list[int] = place.tolist()

    def texts(at: int) -> Sequence[str]:
        return [calls[row][at] for row in rows]

    return {
        "hardware": list(table.hardware),
        "op": texts(0),
        "op_class": [CLASS_OF_KIND[kind].name.lower() for kind in ops.kind],
        "kernel": list(ops.variant),
        "duration_ns": table.duration_ns,
        "dtype": texts(1),
        "shapes": texts(2),
    }
