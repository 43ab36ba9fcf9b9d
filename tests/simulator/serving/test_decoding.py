"""Columns of decoding sequences compared with a list of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.simulator.serving.batch import DecodingBatch, DecodingSequence, count_times

_SEQUENCES = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=80
)


def _pages(held: float, page_tokens: int) -> float:
    return -(-held // page_tokens)


@settings(max_examples=60)
@given(_SEQUENCES, st.sampled_from((1, 3, 16)), st.sampled_from((1.0, 1.73)), st.integers(1, 4))
def test_columns_are_those_of_a_list(
    rows: list[tuple[int, int, int]], page_tokens: int, gain: float, steps: int
) -> None:
    decoding = DecodingBatch(page_tokens, gain)
    expected = [
        DecodingSequence(place, float(held), 1.0, 1.0 + left, float(latest))
        for place, (held, left, latest) in enumerate(rows)
    ]
    for sequence in expected:
        decoding.join(sequence)
    assert decoding.leave_last() == expected.pop()
    while expected:
        assert decoding.requests == [each.request for each in expected]
        assert decoding.held.tolist() == [each.held for each in expected]
        assert decoding.least_left == min(each.output - each.made for each in expected)
        by = steps * gain
        grown = sum(_pages(each.held + by, page_tokens) - _pages(each.held, page_tokens) for each in expected)
        assert decoding.grown(by) == grown <= decoding.most_grown(by)
        assert decoding.pages == sum(_pages(each.held, page_tokens) for each in expected)
        assert decoding.latest(5.0, [7.0]) == count_times([*(each.latest for each in expected), 7.0])
        assert decoding.latest(5.0, []) == [(5.0, len(expected))]
        given_to = [each._replace(held=each.held + by, made=each.made + by, latest=5.0) for each in expected]
        done = [each for each in given_to if each.made >= each.output]
        assert decoding.generate(by) == (grown, done)
        expected = [each for each in given_to if each.made < each.output]
    assert len(decoding) == 0
    assert decoding.pages == 0


def test_times_of_latest_tokens_are_grouped() -> None:
    assert count_times([3.0, 1.0, 3.0]) == [(1.0, 1), (3.0, 2)]
    decoding = DecodingBatch(16, 1.0)
    for request, latest in enumerate((10.0, 10.0, 20.0)):
        decoding.join(DecodingSequence(request, 8.0, 1.0, 9.0, latest))
    assert decoding.latest(30.0, []) == [(10.0, 2), (20.0, 1)]
    decoding.generated(40.0)
    assert decoding.leave_last().latest == pytest.approx(40.0)
