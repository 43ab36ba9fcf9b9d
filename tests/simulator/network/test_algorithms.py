"""Times of collectives by algorithm: closed forms, loads per link, and invariants."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from hespas.graph import CollectiveKind, StridedGroups
from hespas.hardware import Dimension, System, load_system
from hespas.simulator.network.algorithms import collective_times, fastest_ns, least_ns, levels_of, message_ns
from hespas.simulator.network.placement import footprint_of, place_groups

GB = np.array([1e9])
RULED = [kind for kind in CollectiveKind if kind is not CollectiveKind.UNKNOWN]


def fastest(system: System, kind: CollectiveKind, members: range, size: float = 1e9) -> float:
    levels = levels_of(system, footprint_of(system, np.array(members)))
    return float(fastest_ns(kind, levels, np.array([size]))[0])


def changed(system: System, axis: int, **figures: float) -> System:
    dimensions = list(system.dimensions)
    dimensions[axis] = structs.replace(dimensions[axis], **figures)
    return replace(system, dimensions=tuple(dimensions))


def test_an_all_reduce_inside_a_node() -> None:
    """A ring moves 2 (N - 1) / N of the buffer at 300 GB/s; switches that add move it once, at 85 %."""
    ring_ns = 2 * 7 / 8 * 1e9 / 300 + 2 * 3 * 600
    assert fastest(load_system("dgx-a100").sized(8), CollectiveKind.ALL_REDUCE, range(8)) == pytest.approx(
        ring_ns
    )
    added_ns = 1e9 / (450 * 0.85) + 2 * 600
    assert fastest(load_system("dgx-h100").sized(8), CollectiveKind.ALL_REDUCE, range(8)) == pytest.approx(
        added_ns
    )


def test_rails_of_a_node_carry_its_part_together() -> None:
    """Eight nodes of eight: each rank's 1 / 8 goes over its own 25 GB/s, while 300 GB/s move all inside."""
    system = load_system("dgx-a100").sized(64)
    latency_ns = 2 * (3 * 600 + 3 * 2700)
    slowest_ns = max(2 * 7 / 8 * 1e9 / 300, 2 * 7 / 8 * 1e9 / 8 / 25)
    assert fastest(system, CollectiveKind.ALL_REDUCE, range(64)) == pytest.approx(slowest_ns + latency_ns)
    one_rail_ns = 2 * 7 / 8 * 1e9 / 25 + 2 * 3 * 2700
    assert fastest(system, CollectiveKind.ALL_REDUCE, range(0, 64, 8)) == pytest.approx(one_rail_ns)


def test_an_all_gather_counts_shards() -> None:
    system = load_system("dgx-a100").sized(8)
    whole_ns = 7 / 8 * 8e9 / 300 + 3 * 600
    assert fastest(system, CollectiveKind.ALL_GATHER, range(8)) == pytest.approx(whole_ns)


def test_axes_of_a_torus_work_together() -> None:
    """4x4x4 chips, each sending 200 GB/s along each axis; a cube of 2x2x2 is a mesh of half of that."""
    cube = load_system("tpu-v5p").sized(64)
    assert fastest(cube, CollectiveKind.ALL_REDUCE, range(64)) == pytest.approx(
        2 * 63 / 64 * 1e9 / 600 + 2 * 3 * 2 * 1000
    )
    mesh = load_system("tpu-v5p").sized(8)
    assert fastest(mesh, CollectiveKind.ALL_REDUCE, range(8)) == pytest.approx(
        2 * 7 / 8 * 1e9 / 300 + 2 * 3 * 1000
    )


