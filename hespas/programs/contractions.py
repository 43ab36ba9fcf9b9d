"""Axes of matrix products, and layouts and windows of convolutions, from shapes.

Several may give the shapes. Where the extents B, M, N and K of a product are known, or the FLOPs of a
convolution with those on padding and dilation zeros left out, they decide; else the usual ones are taken.
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
"""Dimension numbers that are tried: dimensions of extent 1 may be anything."""

_Shape = tuple[int, ...]
_Axes = tuple[int, ...]


class DotAxes(NamedTuple):
    """Batch and contracted dimensions of a product, each of the left and of the right operand."""

    batching: tuple[Sequence[int], Sequence[int]]
    contracting: tuple[Sequence[int], Sequence[int]]


class _Roles(NamedTuple):
    batch: _Axes
    contracted: _Axes
    free: _Axes


def _roles(shape: _Shape, extents: tuple[int, int, int]) -> Iterator[_Roles]:
    """The ways to split dimensions into batch, contracted and free ones of given products."""
    axes = range(len(shape))
    for choice in product("bfc", repeat=len(shape)):
        parts = [tuple(axis for axis in axes if choice[axis] == role) for role in "bcf"]
        if tuple(prod(shape[axis] for axis in part) for part in parts) == extents:
            yield _Roles(*parts)


@lru_cache(maxsize=4096)
def dot_axes(
    left: _Shape, right: _Shape, result: _Shape, extents: tuple[int, int, int, int]
) -> DotAxes | None:
    """Axes that give the result's shape and ``extents`` (B, M, N, K), None where there are none."""
    if max(len(left), len(right)) > _MOST_MATRIX_DIMENSIONS:
        return None
    batch, m, n, k = extents
    rights = list(_roles(right, (batch, k, n)))
    choices = product(_roles(left, (batch, k, m)), rights)
    plans = (_dot_plan(left, right, result, one, two) for one, two in islice(choices, _MOST_CHOICES))
    return next((plan for plan in plans if plan is not None), None)


def _dot_plan(left: _Shape, right: _Shape, result: _Shape, one: _Roles, two: _Roles) -> DotAxes | None:
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
    """The axes in an order in which they have these extents."""
    left = list(axes)
    order: list[int] = []
    for extent in extents:
        chosen = next((axis for axis in left if shape[axis] == extent), None)
        if chosen is None:
            return None
        left.remove(chosen)
        order.append(chosen)
    return None if left else tuple(order)


