"""Recipes: what each operation of a graph is in a replay, and the work that brings it to its counts.

Attributes follow from types (:mod:`hespas.programs`); what they do not say is copied, without arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import isnan, prod

from hespas.converters.stablehlo import UNKNOWN_WORK
from hespas.converters.stablehlo.replay_emit import (
    F32,
    Contraction,
    Emitter,
    Node,
    Recipe,
    quoted_text,
    stand_in,
)
from hespas.graph import DType, DTypeKind
from hespas.programs.contractions import DotAxes, convolution_text, dot_axes, dot_text, find_convolution
from hespas.programs.operations import broadcast_axes, longest_axis, operator
from hespas.programs.text import Tensor, Value

__all__ = [
    "MOST_PASSES",
    "RECIPES",
    "complete",
    "convolution",
    "fused_matmuls",
    "made_from",
    "passed_on",
    "single_matmul",
    "synthesised",
    "unknown_work",
]


def _moved(node: Node) -> list[Value] | None:
    """An operation whose attributes follow from its types; one that moves nothing is a view."""
    write = operator(node.op, node.operands, node.results)
    if write is None or (node.op == "slice" and node.operands == node.results):
        return None
    return [node.emitter.add(write(node.bound()), node.results[0])]


def _broadcast(node: Node) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 1 or node.operands[0].element is not result.element:
        return None
    if broadcast_axes(node.operands[0].shape, result.shape) is None:
        return None
    return [node.emitter.stretched(node.bound()[0], result.shape, shared=False)]


def _reverse(node: Node) -> list[Value] | None:
    if node.result is None or node.operands != (node.result,):
        return None
    return [_turned(node.emitter, node.bound()[0])]


def _turned(emitter: Emitter, value: Value) -> Value:
    """Return a copy that no compiler can leave out: the longest dimension the other way round. The first copy
    of an operation of unknown FLOPs is marked as such, for the reader.
    """
    if emitter.unknown_work is not None and value.type.elements:
        axes = f"[{longest_axis(value.type)}]" if value.type.rank else "[]"
        mark = f"{{{UNKNOWN_WORK} = {quoted_text(emitter.unknown_work)}}}"
        emitter.mark(None)
        return emitter.add(f"stablehlo.reverse {value}, dims = {axes} {mark} : {value.type}", value.type)
    write = operator("reverse", (value.type,), (value.type,)) if value.type.elements > 1 else None
    return value if write is None else emitter.add(write([value]), value.type)


def passed_on(node: Node) -> list[Value]:
    """A view, constant or join: results are what it waits for, in another shape, or arguments, which are
    different ones for different constants.
    """
    node = node._replace(op="")
    if not node.results:
        return node.bound(node.operands or _smallest_types(node))
    return _results_from(node, copies=False)


def unknown_work(node: Node, name: str) -> list[Value]:
    """Any operation of unknown FLOPs: products that are known, and a copy that is marked with its name."""
    node.emitter.mark(name)
    made = fused_matmuls(node) or synthesised(node)
    place = next((place for place, value in enumerate(made) if value.type.elements), None)
    if node.emitter.unknown_work is not None and place is not None:
        made[place] = _turned(node.emitter, made[place])
    node.emitter.mark(None)
    return made


def synthesised(node: Node) -> list[Value]:
    """Any other operation: reads its operands and makes results of the right types, without arithmetic."""
    if not node.results:
        bound = node.bound(node.operands or _smallest_types(node))
        return [_turned(node.emitter, bound[0]), *bound[1:]]
    return _results_from(node, copies=True)


def _smallest_types(node: Node) -> list[Tensor]:
    """The types of what a node without types waits for."""
    return [producer[0].type for producer in node.producers if producer][:1]


def _results_from(node: Node, *, copies: bool) -> list[Value]:
    bound = node.bound(node.operands or node.results, stretch=True)
    return made_from(node, bound, node.results, copies=copies)


def made_from(
    node: Node, bound: Sequence[Value], results: Sequence[Tensor], *, copies: bool, used: Iterable[Value] = ()
) -> list[Value]:
    """Values of the given types, made of those a node is bound to; views of them unless ``copies``. The first
    waits for all that is neither ``used`` nor made something of, copies for the first.
    """
    made: list[Value] = []
    names = {value.name for value in used}
    sources = _Sources(bound)
    for place, result in enumerate(results):
        source = sources.nearest(result, place)
        if source is None:
            source = node.binder.filler(result)
        elif source.type.elements <= result.elements:
            names.add(source.name)
        value = _fitted(node.emitter, source, result)
        made.append(_turned(node.emitter, value) if copies else value)
    able = [place for place, value in enumerate(made) if value.type.elements]
    if not able:
        return made
    left = node.binder.release([value for value in bound if value.name not in names])
    made[able[0]] = node.binder.tie(made[able[0]], left)
    if copies and len(able) > 1:  # no result is there before the operation is done
        done = [node.emitter.first(made[able[0]])]
        for place in able[1:]:
            made[place] = node.binder.tie(made[place], done)
    return made


class _Sources:
    """What results can be made of, by element type and size."""

    def __init__(self, bound: Sequence[Value]) -> None:
        self._equal: dict[tuple[int, int], list[Value]] = {}
        self._ordered: dict[int, list[Value]] = {}
        for value in bound:
            code, count = value.type.element.code, value.type.elements
            if count:
                self._equal.setdefault((code, count), []).append(value)
                self._ordered.setdefault(code, []).append(value)
        for values in self._ordered.values():
            values.sort(key=lambda value: -value.type.elements)

    def nearest(self, result: Tensor, place: int) -> Value | None:
        """One of the same element type and size, in turn among equals; else the largest that can be cut or
        repeated.
        """
        if not result.elements:
            return None
        equal = self._equal.get((result.element.code, result.elements))
        if equal:
            return equal[place % len(equal)]
        able = self._ordered.get(result.element.code, ())
        return next((value for value in able if _can_fit(value.type, result)), None)


def _can_fit(made: Tensor, wanted: Tensor) -> bool:
    return made.elements > wanted.elements or wanted.elements % made.elements == 0


def _fitted(emitter: Emitter, value: Value, result: Tensor) -> Value:
    count = value.type.elements
    if count > result.elements:
        value = emitter.front(emitter.reshape(value, (count,)), (result.elements,))
    if count < result.elements:
        return emitter.stretched(value, result.shape)
    return emitter.reshape(value, result.shape)


_VIEWS = """
    reshape bitcast bitcast_convert tuple get_tuple_element optimization_barrier after_all create_token
    constant iota parameter partition_id replica_id
