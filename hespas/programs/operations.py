"""Operations as StableHLO from the types of their operands and results.

Where several attributes fit (a transposition of equal extents), one is taken. An operation whose attributes
the types do not imply, or whose types do not fit it, has no operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from hespas.programs.contractions import convolution_text, dot_text, likely_dot_axes, usual_convolution
from hespas.programs.text import Tensor, Value, array, dense, generic, pretty, reduction

__all__ = ["BINARY", "UNARY", "Operator", "broadcast_axes", "dropped_axes", "longest_axis", "operator"]

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

Operator = Callable[[Sequence[Value]], str]
"""An operation right of the equals sign, from the values of its operands."""

_Types = tuple[Tensor, ...]
_Infer = Callable[[_Types, Tensor], Operator | None]
"""The operator of operands and a result of these types."""


def operator(op: str, operands: _Types, results: _Types) -> Operator | None:
    """How to write an operation, by its name without dialect; None where types do not say enough."""
    if op == "sort":
        return _sort(operands, results)
    if op == "reduce" and len(results) > 1:
        return _reduce_several(operands, results)
    if len(results) != 1:
        return None
    result = results[0]
    if op in UNARY:
        return _unary(op, operands, result)
    if op in BINARY:
        return _binary(op, operands, result)
    infer = _RULES.get(op)
    return None if infer is None else infer(operands, result)


def _unary(op: str, operands: _Types, result: Tensor) -> Operator | None:
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
    return _moved(op, result) if fits else None


def _binary(op: str, operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 2 or operands[0] != operands[1] or operands[0].shape != result.shape:
        return None
    return lambda values: f"stablehlo.{op} {values[0]}, {values[1]} : {result}"


def _constant(operands: _Types, result: Tensor) -> Operator | None:
    return None if operands else lambda values: f"stablehlo.constant {dense(result, 1)}"


def _iota(operands: _Types, result: Tensor) -> Operator | None:
    if operands or not result.rank:
        return None
    return lambda values: f"stablehlo.iota dim = {result.rank - 1} : {result}"


def _compare(operands: _Types, result: Tensor) -> Operator | None:
    if not result.is_bool or len(operands) != 2 or operands[0] != operands[1]:
        return None
    if result.shape != operands[0].shape:
        return None
    direction = "EQ" if operands[0].is_complex else "LT"
    return lambda values: pretty(f"compare {direction},", values, result)


def _select(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 3 or operands[1:] != (result, result):
        return None
    if not operands[0].is_bool or operands[0].shape not in {(), result.shape}:
        return None
    return lambda values: generic("select", values, [result])


def _clamp(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 3 or operands[1] != result:
        return None
    if any(each not in {result, result.scalar} for each in operands):
        return None
    return lambda values: generic("clamp", values, [result])


def broadcast_axes(part: Sequence[int], whole: Sequence[int], *, late: bool = False) -> list[int] | None:
    """Which dimension of ``whole`` each of ``part`` becomes, as early (or ``late``) as may be, if any."""
    if late:
        mirrored = broadcast_axes(part[::-1], whole[::-1])
        return None if mirrored is None else [len(whole) - 1 - axis for axis in reversed(mirrored)]
    axes: list[int] = []
    place = 0
    for extent in part:
        while place < len(whole) and extent not in {1, whole[place]}:
            place += 1
        if place == len(whole):
            return None
        axes.append(place)
        place += 1
    return axes


def _broadcast(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 1 or operands[0].element is not result.element:
        return None
    axes = broadcast_axes(operands[0].shape, result.shape, late=True)
    return None if axes is None else _moved("broadcast_in_dim", result, f", dims = {axes}")


def _moved(op: str, result: Tensor, attributes: str = "") -> Operator:
    return lambda values: pretty(op, values, result, attributes)


def _copy(operands: _Types, result: Tensor) -> Operator | None:
    """What moves as many bytes, and is part of a fusion where a copy would be: StableHLO has none."""
    if operands != (result,):
        return None
    op = "not" if result.is_bool else "negate"
    return lambda values: f"stablehlo.{op} {values[0]} : {result}"


def _transpose(operands: _Types, result: Tensor) -> Operator | None:
    """A real one where extents are equal: one that moves nothing would be none."""
    if len(operands) != 1 or operands[0].element is not result.element:
        return None
    shape = operands[0].shape
    if sorted(shape) != sorted(result.shape):
        return None
    left = list(range(len(shape)))
    order: list[int] = []
    for place, extent in enumerate(result.shape):
        fitting = [axis for axis in left if shape[axis] == extent]
        moved = [axis for axis in fitting if axis != place]
        order.append((moved or fitting)[-1])
        left.remove(order[-1])
    return _moved("transpose", result, f", dims = {order}")


def _concatenate(operands: _Types, result: Tensor) -> Operator | None:
    """Along the one dimension in which the parts add up to the whole."""
    if not operands or any(
        each.element is not result.element or each.rank != result.rank for each in operands
    ):
        return None
    whole = result.shape
    for axis, extent in enumerate(whole):
        rest = whole[:axis] + whole[axis + 1 :]
        fits = all(each.shape[:axis] + each.shape[axis + 1 :] == rest for each in operands)
        if fits and sum(each.shape[axis] for each in operands) == extent:
            return _moved("concatenate", result, f", dim = {axis}")
    return None


def _within(part: Tensor, whole: Tensor) -> bool:
    """Whether one type is a box inside the other."""
    alike = part.element is whole.element and part.rank == whole.rank
    return alike and all(small <= large for small, large in zip(part.shape, whole.shape, strict=True))


def _slice(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 1 or not _within(result, operands[0]):
        return None
    return _moved("slice", result, f" [{', '.join(f'0:{extent}' for extent in result.shape)}]")


def _pad(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 2 or not _within(operands[0], result) or operands[1] != result.scalar:
        return None
    high = [large - small for large, small in zip(result.shape, operands[0].shape, strict=True)]
    none = [0] * len(high)
    return _moved("pad", result, f", low = {none}, high = {high}, interior = {none}")


def _are_indices(operands: _Types, rank: int) -> bool:
    """Whether these are scalar indices of equal type, one a dimension."""
    alike = len(set(operands)) <= 1 and len(operands) == rank
    return alike and all(
        each.shape == () and each.is_integer and each.element.bits >= _INDEX_BITS for each in operands
    )


def _dynamic_slice(operands: _Types, result: Tensor) -> Operator | None:
    if not operands or not _within(result, operands[0]) or not _are_indices(operands[1:], result.rank):
        return None
    return _moved("dynamic_slice", result, f", sizes = {list(result.shape)}")


def _dynamic_update_slice(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) < 2 or operands[0] != result or not _within(operands[1], result):
        return None
    return _moved("dynamic_update_slice", result) if _are_indices(operands[2:], result.rank) else None


def longest_axis(tensor: Tensor) -> int:
    """The dimension of the largest extent, the first of equals."""
    return max(range(tensor.rank), key=lambda axis: tensor.shape[axis])


def _reverse(operands: _Types, result: Tensor) -> Operator | None:
    if operands != (result,) or not result.rank:
        return None
    return lambda values: f"stablehlo.reverse {values[0]}, dims = [{longest_axis(result)}] : {result}"


def dropped_axes(whole: Sequence[int], part: Sequence[int]) -> list[int] | None:
    """Which dimensions of ``whole`` go so that ``part`` is left, the last ones where there is a choice."""
    gone: list[int] = []
    left = 0
    for place, extent in enumerate(whole):
        if left < len(part) and extent == part[left]:
            left += 1
        else:
            gone.append(place)
    return gone if left == len(part) else None


def _reduce(operands: _Types, result: Tensor) -> Operator | None:
    """A sum of one operand from a start: the reducer is not known."""
    if len(operands) != 2 or operands[1] != operands[0].scalar or result.element is not operands[0].element:
        return None
    gone = dropped_axes(operands[0].shape, result.shape)
    if gone is None:
        return None
    op = "or" if result.is_bool else "add"
    return lambda values: reduction(op, values[0], values[1], gone, result)


def _reduce_several(operands: _Types, results: _Types) -> Operator | None:
    """Of several operands and their starts: the largest of the first, with what stands beside it."""
    sources = operands[: len(results)]
    scalars = tuple(each.scalar for each in sources)
    if operands[len(results) :] != scalars or len({each.shape for each in sources}) > 1:
        return None
    gone = dropped_axes(sources[0].shape, results[0].shape)
    if gone is None:
        return None
    return lambda values: generic(
        "reduce", values, results, f"dimensions = {array(gone)}", _largest_of_first(scalars)
    )


def _largest_of_first(scalars: _Types) -> str:
    places = range(len(scalars))
    arguments = [f"%{side}{place}: {scalars[place]}" for side in "xy" for place in places]
    lines = [
        f"^bb0({', '.join(arguments)}):",
        f"%p = stablehlo.compare GT, %x0, %y0 : ({scalars[0]}, {scalars[0]}) -> tensor<i1>",
        *(f"%s{n} = stablehlo.select %p, %x{n}, %y{n} : tensor<i1>, {scalars[n]}" for n in places),
        f"stablehlo.return {', '.join(f'%s{n}' for n in places)} : {', '.join(map(str, scalars))}",
    ]
    return f"{{ {' '.join(lines)} }}"


def _sort(operands: _Types, results: _Types) -> Operator | None:
    if not operands or operands != results or not results[0].rank:
        return None
    scalars = [each.scalar for each in results]
    arguments = ", ".join(f"%x{place}: {each}, %y{place}: {each}" for place, each in enumerate(scalars))
    region = (
        f"{{ ^bb0({arguments}): %p = stablehlo.compare LT, %x0, %y0 : ({scalars[0]}, {scalars[0]}) -> "
        f"tensor<i1> stablehlo.return %p : tensor<i1> }}"
    )
    attributes = f"dimension = {results[0].rank - 1} : i64, is_stable = true"
    return lambda values: generic("sort", values, results, attributes, region)


def _gather(operands: _Types, result: Tensor) -> Operator | None:
    """Rows of a table by number."""
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


def _scatter(operands: _Types, result: Tensor) -> Operator | None:
    """Rows added to those of a table by number."""
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
    op, scalar = "or" if result.is_bool else "add", result.scalar
    region = (
        f"{{ ^bb0(%x: {scalar}, %y: {scalar}): %s = stablehlo.{op} %x, %y : {scalar} "
        f"stablehlo.return %s : {scalar} }}"
    )
    return lambda values: generic("scatter", values, [result], attributes, region)


def _index_axis(rows: Tensor, places: Tensor, width: int) -> int | None:
    """The axis of ``rows`` that holds index vectors of one number, or the one behind the last."""
    if not rows.is_integer or places.shape[-1:] != (width,):
        return None
    if rows.shape == (*places.shape[:-1], 1):
        return rows.rank - 1
    return rows.rank if rows.shape == places.shape[:-1] else None


def _dot(operands: _Types, result: Tensor) -> Operator | None:
    if len(operands) != 2:
        return None
    axes = likely_dot_axes(operands[0].shape, operands[1].shape, result.shape)
    return None if axes is None else lambda values: dot_text(values[0], values[1], result, axes)


def _convolution(operands: _Types, result: Tensor) -> Operator | None:
    plan = (
        usual_convolution(operands[0].shape, operands[1].shape, result.shape) if len(operands) == 2 else None
    )
    return None if plan is None else lambda values: convolution_text(values[0], values[1], result, plan)


_RULES: Mapping[str, _Infer] = MappingProxyType(
    {
        "broadcast": _broadcast,
        "broadcast_in_dim": _broadcast,
        "clamp": _clamp,
        "compare": _compare,
        "concatenate": _concatenate,
        "constant": _constant,
        "convolution": _convolution,
        "copy": _copy,
        "dot": _dot,
        "dot_general": _dot,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "gather": _gather,
        "iota": _iota,
        "pad": _pad,
        "reduce": _reduce,
        "reverse": _reverse,
        "scatter": _scatter,
        "select": _select,
        "slice": _slice,
        "transpose": _transpose,
    }
)
"""Operation of one result -> what infers it."""
