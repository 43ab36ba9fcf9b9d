"""Pipeline schedules: each pass once, no deadlock, bubbles as in the papers, memory of 1F1B."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.schedule import Pass, PassAction, beside_previous, most_in_flight, order_of
from hespas.generators.llm.settings import ScheduleName


def orders(name: ScheduleName, stages: int, chunks: int, micro_batches: int) -> list[list[PassAction]]:
    layout = Layout(pp=stages, vp=chunks)
    return [order_of(name, layout, stage, micro_batches) for stage in range(stages)]


def finished(found: list[list[PassAction]], chunks: int, forward: int = 1, backward: int = 2) -> Fraction:
    """Return the end of the last stage if messages take no time. Raises if the stages deadlock."""
    stages = len(found)
    splits = any(action.kind == "weights" for action in found[0])
    times = {"forward": forward, "backward": Fraction(backward, 2) if splits else backward}
    times["weights"] = Fraction(backward, 2)
    last = stages * chunks - 1
    ends: dict[tuple[str, int, int], Fraction] = {}
    clocks, places = [Fraction(0)] * stages, [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(found):
            while places[stage] < len(order):
                kind, each, chunk = order[places[stage]]
                part = chunk * stages + stage
                waits = {
                    "forward": ("forward", each, part - 1) if part else None,
                    "backward": ("backward", each, part + 1) if part < last else ("forward", each, part),
                    "weights": ("backward", each, part),
                }[kind]
                if waits and waits not in ends:
                    break
                begin = max(clocks[stage], ends[waits] if waits else Fraction(0))
                clocks[stage] = ends[kind, each, part] = begin + Fraction(times[kind]) / chunks
                places[stage] += 1
                moved = True
    assert places == [len(order) for order in found], "stages wait for each other"
    return max(clocks)


@given(
    name=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    stages=st.integers(2, 6),
    micro_batches=st.integers(1, 12),
)
def test_every_pass_runs_once_and_nobody_waits_for_ever(
    name: ScheduleName, stages: int, micro_batches: int
) -> None:
    found = orders(name, stages, 1, micro_batches)
    kinds: tuple[Pass, ...] = (
        ("forward", "backward", "weights") if name == "zero-bubble" else ("forward", "backward")
    )
    for order in found:
        assert sorted(order) == sorted(
            PassAction(kind, each, 0) for kind in kinds for each in range(micro_batches)
        )
    finished(found, 1)


@given(stages=st.integers(2, 5), chunks=st.integers(2, 4), rounds=st.integers(1, 3))
def test_interleaved_passes_run_once(stages: int, chunks: int, rounds: int) -> None:
    found = orders("interleaved", stages, chunks, stages * rounds)
    for order in found:
        assert len(order) == len(set(order)) == 2 * stages * rounds * chunks
    finished(found, chunks)


@given(stages=st.integers(2, 6), micro_batches=st.integers(6, 12))
def test_idle_time_is_that_of_the_papers(stages: int, micro_batches: int) -> None:
    work = 3 * micro_batches
    papers: tuple[ScheduleName, ...] = ("gpipe", "1f1b")
    for name in papers:
        assert finished(orders(name, stages, 1, micro_batches), 1) - work == 3 * (stages - 1)
    assert finished(orders("zero-bubble", stages, 1, micro_batches), 1) - work == stages - 1


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_virtual_stages_divide_the_idle_time(chunks: int) -> None:
    done = finished(orders("interleaved", 4, chunks, 12), chunks)
    assert done - 3 * 12 == Fraction(3 * 3, chunks)


@given(stages=st.integers(2, 6), micro_batches=st.integers(1, 12))
def test_values_in_flight(stages: int, micro_batches: int) -> None:
    held = [most_in_flight(order) for order in orders("1f1b", stages, 1, micro_batches)]
    assert held == [min(micro_batches, stages - stage) for stage in range(stages)]
    assert {most_in_flight(each) for each in orders("gpipe", stages, 1, micro_batches)} == {micro_batches}
    assert max(most_in_flight(each) for each in orders("zero-bubble", stages, 1, micro_batches)) <= stages


def test_one_stage_needs_no_schedule() -> None:
    order = order_of("1f1b", Layout(), 0, 2)
    assert [each.kind for each in order] == ["forward", "backward", "forward", "backward"]


@given(stages=st.integers(1, 4), chunks=st.integers(1, 3), rounds=st.integers(1, 4))
def test_passes_beside_each_other_are_of_different_micro_batches(
    stages: int, chunks: int, rounds: int
) -> None:
    layout = Layout(pp=stages, vp=chunks if stages > 1 else 1)
    for stage in range(stages):
        order = order_of("interleaved", layout, stage, stages * rounds, overlaps=True)
        assert sorted(order) == sorted(order_of("interleaved", layout, stage, stages * rounds))
        joined = [position for position, joins in enumerate(beside_previous(order)) if joins]
        for position in joined:
            before, action = order[position - 1], order[position]
            assert (before.kind, action.kind) == ("forward", "backward")
            assert before[1:] != action[1:]
