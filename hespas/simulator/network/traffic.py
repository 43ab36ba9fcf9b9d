"""What a collective or a message sends over each dimension of a system, by algorithm.

Shares of the whole buffer S that a member of a group sends over level k, in the words of
:mod:`hespas.simulator.network.algorithms` (N members, u_k of them within one member of level k):

    ring          (N - 1) / N of S, twice for an all-reduce (Thakur, Rabenseifner, Gropp, 2005). Of N steps
                  around, N / u_k - N / u_(k+1) pass level k and none outside it, of the outermost all N / u_k
    hierarchical  (m_k - 1) / m_k / u_k, twice for an all-reduce
    tree, chain   N - 1 edges, N / u_k - N / u_(k+1) of them on level k, which all of S passes (of an
                  all-reduce twice, up and down: Sanders, Speck, Traff, 2009)
    in network    1 / u_k where switches add: what is sent comes back summed
    direct        an all-to-all (m_k - 1) / m_k; from or to a root a part of 1 / N per member outside. On a
                  ring each part takes as many links as it is far: floor(m^2 / 4) / m, on a line
                  (m^2 - 1) / (3 m)

The axes of a torus share by their rates what rings, trees and hierarchies send. Where groups lie between each
other on a ring, a device also passes on what its neighbours' groups send; what devices outside all groups
pass on is not counted. Members of a group count alike, also where a root sends more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul

import numpy as np

from hespas.graph import CollectiveKind
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import System
from hespas.simulator.network.algorithms import (
    AT_ROOT,
    EXCHANGES,
    ONE_WAY,
    ROOTED,
    SHARDS,
    Level,
    collective_times,
    levels_of,
)
from hespas.simulator.network.placement import Footprint

__all__ = ["chosen_traffic", "message_traffic", "shares_sent"]

_FITS = 1 + 1e-9
"""Room for rounding where bytes take all of the time that there is."""


def shares_sent(kind: CollectiveKind, levels: Sequence[Level]) -> dict[str, FloatArray]:
    """Of the whole buffer, what a member sends over each level, shape ``(levels,)``, by algorithm; those of
    :func:`hespas.simulator.network.algorithms.collective_times`.
    """
    if kind is CollectiveKind.ALL_REDUCE:
        found = {name: 2 * shares for name, shares in _one_way(levels).items()}
        found["tree"] = 2 * _edges(levels)
        if any(level.adds for level in levels):
            own = 2 * _parts(levels)
            own[[level.adds > 0 for level in levels]] = 1.0
            found["in network"] = own / _inside(levels)[:-1]
        return found
    if kind in ONE_WAY:
        return _one_way(levels)
    if kind in EXCHANGES:
        return {"direct": np.array([_exchanged(level) for level in levels])}
    if kind in ROOTED:
        return {"ring": _edges(levels), "tree": _edges(levels)}
    if kind in AT_ROOT:
        inside = _inside(levels)
        return {"direct": (inside[1:] - inside[:-1]) / inside[-1] ** 2}
    return {"tree": np.zeros(len(levels))} if kind is CollectiveKind.BARRIER else {}


def _inside(levels: Sequence[Level]) -> FloatArray:
    """Members within one member of each level, and within all of them."""
    return np.array([*accumulate((level.members for level in levels), mul, initial=1)], np.float64)


def _parts(levels: Sequence[Level]) -> FloatArray:
    members = np.array([level.members for level in levels], np.float64)
    return (members - 1) / members


def _is_torus(levels: Sequence[Level]) -> bool:
    return all(level.is_ring for level in levels)


def _by_rate(levels: Sequence[Level]) -> FloatArray:
    """What the axes of a torus send of what goes through all of its members once."""
    rates, ranks = np.array([level.rate for level in levels]), _inside(levels)[-1]
    shares: FloatArray = (ranks - 1) / ranks * rates / rates.sum()
    return shares


def _one_way(levels: Sequence[Level]) -> dict[str, FloatArray]:
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
    system: System, kind: CollectiveKind, place: Footprint, message_bytes: FloatArray, time_ns: FloatArray
) -> tuple[list[str], FloatArray, FloatArray]:
    """The algorithm of each message (Chakra's sense) of groups of one footprint, what a device then sends
    over each dimension [bytes], shape ``(dimensions, messages)``, and what it could send at most [bytes/ns],
    shape ``(dimensions,)``: an interface to itself is more than its part of one.

    The algorithm is the fastest of those whose bytes fit into the time that a message takes; "" and NaN for
    kinds without a rule.
    """
    axes = [axis for axis, members in enumerate(place.members) if members > 1]
    levels = levels_of(system, place)
    most: FloatArray = np.array([each.bandwidth_bytes_per_s / 1e9 for each in system.dimensions])
    sent = np.zeros((len(system.dimensions), len(message_bytes)))
    if not axes:
        return [""] * len(message_bytes), sent, most
    most[axes] = np.maximum(most[axes], [level.up for level in levels])
    shares = shares_sent(kind, levels)
    if not shares:
        sent[axes] = np.nan
        return [""] * len(message_bytes), sent, most
    whole = message_bytes * prod(level.members for level in levels) if kind in SHARDS else message_bytes
    shared = [place.crowd[axis] if system.dimensions[axis].topology == "ring" else 1 for axis in axes]
    names = list(shares)
    each = np.stack([shares[name] * shared for name in names])  # (algorithms, levels)
    least_ns = (each / most[axes]).max(axis=1)[:, None] * whole
    times = collective_times(kind, levels, message_bytes)
    taken = np.stack([times[name] for name in names])
    taken[(least_ns > time_ns * _FITS) & (least_ns > least_ns.min(axis=0))] = np.inf
    choice: IntArray = np.argmin(taken, axis=0)
    sent[axes] = each[choice].T * whole
    return [names[row] for row in choice.tolist()], sent, most


def message_traffic(system: System, away: Sequence[int], message_bytes: FloatArray) -> FloatArray:
    """What a device sends over each dimension [bytes], shape ``(dimensions, messages)``, of messages to one
    so far away; of switches only the outermost is passed, as in
    :func:`hespas.simulator.network.algorithms.message_ns`.
    """
    sent = np.zeros((len(away), len(message_bytes)))
    passed = False
    for axis in reversed(range(len(away))):
        if away[axis] and not (passed and system.dimensions[axis].topology != "ring"):
            sent[axis] = message_bytes
            passed = True
    return sent
