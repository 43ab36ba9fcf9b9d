"""Ranks that are simulated once end every node as in a run of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.graph import CollectiveKind, GroupSet, NodeKind, Permutation, StridedGroups, Workload
from hespas.graph.errors import UnsupportedError
from hespas.simulator.astra import AstraOptions, Backend, NetworkConfig, SystemConfig
from hespas.simulator.astra.configuration import Optimization, Topology
from hespas.simulator.astra.events import EventQueue
from hespas.simulator.astra.lockstep import alike, run_alike
from hespas.simulator.astra.network import UnawareNetwork
from hespas.simulator.astra.plans import Planner
from hespas.simulator.astra.ranks import run_all
from hespas.simulator.astra.traces import AstraTraces
from hespas.validators.checker.execution import stated_costs
from tests.simulator.astra.small_systems import KINDS, collective, finishes, network, run, system
from tests.validators.checker.small_jobs import Steps


def traces_of(workload: Workload, machine: SystemConfig) -> AstraTraces:
    ids = GroupIds.of(workload)

    def number(groups: GroupSet, rank: int) -> int:
        return int(ids.text(groups, rank) or b"0")

    return AstraTraces.of(workload, machine, [stated_costs(graph) for graph in workload.classes], number)


def kinds_and_equal(
    workload: Workload,
    wires: NetworkConfig,
    machine: SystemConfig,
    queues: int = 1,
    backend: Backend = "unaware",
) -> int | None:
    """Return the number of simulated ranks; None if all are simulated. Check that the times of all nodes of
    all ranks equal a run of all ranks.
    """
    options = AstraOptions(system=machine, network=wires, queues_per_dim=queues, backend=backend)
    traces = traces_of(workload, machine)
    shown_run = run_alike(traces, options)
    if shown_run is None:
        return None
    ranks, _ = run_all(traces.of_ranks(range(workload.num_ranks)), options)
    places: list[int] = shown_run.shown_by.tolist()
    for rank, shown_by in zip(ranks, places, strict=True):
        shown, full = shown_run.ranks[shown_by], rank.result()
        assert list(shown.start_ns) == list(full.start_ns)
        assert list(shown.end_ns) == list(full.end_ns)
        assert list(shown.cause) == list(full.cause)
        assert shown.finish_ns == full.finish_ns
    return len(shown_run.ranks)


MIB = 1 << 20
TOPOLOGIES: tuple[Topology, ...] = ("Ring", "FullyConnected", "Switch")
ALGORITHMS = ("ring", "direct", "direct2", "halvingDoubling")
SIZES = (1, 1000, 4096, 1 << 20, 3145735)


@st.composite
def systems(draw: st.DrawFn) -> tuple[NetworkConfig, SystemConfig, int]:
    dims = draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3))
    names: list[Topology] = [draw(st.sampled_from(TOPOLOGIES)) for _ in dims]
    wires = network(
        *zip(names, dims, strict=True),
        gib_per_s=draw(st.sampled_from([1.0, 50.0])), latency_ns=draw(st.sampled_from([0.0, 500.0, 10.0])),
    )  # fmt: skip
    optimization: Optimization = draw(st.sampled_from(["baseline", "localBWAware"]))
    machine = system(
        *(draw(st.sampled_from(ALGORITHMS)) for _ in dims),
        optimization=optimization,
        dataset_splits=draw(st.integers(1, 5)),
        active_chunks_per_dimension=draw(st.integers(1, 3)),
        endpoint_delay_ns=draw(st.sampled_from([1, 10, 1000])),
        local_memory_gb_per_s=draw(st.sampled_from([None, 1.0, 1600.0])),
    )
    return wires, machine, draw(st.sampled_from([1, 1, 2, 4]))


@st.composite
def jobs(draw: st.DrawFn, ranks: int) -> Workload:
    """A graph per stage: computations of the host and the device, collectives, messages between stages."""
    count = draw(st.sampled_from([each for each in (1, 1, 2, 4) if each <= ranks]))
    per_stage = ranks // count
    stages = tuple(Steps(ranks) for _ in range(count))
    sets: list[GroupSet | None] = [None]  # also of unlike stages, at which all ranks are run
    if count > 2:  # of the ranks at one place of two neighbouring stages
        sets.append(StridedGroups(((count // 2, 2 * per_stage), (per_stage, 1)), ((2, per_stage),)))
    for inner in (2, 4, 8):
        if inner < per_stage:
            sets.append(StridedGroups(((ranks // inner, inner),), ((inner, 1),)))
            sets.append(StridedGroups(((count, per_stage), (inner, 1)), ((per_stage // inner, inner),)))
    ends = [[0] for _ in stages]
    for at in range(draw(st.integers(1, 7))):
        what = draw(st.sampled_from(["compute", "host", "collective", "message"]))
        microseconds = draw(st.integers(0, 3))
        chosen = draw(st.sampled_from(sets)) if sets else None
        kind, size = draw(st.sampled_from(KINDS)), draw(st.sampled_from(SIZES))
        back = draw(st.lists(st.integers(0, at), max_size=2, unique=True)) if at else []
        ahead = draw(st.booleans())
        for number, steps in enumerate(stages):
            node, deps = 0, [ends[number][place] for place in back if place]
            if what == "collective" and sets:
                node = steps.coll(*deps, kind=kind, size=float(max(size, 8)), groups=chosen)
            elif what == "message" and count > 1:
                shift = 1 if ahead else -1
                hop = Permutation(ranks, (count, per_stage), shift, wraps=False)
                if 0 <= number - shift < count:
                    node = steps.message(NodeKind.RECV, deps, hop, size=float(size), tag=at)
                    deps = [node]
                if 0 <= number + shift < count:
                    node = steps.message(NodeKind.SEND, deps, hop, size=float(size), tag=at)
            else:
                node = steps.compute(*deps, ns=1000.0 * microseconds, host=what == "host")
            ends[number].append(node)
    rank_class = np.repeat(np.arange(count, dtype=np.int32), per_stage)
    return Workload(name="job", classes=tuple(each.build() for each in stages), rank_class=rank_class)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Workload, NetworkConfig, SystemConfig, int]:
    wires, machine, queues = draw(systems())
    return draw(jobs(wires.num_ranks)), wires, machine, queues


@settings(max_examples=60)
@given(cases())
def test_every_node_of_every_rank_is_when_it_is_in_a_run_of_all(
    case: tuple[Workload, NetworkConfig, SystemConfig, int],
) -> None:
    try:
        kinds_and_equal(*case)
        if len(case[1].npus) == 1:
            kinds_and_equal(*case, backend="aware")
    except UnsupportedError:
        return  # what neither can run


def equal_ranks(ranks: int) -> Workload:
    """One all-reduce, the same on every rank."""
    steps = Steps(ranks)
    steps.coll(size=float(MIB))
    return Workload(name="job", classes=(steps.build(),), rank_class=np.zeros(ranks, np.int32))


def spmd(
    ranks: int, inner: int, kinds: Sequence[CollectiveKind] = KINDS, sizes: Sequence[int] = (1 << 20,)
) -> Workload:
    """Computations and collectives of all ranks, of groups of neighbours and of groups across them."""
    steps = Steps(ranks)
    last: list[int] = []
    near = StridedGroups(((ranks // inner, inner),), ((inner, 1),))
    far = StridedGroups(((inner, 1),), ((ranks // inner, inner),))
    for size in sizes:
        for kind in kinds:
            last = [steps.compute(*last, ns=3000.0)]
            for groups in (near, None, far):
                steps.compute(*last, ns=20_000.0)
                last = [steps.coll(*last, kind=kind, size=float(size), groups=groups)]
    return Workload(name="job", classes=(steps.build(),), rank_class=np.zeros(ranks, np.int32))


@pytest.mark.parametrize("queues", [1, 2])
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
@pytest.mark.parametrize("local", [True, False])
def test_one_rank_stands_for_a_job_of_equal_ranks(algorithm: str, queues: int, local: bool) -> None:
    machine = system(
        algorithm, algorithm,
        optimization="localBWAware" if local else "baseline", active_chunks_per_dimension=2,
    )  # fmt: skip
    wires = network(("FullyConnected", 4), ("Switch", 3))
    assert kinds_and_equal(spmd(12, 4), wires, machine, queues) == 1


def test_groups_that_see_the_network_differently_are_not_taken_for_equal() -> None:
    """On a ring of 8, the last of 4 neighbours is 3 hops from the first, the others 1 from each other."""
    wires, machine = network(("Ring", 8)), system("ring")
    assert kinds_and_equal(spmd(8, 4), wires, machine) == 8
    assert kinds_and_equal(spmd(8, 2), wires, machine) == 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("algorithm", ["ring", "halvingDoubling"])
def test_messages_that_never_meet_have_no_congestion(topology: Topology, algorithm: str) -> None:
    """Over a switch, and to the next rank of a ring; a ring's messages of several hops may meet."""
    job, machine = spmd(8, 2, KINDS[:3]), system(algorithm)
    alike = topology != "Ring"
    assert kinds_and_equal(job, network((topology, 8)), machine, 1, "aware") == (1 if alike else None)
    every = equal_ranks(8)
    alike |= algorithm == "ring"
    assert kinds_and_equal(every, network((topology, 8)), machine, 1, "aware") == (1 if alike else None)


