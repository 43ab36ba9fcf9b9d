"""Dimension numbers of matrix products, and layouts and windows of convolutions, inferred from shapes.

Several choices may fit the shapes. The extents B, M, N and K of a product, or the FLOPs of a convolution
without padding and dilation zeros, decide if they are known. Otherwise the most usual choice is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice, permutations, product
from math import isnan, prod
from typing import NamedTuple

import numpy as np

from hespas.programs.text import Tensor, Value, pretty

__all__ = [
    "Convolution",
    "DotAxes",
    "convolution_text",
    "dot_axes",
    "dot_text",
    "find_convolution",
    "likely_dot_axes",
    "usual_convolution",
]

_MOST_MATRIX_DIMENSIONS = 8
_MOST_CHOICES = 20_000
"""Maximum number of dimension numbers tried: dimensions of extent 1 may have any role."""
_TOLERANCE = 0.005
_MOST_WINDOWS = 200
_MOST_POSITIONS = 1 << 22
"""Maximum number of (output, kernel) positions that are counted."""

_Shape = tuple[int, ...]
_Axes = tuple[int, ...]


class DotAxes(NamedTuple):
    """Batch and contracted dimensions of a matmul, each for the left and for the right operand."""

    batching: tuple[Sequence[int], Sequence[int]]
    contracting: tuple[Sequence[int], Sequence[int]]


class _AxisRoles(NamedTuple):
    batch: _Axes
    contracted: _Axes
    free: _Axes


def _roles(shape: _Shape, extents: tuple[int, int, int]) -> Iterator[_AxisRoles]:
    """Yield all assignments of the roles batch, contracted and free to the dimensions of ``shape``. For each
    role, the product of the extents must equal the number in ``extents``.
    """
    axes = range(len(shape))
    for choice in product("bfc", repeat=len(shape)):
        parts = [tuple(axis for axis in axes if choice[axis] == role) for role in "bcf"]
        if tuple(prod(shape[axis] for axis in part) for part in parts) == extents:
            yield _AxisRoles(*parts)


@lru_cache(maxsize=4096)
def dot_axes(
    left: _Shape, right: _Shape, result: _Shape, extents: tuple[int, int, int, int]
) -> DotAxes | None:
    """Return batch and contracted dimensions with which a matmul of ``left`` and ``right`` has the shape
    ``result`` and the ``extents`` (B, M, N, K); None if there are none.
    """
    if max(len(left), len(right)) > _MOST_MATRIX_DIMENSIONS:
        return None
    batch, m, n, k = extents
    rights = list(_roles(right, (batch, k, n)))
    choices = product(_roles(left, (batch, k, m)), rights)
    plans = (_dot_plan(left, right, result, one, two) for one, two in islice(choices, _MOST_CHOICES))
    return next((plan for plan in plans if plan is not None), None)


def _dot_plan(
    left: _Shape, right: _Shape, result: _Shape, one: _AxisRoles, two: _AxisRoles
) -> DotAxes | None:
    head = result[: len(one.batch)]
    free = (*(left[axis] for axis in one.free), *(right[axis] for axis in two.free))
    if result[len(one.batch) :] != free:
        return None
    left_batch, right_batch = _in_order(left, one.batch, head), _in_order(right, two.batch, head)
    contracted = _in_order(right, two.contracted, tuple(left[axis] for axis in one.contracted))
    if left_batch is None or right_batch is None or contracted is None:
        return None
    return DotAxes((left_batch, right_batch), (one.contracted, contracted))


def _in_order(shape: _Shape, axes: _Axes, extents: _Shape) -> _Axes | None:
    """Return the dimensions ``axes`` in the order in which they have the given extents; None if they do
    not.
    """
    left = list(axes)
    order: list[int] = []
    for extent in extents:
        axis = next((axis for axis in left if shape[axis] == extent), None)
        if axis is None:
            return None
        left.remove(axis)
        order.append(axis)
    return None if left else tuple(order)


def likely_dot_axes(left: _Shape, right: _Shape, result: _Shape) -> DotAxes | None:
    """Return batch and contracted dimensions with which a matmul of ``left`` and ``right`` has the shape
    ``result``; None if there are none. One contracted dimension is preferred, then several, then none.
    """
    shared = len(left) + len(right) - len(result)  # 2 contracted + batch
    for contracted in (*range(1, shared // 2 + 1), 0):
        batch = shared - 2 * contracted
        free = len(left) - batch - contracted
        if batch < 0 or free < 0 or batch + free > len(result):
            continue
        b, m, n = prod(result[:batch]), prod(result[batch : batch + free]), prod(result[batch + free :])
        depth, rest = divmod(prod(left), b * m) if b * m else divmod(prod(right), max(b * n, 1))
        axes = None if rest else dot_axes(left, right, result, (b, m, n, depth))
        if axes is not None:
            return axes
    return None


def dot_text(left: Value, right: Value, result: Tensor, axes: DotAxes) -> str:
    """Return the text of a ``dot_general``, starting after the equals sign."""
    batching, contracting = ([list(dims) for dims in pair] for pair in axes)
    batch = f", batching_dims = {batching[0]} x {batching[1]}" if batching[0] else ""
    attributes = f"{batch}, contracting_dims = {contracting[0]} x {contracting[1]}"
    return pretty("dot_general", (left, right), result, attributes)


class _ConvWindow(NamedTuple):
    """Window of one spatial dimension of a convolution: stride, padding (``low``, ``high``) and dilations.
    ``positions`` is the number of (output, kernel) pairs that multiply an input element (-1: not counted).
    """

    stride: int
    low: int
    high: int
    lhs_dilation: int = 1
    rhs_dilation: int = 1
    positions: int = -1


class _ConvLayout(NamedTuple):
    """Positions of the batch and feature dimensions of input, kernel and output of a convolution."""

    lhs: tuple[int, int]
    rhs: tuple[int, int]
    out: tuple[int, int]
    feature_groups: int = 1
    batch_groups: int = 1


class Convolution(NamedTuple):
    """Convolution whose attributes were inferred from shapes: the layout, and the window of each spatial
    dimension. ``flops`` are its FLOPs (-1: not counted).
    """

    layout: _ConvLayout
    windows: tuple[_ConvWindow, ...]
    flops: float = -1.0


_USUAL = (
    _ConvLayout((0, 3), (2, 3), (0, 3)),
    _ConvLayout((0, 1), (1, 0), (0, 1)),
    _ConvLayout((0, 3), (3, 0), (0, 3)),
)
"""Two-dimensional layouts that frameworks use."""
_USUAL_BACKWARD = (
    _ConvLayout((3, 0), (0, 3), (2, 3)),
    _ConvLayout((0, 3), (3, 2), (0, 3)),
    _ConvLayout((1, 0), (0, 1), (1, 0)),
)
"""Layouts of gradients: JAX's of a kernel and of an input, and of a kernel in channels-first layout."""


