"""What differs between the ranks of a class, for many ranks at once: a row of numbers per rank.

Numbers stand in the order of :class:`.from_graph.Variables`; those of groups become decimal text in a trace,
the others varints. Ranks whose numbers take the same bytes, place by place, share one encoded trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hespas.converters.chakra.comm_groups import GroupIds
from hespas.converters.chakra.from_graph import Variables
from hespas.converters.chakra.wire import Bools, Bytes, Longs
from hespas.graph import NodeKind, OpGraph, Permutation

__all__ = ["RankValues", "Ways", "used_slots"]

_NO_TEXT = -1
_DECIMALS = 10 ** np.arange(1, 19, dtype=np.int64)
_VARINTS = 1 << 7 * np.arange(1, 9, dtype=np.int64)


@dataclass(frozen=True)
class Ways:
    """Where a permutation leads. Listed pairs are sorted once; a few digits need no list."""

    permutation: Permutation

    @cached_property
    def _listed(self) -> tuple[tuple[Longs, Longs], tuple[Longs, Longs]]:
        pairs = np.array(self.permutation.pairs or (), np.int64).reshape(-1, 2)
        by_target = pairs[np.argsort(pairs[:, 1], kind="stable")]
        return (pairs[:, 0], pairs[:, 1]), (by_target[:, 1], by_target[:, 0])

    def peers(self, ranks: Longs, *, sends: bool) -> Longs:
        """Whom each rank sends to, or receives from; -1 for nobody. O(ranks x log pairs)."""
        if self.permutation.pairs is None:
            return self.permutation.targets_of(ranks) if sends else self.permutation.sources_of(ranks)
        known, peers = self._listed[0 if sends else 1]
        if not len(known):
            return np.full(len(ranks), -1, np.int64)
        place = np.minimum(np.searchsorted(known, ranks), len(known) - 1)
        return np.where(known[place] == ranks, peers[place], -1)


class _Used(NamedTuple):
    """Which group sets and permutations nodes of a graph have; one flag each."""

    groups: Bools
    ways: Bools


def used_slots(graph: OpGraph) -> _Used:
    """Those that stand in the trace of the graph: the others need no number."""
    groups = np.zeros(len(graph.group_sets), np.bool_)
    chosen = graph.collectives.group_set
    groups[chosen[chosen >= 0]] = True
    ways = np.zeros(len(graph.permutations), np.bool_)
    messages = np.isin(graph.kind[graph.p2p.node], (NodeKind.SEND, NodeKind.RECV, NodeKind.PERMUTE))
    chosen = graph.p2p.permutation[messages]
    ways[chosen[chosen >= 0]] = True
    return _Used(groups, ways)


@dataclass(frozen=True, slots=True, eq=False)
class RankValues:
    """``numbers`` of shape (ranks, slots); the first ``texts`` slots are texts, -1 an empty one."""

    numbers: Longs
    texts: int

    @classmethod
    def of(cls, graph: OpGraph, ranks: Longs, ids: GroupIds, ways: dict[Permutation, Ways]) -> RankValues:
        """The numbers of ranks that run a graph; 0, or no text, where it has no such node."""
        used = used_slots(graph)
        texts = len(graph.group_sets)
        numbers = np.zeros((len(ranks), texts + 1 + 2 * len(graph.permutations)), np.int64)
        for slot, groups in enumerate(graph.group_sets):
            numbers[:, slot] = ids.numbers(groups, ranks) if used.groups[slot] else _NO_TEXT
        if used.ways.any():
            numbers[:, texts] = ranks
        for place in np.flatnonzero(used.ways).tolist():
            way = ways.setdefault(graph.permutations[place], Ways(graph.permutations[place]))
            for side, sends in enumerate((True, False)):
                column = texts + 1 + 2 * place + side
                numbers[:, column] = np.maximum(way.peers(ranks, sends=sends), 0)
        return cls(numbers, texts)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: Longs) -> RankValues:
        """Some of the ranks."""
        return RankValues(self.numbers[rows], self.texts)

    def variables(self, row: int) -> Variables:
        """Those of one rank, as its trace is encoded with them."""
        numbers: list[int] = self.numbers[row].tolist()
        groups = tuple(b"" if number == _NO_TEXT else b"%d" % number for number in numbers[: self.texts])
        own, peers = numbers[self.texts], numbers[self.texts + 1 :]
        return Variables(groups, own, tuple(peers[::2]), tuple(peers[1::2]))

    def widths(self) -> Longs:
        """Bytes that each number takes, shape (ranks, slots)."""
        text, number = self.numbers[:, : self.texts], self.numbers[:, self.texts :]
        of_text = np.searchsorted(_DECIMALS, text, side="right") + 1
        of_text[text == _NO_TEXT] = 0
        of_number = np.searchsorted(_VARINTS, number, side="right") + 1
        return np.concatenate([of_text, of_number], axis=1)

    def alike(self) -> Iterator[tuple[tuple[int, ...], Longs]]:
        """Ranks by their widths: these, and the rows that have them, in order of first appearance."""
        widths = self.widths()
        distinct, first, which = np.unique(widths, axis=0, return_index=True, return_inverse=True)
        which = which.reshape(-1)
        for place in np.argsort(first, kind="stable").tolist():
            yield tuple(distinct[place].tolist()), np.flatnonzero(which == place)

    def spelled(self, widths: tuple[int, ...]) -> Bytes:
        """The bytes of all numbers, slot behind slot, shape (ranks, sum of widths); all have these widths."""
        columns: list[Longs] = []
        for slot, width in enumerate(widths):
            number = self.numbers[:, slot]
            if slot < self.texts:
                columns += [number // 10 ** (width - 1 - place) % 10 + 48 for place in range(width)]
            else:
                more = [0x80] * (width - 1) + [0]
                columns += [number >> 7 * place & 0x7F | more[place] for place in range(width)]
        if not columns:
            return np.empty((len(self), 0), np.uint8)
        return np.stack(columns, axis=1).astype(np.uint8)
