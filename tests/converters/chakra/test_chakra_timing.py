"""Whole nanoseconds and microseconds: sums along a stream stay correct."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from hespas.converters.chakra.times import UNKNOWN, WrittenTimes, carried_micros, whole_nanos
from hespas.graph import NodeKind

_NODES = st.lists(
    st.tuples(st.floats(0, 1e9) | st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.5, 300.0]), st.integers(0, 2)),
    max_size=40,
)


@given(nodes=_NODES)
@example(nodes=[(1.5, 0), (1.0, 0), (1.0, 0)])
@example(nodes=[(0.6, 0)] * 4)
def test_sums_of_every_stream_are_right(nodes: list[tuple[float, int]]) -> None:
    time = np.array([duration for duration, _ in nodes], np.float64)
    stream = np.array([number for _, number in nodes], np.int64)
    nanos = whole_nanos(time, stream)
    micros = carried_micros(nanos, stream)
    assert (nanos[time > 0] >= 1).all()
    assert (nanos[time == 0] == 0).all()
    assert (micros >= 0).all()
    for number in range(3):
        mine = stream == number
        tiny = int(((time[mine] > 0) & (time[mine] < 1)).sum())
        assert abs(nanos[mine].sum() - time[mine].sum()) <= 1 + tiny
        for end in range(len(time) + 1):
            part = mine[:end]
            assert 0 <= micros[:end][part].sum() * 1000 - nanos[:end][part].sum() < 1000


def test_whole_numbers_stay_and_unknown_is_no_time() -> None:
    time = np.array([5.0, np.nan, 1e6, -1.0, np.inf])
    nanos = whole_nanos(time, np.zeros(5, np.int64))
    assert nanos.tolist() == [5, UNKNOWN, 1_000_000, UNKNOWN, UNKNOWN]
    assert carried_micros(nanos, np.zeros(5, np.int64)).tolist() == [1, 0, 1000, 0, 0]


def test_what_a_simulator_replays_has_its_own_remainders() -> None:
    kind = np.array([NodeKind.COMPUTE, NodeKind.COLLECTIVE] * 4)
    time = np.array([100.0, 900.0] * 4)  # along one lane: 1 us of each computation, none of a collective
    place = (np.zeros(8, np.int64), np.zeros(8, np.int64))
    micros = WrittenTimes.of(time, kind, place).micros
    assert int(micros[kind == NodeKind.COMPUTE].sum()) == 1  # 0.4 us, and nothing of the collectives' 3.6
    assert int(micros[kind == NodeKind.COLLECTIVE].sum()) == 4
