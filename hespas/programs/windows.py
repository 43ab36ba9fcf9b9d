"""Windows that slide over a tensor, as StableHLO from types and from how many places one window has."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan, prod
from typing import NamedTuple

from hespas.programs.operations import Operator
from hespas.programs.text import Tensor, array, generic

__all__ = ["reduce_window", "select_and_scatter"]

_Types = tuple[Tensor, ...]


class _Window(NamedTuple):
    size: int
    stride: int
    low: int
    high: int


def reduce_window(operands: _Types, results: _Types, places: float) -> Operator | None:
    """The largest of each window of so many places (NaN: as many as a step); None for several operands, or
    types that do not fit.
    """
    if len(operands) != 2 or len(results) != 1 or operands[1] != operands[0].scalar:
        return None
    windows = _windows(operands[0], results[0], places)
    if windows is None:
        return None
    attributes = f"{_attributes(windows)}, {_padding(windows)}"
    region = _pair(operands[1], f"%s = stablehlo.{_larger(operands[1])} %x, %y : {operands[1]}", "%s")
    return lambda values: generic("reduce_window", values, results, attributes, region)


def select_and_scatter(operands: _Types, results: _Types, places: float) -> Operator | None:
    """What a window of so many places gave goes to where its largest came from; None as above."""
    if len(operands) != 3 or results != operands[:1] or operands[2] != operands[0].scalar:
        return None
    windows = _windows(operands[0], operands[1], places)
    if windows is None or operands[2].is_bool or operands[2].is_complex:
        return None
    attributes, scalar = f"{_attributes(windows)}, {_padding(windows)}", operands[2]
    compared = f"%s = stablehlo.compare GE, %x, %y : ({scalar}, {scalar}) -> tensor<i1>"
    select = _pair(scalar, compared, "%s", "tensor<i1>")
    scatter = _pair(scalar, f"%s = stablehlo.add %x, %y : {scalar}", "%s")
    return lambda values: generic("select_and_scatter", values, results, attributes, f"{select}, {scatter}")


def _windows(whole: Tensor, part: Tensor, places: float) -> tuple[_Window, ...] | None:
    """A window for each dimension: it moves by the ratio of extents, and is of equal size in all dimensions
    in which it moves.
    """
    if whole.rank != part.rank or whole.element is not part.element or not part.elements:
        return None
    strides = [max(round(large / small), 1) for large, small in zip(whole.shape, part.shape, strict=True)]
    moving = sum(stride > 1 for stride in strides)
    count = prod(strides) if isnan(places) else max(places, 1.0)
    side = max(round(count ** (1 / moving)), 1) if moving else 1
    found: list[_Window] = []
    for large, small, stride in zip(whole.shape, part.shape, strides, strict=True):
        size = min(side, large) if stride > 1 else 1
        total = (small - 1) * stride + size - large
        if total < 0 and (large - size) // stride + 1 != small:
            return None
        low = max(total, 0) // 2
        found.append(_Window(size, stride, low, max(total, 0) - low))
    return tuple(found)


def _attributes(windows: Sequence[_Window]) -> str:
    sizes, strides = array([each.size for each in windows]), array([each.stride for each in windows])
    return f"window_dimensions = {sizes}, window_strides = {strides}"


def _padding(windows: Sequence[_Window]) -> str:
    rows = ", ".join(f"[{each.low}, {each.high}]" for each in windows)
    return f"padding = dense<[{rows}]> : tensor<{len(windows)}x2xi64>"


def _larger(scalar: Tensor) -> str:
    return "add" if scalar.is_complex else "maximum"


def _pair(scalar: Tensor, line: str, made: str, result: str = "") -> str:
    """A region of two scalars."""
    return f"{{ ^bb0(%x: {scalar}, %y: {scalar}): {line} stablehlo.return {made} : {result or scalar} }}"
