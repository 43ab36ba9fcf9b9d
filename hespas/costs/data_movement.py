"""Cost rules of operations that move or select data."""

from __future__ import annotations

from math import nan

from hespas.costs.operation import (
    FREE,
    BroadcastAttributes,
    Cost,
    Operation,
    ScatterAttributes,
    UpdateAttributes,
    is_complex,
    move_cost,
)
from hespas.graph import OpClass

__all__ = [
    "bitcast_convert",
    "broadcast",
    "gather",
    "scatter",
    "slice_read",
    "update_slice",
]


_INDEX_OPERANDS_OF_UPDATE = 2
"""``dynamic_update_slice`` takes operand, update, then scalar start indices."""


def bitcast_convert(op: Operation) -> Cost:
    """Return a zero cost (a view) if the element width does not change, else the cost of a copy."""
    source, result = op.operands[0].dtype, op.results[0].dtype
    if source is not None and result is not None and source.bits == result.bits:
        return FREE
    return move_cost(op)


def broadcast(op: Operation) -> Cost:
    """Return the cost of a broadcast. By default it moves no data, because it is fused into its consumers. If
    the program states that it is a kernel of its own, the operand is read and the result written.
    """
    if isinstance(op.attributes, BroadcastAttributes) and op.attributes.materialised:
        return move_cost(op, OpClass.BROADCAST)
    return Cost(OpClass.BROADCAST)


def slice_read(op: Operation) -> Cost:
    """Return the cost of reading a slice: the slice is read and written, and the start indices are read."""
    indices = sum(tensor.bytes for tensor in op.operands[1:])
    return Cost(OpClass.SLICE, bytes_read=op.written_bytes + indices, bytes_written=op.written_bytes)


def update_slice(op: Operation) -> Cost:
    """Return the cost of updating a slice. The update is read and written. If the operation is not in place,
    the whole operand is also copied.
    """
    operand, update = op.operands[0].bytes, op.operands[1].bytes
    indices = sum(tensor.bytes for tensor in op.operands[_INDEX_OPERANDS_OF_UPDATE:])
    in_place = isinstance(op.attributes, UpdateAttributes) and op.attributes.in_place
    copied = 0.0 if in_place else operand
    return Cost(OpClass.UPDATE, bytes_read=copied + update + indices, bytes_written=copied + update)


def gather(op: Operation) -> Cost:
    """Return the cost of a gather: indices and gathered elements (at most the operand) are read, the result
    is written.
    """
    indices = sum(tensor.bytes for tensor in op.operands[1:])
    picked = min(op.written_bytes, op.operands[0].bytes) if op.operands else nan
    return Cost(OpClass.GATHER, bytes_read=indices + picked, bytes_written=op.written_bytes)


def scatter(op: Operation) -> Cost:
    """Return the cost of a scatter: one application of the body per update. Indices and updates are read, and
    the changed elements are written (and read if the body uses them).

    If the scatter is not in place, every operand is also copied.
    """
    attributes = op.attributes
    if not isinstance(attributes, ScatterAttributes):
        return Cost(OpClass.SCATTER, nan, nan, nan, op.read_bytes, op.written_bytes)
    first_update = attributes.num_inputs + 1
    updates = op.operands[first_update:]
    touched = sum(tensor.bytes for tensor in updates)
    copied = (
        0.0 if attributes.in_place else sum(tensor.bytes for tensor in op.operands[: attributes.num_inputs])
    )
    reads = touched if attributes.body.reads_first else 0.0
    times = updates[0].elements if updates else nan
    flops = times * attributes.body.flops * (2 if updates and is_complex(updates[0]) else 1)
    return Cost(
        OpClass.SCATTER,
        flops,
        flops,
        times * attributes.body.transcendentals,
        op.operands[attributes.num_inputs].bytes + touched + reads + copied,
        touched + copied,
        op.operands[0].code,
    )
