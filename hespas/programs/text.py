"""Tensors, values and operations of StableHLO as text: https://openxla.org/stablehlo/spec."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hespas.graph import DType, DTypeKind

__all__ = ["Tensor", "Value", "array", "dense", "generic", "pretty", "reduction"]


class Tensor(NamedTuple):
    """A tensor type of known extents."""

    element: DType
    shape: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Storage in bytes."""
        return self.element.storage_bytes(self.elements)

    @property
    def is_float(self) -> bool:
        """Whether elements are real floating-point numbers."""
        return self.element.kind is DTypeKind.FLOAT

    @property
    def is_integer(self) -> bool:
        """Whether elements are integers, signed or not."""
        return self.element.kind in {DTypeKind.SIGNED, DTypeKind.UNSIGNED}

    @property
    def is_bool(self) -> bool:
        """Whether elements are truth values."""
        return self.element.kind is DTypeKind.BOOL

    @property
    def is_complex(self) -> bool:
        """Whether elements are complex numbers."""
        return self.element.kind is DTypeKind.COMPLEX

    @property
    def scalar(self) -> Tensor:
        """The type of one element."""
        return Tensor(self.element, ())

    def reshaped(self, shape: Sequence[int]) -> Tensor:
        """The same element type with other extents."""
        return Tensor(self.element, tuple(shape))

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{extent}x' for extent in self.shape)}{self.element.name}>"


class Value(NamedTuple):
    """An SSA value."""

    name: str
    type: Tensor

    def __str__(self) -> str:
        return self.name


def dense(tensor: Tensor, number: int = 0) -> str:
    """A literal with ``number`` everywhere."""
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
    """An attribute that lists integers."""
    return f"array<i64: {', '.join(map(str, numbers))}>" if numbers else "array<i64>"


def _listed(operands: Sequence[Value]) -> tuple[str, str]:
    """Names and types of operands."""
    return ", ".join(each.name for each in operands), ", ".join(str(each.type) for each in operands)


def pretty(op: str, operands: Sequence[Value], result: Tensor, attributes: str = "") -> str:
    """An operation of one result in its own syntax, right of the equals sign: ``attributes`` stand behind the
    operands, as in ``, dims = [0]``.
    """
    names, types = _listed(operands)
    return f"stablehlo.{op} {names}{attributes} : ({types}) -> {result}"


def generic(
    op: str, operands: Sequence[Value], results: Sequence[Tensor], attributes: str = "", region: str = ""
) -> str:
    """Any operation in MLIR's generic form, right of the equals sign."""
    names, types = _listed(operands)
    inside = f" ({region})" if region else ""
    stated = f" {{{attributes}}}" if attributes else ""
    made = ", ".join(map(str, results))
    made = made if len(results) == 1 else f"({made})"
    return f'"stablehlo.{op}"({names}){inside}{stated} : ({types}) -> {made}'


def reduction(op: str, value: Value, start: Value, dims: Sequence[int], result: Tensor) -> str:
    """A reduction by one operation on scalars, right of the equals sign."""
    return (
        f"stablehlo.reduce({value} init: {start}) applies stablehlo.{op} across dimensions = {list(dims)} : "
        f"({value.type}, {start.type}) -> {result}"
    )
