"""Operations of a table as programs: what a row's sizes and number format say, and no more."""

from __future__ import annotations

from itertools import count
from math import isnan

from hespas.estimators.compiled.programs import Unit
from hespas.estimators.compiled.recipes import BINARY, UNARY, Asked, write_operation
from hespas.estimators.compiled.values import Tensor, Value
from hespas.estimators.operations import Operations
from hespas.graph import DTypeKind
from hespas.graph.dtypes import DType, find_dtype

__all__ = ["units_asked"]

_SPELLED = {
    "sub": "subtract", "mul": "multiply", "div": "divide", "exp": "exponential", "neg": "negate",
    "max": "maximum", "min": "minimum", "sigmoid": "logistic", "pow": "power", "sin": "sine", "cos": "cosine",
    "erf": "",
}  # fmt: skip
_VIEWS = frozenset({"reshape", "bitcast_convert", "convert", "optimization_barrier", "real", "imag"})
_LARGEST = 1 << 31


def units_asked(ops: Operations) -> list[Unit | None]:
    """A unit for each operation; None where a row is no product, elementwise operation or sum of rows."""
    return [_unit(ops, row) for row in range(len(ops))]


def _unit(ops: Operations, row: int) -> Unit | None:
    element = find_dtype(ops.scheme[row].removesuffix("_full"))
    if element is None or element.block_elements or element.name == "tf32":
        return None
    match ops.kind[row]:
        case "matmul":
            return _product(ops, row, element)
        case "vector" | "reduction":
            return _elementwise(ops, row, element)
        case _:
            return None


def _sizes(ops: Operations, row: int, *names: str) -> tuple[int, ...] | None:
    sizes = [float(ops.dim(name)[row]) for name in names]
    if any(isnan(size) or size < 1 or size > _LARGEST or size != int(size) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)


def _product(ops: Operations, row: int, element: DType) -> Unit | None:
    sizes = _sizes(ops, row, "batch", "m", "n", "k")
    if sizes is None:
        return None
    batch, m, n, k = sizes
    head = (batch,) if batch > 1 else ()
    lhs, rhs = Tensor(element, (*head, m, k)), Tensor(element, (*head, k, n))
    made = element if element.kind is not DTypeKind.SIGNED else find_dtype("i32") or element
    return _written("dot_general", (lhs, rhs), Tensor(made, (*head, m, n)))


def _elementwise(ops: Operations, row: int, element: DType) -> Unit | None:
    sizes = _sizes(ops, row, "rows", "columns")
    if sizes is None:
        return None
    whole = Tensor(element, sizes)
    if ops.kind[row] == "reduction":
        known = ops.op[row] in {"sum", "reduce", "reduce_sum"}
        return _written("reduce", (whole,), whole.of(sizes[0])) if known else None
    op = _SPELLED.get(ops.op[row], ops.op[row])
    if op in _VIEWS or op not in UNARY | BINARY:
        return None
    return _written(op, (whole,) * (2 if op in BINARY else 1), whole)


def _written(op: str, operands: tuple[Tensor, ...], result: Tensor) -> Unit | None:
    values = tuple(Value(f"%p{place}", each) for place, each in enumerate(operands))
    made = write_operation(Asked(op, values, (result,), count()))
    return None if made is None else Unit(tuple(made[0]), operands, made[1])