def test_congestion_between_chunks_is_left_to_a_run_of_all() -> None:
    job, wires = equal_ranks(8), network(("Ring", 8))
    two = system("ring", active_chunks_per_dimension=2)
    assert kinds_and_equal(job, wires, two, 1, "aware") is None
    assert kinds_and_equal(job, wires, system("direct"), 1, "aware") is None


def test_places_of_a_tree_are_not_taken_for_equal() -> None:
    assert kinds_and_equal(equal_ranks(8), network(("Switch", 8)), system("doubleBinaryTree")) is None


def test_ranks_that_start_at_different_times_are_all_run() -> None:
    job = collective(CollectiveKind.ALL_REDUCE, MIB, 4, {2: 7000.0})
    assert kinds_and_equal(job, network(("Ring", 4)), system("ring")) == 4
    assert kinds_and_equal(job, network(("Ring", 4)), system("direct")) is None
    assert kinds_and_equal(job, network(("Ring", 4)), system("ring"), 1, "aware") is None


def test_a_rank_that_goes_on_beside_an_unlike_collective_is_run_from_the_start() -> None:
    """The last collective is of all stages; on the second stage, a computation ends during it."""
    stages = Steps(8), Steps(8)
    near = StridedGroups(((2, 4),), ((4, 1),))
    for number, steps in enumerate(stages):
        before = steps.coll(steps.compute(ns=5000.0 + number), size=float(MIB), groups=near)
        if number:
            steps.compute(before, ns=1000.0)
        steps.coll(before, size=4.0 * MIB)
    classes = tuple(stage.build() for stage in stages)
    job = Workload(name="job", classes=classes, rank_class=np.repeat(np.arange(2, dtype=np.int32), 4))
    assert kinds_and_equal(job, network(("Switch", 8)), system("ring")) == 8