@pytest.mark.parametrize("size", [4, 5, 8])
@pytest.mark.parametrize("closed", [True, False])
def test_an_all_to_all_on_a_ring_is_bound_by_its_fullest_link(size: int, closed: bool) -> None:
    """Every message goes the shorter way, half each way where both are as long; loads counted by link."""
    system = load_system("tpu-v5p").sized((size, 1, 1))
    system = changed(system, 0, closes_at=1 if closed else size + 1, closes_from=1)
    load = np.zeros((2, size))
    for source in range(size):
        for target in range(size):
            ways = {1: (target - source) % size, -1: (source - target) % size}
            if not closed:
                ways = {1: ways[1]} if target > source else {-1: ways[-1]}
            shortest = min(ways.values())
            chosen = [way for way, steps in ways.items() if steps == shortest]
            for way in chosen:
                for step in range(shortest):
                    place = (source + way * step) % size
                    load[int(way < 0), place] += 1 / size / len(chosen)
    moved_ns = load.max() * 1e9 / 100  # one link: half of what a chip sends along an axis
    latency_ns = (size // 2 if closed else size - 1) * 1000
    found_ns = fastest(system, CollectiveKind.ALL_TO_ALL, range(size))
    assert found_ns - latency_ns == pytest.approx(moved_ns, rel=0.05 if size % 2 else 1e-9)


@st.composite
def sub_tori(draw: st.DrawFn) -> tuple[tuple[int, ...], StridedGroups]:
    """A torus cut into equal groups: along each axis members side by side, or evenly around the ring."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=3, max_size=3)))
    members: list[tuple[int, int]] = []
    groups: list[tuple[int, int]] = []
    unit = 1
    for size in shape:
        count = draw(st.sampled_from([each for each in range(1, size + 1) if size % each == 0]))
        others = size // count
        spread = draw(st.booleans())
        members.append((count, unit * (others if spread else 1)))
        groups.append((others, unit * (1 if spread else count)))
        unit *= size
    return shape, StridedGroups(base=0, group_digits=tuple(groups), member_digits=tuple(members))


def fullest_link(shape: tuple[int, ...], groups: list[list[int]]) -> float:
    """Of messages of a whole to each member of a rank's group, what the fullest link of a torus passes: axis
    after axis, the shorter way, half each way where both are as long.
    """
    load: dict[tuple[int, int, int], float] = {}
    units = [prod(shape[:axis]) for axis in range(len(shape))]
    for group in groups:
        for source in group:
            for target in group:
                here = source
                for axis, (size, unit) in enumerate(zip(shape, units, strict=True)):
                    ahead = (target // unit - here // unit) % size
                    steps = min(ahead, size - ahead)
                    ways = [way for way in (1, -1) if steps and way * ahead % size == steps]
                    for way in ways:
                        for step in range(steps):
                            at = here // unit % size
                            place = here + ((at + way * step) % size - at) * unit
                            key = (axis, place, way)
                            load[key] = load.get(key, 0.0) + 1 / len(ways)
                    at = here // unit % size
                    here += ((at + ahead) % size - at) * unit
    return max(load.values(), default=0.0)


@settings(max_examples=60)
@given(sub_tori(), st.booleans())
def test_an_all_to_all_on_a_torus_is_bound_by_its_fullest_link(
    drawn: tuple[tuple[int, ...], StridedGroups], alone: bool
) -> None:
    """Groups of a torus, all at once or one alone: bytes of the fullest link, counted message by message."""
    shape, groups = drawn
    system = load_system("tpu-v5p").sized(shape)
    for axis in range(3):
        system = changed(system, axis, closes_at=1, closes_from=1, latency_ns=0.0)
    members: list[list[int]] = [row.tolist() for row in groups][: 1 if alone else None]
    if alone:
        place = footprint_of(system, np.array(members[0]))
    else:
        [place] = place_groups(groups, system, prod(shape)).footprints
    levels = levels_of(system, place)
    whole_ns = float(fastest_ns(CollectiveKind.ALL_TO_ALL, levels, GB)[0]) if levels else 0.0
    link = system.dimensions[0].link_bytes_per_s
    assert whole_ns == pytest.approx(fullest_link(shape, members) / groups.group_size / link * 1e18)


def test_oversubscription_and_interfaces_are_shared() -> None:
    system = load_system("dgx-h100-roce").sized((8, 2, 2))
    everybody = levels_of(system, footprint_of(system, np.arange(32)))
    assert [level.rate for level in everybody] == pytest.approx([450, 50, 50 / 7])
    one_of_each_pod = levels_of(system, footprint_of(system, np.array([0, 16])))
    assert [level.rate for level in one_of_each_pod] == pytest.approx([50])  # the others send nothing
    half = changed(load_system("dgx-h100").sized(16), 1, devices_per_nic=2, bandwidth_bytes_per_s=25e9)
    assert levels_of(half, footprint_of(half, np.arange(16)))[1].rate == 25
    assert levels_of(half, footprint_of(half, np.array([0, 8])))[0].rate == 50  # an interface to itself


def test_devices_that_are_joined_directly_use_the_links_to_their_peers() -> None:
    system = load_system("hgx-mi300x").sized(8)
    assert levels_of(system, footprint_of(system, np.arange(8)))[0].rate == pytest.approx(448)
    assert levels_of(system, footprint_of(system, np.arange(3)))[0].rate == pytest.approx(2 * 64)


def test_the_slower_direction_bounds_what_goes_both_ways() -> None:
    system = changed(load_system("dgx-a100").sized(8), 0, down_bandwidth_bytes_per_s=100e9)
    ring_ns = 2 * 7 / 8 * 1e9 / 100 + 2 * 3 * 600
    assert fastest(system, CollectiveKind.ALL_REDUCE, range(8)) == pytest.approx(ring_ns)
    gather_ns, scatter_ns = (
        fastest(system, kind, range(8), size)
        for kind, size in ((CollectiveKind.GATHER, 1e9), (CollectiveKind.SCATTER, 8e9))
    )
    assert gather_ns == pytest.approx(7e9 / 100 + 3 * 600)  # the root receives
    assert scatter_ns == pytest.approx(7e9 / 300 + 3 * 600)  # the root sends


def test_a_message_takes_one_link_and_all_its_hops() -> None:
    cluster, cube = load_system("dgx-h100").sized(16), load_system("tpu-v5p").sized(64)
    assert message_ns(cluster, (1, 0), GB) == pytest.approx(1e9 / 450 + 600)
    assert message_ns(cluster, (1, 1), GB) == pytest.approx(1e9 / 50 + 2700)
    assert message_ns(cube, (2, 1, 0), GB) == pytest.approx(1e9 / 100 + 3000)


def test_small_messages_take_trees_and_large_ones_rings() -> None:
    system = load_system("dgx-a100").sized((8, 64))
    levels = levels_of(system, footprint_of(system, np.arange(512)))
    times = collective_times(CollectiveKind.ALL_REDUCE, levels, np.array([8.0, 1e12]))
    assert times["hierarchical"][0] < times["tree"][0] < times["ring"][0]
    assert times["hierarchical"][1] <= times["ring"][1] < times["tree"][1]


@settings(max_examples=80)
@given(
    st.sampled_from(["dgx-h100", "dgx-h100-roce", "tpu-v5p", "hgx-mi300x"]), st.sampled_from(RULED), st.data()
)
def test_what_always_holds(name: str, kind: CollectiveKind, data: st.DataObject) -> None:
    """More bytes take no less, nothing beats its bound, and faster links are never slower."""
    system = load_system(name).sized(32)
    members = data.draw(st.sets(st.integers(0, 31), min_size=2))
    place = footprint_of(system, np.array(sorted(members)))
    size = np.sort(data.draw(st.lists(st.floats(1, 1e10), min_size=2, max_size=4)))
    levels = levels_of(system, place)
    found = fastest_ns(kind, levels, size)
    assert (np.diff(found) >= 0).all()
    assert (found >= least_ns(kind, levels, size) * (1 - 1e-12)).all()
    doubled = tuple(_doubled(each) for each in system.dimensions)
    faster = fastest_ns(kind, levels_of(replace(system, dimensions=doubled), place), size)
    assert (faster <= found).all()


def _doubled(each: Dimension) -> Dimension:
    return structs.replace(each, bandwidth_bytes_per_s=2 * each.bandwidth_bytes_per_s)


def test_kinds_without_a_rule_have_no_time() -> None:
    system = load_system("dgx-h100").sized(8)
    levels = levels_of(system, footprint_of(system, np.arange(8)))
    assert np.isnan(fastest_ns(CollectiveKind.UNKNOWN, levels, GB)).all()
    assert (least_ns(CollectiveKind.UNKNOWN, levels, GB) == 0).all()
