"""Sequences of collectives: unrolled loops, groups of a rank, and differences between two sequences."""

from __future__ import annotations

from math import nan

import pytest

from hespas.validators.capture.messages import RankMessage, sequence_difference

SUM = RankMessage("all_reduce", (0, 1), 8.0)
GATHER = RankMessage("all_gather", (0, 1), 4.0)


def test_equal_sequences_have_no_difference() -> None:
    assert sequence_difference(0, [SUM, GATHER], [SUM, GATHER]) == ([], False, 0)


def test_another_order_is_no_difference_by_itself() -> None:
    assert sequence_difference(0, [SUM, GATHER], [GATHER, SUM]) == ([], True, 0)


@pytest.mark.parametrize(
    "known", [RankMessage("all_reduce", None, 8.0), RankMessage("all_reduce", (0, 1), nan)]
)
def test_what_nobody_says_is_unlike_nothing(known: RankMessage) -> None:
    assert sequence_difference(0, [SUM], [known]) == ([], False, 0)


@pytest.mark.parametrize(
    "other",
    [
        RankMessage("all_gather", (0, 1), 8.0),
        RankMessage("all_reduce", (0, 2), 8.0),
        RankMessage("all_reduce", (0, 1), 9.0),
    ],
)
def test_kind_group_and_bytes_tell_apart(other: RankMessage) -> None:
    (found,), reordered, _ = sequence_difference(3, [GATHER, SUM], [GATHER, other])
    assert (found.rank, found.place, reordered) == (3, 1, False)
    assert (found.captured, found.measured) == (SUM.text(), other.text())


def test_one_more_and_one_less_are_told() -> None:
    (more,), _, _ = sequence_difference(0, [SUM], [SUM, GATHER])
    assert (more.place, more.captured, more.measured) == (1, "", GATHER.text())
    (less,), _, _ = sequence_difference(0, [SUM, SUM], [SUM])
    assert (less.place, less.captured, less.measured) == (1, SUM.text(), "")


def test_what_compilers_combine_has_the_same_bytes() -> None:
    both = RankMessage("all_reduce", (0, 1), 16.0)
    assert sequence_difference(0, [SUM, GATHER, SUM], [GATHER, both]) == ([], False, 2)
    (first, second), _, combined = sequence_difference(
        0, [SUM, SUM], [RankMessage("all_reduce", (0, 1), 17.0)]
    )
    assert (first.captured, second.captured, second.measured, combined) == (SUM.text(), SUM.text(), "", 0)
    elsewhere = RankMessage("all_reduce", (2, 3), 16.0)
    assert len(sequence_difference(0, [SUM, SUM], [elsewhere]).differences) == 2
