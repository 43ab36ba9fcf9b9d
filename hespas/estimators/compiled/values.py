"""Tensors and values of the small programs that are compiled, and the text they are written in."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from hespas.graph import DType, DTypeKind

__all__ = ["Tensor", "Value", "dense", "lines_of", "operation"]


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

    def of(self, *shape: int) -> Tensor:
        """The same element type in another shape."""
        return Tensor(self.element, shape)

    def __str__(self) -> str:
        return f"tensor<{''.join(f'{extent}x' for extent in self.shape)}{self.element.name}>"


class Value(NamedTuple):
    """An SSA value."""

    name: str
    type: Tensor


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


def lines_of(shape: Sequence[int]) -> str:
    """An attribute that lists integers."""
    return f"array<i64: {', '.join(map(str, shape))}>" if shape else "array<i64>"


def operation(
    name: str, operands: Sequence[Value], results: Sequence[Tensor], attributes: str = "", region: str = ""
) -> str:
    """An operation in generic form, right of the equals sign."""
    inside = f" ({region})" if region else ""
    stated = f" {{{attributes}}}" if attributes else ""
    types = ", ".join(str(each.type) for each in operands)
    made = ", ".join(map(str, results))
    names = ", ".join(each.name for each in operands)
    return f'"stablehlo.{name}"({names}){inside}{stated} : ({types}) -> ({made})'
