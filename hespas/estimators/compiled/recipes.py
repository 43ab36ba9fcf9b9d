"""Operations as StableHLO from the types of their operands and results.

A graph keeps what an operation works on, not every attribute of it: where several fit (a transposition of
equal extents), one is taken. An operation whose attributes the types do not imply gets no program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, count
from types import MappingProxyType
from typing import NamedTuple

from hespas.estimators.compiled.values import Tensor, Value, dense, lines_of, operation
from hespas.graph import DTypeKind

__all__ = ["BINARY", "UNARY", "Asked", "convolution", "write_operation"]

UNARY = frozenset(
    {
        "abs",
        "bitcast_convert",
        "cbrt",
        "ceil",
        "convert",
        "cosine",
        "count_leading_zeros",
        "exponential",
        "exponential_minus_one",
        "floor",
        "imag",
        "is_finite",
        "log",
        "log_plus_one",
        "logistic",
        "negate",
        "not",
        "optimization_barrier",
        "popcnt",
        "real",
        "reshape",
        "round_nearest_afz",
        "round_nearest_even",
        "rsqrt",
        "sign",
        "sine",
        "sqrt",
        "tan",
        "tanh",
    }
)
BINARY = frozenset(
    {
        "add",
        "and",
        "atan2",
        "complex",
        "divide",
        "maximum",
        "minimum",
        "multiply",
        "or",
        "power",
        "remainder",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "subtract",
        "xor",
    }
)
_AS_THEY_ARE = UNARY | BINARY | {"select", "clamp", "dynamic_update_slice"}


class Asked(NamedTuple):
    """An operation to write: its name without dialect, its operands, results and numbers for new values."""

    op: str
    operands: tuple[Value, ...]
    results: tuple[Tensor, ...]
    names: count[int]

    @property
    def result(self) -> Tensor:
        """The first result."""
        return self.results[0]

    def new(self) -> str:
        """The name of a new value."""
        return f"%v{next(self.names)}"


_Lines = list[str]
_Recipe = Callable[[Asked], "tuple[_Lines, str] | None"]
"""Lines before, and the operation itself right of the equals sign; None where types do not say enough."""


def write_operation(asked: Asked) -> tuple[_Lines, tuple[Value, ...]] | None:
    """The lines of an operation and its results; None where there is no program for it."""
    if not asked.results:
        return None
    if asked.op in _AS_THEY_ARE:
        made = _plain(asked)
    else:
        recipe = _RECIPES.get(asked.op)
        made = recipe(asked) if recipe is not None else None
    if made is None:
        return None
    before, text = made
    name = asked.new()
    if len(asked.results) == 1:
        return [*before, f"{name} = {text}"], (Value(name, asked.result),)
    several = tuple(Value(f"{name}#{place}", each) for place, each in enumerate(asked.results))
    return [*before, f"{name}:{len(asked.results)} = {text}"], several


def _plain(asked: Asked) -> tuple[_Lines, str] | None:
    operands = len(asked.operands)
    wanted = 1 if asked.op in UNARY else 2
    if operands < wanted or len(asked.results) != 1:
        return None
    if asked.op == "reshape" and asked.operands[0].type.elements != asked.result.elements:
        return None
    return [], operation(asked.op, asked.operands, asked.results)


def _constant(asked: Asked) -> tuple[_Lines, str]:
    return [], f'"stablehlo.constant"() {{value = {dense(asked.result, 1)}}} : () -> {asked.result}'


def _iota(asked: Asked) -> tuple[_Lines, str] | None:
    if not asked.result.rank:
        return None
    return [], operation("iota", (), asked.results, f"iota_dimension = {asked.result.rank - 1} : i64")


def _compare(asked: Asked) -> tuple[_Lines, str] | None:
    if len(asked.operands) != 2:
        return None
    direction = "comparison_direction = #stablehlo<comparison_direction LT>"
    return [], operation("compare", asked.operands, asked.results, direction)


def _axes(part: Sequence[int], whole: Sequence[int]) -> list[int] | None:
    """Which dimension of ``whole`` each of ``part`` becomes, as late as may be; None for no way."""
    axes: list[int] = []
    place = len(whole) - 1
    for extent in reversed(part):
        while place >= 0 and extent not in {1, whole[place]}:
            place -= 1
        if place < 0:
            return None
        axes.append(place)
        place -= 1
    return axes[::-1]


def _broadcast(asked: Asked) -> tuple[_Lines, str] | None:
    if not asked.operands:
        return None
    axes = _axes(asked.operands[0].type.shape, asked.result.shape)
    if axes is None:
        return None
    return [], operation(
        "broadcast_in_dim", asked.operands[:1], asked.results, f"broadcast_dimensions = {lines_of(axes)}"
    )


def _transpose(asked: Asked) -> tuple[_Lines, str] | None:
    if not asked.operands:
        return None
    shape = asked.operands[0].type.shape
    if sorted(shape) != sorted(asked.result.shape):
        return None
    left = list(range(len(shape)))
    order: list[int] = []
    for extent in asked.result.shape:
        # From the back: a transposition that moves nothing would be none.
        order.append(next(place for place in reversed(left) if shape[place] == extent))
        left.remove(order[-1])
    return [], operation("transpose", asked.operands[:1], asked.results, f"permutation = {lines_of(order)}")


def _slice(asked: Asked) -> tuple[_Lines, str] | None:
    if not asked.operands or asked.operands[0].type.rank != asked.result.rank:
        return None
    whole, part = asked.operands[0].type.shape, asked.result.shape
    if any(small > large for small, large in zip(part, whole, strict=True)):
        return None
    attributes = (
        f"start_indices = {lines_of([0] * len(part))}, limit_indices = {lines_of(part)}, "
        f"strides = {lines_of([1] * len(part))}"
    )
    return [], operation("slice", asked.operands[:1], asked.results, attributes)


def _dynamic_slice(asked: Asked) -> tuple[_Lines, str] | None:
    if len(asked.operands) != 1 + asked.result.rank:
        return None
    return [], operation(
        "dynamic_slice", asked.operands, asked.results, f"slice_sizes = {lines_of(asked.result.shape)}"
    )


def _pad(asked: Asked) -> tuple[_Lines, str] | None:
    if len(asked.operands) != 2 or asked.operands[0].type.rank != asked.result.rank:
        return None
    grown = [
        large - small for small, large in zip(asked.operands[0].type.shape, asked.result.shape, strict=True)
    ]
    zeros = lines_of([0] * len(grown))
    attributes = (
        f"edge_padding_low = {zeros}, edge_padding_high = {lines_of(grown)}, interior_padding = {zeros}"
    )
    return [], operation("pad", asked.operands, asked.results, attributes)


def _concatenate(asked: Asked) -> tuple[_Lines, str] | None:
    shapes = [each.type.shape for each in asked.operands]
    if not shapes or any(len(shape) != asked.result.rank for shape in shapes):
        return None
    for axis, extent in enumerate(asked.result.shape):
        alike = all(
            shape[:axis] + shape[axis + 1 :] == asked.result.shape[:axis] + asked.result.shape[axis + 1 :]
            for shape in shapes
        )
        if alike and sum(shape[axis] for shape in shapes) == extent:
            return [], operation("concatenate", asked.operands, asked.results, f"dimension = {axis} : i64")
    return None


def _reverse(asked: Asked) -> tuple[_Lines, str] | None:
    if not asked.operands or not asked.result.rank:
        return None
    dimension = lines_of([asked.result.rank - 1])
    return [], operation("reverse", asked.operands[:1], asked.results, f"dimensions = {dimension}")


def _reduce(asked: Asked) -> tuple[_Lines, str] | None:
    """Sums; of several operands at once, the largest of the first with what stands beside it."""
    number = len(asked.results)
    sources = asked.operands[:number]
    if len(sources) < number or any(each.type.shape != sources[0].type.shape for each in sources):
        return None
    kept = _kept(sources[0].type.shape, asked.result.shape)
    if kept is None:
        return None
    dropped = [axis for axis in range(sources[0].type.rank) if axis not in kept]
    before: _Lines = []
    starts: list[Value] = []
    for each in sources:
        scalar = each.type.of()
        starts.append(Value(asked.new(), scalar))
        before.append(f"{starts[-1].name} = stablehlo.constant {dense(scalar)}")
    region = _sum(sources[0].type.of()) if number == 1 else _largest([each.type.of() for each in sources])
    text = operation(
        "reduce", (*sources, *starts), asked.results, f"dimensions = {lines_of(dropped)}", region
    )
    return before, text


def _kept(whole: Sequence[int], part: Sequence[int]) -> list[int] | None:
    """Axes of ``whole`` that ``part`` has still, in order, as early as may be."""
    kept: list[int] = []
    place = 0
    for extent in part:
        while place < len(whole) and whole[place] != extent:
            place += 1
        if place == len(whole):
            return None
        kept.append(place)
        place += 1
    return kept


def _sum(scalar: Tensor) -> str:
    op = "or" if scalar.element.kind is DTypeKind.BOOL else "add"
    return (
        f"{{ ^bb0(%x: {scalar}, %y: {scalar}): %s = stablehlo.{op} %x, %y : {scalar} "
        f"stablehlo.return %s : {scalar} }}"
    )


def _largest(scalars: Sequence[Tensor]) -> str:
    arguments = ", ".join(
        [f"%x{place}: {each}" for place, each in enumerate(scalars)]
        + [f"%y{place}: {each}" for place, each in enumerate(scalars)]
    )
    truth = "tensor<i1>"
    lines = [
        f"^bb0({arguments}):",
        f"%p = stablehlo.compare GT, %x0, %y0 : ({scalars[0]}, {scalars[0]}) -> {truth}",
    ]
    lines += [
        f"%s{place} = stablehlo.select %p, %x{place}, %y{place} : {truth}, {each}"
        for place, each in enumerate(scalars)
    ]
    chosen = ", ".join(f"%s{place}" for place in range(len(scalars)))
    return f"{{ {' '.join(lines)} stablehlo.return {chosen} : {', '.join(map(str, scalars))} }}"


def _sort(asked: Asked) -> tuple[_Lines, str] | None:
    if len(asked.operands) != len(asked.results) or not asked.result.rank:
        return None
    scalars = [each.of() for each in asked.results]
    arguments = ", ".join(f"%x{place}: {each}, %y{place}: {each}" for place, each in enumerate(scalars))
    region = (
        f"{{ ^bb0({arguments}): %p = stablehlo.compare LT, %x0, %y0 : ({scalars[0]}, {scalars[0]}) -> "
        f"tensor<i1> stablehlo.return %p : tensor<i1> }}"
    )
    attributes = f"dimension = {asked.result.rank - 1} : i64, is_stable = true"
    return [], operation("sort", asked.operands, asked.results, attributes, region)


def _gather(asked: Asked) -> tuple[_Lines, str] | None:
    """Rows of a table by number."""
    if len(asked.operands) != 2 or asked.operands[0].type.rank != 2 or not asked.result.rank:
        return None
    table, rows = (each.type for each in asked.operands)
    vector = _index_axis(rows, asked.result, table.shape[1])
    if vector is None:
        return None
    numbers = (
        f"offset_dims = [{asked.result.rank - 1}], collapsed_slice_dims = [0], start_index_map = [0], "
        f"index_vector_dim = {vector}"
    )
    attributes = (
        f"dimension_numbers = #stablehlo.gather<{numbers}>, slice_sizes = {lines_of((1, table.shape[1]))}, "
        "indices_are_sorted = false"
    )
    return [], operation("gather", asked.operands, asked.results, attributes)


def _scatter(asked: Asked) -> tuple[_Lines, str] | None:
    """Rows added to those of a table by number."""
    if len(asked.operands) != 3 or asked.result.rank != 2 or asked.operands[0].type != asked.result:
        return None
    rows, updates = (each.type for each in asked.operands[1:])
    vector = _index_axis(rows, updates, asked.result.shape[1])
    if vector is None:
        return None
    numbers = (
        f"update_window_dims = [{updates.rank - 1}], inserted_window_dims = [0], "
        f"scatter_dims_to_operand_dims = [0], index_vector_dim = {vector}"
    )
    attributes = (
        f"scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, indices_are_sorted = false, "
        "unique_indices = false"
    )
    return [], operation("scatter", asked.operands, asked.results, attributes, _sum(asked.result.of()))


def _index_axis(rows: Tensor, places: Tensor, width: int) -> int | None:
    """The axis of ``rows`` that holds index vectors of one number, or the one behind the last."""
    if rows.element.kind not in {DTypeKind.SIGNED, DTypeKind.UNSIGNED} or places.shape[-1:] != (width,):
        return None
    if rows.shape == (*places.shape[:-1], 1):
        return rows.rank - 1
    return rows.rank if rows.shape == places.shape[:-1] else None


def _product(asked: Asked) -> tuple[_Lines, str] | None:
    text = _contraction(asked.operands, asked.results)
    return None if text is None else ([], text)


def _convolution(asked: Asked) -> tuple[_Lines, str] | None:
    text = convolution(asked.operands, asked.results)
    return None if text is None else ([], text)


_RECIPES: Mapping[str, _Recipe] = MappingProxyType(
    {
        "broadcast_in_dim": _broadcast,
        "compare": _compare,
        "concatenate": _concatenate,
        "constant": _constant,
        "convolution": _convolution,
        "dot": _product,
        "dot_general": _product,
        "dynamic_slice": _dynamic_slice,
        "gather": _gather,
        "iota": _iota,
        "pad": _pad,
        "reduce": _reduce,
        "reverse": _reverse,
        "scatter": _scatter,
        "slice": _slice,
        "sort": _sort,
        "transpose": _transpose,
    }
)


# Products and convolutions from the types of their operands and result.

_MOST_AXES = 8


class _Split(NamedTuple):
    """The axes of an operand by what becomes of them."""

    batch: tuple[int, ...]
    free: tuple[int, ...]
    summed: tuple[int, ...]


def _splits(shape: Sequence[int], batch: Sequence[int], free: Sequence[int]) -> Iterator[_Split]:
    """Ways to read ``shape`` as batch axes, free axes and axes that are summed over; usual ones first."""
    axes = range(len(shape))
    for batches in combinations(axes, len(batch)):
        if any(shape[axis] != extent for axis, extent in zip(batches, batch, strict=True)):
            continue
        rest = [axis for axis in axes if axis not in batches]
        for kept in combinations(rest, len(free)):
            if all(shape[axis] == extent for axis, extent in zip(kept, free, strict=True)):
                yield _Split(batches, kept, tuple(axis for axis in rest if axis not in kept))


def _contraction(operands: Sequence[Value], results: Sequence[Tensor]) -> str | None:
    """A ``dot_general`` whose axes the three shapes allow; None where there is none."""
    if len(operands) < 2 or len(results) != 1:
        return None
    (lhs, rhs), result = (each.type for each in operands[:2]), results[0]
    if max(lhs.rank, rhs.rank, result.rank) > _MOST_AXES:
        return None
    summed = lhs.rank + rhs.rank - result.rank  # = 2 contracted + batch
    for contracted in range(1, summed // 2 + 1):
        batch = summed - 2 * contracted
        found = _fit(lhs, rhs, result, batch)
        if found is not None:
            return _text(operands[:2], results, *found)
    return _text(operands[:2], results, *found) if (found := _fit(lhs, rhs, result, summed)) else None


def _fit(lhs: Tensor, rhs: Tensor, result: Tensor, batch: int) -> tuple[_Split, _Split] | None:
    contracted = (lhs.rank + rhs.rank - result.rank - batch) // 2
    free = lhs.rank - batch - contracted
    if free < 0 or batch + free > result.rank:
        return None
    head, left, right = result.shape[:batch], result.shape[batch : batch + free], result.shape[batch + free :]
    for one in _splits(lhs.shape, head, left):
        extents = [lhs.shape[axis] for axis in one.summed]
        for other in _splits(rhs.shape, head, right):
            if [rhs.shape[axis] for axis in other.summed] == extents:
                return one, other
    return None


def _text(operands: Sequence[Value], results: Sequence[Tensor], one: _Split, other: _Split) -> str:
    numbers = (
        f"lhs_batching_dimensions = {list(one.batch)}, rhs_batching_dimensions = {list(other.batch)}, "
        f"lhs_contracting_dimensions = {list(one.summed)}, rhs_contracting_dimensions = {list(other.summed)}"
    )
    return operation("dot_general", operands, results, f"dot_dimension_numbers = #stablehlo.dot<{numbers}>")


class _Layout(NamedTuple):
    """How a two-dimensional convolution writes its axes: as text, and where spatial axes begin."""

    text: str
    lhs: int
    rhs: int
    features: tuple[int, int, int, int]
    """Axes of the features of input, of filter in, of filter out, of output."""


_LAYOUTS = (
    _Layout("[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]", 1, 0, (3, 2, 3, 3)),
    _Layout("[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]", 2, 2, (1, 1, 0, 1)),
    _Layout("[b, 0, 1, f]x[o, 0, 1, i]->[b, 0, 1, f]", 1, 1, (3, 3, 0, 3)),
)


def convolution(operands: Sequence[Value], results: Sequence[Tensor]) -> str | None:
    """A two-dimensional convolution whose strides and padding the shapes imply; None where none fits."""
    if len(operands) < 2 or len(results) != 1:
        return None
    (lhs, rhs), result = (each.type for each in operands[:2]), results[0]
    if {lhs.rank, rhs.rank, result.rank} != {4} or 0 in lhs.shape + rhs.shape + result.shape:
        return None
    for layout in _LAYOUTS:
        input_axis, in_axis, out_axis, output_axis = layout.features
        groups, odd = divmod(lhs.shape[input_axis], rhs.shape[in_axis])
        features = rhs.shape[out_axis]
        if odd or not groups or features != result.shape[output_axis] or features % groups:
            continue
        if lhs.shape[0] != result.shape[0]:
            continue
        window = _window(
            lhs.shape[layout.lhs : layout.lhs + 2],
            rhs.shape[layout.rhs : layout.rhs + 2],
            result.shape[layout.lhs : layout.lhs + 2],
        )
        if window is None:
            continue
        attributes = (
            f"dimension_numbers = #stablehlo.conv<{layout.text}>, feature_group_count = {groups} : i64, "
            f"batch_group_count = 1 : i64, {window}"
        )
        return operation("convolution", operands[:2], results, attributes)
    return None


def _window(size: Sequence[int], kernel: Sequence[int], out: Sequence[int]) -> str | None:
    strides: list[int] = []
    padding: list[list[int]] = []
    for extent, reach, places in zip(size, kernel, out, strict=True):
        stride = max(round(extent / places), 1)
        total = (places - 1) * stride + reach - extent
        if total < 0:  # windows leave a rest: it is not read
            total = 0
            if (extent - reach) // stride + 1 != places:
                return None
        strides.append(stride)
        padding.append([total // 2, total - total // 2])
    return (
        f"window_strides = array<i64: {strides[0]}, {strides[1]}>, "
        f"padding = dense<{padding}> : tensor<2x2xi64>"
    )
