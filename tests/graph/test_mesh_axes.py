from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph import ExplicitGroups, GroupSet, StridedGroups
from hespas.graph.mesh import Mesh, axes_of

MESH = Mesh.of("data=8,model=4,expert=2")


@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_groups_along_whole_axes_are_named_after_them(sizes: list[int], data: st.DataObject) -> None:
    mesh = Mesh(tuple("abcd"[: len(sizes)]), tuple(sizes))
    places = range(len(sizes))
    chosen = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    groups = StridedGroups.from_mesh(mesh.sizes, chosen)
    assert axes_of(groups, mesh) == ",".join(mesh.names[place] for place in sorted(chosen))


@pytest.mark.parametrize(
    ("groups", "mesh", "told"),
    [
        (StridedGroups.all_ranks(64), MESH, "data,model,expert"),
        (StridedGroups(((64, 1),), ()), MESH, ""),
        (StridedGroups.all_ranks(32), MESH, "?"),
        (StridedGroups(((2, 1),), ((3, 2),)), Mesh.of("data=2,model=3"), "?"),
        (ExplicitGroups.from_rows([[0, 3], [1, 2]]), Mesh.of("data=4"), "?"),
    ],
)
def test_other_groups(groups: GroupSet, mesh: Mesh, told: str) -> None:
    assert axes_of(groups, mesh) == told


def test_parts_of_axes_are_told_as_shardy_does() -> None:
    # data = 8 is cut into 2, 2 and 2; the middle one has stride 2 * 8.
    middle = StridedGroups(((2, 32), (2, 8), (8, 1)), ((2, 16),))
    assert axes_of(middle, MESH) == "data:(2)2"
    outer = StridedGroups(((2, 8), (8, 1)), ((4, 16),))
    assert axes_of(outer, MESH) == "data:(1)4"
    across = StridedGroups(((4, 16), (2, 4), (2, 1)), ((2, 8), (2, 2)))
    assert axes_of(across, MESH) == "data:(4)2,model:(2)2"