"""
_MOVES: dict[str, Recipe] = {
    **dict.fromkeys(
        ("transpose", "concatenate", "slice", "pad", "dynamic_slice", "dynamic_update_slice"), _moved
    ),
    **dict.fromkeys(("broadcast_in_dim", "broadcast"), _broadcast),
    **dict.fromkeys(("reverse", "copy"), _reverse),
    **dict.fromkeys(_VIEWS.split(), passed_on),
}


# --- operations that work element by element, and of reductions.

_Kinds = frozenset[DTypeKind]
_FLOAT = frozenset({DTypeKind.FLOAT})
_INTEGER = frozenset({DTypeKind.SIGNED, DTypeKind.UNSIGNED})
_BITS = _INTEGER | {DTypeKind.BOOL}
_INEXACT = _FLOAT | {DTypeKind.COMPLEX}
_REAL = _FLOAT | _INTEGER
_ORDERED = _REAL | {DTypeKind.BOOL}
_NUMBER = _REAL | {DTypeKind.COMPLEX}
_ANY = _NUMBER | {DTypeKind.BOOL}


def _counted(node: Node, *, transcendental: bool = False, stretch: bool = True) -> list[Value] | None:
    """An operation of one FLOP, or transcendental, for each element of its result."""
    write = operator(node.op, node.operands, node.results)
    if write is None:
        return None
    bound = node.bound(stretch=stretch)
    count = float(node.results[0].elements)
    node.emitter.work(**{"transcendentals" if transcendental else "flops": count})
    return [node.emitter.add(write(bound), node.results[0])]


def _elementwise(arity: int, kinds: _Kinds, transcendental: bool, node: Node) -> list[Value] | None:
    """One or two operands and a result of one type."""
    result = node.result
    if result is None or node.operands != (result,) * arity or result.element.kind not in kinds:
        return None
    return _counted(node, transcendental=transcendental)


def _square(node: Node) -> list[Value] | None:
    """``chlo.square``, which XLA makes a multiplication of."""
    if node.result is None or node.operands != (node.result,) or node.result.element.kind not in _NUMBER:
        return None
    value = node.bound()[0]
    node.emitter.work(flops=float(node.result.elements))
    return [node.emitter.binary("multiply", value, value)]


def _checked(kinds: _Kinds, stretch: bool, node: Node) -> list[Value] | None:
    """Operands that are not all of the result's type."""
    able = all(each.element.kind in kinds for each in (*node.operands, *node.results))
    return _counted(node, stretch=stretch) if able else None


