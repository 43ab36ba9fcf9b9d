"""The time of one collective on levels of a network: latencies, and bytes over what each level lets through.

A *level* is a dimension in which a group has several members. Of S bytes (the whole buffer) on levels of m_k
members, innermost first, u_k = m_0 ... m_(k-1) of them within one member of level k, N = all of them:

    ring          (N - 1) / N S over the slowest of rate_k u_k: all members of a node send at once, each over
                  its own rail; over all axes of a torus together. Twice that for an all-reduce
    hierarchical  (m_k - 1) / m_k S / u_k over rate_k, the slowest level (they work on different parts at
                  once), and log2 steps of each level instead of N - 1
    tree          S up and S down, log2 steps on outer levels (double binary trees)
    in network    S once over the share of the rate at which switches add (NVLS, SHARP)
    direct        an all-to-all sends (m_k - 1) / m_k S over level k, to all whose place there is another; a
                  link of a ring of m passes floor(m^2 / 4) / m S, however many links lie between members

The fastest counts. Formulas: Thakur, Rabenseifner, Gropp (2005); Sanders, Speck, Traff, "Two-tree algorithms"
(2009); "How to Scale Your Model" (Google DeepMind, 2025) for tori.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isnan, log2, prod
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind
from hespas.graph.columns import FloatArray
from hespas.hardware import System
from hespas.simulator.network.placement import Footprint

__all__ = [
    "AT_ROOT",
    "EXCHANGES",
    "ONE_WAY",
    "ROOTED",
    "SHARDS",
    "Level",
    "collective_times",
    "fastest_ns",
    "least_ns",
    "levels_of",
    "message_ns",
]


class Level(NamedTuple):
    """``up`` and ``down`` are what a device sends and receives [bytes/ns], ``link`` what one message gets;
    ``steps`` those of a ring of the members, ``hops`` of them between neighbours, each ``latency_ns``;
    ``adds`` the share of the rate at which switches add (0: they do not).
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
        """What a device sends while it receives as much."""
        return min(self.up, self.down)

    @property
    def log_steps(self) -> int:
        """Steps where distances double; along a ring they add up to all of them."""
        return self.steps if self.is_ring else ceil(log2(self.members))


class _Line(NamedTuple):
    """One dimension of a footprint."""

    members: int
    stride: int
    crowd: int


def levels_of(system: System, footprint: Footprint) -> tuple[Level, ...]:
    """The levels of a group, innermost first. A latency that nobody knows counts as none."""
    lines = map(_Line, footprint.members, footprint.stride, footprint.crowd)
    return tuple(_level(system, axis, line) for axis, line in enumerate(lines) if line.members > 1)


def _level(system: System, axis: int, line: _Line) -> Level:
    each = system.dimensions[axis]
    members, stride, crowd = line
    up, down = each.bandwidth_bytes_per_s / 1e9, each.received_bytes_per_s / 1e9
    link, steps, hops, adds = each.link_bytes_per_s / 1e9, members - 1, 1, 0.0
    match each.topology:
        case "ring":
            closed = members * stride == each.size and each.is_closed(system.devices)
            share = (1.0 if closed else 1.0 / each.links_per_device) / crowd
            link, steps, hops = link / crowd, members // 2 if closed else members - 1, stride
        case "fully_connected":
            share = min(members - 1, each.links_per_device) / each.links_per_device
        case "switch":
            share = _share_of_switch(system, axis, crowd)
            link, adds = min(up, down) * share, 0.0 if isnan(each.reduction_share) else each.reduction_share
    latency_ns = 0.0 if isnan(each.latency_ns) else each.latency_ns
    ring = each.topology == "ring"
    return Level(members, up * share, down * share, link, latency_ns, steps, hops, ring, adds)


def _share_of_switch(system: System, axis: int, crowd: int) -> float:
    """Of what a device sends where all do. One that sends alone has an interface of its node to itself; those
    of a node share its interfaces, and all that send what oversubscription leaves.
    """
    each, unit = system.dimensions[axis], prod(system.shape[:axis])
    share = min(each.devices_per_nic, unit / max(crowd, 1))
    return share / max(1.0, each.oversubscription * crowd / unit)


def message_ns(system: System, away: Sequence[int], message_bytes: FloatArray) -> FloatArray:
    """The time of messages to a device so far away along each dimension: all its hops, and its bytes over
    the slowest link on the way. Of switches only the outermost is passed.
    """
    latency_ns, rate = 0.0, inf
    for axis in reversed(range(len(away))):
        each = system.dimensions[axis]
        if not away[axis] or (rate < inf and each.topology != "ring"):
            continue
        crowd = 1 if each.topology == "ring" else prod(system.shape[:axis])
        level = _level(system, axis, _Line(2, 1, crowd))
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
"""Whose messages (Chakra's sense) are shards of the whole buffer."""


