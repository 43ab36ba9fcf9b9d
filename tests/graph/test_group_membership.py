"""Groups, peers and hashes of each rank, compared with a search of every list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import ExplicitGroups, GroupSet, Permutation, StridedGroups, compress_groups
from hespas.graph.groups import first_group, groups_text, member_rows, membership_of, peers_of, salted

_ROWS = st.lists(st.lists(st.integers(-2, 12), max_size=4), max_size=4)
_STRIDED = st.sampled_from(
    [
        StridedGroups.all_ranks(6),
        StridedGroups.from_mesh([2, 3], [0]),
        StridedGroups.from_mesh([2, 3], [1]),
        StridedGroups(((2, 2),), ((2, 1),), base=3),
        StridedGroups(((2, 1),), ((3, 2),), base=5),
    ]
)


def rows_of(groups: GroupSet) -> list[list[int]]:
    return [members.tolist() for members in groups]


@given(_ROWS.map(ExplicitGroups.from_rows) | _STRIDED, st.integers(0, 12))
def test_membership_by_looking(groups: GroupSet, num_ranks: int) -> None:
    """The first list that has a rank decides; lists with the same ranks in any order are one group."""
    rows = rows_of(groups)
    known: list[tuple[int, ...]] = [(0, 1)]
    uids = {np.array([groups.communicator, 0, 1], np.int64).tobytes(): 0}
    found = membership_of(groups, num_ranks, uids, known)
    expected = [next((at for at, row in enumerate(rows) if rank in row), -1) for rank in range(num_ranks)]
    assert found.group.tolist() == expected
    distinct = [[0, 1]]
    for row, uid, is_first in zip(rows, found.uid.tolist(), found.is_first.tolist(), strict=True):
        assert is_first == (sorted(row) not in distinct)
        if is_first:
            distinct.append(sorted(row))
        assert distinct[uid] == sorted(row)
    assert [sorted(row) for row in known] == distinct
    assert [list(row) for row in groups.rows_of_ranks()] == rows
    listed = member_rows(groups)
    assert (listed.tolist() if isinstance(listed, np.ndarray) else [list(row) for row in listed]) == rows


def test_communicators_separate_groups_of_the_same_ranks() -> None:
    uids: dict[bytes, int] = {}
    known: list[tuple[int, ...]] = []
    for communicator in (0, 7, 0):
        membership_of(StridedGroups((), ((4, 1),), communicator=communicator), 4, uids, known)
    assert known == [(0, 1, 2, 3)] * 2


def test_group_sets_far_beyond_the_job_count_as_empty() -> None:
    known: list[tuple[int, ...]] = []
    found = membership_of(StridedGroups.all_ranks(2**20 + 5), 4, {}, known)
    assert (found.group.tolist(), found.uid.tolist(), known) == ([-1] * 4, [], [])
    most = membership_of(StridedGroups.from_mesh([2, 4], [1]), 4, {}, known)
    assert most.group.tolist() == [0] * 4


@given(_ROWS.map(ExplicitGroups.from_rows) | _STRIDED, st.integers(1, 12))
def test_groups_that_hold_all_ranks(groups: GroupSet, num_ranks: int) -> None:
    rows = rows_of(groups)
    listed = {rank for row in rows for rank in row}
    assert groups.holds_all(num_ranks) == (set(range(num_ranks)) <= listed)
    assert groups.is_world(num_ranks) == (rows == [list(range(num_ranks))])
    several = np.arange(-1, 15)
    assert groups.groups_of(several).tolist() == [groups.group_of(rank) for rank in several.tolist()]


def test_the_world_of_many_ranks() -> None:
    world = ExplicitGroups.from_rows([range(1000)])
    assert world.is_world(len(world.rows[0]))
    assert not world.is_world(999)
    assert not ExplicitGroups.from_rows([range(500), range(500, 1000)]).is_world(500)
    assert not StridedGroups((), ((4, 1),), base=4).is_world(4)
    assert StridedGroups.all_ranks(1).is_world(1)


@pytest.mark.parametrize("shape", [(0, 0), (0, 2), (3, 0)])
def test_lists_without_ranks_stay_listed(shape: tuple[int, ...]) -> None:
    rows = np.zeros(shape, np.int64)
    groups = compress_groups(rows)
    assert isinstance(groups, ExplicitGroups)
    assert (groups.num_groups, groups.num_ranks) == (shape[0], 0)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (StridedGroups.all_ranks(8), "all ranks"),
        (StridedGroups.from_mesh([2, 4], [0]), "4 groups of 2, the first 0 4"),
        (StridedGroups((), ((4, 1),), base=4), "1 group of 4, the first 4 5 6 7"),
        (ExplicitGroups.from_rows([[3], [0, 5, 2]]), "2 groups of up to 3, the first 3"),
        (ExplicitGroups.from_rows([]), "0 groups of up to 0"),
    ],
)
def test_descriptions(groups: GroupSet, text: str) -> None:
    assert groups_text(groups, 8) == text


def test_descriptions_show_the_first_ranks() -> None:
    groups = StridedGroups(((2, 1),), ((2000, 2),))
    shown = " ".join(map(str, first_group(groups)))
    assert groups_text(groups, 4000) == f"2 groups of 2,000, the first {shown} ..."
    assert first_group(groups) == tuple(range(0, 2 * len(first_group(groups)), 2))


@given(st.permutations(range(6)), st.integers(0, 6), st.integers(1, 8))
def test_peers_by_looking(order: list[int], count: int, num_ranks: int) -> None:
    """Pairs with a rank outside of the job are left out."""
    pairs = [(rank, order[rank]) for rank in range(count)]
    inside = [pair for pair in pairs if max(pair) < num_ranks]
    for permutation in (Permutation.from_pairs(pairs, 6), Permutation(6, pairs=tuple(pairs))):
        found = peers_of(permutation, num_ranks)
        assert found.target.tolist() == [dict(inside).get(rank, -1) for rank in range(num_ranks)]
        sources = {target: source for source, target in inside}
        assert found.source.tolist() == [sources.get(rank, -1) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [3, 8, 12])
def test_peers_of_a_ring_in_a_smaller_job(num_ranks: int) -> None:
    found = peers_of(Permutation(8, (8, 1), 1, True), num_ranks)
    ring = [(rank + 1) % 8 if rank < 8 else -1 for rank in range(num_ranks)]
    back = [(rank - 1) % 8 if rank < 8 else -1 for rank in range(num_ranks)]
    assert found.target.tolist() == [rank if rank < num_ranks else -1 for rank in ring]
    assert found.source.tolist() == [rank if rank < num_ranks else -1 for rank in back]


def test_hashes_are_those_of_splitmix64() -> None:
    """First outputs of SplitMix64 with the seed 1234567 (rosettacode.org, Pseudo-random numbers/Splitmix64);
    salts count the steps of the generator.
    """
    seed = np.array([(1234567 - 0x2545F4914F6CDD1D) % 2**64], np.uint64)
    outputs = [int(salted(seed, salt)[0]) for salt in (1, 2, 3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]
