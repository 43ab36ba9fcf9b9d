"""Writers of StableHLO operations, from the types of their operands and results.

If several attributes fit the types (a transposition of equal extents), one of them is used. An operation
whose attributes the types do not determine, or whose types do not fit it, has no writer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan, prod
from typing import NamedTuple

from hespas.programs.contractions import convolution_text, dot_text, likely_dot_axes, usual_convolution
from hespas.programs.text import (
    Operator,
    Tensor,
    Types,
    array,
    binary_region,
    dense,
    generic,
    pretty,
    reduction,
)

__all__ = [
    "BINARY",
    "UNARY",
    "broadcast_axes",
    "dropped_axes",
    "longest_axis",
    "operator",
    "reduce_window",
    "select_and_scatter",
]

_SAME_TYPE = """
    abs cbrt ceil cosine count_leading_zeros exponential exponential_minus_one floor log log_plus_one logistic
    negate not optimization_barrier popcnt round_nearest_afz round_nearest_even rsqrt sign sine sqrt tan tanh
"""
_OTHER_TYPE = "abs bitcast_convert convert imag is_finite real reshape"
_TWO_OPERANDS = """
    add and atan2 complex divide maximum minimum multiply or power remainder shift_left shift_right_arithmetic
    shift_right_logical subtract xor
