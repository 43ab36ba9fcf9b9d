"""Recipe of convolutions: layout, strides, padding and dilation inferred from shapes and FLOPs.

Several layouts may give the shapes; the one whose FLOPs, padding and dilation zeros left out, are those of
the graph is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice, permutations, product
from math import isnan, prod
from typing import NamedTuple

import numpy as np

from hespas.converters.stablehlo.replay_emit import Tensor, Value
from hespas.converters.stablehlo.replay_node import Node

__all__ = ["convolution"]

_MOST_DIMENSIONS = 5
_TOLERANCE = 0.005
_MOST_WINDOWS = 200
_MOST_PLACES = 1 << 22
"""Pairs of output and kernel place that are looked at to count those that multiply something."""

_Shape = tuple[int, ...]


class _Window(NamedTuple):
    """One spatial dimension; ``positions`` counts pairs of output and kernel place that multiply."""

    stride: int
    low: int
    high: int
    lhs_dilation: int
    rhs_dilation: int
    positions: int


class _Layout(NamedTuple):
    """Batch and feature dimension of input and output, input and output feature dimension of the kernel."""

    lhs: tuple[int, int]
    rhs: tuple[int, int]
    out: tuple[int, int]
    feature_groups: int
    batch_groups: int


class _Plan(NamedTuple):
    layout: _Layout
    windows: tuple[_Window, ...]
    flops: float


def convolution(node: Node) -> list[Value] | None:
    """A convolution of the first two operands with one result."""
    result = node.result
    if node.op != "convolution" or result is None or len(node.operands) != 2:
        return None
    left, right = node.operands
    if not _convolvable(left, right, result) or isnan(node.useful_flops):
        return None
    plan = _find(left.shape, right.shape, result.shape, node.flops, node.useful_flops)
    if plan is None:
        return None
    bound = node.bound()
    node.emitter.work(flops=plan.flops)
    numbers = _numbers(plan.layout, len(left.shape))
    text = (
        f"stablehlo.convolution({bound[0]}, {bound[1]}) dim_numbers = {numbers}, "
        f"window = {_window(plan.windows)} {{batch_group_count = {plan.layout.batch_groups} : i64, "
        f"feature_group_count = {plan.layout.feature_groups} : i64}} : ({left}, {right}) -> {result}"
    )
    return [node.emitter.add(text, result)]


def _convolvable(left: Tensor, right: Tensor, result: Tensor) -> bool:
    ranks = {len(left.shape), len(right.shape), len(result.shape)}
    alike = left.element is right.element and left.is_float == result.is_float
    numeric = (left.is_float and result.is_float) or (left.is_integer and result.is_integer)
    return alike and numeric and len(ranks) == 1 and 2 <= len(left.shape) <= _MOST_DIMENSIONS


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


@lru_cache(maxsize=4096)
def _find(left: _Shape, right: _Shape, out: _Shape, spec: float, useful: float) -> _Plan | None:
    """The plan whose FLOPs are nearest to ``useful``, None where none is within the tolerance."""
    best: _Plan | None = None
    for layout in _layouts(left, right, out):
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
                best = _Plan(layout, windows, flops)
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


def _numbers(layout: _Layout, rank: int) -> str:
    given = f"{_labels(layout.lhs, 'bf', rank)}x{_labels(layout.rhs, 'io', rank)}"
    return f"{given}->{_labels(layout.out, 'bf', rank)}"


def _labels(pair: tuple[int, int], names: str, rank: int) -> str:
    spatial = iter(range(rank))
    named = dict(zip(pair, names, strict=True))
    return f"[{', '.join(named[axis] if axis in named else str(next(spatial)) for axis in range(rank))}]"


def _window(windows: tuple[_Window, ...]) -> str:
    pads = [[window.low, window.high] for window in windows]
    return (
        f"{{stride = {[window.stride for window in windows]}, pad = {pads}, "
        f"lhs_dilate = {[window.lhs_dilation for window in windows]}, "
        f"rhs_dilate = {[window.rhs_dilation for window in windows]}}}"
    )