def likely_dot_axes(left: _Shape, right: _Shape, result: _Shape) -> DotAxes | None:
    """Axes that the shapes alone allow: of one contracted dimension rather than several, or none at all."""
    shared = len(left) + len(right) - len(result)  # 2 contracted + batch
    for contracted in (*range(1, shared // 2 + 1), 0):
        batch = shared - 2 * contracted
        free = len(left) - batch - contracted
        if batch < 0 or free < 0 or batch + free > len(result):
            continue
        b, m, n = prod(result[:batch]), prod(result[batch : batch + free]), prod(result[batch + free :])
        depth, rest = divmod(prod(left), b * m) if b * m else divmod(prod(right), max(b * n, 1))
        found = None if rest else dot_axes(left, right, result, (b, m, n, depth))
        if found is not None:
            return found
    return None


def dot_text(left: Value, right: Value, result: Tensor, axes: DotAxes) -> str:
    """One ``dot_general``, right of the equals sign."""
    batching, contracting = ([list(each) for each in pair] for pair in axes)
    batch = f", batching_dims = {batching[0]} x {batching[1]}" if batching[0] else ""
    attributes = f"{batch}, contracting_dims = {contracting[0]} x {contracting[1]}"
    return pretty("dot_general", (left, right), result, attributes)


# --- convolutions

_TOLERANCE = 0.005
_MOST_WINDOWS = 200
_MOST_PLACES = 1 << 22
"""Pairs of output and kernel place that are looked at to count those that multiply something."""


class _Window(NamedTuple):
    """One spatial dimension; ``positions`` counts pairs of output and kernel place that multiply."""

    stride: int
    low: int
    high: int
    lhs_dilation: int = 1
    rhs_dilation: int = 1
    positions: int = -1


class _Layout(NamedTuple):
    """Batch and feature dimension of input and output, input and output feature dimension of the kernel."""

    lhs: tuple[int, int]
    rhs: tuple[int, int]
    out: tuple[int, int]
    feature_groups: int = 1
    batch_groups: int = 1


class Convolution(NamedTuple):
    """A layout, a window for each spatial dimension, and FLOPs (-1: not counted)."""

    layout: _Layout
    windows: tuple[_Window, ...]
    flops: float = -1.0


_USUAL = (_Layout((0, 3), (2, 3), (0, 3)), _Layout((0, 1), (1, 0), (0, 1)), _Layout((0, 3), (3, 0), (0, 3)))
"""Two-dimensional layouts that frameworks use."""
_USUAL_BACKWARD = (
    _Layout((3, 0), (0, 3), (2, 3)), _Layout((0, 3), (3, 2), (0, 3)), _Layout((1, 0), (0, 1), (1, 0))
)  # fmt: skip
"""Those of gradients: JAX's of a kernel and of an input, and of a kernel with features before places."""


def usual_convolution(left: _Shape, right: _Shape, out: _Shape) -> Convolution | None:
    """A two-dimensional convolution of a usual layout, padded evenly; None where none fits."""
    if {len(left), len(right), len(out)} != {4} or 0 in (*left, *right, *out):
        return None
    for layout in _USUAL:
        groups, odd = divmod(left[layout.lhs[1]], right[layout.rhs[0]])
        features = right[layout.rhs[1]]
        fits = features == out[layout.out[1]] and left[layout.lhs[0]] == out[layout.out[0]]
        if odd or not groups or not fits or features % groups:
            continue
        spatial = zip(_rest(left, layout.lhs), _rest(right, layout.rhs), _rest(out, layout.out), strict=True)
        windows = [_even_window(*extents) for extents in spatial]
        known = tuple(window for window in windows if window is not None)
        if len(known) == len(windows):
            return Convolution(layout._replace(feature_groups=groups), known)
    return None


def _even_window(extent: int, kernel: int, out: int) -> _Window | None:
    """The window of about ``extent / out`` steps with as much padding on both sides; None for no such."""
    stride = max(round(extent / out), 1)
    total = (out - 1) * stride + kernel - extent
    if total < 0:  # windows leave a rest: it is not read
        if (extent - kernel) // stride + 1 != out:
            return None
        total = 0
    return _Window(stride, total // 2, total - total // 2)


def _rest(shape: _Shape, pair: tuple[int, int]) -> _Shape:
    return tuple(extent for axis, extent in enumerate(shape) if axis not in pair)


def _layouts(left: _Shape, right: _Shape, out: _Shape) -> Iterator[_Layout]:
    pairs = list(permutations(range(len(left)), 2))
    for lhs, rhs, made in product(pairs, pairs, pairs):
        batch, features = left[lhs[0]], left[lhs[1]]
        taken, given = right[rhs[0]], right[rhs[1]]
        if given != out[made[1]] or not min(taken, out[made[0]]):
            continue
        groups, batches = features // taken, batch // out[made[0]]
        whole = groups * taken == features and batches * out[made[0]] == batch
        if whole and 1 in {groups, batches} and groups and batches and given % (groups * batches) == 0:
            yield _Layout(lhs, rhs, made, groups, batches)


def _unusual(layout: _Layout) -> bool:
    """Orders layouts that frameworks use before others: dimensions of equal extent leave a choice."""
    return layout._replace(feature_groups=1, batch_groups=1) not in _USUAL + _USUAL_BACKWARD


@lru_cache(maxsize=4096)
def find_convolution(
    left: _Shape, right: _Shape, out: _Shape, spec: float, useful: float
) -> Convolution | None:
    """The plan whose FLOPs are nearest to ``useful``, None where none is within the tolerance."""
    best: Convolution | None = None
    for layout in sorted(_layouts(left, right, out), key=_unusual):
        kernel = _rest(right, layout.rhs)
        taken = right[layout.rhs[0]]
        if not isnan(spec) and 2.0 * prod(out) * taken * prod(kernel) != spec:
            continue
        spatial = zip(_rest(left, layout.lhs), kernel, _rest(out, layout.out), strict=True)
        choices = [_windows(*extents) for extents in spatial]
        each = 2.0 * out[layout.out[0]] * out[layout.out[1]] * taken
        for windows in islice(product(*choices), _MOST_WINDOWS):
            flops = each * prod(window.positions for window in windows)
            if best is None or abs(flops - useful) < abs(best.flops - useful):
                best = Convolution(layout, windows, flops)
        if best is not None and best.flops == useful:
            return best
    return best if best is not None and abs(best.flops - useful) <= _TOLERANCE * useful else None


@lru_cache(maxsize=4096)
def _windows(extent: int, kernel: int, out: int) -> tuple[_Window, ...]:
    """Windows that make ``out`` places of ``extent``, plain ones first; one for each number of positions."""
    if not min(extent, kernel, out) or kernel * out > _MOST_PLACES:
        return ()
    strides = sorted({1, max(1, extent // out), max(1, -(-extent // out))})
    holes = sorted({1, max(1, out // extent), max(1, -(-out // extent))})
    spread = sorted({1, max(1, extent // kernel), max(1, -(-extent // kernel))})
    found: dict[int, _Window] = {}
    for stride, lhs, rhs in product(strides, holes, spread):
        if sorted((stride, lhs, rhs))[1] > 1:
            continue
        reach = (kernel - 1) * rhs + 1
        total = (out - 1) * stride + reach - ((extent - 1) * lhs + 1)
        for low in dict.fromkeys((total // 2, total - total // 2, 0, total)):
            positions = _positions(extent, kernel, out, (stride, low, lhs, rhs))
            found.setdefault(positions, _Window(stride, low, total - low, lhs, rhs, positions))
    return tuple(window for positions, window in found.items() if positions)


def _positions(extent: int, kernel: int, out: int, window: tuple[int, int, int, int]) -> int:
    stride, low, lhs, rhs = window
    place = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * rhs - low
    return int(((place >= 0) & (place <= (extent - 1) * lhs) & (place % lhs == 0)).sum())


def convolution_text(left: Value, right: Value, result: Tensor, plan: Convolution) -> str:
    """One ``convolution``, right of the equals sign."""
    layout = plan.layout
    return (
        f"stablehlo.convolution({left}, {right}) dim_numbers = {_numbers(layout, left.type.rank)}, "
        f"window = {_window_text(plan.windows)} {{batch_group_count = {layout.batch_groups} : i64, "
        f"feature_group_count = {layout.feature_groups} : i64}} : ({left.type}, {right.type}) -> {result}"
    )


def _numbers(layout: _Layout, rank: int) -> str:
    given = f"{_labels(layout.lhs, 'bf', rank)}x{_labels(layout.rhs, 'io', rank)}"
    return f"{given}->{_labels(layout.out, 'bf', rank)}"


def _labels(pair: tuple[int, int], names: str, rank: int) -> str:
    spatial = iter(range(rank))
    named = dict(zip(pair, names, strict=True))
    return f"[{', '.join(named[axis] if axis in named else str(next(spatial)) for axis in range(rank))}]"


def _window_text(windows: tuple[_Window, ...]) -> str:
    pads = [[window.low, window.high] for window in windows]
    return (
        f"{{stride = {[window.stride for window in windows]}, pad = {pads}, "
        f"lhs_dilate = {[window.lhs_dilation for window in windows]}, "
        f"rhs_dilate = {[window.rhs_dilation for window in windows]}}}"
    )
