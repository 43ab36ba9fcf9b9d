"""Network of a system: as measured on the device's own links, and scaled for other links."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from hespas.estimators.collectives import Collectives
from hespas.graph import CollectiveKind, Diagnostics
from hespas.graph.columns import FloatArray
from hespas.graph.errors import InvariantError
from hespas.hardware import System, load_device, load_system
from hespas.operations import Labels, Operations
from hespas.simulator.network import Network, collective_ns
from hespas.simulator.network.placement import footprint_of

SIZES = np.array([1024.0, 2.0**20, 2.0**27])


def estimated(op: str, ranks: int, per_node: int, device: str) -> FloatArray:
    blank = np.full(len(SIZES), np.nan)
    dims = {
        "ranks": np.full(len(SIZES), float(ranks)),
        "message_bytes": SIZES,
        "ranks_per_node": np.full(len(SIZES), float(per_node)),
    }
    asked = Operations(
        kind=Labels.constant("collective", len(SIZES)),
        op=Labels.constant(op, len(SIZES)),
        scheme=Labels.constant("", len(SIZES)),
        variant=Labels.constant("", len(SIZES)),
        dims=dims,
        flops=blank,
        transcendentals=blank,
        bytes_moved=blank,
    )
    return Collectives().predict(asked, load_device(device)).duration_ns


def wider(system: System, factor: float) -> System:
    first, *rest = system.dimensions
    faster = structs.replace(first, bandwidth_bytes_per_s=first.bandwidth_bytes_per_s * factor)
    return replace(system, dimensions=(faster, *rest))


@pytest.mark.parametrize(
    ("name", "device", "ranks"),
    [
        ("dgx-a100", "A100-SXM-80GB", 4),
        ("dgx-h100", "H100-SXM", 2),
        ("dgx-h100", "H100-SXM", 8),
        ("dgx-b200", "B200-SXM", 8),
        ("pcie-l40s", "L40S", 8),
        ("hgx-mi300x", "MI300X", 8),
    ],
)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "all_to_all"])
def test_a_node_of_its_own_device_takes_what_was_measured(
    name: str, device: str, ranks: int, op: str
) -> None:
    kind = CollectiveKind[op.upper()]
    found = collective_ns(load_system(name).sized(8), kind, SIZES, np.arange(ranks))
    assert found.tolist() == estimated(op, ranks, ranks, device).tolist()


def test_across_nodes_it_stands_too() -> None:
    found = collective_ns(
        load_system("dgx-a100").sized(32), CollectiveKind.ALL_REDUCE, SIZES, np.arange(0, 32, 8)
    )
    assert found.tolist() == estimated("all_reduce", 4, 1, "A100-SXM-80GB").tolist()


def test_faster_links_move_faster_and_start_as_soon() -> None:
    system = load_system("dgx-h100").sized(8)
    usual = collective_ns(system, CollectiveKind.ALL_TO_ALL, SIZES, np.arange(8))
    faster = collective_ns(wider(system, 2.0), CollectiveKind.ALL_TO_ALL, SIZES, np.arange(8))
    assert faster[0] / usual[0] == pytest.approx(1.0, abs=0.01)
    assert faster[2] / usual[2] == pytest.approx(0.5, abs=0.05)


def test_nothing_beats_the_links_of_the_system() -> None:
    """Without reductions in the network, eight nodes with one rank each send 2 x 7 / 8 of it at 50 GB/s."""
    system = load_system("dgx-h100").sized(64)
    size = np.array([1e9])
    found = collective_ns(system, CollectiveKind.ALL_REDUCE, size, np.arange(0, 64, 8))
    assert found[0] >= 2 * 7 / 8 * 1e9 / 50
    slow = structs.replace(system.dimensions[1], oversubscription=7.0)
    shared = replace(system, dimensions=(system.dimensions[0], slow))
    network = Network(shared, load_device("H100-SXM"))
    place = footprint_of(shared, np.arange(64))
    alone = Network(system, load_device("H100-SXM"))
    times = [each.collectives("all_to_all", "", place, size)[0][0] for each in (alone, network)]
    assert times[1] == pytest.approx(7 * times[0], rel=0.05)


def test_a_domain_beyond_what_was_measured() -> None:
    """64 ranks in one domain of 72, and half of them in another: those send half over InfiniBand."""
    system, kind = load_system("gb200-nvl72").sized(144), CollectiveKind.ALL_TO_ALL
    inside = collective_ns(system, kind, SIZES, np.arange(64))
    across = collective_ns(system, kind, SIZES, np.arange(40, 104))
    assert across[2] >= 2.0**27 / 2 / 50 > 4 * inside[2]


def test_where_nobody_measured_the_algorithms_speak() -> None:
    found = Diagnostics()
    system = load_system("tpu-v5p").sized(64)
    network = Network(system, load_device("TPU-v5p"))
    times = network.collectives("all_reduce", "", footprint_of(system, np.arange(64)), SIZES, found)
    launch_ns = load_device("TPU-v5p").launch_overhead_ns
    assert times[0][2] == pytest.approx(2 * 63 / 64 * 2.0**27 / 600 + 12_000 + launch_ns)
    assert (times[1] < times[0]).all()
    assert (times[0] < times[2]).all()
    assert np.isnan(network.collectives("unheard_of", "", footprint_of(system, np.arange(64)), SIZES)).all()


def test_one_rank_waits_for_nobody() -> None:
    system = load_system("dgx-h100").sized(8)
    assert collective_ns(system, CollectiveKind.ALL_REDUCE, SIZES, np.array([3])).tolist() == [0.0] * 3
    assert Network(system).messages("", (0, 0), SIZES).tolist() == [[0.0] * 3] * 3


def test_a_system_has_a_size() -> None:
    with pytest.raises(InvariantError, match="has no size"):
        Network(load_system("dgx-h100"))
