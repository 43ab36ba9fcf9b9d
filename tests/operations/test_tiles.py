"""Padding of arrays to whole tiles of TPU memory."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.operations import Labels, Operations, build
from hespas.operations.tiles import TILED, elements_in_tiles, padded, padding_of, padding_of_shape

SIZE = st.integers(1, 70_000)
SHAPE = st.lists(st.integers(1, 700), max_size=5)


def adds(rows: float, columns: float) -> Operations:
    return build.elementwise(
        "vector",
        Labels.constant("f32", 1),
        op=Labels.constant("add", 1),
        rows=np.array([rows]),
        columns=np.array([columns]),
        passes=np.array([3.0]),
        flops_per_element=np.ones(1),
    )


def held(rows: float, columns: float) -> float:
    return float(elements_in_tiles(np.array([rows]), np.array([columns]))[0])


@given(SIZE, st.sampled_from((1.0, 2.0, 8.0, 128.0)))
def test_padding_is_to_the_next_whole_tile(size: int, tile: float) -> None:
    found = float(padded(np.array([float(size)]), tile)[0])
    assert found % tile == 0
    assert size <= found < size + tile


@pytest.mark.parametrize(
    ("rows", "columns", "elements"),
    [
        (8, 128, 1024),
        (9, 128, 2048),
        (4095, 513, 4096 * 520),  # 513 in 65 x 8 rows, 4,095 in 32 x 128 columns
        (640, 832, 640 * 832),
        (704, 832, 704 * 896),
        (1, 1000, 1024),
        (3, 1000, 4 * 1024),
        (1, 1, 128),
    ],
)
def test_matrices_by_hand(rows: float, columns: float, elements: float) -> None:
    assert held(rows, columns) == elements


@given(SIZE, SIZE, st.integers(0, 300))
def test_tiles_hold_all_and_nothing_larger_takes_fewer(rows: int, columns: int, more: int) -> None:
    found = held(rows, columns)
    assert found >= rows * columns
    assert found == held(columns, rows)
    assert held(rows + more, columns) >= found
    assert held(rows, columns + more) >= found


@given(SHAPE)
def test_the_order_of_dimensions_does_not_matter(shape: list[int]) -> None:
    assert padding_of_shape(shape) == padding_of_shape(shape[::-1]) >= 1


@given(st.lists(st.integers(1, 700), min_size=2, max_size=4), st.integers(1, 40))
def test_copies_of_an_array_pad_no_more_than_it(shape: list[int], copies: int) -> None:
    assert padding_of_shape([copies, *shape]) <= padding_of_shape(shape) * (1 + 1e-12)


def test_shapes_by_hand() -> None:
    assert padding_of_shape([8, 96, 8]) * prod([8, 96, 8]) == 8 * 8 * 128
    assert padding_of_shape([1000]) * 1000 == 1024
    assert padding_of_shape([]) == 128
    assert isnan(padding_of_shape([4, 0]))


def test_what_a_table_does_not_state_is_told_from_rows_and_columns() -> None:
    ops = adds(4095, 513)
    assert padding_of(ops) == pytest.approx([4096 * 520 / (4095 * 513)])
    assert padding_of(replace(ops, dims={**ops.dims, TILED: np.array([1.5])})).tolist() == [1.5]
    assert padding_of(replace(ops, dims={**ops.dims, TILED: np.array([np.nan])})) == pytest.approx(
        [4096 * 520 / (4095 * 513)]
    )
    assert padding_of(replace(ops, dims={})).tolist() == [1.0]
