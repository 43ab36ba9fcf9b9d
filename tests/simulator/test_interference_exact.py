"""Interference on random programs and jobs: exact if it is zero, with every priority, and in loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import Diagnostics, Workload
from hespas.graph.passes import all_deps
from hespas.simulator import JobScheduler, ListScheduler, Simulation
from hespas.simulator.interference import Pressure
from hespas.simulator.schedule import PRIORITIES, Priority
from tests.simulator.job.small_jobs import jobs
from tests.simulator.small_programs import Sketch
from tests.simulator.test_interference import pressure
from tests.simulator.test_simulated_loops import Body, bodies, looped

EXAMPLES = settings(max_examples=40)
shares = st.sampled_from((0.0, 0.1, 0.5, 1.0))
factors = st.fixed_dictionaries(
    {"holds": shares, "moves": shares, "by_units": st.sampled_from((0.0, 0.5, 1.0))}
)
priorities = st.sampled_from(PRIORITIES)


def run(workload: Workload, scheduler: JobScheduler | ListScheduler, how: dict[str, float]) -> Simulation:
    pressures = [pressure(graph, **how) for graph in workload.classes]
    return scheduler.run(workload, Diagnostics(), pressures)


@EXAMPLES
@given(jobs(), factors)
def test_ranks_alike_are_simulated_once_with_the_same_figures(
    workload: Workload, how: dict[str, float]
) -> None:
    one, every = (run(workload, JobScheduler(symmetry=symmetry), how).timeline for symmetry in (True, False))
    assert one.finish_ns.tolist() == every.finish_ns.tolist()
    assert one.interference_ns == pytest.approx(every.interference_ns)
    assert one.busy_ns == pytest.approx(every.busy_ns)
    assert one.exposed_comm_ns == pytest.approx(every.exposed_comm_ns)
    assert one.exposed_wait_ns == pytest.approx(every.exposed_wait_ns)


@EXAMPLES
@given(jobs(), factors, priorities)
def test_ranks_in_step_are_as_one_alone_by_every_priority(
    workload: Workload, how: dict[str, float], priority: Priority
) -> None:
    single = Workload.spmd(workload.classes[0], workload.num_ranks)
    if len(single.classes[0].p2p.node):
        return
    alone = run(single, ListScheduler(priority=priority), how)
    every = run(single, JobScheduler(symmetry=False, priority=priority), how)
    assert every.timeline.finish_ns.tolist() == alone.timeline.finish_ns.tolist()
    assert every.timeline.interference_ns == pytest.approx(alone.timeline.interference_ns)


@EXAMPLES
@given(jobs(), st.booleans())
def test_factors_of_nothing_change_nothing(workload: Workload, symmetry: bool) -> None:
    scheduler = JobScheduler(symmetry=symmetry)
    nothing = [Pressure.none(len(graph)) for graph in workload.classes]
    plain, same = (scheduler.run(workload, Diagnostics(), each) for each in (None, nothing))
    for name in ("start_ns", "end_ns", "busy_ns", "exposed_comm_ns", "cause", "critical", "wait_ns"):
        mine, theirs = (getattr(each.timeline, name).tolist() for each in (plain, same))
        assert mine == theirs
    assert plain.classes == same.classes


@EXAMPLES
@given(jobs(), factors)
def test_with_jitter_nothing_runs_before_its_time_or_two_at_once(
    workload: Workload, how: dict[str, float]
) -> None:
    timeline = run(workload, JobScheduler(jitter=0.3), how).timeline
    for rank in range(workload.num_ranks):
        graph, mine = workload.graph_of(rank), np.flatnonzero(timeline.rank == rank)
        start, end = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        start[timeline.node[mine]], end[timeline.node[mine]] = timeline.start_ns[mine], timeline.end_ns[mine]
        deps = all_deps(graph)
        assert not (end[deps.values] > start[deps.row_ids]).any()
        order = mine[np.lexsort((timeline.start_ns[mine], timeline.stream[mine], timeline.resource[mine]))]
        one, two = order[:-1], order[1:]
        same = timeline.resource[one] == timeline.resource[two]
        same &= timeline.stream[one] == timeline.stream[two]
        assert (timeline.end_ns[one] <= timeline.start_ns[two])[same].all()


def in_order(work: Sequence[tuple[str, int]]) -> Workload:
    """Kernels and collectives, each stream in order of the program, some waiting for the other stream."""
    s = Sketch()
    last: dict[bool, int] = {}
    for at, (what, takes) in enumerate(work):
        communications = what == "comm"
        deps = [last[communications]] if communications in last else []
        if at % 3 == 2 and (not communications) in last:
            deps.append(last[not communications])
        last[communications] = s.add(what, takes, *deps)
    return Workload.spmd(s.build(), 1)


work = st.lists(st.tuples(st.sampled_from(("compute", "comm")), st.integers(1, 9)), max_size=12)


@EXAMPLES
@given(work, factors)
def test_streams_in_order_are_never_faster_and_pay_no_more_than_what_is_added(
    work: list[tuple[str, int]], how: dict[str, float]
) -> None:
    """What takes longer lets nothing overtake where each stream keeps its order."""
    workload = in_order(work)
    plain, slow = run(workload, ListScheduler(interference=False), how), run(workload, ListScheduler(), how)
    assert slow.step_ns >= plain.step_ns * (1 - 1e-12)
    assert slow.step_ns <= plain.step_ns + float(slow.timeline.interference_ns[0]) + 1e-9


@EXAMPLES
@given(bodies(), st.integers(2, 60), factors)
def test_a_loop_that_is_not_unrolled_takes_as_long(body: Body, trips: int, how: dict[str, float]) -> None:
    workload = Workload.spmd(looped(body, trips), 1)
    exact, quick = (run(workload, ListScheduler(max_executions=most), how) for most in (1_000_000, 1))
    assert quick.step_ns == pytest.approx(exact.step_ns, rel=1e-9)
    assert quick.timeline.interference_ns == pytest.approx(exact.timeline.interference_ns, rel=1e-6, abs=1e-6)
