"""Placement of groups in a system: members along each dimension, their distance, and the sharing of links.

A rank is a device of a system with known size: a mixed-radix number with the innermost dimension fastest. A
*footprint* has the properties of a placement that determine its time. Times are computed once for equal
footprints, so 65,536 ranks need only a few.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.graph import GroupSet, Permutation
from hespas.graph.columns import IntArray
from hespas.graph.groups import member_rows
from hespas.hardware import System

__all__ = ["Footprint", "PlacedGroups", "footprint_of", "place_groups", "place_messages"]


class Footprint(NamedTuple):
    """Placement of a group of ``ranks`` ranks in the network, with one entry per dimension.

    ``members`` is the number of members along one line of the dimension (the maximum, if lines differ).
    ``stride`` is the distance between neighbouring members. ``sharers`` is the number of devices of one node
    (in general: of one unit of the next inner dimension) that use the dimension at once. On a ring, it is the
    number of groups that share each link.
    """

    ranks: int
    members: tuple[int, ...]
    stride: tuple[int, ...]
    sharers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedGroups:
    """Placement of the groups of a set: the distinct footprints, and for each rank the index of its footprint
    (``which``, shape ``(ranks,)``, -1: in no group).
    """

    footprints: tuple[Footprint, ...]
    which: IntArray


def footprint_of(system: System, members: IntArray) -> Footprint:
    """Return the footprint of one group that has the network to itself. O(members log members)."""
    rows = np.asarray(members, np.int64)[None, :]
    counts, strides = _lines(rows, system)
    sharers = _sharers(system, [1] * len(system.shape), _busy(np.unique(rows), system), 0)
    return Footprint(len(members), tuple(counts[0].tolist()), tuple(strides[0].tolist()), sharers)


def place_groups(groups: GroupSet, system: System, num_ranks: int) -> PlacedGroups:
    """Return the placement of the groups of a set, which communicate at the same time. O(ranks log ranks) for
    each dimension.
    """
    which = np.full(num_ranks, -1, np.int64)
    index_of: dict[Footprint, int] = {}
    # The members of all groups, as one matrix per group size.
    members = member_rows(groups)
    matrices: list[IntArray] = []
    if isinstance(members, tuple):
        by_size: dict[int, list[tuple[int, ...]]] = {}
        for listed in members:
            by_size.setdefault(len(listed), []).append(listed)
        matrices += [np.array(same, np.int64) for size, same in by_size.items() if size]
    else:
        matrices.append(members)
    empty: IntArray = np.empty(0, np.int64)
    inside = np.concatenate([empty, *(rows[rows < num_ranks] for rows in matrices)])
    busy = _busy(np.unique(inside), system)
    axes = len(system.shape)
    for rows in matrices:
        here = rows[(rows < num_ranks).all(axis=1)]
        if not len(here):
            continue
        lines = np.concatenate(_lines(here, system), axis=1)
        distinct, row = np.unique(lines, axis=0, return_inverse=True)
        numbers: list[int] = []
        for values in distinct.tolist():
            sharers = _sharers(system, values[axes:], busy, len(inside))
            footprint = Footprint(here.shape[1], tuple(values[:axes]), tuple(values[axes:]), sharers)
            numbers.append(index_of.setdefault(footprint, len(index_of)))
        which[here] = np.array(numbers, np.int64)[row.reshape(-1)][:, None]
    return PlacedGroups(tuple(index_of), which)


def place_messages(permutation: Permutation, system: System, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Return the distances, per dimension, over which each rank sends and receives in a permutation, two
    arrays of shape ``(ranks, dimensions)``.

    All distances of a rank without a peer are 0. The distance through a switch or over a direct link is 1.
    """
    ranks: IntArray = np.arange(num_ranks, dtype=np.int64)
    away: list[IntArray] = []
    for peers in (permutation.targets_of(ranks), permutation.sources_of(ranks)):
        has_peer = (peers >= 0) & (peers < num_ranks)
        columns: list[IntArray] = []
        unit = 1
        for dimension in system.dimensions:
            ahead: IntArray = np.abs(
                ranks // unit % dimension.size - np.where(has_peer, peers, ranks) // unit % dimension.size
            )
            if dimension.topology != "ring":
                ahead = np.minimum(ahead, 1)
            elif dimension.is_closed(system.devices):
                ahead = np.minimum(ahead, dimension.size - ahead)
            columns.append(ahead)
            unit *= dimension.size
        away.append(np.stack(columns, axis=1))
    return away[0], away[1]


def _units(system: System) -> list[int]:
    """Return for each dimension the number of consecutive ranks in one member of that dimension, such as the
    ranks of one node: the product of the sizes of the inner dimensions. The last entry is the number of all
    devices.
    """
    units = [1]
    for size in system.shape:
        units.append(units[-1] * size)
    return units


def _lines(rows: IntArray, system: System) -> tuple[IntArray, IntArray]:
    """Return the number of members along each dimension and the stride between them, each of shape ``(groups,
    dimensions)``. ``rows`` has the ranks of groups of one size, shape ``(groups, size)``.

    If the lines of a group along a dimension differ, the maximum is returned.
    """
    units, shape = _units(system), system.shape
    counts: IntArray = np.ones((len(rows), len(shape)), np.int64)
    strides = np.ones_like(counts)
    group = np.broadcast_to(np.arange(len(rows))[:, None], rows.shape)
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        outer, inner = rows // units[axis + 1], rows // units[axis]
        pairs: IntArray = np.unique(np.stack((group, outer, inner)).reshape(3, -1), axis=1)
        starts = np.flatnonzero(np.any(np.diff(pairs[:2], axis=1, prepend=-1) != 0, axis=0))
        lengths = np.diff(np.append(starts, pairs.shape[1]))
        ends = starts + lengths - 1
        gaps = (pairs[2][ends] - pairs[2][starts]) // np.maximum(lengths - 1, 1)
        np.maximum.at(counts[:, axis], pairs[0][starts], lengths)
        np.maximum.at(strides[:, axis], pairs[0][starts], gaps)
    return counts, strides


def _busy(ranks: IntArray, system: System) -> list[int]:
    """Return for each dimension how many of the given ranks are at most in one of its units."""
    units = _units(system)[:-1]
    return [int(np.unique(ranks // unit, return_counts=True)[1].max(initial=0)) for unit in units]


def _sharers(system: System, stride: list[int], busy: list[int], active: int) -> tuple[int, ...]:
    """Return the ``sharers`` of a footprint. Groups share the links of a ring only if all devices take
    part.
    """
    interleaved = active >= system.devices
    return tuple(
        (gap if interleaved else 1) if dimension.topology == "ring" else count
        for dimension, gap, count in zip(system.dimensions, stride, busy, strict=True)
    )
