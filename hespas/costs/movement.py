"""Costs of operations that move, select or make data, and of structure that costs nothing."""

from __future__ import annotations

from math import nan

from hespas.costs.cost import FREE, Cost, Rule, is_complex, move_cost
from hespas.costs.facts import BroadcastFacts, Operation, ScatterFacts, UpdateFacts
from hespas.graph import OpClass

__all__ = [
    "bitcast_convert",
    "broadcast",
    "collective",
    "control",
    "free",
    "gather",
    "generate",
    "host_transfer",
    "move",
    "random",
    "scatter",
    "slice_read",
    "update_slice",
]

_INDEX_OPERANDS_OF_UPDATE = 2
"""``dynamic_update_slice`` takes operand, update, then scalar start indices."""


def free(op: Operation) -> Cost:
    """A view or bookkeeping: nothing is computed and nothing moves."""
    del op
    return FREE


def control(op: Operation) -> Cost:
    """Control flow: its regions stand in the graph as nodes of their own."""
    del op
    return Cost(OpClass.CONTROL)


def move(op: Operation) -> Cost:
    """All operands read, all results written."""
    return move_cost(op)


def bitcast_convert(op: Operation) -> Cost:
    """A view where the width stays, else a move."""
    source, result = op.operands[0].dtype, op.results[0].dtype
    if source is not None and result is not None and source.bits == result.bits:
        return FREE
    return move_cost(op)


def broadcast(op: Operation) -> Cost:
    """No traffic where consumers fuse it (the default); otherwise operand and result."""
    if isinstance(op.facts, BroadcastFacts) and op.facts.materialised:
        return move_cost(op, OpClass.BROADCAST)
    return Cost(OpClass.BROADCAST)


def generate(op: Operation) -> Cost:
    """A constant or an iota: consumers fuse it, or read it as their operand."""
    del op
    return Cost(OpClass.GENERATE)


def random(op: Operation) -> Cost:
    """Random bits: state read, results written; the integer work per word is an estimator's parameter."""
    return move_cost(op, OpClass.GENERATE)


def slice_read(op: Operation) -> Cost:
    """What is kept is read and written; start indices are read."""
    indices = sum(tensor.bytes for tensor in op.operands[1:])
    return Cost(OpClass.SLICE, bytes_read=op.written_bytes + indices, bytes_written=op.written_bytes)


def update_slice(op: Operation) -> Cost:
    """In place: the update is read and written. Otherwise the operand is copied besides."""
    operand, update = op.operands[0].bytes, op.operands[1].bytes
    indices = sum(tensor.bytes for tensor in op.operands[_INDEX_OPERANDS_OF_UPDATE:])
    in_place = isinstance(op.facts, UpdateFacts) and op.facts.in_place
    copied = 0.0 if in_place else operand
    return Cost(OpClass.UPDATE, bytes_read=copied + update + indices, bytes_written=copied + update)


def gather(op: Operation) -> Cost:
    """Indices and what is picked (at most the operand) are read, the result is written."""
    indices = sum(tensor.bytes for tensor in op.operands[1:])
    picked = min(op.written_bytes, op.operands[0].bytes) if op.operands else nan
    return Cost(OpClass.GATHER, bytes_read=indices + picked, bytes_written=op.written_bytes)


def scatter(op: Operation) -> Cost:
    """One body for each update. Indices and updates are read, touched results written (read too by the body).

    Not in place, every operand is copied besides.
    """
    facts = op.facts
    if not isinstance(facts, ScatterFacts):
        return Cost(OpClass.SCATTER, nan, nan, nan, op.read_bytes, op.written_bytes)
    first_update = facts.num_inputs + 1
    updates = op.operands[first_update:]
    touched = sum(tensor.bytes for tensor in updates)
    copied = 0.0 if facts.in_place else sum(tensor.bytes for tensor in op.operands[: facts.num_inputs])
    reads = touched if facts.body.reads_first else 0.0
    times = updates[0].elements if updates else nan
    flops = times * facts.body.flops * (2 if updates and is_complex(updates[0]) else 1)
    return Cost(
        OpClass.SCATTER,
        flops,
        flops,
        times * facts.body.transcendentals,
        op.operands[facts.num_inputs].bytes + touched + reads + copied,
        touched + copied,
        op.operands[0].code,
    )


def collective(op: Operation) -> Cost:
    """Local memory traffic only; payloads and groups stand in the collective table, reduction work is
    apart.
    """
    return move_cost(op, OpClass.COLLECTIVE)


def host_transfer(op_class: OpClass) -> Rule:
    """Traffic of a link, not of device memory: what goes out is read, what comes in is written."""

    def rule(op: Operation) -> Cost:
        return move_cost(op, op_class)

    return rule
