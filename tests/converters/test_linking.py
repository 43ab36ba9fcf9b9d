"""Forests of events and matches by number, against the plain definition of each."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters import linking
from hespas.converters.linking import (
    EventNesting,
    around_launch,
    common_order,
    enclosing,
    exclusive,
    match_rows,
    nearest,
    overlapping,
    pair,
)
from hespas.graph.columns import IntArray

_EVENTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(0, 8)), max_size=14)


def columns(rows: list[tuple[int, ...]], width: int) -> list[IntArray]:
    return list(np.array(rows, np.int64).reshape(-1, width).T.copy())


def climb(parent: list[int], wanted: list[bool], start: int) -> int:
    while start >= 0 and not wanted[start]:
        start = parent[start]
    return start


@given(_EVENTS, st.lists(st.booleans(), min_size=14, max_size=14))
def test_the_nearest_is_the_first_on_the_way_out(
    events: list[tuple[int, int, int]], marks: list[bool]
) -> None:
    thread, start, duration = columns(list(events), 3)
    parent = EventNesting.of(thread, start, start + duration).parent
    wanted = np.array(marks[: len(parent)], np.bool_)
    rows = np.arange(-1, len(parent))
    expected = [climb(parent.tolist(), wanted.tolist(), row) for row in rows.tolist()]
    assert nearest(wanted, parent, rows).tolist() == expected


@given(_EVENTS)
def test_what_encloses_and_overtakes_event_by_event(events: list[tuple[int, int, int]]) -> None:
    """Of the events that have started and neither ended nor been overtaken, those that end before the new one
    are overtaken by it; the last of the others contains it.
    """
    thread, start, duration = columns(list(events), 3)
    end = start + duration
    parent, overtaken = enclosing(thread, start, duration)
    expected, overtakers = [-1] * len(events), [-1] * len(events)
    running: list[int] = []
    for row in np.lexsort((-duration, start, thread)).tolist():
        running = [other for other in running if thread[other] == thread[row]]
        while running and end[running[-1]] <= start[row]:
            running.pop()
        while running and end[running[-1]] < end[row]:
            overtakers[running.pop()] = row
        expected[row] = running[-1] if running else -1
        running.append(row)
    assert parent.tolist() == expected
    assert overtaken.tolist() == overtakers


def test_an_inner_event_and_an_overtaker_by_hand() -> None:
    """Thread 1: 0-10 holds 2-4, which is followed by 3-12 from the inside of both. Thread 2 has one event."""
    thread, start, duration = np.array([1, 1, 1, 2]), np.array([0, 2, 3, 5]), np.array([10, 2, 9, 1])
    parent, overtaken = enclosing(thread, start, duration)
    assert parent.tolist() == [-1, 0, -1, -1]
    assert overtaken.tolist() == [2, 2, -1, -1]


@given(_EVENTS)
def test_what_encloses_holds_the_whole_event(events: list[tuple[int, int, int]]) -> None:
    thread, start, duration = columns(list(events), 3)
    end = start + duration
    parent, overtaken = enclosing(thread, start, duration)
    for row, outer in enumerate(parent.tolist()):
        if outer >= 0:
            assert thread[outer] == thread[row]
            assert start[outer] <= start[row]
            assert end[row] <= end[outer]
    for row, other in enumerate(overtaken.tolist()):
        if other >= 0:
            assert start[row] <= start[other] < end[row] < end[other]


@given(_EVENTS, st.integers(0, 2), st.integers(0, 20))
def test_the_innermost_runs_at_the_moment(
    events: list[tuple[int, int, int]], thread_asked: int, moment: int
) -> None:
    thread, start, duration = columns(list(events), 3)
    nesting = EventNesting.of(thread, start, start + duration)
    [found] = nesting.innermost(np.array([thread_asked]), np.array([moment])).tolist()
    # Outwards from the last event of the thread that has started by then, the first that has not ended.
    started = [row for row in nesting.order.tolist() if thread[row] == thread_asked and start[row] <= moment]
    expected = started[-1] if started else -1
    while expected >= 0 and start[expected] + duration[expected] < moment:
        expected = int(nesting.parent[expected])
    assert found == expected
    launch = np.array([-1, 0])
    around = around_launch(nesting, launch, np.array([thread_asked]), np.array([moment]))
    assert around.tolist() == [-1, found]


def test_the_innermost_event_of_many_moments() -> None:
    """0-10 holds 2-6 and 7-9 on thread 1; thread 2 has 4-5. Ends belong to events."""
    thread, start, end = np.array([1, 1, 1, 2]), np.array([0, 2, 7, 4]), np.array([10, 6, 9, 5])
    nesting = EventNesting.of(thread, start, end)
    moments = np.array([-1, 0, 1, 2, 6, 7, 9, 10, 11])
    of_one = nesting.innermost(np.full(len(moments), 1), moments)
    assert of_one.tolist() == [-1, 0, 0, 1, 1, 2, 2, 0, -1]
    assert nesting.innermost(np.array([2, 2, 2, 2, 0, 3]), np.array([3, 4, 5, 6, 5, 5])).tolist() == [
        -1, 3, 3, -1, -1, -1,
    ]  # fmt: skip
    nothing = EventNesting.of(*(np.empty(0, np.int64),) * 3)
    assert nothing.innermost(np.array([1, 2]), np.array([0, 5])).tolist() == [-1, -1]


def test_of_events_that_start_together_the_longest_is_outside() -> None:
    nesting = EventNesting.of(np.array([1, 1, 1]), np.array([0, 0, 0]), np.array([2, 10, 6]))
    assert nesting.order.tolist() == [1, 2, 0]
    assert nesting.parent.tolist() == [2, -1, 1]


def test_events_without_a_thread_lead_to_their_parents() -> None:
    nesting = EventNesting.of(np.array([1, 1]), np.array([0, 2]), np.array([10, 6]))
    more = nesting.with_parents(np.array([1, -1]), np.array([3, 4]))
    assert more.parent.tolist() == [-1, 0, 1, -1]
    assert more.innermost(np.array([1, 1]), np.array([5, 8])).tolist() == [1, 0]


@given(_EVENTS, st.integers(1, 5))
def test_blocks_do_not_show(events: list[tuple[int, int, int]], block: int) -> None:
    thread, start, duration = columns(list(events), 3)
    whole = EventNesting.of(thread, start, start + duration).parent.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "_BLOCK", block)
        assert EventNesting.of(thread, start, start + duration).parent.tolist() == whole


@given(_EVENTS, st.lists(st.booleans(), min_size=14, max_size=14))
def test_only_chosen_events_nest(events: list[tuple[int, int, int]], marks: list[bool]) -> None:
    thread, start, duration = columns(list(events), 3)
    chosen = np.flatnonzero(np.array(marks[: len(events)], np.bool_))
    nesting = EventNesting.of(thread, start, start + duration, chosen)
    alone = EventNesting.of(thread[chosen], start[chosen], (start + duration)[chosen])
    expected = np.full(len(events), -1, np.int64)
    expected[chosen] = [chosen[row] if row >= 0 else -1 for row in alone.parent.tolist()]
    assert nesting.parent.tolist() == expected.tolist()
    assert nesting.order.tolist() == chosen[alone.order].tolist()


@pytest.mark.parametrize("far", [0, 2**31 - 1, 2**31, 2**62])
def test_numbers_far_apart_match(far: int) -> None:
    known = [np.array([0, far, 5, 5]), np.array([far, 0, 1, 1])]
    wanted = [np.array([5, far, far, 0, 5]), np.array([1, 0, 1, far, -1])]
    expected = [2, 1, -1, 0, -1] if far else [2, 0, -1, 0, -1]
    assert match_rows(known, wanted).tolist() == expected
    assert match_rows([np.empty(0, np.int64)], [np.array([1, 2])]).tolist() == [-1, -1]


def test_a_number_below_zero_in_the_last_column_alone_matches_nothing() -> None:
    known = [np.array([7, 7, 7]), np.array([-1, 2, 2]), np.array([3, -1, 4])]
    assert match_rows(known, known).tolist() == [0, -1, 2]


@given(
    st.lists(st.tuples(st.integers(-2, 3), st.integers(-2, 3)), max_size=10),
    st.lists(st.tuples(st.integers(-2, 3), st.integers(-2, 3)), max_size=10),
)
def test_the_first_row_with_the_numbers_matches(
    known: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    found = match_rows(columns(list(known), 2), columns(list(wanted), 2)).tolist()
    expected = [known.index(each) if each in known and each[1] >= 0 else -1 for each in wanted]
    assert found == expected


@given(_EVENTS)
def test_an_event_is_inside_the_last_one_that_runs_when_it_starts(events: list[tuple[int, int, int]]) -> None:
    thread, start, duration = columns(list(events), 3)
    end = start + duration
    nesting = EventNesting.of(thread, start, end)
    assert sorted(nesting.order.tolist()) == list(range(len(events)))
    placed: list[int] = []
    for row in nesting.order.tolist():
        outer = [
            other
            for other in placed
            if thread[other] == thread[row] and (end[other] > start[row] or end[other] >= end[row])
        ]
        # An event that has ended is left for good, so that only unbroken chains of parents count.
        chain = placed[-1] if placed and thread[placed[-1]] == thread[row] else -1
        while chain >= 0 and chain not in outer:
            chain = int(nesting.parent[chain])
        assert nesting.parent[row] == chain
        placed.append(row)


@given(_EVENTS)
def test_each_moment_belongs_to_the_last_started_operation_that_runs(
    events: list[tuple[int, int, int]],
) -> None:
    thread, start, duration = columns(list(events), 3)
    end = start + duration
    order = np.lexsort((-end, start, thread)).tolist()
    expected = [0] * len(events)
    for owner in range(3):
        for moment in range(25):
            running = [
                row
                for row in order
                if thread[row] == owner and start[row] <= moment and moment + 1 <= end[row]
            ]
            if running:
                expected[running[-1]] += 1
    assert exclusive(thread, start, end).tolist() == expected


@given(_EVENTS)
def test_a_slice_overlaps_if_an_earlier_one_of_its_track_runs(events: list[tuple[int, int, int]]) -> None:
    track, start, duration = columns(list(events), 3)
    order = np.lexsort((-duration, start, track)).tolist()
    expected = [False] * len(events)
    for place, row in enumerate(order):
        earlier = [other for other in order[:place] if track[other] == track[row]]
        expected[row] = any(start[row] < start[other] + duration[other] for other in earlier)
    assert overlapping(track, start, duration).tolist() == expected
    assert overlapping(track, start.astype(np.float64), duration.astype(np.float64)).tolist() == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.booleans()), max_size=14))
def test_an_end_takes_the_last_begin_of_its_track(events: list[tuple[int, int, bool]]) -> None:
    track = np.array([event[0] for event in events], np.int64)
    time = np.array([event[1] for event in events], np.int64)
    begins = np.array([event[2] for event in events], np.bool_)
    opened: dict[int, list[int]] = {}
    expected: set[tuple[int, int]] = set()
    orphans = 0
    for row in sorted(range(len(events)), key=lambda row: (events[row][0], events[row][1], row)):
        waiting = opened.setdefault(events[row][0], [])
        if begins[row]:
            waiting.append(row)
        elif waiting:
            expected.add((waiting.pop(), row))
        else:
            orphans += 1
    expected |= {(row, -1) for waiting in opened.values() for row in waiting}
    found = pair(track, time, begins)
    assert set(zip(found.begin.tolist(), found.end.tolist(), strict=True)) == expected
    assert (len(found.begin), found.orphans) == (len(expected), orphans)
    chosen = np.flatnonzero(track == 1)
    part = pair(track, time, begins, chosen)
    assert set(zip(part.begin.tolist(), part.end.tolist(), strict=True)) == {
        (begin, end) for begin, end in expected if track[begin] == 1
    }


def _longest_length(first: list[int], second: list[int]) -> int:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for row, value in enumerate(first):
        for column, other in enumerate(second):
            longer = max(table[row][column + 1], table[row + 1][column])
            table[row + 1][column + 1] = table[row][column] + 1 if value == other else longer
    return table[-1][-1]


_SEQUENCES = st.lists(st.integers(0, 3), max_size=30)


@given(_SEQUENCES, _SEQUENCES)
def test_the_common_order_is_a_longest_one(first: list[int], second: list[int]) -> None:
    pairs = common_order(first, second)
    assert all(first[left] == second[right] for left, right in pairs)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(pairs))
    assert len(pairs) == _longest_length(first, second)


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_within_a_window_the_order_is_a_longest_one(first: list[int], second: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "_WINDOW", 8)
        assert len(common_order(first, second)) == _longest_length(first, second)


@pytest.mark.parametrize("lead", [[], [10, 11, 12, 13]])
def test_matches_at_the_end_of_the_last_window_count(lead: list[int]) -> None:
    """Elsewhere matches in the second half of a window are left to the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "_WINDOW", 8)
        pairs = common_order([*lead, 1, 2, 3, 4], [*lead, 0, 0, 0, 0, 1, 2, 3, 4])
    start = len(lead)
    expected = [(start + place, start + 4 + place) for place in range(4)]
    assert pairs == [(place, place) for place in range(start)] + expected


