"""Recipes of matrix products: dimension numbers inferred from shapes and the extents B, M, N and K."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, product
from math import isnan, prod
from typing import NamedTuple

from hespas.converters.stablehlo.replay_emit import F32, Tensor, Value
from hespas.converters.stablehlo.replay_moves import made_from
from hespas.converters.stablehlo.replay_node import Contraction, Node
from hespas.converters.stablehlo.replay_tensors import stand_in
from hespas.converters.stablehlo.replay_work import Axes, multiplied
from hespas.graph import DType, DTypeKind

__all__ = ["fused_products", "single_product"]

_MOST_DIMENSIONS = 7
_MOST_EXPANSION = 4.0
"""Products that would need more memory than this multiple of what the node moves are not written out."""

_ARITHMETIC = {DTypeKind.FLOAT, DTypeKind.SIGNED, DTypeKind.UNSIGNED, DTypeKind.COMPLEX}
_MOST_CHOICES = 20_000
"""Dimension numbers that are tried: dimensions of extent 1 may be anything."""

_MOST_EXCESS = 1.001
_Axes = tuple[int, ...]


class _Roles(NamedTuple):
    batch: _Axes
    contracted: _Axes
    free: _Axes


def single_product(node: Node) -> list[Value] | None:
    """A product of the first two operands with one result, with nothing around it."""
    result = node.result
    if result is None or len(node.contractions) != 1 or len(node.operands) != 2:
        return None
    left, right = node.operands
    row = node.contractions[0]
    if min(row[:4]) < 1 or not _multipliable(left, right, result):
        return None
    plan = _dimension_numbers(left.shape, right.shape, result.shape, row)
    if plan is not None:
        bound = node.bound()
        return [multiplied(node.emitter, bound[0], bound[1], result, plan)]
    if not _fits(row, left.elements, right.elements, result.elements):
        return None
    bound = node.bound()
    return [node.emitter.reshape(_canonical(node, bound[0], bound[1], result.element, row), result.shape)]


def _multipliable(left: Tensor, right: Tensor, result: Tensor) -> bool:
    """Whether StableHLO multiplies these types."""
    if left.is_complex or right.is_complex:
        return left.element is right.element is result.element
    if left.is_float and right.is_float:
        return result.is_float and (
            left.element is right.element or left.element.bits <= 8 >= right.element.bits
        )
    return left.is_integer and left.element is right.element and result.is_integer


def _fits(row: Contraction, left: int, right: int, result: int) -> bool:
    expected = (row.batch * row.m * row.k, row.batch * row.k * row.n, row.batch * row.m * row.n)
    return (left, right, result) == expected


def _canonical(node: Node, left: Value, right: Value, element: DType, row: Contraction) -> Value:
    """The product in its plainest shape, ``B x M x K`` by ``B x K x N``."""
    one = node.emitter.reshape(left, (row.batch, row.m, row.k))
    two = node.emitter.reshape(right, (row.batch, row.k, row.n))
    result = Tensor(element, (row.batch, row.m, row.n))
    return multiplied(node.emitter, one, two, result, Axes(((0,), (0,)), ((2,), (1,))))


def _roles(shape: tuple[int, ...], row: tuple[int, int, int]) -> Iterator[_Roles]:
    """The ways to split dimensions into batch, contracted and free ones of given products."""
    axes = range(len(shape))
    for choice in product("bfc", repeat=len(shape)):
        parts = [tuple(axis for axis in axes if choice[axis] == role) for role in "bcf"]
        if tuple(prod(shape[axis] for axis in part) for part in parts) == row:
            yield _Roles(*parts)


@lru_cache(maxsize=4096)
def _dimension_numbers(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], row: Contraction
) -> Axes | None:
    """Dimension numbers that give the result's shape, None where there are none."""
    if max(len(left), len(right)) > _MOST_DIMENSIONS:
        return None
    rights = list(_roles(right, (row.batch, row.k, row.n)))
    choices = product(_roles(left, (row.batch, row.k, row.m)), rights)
    plans = (_plan(left, right, result, one, two) for one, two in islice(choices, _MOST_CHOICES))
    return next((plan for plan in plans if plan is not None), None)


