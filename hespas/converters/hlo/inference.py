"""Shape inference of operations on arrays, as in XLA: result shapes, and checks of the operands.

The rules come from ``xla/service/shape_inference.cc`` and ``hlo_verifier.cc`` of openxla/xla. Extents are
compared exactly. Element types are compared only by kind (floating-point, integer, ...), because optimised
modules mix precisions. Layouts are ignored. A dynamic extent matches any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hespas.converters.hlo.attributes import dim_labels, integer, ints, window
from hespas.converters.hlo.module import ArrayShape, Shape, shown_shape
from hespas.costs.operation import WindowDim
from hespas.graph import DYNAMIC, find_dtype
from hespas.graph.columns import DTypeKind

__all__ = [
    "ARRAY_RULES",
    "COMPLEX_PARTS",
    "ELEMENTWISE",
    "Callee",
    "Rule",
    "TypedInstruction",
    "agree",
    "array_of",
    "bits_of",
    "check",
    "check_reducer",
    "listed",
    "one_or_tuple",
    "same_extents",
    "tuple_of",
    "with_dims",
]

_MIXED = frozenset({DTypeKind.FLOAT, DTypeKind.COMPLEX})
"""Kinds of types whose precisions are mixed in optimised modules."""
COMPLEX_PARTS = {"c64": "f32", "c128": "f64"}


@dataclass(frozen=True, slots=True)
class Callee:
    """Parameter shapes and result shape of a computation. Entries of missing parameters are None.

    ``matches`` has (parameter number, operand shape) pairs that were found to match, so that a large tuple
    that is passed often is compared once. The number -1 means the result.
    """

    parameters: tuple[Shape | None, ...]
    result: Shape
    matches: set[tuple[int, Shape]] = field(default_factory=set[tuple[int, Shape]])


class _CalleeFinder(Protocol):
    def __call__(self, key: str, index: int = 0) -> Callee:
        """Return computation number ``index`` of the attribute ``key``. Raises ``ValueError`` if it does not
        exist.
        """
        ...


@dataclass(frozen=True, slots=True)
class TypedInstruction:
    """Instruction as the input of a shape inference rule. ``result`` is the result shape in the program, None
    if it is omitted. ``group_size`` is the number of devices in each group of a collective (1: not stated).
    """

    operands: tuple[Shape, ...]
    attributes: Mapping[str, str]
    callee: _CalleeFinder
    result: Shape | None = None
    group_size: int = 1

    def array(self, index: int) -> ArrayShape:
        """Return the shape of operand number ``index``. Raises ``ValueError`` if it is not an array."""
        if index >= len(self.operands):
            raise ValueError(f"expected more than {len(self.operands)} operands")
        return array_of(self.operands[index], f"operand {index}")

    def stated(self) -> Shape:
        """Return the result shape that the program states, for operations whose operands do not determine it.
        Raises ``ValueError`` if the program omits it.
        """
        if self.result is None:
            raise ValueError("expected a result shape: it does not follow from the operands")
        return self.result

    def ints(self, key: str) -> tuple[int, ...]:
        """Return an attribute that is a list of integers; empty if absent."""
        return ints(self.attributes.get(key))

    def number(self, key: str, default: int) -> int:
        """Return an integer attribute."""
        return integer(self.attributes[key]) if key in self.attributes else default

    def dimension(self, key: str, rank: int, default: int | None = None) -> int:
        """Return a dimension from an attribute that holds a number or a list of one number. It must be below
        ``rank``.
        """
        text = self.attributes.get(key)
        if text is None and default is not None:
            return default
        given = ints(text) if text is not None and text.startswith("{") else (self.number(key, -1),)
        if len(given) != 1 or not 0 <= given[0] < rank:
            raise ValueError(f"expected {key} to be one of {rank} dimensions, found {text}")
        return given[0]


Rule = Callable[[TypedInstruction], Shape]


def array_of(shape: Shape, what: str) -> ArrayShape:
    """Return a shape as an array shape. Raises ``ValueError`` for a tuple, with ``what`` as its
    description.
    """
    if shape.array is None:
        raise ValueError(f"expected {what} to be an array, found {shown_shape(shape)}")
    return shape.array


def tuple_of(parts: Sequence[Shape]) -> Shape:
    """Return the tuple shape whose elements are ``parts``."""
    return Shape(None, tuple(parts))


def with_dims(like: ArrayShape, dims: Sequence[int], element: str = "") -> Shape:
    """Return an array shape like ``like`` with other extents, and with another element type if ``element`` is
    given.
    """
    if element:
        return Shape(ArrayShape(find_dtype(element), element, tuple(dims), like.bounded))
    return Shape(ArrayShape(like.dtype, like.element, tuple(dims), like.bounded))


def one_or_tuple(parts: Sequence[Shape]) -> Shape:
    """Return a tuple shape, or the only shape itself if there is one."""
    return parts[0] if len(parts) == 1 else tuple_of(parts)


def agree(left: Sequence[int], right: Sequence[int]) -> bool:
    """Return True if two lists of extents match: each pair is equal or has a dynamic extent."""
    if left == right:
        return True
    return len(left) == len(right) and all(
        a == b or DYNAMIC in (a, b) for a, b in zip(left, right, strict=True)
    )


def same_extents(left: Shape, right: Shape, *, kinds: bool = True) -> bool:
    """Return True if two shapes have the same tuple structure and the same extents. With ``kinds`` their
    element types must also be equal, unknown, or of the same kind. No recursion.
    """
    pending = [(left, right)]
    seen: set[tuple[int, int]] = set()
    while pending:
        a, b = pending.pop()
        if a is b:
            continue
        if a.array is not None and b.array is not None:
            one, other = a.array, b.array
            if not agree(one.dims, other.dims):
                return False
            if kinds and one.element != other.element and one.dtype is not None and other.dtype is not None:
                kind = one.dtype.kind
                if kind is not other.dtype.kind or kind not in _MIXED:
                    return False
        elif a.elements is None or b.elements is None or len(a.elements) != len(b.elements):
            return False
        elif (id(a), id(b)) not in seen:  # elements are shared: compare each pair once
            seen.add((id(a), id(b)))
            pending.extend(zip(a.elements, b.elements, strict=True))
    return True


def check(fits: bool, expected: str, *found: Shape | ArrayShape) -> None:
    """Raise ``ValueError`` unless ``fits`` is True. The message has the expectation and the shapes
    ``found``.
    """
    if not fits:
        shapes = [part if isinstance(part, Shape) else Shape(part) for part in found]
        raise ValueError(f"expected {expected}, found {' and '.join(map(shown_shape, shapes))}")


def _elementwise(op: TypedInstruction) -> Shape:
    first = op.operands[0]
    for other in op.operands[1:]:
        check(same_extents(first, other), "operands of the same shape", first, other)
    return first


def _complex(op: TypedInstruction) -> Shape:
    first = array_of(_elementwise(op), "operand 0")
    return with_dims(first, first.dims, "c128" if first.element == "f64" else "c64")


def _real(op: TypedInstruction) -> Shape:
    first = op.array(0)
    return with_dims(first, first.dims, COMPLEX_PARTS.get(first.element, ""))


def _converted(op: TypedInstruction) -> Shape:
    """Infer the result shape of a conversion: the operand's extents with the element type that the program
    states.
    """
    return with_dims(op.array(0), op.array(0).dims, array_of(op.stated(), "the result").element)


def bits_of(array: ArrayShape) -> int:
    """Return the size of an array element in memory [bits], 0 if unknown."""
    if array.dtype is None:
        return 0
    return 8 if array.dtype.kind is DTypeKind.BOOL else array.dtype.bits


def _bitcast_convert(op: TypedInstruction) -> Shape:
    given, wanted = op.array(0), array_of(op.stated(), "the result")
    before, after = bits_of(given), bits_of(wanted)
    if not before or not after:
        return op.stated()
    if max(before, after) % min(before, after):
        found = f"{given.element} ({before} bits) and {wanted.element} ({after} bits)"
        raise ValueError(f"expected one width to be a multiple of the other, found {found}")
    dims = given.dims
    if before > after:
        dims = (*dims, before // after)
    elif before < after:
        ratio = after // before
        check(bool(dims) and dims[-1] in (ratio, DYNAMIC), f"{ratio} as the last extent", given)
        dims = dims[:-1]
    return with_dims(given, dims, wanted.element)


def _select(op: TypedInstruction) -> Shape:
    chooser, left, right = op.array(0), op.array(1), op.array(2)
    fits = same_extents(op.operands[1], op.operands[2])
    check(fits, "two values of the same shape to select from", left, right)
    fits = not chooser.dims or agree(chooser.dims, left.dims)
    check(fits, "a predicate that is scalar or has the extents of the values", chooser, left)
    return op.operands[1]


def _clamp(op: TypedInstruction) -> Shape:
    low, value, high = op.array(0), op.array(1), op.array(2)
    for bound in (low, high):
        fits = not bound.dims or agree(bound.dims, value.dims)
        check(fits, "bounds that are scalars or have the extents of the value", bound, value)
    return op.operands[1]


def listed(op: TypedInstruction, key: str, rank: int) -> tuple[int, ...]:
    """Return the attribute ``key``, a list of dimensions of an operand with ``rank`` dimensions. Raises
    ``ValueError`` if a dimension occurs twice or does not exist.
    """
    dimensions = op.ints(key)
    if len(set(dimensions)) != len(dimensions) or any(not 0 <= dim < rank for dim in dimensions):
        raise ValueError(f"expected {key} to name some of {rank} dimensions, found {dimensions}")
    return dimensions


@dataclass(frozen=True, slots=True)
class _Contracted:
    batch: tuple[int, ...]
    left_contracting: tuple[int, ...]
    left_free: tuple[int, ...]
    right_free: tuple[int, ...]


def _contracted(op: TypedInstruction) -> _Contracted:
    """Return the batch, contracting and other dimensions of a matmul. Raises ``ValueError`` if paired
    dimensions differ in extent.
    """
    left, right = op.array(0), op.array(1)
    sides: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for name, array in (("lhs", left), ("rhs", right)):
        batch = listed(op, f"{name}_batch_dims", len(array.dims))
        contracting = listed(op, f"{name}_contracting_dims", len(array.dims))
        if set(batch) & set(contracting):
            raise ValueError(
                f"expected {name} batch and contracting dimensions without a common one, found {batch} and "
                f"{contracting}"
            )
        sides.append((batch, contracting))
    for index, name in enumerate(("batch", "contracting")):
        ours, theirs = sides[0][index], sides[1][index]
        if len(ours) != len(theirs):
            raise ValueError(f"expected as many {name} dimensions on both sides, found {ours} and {theirs}")
        for one, other in zip(ours, theirs, strict=True):
            expected = f"equal extents in {name} dimensions {one} and {other}"
            check(agree((left.dims[one],), (right.dims[other],)), expected, left, right)
    (batch, contracting), (right_batch, right_contracting) = sides
    taken, right_taken = {*batch, *contracting}, {*right_batch, *right_contracting}
    return _Contracted(
        batch,
        contracting,
        tuple([index for index in range(len(left.dims)) if index not in taken]),
        tuple([index for index in range(len(right.dims)) if index not in right_taken]),
    )


def _product_element(op: TypedInstruction) -> str:
    if op.result is not None and op.result.array is not None:
        return op.result.array.element
    left, right = op.array(0), op.array(1)
    return left.element if bits_of(left) >= bits_of(right) else right.element


def _dot(op: TypedInstruction) -> Shape:
    if "sparsity" in op.attributes:  # the compressed operand is shorter than the full one
        return op.stated()
    product = _contracted(op)
    left, right = op.array(0), op.array(1)
    dims = [left.dims[dim] for dim in (*product.batch, *product.left_free)]
    return with_dims(left, dims + [right.dims[dim] for dim in product.right_free], _product_element(op))


def _scaled_dot(op: TypedInstruction) -> Shape:
    for operand in (0, 1):
        values, scales = op.array(operand), op.array(operand + 2)
        if all(extent == 1 for extent in scales.dims):  # no scale, or one for everything
            continue
        fits = len(values.dims) == len(scales.dims) and all(
            DYNAMIC in (extent, blocks) or (blocks and extent % blocks == 0)
            for extent, blocks in zip(values.dims, scales.dims, strict=True)
        )
        check(fits, "scales for equal blocks of their operand", values, scales)
    return _dot(op)


def _ragged_dot(op: TypedInstruction) -> Shape:
    product = _contracted(op)
    left, right, sizes = op.array(0), op.array(1), op.array(2)
    ragged = op.dimension("lhs_ragged_dims", len(left.dims))
    free = product.right_free
    check(bool(sizes.dims), "a list of group sizes", sizes)
    groups = sizes.dims[-1]
    if ragged in product.batch or ragged in product.left_contracting:
        dims = [groups] if ragged in product.left_contracting else []
    else:
        dim = op.dimension("rhs_group_dims", len(right.dims))
        fits = dim in free and agree((right.dims[dim],), (groups,))
        check(fits, f"as many groups as extent {dim} of the right operand", sizes, right)
        free = tuple([free_dim for free_dim in free if free_dim != dim])
        dims = []
    before = product.batch if ragged in product.batch else (*product.batch, *product.left_contracting)
    if ragged not in product.batch and ragged not in product.left_contracting:
        before = (*product.batch, *product.left_free)
    if len(sizes.dims) > 1:
        before = tuple([left.dims[dim] for dim in before[: before.index(ragged)]])
        check(agree(sizes.dims[:-1], before), f"group sizes for each of {before}", sizes, left)
    dims += [left.dims[dim] for dim in (*product.batch, *product.left_free)]
    return with_dims(left, dims + [right.dims[dim] for dim in free], _product_element(op))


def _windowed(extent: int, dim: WindowDim) -> int:
    """Return the number of positions that a window of a convolution or pooling has along one dimension."""
    if extent == DYNAMIC:
        return DYNAMIC
    if dim.size < 1 or dim.stride < 1 or dim.lhs_dilation < 1 or dim.rhs_dilation < 1:
        found = f"size {dim.size}, stride {dim.stride}, dilations {dim.lhs_dilation} and {dim.rhs_dilation}"
        raise ValueError(f"expected window sizes, strides and dilations of at least 1, found {found}")
    base = (extent - 1) * dim.lhs_dilation + 1 if extent else 0
    padded = base + dim.pad_low + dim.pad_high
    size = (dim.size - 1) * dim.rhs_dilation + 1
    return 0 if size > padded or padded <= 0 else (padded - size) // dim.stride + 1


def _windows(op: TypedInstruction, array: ArrayShape) -> list[int]:
    """Return the number of window positions (of a convolution or pooling) along each dimension of an
    array.
    """
    dims = window(op.attributes.get("window"))
    if len(dims) != len(array.dims):
        raise ValueError(f"expected a window of {len(array.dims)} dimensions, found {len(dims)}")
    return [_windowed(extent, dim) for extent, dim in zip(array.dims, dims, strict=True)]


def _spatial(labels: Mapping[str, int], what: str, rank: int) -> list[int]:
    """Return the positions of the spatial dimensions 0, 1, ... of an operand. Raises ``ValueError`` for
    incomplete labels.
    """
    order = [labels[label] for label in sorted(filter(str.isdigit, labels), key=int)]
    if sorted(labels.values()) != list(range(rank)):
        raise ValueError(f"expected labels for {rank} dimensions of {what}, found {''.join(labels)}")
    return order


def _convolution(op: TypedInstruction) -> Shape:
    source, kernel = op.array(0), op.array(1)
    taken, weights, made = dim_labels(op.attributes.get("dim_labels", ""))
    rank = len(source.dims)
    check(rank == len(kernel.dims), "operands with equally many dimensions", source, kernel)
    spatial = [
        _spatial(labels, what, rank)
        for labels, what in ((taken, "input"), (weights, "kernel"), (made, "output"))
    ]
    window_dims = window(op.attributes.get("window"))
    if len(window_dims) != len(spatial[0]):
        raise ValueError(f"expected a window of {len(spatial[0])} dimensions, found {len(window_dims)}")
    groups, batches = op.number("feature_group_count", 1), op.number("batch_group_count", 1)
    if groups < 1 or batches < 1 or (groups > 1 and batches > 1):
        raise ValueError(
            "expected feature_group_count and batch_group_count of at least 1, one of them 1, found "
            f"{groups} and {batches}"
        )
    features, depth = source.dims[taken["f"]], kernel.dims[weights["i"]]
    output, batch = kernel.dims[weights["o"]], source.dims[taken["b"]]
    fits = DYNAMIC in (features, depth) or features == depth * groups
    check(fits, f"{groups} times the kernel's input features in the input", source, kernel)
    fits = output == DYNAMIC or output % groups == output % batches == 0
    check(fits, f"output features in {max(groups, batches)} groups", kernel)
    check(batch == DYNAMIC or batch % batches == 0, f"a batch in {batches} groups", source)
    sizes = [kernel.dims[dim] for dim in spatial[1]]
    check(
        agree([window_dim.size for window_dim in window_dims], sizes),
        "the window's size in the kernel",
        kernel,
    )
    extents = [0] * rank
    extents[made["b"]] = batch if batch == DYNAMIC else batch // batches
    extents[made["f"]] = output
    for ours, theirs, window_dim in zip(spatial[0], spatial[2], window_dims, strict=True):
        extents[theirs] = _windowed(source.dims[ours], window_dim)
    return with_dims(source, extents, _product_element(op))


def check_reducer(callee: Callee, values: Sequence[Shape]) -> None:
    """Raise ``ValueError`` unless a reducer takes two scalars and returns one scalar for each of the
    ``values``.
    """
    parts = callee.result.elements if callee.result.elements is not None else (callee.result,)
    given = len(callee.parameters)
    if given != 2 * len(values):
        raise ValueError(f"expected a computation of {2 * len(values)} parameters, found {given}")
    if len(parts) != len(values):
        raise ValueError(f"expected a computation that makes {len(values)} values, found {len(parts)}")
    for part in (*parts, *callee.parameters):
        if part is not None:
            fits = part.array is not None and not part.array.dims
            check(fits, "a computation of scalars", part)


def _halves(op: TypedInstruction) -> tuple[list[ArrayShape], tuple[Shape, ...]]:
    """Return the operands of a reduction as two groups: the arrays that are reduced, and their scalar initial
    values. Raises ``ValueError`` if the arrays differ in extents.
    """
    body, count = op.callee("to_apply"), len(op.operands)
    if count % 2 or not count:
        raise ValueError(f"expected pairs of values and initial values, found {count} operands")
    half = count // 2
    values = [op.array(index) for index in range(half)]
    for other in values[1:]:
        check(agree(values[0].dims, other.dims), "values of equal extents", values[0], other)
    for start in op.operands[half:]:
        check(not array_of(start, "an initial value").dims, "a scalar to start from", start)
    check_reducer(body, op.operands[half:])
    return values, op.operands[half:]


def _reduce(op: TypedInstruction) -> Shape:
    values, starts = _halves(op)
    dropped = set(listed(op, "dimensions", len(values[0].dims)))
    dims = [extent for dim, extent in enumerate(values[0].dims) if dim not in dropped]
    return one_or_tuple([with_dims(array_of(start, "it"), dims) for start in starts])


def _reduce_window(op: TypedInstruction) -> Shape:
    dims = _windows(op, op.array(0))
    _values, starts = _halves(op)
    return one_or_tuple([with_dims(array_of(start, "it"), dims) for start in starts])


def _select_and_scatter(op: TypedInstruction) -> Shape:
    operand, source = op.array(0), op.array(1)
    check(not op.array(2).dims, "a scalar to start from", op.operands[2])
    dims = _windows(op, operand)
    check(agree(dims, source.dims), f"{dims} values, one per window", source)
    return op.operands[0]


_KEEPING = """
acos acosh add add-dependency and asin asinh atan atan2 atanh cbrt ceil copy cosine cosh count-leading-zeros
divide domain erf exponential exponential-minus-one floor log log-plus-one logistic maximum minimum multiply
negate not opt-barrier or popcnt power reduce-precision remainder round-nearest-afz round-nearest-even rsqrt
shift-left shift-right-arithmetic shift-right-logical sign sine sinh sqrt subtract tan tanh xor
"""
_NOT_ALIKE = {"add-dependency", "domain"}

ELEMENTWISE = frozenset(_KEEPING.split()) - _NOT_ALIKE
"""Operations whose operands and result all have the same shape."""

ARRAY_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(_NOT_ALIKE, lambda op: op.operands[0]),
    "abs": _real,
    "real": _real,
    "imag": _real,
    "complex": _complex,
    "compare": lambda op: with_dims(array_of(_elementwise(op), "operand 0"), op.array(0).dims, "pred"),
    "is-finite": lambda op: with_dims(op.array(0), op.array(0).dims, "pred"),
    "convert": _converted,
    "stochastic-convert": _converted,
    "bitcast-convert": _bitcast_convert,
    "select": _select,
    "clamp": _clamp,
    "dot": _dot,
    "scaled-dot": _scaled_dot,
    "ragged-dot": _ragged_dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "select-and-scatter": _select_and_scatter,
}
"""Rules for the result shape by opcode, for operations on arrays."""
