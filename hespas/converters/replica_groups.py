"""Device groups of collectives: the modes of StableHLO and HLO converted to global device ids.

A program states groups of replica ids, partition ids or flattened ids, which apply once or to every partition
or replica (StableHLO specification, section "Collective ops"). Every mode becomes groups of global ids
``replica * num_partitions + partition``, symbolic if the spelling is.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import numpy as np

from hespas.graph import ExplicitGroups, GroupSet, Permutation, StridedGroups, compress_groups
from hespas.graph.columns import IntArray

__all__ = [
    "MAX_DEVICES",
    "IdMode",
    "check_groups",
    "dense_groups",
    "group_mode",
    "highest_id",
    "mesh_groups",
    "normalise_groups",
    "normalise_pairs",
]

MAX_DEVICES = 1 << 24
"""Limit of devices of a job; a larger number is an error of the input."""

_MAX_LISTED = 1 << 22
"""Limit of ids in groups or pairs without a strided form."""

_PADDING = -1


class IdMode(Enum):
    """Meaning of the ids in the groups of a collective (replicas, partitions or devices), and how often each
    group applies.
    """

    CROSS_REPLICA = "cross_replica"
    """Ids are replica ids; each group applies once per partition."""
    CROSS_PARTITION = "cross_partition"
    """Ids are partition ids; each group applies once per replica."""
    CROSS_REPLICA_AND_PARTITION = "cross_replica_and_partition"
    """Ids are replica ids; each group spans all partitions."""
    FLATTENED_IDS = "flattened_ids"
    """Ids are global device ids; each group applies once."""


_PARTITION_COLLECTIVES = frozenset(
    {"all_to_all", "collective_permute", "collective_broadcast", "collective_reduce", "ragged_all_to_all"}
)


def group_mode(collective: str, channel: int, *, use_global_device_ids: bool) -> IdMode:
    """Return the mode of a collective: the meaning of the ids in its groups (replicas, partitions or
    devices). It follows from the canonical name (``all_reduce``) and the attributes.

    A channel <= 0 is absent. Raises ``ValueError`` for global device ids without a channel.
    """
    if collective in _PARTITION_COLLECTIVES:
        return IdMode.CROSS_PARTITION if channel > 0 else IdMode.CROSS_REPLICA
    if use_global_device_ids:
        if channel <= 0:
            raise ValueError("use_global_device_ids needs a channel handle greater than 0")
        return IdMode.FLATTENED_IDS
    return IdMode.CROSS_REPLICA_AND_PARTITION if channel > 0 else IdMode.CROSS_REPLICA


def dense_groups(rows: IntArray) -> GroupSet | None:
    """Return groups from an array of shape ``(groups, size)``; None for an empty array.

    A row with fewer members ends in -1. Raises ``ValueError`` for a -1 before an id.
    """
    if rows.size == 0:
        return None
    rows = rows.reshape(1, -1) if rows.ndim == 1 else rows
    padded = rows == _PADDING
    if not padded.any():
        return compress_groups(rows)
    if (padded[:, :-1] & ~padded[:, 1:]).any():
        raise ValueError("the padding value -1 precedes an id")
    members = [row[row != _PADDING].tolist() for row in rows]
    sizes = {len(row) for row in members}
    if len(sizes) == 1:
        return dense_groups(np.array(members, np.int64))
    return ExplicitGroups.from_rows([row for row in members if row])


def mesh_groups(
    axis_sizes: Sequence[int], group_axes: Sequence[tuple[int, int, int]], device_ids: IntArray | None = None
) -> GroupSet:
    """Return groups whose members differ along some mesh axes, in the order of these axes. Ids are row-major
    over the mesh.

    A group axis is ``(axis, pre_size, size)``: the sub-axis after splitting the axis into (pre_size, size,
    rest); ``(axis, 1, extent)`` is the whole axis. ``device_ids`` lists the mesh's devices if they are not 0,
    1, 2, .... Raises ``ValueError`` if sizes do not divide or axes overlap.
    """
    # Cut the axes at the ends of their sub-axes: the extents of all pieces, and the index of each piece by
    # (axis, product of the pieces of the axis before it).
    sizes: list[int] = []
    places: dict[tuple[int, int], int] = {}
    for axis, extent in enumerate(axis_sizes):
        cuts = {1, extent}
        for group_axis, sub_pre, sub_size in group_axes:
            if group_axis == axis:
                cuts |= {sub_pre, sub_pre * sub_size}
        for low, high in pairwise(sorted(cuts)):
            if low < 1 or high % low:
                raise ValueError(f"sub-axis sizes {sorted(cuts)} do not divide each other")
            places[axis, low] = len(sizes)
            sizes.append(high // low)
    chosen: list[int] = []
    for axis, pre, size in group_axes:
        reached = pre
        while reached < pre * size:
            position = places.get((axis, reached))
            if position is None or position in chosen:
                fault = "lies outside the mesh" if position is None else "is in the group twice"
                raise ValueError(f"sub-axis ({pre}){size} of axis {axis} {fault}")
            chosen.append(position)
            reached *= sizes[position]
    groups = StridedGroups.from_mesh(sizes, chosen)
    if device_ids is None:
        return groups
    flat = device_ids.reshape(-1)
    if len(flat) != groups.num_ranks:
        raise ValueError(f"the mesh has {groups.num_ranks} positions and {len(flat)} device ids")
    return compress_groups(flat[np.array(list(groups), np.int64)])


def normalise_groups(
    groups: GroupSet | None, mode: IdMode, num_replicas: int, num_partitions: int
) -> GroupSet:
    """Convert groups of replica or partition ids (see ``mode``) to groups of global device ids. ``groups``
    None means one group of all ids of the mode.

    Strided groups that cover all ids stay strided; O(devices) otherwise. Raises ``ValueError`` for ids out of
    range or repeated, and for a missing list in flattened mode on more than one device.
    """
    everyone = num_replicas * num_partitions
    counted = {IdMode.CROSS_PARTITION: num_partitions, IdMode.FLATTENED_IDS: everyone}.get(mode, num_replicas)
    if groups is None:
        groups = StridedGroups.all_ranks(counted)
    check_groups(groups, counted)
    if mode is IdMode.FLATTENED_IDS or everyone == counted:
        return groups
    covering = isinstance(groups, StridedGroups) and groups.base == 0 and groups.num_ranks == counted
    if isinstance(groups, StridedGroups) and covering:
        if mode is IdMode.CROSS_PARTITION:
            return StridedGroups(((num_replicas, num_partitions), *groups.group_digits), groups.member_digits)
        outer = tuple((size, stride * num_partitions) for size, stride in groups.group_digits)
        inner = tuple((size, stride * num_partitions) for size, stride in groups.member_digits)
        if mode is IdMode.CROSS_REPLICA:
            return StridedGroups(((num_partitions, 1), *outer), inner)
        return StridedGroups(outer, ((num_partitions, 1), *inner))
    _check_listed(groups.num_ranks * (num_replicas if mode is IdMode.CROSS_PARTITION else num_partitions))
    rows: list[list[int]] = []
    if mode is IdMode.CROSS_PARTITION:
        for replica in range(num_replicas):
            rows.extend((replica * num_partitions + members).tolist() for members in groups)
    elif mode is IdMode.CROSS_REPLICA:
        for partition in range(num_partitions):
            rows.extend((members * num_partitions + partition).tolist() for members in groups)
    else:
        partitions = np.arange(num_partitions, dtype=np.int64)[:, None]
        rows.extend(
            (members[None, :] * num_partitions + partitions).reshape(-1).tolist() for members in groups
        )
    if len({len(row) for row in rows}) == 1:
        return compress_groups(np.array(rows, np.int64))
    return ExplicitGroups.from_rows(rows)


def _check_listed(count: int) -> None:
    if count > _MAX_LISTED:
        raise ValueError(
            f"groups over all replicas and partitions list {count:,} ids (limit {_MAX_LISTED:,})"
        )


def check_groups(groups: GroupSet, num_ids: int) -> None:
    """Raise ``ValueError`` if an id is outside 0..num_ids-1 or repeated. O(digits) for strided groups."""
    if isinstance(groups, StridedGroups):
        if groups.base < 0 or groups.base + groups.num_ranks > num_ids:
            top = groups.base + groups.num_ranks - 1
            raise ValueError(f"ids {groups.base}..{top} are not all within 0..{num_ids - 1}")
        return
    ids = np.fromiter((rank for row in groups.rows for rank in row), np.int64, groups.num_ranks)
    outside = ids[(ids < 0) | (ids >= num_ids)]
    if len(outside):
        raise ValueError(f"id {int(outside[0])} is outside 0..{num_ids - 1}")
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        raise ValueError(f"id {int(twice[0])} is repeated in the groups")


def highest_id(groups: GroupSet | None) -> int:
    """Return the largest id in groups, 0 without ids. O(1) for strided groups."""
    if groups is None:
        return 0
    if isinstance(groups, StridedGroups):
        return groups.base + groups.num_ranks - 1
    return max((rank for row in groups.rows for rank in row), default=0)


def normalise_pairs(
    pairs: Sequence[tuple[int, int]], mode: IdMode, num_replicas: int, num_partitions: int
) -> Permutation:
    """Return source-target pairs in global device ids. Raises ``ValueError`` for ids out of range or
    repeated.
    """
    everyone = num_replicas * num_partitions
    times = {IdMode.CROSS_PARTITION: num_replicas, IdMode.CROSS_REPLICA: num_partitions}.get(mode, 1)
    _check_listed(len(pairs) * times)
    if mode is IdMode.CROSS_PARTITION:
        counted = num_partitions
        spread = [
            (replica * num_partitions + source, replica * num_partitions + target)
            for replica in range(num_replicas)
            for source, target in pairs
        ]
    elif mode is IdMode.CROSS_REPLICA:
        counted = num_replicas
        spread = [
            (source * num_partitions + partition, target * num_partitions + partition)
            for source, target in pairs
            for partition in range(num_partitions)
        ]
    else:
        counted, spread = everyone, list(pairs)
    outside = [rank for pair in pairs for rank in pair if not 0 <= rank < counted]
    if outside:
        raise ValueError(f"id {outside[0]} is outside 0..{counted - 1}")
    return Permutation.from_pairs(spread, everyone)
