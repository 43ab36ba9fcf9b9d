"""The collectives of a rank in their order: kind, group and bytes, of a captured graph and of a trace."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from hespas.graph import CollectiveKind, NodeKind, OpGraph, RegionKind
from hespas.validators.capture.result import CollectiveDifference

__all__ = ["Compared", "Message", "differences_of", "messages_of", "node_messages"]

_MOST_WRITTEN_OUT = 1_000_000
_ASKED_FOR = (NodeKind.COLLECTIVE, NodeKind.PERMUTE, NodeKind.SEND, NodeKind.RECV)


class Message(NamedTuple):
    """One collective or message of a rank: ``ranks`` are the members of its group, or source and target;
    None where nobody says. ``payload_bytes`` is NaN where unknown.
    """

    kind: str
    ranks: tuple[int, ...] | None
    payload_bytes: float

    def text(self) -> str:
        """For people."""
        group = "an unknown group" if self.ranks is None else _shown(self.ranks)
        size = "unknown bytes" if np.isnan(self.payload_bytes) else f"{self.payload_bytes:,.0f} bytes"
        return f"{self.kind} over {group}, {size}"

    def is_like(self, other: Message) -> bool:
        """Whether nothing that both say is unlike."""
        groups = self.ranks is None or other.ranks is None or self.ranks == other.ranks
        sizes = np.isnan(self.payload_bytes) or np.isnan(other.payload_bytes)
        return self.kind == other.kind and groups and bool(sizes or self.payload_bytes == other.payload_bytes)


_FIRST = 8


def _shown(ranks: Sequence[int]) -> str:
    more = f", ... ({len(ranks):,})" if len(ranks) > _FIRST else ""
    return "{" + ", ".join(map(str, ranks[:_FIRST])) + more + "}"


def node_messages(graph: OpGraph, rank: int, num_ranks: int) -> dict[int, Message]:
    """What each communicating node is for one rank. Nodes whose groups leave the rank out are absent: it does
    nothing then. A permutation that neither sends to a rank nor receives from it is nothing as well.
    """
    found: dict[int, Message] = {}
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
        found[node] = Message(kind, ranks, float(table.comm_bytes[row]))
    p2p = graph.p2p
    for row, node in enumerate(p2p.node.tolist()):
        kind = NodeKind(int(graph.kind[node])).name.lower()
        number = int(p2p.permutation[row])
        peers: tuple[int, ...] | None = None
        if number >= 0:
            pattern = graph.permutations[number]
            peers = pattern.source_of(rank), pattern.target_of(rank)
            if max(peers) < 0:
                continue
        found[node] = Message(kind, peers, float(p2p.comm_bytes[row]))
    return found


def messages_of(graph: OpGraph, rank: int, num_ranks: int) -> list[tuple[int, Message]] | None:
    """The messages of one step of a rank in program order with their nodes, loops written out trip by trip;
    None where a loop runs an unknown or too large a number of times. O(messages).
    """
    told = node_messages(graph, rank, num_ranks)
    regions = graph.regions
    trips: list[float] = regions.trips.tolist()
    kinds: list[int] = regions.kind.tolist()
    parents: list[int] = regions.parent.tolist()

    def loops(node: int) -> tuple[int, ...]:
        found: list[int] = []
        region = int(graph.region[node])
        while region >= 0:
            if kinds[region] == RegionKind.LOOP_BODY:
                found.append(region)
            region = parents[region]
        return tuple(reversed(found))

    rows = [(node, loops(node)) for node in sorted(told) if graph.multiplicity[node] != 0]
    times = [float(graph.multiplicity[node]) for node, _ in rows]
    if not np.isfinite(times).all() or sum(times) > _MOST_WRITTEN_OUT:
        return None
    return [(node, told[node]) for node in _written_out(rows, trips)]


def _written_out(rows: Sequence[tuple[int, tuple[int, ...]]], trips: Sequence[float]) -> list[int]:
    """Nodes in the order in which they run: a loop stands where its first node does, trip after trip."""
    first: dict[int, int] = {}
    for node, around in rows:
        for loop in around:
            first.setdefault(loop, node)
    found: list[tuple[tuple[int, ...], int]] = []
    for node, around in rows:
        for numbers in product(*(range(int(trips[loop])) for loop in around)):
            place = [part for loop, trip in zip(around, numbers, strict=True) for part in (first[loop], trip)]
            found.append(((*place, node), node))
    return [node for _, node in sorted(found)]


class Compared(NamedTuple):
    """What is ``unlike`` in the sequences of a rank; whether the same messages come in another order, which
    is no difference by itself; and how many captured ones ran ``combined``: fewer of their kind over their
    group, with the same bytes in all, which compilers make of them.
    """

    unlike: list[CollectiveDifference]
    reordered: bool
    combined: int


def differences_of(rank: int, captured: Sequence[Message], measured: Sequence[Message]) -> Compared:
    """Compare the messages of one step of a rank."""
    pairs = zip(captured, measured, strict=False)
    if len(captured) == len(measured) and all(one.is_like(two) for one, two in pairs):
        return Compared([], reordered=False, combined=0)
    left = Counter(measured)
    missing: list[tuple[int, Message]] = []
    for place, each in enumerate(captured):
        others = (other for other in left if left[other] and each.is_like(other))
        like = each if left[each] else next(others, None)
        if like is None:
            missing.append((place, each))
        else:
            left[like] -= 1
    extra = [(place, each) for place, each in enumerate(measured) if _taken(left, each)]
    merged = _merged(missing, extra)
    kept = [row for row in missing if row[1][:2] not in merged]
    extra = [row for row in extra if row[1][:2] not in merged]
    found: list[CollectiveDifference] = []
    for number in range(max(len(kept), len(extra))):
        one = kept[number] if number < len(kept) else None
        other = extra[number] if number < len(extra) else None
        found.append(
            CollectiveDifference(
                rank=rank,
                place=(one or other or (0,))[0],
                captured="" if one is None else one[1].text(),
                measured="" if other is None else other[1].text(),
            )
        )
    return Compared(found, reordered=not found and not merged, combined=len(missing) - len(kept))


def _merged(
    missing: Sequence[tuple[int, Message]], extra: Sequence[tuple[int, Message]]
) -> set[tuple[str, tuple[int, ...] | None]]:
    """The kinds and groups of which fewer messages ran, with the same bytes in all."""
    wanted = defaultdict[tuple[str, tuple[int, ...] | None], list[float]](list)
    did = defaultdict[tuple[str, tuple[int, ...] | None], list[float]](list)
    for rows, sizes in ((missing, wanted), (extra, did)):
        for _, each in rows:
            sizes[each.kind, each.ranks].append(each.payload_bytes)
    return {
        key for key, sizes in wanted.items() if len(did[key]) < len(sizes) and sum(did[key]) == sum(sizes)
    }


def _taken(left: Counter[Message], each: Message) -> bool:
    """Take one of a kind, where any is left."""
    if not left[each]:
        return False
    left[each] -= 1
    return True
