"""Groups of every mode and spelling become groups of global device ids."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hespas.converters.replica_groups import (
    IdMode,
    dense_groups,
    group_mode,
    mesh_groups,
    normalise_groups,
    normalise_pairs,
)
from hespas.graph import ExplicitGroups, GroupSet, StridedGroups


def rows(groups: GroupSet) -> list[list[int]]:
    return [members.tolist() for members in groups]


def dense(lists: list[list[int]]) -> GroupSet:
    groups = dense_groups(np.array(lists, np.int64))
    assert groups is not None
    return groups


@pytest.mark.parametrize(
    ("op", "channel", "flag", "mode"),
    [
        ("all_reduce", 0, False, IdMode.CROSS_REPLICA),
        ("all_gather", 1, False, IdMode.CROSS_REPLICA_AND_PARTITION),
        ("reduce_scatter", 1, True, IdMode.FLATTENED_IDS),
        ("all_to_all", 1, False, IdMode.CROSS_PARTITION),
        ("collective_permute", 1, False, IdMode.CROSS_PARTITION),
        ("collective_broadcast", 0, False, IdMode.CROSS_REPLICA),
    ],
)
def test_modes(op: str, channel: int, flag: bool, mode: IdMode) -> None:
    assert group_mode(op, channel, use_global_device_ids=flag) is mode


def test_global_ids_need_a_channel() -> None:
    with pytest.raises(ValueError, match="channel"):
        group_mode("all_reduce", 0, use_global_device_ids=True)


@pytest.mark.parametrize(
    ("mode", "stated", "expected"),
    [
        (IdMode.CROSS_REPLICA, [[0, 1]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (IdMode.CROSS_REPLICA_AND_PARTITION, [[0], [1]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # The specification lists members by partition first.
        (IdMode.CROSS_REPLICA_AND_PARTITION, [[0, 1]], [[0, 4, 1, 5, 2, 6, 3, 7]]),
        (IdMode.CROSS_PARTITION, [[0, 1], [2, 3]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (IdMode.FLATTENED_IDS, [[0, 1, 4, 5], [2, 3, 6, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ],
)
def test_two_replicas_of_four_partitions(
    mode: IdMode, stated: list[list[int]], expected: list[list[int]]
) -> None:
    assert rows(normalise_groups(dense(stated), mode, 2, 4)) == expected


@given(data=st.data(), replicas=st.integers(1, 4), partitions=st.integers(1, 4))
def test_strided_and_listed_groups_normalise_alike(
    data: st.DataObject, replicas: int, partitions: int
) -> None:
    mode = data.draw(st.sampled_from(list(IdMode)))
    counted = {IdMode.CROSS_PARTITION: partitions, IdMode.FLATTENED_IDS: replicas * partitions}.get(
        mode, replicas
    )
    size = data.draw(st.sampled_from([size for size in range(1, counted + 1) if counted % size == 0]))
    strided = StridedGroups.from_iota(counted // size, size, [counted])
    listed = ExplicitGroups.from_rows(rows(strided))
    assert rows(normalise_groups(strided, mode, replicas, partitions)) == rows(
        normalise_groups(listed, mode, replicas, partitions)
    )


def test_strided_groups_stay_symbolic_at_scale() -> None:
    groups = normalise_groups(
        StridedGroups.all_ranks(256), IdMode.CROSS_REPLICA, num_replicas=256, num_partitions=256
    )
    assert groups == StridedGroups(((256, 1),), ((256, 256),))


def test_no_groups_means_everybody() -> None:
    assert dense_groups(np.zeros((0, 0), np.int64)) is None
    assert rows(normalise_groups(None, IdMode.CROSS_REPLICA, 4, 1)) == [[0, 1, 2, 3]]


def test_padding_is_dropped() -> None:
    groups = dense([[0, 1, 2, 3, 4], [5, 6, 7, -1, -1]])
    assert rows(groups) == [[0, 1, 2, 3, 4], [5, 6, 7]]
    assert rows(dense([[0, -1], [1, -1]])) == [[0], [1]]
    with pytest.raises(ValueError, match="padding"):
        dense([[-1, 0]])


def test_ids_out_of_range_or_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="outside"):
        normalise_groups(dense([[0, 4]]), IdMode.CROSS_REPLICA, 4, 1)
    with pytest.raises(ValueError, match="repeated"):
        normalise_groups(dense([[0, 1], [1, 2]]), IdMode.CROSS_REPLICA, 4, 1)


def test_devices_in_no_group_are_counted() -> None:
    assert normalise_groups(dense([[0, 1]]), IdMode.CROSS_REPLICA, 4, 1).num_ranks == 2


def test_mesh_axes() -> None:
    assert rows(mesh_groups([2, 4], [(0, 1, 2)])) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rows(mesh_groups([2, 4], [(0, 1, 2), (1, 1, 4)])) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    # A sub-axis (1)2 of an axis of 4: split in (2, 2), take the slower half.
    assert rows(mesh_groups([2, 4], [(1, 1, 2)])) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rows(mesh_groups([2, 4], [(1, 2, 2)])) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_mesh_with_its_own_devices() -> None:
    ids = np.array([3, 2, 1, 0], np.int64)
    assert rows(mesh_groups([2, 2], [(1, 1, 2)], ids)) == [[3, 2], [1, 0]]
    with pytest.raises(ValueError, match="device ids"):
        mesh_groups([2, 2], [(1, 1, 2)], ids[:3])


def test_bad_mesh_axes_are_refused() -> None:
    with pytest.raises(ValueError, match="of axis 0 is in the group twice"):
        mesh_groups([4], [(0, 1, 4), (0, 1, 4)])
    with pytest.raises(ValueError, match="divide"):
        mesh_groups([4], [(0, 1, 3)])


def test_pairs_run_in_every_replica_or_partition() -> None:
    ring = [(0, 1), (1, 0)]
    assert list(normalise_pairs(ring, IdMode.CROSS_PARTITION, 2, 2)) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert list(normalise_pairs(ring, IdMode.CROSS_REPLICA, 2, 2)) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    with pytest.raises(ValueError, match="outside"):
        normalise_pairs([(0, 2)], IdMode.CROSS_PARTITION, 2, 2)
    with pytest.raises(ValueError, match="rank 1 is the target of two pairs"):
        normalise_pairs([(0, 1), (1, 1)], IdMode.CROSS_PARTITION, 1, 2)