def usual_convolution(left: _Shape, right: _Shape, out: _Shape) -> Convolution | None:
    """Return a two-dimensional convolution with a usual layout and even padding that fits the shapes; None if
    none fits.
    """
    if {len(left), len(right), len(out)} != {4} or 0 in (*left, *right, *out):
        return None
    for layout in _USUAL:
        groups, odd = divmod(left[layout.lhs[1]], right[layout.rhs[0]])
        features = right[layout.rhs[1]]
        fits = features == out[layout.out[1]] and left[layout.lhs[0]] == out[layout.out[0]]
        if odd or not groups or not fits or features % groups:
            continue
        spatial = zip(
            _spatial(left, layout.lhs), _spatial(right, layout.rhs), _spatial(out, layout.out), strict=True
        )
        windows = [_even_window(*extents) for extents in spatial]
        fitting = tuple(window for window in windows if window is not None)
        if len(fitting) == len(windows):
            return Convolution(layout._replace(feature_groups=groups), fitting)
    return None


def _even_window(extent: int, kernel: int, out: int) -> _ConvWindow | None:
    """Return a window with even padding and a stride of about ``extent / out``; None if none fits."""
    stride = max(round(extent / out), 1)
    total = (out - 1) * stride + kernel - extent
    if total < 0:  # the last inputs are not read
        if (extent - kernel) // stride + 1 != out:
            return None
        total = 0
    return _ConvWindow(stride, total // 2, total - total // 2)


def _spatial(shape: _Shape, pair: tuple[int, int]) -> _Shape:
    return tuple(extent for axis, extent in enumerate(shape) if axis not in pair)


def _layouts(left: _Shape, right: _Shape, out: _Shape) -> Iterator[_ConvLayout]:
    pairs = list(permutations(range(len(left)), 2))
    for lhs, rhs, result in product(pairs, pairs, pairs):
        batch, features = left[lhs[0]], left[lhs[1]]
        taken, given = right[rhs[0]], right[rhs[1]]
        if given != out[result[1]] or not min(taken, out[result[0]]):
            continue
        groups, batches = features // taken, batch // out[result[0]]
        whole = groups * taken == features and batches * out[result[0]] == batch
        if whole and 1 in {groups, batches} and groups and batches and given % (groups * batches) == 0:
            yield _ConvLayout(lhs, rhs, result, groups, batches)


@lru_cache(maxsize=4096)
def find_convolution(
    left: _Shape, right: _Shape, out: _Shape, spec: float, useful: float
) -> Convolution | None:
    """Return the convolution that fits the shapes and whose useful FLOPs are nearest to ``useful``. Return
    None if none is within the tolerance.

    ``spec`` are the FLOPs including padding, which must be equal (NaN: unknown, not compared).
    """
    best: Convolution | None = None
    usual = _USUAL + _USUAL_BACKWARD  # first, where dimensions of equal extent leave a choice
    layouts = _layouts(left, right, out)
    for layout in sorted(
        layouts, key=lambda one: one._replace(feature_groups=1, batch_groups=1) not in usual
    ):
        kernel = _spatial(right, layout.rhs)
        taken = right[layout.rhs[0]]
        if not isnan(spec) and 2.0 * prod(out) * taken * prod(kernel) != spec:
            continue
        spatial = zip(_spatial(left, layout.lhs), kernel, _spatial(out, layout.out), strict=True)
        choices = [_candidate_windows(*extents) for extents in spatial]
        flops_per_position = 2.0 * out[layout.out[0]] * out[layout.out[1]] * taken
        for windows in islice(product(*choices), _MOST_WINDOWS):
            flops = flops_per_position * prod(window.positions for window in windows)
            if best is None or abs(flops - useful) < abs(best.flops - useful):
                best = Convolution(layout, windows, flops)
        if best is not None and best.flops == useful:
            return best
    return best if best is not None and abs(best.flops - useful) <= _TOLERANCE * useful else None


@lru_cache(maxsize=4096)
def _candidate_windows(extent: int, kernel: int, out: int) -> tuple[_ConvWindow, ...]:
    """Return windows that map ``extent`` inputs to ``out`` outputs, simple ones first. Of windows with equal
    numbers of positions, only the first is returned.
    """
    if not min(extent, kernel, out) or kernel * out > _MOST_POSITIONS:
        return ()
    strides = sorted({1, max(1, extent // out), max(1, -(-extent // out))})
    holes = sorted({1, max(1, out // extent), max(1, -(-out // extent))})
    spread = sorted({1, max(1, extent // kernel), max(1, -(-extent // kernel))})
    windows: dict[int, _ConvWindow] = {}
    for stride, lhs, rhs in product(strides, holes, spread):
        if sorted((stride, lhs, rhs))[1] > 1:
            continue
        reach = (kernel - 1) * rhs + 1
        total = (out - 1) * stride + reach - ((extent - 1) * lhs + 1)
        for low in dict.fromkeys((total // 2, total - total // 2, 0, total)):
            index = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * rhs - low
            is_input = (index >= 0) & (index <= (extent - 1) * lhs) & (index % lhs == 0)
            positions = int(is_input.sum())
            windows.setdefault(positions, _ConvWindow(stride, low, total - low, lhs, rhs, positions))
    return tuple(window for positions, window in windows.items() if positions)


def convolution_text(left: Value, right: Value, result: Tensor, plan: Convolution) -> str:
    """Return the text of a ``convolution``, starting after the equals sign."""
    layout, windows, rank = plan.layout, plan.windows, left.type.rank
    operands = f"{_labels(layout.lhs, 'bf', rank)}x{_labels(layout.rhs, 'io', rank)}"
    numbers = f"{operands}->{_labels(layout.out, 'bf', rank)}"
    window = (
        f"{{stride = {[window.stride for window in windows]}, "
        f"pad = {[[window.low, window.high] for window in windows]}, "
        f"lhs_dilate = {[window.lhs_dilation for window in windows]}, "
        f"rhs_dilate = {[window.rhs_dilation for window in windows]}}}"
    )
    return (
        f"stablehlo.convolution({left}, {right}) dim_numbers = {numbers}, "
        f"window = {window} {{batch_group_count = {layout.batch_groups} : i64, "
        f"feature_group_count = {layout.feature_groups} : i64}} : ({left.type}, {right.type}) -> {result}"
    )


def _labels(pair: tuple[int, int], names: str, rank: int) -> str:
    spatial = iter(range(rank))
    named = dict(zip(pair, names, strict=True))
    return f"[{', '.join(named[axis] if axis in named else str(next(spatial)) for axis in range(rank))}]"
