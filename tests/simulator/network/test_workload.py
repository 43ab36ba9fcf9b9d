"""Workloads on systems: ranks of a class are split if their groups or peers have different placements."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hespas import api
from hespas.graph import (
    CollectiveKind,
    Diagnostics,
    GraphBuilder,
    NodeKind,
    OpClass,
    Permutation,
    StridedGroups,
    Workload,
)
from hespas.graph.columns import IntArray
from hespas.graph.groups import ExplicitGroups, GroupSet
from hespas.hardware import load_device, load_system
from hespas.simulator.network import Network, on_system
from hespas.simulator.network.placement import footprint_of

ROOT = Path(__file__).parents[3]
SIZE = 4e6


def job(ranks: int, *sets: GroupSet, permutation: Permutation | None = None) -> Workload:
    """An all-reduce of each set, and a message along a permutation; nothing has a time."""
    b = GraphBuilder("job")
    for number, groups in enumerate(sets):
        node = b.add_node(
            name_id=b.strings.add(f"sum{number}"),
            op_id=b.strings.add("all_reduce"),
            op_class=OpClass.COLLECTIVE,
            kind=NodeKind.COLLECTIVE,
        )
        b.add_collective(node, CollectiveKind.ALL_REDUCE, group_set=b.group_set(groups), comm_bytes=SIZE)
    if permutation is not None:
        node = b.add_node(
            name_id=b.strings.add("pass"), op_id=b.strings.add("permute"), op_class=OpClass.P2P,
            kind=NodeKind.PERMUTE,
        )  # fmt: skip
        b.add_p2p(node, permutation=b.permutation(permutation), comm_bytes=SIZE)
    return Workload.spmd(b.build(), ranks)


def network_of(name: str, ranks: int) -> Network:
    system = load_system(name).sized(ranks)
    return Network(system, load_device(system.device))


def expected(network: Network, members: IntArray) -> float:
    place = footprint_of(network.system, members)._replace(sharers=(1, 8))
    return float(network.collectives("all_reduce", "", place, np.array([SIZE]))[0][0])


def test_groups_take_the_time_of_where_they_lie() -> None:
    inside, across = StridedGroups(((2, 8),), ((8, 1),)), StridedGroups(((8, 1),), ((2, 8),))
    network = network_of("dgx-h100", 16)
    (graph,) = on_system(job(16, inside, across), None, network)[0].classes
    assert graph.duration_ns.tolist() == [
        expected(network, np.arange(8)),
        expected(network, np.array([0, 8])),
    ]


def test_a_class_parts_where_its_groups_lie_unlike() -> None:
    """Groups of four over nodes of eight with six ranks between: the middle ones cross."""
    groups = ExplicitGroups.from_rows([[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15]])
    network = network_of("dgx-h100", 16)
    parted, _ = on_system(job(16, groups), None, network)
    assert parted.rank_class.tolist() == [0] * 4 + [1] * 8 + [0] * 4
    assert [graph.duration_ns[0] for graph in parted.classes] == [
        expected(network, np.arange(4)),
        expected(network, np.arange(4, 12)),
    ]


def test_a_message_that_leaves_its_node_takes_longer() -> None:
    ring = Permutation(16, digit=(16, 1), shift=1)
    parted, _ = on_system(job(16, permutation=ring), None, network_of("dgx-h100", 16))
    assert parted.class_sizes == (14, 2)
    assert np.flatnonzero(parted.rank_class == 1).tolist() == [7, 15]
    near, far = (float(graph.duration_ns[0]) for graph in parted.classes)
    assert far > 2 * near


def test_ranks_that_lie_alike_stay_one_class() -> None:
    groups = [StridedGroups(((4096, 8),), ((8, 1),)), StridedGroups(((8, 1),), ((4096, 8),))]
    parted, _ = on_system(job(32_768, *groups), None, network_of("dgx-h100", 32_768))
    assert parted.class_sizes == (32_768,)


def test_estimates_keep_all_else() -> None:
    """Estimates of the device's own node stand; a system that is slower changes communication only."""
    program = ROOT / "fixtures" / "hlo" / "moe_all_to_all.hlo.txt"
    usual = api.simulate(program, "H100-SXM")
    same = api.simulate(program, system="dgx-h100")
    assert (same.hardware, same.system, same.step_ns) == ("H100-SXM", "dgx-h100", usual.step_ns)
    slow = api.simulate(program, "H100-SXM", system="pcie-l40s")
    assert slow.classes[0].busy_ns["compute"] == usual.classes[0].busy_ns["compute"]
    assert slow.classes[0].busy_ns["communication"] > 2 * usual.classes[0].busy_ns["communication"]
    assert slow.interval_ns[1] > slow.step_ns > slow.interval_ns[0]


def test_a_system_of_no_device_keeps_times_of_the_source() -> None:
    found = Diagnostics()
    workload = job(4, StridedGroups.all_ranks(4))
    done = api.simulate(workload, system="loopback", diagnostics=found)
    assert done.hardware == ""
    assert done.step_ns == pytest.approx(2 * 3 / 4 * SIZE / 3.5 + 2 * 2 * 35_000)
    assert found.counts()["simulate.network"] == 1


def test_group_sets_over_absent_and_foreign_ranks_say_nothing() -> None:
    """A group that names ranks beyond the job has no place; its collective keeps what it had."""
    workload = job(8, ExplicitGroups.from_rows([[0, 1], [2, 99]]))
    parted, _ = on_system(workload, None, network_of("dgx-h100", 8))
    times = {int(part): float(graph.duration_ns[0]) for part, graph in enumerate(parted.classes)}
    assert times[int(parted.rank_class[0])] > 0
    assert np.isnan(times[int(parted.rank_class[2])])
