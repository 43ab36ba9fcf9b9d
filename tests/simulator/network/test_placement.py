"""Placement of groups: members, strides and neighbours along each dimension of a system."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import ExplicitGroups, Permutation, StridedGroups
from hespas.hardware import load_system
from hespas.simulator.network.placement import Footprint, footprint_of, place_groups, place_messages

NODES = load_system("dgx-h100").sized(64)
SLICE = load_system("tpu-v5p").sized((4, 4, 4))


@pytest.mark.parametrize(
    ("groups", "members", "sharers"),
    [
        (StridedGroups.all_ranks(64), (8, 8), (1, 8)),
        (StridedGroups(((8, 8),), ((8, 1),)), (8, 1), (1, 8)),  # eight within each node
        (StridedGroups(((8, 1),), ((8, 8),)), (1, 8), (1, 8)),  # one of each node: eight rails at once
        (StridedGroups(((32, 2),), ((2, 1),)), (2, 1), (1, 8)),
        (StridedGroups(((4, 16),), ((16, 1),)), (8, 2), (1, 8)),
    ],
)
def test_groups_of_a_cluster(
    groups: StridedGroups, members: tuple[int, ...], sharers: tuple[int, ...]
) -> None:
    placed = place_groups(groups, NODES, 64)
    (footprint,) = placed.footprints
    assert (footprint.ranks, footprint.members, footprint.sharers) == (groups.group_size, members, sharers)
    assert set(placed.which.tolist()) == {0}


def test_groups_that_lie_unlike_have_footprints_of_their_own() -> None:
    """Groups of six ranks in nodes of eight: two of the first four leave their node."""
    groups = ExplicitGroups.from_rows([list(range(start, start + 6)) for start in range(0, 24, 6)])
    placed = place_groups(groups, load_system("dgx-h100").sized(24), 24)
    which: list[int] = placed.which[::6].tolist()
    members = [placed.footprints[number].members for number in which]
    assert members == [(6, 1), (4, 2), (4, 2), (6, 1)]


def test_one_that_has_the_network_to_itself() -> None:
    alone = footprint_of(NODES, np.arange(0, 64, 8))
    assert alone == Footprint(8, (1, 8), (1, 1), (1, 1))
    uneven = footprint_of(load_system("dgx-h100").sized(12), np.arange(12))
    assert (uneven.ranks, uneven.members, uneven.sharers) == (12, (8, 2), (1, 8))


def test_groups_on_a_torus() -> None:
    along_x = place_groups(StridedGroups(((16, 4),), ((4, 1),)), SLICE, 64).footprints
    assert along_x == (Footprint(4, (4, 1, 1), (1, 1, 1), (1, 1, 1)),)
    along_z = place_groups(StridedGroups(((16, 1),), ((4, 16),)), SLICE, 64).footprints
    assert along_z == (Footprint(4, (1, 1, 4), (1, 1, 1), (1, 1, 1)),)
    # Every second device of each line: two groups lie between each other and share the links.
    every_second = place_groups(StridedGroups(((16, 4), (2, 1)), ((2, 2),)), SLICE, 64).footprints
    assert every_second == (Footprint(2, (2, 1, 1), (2, 1, 1), (2, 1, 1)),)


def test_ranks_of_no_group_have_no_place() -> None:
    placed = place_groups(ExplicitGroups.from_rows([[0, 1], [4, 5, 6]]), NODES, 64)
    assert placed.which[:8].tolist() == [0, 0, -1, -1, 1, 1, 1, -1]
    assert [each.ranks for each in placed.footprints] == [2, 3]


@settings(max_examples=60)
@given(st.data())
def test_members_are_those_that_counting_finds(data: st.DataObject) -> None:
    sizes = (8, data.draw(st.integers(2, 5)))
    system = load_system("dgx-h100").sized(sizes)
    members = data.draw(st.sets(st.integers(0, prod(sizes) - 1), min_size=1))
    per_node = [sum(rank // 8 == node for rank in members) for node in range(sizes[1])]
    found = footprint_of(system, np.array(sorted(members)))
    assert found.ranks == len(members)
    assert found.members == (max(per_node), sum(count > 0 for count in per_node))


def test_messages_say_how_far_they_go() -> None:
    ring = Permutation(64, digit=(64, 1), shift=1)
    sends, receives = place_messages(ring, NODES, 64)
    assert sends[:9].tolist() == [[1, 0]] * 7 + [[1, 1], [1, 0]]
    assert receives[0].tolist() == [1, 1]
    sends, _ = place_messages(ring, SLICE, 64)
    assert sends[3].tolist() == [1, 1, 0]  # from the end of a line to the next one: around, and up
    open_end = Permutation(64, digit=(64, 1), shift=1, wraps=False)
    assert place_messages(open_end, NODES, 64)[0][63].tolist() == [0, 0]
