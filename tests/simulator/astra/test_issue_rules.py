"""Issue rule of a rank: slots, order of ids, messages, memory, replay. T = floor(500 + m / 53.687) ns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hespas.graph import CollectiveKind, NodeKind, OpClass
from hespas.graph.errors import FormatError, UnsupportedError, UsageError
from hespas.simulator.astra import MemoryConfig
from tests.simulator.astra.small_systems import collective, finishes, network, run, system
from tests.validators.checker.small_jobs import Steps, job_of

PAIR = network(("FullyConnected", 2))
MESSAGE_NS = 501  # 64 B: floor(500 + 64 / 53.687)


def idle() -> Steps:
    steps = Steps(2)
    steps.compute()
    return steps


def test_a_computation_and_a_communication_run_side_by_side() -> None:
    one, two = Steps(2), Steps(2)
    one.send(0, 1)
    one.compute(ns=3000.0)
    two.recv(0, 1)
    two.compute(ns=1000.0)
    done = run(job_of(one, two), PAIR)
    assert finishes(done) == [3000, 1000]
    assert done.statistics.comm_ns.tolist() == [MESSAGE_NS, MESSAGE_NS]
    assert done.statistics.overlap_ns.tolist() == [MESSAGE_NS, MESSAGE_NS]
    assert done.statistics.exposed_comm_ns.tolist() == [0, 0]


def test_computations_follow_each_other_in_order_of_ids() -> None:
    steps = Steps(2)
    first, second = steps.compute(ns=2000.0), steps.compute(ns=5000.0)
    done = run(job_of(steps, idle()), PAIR)
    starts = dict(zip(done.timeline.node.tolist(), done.timeline.start_ns.tolist(), strict=False))
    assert (starts[first], starts[second]) == (0.0, 2000.0)
    assert finishes(done) == [7000, 1000]
    assert done.classes[0].critical_path.after_resource == 1


def test_the_host_has_a_slot_of_its_own() -> None:
    steps = Steps(2)
    steps.compute(ns=4000.0, host=True)
    steps.compute(ns=3000.0)
    done = run(job_of(steps, idle()), PAIR)
    assert finishes(done)[0] == 4000
    assert done.statistics.cpu_ns.tolist() == [4000, 0]
    assert done.statistics.overlap_ns.tolist() == [-1, 0]


def test_a_time_of_nothing_takes_one_nanosecond() -> None:
    steps = Steps(2)
    steps.compute(ns=0.0)
    assert finishes(run(job_of(steps, idle()), PAIR)) == [1, 1000]


def test_a_send_ends_when_it_arrives_and_a_receive_counts_from_its_call() -> None:
    one, two = Steps(2), Steps(2)
    one.send(0, 1, one.compute(ns=2000.0))
    two.recv(0, 1)
    done = run(job_of(one, two), PAIR)
    assert finishes(done) == [2000 + MESSAGE_NS] * 2
    assert done.statistics.comm_ns.tolist() == [MESSAGE_NS, 2000 + MESSAGE_NS]


def test_receives_do_not_hold_the_communication_slot() -> None:
    one, two = Steps(2), Steps(2)
    one.recv(1, 0)
    one.send(0, 1)
    two.recv(0, 1)
    two.send(1, 0)
    assert finishes(run(job_of(one, two), PAIR)) == [MESSAGE_NS] * 2


def test_messages_over_several_dimensions_are_charged_for_the_first_that_differs() -> None:
    wires = network(("Ring", 4), ("Switch", 2))
    ranks = [Steps(8) for _ in range(8)]
    for steps in ranks:
        steps.compute(ns=1000.0)
    ranks[0].send(0, 6, size=64.0)  # coordinates 0,0 -> 2,1: two hops of the ring, the switch is free
    ranks[6].recv(0, 6, size=64.0)
    done = run(job_of(*ranks), wires)
    assert done.statistics.comm_ns.tolist()[0] == 1001


def test_broadcast_takes_its_recorded_time() -> None:
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        node = each.coll(kind=CollectiveKind.BROADCAST)
        each.builder.set(node, duration_ns=5000.0)
    assert finishes(run(job_of(*steps), PAIR)) == [5000, 5000]


def test_replay_only_takes_all_recorded_times() -> None:
    job = collective(CollectiveKind.ALL_REDUCE, 4096, 2, {0: 2000.0})
    done = run(job, PAIR, system("ring", replays_only=True))
    assert finishes(done) == [2001, 1]


def roofline(flops: float, moved: float) -> list[int]:
    job = job_of(idle(), idle())
    graph = job.classes[0]
    counted = replace(graph, flops=np.full(1, flops), bytes_read=np.full(1, moved), bytes_written=np.zeros(1))
    machine = system("ring", roofline=True, peak_tflops=312.0, local_memory_gb_per_s=2039.0)
    return finishes(run(replace(job, classes=(counted, counted)), PAIR, machine))


def test_roofline_takes_the_slower_of_compute_and_memory() -> None:
    assert roofline(312e9, 1e6) == [1_000_000] * 2  # 312 GFLOP at 312 TFLOP/s
    # 1 MB at 2,039 GB/s: rate = 2039e9 x (1e6 / 1e6) FLOP/s.
    assert roofline(1e6, 1e6) == [int(1e6 / (2039e9 * (1e6 / 1e6)) * 1e9)] * 2


def test_roofline_needs_counts() -> None:
    with pytest.raises(FormatError, match="ET024"):
        roofline(float("nan"), 1.0)


def memory_job(ranks: int) -> list[Steps]:
    made = [Steps(ranks) for _ in range(ranks)]
    for steps in made:
        steps.node(NodeKind.MEM_LOAD, (), OpClass.MEMORY, "load")  # 8 bytes
    return made


@pytest.mark.parametrize(
    ("kind", "finish"),
    [
        ("PER_NPU_MEMORY_EXPANSION", [102] * 4),
        ("PER_NODE_MEMORY_EXPANSION", [102, 204, 102, 204]),
        ("MEMORY_POOL", [102, 204, 306, 408]),
    ],
)
def test_remote_memory_serves_one_at_a_time(kind: str, finish: list[int]) -> None:
    """100 ns, and 8 bytes at 4 bytes/ns."""
    memory = MemoryConfig(
        path="memory.json", memory_type=kind, latency_ns=100, bandwidth=4, nodes=2, npus_per_node=2
    )
    done = run(job_of(*memory_job(4)), network(("Ring", 4)), memory=memory)
    assert finishes(done) == finish
    assert done.statistics.remote_memory_ns.tolist() == finish


def test_memory_nodes_need_a_memory() -> None:
    with pytest.raises(UnsupportedError, match="ET027"):
        run(job_of(*memory_job(2)), PAIR)


def test_ranks_and_network_must_agree() -> None:
    with pytest.raises(UsageError, match="2 ranks, but the network has 4 NPUs"):
        run(job_of(idle(), idle()), network(("Ring", 4)))


def test_the_aware_backend_takes_one_dimension() -> None:
    job = collective(CollectiveKind.ALL_REDUCE, 4096, 4)
    with pytest.raises(UnsupportedError, match="ET032"):
        run(job, network(("Ring", 2), ("Ring", 2)), backend="aware")


def test_communication_on_the_cpu_is_refused() -> None:
    steps = [Steps(2) for _ in range(2)]
    for each in steps:
        each.coll(host=True)
    with pytest.raises(UnsupportedError, match="ET016"):
        run(job_of(*steps), PAIR)


def test_a_message_to_oneself_is_refused() -> None:
    steps = Steps(2)
    steps.send(0, 0)
    with pytest.raises(UnsupportedError, match="ET014"):
        run(job_of(steps, idle()), PAIR)
