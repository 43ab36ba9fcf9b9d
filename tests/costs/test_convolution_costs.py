"""Convolution costs by dimension numbers, checked by brute force."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.costs.contraction import valid_positions
from hespas.costs.operation import ConvAttributes, Cost, Tensor, WindowDim

MakeTensor = Callable[..., Tensor]
Price = Callable[..., Cost]


def brute_force(extent: int, output: int, dim: WindowDim) -> int:
    hits = 0
    for place in range(output):
        for tap in range(dim.size):
            at = place * dim.stride + tap * dim.rhs_dilation - dim.pad_low
            hits += 0 <= at <= (extent - 1) * dim.lhs_dilation and at % dim.lhs_dilation == 0
    return hits


@given(
    extent=st.integers(1, 12),
    output=st.integers(1, 14),
    dim=st.builds(
        WindowDim,
        size=st.integers(1, 9),
        stride=st.integers(1, 5),
        pad_low=st.integers(-4, 8),
        pad_high=st.integers(-4, 8),
        lhs_dilation=st.integers(1, 6),
        rhs_dilation=st.integers(1, 6),
    ),
)
def test_positions_are_counted_as_by_trying_all(extent: int, output: int, dim: WindowDim) -> None:
    assert valid_positions(extent, output, dim) == brute_force(extent, output, dim)


def test_positions_of_long_dimensions_cost_the_shorter_one() -> None:
    assert valid_positions(10**9, 10**9, WindowDim(3, pad_low=1)) == 3 * 10**9 - 2
    assert valid_positions(3, 3, WindowDim(10**9, pad_low=10**9)) == 3
    assert isnan(valid_positions(-1, 4, WindowDim(3)))


def nhwc(window: tuple[WindowDim, ...], groups: int = 1, batch_groups: int = 1) -> ConvAttributes:
    rank = len(window)
    spatial = tuple(range(1, rank + 1))
    last, taps = rank + 1, tuple(range(rank))
    return ConvAttributes(0, last, spatial, rank, last, taps, 0, last, spatial, window, groups, batch_groups)


def nchw(window: tuple[WindowDim, ...]) -> ConvAttributes:
    rank = len(window)
    spatial = tuple(range(2, rank + 2))
    return ConvAttributes(0, 1, spatial, 1, 0, spatial, 0, 1, spatial, window)


SAME = WindowDim(3, pad_low=1, pad_high=1)


def test_layouts_cost_the_same(tensor: MakeTensor, price: Price) -> None:
    channels_last = price(
        "convolution",
        [tensor("f32", 2, 16, 16, 8), tensor("f32", 3, 3, 8, 32)],
        [tensor("f32", 2, 16, 16, 32)],
        nhwc((SAME, SAME)),
    )
    channels_first = price(
        "convolution",
        [tensor("f32", 2, 8, 16, 16), tensor("f32", 32, 8, 3, 3)],
        [tensor("f32", 2, 32, 16, 16)],
        nchw((SAME, SAME)),
    )
    assert channels_last == channels_first
    assert channels_last.flops == 2 * 2 * 16 * 16 * 32 * 8 * 9
    assert channels_last.useful_flops == 2 * 2 * 32 * 8 * (16 * 3 - 2) ** 2


@pytest.mark.parametrize("rank", [1, 3])
def test_any_rank(tensor: MakeTensor, price: Price, rank: int) -> None:
    extents = (8,) * rank
    cost = price(
        "convolution",
        [tensor("f32", 2, *extents, 4), tensor("f32", *(3,) * rank, 4, 6)],
        [tensor("f32", 2, *extents, 6)],
        nhwc((SAME,) * rank),
    )
    assert cost.flops == 2 * 2 * 8**rank * 6 * 4 * 3**rank
    assert cost.useful_flops == 2 * 2 * 6 * 4 * 22**rank


def test_the_dilated_fixture_is_72_and_32(tensor: MakeTensor, price: Price) -> None:
    dim = WindowDim(3, stride=4, lhs_dilation=2)
    cost = price(
        "convolution",
        [tensor("i64", 1, 4, 4, 1), tensor("i64", 3, 3, 1, 1)],
        [tensor("i64", 1, 2, 2, 1)],
        nhwc((dim, dim)),
    )
    assert (cost.flops, cost.useful_flops) == (72, 32)


def test_depthwise_counts_its_group_only(tensor: MakeTensor, price: Price) -> None:
    cost = price(
        "convolution",
        [tensor("f32", 1, 8, 8, 16), tensor("f32", 3, 3, 1, 16)],
        [tensor("f32", 1, 8, 8, 16)],
        nhwc((SAME, SAME), groups=16),
    )
    (product,) = cost.contractions
    assert cost.flops == 2 * 64 * 16 * 9
    assert (product.batch, product.m, product.n, product.k) == (16, 64, 1, 9)
    assert 2 * prod((product.batch, product.m, product.n, product.k)) == cost.flops


def test_batch_groups_use_the_same_formula(tensor: MakeTensor, price: Price) -> None:
    plain = WindowDim(3)
    cost = price(
        "convolution",
        [tensor("f32", 4, 8, 8, 2), tensor("f32", 3, 3, 2, 6)],
        [tensor("f32", 2, 6, 6, 6)],
        nhwc((plain, plain), batch_groups=2),
    )
    assert cost.flops == cost.useful_flops == 2 * (2 * 6 * 6 * 6) * 2 * 9
    assert cost.contractions[0].batch == 2


def test_no_output_positions_cost_nothing(tensor: MakeTensor, price: Price) -> None:
    cost = price(
        "convolution",
        [tensor("f32", 1, 2, 1), tensor("f32", 3, 1, 1)],
        [tensor("f32", 1, 0, 1)],
        nhwc((WindowDim(3),)),
    )
    assert (cost.flops, cost.useful_flops) == (0, 0)


def test_without_dimension_numbers_it_is_unknown(tensor: MakeTensor, price: Price) -> None:
    x = tensor("f32", 1, 4, 4, 1)
    assert isnan(price("convolution", [x, x], [x]).flops)
