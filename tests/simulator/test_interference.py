"""Contention of communication and kernels: rates by hand, and properties on random jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.graph import Diagnostics, Estimate, NodeKind, OpGraph, StridedGroups, Workload
from hespas.graph.columns import constant
from hespas.graph.passes import all_deps
from hespas.hardware import Device, load_device
from hespas.hardware.kernel_shares import INTERFERENCE_FACTORS, held_units, interference_factor
from hespas.simulator import JobScheduler, ListScheduler, Simulation, simulate
from hespas.simulator.interference import Pressure, pressures_of
from tests.simulator.job.small_jobs import jobs, part, stages

EXAMPLES = settings(max_examples=40)
TALKS = tuple(int(kind) for kind in (NodeKind.COLLECTIVE, NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE))


def pressure(graph: OpGraph, *, holds: float = 0.5, moves: float = 0.25, by_units: float = 0.5) -> Pressure:
    """Every kernel limited in part by arithmetic, by memory for the rest."""
    communications = np.isin(graph.kind, TALKS)
    computes = graph.kind == int(NodeKind.COMPUTE)
    return Pressure(
        holds=np.where(communications, holds, 0.0),
        moves=np.where(communications, moves, 0.0),
        by_units=np.where(computes, by_units, 0.0),
        by_memory=np.where(computes, 1.0 - by_units, 0.0),
        stretches=graph.kind == int(NodeKind.COLLECTIVE),
    )


def run(workload: Workload, scheduler: JobScheduler | ListScheduler, **factors: float) -> Simulation:
    pressures = [pressure(graph, **factors) for graph in workload.classes]
    return scheduler.run(workload, Diagnostics(), pressures)


def spans(done: Simulation, rank: int = 0) -> list[tuple[int, float, float]]:
    mine = done.timeline.rank == rank
    columns = (done.timeline.node, done.timeline.start_ns, done.timeline.end_ns)
    return sorted(zip(*(column[mine].tolist() for column in columns), strict=True))


def beside(compute_ns: Sequence[float], comm_ns: float, ranks: int = 1) -> Workload:
    """Kernels one after the other, and one collective that waits for none of them."""
    made = part()
    made.collective(StridedGroups.all_ranks(ranks), comm_ns)
    last: list[int] = []
    for each in compute_ns:
        last = [made.compute(each, *last)]
    return Workload.spmd(made.built(), ranks)


def test_a_kernel_goes_slower_while_a_collective_is_there_and_as_before_afterwards() -> None:
    done = run(beside([1_000.0], 300.0), ListScheduler(), holds=1.0, moves=0.0, by_units=1.0)
    # beside the collective, 300 ns, it does the work of 150
    assert spans(done) == [(0, 0.0, 300.0), (1, 0.0, 1_150.0)]
    assert done.timeline.interference_ns.tolist() == [150.0]
    assert done.classes[0].busy_ns["compute"] == 1_150.0


def test_a_collective_goes_slower_beside_a_kernel_limited_by_memory() -> None:
    done = run(beside([500.0], 1_000.0), ListScheduler(), holds=0.0, moves=0.25, by_units=0.0)
    # 500 of work at 1.25 are 625; the collective then has done 500 of its 1,000
    assert spans(done) == [(0, 0.0, 1_125.0), (1, 0.0, 625.0)]
    assert done.timeline.interference_ns.tolist() == [250.0]


def test_who_waits_for_others_holds_units_but_moves_nothing() -> None:
    late, early = part("late"), part("early")
    groups = StridedGroups.all_ranks(2)
    late.collective(groups, 100.0, late.compute(1_000.0))
    early.collective(groups, 100.0)
    early.compute(500.0)
    job = stages([late.built(), early.built()], [0, 1])
    for factors, ends_ns in (({"moves": 4.0, "holds": 0.0}, 500.0), ({"moves": 0.0, "holds": 1.0}, 750.0)):
        done = run(job, JobScheduler(), **factors)
        assert [end for _, _, end in spans(done, 1)] == [1_100.0, ends_ns]


def test_a_collective_goes_at_the_pace_of_its_slowest_member() -> None:
    busy, idle = part("busy"), part("idle")
    groups = StridedGroups.all_ranks(2)
    busy.collective(groups, 1_000.0)
    busy.compute(10_000.0)
    idle.collective(groups, 1_000.0)
    done = run(
        stages([busy.built(), idle.built()], [0, 1]), JobScheduler(), holds=0.0, moves=1.0, by_units=0.0
    )
    assert spans(done, 0)[0] == spans(done, 1)[0] == (0, 0.0, 2_000.0)
    assert done.timeline.wait_ns.tolist() == [0.0] * 3


@EXAMPLES
@given(jobs())
def test_ranks_alike_are_still_simulated_once_with_the_same_result(workload: Workload) -> None:
    one, every = (run(workload, JobScheduler(symmetry=symmetry)).timeline for symmetry in (True, False))
    assert one.finish_ns.tolist() == every.finish_ns.tolist()
    assert one.interference_ns == pytest.approx(every.interference_ns)
    assert one.busy_ns == pytest.approx(every.busy_ns)


@EXAMPLES
@given(jobs())
def test_equal_ranks_take_the_same_as_one_class_or_as_two(workload: Workload) -> None:
    single = Workload.spmd(workload.classes[0], workload.num_ranks)
    halves = (np.arange(workload.num_ranks) % 2).astype(np.int32)
    split = stages([workload.classes[0]] * int(halves.max() + 1), halves.tolist())
    one, two = (run(job, JobScheduler()).timeline for job in (single, split))
    assert one.finish_ns.tolist() == pytest.approx(two.finish_ns.tolist())


@EXAMPLES
@given(jobs())
def test_ranks_in_step_do_what_all_of_them_do_together(workload: Workload) -> None:
    single = Workload.spmd(workload.classes[0], workload.num_ranks)
    if len(single.classes[0].p2p.node):
        return
    alone, every = run(single, ListScheduler()), run(single, JobScheduler(symmetry=False))
    assert every.timeline.finish_ns.tolist() == alone.timeline.finish_ns.tolist()
    assert spans(every) == spans(alone)


@EXAMPLES
@given(jobs(), st.booleans())
def test_nothing_is_shorter_than_alone_or_before_what_it_needs(workload: Workload, symmetry: bool) -> None:
    done, plain = (
        run(workload, JobScheduler(symmetry=symmetry, interference=interference)).timeline
        for interference in (True, False)
    )
    took = {(rank, node): end - start for rank, node, start, end in rows(plain)}
    for rank in np.unique(done.rank).tolist():
        graph = workload.graph_of(rank)
        mine = done.rank == rank
        starts, ends = np.full(len(graph), np.nan), np.full(len(graph), np.nan)
        starts[done.node[mine]], ends[done.node[mine]] = done.start_ns[mine], done.end_ns[mine]
        deps = all_deps(graph)
        known = ~np.isnan(ends[deps.values]) & ~np.isnan(starts[deps.row_ids])
        assert (ends[deps.values] <= starts[deps.row_ids])[known].all()
        own = graph.kind == int(NodeKind.COMPUTE)
        for node in np.flatnonzero(own & ~np.isnan(ends)).tolist():
            assert ends[node] - starts[node] >= took[rank, node] * (1 - 1e-9)
    for resource in range(len(done.resources)):
        for stream in np.unique(done.stream[done.resource == resource]).tolist():
            for rank in np.unique(done.rank).tolist():
                chosen = (done.resource == resource) & (done.stream == stream) & (done.rank == rank)
                order = np.argsort(done.start_ns[chosen], kind="stable")
                assert (done.end_ns[chosen][order][:-1] <= done.start_ns[chosen][order][1:]).all()


def rows(timeline: object) -> list[tuple[int, int, float, float]]:
    from hespas.graph import Timeline

    assert isinstance(timeline, Timeline)
    columns = (timeline.rank, timeline.node, timeline.start_ns, timeline.end_ns)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@EXAMPLES
@given(st.lists(st.integers(1, 900), max_size=6), st.lists(st.integers(1, 900), max_size=6))
def test_a_step_of_two_queues_is_never_faster_with_interference(compute: list[int], comm: list[int]) -> None:
    made = part()
    last: list[int] = []
    for each in compute:
        last = [made.compute(float(each), *last)]
    last = []
    for each in comm:
        last = [made.collective(None, float(each), *last)]
    job = Workload.spmd(made.built(), 2)
    steps = [run(job, ListScheduler(interference=on)).step_ns for on in (True, False)]
    assert steps[0] >= steps[1]


def test_trips_that_are_extrapolated_take_what_all_of_them_take() -> None:
    from hespas.graph import RegionKind

    made = part("loop")
    made.region = made.builder.add_region(RegionKind.LOOP_BODY, trips=200)
    communication = made.collective(StridedGroups.all_ranks(2), 300.0)
    made.compute(500.0)
    made.compute(100.0, communication)
    job = Workload.spmd(made.built(), 2)
    whole, folded = (run(job, ListScheduler(max_executions=most)) for most in (10_000, 10))
    assert folded.classes[0].extrapolated == 1
    assert folded.step_ns == pytest.approx(whole.step_ns)
    assert folded.timeline.interference_ns == pytest.approx(whole.timeline.interference_ns)
    assert folded.step_ns > run(job, ListScheduler(interference=False)).step_ns


# --- What is known of devices


def estimated(graph: OpGraph, *, estimator: int = 0) -> Estimate:
    nodes = len(graph)
    return Estimate(
        hardware="A100-SXM-40GB",
        estimators=("model",),
        bounds=("model",),
        duration_ns=graph.duration_ns if estimator >= 0 else constant(np.nan, nodes),
        low_ns=constant(np.nan, nodes),
        high_ns=constant(np.nan, nodes),
        estimator=np.full(nodes, estimator, np.int8),
        bound=np.full(nodes, estimator, np.int8),
    )


def test_estimates_interfere_and_recorded_times_stay_as_they_are() -> None:
    job, device = beside([50_000.0], 20_000.0, 2), load_device("A100-SXM-40GB")
    graph = job.classes[0]
    for estimates, simulator, slower in (
        ([estimated(graph)], None, True),
        ([estimated(graph)], JobScheduler(interference=False), False),
        ([estimated(graph)], ListScheduler(interference=False), False),
        ([estimated(graph, estimator=-1)], None, False),
    ):
        done = simulate(job, estimates, simulator=simulator, device=device, diagnostics=Diagnostics())
        assert (done.step_ns > 50_000.0) == slower
        assert bool(done.classes[0].interference_ns) == slower


@pytest.mark.parametrize("name", ["TPU-v5p", "Gaudi-3", "Trainium-2"])
def test_engines_beside_the_cores_take_nothing_from_them(name: str) -> None:
    job, device = beside([50_000.0], 20_000.0, 2), load_device(name)
    assert held_units(device) is None
    assert pressures_of(job, [estimated(job.classes[0])], device, Diagnostics()) is None


def told_of(device: Device) -> str:
    """Return the message about interference on a device."""
    job, found = beside([50_000.0], 20_000.0, 2), Diagnostics()
    pressures_of(job, [estimated(job.classes[0])], device, found)
    (told,) = [each.message for each in found if each.code == "simulate.interference"]
    return told


_MEAN = "error of one more device: another device)"


@pytest.mark.parametrize(
    ("name", "held", "fitted"),
    [
        ("A100-SXM-40GB", "A100-SXM-40GB, as recorded)", "trace_diff/control))"),
        ("A100-SXM-80GB", "A100-SXM-40GB, as recorded: another device)", _MEAN),
        ("H100-SXM", "A100-SXM-40GB, as recorded: another family)", _MEAN),
        ("V100-SXM2-32GB", "V100-SXM2-32GB, as recorded)", "dlrm_kineto))"),
        (
            "V100-SXM2-16GB",
            "V100-SXM2-32GB, as recorded: another device)",
            "one more device: another device)",
        ),
        ("MI350X", "on MI350X, as recorded)", "rocprof/908_results))"),
        ("MI300X", "on MI350X, as recorded: another family)", _MEAN),
    ],
)
def test_figures_say_whose_they_are(name: str, held: str, fitted: str) -> None:
    told = told_of(load_device(name))
    assert held in told
    assert told.endswith(fitted)


def test_other_devices_have_the_mean_and_say_how_wide_it_is() -> None:
    device = load_device("H100-SXM")
    assert "24 of 132 SMs" in told_of(device)
    assert interference_factor(device, "memory").std_error > 0.5
    assert {each.device for each in INTERFERENCE_FACTORS} == {
        "A100-SXM-40GB",
        "V100-SXM2-32GB",
        "MI350X",
        "*",
    }
    assert held_units(replace(device, kind="cpu")) is None
