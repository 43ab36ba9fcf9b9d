"""Invariants of every grouping of events and nodes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import Diagnostics, OpClass
from hespas.validators.accuracy.coverage import EventKey, coverage_of, group_keys
from hespas.validators.accuracy.matching import match_program
from tests.validators.accuracy.small_profiles import Program, Recording

NODES = 8
LINKS = st.lists(st.lists(st.integers(0, NODES - 1), max_size=4, unique=True), max_size=8)
FLAGS = st.lists(st.booleans(), min_size=NODES, max_size=NODES)
EVENT = st.tuples(
    st.sampled_from(["dot.1", "add.2", "mm", "aten::mm", "zzz", ""]),
    st.sampled_from(["", "[[2]]"]),
    st.integers(-1, 2),
    st.integers(-1, 2),
    st.floats(-1.0, 100.0),
)


def _keys(links: list[list[int]], communicates: bool = False) -> list[EventKey]:
    return [EventKey(module="", op="", nodes=tuple(nodes), communicates=communicates) for nodes in links]


@given(LINKS, FLAGS)
def test_each_key_with_nodes_is_in_one_group_that_holds_some_of_them(
    links: list[list[int]], flags: list[bool]
) -> None:
    shared = np.array(flags)
    keys, nodes = group_keys(_keys(links), shared, np.zeros(NODES, np.bool_))
    for key, group in enumerate(keys.tolist()):
        assert (group >= 0) == bool(links[key])
        if group >= 0:
            assert group in nodes[links[key]]
    used = sorted({*keys.tolist(), *nodes.tolist()} - {-1})
    assert used == list(range(len(used)))
    linked = {node for row in links for node in row}
    assert all((nodes[node] >= 0) == (node in linked) for node in range(NODES))


@given(LINKS)
def test_keys_that_carry_out_one_node_together_are_one_group(links: list[list[int]]) -> None:
    nothing = np.zeros(NODES, np.bool_)
    keys, nodes = group_keys(_keys(links), nothing, nothing)
    for key, row in enumerate(links):
        assert all(nodes[node] == keys[key] for node in row)


@given(LINKS, FLAGS)
def test_a_key_that_communicates_is_with_nodes_that_do(links: list[list[int]], flags: list[bool]) -> None:
    talks = np.array(flags)
    keys, nodes = group_keys(_keys(links, communicates=True), np.zeros(NODES, np.bool_), talks)
    assert not bool((nodes[~talks] >= 0).any())
    for key, row in enumerate(links):
        assert (keys[key] >= 0) == any(flags[node] for node in row)


@settings(max_examples=150)
@given(st.lists(EVENT, max_size=25), st.lists(st.sampled_from(["dot.1", "add.2", "mm"]), max_size=6))
def test_whatever_was_recorded_time_is_matched_or_listed(
    events: list[tuple[str, str, int, int, float]], names: list[str]
) -> None:
    program = Program()
    for name in names:
        program.add(name, name.partition(".")[0], OpClass.ELEMENTWISE, takes=[(2,)])
    recording = Recording()
    for op, shapes, run, rank, duration_ns in events:
        recording.event(op, duration_ns, shapes=shapes, run=run, rank=rank)
    graph, profile = program.build(), recording.build()
    found = match_program(graph, profile, Diagnostics())
    coverage = coverage_of(graph, profile, found)
    listed = sum(row.total_ns for row in coverage.unmatched_events)
    assert abs(coverage.matched_time_ns + listed - coverage.time_ns) < 1e-6
    assert sum(row.count for row in coverage.unmatched_events) == coverage.events - coverage.matched_events
    assert abs(sum(coverage.by_rule.values()) - coverage.matched_time_ns) < 1e-6
    assert 0 <= coverage.compared_time_ns <= coverage.matched_time_ns + 1e-6
    pairs: list[tuple[int, int]] = np.stack((found.event_key, found.event_group), axis=1).tolist()
    for key, group in pairs:
        assert group < 0 or group in found.node_group[list(found.keys[key].nodes)]
