"""What a rule says of one PyTorch operation, and the shapes most answers have.

Conventions are those of :mod:`hespas.costs.cost`: add and multiply are one FLOP each,
transcendentals apart, bytes the compulsory traffic: each distinct element of an input read once, each element
of a result written once. A number passed by value, which Kineto shows as a tensor without dimensions beside
one with dimensions, is no traffic. Unknown is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan, prod
from typing import NamedTuple

from hespas.costs.aten.args import Call, Strided
from hespas.costs.cost import FREE, Contraction, Cost
from hespas.costs.facts import Tensor
from hespas.graph import DType, DTypeKind, OpClass, find_dtype

__all__ = [
    "FLOAT32",
    "INT64",
    "AtenCost",
    "AtenRule",
    "dense",
    "free",
    "is_integral",
    "matrix_product",
    "promoted",
    "read_bytes",
    "simple",
    "unknown",
]


class AtenCost(NamedTuple):
    """Cost, inputs and results of one execution; results have unknown extents where a trace cannot tell."""

    cost: Cost
    operands: tuple[Tensor, ...] = ()
    results: tuple[Tensor, ...] = ()


AtenRule = Callable[[Call], AtenCost]
"""One row of the table."""

FLOAT32, INT64 = find_dtype("f32"), find_dtype("i64")


def unknown(call: Call, op_class: OpClass = OpClass.UNKNOWN) -> AtenCost:
    """Nothing is known but the inputs."""
    return AtenCost(Cost(op_class, nan, nan, nan, nan, nan), tuple(each.plain for each in call.tensors))


def free(call: Call) -> AtenCost:
    """A view or bookkeeping."""
    return AtenCost(FREE, tuple(each.plain for each in call.tensors))


def dense(dtype: DType | None, shape: Iterable[int]) -> Strided:
    """A result in memory of its own."""
    return Strided(dtype, tuple(shape))


def read_bytes(inputs: Iterable[Strided]) -> float:
    """Bytes of inputs; numbers beside tensors are passed by value."""
    tensors = list(inputs)
    has_shape = any(each.shape for each in tensors)
    return sum(each.bytes for each in tensors if each.shape or not has_shape)


def simple(
    op_class: OpClass,
    inputs: Iterable[Strided],
    results: Iterable[Strided],
    *,
    flops: float = 0.0,
    transcendentals: float = 0.0,
    read: float | None = None,
    written: float | None = None,
    rate: DType | None = None,
    useful_flops: float | None = None,
    contractions: tuple[Contraction, ...] = (),
) -> AtenCost:
    """Inputs read, results written, unless ``read`` or ``written`` [bytes] say otherwise."""
    sources, targets = list(inputs), list(results)
    first = rate or next((each.dtype for each in sources if each.shape), None)
    if first is None and sources:
        first = sources[0].dtype
    cost = Cost(
        op_class,
        flops,
        flops if useful_flops is None else useful_flops,
        transcendentals,
        read_bytes(sources) if read is None else read,
        sum(each.bytes for each in targets) if written is None else written,
        -1 if first is None else first.code,
        contractions,
    )
    return AtenCost(cost, tuple(each.plain for each in sources), tuple(each.plain for each in targets))


def matrix_product(
    extents: tuple[int, int, int, int],
    types: tuple[DType | None, DType | None, DType | None],
    useful: float | None = None,
) -> Contraction:
    """``batch`` products of M x K by K x N: 2 x batch x M x N x K FLOPs, of which ``useful`` (None: all)."""
    codes = [-1 if each is None else each.code for each in types]
    flops = 2.0 * prod(extents)
    if types[2] is not None and types[2].kind is DTypeKind.COMPLEX:
        flops *= 4
    kept = flops if useful is None else useful
    return Contraction(
        *extents, flops=flops, useful_flops=kept, lhs=codes[0], rhs=codes[1], accumulator=codes[2]
    )


_CATEGORY = {
    DTypeKind.BOOL: 0,
    DTypeKind.SIGNED: 1,
    DTypeKind.UNSIGNED: 1,
    DTypeKind.FLOAT: 2,
    DTypeKind.COMPLEX: 3,
}


def is_integral(dtype: DType | None) -> bool:
    """Whether a type holds whole numbers or truth values."""
    return dtype is not None and _CATEGORY.get(dtype.kind, 2) < 2


def promoted(inputs: Iterable[Strided], *, to_float: bool = False) -> DType | None:
    """The element type PyTorch computes in (torch.result_type); None where an input's is unknown.

    Tensors with dimensions decide; numbers, which Kineto shows as 64-bit tensors without dimensions, only by
    their category, and then in the default type (float32). ``to_float``: whole numbers become float32.
    """
    tensors = list(inputs)
    ranked = [each.dtype for each in tensors if each.shape] or [each.dtype for each in tensors]
    numbers = [each.dtype for each in tensors if not each.shape]
    if not ranked or None in ranked:
        return None
    found = _widest([each for each in ranked if each is not None])
    for number in numbers:
        if number is not None and _CATEGORY.get(number.kind, 0) > _CATEGORY.get(found.kind, 0):
            found = (INT64 if is_integral(number) else FLOAT32) or found
    return FLOAT32 if to_float and is_integral(found) else found


def _widest(types: list[DType]) -> DType:
    highest = max(_CATEGORY.get(each.kind, 0) for each in types)
    same = [each for each in types if _CATEGORY.get(each.kind, 0) == highest]
    widest = max(same, key=lambda each: each.bits)
    different_halves = {each.name for each in same} >= {"bf16", "f16"} and widest.bits == 16
    return FLOAT32 if different_halves and FLOAT32 else widest
