"""Group sets and permutations compared with plain NumPy lists of ranks."""

from __future__ import annotations

import sys
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hespas.graph import ExplicitGroups, GroupSet, Permutation, StridedGroups, compress_groups
from hespas.graph.errors import InvariantError

Rows = NDArray[np.int64]


def rows_of(groups: GroupSet) -> list[list[int]]:
    return [members.tolist() for members in groups]


def check_against_rows(groups: GroupSet, rows: Rows) -> None:
    """Every question a group set answers, answered by looking."""
    assert rows_of(groups) == rows.tolist()
    assert groups.num_groups == len(rows)
    assert groups.num_ranks == rows.size
    assert groups.group_size == rows.shape[1]
    assert groups.max_group_size == rows.shape[1]
    for group, row in enumerate(rows.tolist()):
        assert [groups.group_of(rank) for rank in row] == [group] * len(row)
    outside = (-1, int(rows.min()) - 1, int(rows.max()) + 1, 10**9)
    assert {groups.group_of(rank) for rank in outside} == {-1}
    several = np.array([rank for row in groups for rank in row] + list(outside))
    assert groups.groups_of(several).tolist() == [groups.group_of(rank) for rank in several.tolist()]
    ascending = list(range(rows.size))
    assert groups.is_world(rows.size) == (rows.tolist() == [ascending])


