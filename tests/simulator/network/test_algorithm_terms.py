"""Latencies and transfers of each algorithm by hand, on two levels of unlike rates.

Inside, 4 members send 10 and receive 8 bytes/ns with 3 ns of latency. Outside, 3 send 2 and receive 1
with 7 ns. A tree takes 2 steps on either level.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from msgspec import structs

from hespas.graph import CollectiveKind
from hespas.hardware import System, load_system
from hespas.simulator.network.algorithms import (
    Level,
    chosen_traffic,
    collective_times,
    fastest_ns,
    least_ns,
    levels_of,
    message_ns,
    message_traffic,
    shares_sent,
)
from hespas.simulator.network.placement import footprint_of

INSIDE = Level(
    members=4, up=10.0, down=8.0, link=5.0, latency_ns=3.0, steps=3, hops=1, is_ring=False, adds=0.0
)
OUTSIDE = Level(
    members=3, up=2.0, down=1.0, link=1.0, latency_ns=7.0, steps=2, hops=1, is_ring=False, adds=0.0
)
BOTH = (INSIDE, OUTSIDE)
AXES = (
    Level(members=4, up=6.0, down=6.0, link=3.0, latency_ns=1.0, steps=2, hops=2, is_ring=True, adds=0.0),
    Level(members=3, up=3.0, down=3.0, link=1.5, latency_ns=5.0, steps=1, hops=1, is_ring=True, adds=0.0),
)
"""Axes of a torus."""
WHOLE = 14_400.0
CHAIN, TREE = 3 * 3 * 3 + 2 * 7, 2 * 3 + 2 * 7
"""Latency of a ring through all 12 members, which passes inside three times, and of trees on both levels."""
BUS = 4 * 1
"""Rate of the ring: outside, each of 4 members sends over its own rail."""
SLOWEST = 2 / 3 / 4 / 1
"""Time per byte of the hierarchical algorithm outside, where a member has a quarter of the bytes."""


def times(kind: CollectiveKind, levels: tuple[Level, ...] = BOTH, size: float = WHOLE) -> dict[str, float]:
    found = collective_times(kind, levels, np.array([size]))
    return {name: float(time[0]) for name, time in found.items()}


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (CollectiveKind.REDUCE_SCATTER, WHOLE),
        (CollectiveKind.REDUCE_SCATTER_BLOCK, WHOLE),
        (CollectiveKind.ALL_GATHER, WHOLE / 12),
    ],
)
def test_one_way(kind: CollectiveKind, size: float) -> None:
    assert times(kind, size=size) == pytest.approx(
        {"ring": CHAIN + 11 / 12 * WHOLE / BUS, "hierarchical": TREE + SLOWEST * WHOLE}
    )


def test_an_all_reduce_goes_both_ways() -> None:
    """The tree is a chain inside and doubles its distance outside."""
    assert times(CollectiveKind.ALL_REDUCE) == pytest.approx(
        {
            "ring": 2 * (CHAIN + 11 / 12 * WHOLE / BUS),
            "hierarchical": 2 * (TREE + SLOWEST * WHOLE),
            "tree": 2 * (3 * 3 + 2 * 7) + 2 * WHOLE / BUS,
        }
    )


@pytest.mark.parametrize("kind", [CollectiveKind.BROADCAST, CollectiveKind.REDUCE])
def test_from_and_to_a_root(kind: CollectiveKind) -> None:
    assert times(kind) == pytest.approx({"ring": CHAIN + WHOLE / BUS, "tree": TREE + 2 * WHOLE / BUS})


def test_parts_of_a_root() -> None:
    """From 4 members outside of its node come 2 x 4 of 12 parts; a gather receives and a scatter sends."""
    assert times(CollectiveKind.GATHER, size=WHOLE / 12) == pytest.approx(
        {"direct": TREE + 8 / 12 * WHOLE / 1}
    )
    assert times(CollectiveKind.SCATTER) == pytest.approx({"direct": TREE + 8 / 12 * WHOLE / 2})
    assert times(CollectiveKind.SCATTER, (INSIDE,)) == pytest.approx({"direct": 2 * 3 + 3 / 4 * WHOLE / 10})


def test_exchanges_and_barriers() -> None:
    for kind in (CollectiveKind.ALL_TO_ALL, CollectiveKind.RAGGED_ALL_TO_ALL):
        assert times(kind) == pytest.approx({"direct": 3 + 7 + 2 / 3 * WHOLE / 1})
        assert times(kind, (INSIDE,)) == pytest.approx({"direct": 3 + 3 / 4 * WHOLE / 8})
    assert times(CollectiveKind.BARRIER) == pytest.approx({"tree": 2 * TREE})
    assert times(CollectiveKind.UNKNOWN) == {}
    assert np.isnan(fastest_ns(CollectiveKind.UNKNOWN, BOTH, np.array([WHOLE])))
    assert least_ns(CollectiveKind.UNKNOWN, BOTH, np.array([WHOLE])).tolist() == [0]


def test_axes_of_a_torus() -> None:
    """9 bytes/ns of both axes together. A step along the first passes two links. An all-to-all moves the mean
    distance of 1 along the first axis and 2/3 along the second.
    """
    chain, tree = 2 * 2 * 3 * 1 + 1 * 5, 2 * 2 * 1 + 1 * 5
    assert times(CollectiveKind.REDUCE_SCATTER, AXES) == pytest.approx(
        {"ring": chain + 11 / 12 * WHOLE / 9, "hierarchical": tree + 11 / 12 * WHOLE / 9}
    )
    exchange = max(1 / 6, 2 / 3 / 3)
    assert times(CollectiveKind.ALL_TO_ALL, AXES) == pytest.approx({"direct": tree + exchange * WHOLE})


@pytest.mark.parametrize(("adds", "per_byte"), [(0.85, 1 / 8 / 0.85), (0.5, 2 * 3 / 4 / 8)])
def test_switches_that_add(adds: float, per_byte: float) -> None:
    """Slow ones are not used for the transfer."""
    level = INSIDE._replace(adds=adds)
    assert times(CollectiveKind.ALL_REDUCE, (level,))["in network"] == pytest.approx(2 * 3 + per_byte * WHOLE)
    assert least_ns(CollectiveKind.ALL_REDUCE, (level,), np.array([1e12])) == pytest.approx([1e12 / 8 + 6])


def test_switches_that_add_inside_alone() -> None:
    """Outside, members exchange a quarter of the bytes there and back."""
    levels = (INSIDE._replace(adds=0.85), OUTSIDE._replace(hops=3))
    found = times(CollectiveKind.ALL_REDUCE, levels)["in network"]
    assert found == pytest.approx(2 * 3 + 2 * 2 * 3 * 7 + 2 * SLOWEST * WHOLE)
    shares = shares_sent(CollectiveKind.ALL_REDUCE, levels)["in network"]
    assert shares == pytest.approx([1.0, 2 * 2 / 3 / 4])


def test_shares_that_a_member_sends() -> None:
    """On a ring through 12 members, a quarter of the hops leaves the node."""
    one_way = shares_sent(CollectiveKind.REDUCE_SCATTER, BOTH)
    assert one_way["ring"] == pytest.approx([11 / 12 * 3 / 4, 11 / 12 / 4])
    assert one_way["hierarchical"] == pytest.approx([3 / 4, 2 / 3 / 4])
    assert shares_sent(CollectiveKind.ALL_REDUCE, BOTH)["tree"] == pytest.approx(
        [2 * 3 / 4, 2 * (1 / 4 - 1 / 12)]
    )
    assert shares_sent(CollectiveKind.BROADCAST, BOTH)["ring"] == pytest.approx([3 / 4, 1 / 4 - 1 / 12])
    assert shares_sent(CollectiveKind.GATHER, BOTH)["direct"] == pytest.approx([3 / 144, 8 / 144])
    assert shares_sent(CollectiveKind.ALL_TO_ALL, BOTH)["direct"] == pytest.approx([3 / 4, 2 / 3])
    torus = shares_sent(CollectiveKind.REDUCE_SCATTER, AXES)
    assert torus["ring"] == pytest.approx([11 / 12 * 6 / 9, 11 / 12 * 3 / 9])
    assert torus["hierarchical"] == pytest.approx(torus["ring"])
    # Mean distances: on a closed ring of 4, 1; on a line of 4, (0 + 3 + 2 x 2 + 3 x 1) x 2 / 16 = 5/4.
    line = AXES[0]._replace(steps=3)
    for level, mean in ((AXES[0], 1.0), (line, 5 / 4)):
        assert shares_sent(CollectiveKind.ALL_TO_ALL, (level,))["direct"] == pytest.approx([mean])


# --- levels of systems


def changed(system: System, axis: int, **figures: float) -> System:
    dimensions = list(system.dimensions)
    dimensions[axis] = structs.replace(dimensions[axis], **figures)
    return replace(system, dimensions=tuple(dimensions))


def levels(system: System, members: range) -> tuple[Level, ...]:
    return levels_of(system, footprint_of(system, np.array(members)))


def test_levels_of_fully_connected_devices() -> None:
    """Each of 7 links has 64 of 448 GB/s; 3 members of a node use two of them. None adds."""
    system = load_system("hgx-mi300x-ib").sized(16)
    link = system.dimensions[0].link_bytes_per_s / 1e9
    assert levels(system, range(3)) == (Level(3, 128.0, 128.0, link, 800.0, 2, 1, False, 0.0),)
    assert levels(system, range(8)) == (Level(8, 448.0, 448.0, link, 800.0, 7, 1, False, 0.0),)
    assert levels(system, range(0, 16, 8)) == (Level(2, 50.0, 50.0, 50.0, 2700.0, 1, 1, False, 0.0),)
    assert levels(changed(system, 0, latency_ns=nan), range(8))[0].latency_ns == 0


def test_levels_of_a_ring() -> None:
    """A closed axis of 4 chips sends both ways, an open part of it one way. Every other chip is two hops
    away.
    """
    system = load_system("tpu-v5p").sized((4, 4, 4))
    axis = system.dimensions[0]
    rate, link = axis.bandwidth_bytes_per_s / 1e9, axis.link_bytes_per_s / 1e9
    (closed,) = levels(system, range(4))
    assert (closed.rate, closed.link, closed.steps, closed.hops) == (rate, link, 2, 1)
    (part,) = levels(system, range(3))
    assert (part.rate, part.link, part.steps, part.hops) == (rate / 2, link, 2, 1)
    (spread,) = levels(system, range(0, 4, 2))
    assert (spread.steps, spread.hops) == (1, 2)
    assert closed.is_ring


def test_the_slower_way_of_a_dimension() -> None:
    system = changed(load_system("dgx-a100").sized(8), 0, down_bandwidth_bytes_per_s=100e9)
    (level,) = levels(system, range(8))
    assert (level.up, level.down, level.rate) == (300.0, 100.0, 100.0)


# --- messages


def test_messages_pass_the_outermost_switch_and_all_rings() -> None:
    """Two chips along one axis and one along another: 3 hops of latency, the slowest link."""
    torus = changed(load_system("tpu-v5p").sized((4, 4, 4)), 1, bandwidth_bytes_per_s=20e9)
    latency, link = (torus.dimensions[0].latency_ns, torus.dimensions[1].link_bytes_per_s / 1e9)
    found = message_ns(torus, (2, 1, 0), np.array([1e6]))
    assert found == pytest.approx([3 * latency + 1e6 / link])
    assert message_traffic(torus, (2, 1, 0), np.array([1e6])).tolist() == [[1e6], [1e6], [0.0]]
    nodes = load_system("dgx-a100").sized(64)
    outside = message_ns(nodes, (3, 1), np.array([1e6]))
    assert outside == pytest.approx(message_ns(nodes, (0, 1), np.array([1e6])))
    assert message_traffic(nodes, (3, 1), np.array([1e6])).tolist() == [[0.0], [1e6]]
    assert message_ns(nodes, (0, 0), np.array([1e6])).tolist() == [0.0]


@pytest.mark.parametrize(("time_ns", "chosen"), [(inf, "hierarchical"), (1.0, "hierarchical")])
def test_traffic_of_the_fastest_algorithm_that_fits(time_ns: float, chosen: str) -> None:
    """Without an algorithm that is fast enough, the one that needs the least time is chosen."""
    system = load_system("dgx-a100").sized(64)
    size = np.array([1e9])
    names, sent, most = chosen_traffic(
        system,
        CollectiveKind.REDUCE_SCATTER,
        footprint_of(system, np.arange(64)),
        size,
        np.array([time_ns]),
    )
    assert names == [chosen]
    assert sent[:, 0] == pytest.approx([7 / 8 * 1e9, 7 / 8 / 8 * 1e9])
    assert most.tolist() == [300.0, 25.0]


def test_traffic_of_none_and_of_unknown_kinds() -> None:
    system = load_system("dgx-a100").sized(64)
    size, time = np.array([1e9]), np.array([inf])
    alone = footprint_of(system, np.arange(1))
    names, sent, _ = chosen_traffic(system, CollectiveKind.ALL_REDUCE, alone, size, time)
    assert (names, sent.tolist()) == ([""], [[0.0], [0.0]])
    node = footprint_of(system, np.arange(8))
    names, sent, _ = chosen_traffic(system, CollectiveKind.UNKNOWN, node, size, time)
    assert names == [""]
    assert sent[:, 0].tolist() == pytest.approx([nan, 0.0], nan_ok=True)
