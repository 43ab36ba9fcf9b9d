"""What of a collective goes over which link, and the least time that this takes: the roof of its links.

Of an algorithm that sends no more than it must (Thakur, Rabenseifner, Gropp: "Optimization of collective
communication operations in MPICH", 2005) a rank sends these shares of its message within a node of g ranks:

    all-reduce 2 (g - 1) / g, or 1 where the switches reduce (NVLink SHARP: what is sent comes back summed)
    all-gather g - 1 shards; reduce-scatter and all-to-all (g - 1) / g; broadcast and permute 1

Over the network a node of g ranks has g interfaces; of an all-reduce each of them moves 1 / g, whatever the
number of nodes (networks reduce in their switches, too). No latency is counted, so that it stays a roof.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.estimators.nccl import reduces_in_switch
from hespas.graph.columns import FloatArray
from hespas.hardware import Device, Link

__all__ = ["Layout", "link_inside", "link_of", "roof_ns", "sent_share"]


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How many ranks take part, spread over how many nodes."""

    ranks: int
    nodes: int

    @property
    def per_node(self) -> int:
        """The most ranks on one node, where they are spread evenly."""
        return -(-self.ranks // max(self.nodes, 1))


def sent_share(op: str, ranks: float) -> float:
    """Bytes that one of ``ranks`` sends for each byte of its message (Chakra's sense) on one level."""
    peers = max(ranks - 1, 0.0)
    if op == "all_gather":
        return peers
    if op == "all_reduce":
        return 2 * peers / max(ranks, 1.0)
    return peers / max(ranks, 1.0) if op in ("reduce_scatter", "all_to_all") else min(peers, 1.0)


def link_inside(device: Device, per_node: float) -> Link | None:
    """The link by which so many ranks of one node reach each other: the first that holds all of them, the
    host link beyond; None where none is stated.
    """
    held = (
        link
        for link in device.links
        if link.kind == "scale_up" and (link.devices_per_domain < 0 or per_node <= link.devices_per_domain)
    )
    return next(held, None) or device.link("pcie") or device.link("scale_up")


def link_of(device: Device, layout: Layout) -> Link | None:
    """What limits a layout: the network between nodes, or the link inside one."""
    return device.link("scale_out") if layout.nodes > 1 else link_inside(device, layout.per_node)


def roof_ns(op: str, layout: Layout, message_bytes: FloatArray, device: Device) -> FloatArray:
    """The least time of messages, shape ``(messages,)``; 0 where no link is stated or no rule is known."""
    if op not in _RULED or layout.ranks <= 1:
        return np.zeros(len(message_bytes))
    inside = link_inside(device, layout.per_node)
    outside = device.link("scale_out") if layout.nodes > 1 else None
    found = 0.0
    if inside is not None:
        found = _inner_share(op, layout, device) / inside.bandwidth_bytes_per_s
    if outside is not None:
        found = max(found, _outer_share(op, layout) / outside.bandwidth_bytes_per_s)
    return message_bytes * found * 1e9


_RULED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute"})


def _inner_share(op: str, layout: Layout, device: Device) -> float:
    """Bytes over the links of a node for each byte of the message: what the network brought is not sent."""
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


def _outer_share(op: str, layout: Layout) -> float:
    """Bytes over the interface of a rank for each byte of its message."""
    group, ranks = layout.per_node, layout.ranks
    if op == "all_gather":
        return (ranks - group) / group
    if op == "all_to_all":
        return (ranks - group) / ranks
    if op == "reduce_scatter":
        return (ranks - group) / ranks / group
    return 1.0 if op == "permute" else 1.0 / group
