"""Durations of recorded steps: per annotated step, else as a whole, and saved as a document."""

from __future__ import annotations

import numpy as np
import pytest

from hespas.converters.measured_ops.steps import recorded_steps, recorded_steps_of
from hespas.graph import RECORDED_STEPS, StepRanges
from hespas.graph.errors import FormatError


def test_steps_are_timed_each_for_itself_and_overlaps_count_once() -> None:
    start, length = np.array([0.0, 5.0, 30.0, 100.0, 90.0]), np.array([10.0, 10.0, 5.0, 7.0, 4.0])
    found = recorded_steps(start, length, np.array([3, 3, 3, 4, -1], np.int32))
    assert found is not None
    assert (found.span_ns, found.busy_ns) == ([35.0, 7.0], [20.0, 7.0])
    assert found.inside == pytest.approx(32 / 36)


def test_without_steps_the_recording_is_one() -> None:
    found = recorded_steps(np.array([50, 20]), np.array([5, -9]), np.array([-1, -1], np.int32))
    assert found is not None
    assert (found.span_ns, found.busy_ns, found.inside) == ([35.0], [5.0], 1.0)
    assert recorded_steps(np.empty(0), np.empty(0), np.empty(0, np.int32)) is None


def test_the_document_comes_back_as_it_was() -> None:
    found = recorded_steps(np.array([1.0]), np.array([2.0]), np.array([7], np.int32))
    assert found is not None
    assert recorded_steps_of({RECORDED_STEPS: found.document()}, "graph") == found
    assert recorded_steps_of({"another": b""}, "graph") is None


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[" * 100_000,
        b'{"span_ns":[],"busy_ns":[],"inside":1}',
        b'{"span_ns":[1],"busy_ns":[],"inside":1}',
        b'{"span_ns":[1],"busy_ns":[-1],"inside":1}',
        b'{"span_ns":[1],"busy_ns":[1],"inside":2}',
        b'{"span_ns":[1],"busy_ns":["1"],"inside":1}',
        b'{"span_ns":[1e308,1e308],"busy_ns":[1,1],"inside":1}',
        b'{"span_ns":[1],"busy_ns":[2],"inside":1}',
        b'{"span_ns":[1],"busy_ns":[1],"inside":1,"period_ns":-2}',
    ],
)
def test_another_document_under_that_name_is_refused(document: bytes) -> None:
    with pytest.raises(FormatError, match="recorded steps are malformed"):
        recorded_steps_of({RECORDED_STEPS: document}, "graph")


def test_times_that_lie_further_apart_than_63_bits_are_not_wrapped() -> None:
    ends = np.array([-(1 << 63), (1 << 63) - 1], np.int64)
    found = recorded_steps(ends, np.array([5, 5], np.int64), np.array([-1, -1], np.int32))
    assert found is not None
    assert found.span_ns == [pytest.approx(2.0**64)]


def test_rounding_makes_no_document_that_is_refused() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        start = rng.integers(-(1 << 62), 1 << 62, 9)
        length = rng.random(9) * 10.0 ** rng.integers(-3, 19)
        length[rng.random(9) < 0.3] = 0.0
        found = recorded_steps(start, length, np.where(length > 0, 1, -1).astype(np.int32))
        assert found is not None
        assert recorded_steps_of({RECORDED_STEPS: found.document()}, "graph") == found


def ranges(*rows: tuple[int, float, float]) -> StepRanges:
    return StepRanges.from_rows(rows)


@pytest.mark.parametrize(
    ("starts", "steps", "known", "expected"),
    [
        # Without ranges first events count; two steps of one number have ranges of two threads.
        ([0.0, 100.0, 210.0], [3, 4, 5], (), 105.0),
        ([0.0, 100.0, 210.0], [3, 4, 5], ((3, -40.0, 90.0), (4, 55.0, 90.0), (5, 160.0, 90.0)), 100.0),
        ([0.0, 100.0], [3, 4], ((3, -40.0, 90.0), (3, -30.0, 80.0), (4, 61.0, 9.0), (4, 60.0, 90.0)), 100.0),
        ([0.0, 100.0], [3, 4], ((3, -40.0, 90.0),), 100.0),
        # Steps 4 to 12 ran, and were not recorded.
        ([0.0, 1000.0], [3, 13], ((3, -10.0, 90.0), (13, 990.0, 90.0)), 100.0),
        ([0.0], [3], (), 7.0),
        ([0.0], [3], ((3, -20.0, 23.0), (4, 50.0, 60.0)), 27.0),
        ([0.0], [3], ((3, -20.0, 60.0),), 60.0),
        ([0.0, 0.0], [3, 4], (), -1.0),
    ],
)
def test_period_is_from_start_to_start(
    starts: list[float], steps: list[int], known: tuple[tuple[int, float, float], ...], expected: float
) -> None:
    number = np.array(steps, np.int32)
    found = recorded_steps(np.array(starts), np.full(len(starts), 7.0), number, ranges(*known))
    assert found is not None
    assert found.period_ns == expected
    assert recorded_steps_of({RECORDED_STEPS: found.document()}, "graph") == found
