"""Intervals of time compared with a count of each moment."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hespas.graph.timeline import layers_of, united

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=30)


@given(SPANS)
def test_united_intervals_hold_the_same_moments(spans: list[tuple[int, int]]) -> None:
    start = np.array([first for first, _ in spans], np.float64)
    end = np.array([first + length for first, length in spans], np.float64)
    first, last = united(start, end)
    assert (first[1:] > last[:-1]).all()
    moments = np.arange(0.25, 40, 0.5)[:, None]
    before = ((start <= moments) & (moments < end)).any(axis=1)
    after = ((first <= moments) & (moments < last)).any(axis=1)
    assert (before == after).all()


@given(SPANS)
def test_layers_hold_no_two_at_once_and_are_as_few_as_can_be(spans: list[tuple[int, int]]) -> None:
    start = np.array([first for first, _ in spans], np.float64)
    end = np.array([first + length for first, length in spans], np.float64)
    layer = layers_of(start, end)
    for number in np.unique(layer).tolist():
        mine = np.flatnonzero(layer == number)
        mine = mine[np.lexsort((end[mine], start[mine]))]
        assert (start[mine][1:] >= end[mine][:-1]).all()
    lasting = end > start
    moments = np.arange(0.25, 40, 0.5)[:, None]
    most = int(((start <= moments) & (moments < end))[:, lasting].sum(axis=1).max(initial=0))
    if lasting.all():
        assert int(layer.max(initial=-1)) + 1 == most