def _plan(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], one: _Roles, two: _Roles
) -> Axes | None:
    head = result[: len(one.batch)]
    free = (*(left[axis] for axis in one.free), *(right[axis] for axis in two.free))
    if result[len(one.batch) :] != free:
        return None
    left_batch, right_batch = _in_order(left, one.batch, head), _in_order(right, two.batch, head)
    contracted = _in_order(right, two.contracted, tuple(left[axis] for axis in one.contracted))
    if left_batch is None or right_batch is None or contracted is None:
        return None
    return Axes((left_batch, right_batch), (one.contracted, contracted))


def _in_order(shape: tuple[int, ...], axes: _Axes, extents: tuple[int, ...]) -> _Axes | None:
    """The axes in an order in which they have these extents."""
    left = list(axes)
    order: list[int] = []
    for extent in extents:
        chosen = next((axis for axis in left if shape[axis] == extent), None)
        if chosen is None:
            return None
        left.remove(chosen)
        order.append(chosen)
    return None if left else tuple(order)


def fused_products(node: Node) -> list[Value] | None:
    """Products inside a larger operation, of its operands where these have the right sizes."""
    rows = [row for row in node.contractions if min(row[:4]) > 0]
    if not rows or not _affordable(node, rows):
        return None
    bound = node.bound(node.operands or node.results, stretch=True)
    open_places = list(range(len(node.results)))
    made: dict[int, Value] = {}
    loose: list[Value] = []
    used: list[Value] = []
    for row in rows:
        done = _product_of(node, bound, row, used)
        place = next((place for place in open_places if _holds(done, node.results[place])), None)
        if place is None:
            loose.append(node.emitter.largest(done))
            continue
        open_places.remove(place)
        made[place] = _as_result(node, done, node.results[place])
    others = made_from(node, bound, [node.results[place] for place in open_places], copies=True, used=used)
    made.update(zip(open_places, others, strict=True))
    values = [made[place] for place in sorted(made)] or [bound[0]]
    if not others:
        loose += node.binder.release([value for value in bound if value not in used])
    return [node.binder.tie(values[0], loose), *values[1:]]


def _affordable(node: Node, rows: Sequence[Contraction]) -> bool:
    """Whether the products are no more work than the node and need not much more memory than it moves: no
    convolution is unfolded.
    """
    if sum(row.flops for row in rows) > node.target_flops * _MOST_EXCESS:
        return False
    typed = float(sum(tensor.size_bytes for tensor in (*node.operands, *node.results)))
    known = max(typed, 0.0 if isnan(node.bytes_moved) else node.bytes_moved)
    needed = max(
        row.batch * (row.m * row.k * _bytes_of(row.lhs) + row.k * row.n * _bytes_of(row.rhs)) for row in rows
    )
    return known == 0 or needed <= _MOST_EXPANSION * known


def _bytes_of(code: int) -> int:
    return stand_in(code).storage_bytes(1)


def _product_of(node: Node, bound: Sequence[Value], row: Contraction, used: list[Value]) -> Value:
    """One product, of operands of the right size or of arguments that wait for the operands."""
    left = _operand(node, bound, row.batch * row.m * row.k, row.lhs)
    right = _operand(node, bound, row.batch * row.k * row.n, row.rhs)
    used += [left, right]
    element = left.type.element
    if left.type.element is not right.type.element:
        right = node.emitter.converted(right, element)
    return _canonical(node, left, right, element, row)


def _operand(node: Node, bound: Sequence[Value], count: int, code: int) -> Value:
    fitting = [value for value in bound if value.type.elements == count and not value.type.is_bool]
    known = [value for value in fitting if value.type.element.code == code]
    if known or fitting:
        return (known or fitting)[0]
    element = stand_in(code)
    filler = node.binder.filler(
        Tensor(element if element.bits >= 8 and element.kind in _ARITHMETIC else F32, (count,))
    )
    ties = [node.emitter.first(value) for value in bound[:1] if value.type.elements]
    return node.binder.tie(filler, ties)


def _holds(value: Value, result: Tensor) -> bool:
    alike = value.type.is_float == result.is_float and value.type.is_integer == result.is_integer
    return alike and value.type.elements == result.elements and not result.is_complex


def _as_result(node: Node, value: Value, result: Tensor) -> Value:
    return node.emitter.reshape(node.emitter.converted(value, result.element), result.shape)
