"""Forests of events and matches by number, against the plain definition of each."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters.linking import EventNesting, around_launch, enclosing, match_rows, nearest
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
    running = (thread == thread_asked) & (start <= moment) & (moment <= start + duration)
    if found >= 0:
        assert running[found]
        assert start[found] >= start[running].min()
    launch = np.array([-1, 0])
    around = around_launch(nesting, launch, np.array([thread_asked]), np.array([moment]))
    assert around.tolist() == [-1, found]


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
