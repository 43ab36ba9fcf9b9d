"""Work that the operations of a recipe leave undone, so that XLA counts what the graph says.

A few FLOPs an element become passes over the result; more become a matrix product beside it, of which the
result takes one element and which takes one of the result: it is on the same path and cannot be left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import NamedTuple

from hespas.converters.stablehlo.replay_emit import F32, Emitter, Tensor, Value
from hespas.converters.stablehlo.replay_node import Node

__all__ = ["MOST_PASSES", "Axes", "complete", "multiplied"]

MOST_PASSES = 8
"""Operations an element that are made by passes over it."""

_SMALLEST_PRODUCT_FLOPS = 4096
_LARGEST_SIDE = 128
_LONGEST_ROW = 1 << 16
_NEGLIGIBLE = 0.002
_MULTIPLY, _LOGISTIC = "multiply", "logistic"


def complete(node: Node, made: list[Value], flops: float, transcendentals: float) -> list[Value]:
    """The results after work that brings the node to its counts. ``flops`` and ``transcendentals`` are what
    XLA counts for what was added for it so far.
    """
    made = _extended(node, made, _LOGISTIC, node.transcendentals - transcendentals)
    return _extended(node, made, _MULTIPLY, node.target_flops - flops)


def _extended(node: Node, made: list[Value], op: str, missing: float) -> list[Value]:
    count = 0 if isnan(missing) else round(missing)
    if count <= 0:
        return made
    place = _place(made, op)
    if place is not None and count <= MOST_PASSES * made[place].type.elements:
        worked = _worked(node, made[place], op, count)
        return [*made[:place], worked, *made[place + 1 :]]
    return _beside(node, made, op, count)


def _place(made: Sequence[Value], op: str) -> int | None:
    """The largest result that can be worked on."""
    able = [place for place, value in enumerate(made) if _workable(value.type, op)]
    return max(able, key=lambda place: made[place].type.elements) if able else None


def _workable(tensor: Tensor, op: str) -> bool:
    wide = tensor.element.bits >= 8 and tensor.elements > 0
    return wide and (tensor.is_float or (tensor.is_integer and op == _MULTIPLY))


def _worked(node: Node, value: Value, op: str, count: int) -> Value:
    """``value`` after ``count`` operations on its elements: whole passes, then one over a part."""
    passes, rest = divmod(count, value.type.elements)
    for _ in range(passes):
        value = _pass(node, value, op)
    if rest <= _NEGLIGIBLE * count:
        return value
    emitter = node.emitter
    flat = emitter.reshape(value, (value.type.elements,))
    part = _pass(node, emitter.front(flat, (rest,)), op)
    return emitter.reshape(emitter.overwrite(flat, part), value.type.shape)


def _pass(node: Node, value: Value, op: str) -> Value:
    elements = value.type.elements
    if op == _LOGISTIC:
        node.emitter.work(transcendentals=elements)
        return node.emitter.unary(op, value)
    node.emitter.work(flops=elements)
    return node.emitter.binary(op, value, node.binder.filler(value.type))


def _beside(node: Node, made: list[Value], op: str, count: int) -> list[Value]:
    """Work on values of its own, between the results as they are and the results handed on."""
    place = next((place for place, value in enumerate(made) if value.type.elements), None)
    if place is None:
        return made
    emitter = node.emitter
    start = emitter.first(made[place])
    if op == _LOGISTIC or count < _SMALLEST_PRODUCT_FLOPS:
        done = _row(node, start, op, count)
    else:
        done = _product(node, start, count)
    tied = emitter.put(made[place], emitter.largest(done))
    return [*made[:place], tied, *made[place + 1 :]]


def _row(node: Node, start: Value, op: str, count: int) -> Value:
    """A row of numbers, worked on as often as it takes; its maximum counts as work, too."""
    length = min(_LONGEST_ROW, max(1, -(-count // 2) if op == _MULTIPLY else count))
    row = node.binder.tie(node.binder.filler(Tensor(F32, (length,))), [start])
    left = count - (length - 1 if op == _MULTIPLY else 0)
    return _worked(node, row, op, left) if left > 0 else row


class Axes(NamedTuple):
    """Batch and contracted dimensions of a product, each of the left and of the right operand."""

    batching: tuple[Sequence[int], Sequence[int]]
    contracting: tuple[Sequence[int], Sequence[int]]


def _extents(flops: float, elements: float) -> tuple[int, int]:
    """Sides ``(s, k)`` of a product ``s x k by k x s`` of about these FLOPs and elements in all."""
    volume = max(flops / 2, 1.0)
    cube = volume ** (1 / 3)
    side = min(cube, 2 * volume / elements) if elements > 0 else min(cube, _LARGEST_SIDE)
    side_extent = max(1, round(side))
    return side_extent, max(1, int((flops - side_extent**2) // (2 * side_extent**2)))


def _product(node: Node, start: Value, count: int) -> Value:
    emitter = node.emitter
    typed = sum(tensor.size_bytes for tensor in (*node.operands, *node.results))
    spare = node.bytes_moved - typed if not isnan(node.bytes_moved) else 0.0
    side, depth = _extents(count, max(0.0, spare) / F32.storage_bytes(1))
    left = node.binder.tie(node.binder.filler(Tensor(F32, (side, depth))), [start])
    right = node.binder.filler(Tensor(F32, (depth, side)))
    result = Tensor(F32, (side, side))
    made = multiplied(emitter, left, right, result, Axes(((), ()), ((1,), (0,))))
    rest = count - 2 * side * side * depth - (side * side - 1)
    return _worked(node, made, _MULTIPLY, rest) if rest > 0 else made


def multiplied(
    emitter: Emitter,
    left: Value,
    right: Value,
    result: Tensor,
    axes: Axes,
) -> Value:
    """One ``dot_general``."""
    batching, contracting = axes
    depth = 1
    for axis in contracting[0]:
        depth *= left.type.shape[axis]
    emitter.work(flops=2.0 * result.elements * depth)
    batch = f", batching_dims = {list(batching[0])} x {list(batching[1])}" if batching[0] else ""
    text = (
        f"stablehlo.dot_general {left}, {right}{batch}, "
        f"contracting_dims = {list(contracting[0])} x {list(contracting[1])}"
    )
    return emitter.add(f"{text} : ({left.type}, {right.type}) -> {result}", result)
