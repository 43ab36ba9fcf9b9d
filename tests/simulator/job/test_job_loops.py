"""Loops in which ranks of different classes communicate: unrolled runs equal the common steady state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import Diagnostics, NodeKind, OpGraph, Permutation, RegionKind, StridedGroups, Workload
from hespas.simulator import JobScheduler, ListScheduler, Simulation, simulate
from tests.simulator.job.small_jobs import Part, part, stages

PAIR = StridedGroups.all_ranks(2)
FORWARD = Permutation.from_pairs([(0, 1)], 2)


def run(
    workload: Workload, found: Diagnostics | None = None, *, exact: bool = False, jitter: float = 0.0
) -> Simulation:
    scheduler = JobScheduler(max_executions=1_000_000 if exact else 1, jitter=jitter)
    return simulate(workload, simulator=scheduler, diagnostics=found)


def looped(trips: int, body: Sequence[tuple[str, float]], outer: int = 1) -> OpGraph:
    """Something, then a loop (in another, where that has trips) whose operations follow each other from trip
    to trip, then something.
    """
    made = part()
    before = made.compute(3)
    around = made.builder.add_region(RegionKind.LOOP_BODY, trips=outer)
    region = made.builder.add_region(RegionKind.LOOP_BODY, parent=around, trips=trips)
    nodes: list[int] = []
    for what, takes in body:
        nodes.append(_added(made, what, takes, [*nodes[-1:]] or [before], region))
    if nodes:
        made.builder.add_carried(region, nodes[-1], nodes[0])
        made.builder.add_carried(around, nodes[-1], nodes[0])
    made.compute(4, *nodes[-1:])
    return made.built()


def _added(made: Part, what: str, takes: float, deps: Sequence[int], region: int) -> int:
    made.region = region
    if what == "compute":
        node = made.compute(takes, *deps)
    elif what == "collective":
        node = made.collective(PAIR, takes, *deps)
    else:
        node = made.message(NodeKind.SEND if what == "send" else NodeKind.RECV, FORWARD, takes, *deps)
    made.region = -1
    return node


def same(one: Simulation, other: Simulation) -> None:
    assert one.timeline.finish_ns == pytest.approx(other.timeline.finish_ns, rel=1e-12)
    for mine, theirs in zip(one.classes, other.classes, strict=True):
        assert mine.busy_ns == pytest.approx(theirs.busy_ns)
        assert mine.exposed_comm_ns == pytest.approx(theirs.exposed_comm_ns)
        assert mine.wait_ns == pytest.approx(theirs.wait_ns)
        assert sum(mine.critical_path.class_ns.values()) == pytest.approx(mine.finish_ns)


def test_collectives_of_a_loop_by_hand() -> None:
    """A trip takes as long as the slower rank and the collective."""
    graphs = [looped(1_000_000, [("compute", first), ("collective", 5)]) for first in (10, 4)]
    found = Diagnostics()
    done = run(stages(graphs, [0, 1]), found)
    assert done.timeline.finish_ns.tolist() == [15_000_007, 15_000_007]
    assert done.timeline.exposed_wait_ns.tolist() == [[0, 0], [6_000_000, 0]]
    assert [row.busy_ns["compute"] for row in done.classes] == [10_000_007, 4_000_007]
    assert (found.counts()["simulate.extrapolated-loops"], done.classes[1].extrapolated) == (1, 1)
    assert len(done.timeline) < 20


steps = st.lists(st.sampled_from(("compute", "collective", "message")), min_size=1, max_size=5)
times = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=5, max_size=5)


@settings(max_examples=40)
@given(steps, times, st.integers(30, 60), st.integers(1, 3))
def test_a_loop_of_ranks_that_meet_takes_as_long_as_unrolled(
    what: list[str], takes: list[tuple[int, int]], trips: int, outer: int
) -> None:
    """A pipeline of two, with collectives of both: what waits, waits in the order of the program."""
    graphs = [
        looped(
            trips,
            [
                (("send", "recv")[stage] if step == "message" else step, float(each[stage]))
                for step, each in zip(what, takes, strict=False)
            ],
            outer,
        )
        for stage in (0, 1)
    ]
    workload = stages(graphs, [0, 1])
    same(run(workload), run(workload, exact=True))


@settings(max_examples=20)
@given(steps, times)
def test_time_is_linear_in_the_trip_count(what: list[str], takes: list[tuple[int, int]]) -> None:
    """Together and alone: three counts at equal distances, a multiple of all periods that are searched."""
    together: list[Simulation] = []
    alone: list[Simulation] = []
    for trips in (1_200, 2_400, 3_600):
        graphs = [
            looped(
                trips,
                [
                    (("send", "recv")[stage] if step == "message" else step, float(each[stage]))
                    for step, each in zip(what, takes, strict=False)
                ],
            )
            for stage in (0, 1)
        ]
        together.append(run(stages(graphs, [0, 1])))
        alone.append(simulate(stages(graphs, [0, 1]), simulator=ListScheduler(max_executions=1)))
    for runs in (together, alone):
        for first, second, third in zip(*(done.timeline.finish_ns.tolist() for done in runs), strict=True):
            assert third - second == pytest.approx(second - first, rel=1e-12)
            assert second > first


def test_jitter_of_long_loops_costs_as_much_as_trip_by_trip() -> None:
    graphs = [looped(2000, [("compute", 100), ("collective", 5)]) for _ in (0, 1)]
    workload = stages(graphs, [0, 1])
    short, exact = (run(workload, exact=exact, jitter=0.3).step_ns for exact in (False, True))
    assert short == pytest.approx(exact, rel=0.05)
    assert exact > 1.1 * run(workload).step_ns  # the slower of two


def test_loops_of_other_trips_are_run_trip_by_trip_or_alone() -> None:
    graphs = [
        looped(40, [("compute", 10), ("collective", 5)]),
        looped(20, [("compute", 2), ("collective", 5), ("compute", 2), ("collective", 5)]),
    ]
    workload, found = stages(graphs, [0, 1]), Diagnostics()
    assert run(workload, found, exact=True).timeline.finish_ns.tolist() == [607, 607]
    assert "simulate.ranks-not-synchronised" not in found.counts()
    assert run(workload, found).timeline.finish_ns.tolist() == [607, 287]
    assert found.counts()["simulate.ranks-not-synchronised"] == 1


def test_only_what_meets_is_linked() -> None:
    """A loop without communication is given up too, and takes as long."""
    graphs: list[OpGraph] = []
    for trips in (50_000, 20_000):
        made = part()
        region = made.builder.add_region(RegionKind.LOOP_BODY, trips=trips)
        node = _added(made, "compute", 2, [], region)
        made.builder.add_carried(region, node, node)
        made.compute(1, made.collective(PAIR, 5, node))
        graphs.append(made.built())
    assert run(stages(graphs, [0, 1])).timeline.finish_ns.tolist() == [100_006, 100_006]
