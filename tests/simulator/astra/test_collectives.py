"""Collectives against closed forms. T(m) = floor(hops x latency + m / B), B = 50 GiB/s = 53.687 bytes/ns;
P(m) = 3 floor(m / 1600) is a reduction, d = 10 ns the endpoint delay; 4 chunks follow each other.
"""

from __future__ import annotations

import pytest

from hespas.graph import CollectiveKind, Workload
from hespas.graph.errors import CheckFailedError, UnsupportedError
from hespas.simulator.astra import SystemConfig
from hespas.simulator.astra.configuration import Topology
from tests.simulator.astra.small_systems import collective, finishes, network, run, system
from tests.validators.checker.small_jobs import Steps, job_of

MIB = 1 << 20
BYTES_PER_NS = 50.0 * (1 << 30) / 1e9
D = 10


def time_ns(size: int, hops: int) -> int:
    return int(hops * 500.0 + size / BYTES_PER_NS)


def reduction_ns(size: int) -> int:
    return 3 * int(size / 1600e9 * 1e9)


HOPS: dict[Topology, int] = {"Ring": 1, "FullyConnected": 1, "Switch": 2}


@pytest.mark.parametrize("topology", HOPS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ring(topology: Topology, ranks: int) -> None:
    size, hops = MIB, HOPS[topology]
    chunk = size // 4
    m = chunk // ranks
    streams = -(-size // chunk)
    t, p = time_ns(m, hops), reduction_ns(m)
    expected = {
        CollectiveKind.ALL_REDUCE: (2 * ranks - 1) * D + 2 * (ranks - 1) * t + (ranks - 1) * p,
        CollectiveKind.REDUCE_SCATTER: ranks * D + (ranks - 1) * (t + p),
        CollectiveKind.ALL_GATHER: ranks * D + (ranks - 1) * time_ns(chunk, hops),
    }
    for kind, phase_ns in expected.items():
        done = run(collective(kind, size, ranks), network((topology, ranks)))
        assert finishes(done) == [streams * phase_ns] * ranks, kind


def test_all_to_all_on_a_ring_takes_every_step_in_turn() -> None:
    steps = 8 * 7 // 2
    expected = 4 * ((steps + 1) * D + steps * time_ns(MIB // 32, 1))
    done = run(collective(CollectiveKind.ALL_TO_ALL, MIB, 8), network(("FullyConnected", 8)))
    assert finishes(done) == [expected] * 8


def test_direct_on_a_switch() -> None:
    m = MIB // 32
    t, p = time_ns(m, 2), reduction_ns(m)
    wires, machine = network(("Switch", 8)), system("direct")
    for kind, phase_ns in (
        (CollectiveKind.ALL_TO_ALL, 2 * D + t),
        (CollectiveKind.ALL_GATHER, 2 * D + time_ns(MIB // 4, 2)),
        (CollectiveKind.REDUCE_SCATTER, 2 * D + t + p),
        (CollectiveKind.ALL_REDUCE, 3 * D + 2 * t + p),
    ):
        assert finishes(run(collective(kind, MIB, 8), wires, machine)) == [4 * phase_ns] * 8, kind


def test_two_chunks_at_a_time_take_half_as_long() -> None:
    wires, job = network(("Switch", 8)), collective(CollectiveKind.ALL_REDUCE, MIB, 8)
    one = run(job, wires, system("ring"))
    two = run(job, wires, system("ring", active_chunks_per_dimension=2))
    assert finishes(one) == [2 * each for each in finishes(two)]


def test_chunks_are_at_least_a_byte_per_rank_of_the_system() -> None:
    """1,000 B over 4 chunks is rounded up to nothing: 250 B each; 10 B become 4 chunks of 8 B."""
    wires = network(("Ring", 8))
    small = run(collective(CollectiveKind.ALL_REDUCE, 10, 8), wires)
    assert finishes(small) == [4 * (15 * D + 14 * time_ns(1, 1))] * 8


def test_a_remainder_is_a_whole_chunk_more() -> None:
    wires = network(("Ring", 2))
    exact = finishes(run(collective(CollectiveKind.ALL_REDUCE, 4096, 2), wires))[0]
    more = finishes(run(collective(CollectiveKind.ALL_REDUCE, 4097, 2), wires))[0]
    assert more * 4 == exact * 5


def test_without_memory_bandwidth_reductions_are_free() -> None:
    machine = system("ring", local_memory_gb_per_s=None)
    done = run(collective(CollectiveKind.ALL_REDUCE, MIB, 2), network(("Ring", 2)), machine)
    assert finishes(done) == [4 * (3 * D + 2 * time_ns(MIB // 8, 1))] * 2


def test_each_dimension_of_a_torus_is_reduced_and_gathered() -> None:
    """Reduce-scatter inside, all-reduce outside, all-gather inside: queue times of a line of 2 ranks."""
    wires = network(("Ring", 2), ("Ring", 2))
    machine = system("ring", "ring", dataset_splits=1)
    done = run(collective(CollectiveKind.ALL_REDUCE, MIB, 4), wires, machine)
    half, quarter = MIB // 2, MIB // 4
    scatter = 2 * D + time_ns(half, 1) + reduction_ns(half)
    reduce = 3 * D + 2 * time_ns(quarter, 1) + reduction_ns(quarter)
    gather = 2 * D + time_ns(half, 1)
    assert finishes(done) == [scatter + reduce + gather] * 4


def test_baseline_reduces_the_whole_in_each_dimension() -> None:
    wires = network(("Ring", 2), ("Ring", 2))
    machine = system("ring", "ring", dataset_splits=1, optimization="baseline")
    done = run(collective(CollectiveKind.ALL_REDUCE, MIB, 4), wires, machine)
    half = MIB // 2
    assert finishes(done) == [2 * (3 * D + 2 * time_ns(half, 1) + reduction_ns(half))] * 4


def test_all_ranks_wait_for_the_last() -> None:
    job = collective(CollectiveKind.ALL_REDUCE, MIB, 4, {2: 7000.0})
    alone = finishes(run(collective(CollectiveKind.ALL_REDUCE, MIB, 4), network(("Ring", 4))))[0]
    done = run(job, network(("Ring", 4)))
    assert max(finishes(done)) == 7000 + alone
    assert done.statistics.exposed_comm_ns.tolist()[2] == alone


def test_congestion_counts_both_links_of_a_switch() -> None:
    """Two ranks swap m bytes: up, then down, each floor(latency + m / B)."""
    m = MIB // 8
    done = run(
        collective(CollectiveKind.ALL_TO_ALL, MIB, 2),
        network(("Switch", 2)),
        system("direct"),
        backend="aware",
    )
    assert finishes(done) == [4 * (2 * D + 2 * time_ns(m, 1))] * 2


def test_double_binary_tree_of_two() -> None:
    """Up and down, the whole chunk; each of the 4 trees makes the other rank the root."""
    s = MIB // 4
    t, p = time_ns(s, 1), reduction_ns(s)
    done = run(
        collective(CollectiveKind.ALL_REDUCE, MIB, 2), network(("Ring", 2)), system("doubleBinaryTree")
    )
    # The leaf: bus, up, (root: bus and reduction), down, bus. The root is done a message and a bus earlier;
    # in the next chunk it is the leaf and begins then.
    leaf, root = 3 * D + 2 * t + p, 2 * D + t + p
    first = [leaf, root]
    for tree in range(1, 4):
        place = 1 if tree % 2 else 0  # who is the leaf
        other = 1 - place
        at_root = max(first[place] + D + t, first[other]) + D + p
        first[place], first[other] = at_root + t + D, at_root
    assert finishes(done) == first


@pytest.mark.parametrize(
    ("algorithm", "kind", "ranks", "message"),
    [
        ("doubleBinaryTree", CollectiveKind.ALL_REDUCE, 6, "power of two"),
        ("halvingDoubling", CollectiveKind.ALL_TO_ALL, 8, "not implemented"),
        ("star", CollectiveKind.ALL_REDUCE, 8, "'star' is unknown"),
        ("direct0", CollectiveKind.ALL_REDUCE, 8, "'direct0' is unknown"),
    ],
)
def test_what_astra_sim_cannot_run_is_an_error(
    algorithm: str, kind: CollectiveKind, ranks: int, message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        run(collective(kind, MIB, ranks), network(("Ring", ranks)), system(algorithm))


@pytest.mark.parametrize("kind", [CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER])
def test_a_tree_runs_every_collective_as_an_all_reduce(kind: CollectiveKind) -> None:
    wires, machine = network(("Ring", 8)), system("doubleBinaryTree")
    expected = finishes(run(collective(CollectiveKind.ALL_REDUCE, MIB, 8), wires, machine))
    assert finishes(run(collective(kind, MIB, 8), wires, machine)) == expected


def test_halving_without_a_power_of_two_deadlocks_but_for_an_all_gather_of_an_even_number() -> None:
    """Recorded with ASTRA-sim: 6 ranks gather in two steps, at distances 3 and 1; an all-reduce hangs."""
    wires = network(("FullyConnected", 6))
    machine = system("halvingDoubling", dataset_splits=1)
    done = run(collective(CollectiveKind.ALL_GATHER, MIB, 6), wires, machine)
    assert finishes(done) == [3 * D + time_ns(MIB, 1) + time_ns(2 * MIB, 1)] * 6
    with pytest.raises(CheckFailedError, match="never finish"):
        run(collective(CollectiveKind.ALL_REDUCE, MIB, 6), wires, machine)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12])
def test_halving_without_a_power_of_two_deadlocks_if_all_ranks_run_one_program(ranks: int) -> None:
    """As in runs of ASTRA-sim, which finish no rank of an all-reduce."""
    steps = Steps(ranks)
    steps.coll(size=float(MIB))
    with pytest.raises(CheckFailedError, match=f"{ranks} of {ranks} ranks never finish"):
        run(Workload.spmd(steps.build(), ranks), network(("Switch", ranks)), system("halvingDoubling"))


def test_fewer_algorithms_than_dimensions_leave_the_outer_ones_out() -> None:
    wires, inner = network(("Ring", 2), ("Ring", 4)), network(("Ring", 2))
    done = run(collective(CollectiveKind.ALL_REDUCE, MIB, 8), wires, system("ring"))
    assert finishes(done)[0] == finishes(run(collective(CollectiveKind.ALL_REDUCE, MIB, 2), inner))[0]


@pytest.mark.parametrize(("optimization", "share"), [("localBWAware", 1), ("baseline", 2)])
def test_an_all_reduce_of_a_group_takes_the_first_half_of_the_queues(optimization: str, share: int) -> None:
    """As in a world: of two queues one, unless all queues of the dimension are taken in turn."""
    times = {
        queues: finishes(run(_in_groups(), network(("Ring", 8)), _cut(optimization), queues=queues))[0]
        for queues in (1, 2)
    }
    assert times[1] == share * times[2]


def _in_groups() -> Workload:
    ranks = [Steps(8) for _ in range(8)]
    for steps in ranks:
        steps.coll(size=float(MIB), groups=[[0, 1, 2, 3], [4, 5, 6, 7]])
    return job_of(*ranks)


def _cut(optimization: str) -> SystemConfig:
    return system("ring", dataset_splits=8, optimization=optimization)


def test_an_empty_all_gather_chunk_would_never_end() -> None:
    with pytest.raises(UnsupportedError, match="ET013"):
        run(collective(CollectiveKind.ALL_GATHER, 3, 2), network(("Ring", 2)))


def test_kinds_without_an_algorithm_are_an_error() -> None:
    with pytest.raises(UnsupportedError, match="no barrier"):
        run(collective(CollectiveKind.BARRIER, 8, 2), network(("Ring", 2)))
