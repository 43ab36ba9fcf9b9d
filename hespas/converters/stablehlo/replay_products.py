"""Recipes of matrix products: dimension numbers inferred from shapes and the extents B, M, N and K."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, permutations, product
from math import isnan, prod
from typing import NamedTuple

import numpy as np

from hespas.converters.stablehlo.replay_emit import F32, Contraction, Emitter, Node, Tensor, Value
from hespas.converters.stablehlo.replay_moves import made_from, stand_in
from hespas.graph import DType, DTypeKind

__all__ = ["MOST_PASSES", "Axes", "complete", "convolution", "fused_products", "single_product"]

_MOST_MATRIX_DIMENSIONS = 7
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
        return [_multiplied(node.emitter, bound[0], bound[1], result, plan)]
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
    return _multiplied(node.emitter, one, two, result, Axes(((0,), (0,)), ((2,), (1,))))


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
    if max(len(left), len(right)) > _MOST_MATRIX_DIMENSIONS:
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


# Work that the operations of a recipe leave undone, so that XLA counts what the graph says.
#
# A few FLOPs an element become passes over the result; more become a matrix product beside it, of which the
# result takes one element and which takes one of the result: it is on the same path and cannot be left out.

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
    made = _multiplied(emitter, left, right, result, Axes(((), ()), ((1,), (0,))))
    rest = count - 2 * side * side * depth - (side * side - 1)
    return _worked(node, made, _MULTIPLY, rest) if rest > 0 else made


def _multiplied(
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


# Recipe of convolutions: layout, strides, padding and dilation inferred from shapes and FLOPs.
#
# Several layouts may give the shapes; the one whose FLOPs, padding and dilation zeros left out, are those of
# the graph is taken.

_MOST_CONVOLUTION_DIMENSIONS = 5
_TOLERANCE = 0.005
_MOST_WINDOWS = 200
_MOST_PLACES = 1 << 22
"""Pairs of output and kernel place that are looked at to count those that multiply something."""

_Shape = tuple[int, ...]


class _Window(NamedTuple):
    """One spatial dimension; ``positions`` counts pairs of output and kernel place that multiply."""

    stride: int
    low: int
    high: int
    lhs_dilation: int
    rhs_dilation: int
    positions: int


class _Layout(NamedTuple):
    """Batch and feature dimension of input and output, input and output feature dimension of the kernel."""

    lhs: tuple[int, int]
    rhs: tuple[int, int]
    out: tuple[int, int]
    feature_groups: int
    batch_groups: int


class _Plan(NamedTuple):
    layout: _Layout
    windows: tuple[_Window, ...]
    flops: float


def convolution(node: Node) -> list[Value] | None:
    """A convolution of the first two operands with one result."""
    result = node.result
    if node.op != "convolution" or result is None or len(node.operands) != 2:
        return None
    left, right = node.operands
    if not _convolvable(left, right, result) or isnan(node.useful_flops):
        return None
    plan = _find(left.shape, right.shape, result.shape, node.flops, node.useful_flops)
    if plan is None:
        return None
    bound = node.bound()
    node.emitter.work(flops=plan.flops)
    numbers = _numbers(plan.layout, len(left.shape))
    text = (
        f"stablehlo.convolution({bound[0]}, {bound[1]}) dim_numbers = {numbers}, "
        f"window = {_window(plan.windows)} {{batch_group_count = {plan.layout.batch_groups} : i64, "
        f"feature_group_count = {plan.layout.feature_groups} : i64}} : ({left}, {right}) -> {result}"
    )
    return [node.emitter.add(text, result)]


def _convolvable(left: Tensor, right: Tensor, result: Tensor) -> bool:
    ranks = {len(left.shape), len(right.shape), len(result.shape)}
    alike = left.element is right.element and left.is_float == result.is_float
    numeric = (left.is_float and result.is_float) or (left.is_integer and result.is_integer)
    return alike and numeric and len(ranks) == 1 and 2 <= len(left.shape) <= _MOST_CONVOLUTION_DIMENSIONS


def _rest(shape: _Shape, pair: tuple[int, int]) -> _Shape:
    return tuple(extent for axis, extent in enumerate(shape) if axis not in pair)


def _layouts(left: _Shape, right: _Shape, out: _Shape) -> Iterator[_Layout]:
    pairs = list(permutations(range(len(left)), 2))
    for lhs, rhs, made in product(pairs, pairs, pairs):
        batch, features = left[lhs[0]], left[lhs[1]]
        taken, given = right[rhs[0]], right[rhs[1]]
        if given != out[made[1]] or not min(taken, out[made[0]]):
            continue
        groups, batches = features // taken, batch // out[made[0]]
        whole = groups * taken == features and batches * out[made[0]] == batch
        if whole and 1 in {groups, batches} and groups and batches and given % (groups * batches) == 0:
            yield _Layout(lhs, rhs, made, groups, batches)


@lru_cache(maxsize=4096)
def _find(left: _Shape, right: _Shape, out: _Shape, spec: float, useful: float) -> _Plan | None:
    """The plan whose FLOPs are nearest to ``useful``, None where none is within the tolerance."""
    best: _Plan | None = None
    for layout in _layouts(left, right, out):
        kernel = _rest(right, layout.rhs)
        taken = right[layout.rhs[0]]
        if not isnan(spec) and 2.0 * prod(out) * taken * prod(kernel) != spec:
            continue
        spatial = zip(_rest(left, layout.lhs), kernel, _rest(out, layout.out), strict=True)
        choices = [_windows(*extents) for extents in spatial]
        each = 2.0 * out[layout.out[0]] * out[layout.out[1]] * taken
        for windows in islice(product(*choices), _MOST_WINDOWS):
            flops = each * prod(window.positions for window in windows)
            if best is None or abs(flops - useful) < abs(best.flops - useful):
                best = _Plan(layout, windows, flops)
        if best is not None and best.flops == useful:
            return best
    return best if best is not None and abs(best.flops - useful) <= _TOLERANCE * useful else None


@lru_cache(maxsize=4096)
def _windows(extent: int, kernel: int, out: int) -> tuple[_Window, ...]:
    """Windows that make ``out`` places of ``extent``, plain ones first; one for each number of positions."""
    if not min(extent, kernel, out) or kernel * out > _MOST_PLACES:
        return ()
    strides = sorted({1, max(1, extent // out), max(1, -(-extent // out))})
    holes = sorted({1, max(1, out // extent), max(1, -(-out // extent))})
    spread = sorted({1, max(1, extent // kernel), max(1, -(-extent // kernel))})
    found: dict[int, _Window] = {}
    for stride, lhs, rhs in product(strides, holes, spread):
        if sorted((stride, lhs, rhs))[1] > 1:
            continue
        reach = (kernel - 1) * rhs + 1
        total = (out - 1) * stride + reach - ((extent - 1) * lhs + 1)
        for low in dict.fromkeys((total // 2, total - total // 2, 0, total)):
            positions = _positions(extent, kernel, out, (stride, low, lhs, rhs))
            found.setdefault(positions, _Window(stride, low, total - low, lhs, rhs, positions))
    return tuple(window for positions, window in found.items() if positions)


def _positions(extent: int, kernel: int, out: int, window: tuple[int, int, int, int]) -> int:
    stride, low, lhs, rhs = window
    place = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * rhs - low
    return int(((place >= 0) & (place <= (extent - 1) * lhs) & (place % lhs == 0)).sum())


def _numbers(layout: _Layout, rank: int) -> str:
    given = f"{_labels(layout.lhs, 'bf', rank)}x{_labels(layout.rhs, 'io', rank)}"
    return f"{given}->{_labels(layout.out, 'bf', rank)}"


def _labels(pair: tuple[int, int], names: str, rank: int) -> str:
    spatial = iter(range(rank))
    named = dict(zip(pair, names, strict=True))
    return f"[{', '.join(named[axis] if axis in named else str(next(spatial)) for axis in range(rank))}]"


def _window(windows: tuple[_Window, ...]) -> str:
    pads = [[window.low, window.high] for window in windows]
    return (
        f"{{stride = {[window.stride for window in windows]}, pad = {pads}, "
        f"lhs_dilate = {[window.lhs_dilation for window in windows]}, "
        f"rhs_dilate = {[window.rhs_dilation for window in windows]}}}"
    )