@st.composite
def iotas(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Dimensions, their order, and a number of groups that divides the ranks."""
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(dims))))
    divisors = [groups for groups in range(1, prod(dims) + 1) if prod(dims) % groups == 0]
    return dims, list(order), draw(st.sampled_from(divisors))


@given(iotas())
def test_iota_lists_what_numpy_lists(case: tuple[list[int], list[int], int]) -> None:
    dims, order, num_groups = case
    rows = np.arange(prod(dims)).reshape(dims).transpose(order).reshape(num_groups, -1)
    check_against_rows(StridedGroups.from_iota(num_groups, rows.shape[1], dims, order), rows)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_mesh_lists_what_numpy_lists(sizes: list[int], data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    fixed = [axis for axis in range(len(sizes)) if axis not in axes]
    members = prod(sizes[axis] for axis in axes)
    rows = np.arange(prod(sizes)).reshape(sizes).transpose([*fixed, *axes]).reshape(-1, members)
    check_against_rows(StridedGroups.from_mesh(sizes, axes), rows)


@given(iotas(), st.integers(0, 100))
def test_compressing_strided_rows_finds_the_strided_form(
    case: tuple[list[int], list[int], int], base: int
) -> None:
    dims, order, num_groups = case
    rows = base + np.arange(prod(dims)).reshape(dims).transpose(order).reshape(num_groups, -1)
    groups = compress_groups(rows)
    assert rows_of(groups) == rows.tolist()
    direct = StridedGroups.from_iota(num_groups, rows.shape[1], dims, order)
    if isinstance(direct, StridedGroups) and isinstance(groups, StridedGroups):
        assert groups == StridedGroups(direct.group_digits, direct.member_digits, base)
    ascending = order == sorted(order)
    assert not ascending or isinstance(groups, StridedGroups), "an untransposed iota always has the form"


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_compressing_any_rows_lists_the_same_rows(groups: int, size: int, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(groups * size)))
    rows = np.array(ranks, np.int64).reshape(groups, size)
    assert rows_of(compress_groups(rows)) == rows.tolist()


@pytest.mark.parametrize(
    "rows",
    [[[0, 2, 4]], [[0], [3]], [[5, 4], [3, 2]], [[0, 0]], [[1, 3], [0, 2]]],
    ids=["holes", "far", "descending", "twice", "shuffled"],
)
def test_rows_without_strided_form_stay_listed(rows: list[list[int]]) -> None:
    groups = compress_groups(np.array(rows, np.int64))
    assert groups == ExplicitGroups.from_rows(rows)


def test_equal_splits_are_one_value_however_they_were_said() -> None:
    iota = StridedGroups.from_iota(4, 2, [8])
    mesh = StridedGroups.from_mesh([2, 2, 2], [2])
    listed = compress_groups(np.arange(8).reshape(4, 2))
    assert iota == mesh == listed
    assert len({iota, mesh, listed}) == 1


@pytest.mark.parametrize(
    ("num_groups", "group_size", "dims", "order"),
    [(2, 2, [5], None), (2, 2, [2, 2], [0, 0]), (1, 4, [2, 2], [0])],
)
def test_impossible_iota_is_refused(
    num_groups: int, group_size: int, dims: list[int], order: list[int] | None
) -> None:
    with pytest.raises(ValueError, match=r"iota|permutation"):
        StridedGroups.from_iota(num_groups, group_size, dims, order)


@pytest.mark.parametrize("digits", [((2, 2),), ((2, 1), (2, 1)), ((0, 1),), ((2, 1), (2, 4))])
def test_digits_that_do_not_tile_are_refused(digits: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InvariantError):
        StridedGroups((), digits)


@given(st.lists(st.lists(st.integers(0, 30), max_size=4, unique=True), max_size=4))
def test_explicit_groups_answer_by_looking(rows: list[list[int]]) -> None:
    groups = ExplicitGroups.from_rows(rows)
    assert rows_of(groups) == rows
    for rank in range(31):
        assert groups.group_of(rank) == next((at for at, row in enumerate(rows) if rank in row), -1)
    assert groups.groups_of(np.arange(31)).tolist() == [groups.group_of(rank) for rank in range(31)]
    sizes = {len(row) for row in rows}
    assert groups.group_size == (sizes.pop() if len(sizes) == 1 else -1)
    assert groups.max_group_size == max(map(len, rows), default=0)


def test_65536_ranks_take_a_few_integers() -> None:
    groups = StridedGroups.from_mesh([16, 256, 16], [1])
    assert (groups.num_groups, groups.group_size) == (256, 256)
    rank = 12_345
    assert rank in groups.members(groups.group_of(rank))
    parts = (groups, groups.group_digits, groups.member_digits, *groups.group_digits, *groups.member_digits)
    assert sum(map(sys.getsizeof, parts)) < 1000
    rows = np.stack(list(groups))
    assert compress_groups(rows) == groups


# --- permutations


def pairs_by_looking(
    num_ranks: int, size: int, stride: int, shift: int, wraps: bool
) -> list[tuple[int, int]]:
    """Move one digit of every rank, the long way."""
    pairs: list[tuple[int, int]] = []
    for rank in range(num_ranks):
        place = rank // stride % size
        moved = (place + shift) % size if wraps else place + shift
        if 0 <= moved < size:
            pairs.append((rank, rank + (moved - place) * stride))
    return pairs


@st.composite
def shifts(draw: st.DrawFn) -> tuple[int, int, int, int, bool]:
    size, stride, blocks = draw(st.integers(2, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    shift = draw(st.sampled_from([-1, 1]))
    return size * stride * blocks, size, stride, shift, draw(st.booleans())


@given(shifts())
def test_neighbour_shifts_are_symbolic(case: tuple[int, int, int, int, bool]) -> None:
    num_ranks, size, stride, shift, wraps = case
    pairs = pairs_by_looking(*case)
    permutation = Permutation.from_pairs(pairs, num_ranks)
    assert permutation.pairs is None, "a ring or an open chain along one digit"
    assert list(permutation) == pairs
    direct = Permutation(num_ranks, (size, stride), shift, wraps)
    assert list(direct) == pairs


@given(shifts(), st.data())
def test_any_part_of_a_shift_keeps_its_pairs(
    case: tuple[int, int, int, int, bool], data: st.DataObject
) -> None:
    num_ranks = case[0]
    pairs = data.draw(st.lists(st.sampled_from(pairs_by_looking(*case)), unique=True))
    check_pairs(pairs, num_ranks)


@given(st.integers(1, 10), st.data())
def test_any_permutation_keeps_its_pairs(num_ranks: int, data: st.DataObject) -> None:
    targets = data.draw(st.permutations(range(num_ranks)))
    sources = data.draw(st.permutations(range(num_ranks)))
    count = data.draw(st.integers(0, num_ranks))
    check_pairs(list(zip(sources[:count], targets[:count], strict=True)), num_ranks)


def check_pairs(pairs: list[tuple[int, int]], num_ranks: int) -> None:
    permutation = Permutation.from_pairs(pairs, num_ranks)
    target_of, source_of = dict(pairs), {target: source for source, target in pairs}
    assert list(permutation) == sorted(pairs)
    for rank in range(-1, num_ranks + 1):
        assert permutation.target_of(rank) == target_of.get(rank, -1)
        assert permutation.source_of(rank) == source_of.get(rank, -1)
    ranks = np.arange(-1, num_ranks + 1)
    assert permutation.targets_of(ranks).tolist() == [target_of.get(rank, -1) for rank in ranks.tolist()]
    assert permutation.sources_of(ranks).tolist() == [source_of.get(rank, -1) for rank in ranks.tolist()]


def test_shift_by_more_than_one_place_keeps_its_pairs() -> None:
    check_pairs([(rank, (rank + 3) % 8) for rank in range(8)], 8)
    check_pairs([(rank, rank + 2) for rank in range(6)], 8)


@pytest.mark.parametrize("pairs", [[(0, 1), (0, 2)], [(0, 1), (2, 1)], [(0, 4)], [(-1, 0)]])
def test_impossible_pairs_are_refused(pairs: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="rank"):
        Permutation.from_pairs(pairs, 4)


def test_ring_of_65536_ranks_is_a_few_integers() -> None:
    permutation = Permutation(65_536, (256, 16), 1, True)
    assert permutation.target_of(0) == 16
    assert permutation.source_of(0) == 255 * 16
    assert Permutation.from_pairs(list(permutation), 65_536) == permutation