"""
UNARY = frozenset((_SAME_TYPE + _OTHER_TYPE).split())
BINARY = frozenset(_TWO_OPERANDS.split())
_INDEX_BITS = 8

_OperatorRule = Callable[[Types, Tensor], Operator | None]
_RULES: dict[str, _OperatorRule] = {}
"""Operation with one result -> function that infers its operator."""


def _rule(*names: str) -> Callable[[_OperatorRule], _OperatorRule]:
    """Return a decorator that registers a function as the writer of operations with one result."""

    def register(rule: _OperatorRule) -> _OperatorRule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def operator(op: str, operands: Types, results: Types) -> Operator | None:
    """Return a writer of an operation, named without dialect; None if the types do not determine it."""
    if op == "sort":
        return _sort(operands, results)
    if op == "reduce" and len(results) > 1:
        return _argmax(operands, results)
    if len(results) != 1:
        return None
    result = results[0]
    if op in UNARY:
        if len(operands) != 1:
            return None
        source = operands[0]
        if source == result and op in _SAME_TYPE.split():
            return lambda values: f"stablehlo.{op} {values[0]} : {result}"
        match op:
            case "bitcast_convert":
                fits = True
            case "reshape":
                fits = source.elements == result.elements
            case "is_finite":
                fits = source.is_float and result.is_bool and source.shape == result.shape
            case _:
                fits = op in _OTHER_TYPE.split() and source.shape == result.shape
        return _pretty_operator(op, result) if fits else None
    if op in BINARY:
        fits = len(operands) == 2 and operands[0] == operands[1] and operands[0].shape == result.shape
        return (lambda values: f"stablehlo.{op} {values[0]}, {values[1]} : {result}") if fits else None
    infer = _RULES.get(op)
    return None if infer is None else infer(operands, result)


def _pretty_operator(op: str, result: Tensor, attributes: str = "") -> Operator:
    return lambda values: pretty(op, values, result, attributes)


@_rule("constant")
def _constant(operands: Types, result: Tensor) -> Operator | None:
    return None if operands else lambda values: f"stablehlo.constant {dense(result, 1)}"


@_rule("iota")
def _iota(operands: Types, result: Tensor) -> Operator | None:
    if operands or not result.rank:
        return None
    return lambda values: f"stablehlo.iota dim = {result.rank - 1} : {result}"


@_rule("compare")
def _compare(operands: Types, result: Tensor) -> Operator | None:
    if not result.is_bool or len(operands) != 2 or operands[0] != operands[1]:
        return None
    if result.shape != operands[0].shape:
        return None
    direction = "EQ" if operands[0].is_complex else "LT"
    return lambda values: pretty(f"compare {direction},", values, result)


@_rule("select")
def _select(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 3 or operands[1:] != (result, result):
        return None
    if not operands[0].is_bool or operands[0].shape not in {(), result.shape}:
        return None
    return lambda values: generic("select", values, [result])


@_rule("clamp")
def _clamp(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 3 or operands[1] != result:
        return None
    if any(operand not in {result, result.scalar} for operand in operands):
        return None
    return lambda values: generic("clamp", values, [result])


def broadcast_axes(part: Sequence[int], whole: Sequence[int], *, late: bool = False) -> list[int] | None:
    """Return, for each dimension of the shape ``part``, the dimension of ``whole`` into which it broadcasts.
    The dimensions are ascending, and as early as possible, or with ``late`` as late as possible. Return None
    if ``part`` does not broadcast to ``whole``.
    """
    if late:
        mirrored = broadcast_axes(part[::-1], whole[::-1])
        return None if mirrored is None else [len(whole) - 1 - axis for axis in reversed(mirrored)]
    axes: list[int] = []
    axis = 0
    for extent in part:
        while axis < len(whole) and extent not in {1, whole[axis]}:
            axis += 1
        if axis == len(whole):
            return None
        axes.append(axis)
        axis += 1
    return axes


@_rule("broadcast", "broadcast_in_dim")
def _broadcast(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 1 or operands[0].element is not result.element:
        return None
    axes = broadcast_axes(operands[0].shape, result.shape, late=True)
    return None if axes is None else _pretty_operator("broadcast_in_dim", result, f", dims = {axes}")


@_rule("copy")
def _copy(operands: Types, result: Tensor) -> Operator | None:
    """Return a writer of a copy. StableHLO has none, so it is a negation, which moves as many bytes as a copy
    and is fused like one.
    """
    if operands != (result,):
        return None
    op = "not" if result.is_bool else "negate"
    return lambda values: f"stablehlo.{op} {values[0]} : {result}"


@_rule("transpose")
def _transpose(operands: Types, result: Tensor) -> Operator | None:
    """Return a writer of a transposition. Dimensions of equal extent are exchanged too, so that data
    moves.
    """
    if len(operands) != 1 or operands[0].element is not result.element:
        return None
    shape = operands[0].shape
    if sorted(shape) != sorted(result.shape):
        return None
    left = list(range(len(shape)))
    order: list[int] = []
    for target, extent in enumerate(result.shape):
        fitting = [axis for axis in left if shape[axis] == extent]
        moved = [axis for axis in fitting if axis != target]
        order.append((moved or fitting)[-1])
        left.remove(order[-1])
    return _pretty_operator("transpose", result, f", dims = {order}")


@_rule("concatenate")
def _concatenate(operands: Types, result: Tensor) -> Operator | None:
    """Return a writer of a concatenation along the dimension in which the extents of the operands add up."""
    if not operands:
        return None
    if any(operand.element is not result.element or operand.rank != result.rank for operand in operands):
        return None
    shapes, whole = [operand.shape for operand in operands], result.shape
    for axis, extent in enumerate(whole):
        rest = whole[:axis] + whole[axis + 1 :]
        fits = all(shape[:axis] + shape[axis + 1 :] == rest for shape in shapes)
        if fits and sum(shape[axis] for shape in shapes) == extent:
            return _pretty_operator("concatenate", result, f", dim = {axis}")
    return None


def _is_slice(part: Tensor, whole: Tensor) -> bool:
    """Return True if ``part`` has the element type and rank of ``whole`` and no larger extents."""
    same = part.element is whole.element and part.rank == whole.rank
    return same and all(small <= large for small, large in zip(part.shape, whole.shape, strict=True))


@_rule("slice")
def _slice(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 1 or not _is_slice(result, operands[0]):
        return None
    return _pretty_operator("slice", result, f" [{', '.join(f'0:{extent}' for extent in result.shape)}]")


@_rule("pad")
def _pad(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 2 or not _is_slice(operands[0], result) or operands[1] != result.scalar:
        return None
    high = [large - small for large, small in zip(result.shape, operands[0].shape, strict=True)]
    zeros = [0] * len(high)
    return _pretty_operator("pad", result, f", low = {zeros}, high = {high}, interior = {zeros}")


def _are_indices(operands: Types, rank: int) -> bool:
    """Return True if the operands are scalar indices of one type, one per dimension."""
    if len(operands) != rank or len(set(operands)) > 1:
        return False
    return all(
        operand.shape == () and operand.is_integer and operand.element.bits >= _INDEX_BITS
        for operand in operands
    )


@_rule("dynamic_slice")
def _dynamic_slice(operands: Types, result: Tensor) -> Operator | None:
    if not operands or not _is_slice(result, operands[0]) or not _are_indices(operands[1:], result.rank):
        return None
    return _pretty_operator("dynamic_slice", result, f", sizes = {list(result.shape)}")


@_rule("dynamic_update_slice")
def _dynamic_update_slice(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) < 2 or operands[0] != result or not _is_slice(operands[1], result):
        return None
    if not _are_indices(operands[2:], result.rank):
        return None
    return _pretty_operator("dynamic_update_slice", result)


def longest_axis(tensor: Tensor) -> int:
    """Return the first dimension with the largest extent."""
    return max(range(tensor.rank), key=lambda axis: tensor.shape[axis])


@_rule("reverse")
def _reverse(operands: Types, result: Tensor) -> Operator | None:
    if operands != (result,) or not result.rank:
        return None
    return lambda values: f"stablehlo.reverse {values[0]}, dims = [{longest_axis(result)}] : {result}"


def dropped_axes(whole: Sequence[int], part: Sequence[int]) -> list[int] | None:
    """Return the dimensions of ``whole`` that ``part`` lacks. If several choices fit, the last dimensions are
    dropped.
    """
    dropped: list[int] = []
    matched = 0
    for axis, extent in enumerate(whole):
        if matched < len(part) and extent == part[matched]:
            matched += 1
        else:
            dropped.append(axis)
    return dropped if matched == len(part) else None


@_rule("reduce")
def _reduce(operands: Types, result: Tensor) -> Operator | None:
    """Return a writer of a sum of one operand from an initial value. The types do not determine the
    reducer.
    """
    if len(operands) != 2 or operands[1] != operands[0].scalar or result.element is not operands[0].element:
        return None
    dropped = dropped_axes(operands[0].shape, result.shape)
    if dropped is None:
        return None
    op = "or" if result.is_bool else "add"
    return lambda values: reduction(op, values[0], values[1], dropped, result)


def _argmax(operands: Types, results: Types) -> Operator | None:
    """Return a writer of a reduction of several operands. The results are the maximum of the first operand,
    and the elements of the others at the index of that maximum.
    """
    sources = operands[: len(results)]
    scalars = tuple(source.scalar for source in sources)
    if operands[len(results) :] != scalars or len({source.shape for source in sources}) > 1:
        return None
    dropped = dropped_axes(sources[0].shape, results[0].shape)
    if dropped is None:
        return None
    numbers = range(len(scalars))
    arguments = [f"%{side}{n}: {scalars[n]}" for side in "xy" for n in numbers]
    lines = [
        f"^bb0({', '.join(arguments)}):",
        f"%p = stablehlo.compare GT, %x0, %y0 : ({scalars[0]}, {scalars[0]}) -> tensor<i1>",
        *(f"%s{n} = stablehlo.select %p, %x{n}, %y{n} : tensor<i1>, {scalars[n]}" for n in numbers),
        f"stablehlo.return {', '.join(f'%s{n}' for n in numbers)} : {', '.join(map(str, scalars))}",
    ]
    region = f"{{ {' '.join(lines)} }}"
    return lambda values: generic("reduce", values, results, f"dimensions = {array(dropped)}", region)


def _sort(operands: Types, results: Types) -> Operator | None:
    if not operands or operands != results or not results[0].rank:
        return None
    scalars = [result.scalar for result in results]
    arguments = ", ".join(f"%x{n}: {scalar}, %y{n}: {scalar}" for n, scalar in enumerate(scalars))
    region = (
        f"{{ ^bb0({arguments}): %p = stablehlo.compare LT, %x0, %y0 : ({scalars[0]}, {scalars[0]}) -> "
        f"tensor<i1> stablehlo.return %p : tensor<i1> }}"
    )
    attributes = f"dimension = {results[0].rank - 1} : i64, is_stable = true"
    return lambda values: generic("sort", values, results, attributes, region)


@_rule("gather")
def _gather(operands: Types, result: Tensor) -> Operator | None:
    """Return a writer of a gather of rows from a table."""
    if len(operands) != 2 or operands[0].rank != 2 or not result.rank:
        return None
    table, rows = operands
    vector = _index_axis(rows, result, table.shape[1])
    if vector is None:
        return None
    attributes = (
        f"dimension_numbers = #stablehlo.gather<offset_dims = [{result.rank - 1}], "
        f"collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = {vector}>, "
        f"slice_sizes = {array((1, table.shape[1]))}, indices_are_sorted = false"
    )
    return lambda values: generic("gather", values, [result], attributes)


@_rule("scatter")
def _scatter(operands: Types, result: Tensor) -> Operator | None:
    """Return a writer of a scatter that adds rows to rows of a table."""
    if len(operands) != 3 or result.rank != 2 or operands[0] != result:
        return None
    _, rows, updates = operands
    vector = _index_axis(rows, updates, result.shape[1])
    if vector is None:
        return None
    attributes = (
        f"scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [{updates.rank - 1}], "
        f"inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = {vector}>, "
        "indices_are_sorted = false, unique_indices = false"
    )
    region = binary_region(result.scalar, "or" if result.is_bool else "add")
    return lambda values: generic("scatter", values, [result], attributes, region)


def _index_axis(rows: Tensor, gathered: Tensor, width: int) -> int | None:
    """Return the dimension of the indices ``rows`` that holds index vectors of length 1. If ``rows`` has no
    such dimension because it is implicit, return the number of dimensions. Return None if the shapes do not
    fit.
    """
    if not rows.is_integer or gathered.shape[-1:] != (width,):
        return None
    if rows.shape == (*gathered.shape[:-1], 1):
        return rows.rank - 1
    return rows.rank if rows.shape == gathered.shape[:-1] else None


@_rule("dot", "dot_general")
def _dot(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 2:
        return None
    axes = likely_dot_axes(operands[0].shape, operands[1].shape, result.shape)
    return None if axes is None else lambda values: dot_text(values[0], values[1], result, axes)


@_rule("convolution")
def _convolution(operands: Types, result: Tensor) -> Operator | None:
    if len(operands) != 2:
        return None
    plan = usual_convolution(operands[0].shape, operands[1].shape, result.shape)
    return None if plan is None else lambda values: convolution_text(values[0], values[1], result, plan)


def reduce_window(operands: Types, results: Types, window_elements: float) -> Operator | None:
    """Return a writer of a maximum over windows of ``window_elements`` elements (NaN: as many elements as the
    strides cover).

    Return None for several operands, or for types that do not fit.
    """
    if len(operands) != 2 or len(results) != 1 or operands[1] != operands[0].scalar:
        return None
    attributes = _window_attributes(operands[0], results[0], window_elements)
    if attributes is None:
        return None
    region = binary_region(operands[1], "add" if operands[1].is_complex else "maximum")
    return lambda values: generic("reduce_window", values, results, attributes, region)


def select_and_scatter(operands: Types, results: Types, window_elements: float) -> Operator | None:
    """Return a writer of ``select_and_scatter``, the gradient of max pooling, which adds each value at the
    maximum of its window.

    Return None for types that do not fit.
    """
    if len(operands) != 3 or results != operands[:1] or operands[2] != operands[0].scalar:
        return None
    scalar = operands[2]
    attributes = _window_attributes(operands[0], operands[1], window_elements)
    if attributes is None or scalar.is_bool or scalar.is_complex:
        return None
    regions = f"{binary_region(scalar, 'compare GE', 'tensor<i1>')}, {binary_region(scalar, 'add')}"
    return lambda values: generic("select_and_scatter", values, results, attributes, regions)


class _SlidingWindow(NamedTuple):
    size: int
    stride: int
    low: int
    high: int


def _window_attributes(whole: Tensor, part: Tensor, window_elements: float) -> str | None:
    """Return the attributes of a windowed operation as text: sizes, strides and padding. Return None if the
    types do not fit.

    The stride is the ratio of extents. The window has the same size in all dimensions with a stride above 1.
    """
    if whole.rank != part.rank or whole.element is not part.element or not part.elements:
        return None
    strides = [max(round(large / small), 1) for large, small in zip(whole.shape, part.shape, strict=True)]
    moving = sum(stride > 1 for stride in strides)
    count = prod(strides) if isnan(window_elements) else max(window_elements, 1.0)
    side = max(round(count ** (1 / moving)), 1) if moving else 1
    windows: list[_SlidingWindow] = []
    for large, small, stride in zip(whole.shape, part.shape, strides, strict=True):
        size = min(side, large) if stride > 1 else 1
        total = (small - 1) * stride + size - large
        if total < 0 and (large - size) // stride + 1 != small:
            return None
        low = max(total, 0) // 2
        windows.append(_SlidingWindow(size, stride, low, max(total, 0) - low))
    padding = ", ".join(f"[{window.low}, {window.high}]" for window in windows)
    return (
        f"window_dimensions = {array([window.size for window in windows])}, "
        f"window_strides = {array([window.stride for window in windows])}, "
        f"padding = dense<[{padding}]> : tensor<{len(windows)}x2xi64>"
    )
