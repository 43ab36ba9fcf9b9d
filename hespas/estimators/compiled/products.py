"""Products and convolutions from the types of their operands and result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from hespas.estimators.compiled.values import Tensor, Value, operation

__all__ = ["contraction", "convolution"]

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


def contraction(operands: Sequence[Value], results: Sequence[Tensor]) -> str | None:
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
