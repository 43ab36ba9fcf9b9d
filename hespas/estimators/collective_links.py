"""Links of collectives: the time of NCCL's tuning model over them, and the least time of their bandwidth.

Figures are from NCCL's tuning model (github.com/NVIDIA/nccl, src/graph/tuning.cc, ncclTunerConstants):
start of a protocol, latency of a step, caps of bandwidth, by generation. The least of all times is taken:

    t = base + steps x latency + bytes of the whole buffer / bandwidth of the algorithm

Rings move a message in 2 (N - 1) steps (all-reduce) or N - 1, trees up and down, NVLS reduces in the switch,
all-to-alls send directly to all. NCCL counts on 20 of 25 GB/s of each NVLink, so links count as four fifths,
and so do network interfaces in all-to-alls.

The least time follows from an algorithm that sends no more than it must (Thakur, Rabenseifner, Gropp:
"Optimization of collective communication operations in MPICH", 2005). A rank sends these shares of its
message within a node of g ranks:

    all-reduce 2 (g - 1) / g, or 1 where the switches reduce (NVLink SHARP returns the sum)
    all-gather g - 1 shards; reduce-scatter and all-to-all (g - 1) / g; broadcast and permute 1

Over the network a node of g ranks has g interfaces; of an all-reduce each of them moves 1 / g, for any number
of nodes (networks reduce in their switches, too). Latencies are not counted, so that it stays a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device, Link

__all__ = [
    "ALGORITHMS",
    "TUNED",
    "RankLayout",
    "Tuned",
    "fill_ns",
    "link_inside",
    "link_of",
    "reduces_in_switch",
    "roof_ns",
    "sent_share",
    "tuned_times",
]

TUNED = "nccl"
"""Name of the form: NCCL's tuning model times a ratio."""

ALGORITHMS = (
    "ring LL",
    "ring LL128",
    "ring Simple",
    "tree LL",
    "tree LL128",
    "tree Simple",
    "NVLS",
    "direct",
)
"""Algorithm and protocol; :attr:`Tuned.algorithm` is an index into it."""
_NVLS, _DIRECT = 6, 7

_BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}
_STEP_US = {
    "nvlink": {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)},
    "pci": {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0)},
    "net": {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)},
}
_NVLS_US, _NVLS_NET_US = 25.0, 18.0
_NET_OVERHEAD_US = 1.0
_LINK_SHARE = 0.8
_EXCHANGE_SHARE = 0.8
"""Share of a network interface that an all-to-all reaches: its messages to many ranks are small, and several
ranks send to one at a time. Assumed to be that of links, chosen with the published steps visible, so
errors on them are not blind (docs/accuracy/training.md).
"""
_IN_FLIGHT_BYTES = 16 * 4 * 2.0**20
"""Channels times the default buffer of each (NCCL_BUFFSIZE)."""
_CHANNELS = 16
_LL128_SHARE = 0.92
_TREE_SHARE = 0.92
_NOT_INTERLEAVED = 0.85
_TREE_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (*(0.9,) * 7, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
"""Share of their bandwidth that trees reach (treeCorrectionFactor): one row per protocol (LL, LL128, Simple),
one column per power of two of the whole buffer from :data:`_TREE_CORRECTION_FROM` on. Applied across nodes
only: inside a node the fitted ratios include it.
"""
_TREE_CORRECTION_FROM = 6


class _Generation(NamedTuple):
    """Bandwidth limits of NCCL's tuning model for one GPU generation: the protocols LL and LL128 and the tree
    algorithm per channel [GB/s], and the fraction of the bandwidth that NVLS reaches.
    """

    low_latency: float
    ring_ll128: float
    tree_ll128: float
    tree: float
    nvls: float


_GENERATIONS: Mapping[str, _Generation] = {
    **dict.fromkeys(("pascal", "volta", "turing"), _Generation(39.0, 20.0, 20.0, 26.5, 0.0)),
    "ampere": _Generation(87.7, 20.0, 20.0, 24.0, 0.0),
    "ada": _Generation(87.7, 20.0, 20.0, 24.0, 0.0),
    "hopper": _Generation(141.0, 36.7, 36.7, 38.7, 0.85),
    **dict.fromkeys(("blackwell", "blackwell ultra"), _Generation(282.0, 40.0, 55.6, 70.0, 0.74)),
}
"""By compute capability: NCCL treats all before 8.0 as Volta, all from 10.0 on as Blackwell."""
_LL_ACROSS_NODES = (22.5, 19.0)
"""Caps of LL across two nodes, and across more."""


@dataclass(frozen=True, slots=True, eq=False)
class Tuned:
    """Times of collectives by NCCL's tuning model; columns of shape ``(ops,)``. ``duration_ns`` is NaN if the
    model does not apply. ``algorithm`` is the algorithm that the model selects.
    """

    duration_ns: FloatArray
    algorithm: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _TuningCase:
    """Inputs of NCCL's tuning model, columns of shape ``(ops,)``.

    ``size`` is the whole buffer [bytes]. Rates are in GB/s. ``inside`` is the rate of the links of a rank
    within its node, ``outside`` the rate of all network interfaces of a node (infinite on one node), and
    ``bus`` the rate of a ring.
    """

    ranks: FloatArray
    nodes: FloatArray
    size: FloatArray
    steps: FloatArray
    hops: FloatArray
    inside: FloatArray
    outside: FloatArray
    bus: FloatArray
    reduces: bool
    wire: str
    generation: _Generation


def tuned_times(op: str, ranks: FloatArray, nodes: FloatArray, message: FloatArray, device: Device) -> Tuned:
    """Return the times of a collective by NCCL's tuning model, for columns of ranks, nodes and message sizes
    (bytes by Chakra's definition).

    Times are NaN for devices without NCCL, for operations that NCCL does not tune, and if the device file
    does not state the links.
    """
    generation = _generation(device)
    up = device.link("scale_up") or device.link("pcie")
    if generation is None or op not in _STEPS or up is None:
        return Tuned(np.full(len(ranks), np.nan), np.full(len(ranks), -1, np.int64))
    out = device.link("scale_out")
    inside = np.full(len(ranks), _LINK_SHARE * up.bandwidth_bytes_per_s / 1e9)
    outside = np.full(len(ranks), np.nan if out is None else out.bandwidth_bytes_per_s / 1e9)
    outside = np.where(nodes > 1, outside * ranks / nodes, np.inf)
    case = _TuningCase(
        ranks=ranks,
        nodes=nodes,
        size=message * ranks if op == "all_gather" else message,
        steps=_STEPS[op] * (ranks - 1),
        hops=_STEPS[op] * (nodes - 1),
        inside=inside,
        outside=outside,
        bus=np.minimum(inside, outside),
        reduces=op == "all_reduce",
        wire="nvlink" if up.kind == "scale_up" else "pci",
        generation=generation,
    )
    times = np.full((len(ALGORITHMS), len(ranks)), np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):  # one rank takes no steps
        if op == "all_to_all":
            # Sends to all peers at once: the start of the simple protocol, the bytes that leave a rank over
            # its links, and the bytes that leave its node over its own network interface.
            wire_us = _STEP_US[case.wire]["ring"][2]
            latency = np.where(nodes > 1, _STEP_US["net"]["ring"][2], wire_us)
            group = ranks / nodes
            interface = _EXCHANGE_SHARE * case.outside / group
            moved_us = np.maximum(
                _moved_us(case, case.inside * ranks / (group - 1)),
                _moved_us(case, interface * ranks / (ranks - group)),
            )
            times[_DIRECT] = _BASE_US["ring"][0] + latency + moved_us
        else:
            for protocol in (0, 1, 2) if case.wire == "nvlink" else (0, 2):
                times[protocol] = _ring_us(case, protocol)
                if case.reduces:
                    times[3 + protocol] = _tree_us(case, protocol)
            if reduces_in_switch(device):
                times[_NVLS] = _nvls_us(case)
    times = np.where(np.isnan(times), np.inf, times)
    algorithm = times.argmin(axis=0)
    best = times.min(axis=0) * 1e3
    covered = np.isfinite(best) & (ranks > 1)
    return Tuned(np.where(covered, best, np.nan), np.where(covered, algorithm, -1))


def reduces_in_switch(device: Device) -> bool:
    """Return True if NVLink switches of the device reduce data (NVLS, NVLink SHARP)."""
    generation, up = _generation(device), device.link("scale_up")
    return generation is not None and generation.nvls > 0 and up is not None and up.topology == "switch"


def _generation(device: Device) -> _Generation | None:
    return _GENERATIONS.get(device.family.lower()) if device.vendor.lower() == "nvidia" else None


_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def _low_latency(case: _TuningCase) -> FloatArray:
    across = np.where(case.nodes > 2, _LL_ACROSS_NODES[1], _LL_ACROSS_NODES[0])
    return np.where(case.nodes > 1, across, case.generation.low_latency)


def _moved_us(case: _TuningCase, rate: FloatArray) -> FloatArray:
    """Return the time [us] to move the whole buffer at a rate [GB/s]."""
    return case.size / rate / 1e3


def _ring_us(case: _TuningCase, protocol: int) -> FloatArray:
    bus = case.bus
    if protocol == 0:
        bus = np.minimum(_low_latency(case), bus * 0.5)
    elif protocol == 1:
        bus = np.minimum(bus * _LL128_SHARE, _CHANNELS * case.generation.ring_ll128)
    inner = np.where(
        case.nodes > 1,
        np.maximum(_STEP_US[case.wire]["ring"][protocol], _NET_OVERHEAD_US),
        _STEP_US[case.wire]["ring"][protocol],
    )
    latency = _BASE_US["ring"][protocol] + (case.steps - case.hops) * inner
    latency = latency + case.hops * _STEP_US["net"]["ring"][protocol]
    return latency + _moved_us(case, bus * case.ranks / case.steps)


def _tree_us(case: _TuningCase, protocol: int) -> FloatArray:
    # On two nodes each node is the root of one tree and a leaf of the other: it sends half as much.
    network = np.where(case.nodes == 2, 2 * case.outside, case.outside)
    bus = np.minimum(np.minimum(case.inside, network) * _TREE_SHARE, _CHANNELS * case.generation.tree)
    if protocol == 0:
        bus = np.minimum(bus / 3.8, _low_latency(case))
    elif protocol == 1:
        share = np.where(case.nodes > 1, 120 / 128, 7 / 9)
        bus = np.minimum(bus * share, _CHANNELS * case.generation.tree_ll128)
    levels = np.floor(np.log2(np.maximum(case.nodes, 1)))
    inner = (case.ranks / case.nodes - 1) * _STEP_US[case.wire]["tree"][protocol]
    latency = _BASE_US["tree"][protocol] + 2 * (inner + levels * _STEP_US["net"]["tree"][protocol])
    # The share of the bandwidth that trees reach across nodes, interpolated between powers of two.
    octave = np.log2(np.maximum(case.size, 1.0)) - _TREE_CORRECTION_FROM
    share = np.interp(octave, np.arange(len(_TREE_CORRECTION[protocol])), _TREE_CORRECTION[protocol])
    correction = np.where(case.nodes > 1, share, 1.0)
    return latency + _moved_us(case, bus * _NOT_INTERLEAVED / 2 * correction)


def _nvls_us(case: _TuningCase) -> FloatArray:
    bus = case.bus * case.generation.nvls * (_CHANNELS - 1) / _CHANNELS
    bus = bus * (2 * case.ranks / case.steps if case.reduces else (case.ranks - 1) / case.ranks)
    single = (case.nodes == 1) & (case.ranks > 2)
    latency = np.where(case.nodes > 1, _NVLS_US + _NVLS_NET_US, _NVLS_US)
    return np.where(single | case.reduces & (case.nodes > 1), latency + _moved_us(case, bus), np.inf)


@dataclass(frozen=True, slots=True, order=True)
class RankLayout:
    """Layout of the ranks of a collective: their number, and the number of nodes that they are spread
    over.
    """

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Return the largest number of ranks on one node, if ranks are spread evenly."""
        return -(-self.ranks // max(self.nodes, 1))


def sent_share(op: str, ranks: float) -> float:
    """Return the number of bytes that each of ``ranks`` ranks sends per byte of its message (Chakra's
    definition), inside one level of the network.
    """
    peers = max(ranks - 1, 0.0)
    if op == "all_gather":
        return peers
    if op == "all_reduce":
        return 2 * peers / max(ranks, 1.0)
    return peers / max(ranks, 1.0) if op in ("reduce_scatter", "all_to_all") else min(peers, 1.0)


def link_inside(device: Device, per_node: float) -> Link | None:
    """Return the link that connects ``per_node`` ranks of one node. It is the first scale-up link with at
    least that many devices in a domain, else the host link; None without links.
    """
    covering = (
        link
        for link in device.links
        if link.kind == "scale_up" and (link.devices_per_domain < 0 or per_node <= link.devices_per_domain)
    )
    return next(covering, None) or device.link("pcie") or device.link("scale_up")


def link_of(device: Device, layout: RankLayout) -> Link | None:
    """Return the link that limits a layout: the network between nodes, or the link inside one."""
    return device.link("scale_out") if layout.nodes > 1 else link_inside(device, layout.per_node)


def roof_ns(op: str, layout: RankLayout, message_bytes: FloatArray, device: Device) -> FloatArray:
    """Return the shortest time of messages that the bandwidth of the links allows, shape ``(messages,)``; 0
    without a link or a rule for ``op``.
    """
    if op not in _OPS_WITH_RULE or layout.ranks <= 1:
        return np.zeros(len(message_bytes))
    inside = link_inside(device, layout.per_node)
    outside = device.link("scale_out") if layout.nodes > 1 else None
    s_per_byte = 0.0
    if inside is not None:
        s_per_byte = _inner_share(op, layout, device) / inside.bandwidth_bytes_per_s
    if outside is not None:
        s_per_byte = max(s_per_byte, _outer_share(op, layout) / outside.bandwidth_bytes_per_s)
    return message_bytes * s_per_byte * 1e9


_OPS_WITH_RULE = frozenset(
    {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"}
)


def _inner_share(op: str, layout: RankLayout, device: Device) -> float:
    """Return the bytes that a rank sends over the links within its node, per byte of its message."""
    group = layout.per_node
    if group <= 1:
        return 0.0
    if op == "all_gather":
        return (group - 1) / group * layout.ranks if layout.nodes > 1 else group - 1
    if op == "all_to_all":
        return (group - 1) / layout.ranks
    share = sent_share(op, group)
    if op == "all_reduce" and (layout.nodes > 1 or reduces_in_switch(device)):
        return min(share, 1.0)
    if layout.nodes > 1 and op in ("permute", "broadcast"):
        return 0.0 if op == "permute" else (group - 1) / group
    return share


def fill_ns(
    op: str, layout: RankLayout, message_bytes: FloatArray, bandwidth_bytes_per_s: float
) -> FloatArray:
    """Return the time until the network has delivered the first bytes of each message, as many as a
    collective library sends ahead. The links inside a node cannot start earlier.

    ``bandwidth_bytes_per_s`` is the rate of the network interface of one rank.
    """
    if op not in _OPS_WITH_RULE or layout.nodes <= 1:
        return np.zeros(len(message_bytes))
    whole = layout.ranks if op == "all_gather" else 1
    first = np.minimum(message_bytes, _IN_FLIGHT_BYTES / whole)
    return first * _outer_share(op, layout) / bandwidth_bytes_per_s * 1e9


def _outer_share(op: str, layout: RankLayout) -> float:
    """Return the bytes that the network interface of a rank sends, per byte of its message."""
    group, ranks = layout.per_node, layout.ranks
    if op == "all_gather":
        return (ranks - group) / group
    if op == "all_to_all":
        return (ranks - group) / ranks
    if op == "reduce_scatter":
        return (ranks - group) / ranks / group
    return 1.0 if op == "permute" else 1.0 / group
