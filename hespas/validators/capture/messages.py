"""Sequences of collectives and messages of a rank, and the differences between capture and trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind, NodeKind, OpGraph, RegionKind
from hespas.validators.capture.result import CollectiveDifference

__all__ = [
    "RankMessage",
    "SequenceDifference",
    "node_messages",
    "program_order_messages",
    "sequence_difference",
]

_MAX_MESSAGES = 1_000_000
_MAX_LISTED_RANKS = 8
_KindAndRanks = tuple[str, tuple[int, ...] | None]


class RankMessage(NamedTuple):
    """Collective or message of a rank. ``ranks`` are the members of its group, or its source and target; None
    if unknown. ``payload_bytes`` is NaN if unknown.
    """

    kind: str
    ranks: tuple[int, ...] | None
    payload_bytes: float

    def text(self) -> str:
        """Return a description such as ``all_reduce over {0, 1}, 8 bytes``."""
        group = "an unknown group"
        if self.ranks is not None:
            more = f", ... ({len(self.ranks):,})" if len(self.ranks) > _MAX_LISTED_RANKS else ""
            group = "{" + ", ".join(map(str, self.ranks[:_MAX_LISTED_RANKS])) + more + "}"
        size = "unknown bytes" if np.isnan(self.payload_bytes) else f"{self.payload_bytes:,.0f} bytes"
        return f"{self.kind} over {group}, {size}"

    def agrees_with(self, other: RankMessage) -> bool:
        """Return True if all facts that both messages state are equal."""
        groups = self.ranks is None or other.ranks is None or self.ranks == other.ranks
        sizes = np.isnan(self.payload_bytes) or np.isnan(other.payload_bytes)
        return self.kind == other.kind and groups and bool(sizes or self.payload_bytes == other.payload_bytes)


def node_messages(graph: OpGraph, rank: int, num_ranks: int) -> dict[int, RankMessage]:
    """Return the message of each communicating node for one rank.

    Nodes whose groups or permutation do not contain the rank are omitted, because they do nothing on it.
    """
    messages: dict[int, RankMessage] = {}
    table = graph.collectives
    for row, node in enumerate(table.node.tolist()):
        ranks: tuple[int, ...] | None = tuple(range(num_ranks))
        number = int(table.group_set[row])
        if number >= 0:
            groups = graph.group_sets[number]
            group = groups.group_of(rank)
            ranks = tuple(groups.members(group).tolist()) if group >= 0 else None
            if ranks is None or len(ranks) < 2:
                continue
        kind = CollectiveKind(int(table.kind[row])).name.lower()
        messages[node] = RankMessage(kind, ranks, float(table.comm_bytes[row]))
    p2p = graph.p2p
    for row, node in enumerate(p2p.node.tolist()):
        kind = NodeKind(int(graph.kind[node])).name.lower()
        number = int(p2p.permutation[row])
        peers: tuple[int, ...] | None = None
        if number >= 0:
            permutation = graph.permutations[number]
            peers = permutation.source_of(rank), permutation.target_of(rank)
            if max(peers) < 0:
                continue
        messages[node] = RankMessage(kind, peers, float(p2p.comm_bytes[row]))
    return messages


def program_order_messages(graph: OpGraph, rank: int, num_ranks: int) -> list[RankMessage] | None:
    """Return the messages of one step of a rank in program order, with loops unrolled.

    Returns None if a loop runs an unknown or too large number of times. O(messages).
    """
    messages = node_messages(graph, rank, num_ranks)
    regions = graph.regions
    trips: list[float] = regions.trips.tolist()
    kinds: list[int] = regions.kind.tolist()
    parents: list[int] = regions.parent.tolist()
    nodes = [node for node in sorted(messages) if graph.executions[node] != 0]
    times = graph.executions[nodes]
    if not np.isfinite(times).all() or times.sum() > _MAX_MESSAGES:
        return None
    loops: dict[int, list[int]] = {}
    first: dict[int, int] = {}  # loop -> its first node, where the loop is in program order
    for node in nodes:
        loops[node] = []
        region = int(graph.region[node])
        while region >= 0:
            if kinds[region] == RegionKind.LOOP_BODY:
                loops[node].insert(0, region)
                first.setdefault(region, node)
            region = parents[region]
    positions: list[tuple[tuple[int, ...], int]] = []
    for node in nodes:
        for iterations in product(*(range(int(trips[loop])) for loop in loops[node])):
            position = [
                part
                for loop, iteration in zip(loops[node], iterations, strict=True)
                for part in (first[loop], iteration)
            ]
            positions.append(((*position, node), node))
    return [messages[node] for _, node in sorted(positions)]


class SequenceDifference(NamedTuple):
    """Differences between the captured and the measured sequence of messages of a rank.

    ``differences`` lists the positions that differ. ``reordered`` is True if the same messages ran in another
    order, which is not counted as a difference. ``combined`` is the number of captured messages that the
    compiler combined: fewer messages ran, of the same kind over the same group, with the same bytes in total.
    """

    differences: list[CollectiveDifference]
    reordered: bool
    combined: int


def sequence_difference(
    rank: int, captured: Sequence[RankMessage], measured: Sequence[RankMessage]
) -> SequenceDifference:
    """Compare the captured and the measured messages of one step of a rank."""
    pairs = zip(captured, measured, strict=False)
    if len(captured) == len(measured) and all(one.agrees_with(other) for one, other in pairs):
        return SequenceDifference([], reordered=False, combined=0)
    unmatched = Counter(measured)
    missing: list[tuple[int, RankMessage]] = []
    for position, message in enumerate(captured):
        candidates = (other for other in unmatched if unmatched[other] and message.agrees_with(other))
        match = message if unmatched[message] else next(candidates, None)
        if match is None:
            missing.append((position, message))
        else:
            unmatched[match] -= 1
    extra: list[tuple[int, RankMessage]] = []
    for position, message in enumerate(measured):
        if unmatched[message]:
            unmatched[message] -= 1
            extra.append((position, message))
    # Collectives were combined if fewer messages of a kind and group ran, with the same bytes in total.
    captured_bytes = defaultdict[_KindAndRanks, list[float]](list)
    measured_bytes = defaultdict[_KindAndRanks, list[float]](list)
    for rows, sizes in ((missing, captured_bytes), (extra, measured_bytes)):
        for _, message in rows:
            sizes[message.kind, message.ranks].append(message.payload_bytes)
    combined = {
        key
        for key, sizes in captured_bytes.items()
        if len(measured_bytes[key]) < len(sizes) and sum(measured_bytes[key]) == sum(sizes)
    }
    missing_rest = [row for row in missing if row[1][:2] not in combined]
    extra_rest = [row for row in extra if row[1][:2] not in combined]
    differences: list[CollectiveDifference] = []
    for number in range(max(len(missing_rest), len(extra_rest))):
        one = missing_rest[number] if number < len(missing_rest) else None
        other = extra_rest[number] if number < len(extra_rest) else None
        differences.append(
            CollectiveDifference(
                rank=rank,
                place=(one or other or (0,))[0],
                captured="" if one is None else one[1].text(),
                measured="" if other is None else other[1].text(),
            )
        )
    return SequenceDifference(
        differences,
        reordered=not differences and not combined,
        combined=len(missing) - len(missing_rest),
    )
