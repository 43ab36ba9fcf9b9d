"""Inputs on which ASTRA-sim crashes, hangs or gives wrong results are reported or impossible.

Waiting for ever is in ``test_deadlock.py``, algorithms in ``test_collectives.py``, slots and messages in
``test_issue_rules.py``; this is the rest.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from hespas.graph import CollectiveKind, Diagnostics, NodeKind, OpClass, Workload
from hespas.graph.errors import CheckFailedError, UnsupportedError
from hespas.simulator.astra import MemoryConfig
from tests.simulator.astra.small_systems import collective, finishes, network, run, system
from tests.validators.checker.small_jobs import Steps, job_of

MIB = 1 << 20
JOB = collective(CollectiveKind.ALL_REDUCE, MIB, 2)
PAIR = network(("Ring", 2))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset_splits": None}, "preferred-dataset-splits is missing: ASTRA-sim would crash"),
        ({"implementations": {}}, "without a configured implementation"),
        ({"custom": frozenset({CollectiveKind.ALL_REDUCE})}, "a custom all-reduce is not modelled"),
        ({"models_shared_bus": True}, "a shared bus is not modelled"),
        ({"roofline": True, "local_memory_gb_per_s": None, "peak_tflops": 312.0}, "needs local-mem-bw"),
        ({"roofline": True, "peak_tflops": 0.0}, "needs local-mem-bw and peak-perf"),
        (
            {"implementations": {CollectiveKind.ALL_REDUCE: ("ring", "ring")}},
            "2 names, but the network has 1",
        ),
        (
            {"implementations": {CollectiveKind.ALL_GATHER: ("oneRing", "ring")}},
            "2 names, but the network has 1",
        ),
        ({"implementations": {CollectiveKind.ALL_GATHER: ("star",)}}, "'star' is unknown"),
    ],
)
def test_what_the_files_lack(changes: dict[str, object], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        run(JOB, PAIR, system("ring", **changes))


def test_a_group_of_one_rank_would_never_end() -> None:
    ranks = [Steps(2) for _ in range(2)]
    ranks[0].coll(groups=[[0], [1]])
    ranks[1].coll(groups=[[0], [1]])
    with pytest.raises(UnsupportedError, match=r"ET019.*of one rank: ASTRA-sim never ends it"):
        run(job_of(*ranks), PAIR)


def test_a_tree_in_a_group_would_crash() -> None:
    ranks = [Steps(4) for _ in range(4)]
    for steps in ranks:
        steps.coll(groups=[[0, 1], [2, 3]])
    with pytest.raises(UnsupportedError, match=r"ET025.*of a group by doubleBinaryTree: ASTRA-sim crashes"):
        run(job_of(*ranks), network(("Ring", 4)), system("doubleBinaryTree"))


def test_a_cycle_is_no_success() -> None:
    """Node 0 ends and nothing else can: ASTRA-sim reports the rank as finished then."""
    one, two = Steps(2), Steps(2)
    one.compute()
    one.compute(2)
    one.compute(1)
    two.compute()
    with pytest.raises(CheckFailedError, match=r"ET007.*dependencies form a cycle"):
        run(job_of(one, two), PAIR)


def _with_work(job: Workload, *work: tuple[float, float]) -> Workload:
    """Give the nodes of all classes these operations and bytes."""
    flops, moved = (np.array(column) for column in zip(*work, strict=True))
    classes = tuple(
        replace(graph, flops=flops, bytes_read=moved, bytes_written=np.zeros(len(work)))
        for graph in job.classes
    )
    return replace(job, classes=classes)


def _chain(length: int) -> Workload:
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        last = each.compute()
        for _ in range(length - 1):
            last = each.compute(last)
    return job_of(*steps)


ROOFLINE = system("ring", roofline=True, peak_tflops=1.0, local_memory_gb_per_s=1e9)


@pytest.mark.parametrize("work", [(0.0, 8.0), (8.0, 0.0), (0.0, 0.0)])
def test_nodes_without_work_end_and_wake_what_waits(work: tuple[float, float]) -> None:
    """Operations of 0 are not-a-number there, bytes of 0 end at once and wake nobody: 1 is written."""
    job = _with_work(_chain(3), (1e9, 8.0), work, (1e9, 8.0))
    assert finishes(run(job, PAIR, ROOFLINE)) == [2_000_000] * 2


@pytest.mark.parametrize(
    "work",
    [(0.0, 8.0), (8.0, 0.0), (0.0, 0.0), (1.0, 8.0)],
)
def test_what_a_trace_begins_with_takes_a_nanosecond_at_least(work: tuple[float, float]) -> None:
    """ASTRA-sim's event queue aborts on an event of 0 ns at time 0."""
    job = _with_work(_chain(2), work, (1e9, 8.0))
    with pytest.raises(UnsupportedError, match=r"ET035.*starts with an event of 0 ns \(node 0 \(compute\)\)"):
        run(job, PAIR, replace(ROOFLINE, local_memory_gb_per_s=1e12, peak_tflops=1e6))


