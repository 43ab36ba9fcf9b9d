"""Communication of several recordings is matched by group and number, else by order; clocks are aligned."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters.comm_matching import clock_shifts, match_profiles
from hespas.converters.tracks import joined_tracks
from hespas.graph import Diagnostics, MeasuredComms, Profile, StringTableBuilder

Talk = tuple[str, str, Sequence[int], int, float]
"""Kind, group, its ranks, number, start."""


def _profile(rank: int, talks: Sequence[Talk]) -> Profile:
    strings = StringTableBuilder()
    columns = {
        "kind_id": [strings.add(talk[0]) for talk in talks],
        "group_id": [strings.add(talk[1]) for talk in talks],
        "ranks_id": [strings.add(json.dumps(list(talk[2])) if talk[2] else "") for talk in talks],
        "sequence": [talk[3] for talk in talks],
        "event": list(range(len(talks))),
    }
    starts = np.array([talk[4] for talk in talks], np.float64)
    return Profile.of(
        f"r{rank}",
        ("H100",),
        strings.build(),
        start_ns=starts,
        duration_ns=np.ones(len(talks)),
        rank=np.full(len(talks), rank),
        stream=np.full(len(talks), 7),
        comms=MeasuredComms.of(**{name: np.array(column) for name, column in columns.items()}),
    )


def _joined(profiles: Sequence[Profile]) -> tuple[list[tuple[tuple[int, int], tuple[int, int]]], ...]:
    """Arrows of collectives and of messages as pairs of (profile, event)."""
    found = match_profiles(profiles)
    where = list(zip(found.profile.tolist(), found.event.tolist(), strict=True))
    return tuple([(where[one], where[other]) for one, other in rows] for rows in found.pairs())


def test_by_number_whatever_else_a_rank_does() -> None:
    one = _profile(0, [("allreduce", "0", [0, 1], 5, 9.0), ("allgather", "0", [0, 1], 4, 1.0)])
    other = _profile(1, [("allreduce", "0", [0, 1], 5, 3.0), ("allreduce", "1", [1, 2], 4, 4.0)])
    assert _joined([one, other]) == ([((0, 0), (1, 0))], [])


def test_by_order_where_all_did_as_many() -> None:
    ranks = [
        _profile(rank, [("allreduce", "", [], -1, 2.0 * turn) for turn in range(2)]) for rank in range(3)
    ]
    collectives, _ = _joined(ranks)
    assert sorted(collectives) == [((0, 0), (1, 0)), ((0, 1), (1, 1)), ((1, 0), (2, 0)), ((1, 1), (2, 1))]
    assert _joined([*ranks, _profile(3, [("allreduce", "", [], -1, 2.0)])]) == ([], [])


def test_a_message_goes_from_who_sends_to_who_receives() -> None:
    one = _profile(4, [("recv", "p", [4, 6], 9, 1.0), ("send", "p", [4, 6], 3, 2.0)])
    other = _profile(6, [("send", "p", [4, 6], 0, 1.0), ("recv", "p", [4, 6], 7, 2.0)])
    assert _joined([one, other]) == ([], [((1, 0), (0, 0)), ((0, 1), (1, 1))])


@pytest.mark.parametrize("ranks", [[], [0, 1, 2]])
def test_a_message_of_unknown_ends_has_no_arrow(ranks: list[int]) -> None:
    alone = _profile(0, [("send", "p", ranks, 0, 1.0)])
    assert _joined([alone, _profile(1, [("allreduce", "p", ranks, 3, 1.0)])]) == ([], [])


def test_arrows_lead_to_the_slices_of_their_ranks() -> None:
    ranks = [_profile(rank, [("allreduce", "0", [0, 1], n, 5.0 - n) for n in range(3)]) for rank in (0, 1)]
    scene = joined_tracks([("measured", each) for each in ranks], Diagnostics())
    assert scene.flows.kinds[int(scene.flows.kind[0])] == "collective"
    starts = np.concatenate([part.start_ns for part in scene.parts])
    assert sorted(scene.flows.source.tolist()) == [0, 1, 2]
    assert sorted(scene.flows.target.tolist()) == [3, 4, 5]
    assert np.array_equal(starts[scene.flows.source], starts[scene.flows.target])


@given(st.lists(st.integers(-(10**9), 10**9), min_size=1, max_size=5), st.integers(1, 6))
def test_clocks_agree_where_ranks_leave_together(offsets: list[int], shared: int) -> None:
    clock = [each for each in range(len(offsets)) for _ in range(shared)]
    instance = np.array(list(range(shared)) * len(offsets), np.int64)
    ends = [1000.0 * (row % shared) + offsets[row // shared] for row in range(len(clock))]
    shifts = clock_shifts(clock, instance, ends, [0.0] * len(offsets))
    moved = [end + shifts[which] for end, which in zip(ends, clock, strict=True)]
    assert moved == moved[:shared] * len(offsets)
