"""Cases from matched events: times per run, groups as one node, equality of work."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.estimators.interface import CasePrediction
from hespas.graph import Diagnostics, OpClass, OpGraph, Profile
from hespas.graph.errors import InvariantError
from hespas.validators.accuracy.cases import (
    Cases,
    GroupTimes,
    case_labels,
    covered_ns,
    grouped_graph,
    leading_nodes,
    measured_groups,
    shared_shapes,
)
from hespas.validators.accuracy.matching import match_program
from tests.validators.accuracy.small_profiles import Program, Recording

ELEMENTWISE, COLLECTIVE = OpClass.ELEMENTWISE, OpClass.COLLECTIVE


def _one_node() -> OpGraph:
    program = Program()
    program.add("dot.1", "dot")
    return program.build()


def _measured(profile: Profile, graph: OpGraph | None = None) -> GroupTimes:
    graph = graph or _one_node()
    return measured_groups(profile, match_program(graph, profile, Diagnostics()))


def test_times_add_up_within_a_run_and_the_median_run_counts() -> None:
    recording = Recording()
    for run, times in enumerate([(10.0, 20.0), (15.0, 25.0), (500.0, 500.0)]):
        for duration in times:
            recording.event("dot.1", duration, run=run)
    found = _measured(recording.build())
    assert found.measured_ns.tolist() == [40.0]
    assert found.spread_ns.tolist() == [(10.0 + 0.0 + 960.0) / 3]
    assert found.repeats.tolist() == [3]


def test_an_even_number_of_runs_has_the_middle_of_two() -> None:
    recording = Recording()
    recording.event("dot.1", 10.0, run=0)
    recording.event("dot.1", 30.0, run=1)
    found = _measured(recording.build())
    assert (found.measured_ns.tolist(), found.spread_ns.tolist()) == ([20.0], [10.0])


def test_one_run_has_no_spread() -> None:
    recording = Recording()
    recording.event("dot.1", 10.0)
    found = _measured(recording.build())
    assert isnan(float(found.spread_ns[0]))


def test_ranks_are_runs_of_the_same_work() -> None:
    recording = Recording()
    for rank, duration in enumerate((10.0, 20.0, 90.0)):
        recording.event("dot.1", duration, rank=rank, run=0)
    found = _measured(recording.build())
    assert (found.measured_ns.tolist(), found.repeats.tolist()) == ([20.0], [3])


def test_what_overlaps_on_several_streams_counts_once() -> None:
    recording = Recording()
    recording.event("dot.1", 100.0, at=0.0, stream=1)
    recording.event("dot.1", 20.0, at=50.0, stream=2)
    recording.event("dot.1", 60.0, at=80.0, stream=3)
    recording.event("dot.1", 10.0, at=200.0, stream=2)
    assert _measured(recording.build()).measured_ns.tolist() == [150.0]


def test_a_run_that_was_cut_off_is_no_run() -> None:
    recording = Recording()
    recording.event("dot.1", 1.0, run=-1)
    for run in range(2):
        recording.event("dot.1", 50.0, run=run)
    assert _measured(recording.build()).measured_ns.tolist() == [50.0]


def test_a_negative_duration_takes_nothing_away() -> None:
    recording = Recording()
    recording.event("dot.1", 30.0, run=0)
    recording.event("dot.1", -20.0, run=0)
    assert _measured(recording.build()).measured_ns.tolist() == [30.0]


def test_nothing_matched_is_nothing_measured() -> None:
    recording = Recording()
    recording.event("sort", 30.0)
    assert len(_measured(recording.build()).group) == 0
    assert len(_measured(Recording().build()).group) == 0


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 100)), min_size=1, max_size=15))
def test_the_covered_length_is_that_of_the_union(rows: list[tuple[int, int]]) -> None:
    rows = sorted(rows)
    start = np.array([row[0] for row in rows], np.float64)
    length = np.array([row[1] for row in rows], np.float64)
    points = {at for row in rows for at in range(row[0], row[0] + row[1])}
    assert covered_ns(start, start + length) == len(points)


def test_a_group_is_estimated_as_one() -> None:
    program = Program()
    dot = program.add("dot", "dot", makes=[(4,)], flops=1000.0, moved=16.0)
    program.add("add", "add", ELEMENTWISE, dot, takes=[(4,)], makes=[(4,)], flops=4.0, moved=32.0)
    graph = program.build()
    group = np.array([0, 0])
    merged = grouped_graph(graph, group, 1)
    assert merged.flops.tolist() == [1004.0]
    # The 16 bytes that pass from the product to the sum stay inside.
    assert merged.bytes_read.tolist() == [32.0]
    assert leading_nodes(graph, group, 1).tolist() == [dot]


def test_what_a_combined_collective_sends_adds_up() -> None:
    program = Program()
    for sent in (100.0, 50.0, 7.0):
        program.add("psum", "all_reduce", COLLECTIVE, moved=sent)
    merged = grouped_graph(program.build(), np.array([0, 0, 1]), 2)
    assert merged.collectives.comm_bytes.tolist() == [150.0, 7.0]


def test_nodes_in_no_group_are_apart() -> None:
    program = Program()
    program.add("one", flops=nan)
    two = program.add("two", flops=6.0)
    program.add("three", flops=nan)
    merged = grouped_graph(program.build(), np.array([-1, 0, -1]), 1)
    assert merged.node_name(0) == "two"
    assert float(merged.flops[0]) == 6.0
    assert leading_nodes(program.build(), np.array([-1, 0, -1]), 1).tolist() == [two]


def test_a_group_without_nodes_is_a_fault() -> None:
    with pytest.raises(InvariantError):
        leading_nodes(_one_node(), np.array([0]), 2)


def test_labels_and_shapes() -> None:
    program = Program()
    program.add("dot.1", "dot", takes=[(2, 3), (3, 4)], makes=[(2, 4)])
    program.add("dot.2", "dot", takes=[(2, 3), (3, 4)], makes=[(2, 4)])
    program.add("x", "aten::relu", ELEMENTWISE, flops=8.0, moved=64.0)
    program.add("", "sort", OpClass.SORT, makes=[()])
    graph = program.build()
    labels, shapes, shape = case_labels(graph, np.arange(4), np.ones(4))
    assert labels == ("dot.1", "dot.2", "aten::relu", "sort")
    assert shapes == ("dot(2x3xf32, 3x4xf32) -> 2x4xf32", "aten::relu 8/64", "sort() -> f32")
    assert shape.tolist() == [0, 0, 1, 2]


def test_work_done_several_times_is_other_work() -> None:
    program = Program()
    for name in ("dot.1", "dot.2"):
        program.add(name, "dot", makes=[(2, 4)])
    _, shapes, shape = case_labels(program.build(), np.arange(2), np.array([1.0, 16.0]))
    assert shapes == ("dot() -> 2x4xf32", "dot() -> 2x4xf32 x 16")
    assert shape.tolist() == [0, 1]


def _cases(shapes: tuple[str, ...], shape: list[int]) -> Cases:
    rows = len(shape)
    zeros = np.zeros(rows)
    return Cases(
        source="s", workload="w", hardware="h", labels=("",) * rows, shapes=shapes,
        shape=np.array(shape, np.int64),
        op_class=np.zeros(rows, np.int8), measured_ns=zeros, spread_ns=zeros, repeats=np.ones(rows, np.int64),
        flops=zeros, bytes_moved=zeros,
    )  # fmt: skip


def test_shapes_of_several_sources_are_numbered_by_their_text() -> None:
    one, none, two = _cases(("a", "b"), [0, 1, 0]), _cases((), []), _cases(("b", "c"), [1, 0])
    assert shared_shapes([one, none, two]).tolist() == [0, 1, 0, 2, 1]
    assert shared_shapes([]).tolist() == []


def test_columns_that_differ_in_length_are_a_fault() -> None:
    with pytest.raises(InvariantError):
        replace(_cases(("a",), [0]), labels=("a", "b"))
    few = CasePrediction(estimator="p", duration_ns=np.zeros(2), low_ns=np.zeros(2), high_ns=np.zeros(2))
    with pytest.raises(InvariantError):
        _cases(("a",), [0]).with_predictions([few])


@pytest.mark.parametrize("bad", [-4.0, nan])
def test_a_run_with_an_event_of_no_known_time_is_left_out_where_others_are_whole(bad: float) -> None:
    recording = Recording()
    for run, times in enumerate([(10.0, 20.0), (15.0, bad), (5.0, 27.0)]):
        for duration in times:
            recording.event("dot.1", duration, run=run)
    found = _measured(recording.build())
    assert (found.measured_ns.tolist(), found.repeats.tolist()) == ([31.0], [2])


@pytest.mark.parametrize("bad", [-4.0, nan])
def test_an_event_of_no_known_time_takes_nothing_from_the_others(bad: float) -> None:
    recording = Recording()
    for run in range(2):
        recording.event("dot.1", 5.0, run=run)
        recording.event("dot.1", bad, run=run)
    found = _measured(recording.build())
    assert (found.measured_ns.tolist(), found.repeats.tolist()) == ([5.0], [2])
    alone = Recording()
    alone.event("dot.1", bad)
    assert len(_measured(alone.build()).group) == 0