def _reduce(node: Node) -> list[Value] | None:
    """Each input is reduced by itself; the reducer is not known, so sums are taken."""
    count = len(node.results)
    if len(node.operands) != 2 * count or any(each.element.kind not in _ANY for each in node.operands):
        return None
    types = list(zip(node.operands[:count], node.operands[count:], strict=True))
    writers = [operator("reduce", pair, (made,)) for pair, made in zip(types, node.results, strict=True)]
    known = [write for write in writers if write is not None]
    if not known or len(known) < count:
        return None
    bound = node.bound()
    made: list[Value] = []
    for place, (write, result) in enumerate(zip(known, node.results, strict=True)):
        value, start = bound[place], bound[count + place]
        node.emitter.work(flops=max(0, value.type.elements - result.elements))
        made.append(node.emitter.add(write([value, start]), result))
    return made


def _rows(names: str, arity: int, kinds: _Kinds, *, transcendental: bool = False) -> dict[str, Recipe]:
    return dict.fromkeys(names.split(), partial(_elementwise, arity, kinds, transcendental))


RECIPES: dict[str, Recipe] = {
    **_MOVES,
    **_rows("exponential exponential_minus_one log log_plus_one", 1, _INEXACT, transcendental=True),
    **_rows("logistic sqrt rsqrt sine cosine tan tanh", 1, _INEXACT, transcendental=True),
    **_rows("cbrt", 1, _FLOAT, transcendental=True),
    **_rows("ceil floor round_nearest_afz round_nearest_even", 1, _FLOAT),
    **_rows("negate", 1, _NUMBER),
    **_rows("abs sign", 1, frozenset({DTypeKind.FLOAT, DTypeKind.SIGNED})),
    **_rows("not", 1, _BITS),
    **_rows("popcnt count_leading_zeros", 1, _INTEGER),
    **_rows("add multiply", 2, _ANY),
    **_rows("subtract divide", 2, _NUMBER),
    **_rows("maximum minimum", 2, _ORDERED),
    **_rows("remainder", 2, _REAL),
    **_rows("power", 2, _NUMBER, transcendental=True),
    **_rows("atan2", 2, _INEXACT, transcendental=True),
    **_rows("and or xor", 2, _BITS),
    **_rows("shift_left shift_right_arithmetic shift_right_logical", 2, _INTEGER),
    "square": _square,
    "compare": partial(_checked, _ANY, True),
    "select": partial(_checked, _ANY, True),
    "clamp": partial(_checked, _ORDERED, True),
    "convert": partial(_checked, _ORDERED, False),
    "is_finite": partial(_checked, _ORDERED, False),
    "reduce": _reduce,
}
"""Operation name -> recipe."""


# --- matrix products, whose dimension numbers follow from shapes and the extents B, M, N and K


_MOST_EXPANSION = 4.0
"""Products that would need more memory than this multiple of what the node moves are not written out."""

_ARITHMETIC = {DTypeKind.FLOAT, DTypeKind.SIGNED, DTypeKind.UNSIGNED, DTypeKind.COMPLEX}
_MOST_EXCESS = 1.001


def single_matmul(node: Node) -> list[Value] | None:
    """A product of the first two operands with one result, with nothing around it."""
    result = node.result
    if result is None or len(node.contractions) != 1 or len(node.operands) != 2:
        return None
    left, right = node.operands
    row = node.contractions[0]
    if min(row[:4]) < 1 or not _multipliable(left, right, result):
        return None
    plan = dot_axes(left.shape, right.shape, result.shape, row[:4])
    if plan is not None:
        bound = node.bound()
        return [_dot(node.emitter, bound[0], bound[1], result, plan)]
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
    return _dot(node.emitter, one, two, result, DotAxes(((0,), (0,)), ((2,), (1,))))