def test_a_message_of_0_ns_at_the_start_is_refused() -> None:
    sender, other = Steps(2), Steps(2)
    sender.send(0, 1, size=4.0)
    other.recv(0, 1, size=4.0)
    with pytest.raises(UnsupportedError, match=r"ET035.*rank 0 starts with an event of 0 ns"):
        run(job_of(sender, other), network(("Ring", 2), latency_ns=0.0))


def test_a_ring_of_two_with_congestion_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"ET032.*aborts on a ring of 2"):
        run(JOB, PAIR, backend="aware")
    assert finishes(run(JOB, network(("FullyConnected", 2)), backend="aware"))


def test_only_a_switch_with_congestion_carries_a_message_to_its_sender() -> None:
    one, two = Steps(2), Steps(2)
    one.recv(0, 0, size=float(MIB))
    one.send(0, 0, size=float(MIB))
    two.compute()
    job = job_of(one, two)
    done = run(job, network(("Switch", 2)), backend="aware")
    assert finishes(done)[0] == 2 * int(500 + MIB / (50 * 2**30 / 1e9))
    with pytest.raises(UnsupportedError, match=r"ET014.*to itself"):
        run(job, network(("FullyConnected", 2)), backend="aware")


@pytest.mark.parametrize("kind", ["host", "memory"])
def test_a_message_as_the_last_event_of_a_rank_with_other_times_ends_all(kind: str) -> None:
    """ASTRA-sim throws where it sums up such a rank, which only a timer of the rank survives."""
    memory = MemoryConfig(path="m", memory_type="PER_NPU_MEMORY_EXPANSION", latency_ns=100, bandwidth=1)
    with pytest.raises(UnsupportedError, match=r"ET034.*rank 0 ends with a message"):
        run(_sent_after(kind, ends_in_compute=False), PAIR, memory=memory)
    assert finishes(run(_sent_after(kind, ends_in_compute=True), PAIR, memory=memory))


def _sent_after(kind: str, *, ends_in_compute: bool) -> Workload:
    ranks = [Steps(2) for _ in range(2)]
    for rank, steps in enumerate(ranks):
        if kind == "host":
            first = steps.compute(host=True)
        else:
            first = steps.node(NodeKind.MEM_LOAD, (), OpClass.MEMORY, "load")
        last = (steps.recv if rank else steps.send)(0, 1, first, size=float(MIB))
        if ends_in_compute:
            steps.compute(last)
    return job_of(*ranks)


def test_durations_are_the_whole_microseconds_that_a_trace_states() -> None:
    """A trace carries remainders on, so that 4.5 us twice are 5 us and 4 us."""
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        each.compute(each.compute(ns=4500.0), ns=4500.0)
    done = run(job_of(*steps), PAIR)
    assert finishes(done) == [9000, 9000]
    first = done.timeline.start_ns.tolist().index(5000.0)
    assert done.timeline.end_ns[first] == 9000.0


def test_metadata_nodes_are_refused() -> None:
    one, two = Steps(2), Steps(2)
    one.node(NodeKind.METADATA, (), OpClass.CONTROL, "groups")
    two.compute()
    with pytest.raises(UnsupportedError, match=r"ET009.*node 0 of type METADATA"):
        run(job_of(one, two), PAIR)


def test_a_replay_asks_for_no_peer_and_no_size() -> None:
    one, two = Steps(2), Steps(2)
    one.builder.set(one.send(1, 0, size=nan), duration_ns=3000.0)
    two.builder.set(two.coll(size=nan), duration_ns=5000.0)
    assert finishes(run(job_of(one, two), PAIR, system("ring", replays_only=True))) == [3000, 5000]


def test_overlap_beside_the_host_is_not_defined() -> None:
    """ASTRA-sim ends with an error where a rank runs more than computation and communication."""
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        each.coll(each.compute(host=True), size=float(MIB))
        each.compute()
    done = run(job_of(*steps), PAIR)
    assert done.statistics.overlap_ns.tolist() == [-1, -1]
    assert done.statistics.cpu_ns.tolist() == [1000, 1000]


def test_a_message_that_nobody_receives_is_told() -> None:
    sender, other = Steps(2), Steps(2)
    sender.send(0, 1, size=77.0, tag=3)
    other.compute()
    found = Diagnostics()
    run(job_of(sender, other), PAIR, diagnostics=found)
    [told] = [each for each in found if each.code == "simulate.unreceived"]
    assert told.message == "a message of 77 bytes with tag 3 from rank 0 is never received"


def test_keys_that_change_nothing_are_named() -> None:
    found = Diagnostics()
    machine = replace(system("ring"), unread=("boost-mode", "scheduling-policy"))
    run(JOB, PAIR, machine, diagnostics=found)
    [told] = [each for each in found if each.code == "simulate.unread-keys"]
    assert told.message == "keys without effect: boost-mode, scheduling-policy"
