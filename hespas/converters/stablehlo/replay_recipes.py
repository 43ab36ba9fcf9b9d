"""Recipes of a replay: the operations written for each operation of a graph, and extra work up to the costs
in the graph.

Attributes are derived from types (:mod:`hespas.programs`). An operation whose types do not determine its
attributes becomes a copy, without arithmetic. If a few FLOPs per element are missing, elementwise operations
on the result are added. If more are missing, a separate matmul is added. It reads one element of the result
and then changes one, so that it is on the same path and no compiler can remove it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import isnan, prod

from hespas.converters.stablehlo import UNKNOWN_WORK
from hespas.converters.stablehlo.replay_emit import (
    F32,
    MatmulShape,
    Recipe,
    ReplayEmitter,
    ReplayNode,
    quoted_text,
    supported_dtype,
)
from hespas.graph import DType, DTypeKind
from hespas.programs.contractions import DotAxes, convolution_text, dot_axes, dot_text, find_convolution
from hespas.programs.operations import broadcast_axes, longest_axis, operator
from hespas.programs.text import Tensor, Value

__all__ = [
    "MOST_PASSES",
    "RECIPES",
    "WRITTEN_AS",
    "complete",
    "convolution",
    "fused_matmuls",
    "made_from",
    "passed_on",
    "single_matmul",
    "synthesised",
    "unknown_work",
]


def _moved(node: ReplayNode) -> list[Value] | None:
    """Emit an operation that moves data, such as a transpose. Its attributes are inferred from the node's
    types. Return None if they cannot be inferred, or if the operation would only be a view.
    """
    write = operator(node.op, node.operands, node.results)
    if write is None or (node.op == "slice" and node.operands == node.results):
        return None
    return [node.emitter.add(write(node.bound()), node.results[0])]


def _broadcast(node: ReplayNode) -> list[Value] | None:
    result = node.result
    if result is None or len(node.operands) != 1 or node.operands[0].element is not result.element:
        return None
    if broadcast_axes(node.operands[0].shape, result.shape) is None:
        return None
    return [node.emitter.stretched(node.bound()[0], result.shape, shared=False)]


def _reverse(node: ReplayNode) -> list[Value] | None:
    if node.result is None or node.operands != (node.result,):
        return None
    return [_turned(node.emitter, node.bound()[0])]


def _turned(emitter: ReplayEmitter, value: Value) -> Value:
    """Return a copy of a value with its longest dimension reversed, which no compiler can remove.

    The first copy of an operation of unknown FLOPs is marked, so that a reader recognizes it.
    """
    if emitter.unknown_work is not None and value.type.elements:
        axes = f"[{longest_axis(value.type)}]" if value.type.rank else "[]"
        mark = f"{{{UNKNOWN_WORK} = {quoted_text(emitter.unknown_work)}}}"
        emitter.mark(None)
        return emitter.add(f"stablehlo.reverse {value}, dims = {axes} {mark} : {value.type}", value.type)
    write = operator("reverse", (value.type,), (value.type,)) if value.type.elements > 1 else None
    return value if write is None else emitter.add(write([value]), value.type)


def passed_on(node: ReplayNode) -> list[Value]:
    """Emit an operation that does no work: a view, constant or join. The results of a constant are arguments
    of the program, and all other results are views of operands.
    """
    node = node._replace(op="")
    if not node.results:
        return node.bound(node.operands or _smallest_types(node))
    return _results_from(node, copies=False)


def unknown_work(node: ReplayNode, name: str) -> list[Value]:
    """Emit an operation of unknown FLOPs: its known matmuls, and a copy marked with ``name``."""
    node.emitter.mark(name)
    made = fused_matmuls(node) or synthesised(node)
    position = next((position for position, value in enumerate(made) if value.type.elements), None)
    if node.emitter.unknown_work is not None and position is not None:
        made[position] = _turned(node.emitter, made[position])
    node.emitter.mark(None)
    return made


def synthesised(node: ReplayNode) -> list[Value]:
    """Emit an operation without a recipe: it reads its operands and copies them to results of the right
    types.
    """
    if not node.results:
        bound = node.bound(node.operands or _smallest_types(node))
        return [_turned(node.emitter, bound[0]), *bound[1:]]
    return _results_from(node, copies=True)


def _smallest_types(node: ReplayNode) -> list[Tensor]:
    """Return a type for the operand of a node without types: the type of its first producer."""
    return [producer[0].type for producer in node.producers if producer][:1]


def _results_from(node: ReplayNode, *, copies: bool) -> list[Value]:
    bound = node.bound(node.operands or node.results, stretch=True)
    return made_from(node, bound, node.results, copies=copies)


def made_from(
    node: ReplayNode,
    bound: Sequence[Value],
    results: Sequence[Tensor],
    *,
    copies: bool,
    used: Iterable[Value] = (),
) -> list[Value]:
    """Return values with the types ``results``, made from the operands ``bound``. They are copies if
    ``copies``, else views.

    The first value is made to depend on all operands that no result contains and that are not in ``used``
    (the operands that the caller uses otherwise). All other copies depend on the first value.
    """
    made: list[Value] = []
    names = {value.name for value in used}
    sources = _SourceValues(bound)
    for position, result in enumerate(results):
        source = sources.nearest(result, position)
        if source is None:
            source = node.binder.filler(result)
        elif source.type.elements <= result.elements:
            names.add(source.name)
        view = source
        num_elements = view.type.elements
        if num_elements > result.elements:
            view = node.emitter.front(node.emitter.reshape(view, (num_elements,)), (result.elements,))
        if num_elements < result.elements:
            value = node.emitter.stretched(view, result.shape)
        else:
            value = node.emitter.reshape(view, result.shape)
        made.append(_turned(node.emitter, value) if copies else value)
    able = [position for position, value in enumerate(made) if value.type.elements]
    if not able:
        return made
    left = node.binder.release([value for value in bound if value.name not in names])
    made[able[0]] = node.binder.tie(made[able[0]], left)
    if copies and len(able) > 1:  # all results become available together
        done = [node.emitter.first(made[able[0]])]
        for position in able[1:]:
            made[position] = node.binder.tie(made[position], done)
    return made


class _SourceValues:
    """Operands from which the results of a replayed operation can be made, by element type and size."""

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

    def nearest(self, result: Tensor, position: int) -> Value | None:
        """Return the operand from which to make the result at ``position``. Operands of equal element type
        and size are used in turn. Without such an operand, it is the largest one that can be cut or repeated
        to the size of the result.
        """
        if not result.elements:
            return None
        equal = self._equal.get((result.element.code, result.elements))
        if equal:
            return equal[position % len(equal)]
        able = self._ordered.get(result.element.code, ())
        return next(
            (
                value
                for value in able
                if (value.type.elements > result.elements or result.elements % value.type.elements == 0)
            ),
            None,
        )


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

_Kinds = frozenset[DTypeKind]
_FLOAT = frozenset({DTypeKind.FLOAT})
_INTEGER = frozenset({DTypeKind.SIGNED, DTypeKind.UNSIGNED})
_BITS = _INTEGER | {DTypeKind.BOOL}
_INEXACT = _FLOAT | {DTypeKind.COMPLEX}
_REAL = _FLOAT | _INTEGER
_ORDERED = _REAL | {DTypeKind.BOOL}
_NUMBER = _REAL | {DTypeKind.COMPLEX}
_ANY = _NUMBER | {DTypeKind.BOOL}


def _counted(node: ReplayNode, *, transcendental: bool = False, stretch: bool = True) -> list[Value] | None:
    """Emit an operation for which XLA counts one FLOP (or transcendental) per element of the result."""
    write = operator(node.op, node.operands, node.results)
    if write is None:
        return None
    bound = node.bound(stretch=stretch)
    count = float(node.results[0].elements)
    node.emitter.work(**{"transcendentals" if transcendental else "flops": count})
    return [node.emitter.add(write(bound), node.results[0])]


def _elementwise(arity: int, kinds: _Kinds, transcendental: bool, node: ReplayNode) -> list[Value] | None:
    """Emit an elementwise operation, whose operands have the type of the result; return None for other
    types.
    """
    result = node.result
    if result is None or node.operands != (result,) * arity or result.element.kind not in kinds:
        return None
    return _counted(node, transcendental=transcendental)


def _square(node: ReplayNode) -> list[Value] | None:
    """Emit ``chlo.square``, which XLA converts to a multiplication."""
    if node.result is None or node.operands != (node.result,) or node.result.element.kind not in _NUMBER:
        return None
    value = node.bound()[0]
    node.emitter.work(flops=float(node.result.elements))
    return [node.emitter.binary("multiply", value, value)]


def _checked(kinds: _Kinds, stretch: bool, node: ReplayNode) -> list[Value] | None:
    """Emit an operation whose operands may have another type than its result, such as a comparison. Return
    None if an element type is not in ``kinds``.
    """
    able = all(tensor.element.kind in kinds for tensor in (*node.operands, *node.results))
    return _counted(node, stretch=stretch) if able else None


def _rescaled(node: ReplayNode) -> list[Value] | None:
    """Emit a conversion to or from a quantised type as one between the storage types, if these differ."""
    if node.result is None or len(node.operands) != 1 or node.operands[0].element is node.result.element:
        return None
    return _checked(_ORDERED, False, node._replace(op=WRITTEN_AS[node.op]))


def _reduce(node: ReplayNode) -> list[Value] | None:
    """Emit a reduction of each input. A graph does not have the reducer, so sums are used."""
    count = len(node.results)
    if len(node.operands) != 2 * count or any(tensor.element.kind not in _ANY for tensor in node.operands):
        return None
    types = list(zip(node.operands[:count], node.operands[count:], strict=True))
    writers = [operator("reduce", pair, (made,)) for pair, made in zip(types, node.results, strict=True)]
    reducers = [write for write in writers if write is not None]
    if not reducers or len(reducers) < count:
        return None
    bound = node.bound()
    made: list[Value] = []
    for position, (write, result) in enumerate(zip(reducers, node.results, strict=True)):
        value, start = bound[position], bound[count + position]
        node.emitter.work(flops=max(0, value.type.elements - result.elements))
        made.append(node.emitter.add(write([value, start]), result))
    return made


def _rows(names: str, arity: int, kinds: _Kinds, *, transcendental: bool = False) -> dict[str, Recipe]:
    return dict.fromkeys(names.split(), partial(_elementwise, arity, kinds, transcendental))


WRITTEN_AS = {"uniform_quantize": "convert", "uniform_dequantize": "convert"}
"""Operation name -> operation that a recipe emits instead."""

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
    **dict.fromkeys(WRITTEN_AS, _rescaled),
}
"""Operation name -> recipe."""

_MOST_EXPANSION = 4.0
"""Largest ratio between the memory of emitted products and the bytes that the node moves."""

_ARITHMETIC = {DTypeKind.FLOAT, DTypeKind.SIGNED, DTypeKind.UNSIGNED, DTypeKind.COMPLEX}
_MOST_EXCESS = 1.001


def single_matmul(node: ReplayNode) -> list[Value] | None:
    """Emit a matmul of the first two operands that has one result."""
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
    expected = (row.batch * row.m * row.k, row.batch * row.k * row.n, row.batch * row.m * row.n)
    if (left.elements, right.elements, result.elements) != expected:
        return None
    bound = node.bound()
    return [node.emitter.reshape(_canonical(node, bound[0], bound[1], result.element, row), result.shape)]


def _multipliable(left: Tensor, right: Tensor, result: Tensor) -> bool:
    """Return True if StableHLO multiplies these types."""
    if left.is_complex or right.is_complex:
        return left.element is right.element is result.element
    if left.is_float and right.is_float:
        return result.is_float and (
            left.element is right.element or left.element.bits <= 8 >= right.element.bits
        )
    return left.is_integer and left.element is right.element and result.is_integer


def _canonical(node: ReplayNode, left: Value, right: Value, element: DType, row: MatmulShape) -> Value:
    """Emit a matmul in its simplest shape, ``B x M x K`` by ``B x K x N``."""
    one = node.emitter.reshape(left, (row.batch, row.m, row.k))
    two = node.emitter.reshape(right, (row.batch, row.k, row.n))
    result = Tensor(element, (row.batch, row.m, row.n))
    return _dot(node.emitter, one, two, result, DotAxes(((0,), (0,)), ((2,), (1,))))


def fused_matmuls(node: ReplayNode) -> list[Value] | None:
    """Emit the matmuls of a fused operation. Operands of the right size are used for them."""
    rows = [row for row in node.contractions if min(row[:4]) > 0]
    if not rows or not _affordable(node, rows):
        return None
    bound = node.bound(node.operands or node.results, stretch=True)
    open_positions = list(range(len(node.results)))
    made: dict[int, Value] = {}
    loose: list[Value] = []
    used: list[Value] = []
    for row in rows:
        left = _operand(node, bound, row.batch * row.m * row.k, row.lhs)
        right = _operand(node, bound, row.batch * row.k * row.n, row.rhs)
        used += [left, right]
        if left.type.element is not right.type.element:
            right = node.emitter.converted(right, left.type.element)
        product = _canonical(node, left, right, left.type.element, row)
        made_type = product.type
        position = next(
            (
                position
                for position in open_positions
                if (result := node.results[position]).elements == made_type.elements
                and (result.is_float, result.is_integer) == (made_type.is_float, made_type.is_integer)
                and not result.is_complex
            ),
            None,
        )
        if position is None:
            loose.append(node.emitter.largest(product))
            continue
        open_positions.remove(position)
        result = node.results[position]
        made[position] = node.emitter.reshape(node.emitter.converted(product, result.element), result.shape)
    others = made_from(
        node, bound, [node.results[position] for position in open_positions], copies=True, used=used
    )
    made.update(zip(open_positions, others, strict=True))
    values = [made[position] for position in sorted(made)] or [bound[0]]
    if not others:
        loose += node.binder.release([value for value in bound if value not in used])
    return [node.binder.tie(values[0], loose), *values[1:]]


def _affordable(node: ReplayNode, rows: Sequence[MatmulShape]) -> bool:
    """Return True if a node may be replayed as the matmuls ``rows``. They must not have noticeably more FLOPs
    than the node. Their operands must need at most :data:`_MOST_EXPANSION` times the bytes that the node
    moves.

    A convolution as a matmul of its unfolded input can need more memory than that.
    """
    if sum(row.flops for row in rows) > node.target_flops * _MOST_EXCESS:
        return False
    typed = float(sum(tensor.size_bytes for tensor in (*node.operands, *node.results)))
    moved = max(typed, 0.0 if isnan(node.bytes_moved) else node.bytes_moved)
    needed = max(
        row.batch * (row.m * row.k * _bytes_of(row.lhs) + row.k * row.n * _bytes_of(row.rhs)) for row in rows
    )
    return moved == 0 or needed <= _MOST_EXPANSION * moved


def _bytes_of(code: int) -> int:
    return supported_dtype(code).storage_bytes(1)


def _operand(node: ReplayNode, bound: Sequence[Value], count: int, code: int) -> Value:
    """Return an operand with ``count`` elements. If there is none, return an argument of the program that is
    made to depend on the first operand.
    """
    fitting = [value for value in bound if value.type.elements == count and not value.type.is_bool]
    same_type = [value for value in fitting if value.type.element.code == code]
    if same_type or fitting:
        return (same_type or fitting)[0]
    element = supported_dtype(code)
    filler = node.binder.filler(
        Tensor(element if element.bits >= 8 and element.kind in _ARITHMETIC else F32, (count,))
    )
    ties = [node.emitter.first(value) for value in bound[:1] if value.type.elements]
    return node.binder.tie(filler, ties)


MOST_PASSES = 8
"""Largest number of operations per element that are emitted as passes."""

_SMALLEST_MATMUL_FLOPS = 4096
_LARGEST_SIDE = 128
_LONGEST_ROW = 1 << 16
_NEGLIGIBLE = 0.002
_MULTIPLY, _LOGISTIC = "multiply", "logistic"


def complete(node: ReplayNode, made: list[Value], flops: float, transcendentals: float) -> list[Value]:
    """Add work to the results ``made`` of a replayed operation until XLA counts the node's FLOPs and
    transcendentals. ``flops`` and ``transcendentals`` are the numbers that XLA counts so far.
    """
    made = _extended(node, made, _LOGISTIC, node.transcendentals - transcendentals)
    return _extended(node, made, _MULTIPLY, node.target_flops - flops)


def _extended(node: ReplayNode, made: list[Value], op: str, missing: float) -> list[Value]:
    count = 0 if isnan(missing) else round(missing)
    if count <= 0:
        return made
    able = [
        position
        for position, value in enumerate(made)
        if value.type.element.bits >= 8
        and value.type.elements > 0
        and (value.type.is_float or (value.type.is_integer and op == _MULTIPLY))
    ]
    position = max(able, key=lambda position: made[position].type.elements) if able else None
    if position is not None and count <= MOST_PASSES * made[position].type.elements:
        worked = _worked(node, made[position], op, count)
        return [*made[:position], worked, *made[position + 1 :]]
    # The operations run on a separate tensor, elementwise or as a matmul: they depend on the first result,
    # and the result depends on them.
    position = next((position for position, value in enumerate(made) if value.type.elements), None)
    if position is None:
        return made
    emitter = node.emitter
    start = emitter.first(made[position])
    if op == _LOGISTIC or count < _SMALLEST_MATMUL_FLOPS:
        length = min(_LONGEST_ROW, max(1, -(-count // 2) if op == _MULTIPLY else count))
        extra = node.binder.tie(node.binder.filler(Tensor(F32, (length,))), [start])
        rest = count - (length - 1 if op == _MULTIPLY else 0)
    else:
        extra, rest = _extra_matmul(node, start, count)
    if rest > 0:
        extra = _worked(node, extra, op, rest)
    tied = emitter.put(made[position], emitter.largest(extra))
    return [*made[:position], tied, *made[position + 1 :]]


def _worked(node: ReplayNode, value: Value, op: str, count: int) -> Value:
    """Apply ``count`` elementwise operations ``op`` to ``value``: first on all elements several times, then
    on a part of them.
    """
    passes, rest = divmod(count, value.type.elements)
    for _ in range(passes):
        value = _pass(node, value, op)
    if rest <= _NEGLIGIBLE * count:
        return value
    emitter = node.emitter
    flat = emitter.reshape(value, (value.type.elements,))
    part = _pass(node, emitter.front(flat, (rest,)), op)
    return emitter.reshape(emitter.overwrite(flat, part), value.type.shape)


def _pass(node: ReplayNode, value: Value, op: str) -> Value:
    elements = value.type.elements
    if op == _LOGISTIC:
        node.emitter.work(transcendentals=elements)
        return node.emitter.unary(op, value)
    node.emitter.work(flops=elements)
    return node.emitter.binary(op, value, node.binder.filler(value.type))


def _extra_matmul(node: ReplayNode, start: Value, count: int) -> tuple[Value, int]:
    """Emit a matmul ``s x k by k x s`` of about ``count`` FLOPs that depends on ``start``. Return its result,
    and the number of FLOPs still missing.

    The shape is chosen so that the matmul moves the node's bytes that exceed the node's own tensors.
    """
    typed = sum(tensor.size_bytes for tensor in (*node.operands, *node.results))
    spare = node.bytes_moved - typed if not isnan(node.bytes_moved) else 0.0
    elements = max(0.0, spare) / F32.storage_bytes(1)
    volume = max(count / 2, 1.0)
    cube = volume ** (1 / 3)
    side = max(1, round(min(cube, 2 * volume / elements if elements > 0 else _LARGEST_SIDE)))
    depth = max(1, int((count - side**2) // (2 * side**2)))
    left = node.binder.tie(node.binder.filler(Tensor(F32, (side, depth))), [start])
    right = node.binder.filler(Tensor(F32, (depth, side)))
    axes = DotAxes(((), ()), ((1,), (0,)))
    product = _dot(node.emitter, left, right, Tensor(F32, (side, side)), axes)
    return product, count - 2 * side * side * depth - (side * side - 1)


def _dot(emitter: ReplayEmitter, left: Value, right: Value, result: Tensor, axes: DotAxes) -> Value:
    """Emit one ``dot_general``."""
    depth = prod(left.type.shape[axis] for axis in axes.contracting[0])
    emitter.work(flops=2.0 * result.elements * depth)
    return emitter.add(dot_text(left, right, result, axes), result)


_MOST_CONVOLUTION_DIMENSIONS = 5


def convolution(node: ReplayNode) -> list[Value] | None:
    """Emit a convolution of the first two operands with one result."""
    result = node.result
    if node.op != "convolution" or result is None or len(node.operands) != 2:
        return None
    left, right = node.operands
    ranks = {len(left.shape), len(right.shape), len(result.shape)}
    alike = left.element is right.element and left.is_float == result.is_float
    numeric = (left.is_float and result.is_float) or (left.is_integer and result.is_integer)
    if not (
        alike and numeric and len(ranks) == 1 and 2 <= len(left.shape) <= _MOST_CONVOLUTION_DIMENSIONS
    ) or isnan(node.useful_flops):
        return None
    plan = find_convolution(left.shape, right.shape, result.shape, node.flops, node.useful_flops)
    if plan is None:
        return None
    bound = node.bound()
    node.emitter.work(flops=plan.flops)
    return [node.emitter.add(convolution_text(bound[0], bound[1], result, plan), result)]
