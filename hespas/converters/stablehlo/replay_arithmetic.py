"""Recipes of operations that work element by element, and of reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hespas.converters.stablehlo.replay_emit import Emitter, Tensor, Value
from hespas.converters.stablehlo.replay_node import Node, Recipe

__all__ = ["ARITHMETIC"]

_Accepts = Callable[[Tensor], bool]


def _real(tensor: Tensor) -> bool:
    return tensor.is_float or tensor.is_integer


def _number(tensor: Tensor) -> bool:
    return _real(tensor) or tensor.is_complex


def _inexact(tensor: Tensor) -> bool:
    return tensor.is_float or tensor.is_complex


def _float(tensor: Tensor) -> bool:
    return tensor.is_float


def _integer(tensor: Tensor) -> bool:
    return tensor.is_integer


def _bits(tensor: Tensor) -> bool:
    return tensor.is_integer or tensor.is_bool


def _any(tensor: Tensor) -> bool:
    return _number(tensor) or tensor.is_bool


def _ordered(tensor: Tensor) -> bool:
    return _real(tensor) or tensor.is_bool


def _signed(tensor: Tensor) -> bool:
    return tensor.is_float or tensor.is_complex or tensor.element.kind.value == "signed"


def _count(emitter: Emitter, result: Tensor, *, transcendental: bool) -> None:
    count = float(result.elements)
    emitter.work(flops=0.0 if transcendental else count, transcendentals=count if transcendental else 0.0)


def _elementwise(arity: int, accepts: _Accepts, transcendental: bool, node: Node) -> list[Value] | None:
    """One or two operands and a result of one type."""
    result = node.result
    if result is None or node.operands != (result,) * arity or not accepts(result):
        return None
    bound = node.bound(stretch=True)
    _count(node.emitter, result, transcendental=transcendental)
    made = node.emitter.unary(node.op, bound[0]) if arity == 1 else node.emitter.binary(node.op, *bound)
    return [made]


def _square(node: Node) -> list[Value] | None:
    """``chlo.square``, which XLA makes a multiplication of."""
    if node.result is None or node.operands != (node.result,) or not _number(node.result):
        return None
    value = node.bound()[0]
    _count(node.emitter, node.result, transcendental=False)
    return [node.emitter.binary("multiply", value, value)]


def _compare(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or not result.is_bool or len(node.operands) != 2 or len(set(node.operands)) > 1:
        return None
    if result.shape != node.operands[0].shape or not _any(node.operands[0]):
        return None
    one, two = node.bound(stretch=True)
    _count(node.emitter, result, transcendental=False)
    direction = "EQ" if one.type.is_complex else "LT"
    text = f"stablehlo.compare {direction}, {one}, {two} : ({one.type}, {two.type}) -> {result}"
    return [node.emitter.add(text, result)]


def _select(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 3 or node.operands[1:] != (result, result):
        return None
    choice = node.operands[0]
    if not choice.is_bool or choice.shape not in {(), result.shape}:
        return None
    bound = node.bound(stretch=True)
    _count(node.emitter, result, transcendental=False)
    kinds = ", ".join(str(value.type) for value in bound)
    text = f'"stablehlo.select"({", ".join(map(str, bound))}) : ({kinds}) -> {result}'
    return [node.emitter.add(text, result)]


def _clamp(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 3 or node.operands[1] != result or not _ordered(result):
        return None
    if any(each not in {result, result.reshaped(())} for each in node.operands):
        return None
    bound = node.bound(stretch=True)
    _count(node.emitter, result, transcendental=False)
    kinds = ", ".join(str(value.type) for value in bound)
    text = f'"stablehlo.clamp"({", ".join(map(str, bound))}) : ({kinds}) -> {result}'
    return [node.emitter.add(text, result)]


def _convert(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 1 or node.operands[0].shape != result.shape:
        return None
    if node.operands[0].is_complex or result.is_complex:
        return None
    value = node.bound()[0]
    _count(node.emitter, result, transcendental=False)
    return [node.emitter.add(f"stablehlo.convert {value} : ({value.type}) -> {result}", result)]


def _is_finite(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or not result.is_bool or len(node.operands) != 1:
        return None
    if node.operands[0].shape != result.shape or not node.operands[0].is_float:
        return None
    value = node.bound()[0]
    _count(node.emitter, result, transcendental=False)
    return [node.emitter.add(f"stablehlo.is_finite {value} : ({value.type}) -> {result}", result)]


def _reduced_dimensions(whole: tuple[int, ...], part: tuple[int, ...]) -> list[int] | None:
    """Which dimensions of ``whole`` go so that ``part`` is left, the last ones where there is a choice."""
    gone: list[int] = []
    left = 0
    for place, extent in enumerate(whole):
        if left < len(part) and extent == part[left]:
            left += 1
        else:
            gone.append(place)
    return gone if left == len(part) else None


def _reduce(node: Node) -> list[Value] | None:
    """Each input is reduced by itself; the reducer is not known, so sums are taken."""
    count = len(node.results)
    inputs, starts = node.operands[:count], node.operands[count : 2 * count]
    plans: list[list[int]] = []
    for whole, scalar, reduced in zip(inputs, starts, node.results, strict=False):
        gone = _reduced_dimensions(whole.shape, reduced.shape)
        alike = scalar == whole.reshaped(()) and reduced.element is whole.element
        if gone is None or not alike or not _any(whole):
            return None
        plans.append(gone)
    if not plans or len(node.operands) != 2 * count:
        return None
    bound = node.bound()
    made: list[Value] = []
    for place, gone in enumerate(plans):
        value, start, result = bound[place], bound[count + place], node.results[place]
        node.emitter.work(flops=max(0, value.type.elements - result.elements))
        op = "or" if result.is_bool else "add"
        text = (
            f"stablehlo.reduce({value} init: {start}) applies stablehlo.{op} across dimensions = {gone} : "
            f"({value.type}, {start.type}) -> {result}"
        )
        made.append(node.emitter.add(text, result))
    return made


def _rows(names: str, arity: int, accepts: _Accepts, *, transcendental: bool = False) -> dict[str, Recipe]:
    return dict.fromkeys(names.split(), partial(_elementwise, arity, accepts, transcendental))


ARITHMETIC: dict[str, Recipe] = {
    **_rows(
        "exponential exponential_minus_one log log_plus_one logistic sqrt rsqrt sine cosine tan tanh",
        1,
        _inexact,
        transcendental=True,
    ),
    **_rows("cbrt", 1, _float, transcendental=True),
    **_rows("ceil floor round_nearest_afz round_nearest_even", 1, _float),
    **_rows("negate", 1, _number),
    **_rows("abs sign", 1, lambda tensor: _real(tensor) and _signed(tensor)),
    **_rows("not", 1, _bits),
    **_rows("popcnt count_leading_zeros", 1, _integer),
    **_rows("add multiply", 2, _any),
    **_rows("subtract divide", 2, _number),
    **_rows("maximum minimum", 2, _ordered),
    **_rows("remainder", 2, _real),
    **_rows("power", 2, _number, transcendental=True),
    **_rows("atan2", 2, _inexact, transcendental=True),
    **_rows("and or xor", 2, _bits),
    **_rows("shift_left shift_right_arithmetic shift_right_logical", 2, _integer),
    "square": _square,
    "compare": _compare,
    "select": _select,
    "clamp": _clamp,
    "convert": _convert,
    "is_finite": _is_finite,
    "reduce": _reduce,
}
"""Operation name -> recipe."""