def test_a_norm_of_gradients_at_the_end_of_a_pipeline_leaves_the_stages_alike() -> None:
    """The events of most of the step are those of one rank per stage."""
    stages = tuple(Steps(16) for _ in range(4))
    near = StridedGroups(((4, 4),), ((4, 1),))
    for number, steps in enumerate(stages):
        last = [steps.compute(ns=1000.0 * (1 + number))]
        for _ in range(20):
            last = [steps.coll(*last, size=float(MIB), groups=near)]
            last = [steps.compute(*last, ns=3000.0)]
        last = [steps.coll(*last, size=float(MIB))]
        steps.compute(*last, ns=2000.0)
    classes = tuple(stage.build() for stage in stages)
    job = Workload(name="job", classes=classes, rank_class=np.repeat(np.arange(4, dtype=np.int32), 4))
    wires, machine = network(("FullyConnected", 4), ("Switch", 4)), system("ring", "ring")
    assert kinds_and_equal(job, wires, machine) == 16
    options = AstraOptions(system=machine, network=wires)
    traces = traces_of(job, machine)
    found = alike(traces, options, Planner(machine, wires), UnawareNetwork(wires, EventQueue()))
    assert found is not None
    assert len(np.unique(found.kinds)) == 4
    assert len(found.stops) == 4


def test_the_order_of_one_moment_is_not_guessed() -> None:
    """The second computation is issued when the last message arrives, and ends with the collective: which of
    them ends first is told by events between ranks.
    """
    steps = Steps(2)
    first = steps.compute(ns=2000.0)
    steps.compute(first, ns=1000.0)
    steps.coll(kind=CollectiveKind.ALL_TO_ALL, size=8.0)
    job = Workload(name="job", classes=(steps.build(),), rank_class=np.zeros(2, np.int32))
    wires = network(("FullyConnected", 2), gib_per_s=1e6, latency_ns=1000.0)
    machine = system("direct", dataset_splits=1, endpoint_delay_ns=1000)
    assert kinds_and_equal(job, wires, machine) is None
    assert finishes(run(job, wires, machine)) == [3000, 3000]


def test_a_pipeline_is_run_by_one_rank_per_stage() -> None:
    """Two stages of 4 ranks, 3 microbatches there and back."""
    stages = Steps(8), Steps(8)
    ahead, back = (Permutation(8, (2, 4), shift, wraps=False) for shift in (1, -1))
    near = StridedGroups(((2, 4),), ((4, 1),))
    for tag in range(3):
        here = stages[0].coll(stages[0].compute(ns=5000.0), size=float(MIB), groups=near)
        stages[0].message(NodeKind.SEND, [here], ahead, size=1e6, tag=tag)
        come = stages[1].message(NodeKind.RECV, [], ahead, size=1e6, tag=tag)
        there = stages[1].compute(come, ns=7000.0)
        stages[1].message(NodeKind.SEND, [there], back, size=2e6, tag=tag)
        gone = stages[0].message(NodeKind.RECV, [], back, size=2e6, tag=tag)
        stages[0].compute(gone, ns=9000.0)
    classes = tuple(stage.build() for stage in stages)
    job = Workload(name="job", classes=classes, rank_class=np.repeat(np.arange(2, dtype=np.int32), 4))
    wires = network(("FullyConnected", 4), ("Ring", 2))
    assert kinds_and_equal(job, wires, system("ring", "ring")) == 2
