"""Text of StableHLO tensors, values and operations: https://openxla.org/stablehlo/spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

from hespas.graph import DType, DTypeKind

__all__ = [
    "Operator",
    "Tensor",
    "Types",
    "Value",
    "array",
    "binary_region",
    "dense",
    "generic",
    "pretty",
    "reduction",
]


class Tensor(NamedTuple):
    """Tensor type with known extents, as in StableHLO text."""

    element: DType
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Return the storage in bytes."""
        return self.element.storage_bytes(self.elements)

    @property
    def is_float(self) -> bool:
        """Return True if elements are real floating-point numbers."""
        return self.element.kind is DTypeKind.FLOAT

    @property
    def is_integer(self) -> bool:
        """Return True if elements are signed or unsigned integers."""
        return self.element.kind in {DTypeKind.SIGNED, DTypeKind.UNSIGNED}

    @property
    def is_bool(self) -> bool:
        """Return True if elements are booleans."""
        return self.element.kind is DTypeKind.BOOL

    @property
    def is_complex(self) -> bool:
        """Return True if elements are complex numbers."""
        return self.element.kind is DTypeKind.COMPLEX

    @property
    def scalar(self) -> Tensor:
        """Return the rank-0 tensor type of one element."""
        return Tensor(self.element, ())

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """Return a tensor of the same element type and another shape."""
        return Tensor(self.element, tuple(shape))

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{extent}x' for extent in self.shape)}{self.element.name}>"


class Value(NamedTuple):
    """SSA value of a StableHLO program: its name and its type."""

    name: str
    type: Tensor

    def __str__(self) -> str:
        return self.name


Operator = Callable[[Sequence[Value]], str]
"""Function from the values of operands to the text of an operation, as it follows the equals sign."""

Types = tuple[Tensor, ...]


def dense(tensor: Tensor, number: int = 0) -> str:
    """Return the text of a literal in which all elements are ``number``."""
    match tensor.element.kind:
        case DTypeKind.BOOL:
            text = "true" if number else "false"
        case DTypeKind.FLOAT:
            text = f"{number}.0"
        case DTypeKind.COMPLEX:
            text = f"({number}.0, 0.0)"
        case _:
            text = str(number)
    return f"dense<{text}> : {tensor}"


def array(numbers: Sequence[int]) -> str:
    """Return the text of an attribute that lists integers."""
    return f"array<i64: {', '.join(map(str, numbers))}>" if numbers else "array<i64>"


def _listed(operands: Sequence[Value]) -> tuple[str, str]:
    """Return the names and the types of operands as two texts of MLIR."""
    names, types = (value.name for value in operands), (str(value.type) for value in operands)
    return ", ".join(names), ", ".join(types)


def pretty(op: str, operands: Sequence[Value], result: Tensor, attributes: str = "") -> str:
    """Return the text of an operation with one result in MLIR's pretty form, starting after the equals sign.

    ``attributes`` follow the operands, as in ``, dims = [0]``.
    """
    names, types = _listed(operands)
    return f"stablehlo.{op} {names}{attributes} : ({types}) -> {result}"


def generic(
    op: str, operands: Sequence[Value], results: Sequence[Tensor], attributes: str = "", region: str = ""
) -> str:
    """Return the text of an operation in MLIR's generic form, starting after the equals sign."""
    names, types = _listed(operands)
    inside = f" ({region})" if region else ""
    listed = f" {{{attributes}}}" if attributes else ""
    result_types = ", ".join(map(str, results))
    result_types = result_types if len(results) == 1 else f"({result_types})"
    return f'"stablehlo.{op}"({names}){inside}{listed} : ({types}) -> {result_types}'


def reduction(op: str, value: Value, start: Value, dims: Sequence[int], result: Tensor) -> str:
    """Return the text of a reduction by one scalar operation, starting after the equals sign."""
    return (
        f"stablehlo.reduce({value} init: {start}) applies stablehlo.{op} across dimensions = {list(dims)} : "
        f"({value.type}, {start.type}) -> {result}"
    )


def binary_region(scalar: Tensor, op: str, result: str = "") -> str:
    """Return the text of a region that applies an operation to two scalars of type ``scalar``. ``result`` is
    the type of the result (default: ``scalar``).

    ``op`` is a name (``add``), with a direction for comparisons (``compare GE``).
    """
    operation = (
        f"%s = stablehlo.{op}, %x, %y : ({scalar}, {scalar}) -> {result}"
        if result
        else f"%s = stablehlo.{op} %x, %y : {scalar}"
    )
    return f"{{ ^bb0(%x: {scalar}, %y: {scalar}): {operation} stablehlo.return %s : {result or scalar} }}"
