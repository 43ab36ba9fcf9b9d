"""Collective algorithms on levels of a network: the time of one collective, and the bytes it sends.

A *level* is a dimension in which a group has several members. For S bytes (the whole buffer) on levels of m_k
members, innermost first, with u_k = m_0 ... m_(k-1) members within one member of level k and N members in
total, times are:

    ring          (N - 1) / N S over the slowest of rate_k u_k: all members of a node send at once, each over
                  its own rail; over all axes of a torus together. Twice that for an all-reduce
    hierarchical  (m_k - 1) / m_k S / u_k over rate_k, the slowest level (levels work on different parts at
                  once), and log2 steps of each level instead of N - 1
    tree          S up and S down, log2 steps on outer levels (double binary trees)
    in network    S once over the share of the rate at which switches reduce (NVLS, SHARP)
    direct        an all-to-all sends (m_k - 1) / m_k S over level k, to all members with another coordinate;
                  a link of a ring of m passes floor(m^2 / 4) / m S, independent of distances

The fastest algorithm counts. Shares of S that a member sends over level k:

    ring          (N - 1) / N of S, twice for an all-reduce (Thakur, Rabenseifner, Gropp, 2005). Of N steps
                  around, N / u_k - N / u_(k+1) pass level k and none outside it (outermost: all N / u_k)
    hierarchical  (m_k - 1) / m_k / u_k, twice for an all-reduce
    tree, chain   N - 1 edges, N / u_k - N / u_(k+1) of them on level k, which all of S passes (twice for an
                  all-reduce, up and down: Sanders, Speck, Traff, 2009)
    in network    1 / u_k where switches reduce: the sum comes back
    direct        an all-to-all (m_k - 1) / m_k; from or to a root 1 / N per member outside. On a ring each
                  part passes as many links as its distance: floor(m^2 / 4) / m, on a line (m^2 - 1) / (3 m)

The axes of a torus share the traffic of rings, trees and hierarchies by their rates. If groups are
interleaved on a ring, a device also forwards the traffic of its neighbours' groups; traffic that devices
outside all groups forward is not counted. All members of a group count alike, also if a root sends more.

Formulas: Thakur, Rabenseifner, Gropp (2005); Sanders, Speck, Traff, "Two-tree algorithms" (2009); "How to
Scale Your Model" (Google DeepMind, 2025) for tori.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, inf, isnan, log2, prod
from operator import mul
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import System
from hespas.simulator.network.placement import Footprint

__all__ = [
    "AT_ROOT",
    "EXCHANGES",
    "ONE_WAY",
    "ROOTED",
    "SHARDS",
    "Level",
    "chosen_traffic",
    "collective_times",
    "fastest_ns",
    "least_ns",
    "levels_of",
    "message_ns",
    "message_traffic",
    "shares_sent",
]


class Level(NamedTuple):
    """Dimension of a network in which a group has several members.

    ``up`` and ``down`` are the rates at which a device sends and receives [bytes/ns]; ``link`` is the rate of
    a single message. ``steps`` is the number of steps of a ring through the members. ``hops`` is the number
    of links between neighbours, and ``latency_ns`` the latency of one link. ``adds`` is the rate at which
    switches reduce data, as a share of the rate (0: switches do not reduce).
    """

    members: int
    up: float
    down: float
    link: float
    latency_ns: float
    steps: int
    hops: int
    is_ring: bool
    adds: float

    @property
    def rate(self) -> float:
        """Return the rate of a device that sends and receives at once."""
        return min(self.up, self.down)

    @property
    def log_steps(self) -> int:
        """Return the number of latencies in an algorithm whose distances double in each step: log2 of the
        members. On a ring, a step passes as many links as its distance, so the result is the number of steps
        of the ring.
        """
        return self.steps if self.is_ring else ceil(log2(self.members))


class _DimensionUse(NamedTuple):
    """Use of one network dimension by a group of ranks: the number of its ``members`` along the dimension,
    the ``stride`` between them, and ``sharers``, the number of groups that share a link.
    """

    members: int
    stride: int
    sharers: int


def levels_of(system: System, footprint: Footprint) -> tuple[Level, ...]:
    """Return the network levels that a group with this footprint uses, innermost first. An unknown latency
    counts as 0.
    """
    lines = map(_DimensionUse, footprint.members, footprint.stride, footprint.sharers)
    return tuple(_level(system, axis, line) for axis, line in enumerate(lines) if line.members > 1)


def _level(system: System, axis: int, line: _DimensionUse) -> Level:
    dimension = system.dimensions[axis]
    members, stride, sharers = line
    up, down = dimension.bandwidth_bytes_per_s / 1e9, dimension.received_bytes_per_s / 1e9
    link, steps, hops, adds = dimension.link_bytes_per_s / 1e9, members - 1, 1, 0.0
    match dimension.topology:
        case "ring":
            closed = members * stride == dimension.size and dimension.is_closed(system.devices)
            share = (1.0 if closed else 1.0 / dimension.links_per_device) / sharers
            link, steps, hops = link / sharers, members // 2 if closed else members - 1, stride
        case "fully_connected":
            share = min(members - 1, dimension.links_per_device) / dimension.links_per_device
        case "switch":
            # Devices of a node share network interfaces; a device that sends alone has one for itself.
            # Oversubscription limits all devices.
            unit = prod(system.shape[:axis])
            share = min(dimension.devices_per_nic, unit / max(sharers, 1))
            share /= max(1.0, dimension.oversubscription * sharers / unit)
            link, adds = (
                min(up, down) * share,
                0.0 if isnan(dimension.reduction_share) else dimension.reduction_share,
            )
    latency_ns = 0.0 if isnan(dimension.latency_ns) else dimension.latency_ns
    ring = dimension.topology == "ring"
    return Level(members, up * share, down * share, link, latency_ns, steps, hops, ring, adds)


def message_ns(system: System, away: Sequence[int], message_bytes: FloatArray) -> FloatArray:
    """Return the time of messages to a device at distance ``away`` along each dimension.

    It is the latency of all hops plus the bytes over the slowest link. If a message passes several switches,
    only the outermost one counts.
    """
    latency_ns, rate = 0.0, inf
    for axis in reversed(range(len(away))):
        dimension = system.dimensions[axis]
        if not away[axis] or (rate < inf and dimension.topology != "ring"):
            continue
        sharers = 1 if dimension.topology == "ring" else prod(system.shape[:axis])
        level = _level(system, axis, _DimensionUse(2, 1, sharers))
        latency_ns += level.latency_ns * away[axis]
        rate = min(rate, level.link)
    return latency_ns + message_bytes / rate


# Kinds of one rule: all to all in one direction, each to each, one to all, and part by part from or to one.
ONE_WAY = {
    CollectiveKind.ALL_GATHER,
    CollectiveKind.REDUCE_SCATTER,
    CollectiveKind.REDUCE_SCATTER_BLOCK,
}

EXCHANGES = {CollectiveKind.ALL_TO_ALL, CollectiveKind.RAGGED_ALL_TO_ALL}

ROOTED = {CollectiveKind.BROADCAST, CollectiveKind.REDUCE}

AT_ROOT = {CollectiveKind.GATHER, CollectiveKind.SCATTER}

SHARDS = {CollectiveKind.ALL_GATHER, CollectiveKind.GATHER}
"""Kinds whose messages (in Chakra's sense) are shards of the whole buffer."""


def collective_times(
    kind: CollectiveKind, levels: Sequence[Level], message_bytes: FloatArray
) -> dict[str, FloatArray]:
    """Return the times [ns] of messages (sizes as Chakra counts them) by algorithm; empty for kinds without a
    formula.
    """
    whole = message_bytes * prod(level.members for level in levels) if kind in SHARDS else message_bytes
    if kind is CollectiveKind.ALL_REDUCE:
        times = {name: 2 * time for name, time in _one_way(levels, whole).items()}
        times["tree"] = 2 * (_chain(levels[:1]) + _log_latency(levels[1:])) + 2 * whole / _bus(levels)
        if any(level.adds for level in levels):
            times["in network"] = _in_network(levels, whole)
        return times
    if kind in ONE_WAY:
        return _one_way(levels, whole)
    if kind in EXCHANGES:
        return {"direct": _exchange(levels, whole)}
    if kind in ROOTED:
        bus = _bus(levels)
        return {"ring": _chain(levels) + whole / bus, "tree": _log_latency(levels) + 2 * whole / bus}
    if kind in AT_ROOT:
        worst, inside, ranks = 0.0, 1, prod(level.members for level in levels)
        for level in levels:
            rate = level.down if kind is CollectiveKind.GATHER else level.up
            worst = max(worst, (level.members - 1) * inside / ranks / rate)
            inside *= level.members
        return {"direct": (_log_latency(levels) + whole * worst)}
    return {"tree": 2 * _log_latency(levels) + 0 * whole} if kind is CollectiveKind.BARRIER else {}


def fastest_ns(kind: CollectiveKind, levels: Sequence[Level], message_bytes: FloatArray) -> FloatArray:
    """Return the time of the fastest algorithm for each message size; NaN for kinds without a formula."""
    times = list(collective_times(kind, levels, message_bytes).values())
    return np.min(np.stack(times), axis=0) if times else np.full(len(message_bytes), np.nan)


def least_ns(kind: CollectiveKind, levels: Sequence[Level], message_bytes: FloatArray) -> FloatArray:
    """Return a lower bound of the time: the fastest algorithm, on switches that reduce at full rate. 0 for
    kinds without a formula.
    """
    ideal = [level._replace(adds=1.0 if level.adds else 0.0) for level in levels]
    return np.nan_to_num(fastest_ns(kind, ideal, message_bytes))


def _one_way(levels: Sequence[Level], whole: FloatArray) -> dict[str, FloatArray]:
    """Return the times of a reduce-scatter or an all-gather by algorithm."""
    ranks = prod(level.members for level in levels)
    ring = _chain(levels) + (ranks - 1) / ranks * whole / _bus(levels)
    return {"ring": ring, "hierarchical": _log_latency(levels) + _moved(levels, whole)}


def _bus(levels: Sequence[Level]) -> float:
    """Return the rate [bytes/ns] of a ring through all members of a group. All members of a node send to the
    next node at once, each over its own network interface. In a torus, members send along all axes at once.
    """
    if all(level.is_ring for level in levels):
        return sum(level.rate for level in levels)
    slowest, inside = inf, 1
    for level in levels:
        slowest = min(slowest, level.rate * inside)
        inside *= level.members
    return slowest


def _chain(levels: Sequence[Level]) -> float:
    """Return the latency of one round of a ring through all members, summed over the links of each level that
    it passes.
    """
    outside = prod(level.members for level in levels)
    total = 0.0
    for level in levels:
        outside //= level.members
        total += level.steps * level.hops * outside * level.latency_ns
    return total


def _log_latency(levels: Sequence[Level]) -> float:
    return sum(level.log_steps * level.hops * level.latency_ns for level in levels)


def _moved(levels: Sequence[Level], whole: FloatArray) -> FloatArray:
    """Return the transfer time on the slowest level for the hierarchical algorithm. The axes of a torus share
    the bytes.
    """
    if all(level.is_ring for level in levels):
        ranks = prod(level.members for level in levels)
        return (ranks - 1) / ranks * whole / _bus(levels)
    worst, inside = 0.0, 1
    for level in levels:
        worst = max(worst, (level.members - 1) / level.members / inside / level.rate)
        inside *= level.members
    return whole * worst


def _in_network(levels: Sequence[Level], size: FloatArray) -> FloatArray:
    """Return the time of an all-reduce in which switches reduce the data and send back the sum. On levels
    whose switches do not reduce, members exchange parts of the buffer.
    """
    worst, inside, latency_ns = 0.0, 1, 0.0
    for level in levels:
        shared = 2 * (level.members - 1) / level.members / level.rate
        added = 1.0 / (level.rate * level.adds) if level.adds else inf
        worst = max(worst, min(shared, added) / inside)
        latency_ns += 2 * (1 if level.adds else level.log_steps * level.hops) * level.latency_ns
        inside *= level.members
    return latency_ns + size * worst


def _exchange(levels: Sequence[Level], size: FloatArray) -> FloatArray:
    """Return the time of an all-to-all, which is limited by its slowest level. Bytes pass every axis of a
    torus.
    """
    worst, latency_ns = 0.0, 0.0
    for level in levels:
        share = (level.members - 1) / level.members
        if level.is_ring:
            share = level.members**2 // 4 / level.members  # the mean distance on a ring over its two links
        latency_ns += (level.steps * level.hops if level.is_ring else 1) * level.latency_ns
        worst = max(worst, share / level.rate)
    return latency_ns + size * worst


_FITS = 1 + 1e-9
"""Tolerance for rounding if a transfer takes all of the available time."""


def shares_sent(kind: CollectiveKind, levels: Sequence[Level]) -> dict[str, FloatArray]:
    """Return the share of the whole buffer that a member sends over each level, shape ``(levels,)``, for each
    algorithm of :func:`hespas.simulator.network.algorithms.collective_times`.
    """
    if kind is CollectiveKind.ALL_REDUCE:
        by_algorithm = {name: 2 * shares for name, shares in _one_way_shares(levels).items()}
        by_algorithm["tree"] = 2 * _edges(levels)
        if any(level.adds for level in levels):
            own = 2 * _parts(levels)
            own[[level.adds > 0 for level in levels]] = 1.0
            by_algorithm["in network"] = own / _inside(levels)[:-1]
        return by_algorithm
    if kind in ONE_WAY:
        return _one_way_shares(levels)
    if kind in EXCHANGES:
        return {"direct": np.array([_exchanged(level) for level in levels])}
    if kind in ROOTED:
        return {"ring": _edges(levels), "tree": _edges(levels)}
    if kind in AT_ROOT:
        inside = _inside(levels)
        return {"direct": (inside[1:] - inside[:-1]) / inside[-1] ** 2}
    return {"tree": np.zeros(len(levels))} if kind is CollectiveKind.BARRIER else {}


def _inside(levels: Sequence[Level]) -> FloatArray:
    """Return for each level the number of group members within one member of that level (u_k in the module:
    the product of the sizes of the inner levels). The additional last entry is the number of all members.
    """
    return np.array([*accumulate((level.members for level in levels), mul, initial=1)], np.float64)


def _parts(levels: Sequence[Level]) -> FloatArray:
    members = np.array([level.members for level in levels], np.float64)
    return (members - 1) / members


def _is_torus(levels: Sequence[Level]) -> bool:
    return all(level.is_ring for level in levels)


def _by_rate(levels: Sequence[Level]) -> FloatArray:
    """Return the share of a ring's traffic that a member sends along each axis of a torus, in proportion to
    the rates.
    """
    rates, ranks = np.array([level.rate for level in levels]), _inside(levels)[-1]
    shares: FloatArray = (ranks - 1) / ranks * rates / rates.sum()
    return shares


def _one_way_shares(levels: Sequence[Level]) -> dict[str, FloatArray]:
    if _is_torus(levels):
        return {"ring": _by_rate(levels), "hierarchical": _by_rate(levels)}
    inside = _inside(levels)
    passed = 1 / inside[:-1] - np.append(1 / inside[1:-1], 0.0)
    ranks = inside[-1]
    return {"ring": (ranks - 1) / ranks * passed, "hierarchical": _parts(levels) / inside[:-1]}


def _edges(levels: Sequence[Level]) -> FloatArray:
    inside = _inside(levels)
    return _by_rate(levels) if _is_torus(levels) else 1 / inside[:-1] - 1 / inside[1:]


def _exchanged(level: Level) -> float:
    members = level.members
    if not level.is_ring:
        return (members - 1) / members
    is_line = level.steps > members // 2
    return (members**2 - 1) / 3 / members if is_line else members**2 // 4 / members


def chosen_traffic(
    system: System, kind: CollectiveKind, footprint: Footprint, message_bytes: FloatArray, time_ns: FloatArray
) -> tuple[list[str], FloatArray, FloatArray]:
    """Return the bytes that collectives send over each dimension, for groups with one footprint.

    ``message_bytes`` are sizes as Chakra counts them, ``time_ns`` the time of each message. Return the
    algorithm of each message, the bytes that a device sends, shape ``(dimensions, messages)``, and the
    maximum rate of a device [bytes/ns], shape ``(dimensions,)``. A device that does not share its network
    interface can exceed its nominal rate.

    The algorithm is the fastest one whose bytes can be sent in ``time_ns``. It is "", with NaN bytes, for
    kinds without a formula.
    """
    axes = [axis for axis, members in enumerate(footprint.members) if members > 1]
    levels = levels_of(system, footprint)
    most: FloatArray = np.array([traffic.bandwidth_bytes_per_s / 1e9 for traffic in system.dimensions])
    sent = np.zeros((len(system.dimensions), len(message_bytes)))
    if not axes:
        return [""] * len(message_bytes), sent, most
    most[axes] = np.maximum(most[axes], [level.up for level in levels])
    shares = shares_sent(kind, levels)
    if not shares:
        sent[axes] = np.nan
        return [""] * len(message_bytes), sent, most
    whole = message_bytes * prod(level.members for level in levels) if kind in SHARDS else message_bytes
    shared = [footprint.sharers[axis] if system.dimensions[axis].topology == "ring" else 1 for axis in axes]
    names = list(shares)
    traffic = np.stack([shares[name] * shared for name in names])  # (algorithms, levels)
    least_ns = (traffic / most[axes]).max(axis=1)[:, None] * whole
    times = collective_times(kind, levels, message_bytes)
    taken = np.stack([times[name] for name in names])
    taken[(least_ns > time_ns * _FITS) & (least_ns > least_ns.min(axis=0))] = np.inf
    choice: IntArray = np.argmin(taken, axis=0)
    sent[axes] = traffic[choice].T * whole
    return [names[row] for row in choice.tolist()], sent, most


def message_traffic(system: System, away: Sequence[int], message_bytes: FloatArray) -> FloatArray:
    """Return the bytes that a device sends over each dimension, shape ``(dimensions, messages)``, in messages
    to a device at distance ``away``.

    If a message passes several switches, only the outermost one counts, as in
    :func:`hespas.simulator.network.algorithms.message_ns`.
    """
    sent = np.zeros((len(away), len(message_bytes)))
    passed = False
    for axis in reversed(range(len(away))):
        if away[axis] and not (passed and system.dimensions[axis].topology != "ring"):
            sent[axis] = message_bytes
            passed = True
    return sent
