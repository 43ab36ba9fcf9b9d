"""Laws of collectives on all shipped systems: parts of an all-reduce, monotone times, links as a bound."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hespas.estimators.collectives import Collectives
from hespas.graph import CollectiveKind, GraphBuilder, NodeKind, OpClass, StridedGroups
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UsageError
from hespas.hardware import System, load_device, load_system, system_names
from hespas.simulator.network import collective_ns

WHOLE = 2.0 ** np.arange(8, 35, dtype=np.float64)
RANKS = (2, 4, 8, 16, 32, 64, 128, 512)
KINDS = (
    CollectiveKind.ALL_REDUCE,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.ALL_GATHER,
    CollectiveKind.ALL_TO_ALL,
)
PUBLISHED = Path(__file__).parents[4] / "shared/data/published_collectives/nccl_tests.csv"


def sized(system: System, ranks: int) -> System | None:
    """Return the system with so many devices; None where it never has as many."""
    try:
        return system.sized(ranks)
    except UsageError:
        return None


def times(system: System, kind: CollectiveKind, members: IntArray) -> FloatArray:
    """Return the times of buffers of :data:`WHOLE` bytes."""
    message = WHOLE / len(members) if kind is CollectiveKind.ALL_GATHER else WHOLE
    return collective_ns(system, kind, message, members)


def groups(system: System, ranks: int) -> list[IntArray]:
    """Return neighbours, and as many ranks of two nodes where two have more."""
    found = [np.arange(ranks, dtype=np.int64)]
    node = system.dimensions[0].size
    if len(system.dimensions) > 1 and 2 * node <= system.devices and 4 <= ranks < 2 * node:
        half = np.arange(ranks // 2, dtype=np.int64)
        found.append(np.concatenate((half, half + node)))
    return found


@pytest.mark.parametrize("name", system_names())
def test_an_all_reduce_takes_no_more_than_its_parts(name: str) -> None:
    largest = next(found for ranks in reversed(RANKS) if (found := sized(load_system(name), ranks)))
    for ranks in RANKS:
        if ranks > largest.devices:
            continue
        for members in groups(largest, ranks):
            reduced, scatter, gather = (times(largest, kind, members) for kind in KINDS[:3])
            assert (reduced <= 1.1001 * (scatter + gather)).all(), (ranks, members)
            assert (scatter <= 2.001 * gather).all(), (ranks, members)
            assert (gather <= 2.001 * scatter).all(), (ranks, members)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name.lower() for kind in KINDS])
@pytest.mark.parametrize("name", system_names())
def test_times_rise_with_bytes_and_ranks(name: str, kind: CollectiveKind) -> None:
    """More members of a mesh or a torus use more links, so that only switches are compared within a node."""
    system = load_system(name)
    found: list[tuple[int, FloatArray]] = []
    for ranks in RANKS:
        if (whole := sized(system, ranks)) is not None:
            found.append((ranks, times(whole, kind, np.arange(ranks, dtype=np.int64))))
            assert (np.diff(found[-1][1]) >= 0).all(), ranks
    if system.dimensions[0].topology == "ring":
        return
    full = 1 if system.dimensions[0].topology == "switch" else system.dimensions[0].size
    for (few, before), (_, after) in pairwise(found):
        if few >= full:
            assert (after >= before * (1 - 1e-9)).all(), few


@pytest.mark.parametrize("name", [name for name in system_names() if len(load_system(name).dimensions) > 1])
def test_no_all_reduce_beats_the_links(name: str) -> None:
    """Every byte of the buffer leaves a node at least once over the interfaces of its ranks."""
    system = load_system(name).sized(64)
    if system.dimensions[0].topology == "ring" or system.shape[0] >= 64:
        return
    node, outside = system.shape[0], system.dimensions[1]
    least = WHOLE / node / outside.bandwidth_bytes_per_s * 1e9 + outside.latency_ns
    found = times(system, CollectiveKind.ALL_REDUCE, np.arange(64, dtype=np.int64))
    assert (found >= least).all()


def test_an_all_reduce_over_two_a100_nodes_takes_what_the_links_allow() -> None:
    """A recorded table of another cluster's network made 90.1 ms of these 10."""
    (found,) = collective_ns(
        load_system("dgx-a100").sized(16), CollectiveKind.ALL_REDUCE, np.array([2.0**30]), np.arange(16)
    ).tolist()
    links = 2 * 15 / 16 * 2.0**30 / (8 * 25)
    assert links <= found <= 1.25 * links


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS[:3], ids=[kind.name.lower() for kind in KINDS[:3]])
def test_cards_without_a_network_reach_each_other_through_their_host(
    kind: CollectiveKind, ranks: int
) -> None:
    """The device alone and the system of such cards agree; a slow recorded host gives way."""
    message = 2.0**30 / (ranks if kind is CollectiveKind.ALL_GATHER else 1)
    builder = GraphBuilder("one")
    op = builder.strings.add(kind.name.lower())
    node = builder.add_node(name_id=0, op_id=op, op_class=OpClass.COLLECTIVE, kind=NodeKind.COLLECTIVE)
    groups = builder.group_set(StridedGroups.all_ranks(ranks))
    builder.add_collective(node, kind, group_set=groups, comm_bytes=message)
    graph = builder.build()
    alone = Collectives(num_ranks=ranks).estimate(graph, load_device("L40S")).duration_ns
    system = load_system("pcie-l40s").sized(ranks)
    (together,) = collective_ns(system, kind, np.array([message]), np.arange(ranks, dtype=np.int64)).tolist()
    assert float(alone[0]) == pytest.approx(together, rel=1e-3)
    share = 2.0 if kind is CollectiveKind.ALL_REDUCE else 1.0
    links = share * (ranks - 1) / ranks * 2.0**30 / 32
    assert links <= together <= 13.5 * links


def test_a_slower_network_takes_another_algorithm() -> None:
    """Two nodes with an eighth of 50 GB/s for each rank: a tree sends half of what a ring sends."""
    (found,) = collective_ns(
        load_system("p4de").sized(16), CollectiveKind.ALL_REDUCE, np.array([2.0**30]), np.arange(16)
    ).tolist()
    assert 2.0**30 / 50 < found < 0.8 * 2 * 15 / 16 * 2.0**30 / 50


def test_a_later_network_starts_later_by_its_latency() -> None:
    small, kind = np.array([8.0]), CollectiveKind.ALL_REDUCE
    near, far = (
        float(collective_ns(load_system(name).sized(16), kind, small, np.arange(16))[0])
        for name in ("dgx-a100", "p4de")
    )
    assert far - near == pytest.approx(2 * 75_000)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="needs the shared table of published nccl-tests")
@pytest.mark.parametrize(("device", "system"), [("A100-SXM-80GB", "p4de"), ("H100-SXM", "p5")])
def test_published_all_reduces_of_two_nodes(device: str, system: str) -> None:
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["device"] == device]
    size = np.array([float(row["bytes"]) for row in rows])
    measured = np.array([float(row["time_us"]) * 1e3 for row in rows])
    assert load_device(load_system(system).device).name == device
    found = collective_ns(load_system(system).sized(16), CollectiveKind.ALL_REDUCE, size, np.arange(16))
    error = np.abs(found / measured - 1)
    assert error.mean() < 0.2
    assert np.quantile(error, 0.9) < 0.4
