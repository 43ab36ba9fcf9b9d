"""Bytes of algorithms per dimension: closed forms, sums over levels, and link capacity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hespas.graph import CollectiveKind
from hespas.hardware import System, load_system
from hespas.simulator.network.algorithms import (
    chosen_traffic,
    collective_times,
    levels_of,
    message_traffic,
    shares_sent,
)
from hespas.simulator.network.placement import footprint_of

SIZE = 1e9
RULED = [kind for kind in CollectiveKind if kind is not CollectiveKind.UNKNOWN]
ONE_WAY = [CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER]
GPUS = ["dgx-a100", "dgx-h100", "hgx-mi300x"]


def sent(system: System, kind: CollectiveKind, members: range, algorithm: str) -> list[float]:
    """Of the whole buffer, all members together, by level."""
    levels = levels_of(system, footprint_of(system, np.array(members)))
    found: list[float] = (shares_sent(kind, levels)[algorithm] * len(members)).tolist()
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("name", GPUS)
def test_on_one_dimension_all_members_send_the_closed_form(name: str, ranks: int) -> None:
    system = load_system(name).sized(8)
    for kind in ONE_WAY:
        for algorithm in ("ring", "hierarchical"):
            assert sent(system, kind, range(ranks), algorithm) == pytest.approx([ranks - 1])
    for algorithm in ("ring", "hierarchical", "tree"):
        assert sent(system, CollectiveKind.ALL_REDUCE, range(ranks), algorithm) == pytest.approx(
            [2 * (ranks - 1)]
        )
    assert sent(system, CollectiveKind.ALL_TO_ALL, range(ranks), "direct") == pytest.approx([ranks - 1])
    for kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE):
        assert sent(system, kind, range(ranks), "tree") == pytest.approx([ranks - 1])
    for kind in (CollectiveKind.GATHER, CollectiveKind.SCATTER):
        assert sent(system, kind, range(ranks), "direct") == pytest.approx([(ranks - 1) / ranks])


def test_switches_that_add_get_the_buffer_once_from_each_member() -> None:
    system = load_system("dgx-h100").sized(8)
    assert sent(system, CollectiveKind.ALL_REDUCE, range(8), "in network") == [8.0]


def test_steps_of_a_ring_are_counted_where_they_go() -> None:
    """Two nodes of eight: of 16 steps around 14 stay inside, two cross; of 15 edges one crosses."""
    system = load_system("dgx-h100").sized(16)
    ring = sent(system, CollectiveKind.ALL_GATHER, range(16), "ring")
    assert ring == pytest.approx([14 * 15 / 16, 2 * 15 / 16])
    assert sent(system, CollectiveKind.BROADCAST, range(16), "tree") == pytest.approx([14.0, 1.0])
    levels = sent(system, CollectiveKind.ALL_REDUCE, range(16), "hierarchical")
    assert levels == pytest.approx([16 * 2 * 7 / 8, 16 * 2 * 1 / 2 / 8])


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("closes_at", [1, 64], ids=["ring", "line"])
def test_an_all_to_all_on_a_ring_counts_each_link_on_the_way(size: int, closes_at: int) -> None:
    system = load_system("tpu-v5e").sized((size, 1))
    axes = [structs.replace(each, closes_at=closes_at, closes_from=1) for each in system.dimensions]
    system = replace(system, dimensions=tuple(axes))
    ahead = np.abs(np.arange(size)[:, None] - np.arange(size))
    links = ahead if closes_at > size else np.minimum(ahead, size - ahead)
    whole = links.sum() / size  # parts of 1 / size of the buffer
    assert sent(system, CollectiveKind.ALL_TO_ALL, range(size), "direct") == pytest.approx([whole])


@settings(max_examples=60)
@given(
    name=st.sampled_from([*GPUS, "tpu-v5e", "tpu-v5p", "loopback"]),
    ranks=st.sampled_from([2, 4, 8, 16, 64]),
    kind=st.sampled_from(RULED),
    size=st.floats(1.0, 1e10),
    stride=st.sampled_from([1, 2, 4]),
)
def test_links_have_room_for_the_bytes_of_every_algorithm(
    name: str, ranks: int, kind: CollectiveKind, size: float, stride: int
) -> None:
    """Each member sends no more than its links carry in the time, and algorithms are those that are timed."""
    system = load_system(name).sized(8 if name == "loopback" else 64)
    members = np.arange(0, min(ranks * stride, system.devices), stride)
    place = footprint_of(system, members)
    levels = levels_of(system, place)
    sizes = np.array([size])
    times, shares = collective_times(kind, levels, sizes), shares_sent(kind, levels)
    if len(members) > 1:
        assert list(times) == list(shares)
    for algorithm, time_ns in times.items():
        for slack in (1.0, 1.5):
            names, moved, most = chosen_traffic(system, kind, place, sizes, time_ns * slack)
            assert (moved[:, 0] <= most * time_ns * slack * (1 + 1e-6)).all(), (algorithm, names)
            assert names[0] in shares or len(members) == 1


def test_an_algorithm_that_does_not_fit_the_time_is_not_chosen() -> None:
    """What takes half the time of a ring at full rate was added in the network."""
    system = load_system("dgx-h100").sized(8)
    place = footprint_of(system, np.arange(8))
    most_ns = 2 * 7 / 8 * SIZE / 450
    sizes, times = np.full(2, SIZE), np.array([most_ns / 1.7, 2 * most_ns])
    names, moved, _ = chosen_traffic(system, CollectiveKind.ALL_REDUCE, place, sizes, times)
    assert names[0] == "in network"
    assert moved[0].tolist()[0] == SIZE
    unruled = chosen_traffic(system, CollectiveKind.UNKNOWN, place, sizes, times)
    assert np.isnan(unruled[1][0]).all()


def test_a_message_passes_the_outermost_switch_and_every_axis_of_a_torus() -> None:
    size = np.array([SIZE])
    cluster, torus = load_system("dgx-h100").sized(16), load_system("tpu-v5e").sized((4, 4))
    assert message_traffic(cluster, (1, 1), size).tolist() == [[0.0], [SIZE]]
    assert message_traffic(cluster, (1, 0), size).tolist() == [[SIZE], [0.0]]
    assert message_traffic(torus, (2, 1), size).tolist() == [[SIZE], [SIZE]]
