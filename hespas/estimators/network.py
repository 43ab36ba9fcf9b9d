"""Collectives and messages by latency and bandwidth (alpha-beta) over the device's links.

Sent bytes are those of bandwidth-optimal algorithms (Thakur, Rabenseifner, Gropp: "Optimization of collective
communication operations in MPICH", 2005). A group that fits into the scale-up domain uses that link, any
other the scale-out link for all of its bytes; contention and hierarchy are a simulator's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hespas.graph import CollectiveKind, GroupSet, OpGraph, Permutation, StridedGroups
from hespas.graph.columns import BoolArray, FloatArray, IntArray
from hespas.hardware import Device, Link
from hespas.operations import between_ranks, group_sizes

__all__ = [
    "Algorithm",
    "NetworkCosts",
    "collective_costs",
    "collective_time_ns",
    "group_ranks_per_node",
    "message_costs",
    "message_ranks_per_node",
]

Algorithm = Literal["auto", "ring", "tree"]
"""How many latencies a collective waits for: N-1 hops of a ring, or log2 N exchanges; ``auto``: by topology
of the link."""


_MOST_GROUPS = 1 << 22
"""More groups than any machine has: they are not listed to see whether each fits a domain."""


class _Rule(NamedTuple):
    """Sent bytes ``(per_share (N-1)/N + per_peer (N-1) + whole) S``; latencies of the two algorithms."""

    per_share: float
    per_peer: float
    whole: float
    ring_hops: float
    tree_levels: float
    tree_steps: float


# S is the payload in Chakra's sense: the shard for gathers, the whole buffer otherwise. All-to-alls exchange
# with all peers at once where every pair has a path.
_RULES: dict[CollectiveKind, _Rule] = {
    CollectiveKind.ALL_REDUCE: _Rule(2, 0, 0, 2, 2, 0),
    CollectiveKind.ALL_GATHER: _Rule(0, 1, 0, 1, 1, 0),
    CollectiveKind.REDUCE_SCATTER: _Rule(1, 0, 0, 1, 1, 0),
    CollectiveKind.REDUCE_SCATTER_BLOCK: _Rule(1, 0, 0, 1, 1, 0),
    CollectiveKind.ALL_TO_ALL: _Rule(1, 0, 0, 1, 0, 1),
    CollectiveKind.RAGGED_ALL_TO_ALL: _Rule(1, 0, 0, 1, 0, 1),
    CollectiveKind.BROADCAST: _Rule(0, 0, 1, 1, 1, 0),
    CollectiveKind.REDUCE: _Rule(0, 0, 1, 1, 1, 0),
    CollectiveKind.GATHER: _Rule(0, 1, 0, 1, 1, 0),
    CollectiveKind.SCATTER: _Rule(1, 0, 0, 1, 1, 0),
    CollectiveKind.BARRIER: _Rule(0, 0, 0, 1, 1, 0),
}


@dataclass(frozen=True, slots=True, eq=False)
class NetworkCosts:
    """One row per collective or message: its node, its time without launch overhead, and what it lacks.

    ``duration_ns`` is NaN where ``no_group``, ``no_link`` or an unknown size says why; ``local`` marks rows
    that leave nothing to the network (groups of one rank, nobody to send to): their time is 0.
    """

    node: NDArray[np.int32]
    duration_ns: FloatArray
    no_group: NDArray[np.bool_]
    no_link: NDArray[np.bool_]
    local: NDArray[np.bool_]


def _choose_link(device: Device, fits: bool) -> Link | None:
    """The link of a group: scale-up inside the domain, else scale-out, else the host link if alone there."""
    scale_up, scale_out = device.link("scale_up"), device.link("scale_out")
    if fits and scale_up is not None:
        return scale_up
    if scale_out is not None:
        return scale_out
    return None if scale_up is not None else device.link("pcie")


def _domain(device: Device) -> int:
    """Devices that scale-up links reach, -1 for no bound; 1 where there is no such link."""
    link = device.link("scale_up")
    return 1 if link is None else link.devices_per_domain


def _spread(digits: tuple[tuple[int, int], ...]) -> IntArray:
    values = np.zeros(1, np.int64)
    for size, stride in digits:
        values = (values[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return values


def _groups_fit(groups: GroupSet, domain: int) -> bool:
    """Whether every group lies inside one block of ``domain`` consecutive ranks. O(groups)."""
    if domain < 0 or groups.max_group_size <= 1:
        return True
    if groups.num_groups > _MOST_GROUPS:
        return False
    if not isinstance(groups, StridedGroups):
        return all(min(row) // domain == max(row) // domain for row in groups.rows if row)
    first = groups.base + _spread(groups.group_digits)
    last = first + sum((size - 1) * stride for size, stride in groups.member_digits)
    return bool((first // domain == last // domain).all())


def _pairs_fit(permutation: Permutation, domain: int) -> bool:
    """Whether every pair lies inside one domain. O(ranks)."""
    return domain < 0 or all(source // domain == target // domain for source, target in permutation)


def _is_ring(link: Link, algorithm: Algorithm) -> bool:
    if algorithm != "auto":
        return algorithm == "ring"
    return link.topology in ("ring", "torus2d", "torus3d")


def group_ranks_per_node(graph: OpGraph, device: Device, *, num_ranks: int) -> FloatArray:
    """The most ranks that the first group of each set has in one node (the device's scale-up domain), shape
    ``(group sets + 1,)`` as :func:`group_sizes`. A node holds all where no group leaves it. O(group sizes).
    """
    domain = _domain(device)
    sets: list[GroupSet | None] = [*graph.group_sets]
    sets.append(StridedGroups.all_ranks(num_ranks) if num_ranks > 0 else None)
    found = group_sizes(graph, num_ranks=num_ranks)
    for row, groups in enumerate(sets):
        if groups is None or _groups_fit(groups, domain):
            continue
        _, count = np.unique(np.asarray(groups.members(0), np.int64) // domain, return_counts=True)
        found[row] = float(count.max())
    return found


def message_ranks_per_node(graph: OpGraph, device: Device) -> FloatArray:
    """How many of two ranks share a node (the device's scale-up domain), shape ``(messages,)``: 2 where every
    pair of a message does, else 1. One whose peer is not stated leaves the node, as in
    :func:`message_costs`.
    """
    domain = _domain(device)
    within = np.array([*(_pairs_fit(each, domain) for each in graph.permutations), False])
    return np.where(within[graph.p2p.permutation], 2.0, 1.0)


def collective_costs(graph: OpGraph, device: Device, *, num_ranks: int, algorithm: Algorithm) -> NetworkCosts:
    """Time of each row of the collective table.

    ``num_ranks`` is the size of a group nobody stated (-1: such rows stay unknown). O(rows + groups).
    """
    table = graph.collectives
    domain = _domain(device)
    # One more row than group sets: -1 (all ranks) indexes the last.
    sets: list[GroupSet | None] = [*graph.group_sets]
    sets.append(StridedGroups.all_ranks(num_ranks) if num_ranks > 0 else None)
    sizes = group_sizes(graph, num_ranks=num_ranks)
    fits = [groups is not None and _groups_fit(groups, domain) for groups in sets]
    links = [_choose_link(device, fit) for fit in fits]
    beta = np.array([nan if link is None else 1e9 / link.bandwidth_bytes_per_s for link in links])
    alpha = np.array([nan if link is None else link.latency_ns for link in links])
    ring = np.array([link is not None and _is_ring(link, algorithm) for link in links])

    members = sizes[table.group_set]
    sent, hops = _traffic(table.kind.astype(np.int64), table.comm_bytes, members, ring[table.group_set])
    latency = np.where(np.isnan(alpha), 0.0, alpha)[table.group_set]
    local = members <= 1
    duration = np.where(local, 0.0, hops * latency + sent * beta[table.group_set])
    no_link = np.isnan(beta)[table.group_set] & ~np.isnan(members) & ~local
    return NetworkCosts(table.node, duration, np.isnan(members), no_link, local)


def collective_time_ns(
    kind: IntArray,
    members: FloatArray,
    payload: FloatArray,
    device: Device,
    *,
    beyond_node: BoolArray,
    algorithm: Algorithm = "auto",
) -> FloatArray:
    """Time of collectives by numbers [ns], shape ``(rows,)``: a :class:`CollectiveKind`, ranks of the group,
    payload in Chakra's sense, and whether the group leaves its node. NaN where there is no link or rule.
    """
    domain = _domain(device)
    fits = ~beyond_node & ((members <= domain) if domain >= 0 else np.ones(len(members), np.bool_))
    links = [_choose_link(device, fit) for fit in (False, True)]
    beta = np.array([nan if link is None else 1e9 / link.bandwidth_bytes_per_s for link in links])
    alpha = np.nan_to_num(np.array([nan if link is None else link.latency_ns for link in links]))
    ring = np.array([link is not None and _is_ring(link, algorithm) for link in links])
    place = fits.astype(np.int64)
    sent, hops = _traffic(kind, payload, members, ring[place])
    return np.where(members <= 1, 0.0, hops * alpha[place] + sent * beta[place])


def _traffic(
    kind: IntArray, payload: FloatArray, members: FloatArray, ring: BoolArray
) -> tuple[FloatArray, FloatArray]:
    """Bytes each rank sends and latencies it waits for, per row; NaN for kinds without a rule."""
    rules: FloatArray = np.full((len(CollectiveKind), len(_Rule._fields)), nan)
    for each, rule in _RULES.items():
        rules[int(each)] = rule
    row: FloatArray = rules[kind]
    peers = members - 1
    whole = np.where(kind == int(CollectiveKind.BARRIER), 0.0, payload)
    sent = (row[:, 0] * peers / np.maximum(members, 1) + row[:, 1] * peers + row[:, 2]) * whole
    tree = row[:, 4] * np.ceil(np.log2(np.maximum(members, 1))) + row[:, 5]
    return sent, np.where(ring, row[:, 3] * peers, tree)


def message_costs(graph: OpGraph, device: Device) -> NetworkCosts:
    """Time of each row of the point-to-point table: one latency plus the bytes over one link of the device.

    Host transfers use the host link; a message whose peer is not stated is taken to leave the domain.
    """
    table = graph.p2p
    domain = _domain(device)
    links = [_choose_link(device, _pairs_fit(p, domain)) for p in graph.permutations]
    links += [_choose_link(device, fits=False) or device.link("scale_up"), device.link("pcie")]
    # Rows: the permutations, then "peer not stated" (-1 in the table, which would index the next), then host.
    unstated, host = len(links) - 2, len(links) - 1
    row = np.where(table.permutation < 0, unstated, table.permutation)
    row = np.where(table.host, host, row)
    beta = np.array([nan if link is None else 1e9 / _one_link(link) for link in links])
    alpha = np.array([nan if link is None else link.latency_ns for link in links])
    local = ~(table.host | between_ranks(graph))
    duration = np.nan_to_num(alpha)[row] + table.comm_bytes * beta[row]
    no_link = np.isnan(beta)[row] & ~local
    nobody = np.zeros(len(table), np.bool_)
    return NetworkCosts(table.node, np.where(local, 0.0, duration), nobody, no_link, local)


def _one_link(link: Link) -> float:
    """What one message gets: all links of a device behind a switch, one link of a ring or torus."""
    if link.topology in ("switch", "fully_connected"):
        return link.bandwidth_bytes_per_s
    one = link.link_bandwidth_bytes_per_s
    return link.bandwidth_bytes_per_s if np.isnan(one) else one