@given(_SEQUENCES, _SEQUENCES, st.integers(1, 4))
def test_windows_keep_the_order(first: list[int], second: list[int], half: int) -> None:
    """Across windows no element is used twice, and equal records align completely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "_WINDOW", 2 * half)
        pairs = common_order(first, second)
        assert common_order(first, first) == [(place, place) for place in range(len(first))]
    assert all(first[left] == second[right] for left, right in pairs)
    assert all(one[0] < two[0] and one[1] < two[1] for one, two in pairwise(pairs))


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 12), st.integers(0, 12))
def test_windows_bridge_gaps_of_less_than_half_of_them(
    at: int, other_at: int, missing: int, other_missing: int
) -> None:
    """Two records of 300 different operations, each with a gap, align completely outside the gaps."""
    whole = list(range(300))
    first, second = whole[:at] + whole[at + missing :], whole[:other_at] + whole[other_at + other_missing :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "_WINDOW", 32)
        pairs = common_order(first, second)
    assert [first[left] for left, _ in pairs] == sorted(set(first) & set(second))
    assert all(first[left] == second[right] for left, right in pairs)


def test_unlike_records_have_no_common_order() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linking, "_WINDOW", 8)
        assert common_order([1] * 40, [2] * 50) == []
        assert common_order([1] * 40 + [3], [2] * 40 + [3]) == [(40, 40)]
    assert common_order([], [1]) == common_order([1], []) == []