def collective_times(
    kind: CollectiveKind, levels: Sequence[Level], message_bytes: FloatArray
) -> dict[str, FloatArray]:
    """The time [ns] of messages (Chakra's sense) by algorithm; empty for kinds without a rule."""
    whole = message_bytes * prod(level.members for level in levels) if kind in SHARDS else message_bytes
    if kind is CollectiveKind.ALL_REDUCE:
        return _all_reduce(levels, whole)
    if kind in ONE_WAY:
        return _one_way(levels, whole)
    if kind in EXCHANGES:
        return {"direct": _exchange(levels, whole)}
    if kind in ROOTED:
        return _rooted(levels, whole)
    if kind in AT_ROOT:
        return {"direct": _at_root(kind, levels, whole)}
    return {"tree": 2 * _log_latency(levels) + 0 * whole} if kind is CollectiveKind.BARRIER else {}


def fastest_ns(kind: CollectiveKind, levels: Sequence[Level], message_bytes: FloatArray) -> FloatArray:
    """The time by the algorithm that is fastest for each size; NaN for kinds without a rule."""
    times = list(collective_times(kind, levels, message_bytes).values())
    return np.min(np.stack(times), axis=0) if times else np.full(len(message_bytes), np.nan)


def least_ns(kind: CollectiveKind, levels: Sequence[Level], message_bytes: FloatArray) -> FloatArray:
    """What nothing goes below: the fastest where switches add at full rate; 0 for kinds without a rule."""
    ideal = [level._replace(adds=1.0 if level.adds else 0.0) for level in levels]
    return np.nan_to_num(fastest_ns(kind, ideal, message_bytes))


def _all_reduce(levels: Sequence[Level], size: FloatArray) -> dict[str, FloatArray]:
    found = {name: 2 * time for name, time in _one_way(levels, size).items()}
    found["tree"] = 2 * (_chain(levels[:1]) + _log_latency(levels[1:])) + 2 * size / _bus(levels)
    if any(level.adds for level in levels):
        found["in network"] = _in_network(levels, size)
    return found


def _one_way(levels: Sequence[Level], whole: FloatArray) -> dict[str, FloatArray]:
    """A reduce-scatter or an all-gather."""
    ranks = prod(level.members for level in levels)
    ring = _chain(levels) + (ranks - 1) / ranks * whole / _bus(levels)
    return {"ring": ring, "hierarchical": _log_latency(levels) + _moved(levels, whole)}


def _bus(levels: Sequence[Level]) -> float:
    """What a ring through all members lets through: every member of a node sends over its own rail; a torus
    sends along all its axes at once.
    """
    if all(level.is_ring for level in levels):
        return sum(level.rate for level in levels)
    slowest, inside = inf, 1
    for level in levels:
        slowest = min(slowest, level.rate * inside)
        inside *= level.members
    return slowest


def _chain(levels: Sequence[Level]) -> float:
    """Latencies of a ring through all members, once around: as often as it passes each level."""
    outside = prod(level.members for level in levels)
    total = 0.0
    for level in levels:
        outside //= level.members
        total += level.steps * level.hops * outside * level.latency_ns
    return total


def _log_latency(levels: Sequence[Level]) -> float:
    return sum(level.log_steps * level.hops * level.latency_ns for level in levels)


def _moved(levels: Sequence[Level], whole: FloatArray) -> FloatArray:
    """Bytes of the level that takes longest; the axes of a torus share them."""
    if all(level.is_ring for level in levels):
        ranks = prod(level.members for level in levels)
        return (ranks - 1) / ranks * whole / _bus(levels)
    worst, inside = 0.0, 1
    for level in levels:
        worst = max(worst, (level.members - 1) / level.members / inside / level.rate)
        inside *= level.members
    return whole * worst


def _in_network(levels: Sequence[Level], size: FloatArray) -> FloatArray:
    """What is sent comes back summed; on levels that do not add, a part for each member inside."""
    worst, inside, latency_ns = 0.0, 1, 0.0
    for level in levels:
        shared = 2 * (level.members - 1) / level.members / level.rate
        added = 1.0 / (level.rate * level.adds) if level.adds else inf
        worst = max(worst, min(shared, added) / inside)
        latency_ns += 2 * (1 if level.adds else level.log_steps * level.hops) * level.latency_ns
        inside *= level.members
    return latency_ns + size * worst


def _exchange(levels: Sequence[Level], size: FloatArray) -> FloatArray:
    """All-to-all: the level that takes longest; bytes pass every axis of a torus on their way."""
    worst, latency_ns = 0.0, 0.0
    for level in levels:
        share = (level.members - 1) / level.members
        if level.is_ring:
            share = level.members**2 // 4 / level.members  # of distant members, more links share more hops
        latency_ns += (level.steps * level.hops if level.is_ring else 1) * level.latency_ns
        worst = max(worst, share / level.rate)
    return latency_ns + size * worst


def _rooted(levels: Sequence[Level], size: FloatArray) -> dict[str, FloatArray]:
    """A broadcast, or a reduction to one."""
    bus = _bus(levels)
    return {"ring": _chain(levels) + size / bus, "tree": _log_latency(levels) + 2 * size / bus}


def _at_root(kind: CollectiveKind, levels: Sequence[Level], whole: FloatArray) -> FloatArray:
    """What the root receives or sends, by the level that it comes over."""
    worst, inside, ranks = 0.0, 1, prod(level.members for level in levels)
    for level in levels:
        rate = level.down if kind is CollectiveKind.GATHER else level.up
        worst = max(worst, (level.members - 1) * inside / ranks / rate)
        inside *= level.members
    return _log_latency(levels) + whole * worst
