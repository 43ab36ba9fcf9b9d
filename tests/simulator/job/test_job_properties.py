"""Random jobs: equal with and without symmetry, and physically possible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import Diagnostics, Timeline, Workload
from hespas.graph.passes import all_deps, with_durations
from hespas.simulator import JobScheduler, ListScheduler, Simulation, simulate
from hespas.simulator.job.matching import PROTOCOLS, Protocol
from hespas.simulator.schedule import PRIORITIES, Priority
from tests.simulator.job.small_jobs import jobs

EXAMPLES = settings(max_examples=60)


def run(workload: Workload, scheduler: JobScheduler | ListScheduler) -> Simulation:
    return simulate(workload, simulator=scheduler, diagnostics=Diagnostics())


def slow_ranks(workload: Workload, draws: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((rank % workload.num_ranks, factor) for rank, factor in draws)


stragglers = st.lists(st.tuples(st.integers(0, 20), st.sampled_from((1.5, 2.0))), max_size=2)


@EXAMPLES
@given(jobs(), st.sampled_from(PROTOCOLS), st.sampled_from(PRIORITIES), stragglers)
def test_ranks_that_behave_alike_are_simulated_once_with_the_same_result(
    workload: Workload, protocol: Protocol, priority: Priority, slow: list[tuple[int, float]]
) -> None:
    factors = slow_ranks(workload, slow)
    one, every = (
        run(
            workload,
            JobScheduler(protocol=protocol, priority=priority, stragglers=factors, symmetry=symmetry),
        ).timeline
        for symmetry in (True, False)
    )
    assert one.finish_ns.tolist() == every.finish_ns.tolist()
    assert one.exposed_comm_ns == pytest.approx(every.exposed_comm_ns)
    assert one.exposed_wait_ns == pytest.approx(every.exposed_wait_ns)
    assert one.busy_ns == pytest.approx(every.busy_ns)
    for rank in range(workload.num_ranks):
        assert _rows(one, int(one.shown_by[rank])) == _rows(every, int(every.shown_by[rank]))


def _rows(timeline: Timeline, rank: int) -> list[tuple[float, ...]]:
    """Return the sorted rows of a rank, because receives have no order among nodes with equal start."""
    mine = timeline.rank == rank
    columns = (timeline.node, timeline.start_ns, timeline.end_ns, timeline.wait_ns)
    return sorted(zip(*(column[mine].tolist() for column in columns), strict=True))


@EXAMPLES
@given(jobs(), st.sampled_from(PRIORITIES))
def test_one_class_without_messages_runs_as_if_alone(workload: Workload, priority: Priority) -> None:
    single = Workload.spmd(workload.classes[0], workload.num_ranks)
    if len(single.classes[0].p2p.node):
        return
    together = run(single, JobScheduler(priority=priority))
    alone = run(single, ListScheduler(priority=priority))
    assert together.timeline.start_ns.tolist() == alone.timeline.start_ns.tolist()
    assert together.classes == alone.classes


@EXAMPLES
@given(jobs(), st.sampled_from(PRIORITIES), st.integers(0, 1000), st.booleans())
def test_a_rank_that_is_hardly_slower_hardly_changes_the_step(
    workload: Workload, priority: Priority, seed: int, jitters: bool
) -> None:
    """Times without two sums that are equal: there, one or the other may come first."""
    graph = workload.classes[0]
    if len(graph.p2p.node):
        return
    times = np.random.default_rng(seed).uniform(1.0, 10.0, len(graph))
    graph = with_durations(graph, np.where(graph.duration_ns > 0, times, graph.duration_ns))
    single = Workload.spmd(graph, workload.num_ranks)
    alike = run(single, JobScheduler(priority=priority))
    slow = JobScheduler(priority=priority, jitter=1e-7) if jitters else JobScheduler(
        priority=priority, stragglers=((0, 1 + 1e-7),)
    )  # fmt: skip
    assert run(single, slow).step_ns == pytest.approx(alike.step_ns, rel=1e-5)


@EXAMPLES
@given(jobs(), st.sampled_from(PROTOCOLS), stragglers, st.booleans())
def test_nothing_runs_before_its_time_or_two_at_once(
    workload: Workload, protocol: Protocol, slow: list[tuple[int, float]], jitters: bool
) -> None:
    done = run(
        workload,
        JobScheduler(
            protocol=protocol,
            stragglers=slow_ranks(workload, slow),
            jitter=0.3 if jitters else 0.0,
            symmetry=False,
        ),
    )
    timeline = done.timeline
    for rank in range(workload.num_ranks):
        mine = np.flatnonzero(timeline.rank == int(timeline.shown_by[rank]))
        _check_streams(timeline, mine)
        graph = workload.graph_of(rank)
        starts, ends = np.zeros(len(graph)), np.zeros(len(graph))
        starts[timeline.node[mine]] = timeline.start_ns[mine]
        ends[timeline.node[mine]] = timeline.end_ns[mine]
        known = np.isin(np.arange(len(graph)), timeline.node[mine])
        deps = all_deps(graph)
        both = known[deps.row_ids] & known[deps.values]
        assert (ends[deps.values] <= starts[deps.row_ids])[both].all()
    _check_meetings(done)
    path = done.critical_path
    assert timeline.end_ns[path[-1:]].tolist() == ([done.step_ns] if len(path) else [])
    worst = max(done.classes, key=lambda found: found.finish_ns)
    assert sum(worst.critical_path.class_ns.values()) == pytest.approx(done.step_ns)


def _check_streams(timeline: Timeline, mine: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    """No stream of a rank does two things at once."""
    order = mine[np.lexsort((timeline.start_ns[mine], timeline.stream[mine], timeline.resource[mine]))]
    one, two = order[:-1], order[1:]
    same = (timeline.resource[one] == timeline.resource[two]) & (timeline.stream[one] == timeline.stream[two])
    assert (timeline.end_ns[one] <= timeline.start_ns[two])[same].all()


def _check_meetings(done: Simulation) -> None:
    """Members of a group leave each collective together, and not before any of them came."""
    timeline, workload = done.timeline, done.workload
    left: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for rank in range(workload.num_ranks):
        graph = workload.graph_of(rank)
        table = graph.collectives
        rows: list[int] = table.group_set.tolist()
        for place, (node, row) in enumerate(zip(table.node.tolist(), rows, strict=True)):
            group_set = graph.group_sets[row]
            span = np.flatnonzero((timeline.rank == int(timeline.shown_by[rank])) & (timeline.node == node))
            if len(span):
                key = (hash(group_set), group_set.group_of(rank), place)
                left.setdefault(key, []).append(
                    (float(timeline.start_ns[span[0]]), float(timeline.end_ns[span[0]]))
                )
    for spans in left.values():
        assert len({end for _, end in spans}) == 1
        assert max(start for start, _ in spans) <= spans[0][1]
