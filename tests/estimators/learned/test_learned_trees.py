"""The stored form of trees: evaluated without the library that grew them, checked when loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from hespas.estimators.learned.ensemble import Forest
from hespas.graph.errors import InvariantError


def _two_trees() -> Forest:
    """x0 <= 1 ? (x1 <= 5 ? 1 : 2) : 4, plus x1 <= 5 ? 10 : 20."""
    return Forest(
        column=np.array([0, 1, 1], np.uint8),
        split=np.array([0, 0, 0], np.uint8),
        first=np.array([0, 0, 0], np.uint8),
        last=np.array([2, 1, 1], np.uint8),
        node_offsets=np.array([0, 2, 3], np.int32),
        leaf=np.array([1, 2, 4, 10, 20], np.int16),
        leaf_offsets=np.array([0, 3, 5], np.int32),
        edges=np.array([1.0, 5.0], np.float32),
        edge_offsets=np.array([0, 1, 2], np.int32),
        scale=1.0,
        baseline=0.5,
    )


def _table(*rows: tuple[float, float]) -> NDArray[np.float32]:
    return np.array(rows, np.float32)


def test_each_row_gets_the_leaves_its_splits_lead_to() -> None:
    said = _two_trees().predict(_table((0, 0), (1, 6), (2, 5), (1, 5), (9, 9)))
    assert said.tolist() == [11.5, 22.5, 14.5, 11.5, 24.5]


def test_rows_beyond_one_block_are_evaluated_too() -> None:
    rows = np.tile(_table((0, 0), (9, 9)), (5000, 1))
    assert np.array_equal(_two_trees().predict(rows), np.tile([11.5, 24.5], 5000))


def test_few_rows_and_many_give_the_same_sums() -> None:
    copies, two = 50, _two_trees()  # and after each pair a tree of a single leaf
    forest = replace(
        two,
        column=np.tile(two.column, copies),
        split=np.tile(two.split, copies),
        first=np.tile(two.first, copies),
        last=np.tile(two.last, copies),
        leaf=np.tile(np.array([1, 2, 4, 10, 20, 7], np.int16), copies),
        node_offsets=np.cumsum([0, *[2, 1, 0] * copies], dtype=np.int32),
        leaf_offsets=np.cumsum([0, *[3, 2, 1] * copies], dtype=np.int32),
        scale=0.1,
    )
    table = np.random.default_rng(1).uniform(0, 9, (4000, 2)).astype(np.float32)
    whole = forest.predict(table)
    for rows in (1, 40):
        blocks = [forest.predict(table[row : row + rows]) for row in range(0, 400, rows)]
        assert np.array_equal(whole[:400], np.concatenate(blocks))


def test_trees_of_single_leaves_have_one_sum() -> None:
    nothing = np.empty(0, np.uint8)
    leaves = replace(
        _two_trees(),
        column=nothing, split=nothing, first=nothing, last=nothing,
        node_offsets=np.zeros(3, np.int32),
        leaf=np.array([4, 30], np.int16),
        leaf_offsets=np.array([0, 1, 2], np.int32),
    )  # fmt: skip
    for rows in (1, 3, 5000):
        assert leaves.predict(np.zeros((rows, 2), np.float32)).tolist() == [34.5] * rows


def test_another_number_of_columns_is_refused() -> None:
    with pytest.raises(InvariantError, match="columns"):
        _two_trees().predict(np.zeros((1, 3), np.float32))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("column", np.array([0, 1, 2], np.uint8)),
        ("split", np.array([0, 1, 0], np.uint8)),
        ("last", np.array([3, 1, 1], np.uint8)),
        ("first", np.array([0, 1, 0], np.uint8)),
        ("leaf", np.array([1, 2, 4, 10], np.int16)),
        ("node_offsets", np.array([0, 1, 3], np.int32)),
        ("edge_offsets", np.array([0, 2, 3], np.int32)),
        ("edge_offsets", np.zeros(0, np.int32)),
        ("node_offsets", np.zeros(0, np.int32)),
        ("edges", np.array([2.0, np.nan], np.float32)),
    ],
)
def test_columns_that_contradict_each_other_are_refused(field: str, value: NDArray[np.generic]) -> None:
    changes: dict[str, NDArray[np.generic]] = {field: value}
    with pytest.raises(InvariantError):
        replace(_two_trees(), **changes)  # type: ignore[arg-type]