def fused_matmuls(node: Node) -> list[Value] | None:
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
        done = _matmul_of(node, bound, row, used)
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


def _matmul_of(node: Node, bound: Sequence[Value], row: Contraction, used: list[Value]) -> Value:
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


# --- work that the operations of a recipe leave undone, so that XLA counts what the graph says.
#
# A few FLOPs an element become passes over the result; more become a matrix product beside it, of which the
# result takes one element and which takes one of the result: it is on the same path and cannot be left out.

MOST_PASSES = 8
"""Operations an element that are made by passes over it."""

_SMALLEST_MATMUL_FLOPS = 4096
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
    if op == _LOGISTIC or count < _SMALLEST_MATMUL_FLOPS:
        done = _row(node, start, op, count)
    else:
        done = _matmul(node, start, count)
    tied = emitter.put(made[place], emitter.largest(done))
    return [*made[:place], tied, *made[place + 1 :]]


def _row(node: Node, start: Value, op: str, count: int) -> Value:
    """A row of numbers, worked on as often as it takes; its maximum counts as work, too."""
    length = min(_LONGEST_ROW, max(1, -(-count // 2) if op == _MULTIPLY else count))
    row = node.binder.tie(node.binder.filler(Tensor(F32, (length,))), [start])
    left = count - (length - 1 if op == _MULTIPLY else 0)
    return _worked(node, row, op, left) if left > 0 else row


def _extents(flops: float, elements: float) -> tuple[int, int]:
    """Sides ``(s, k)`` of a product ``s x k by k x s`` of about these FLOPs and elements in all."""
    volume = max(flops / 2, 1.0)
    cube = volume ** (1 / 3)
    side = min(cube, 2 * volume / elements) if elements > 0 else min(cube, _LARGEST_SIDE)
    side_extent = max(1, round(side))
    return side_extent, max(1, int((flops - side_extent**2) // (2 * side_extent**2)))


def _matmul(node: Node, start: Value, count: int) -> Value:
    emitter = node.emitter
    typed = sum(tensor.size_bytes for tensor in (*node.operands, *node.results))
    spare = node.bytes_moved - typed if not isnan(node.bytes_moved) else 0.0
    side, depth = _extents(count, max(0.0, spare) / F32.storage_bytes(1))
    left = node.binder.tie(node.binder.filler(Tensor(F32, (side, depth))), [start])
    right = node.binder.filler(Tensor(F32, (depth, side)))
    result = Tensor(F32, (side, side))
    made = _dot(emitter, left, right, result, DotAxes(((), ()), ((1,), (0,))))
    rest = count - 2 * side * side * depth - (side * side - 1)
    return _worked(node, made, _MULTIPLY, rest) if rest > 0 else made


def _dot(emitter: Emitter, left: Value, right: Value, result: Tensor, axes: DotAxes) -> Value:
    """One ``dot_general``."""
    depth = prod(left.type.shape[axis] for axis in axes.contracting[0])
    emitter.work(flops=2.0 * result.elements * depth)
    return emitter.add(dot_text(left, right, result, axes), result)


# --- convolutions

_MOST_CONVOLUTION_DIMENSIONS = 5


def convolution(node: Node) -> list[Value] | None:
    """A convolution of the first two operands with one result."""
    result = node.result
    if node.op != "convolution" or result is None or len(node.operands) != 2:
        return None
    left, right = node.operands
    if not _convolvable(left, right, result) or isnan(node.useful_flops):
        return None
    plan = find_convolution(left.shape, right.shape, result.shape, node.flops, node.useful_flops)
    if plan is None:
        return None
    bound = node.bound()
    node.emitter.work(flops=plan.flops)
    return [node.emitter.add(convolution_text(bound[0], bound[1], result, plan), result)]


def _convolvable(left: Tensor, right: Tensor, result: Tensor) -> bool:
    ranks = {len(left.shape), len(right.shape), len(result.shape)}
    alike = left.element is right.element and left.is_float == result.is_float
    numeric = (left.is_float and result.is_float) or (left.is_integer and result.is_integer)
    return alike and numeric and len(ranks) == 1 and 2 <= len(left.shape) <= _MOST_CONVOLUTION_DIMENSIONS
