"""Who needs whose data: from the storages that operations read and write, in order of execution."""

from __future__ import annotations

from array import array
from typing import NamedTuple, Self

import numpy as np

from hespas.graph import Csr
from hespas.graph.columns import BoolArray, IntArray

__all__ = ["Edges", "Flow", "chain", "flow_of"]


class Edges(NamedTuple):
    """Dependencies as pairs: ``consumer`` waits for ``producer``."""

    consumer: IntArray
    producer: IntArray

    @classmethod
    def empty(cls) -> Self:
        """No dependency."""
        return cls(np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def joined(cls, *several: Edges) -> Self:
        """All of them."""
        return cls(
            np.concatenate([each.consumer for each in several]),
            np.concatenate([each.producer for each in several]),
        )

    def where(self, mask: BoolArray) -> Edges:
        """Those of the mask."""
        return Edges(self.consumer[mask], self.producer[mask])

    def distinct(self, nodes: int) -> Edges:
        """Each pair once, by consumer and producer; nobody waits for itself."""
        keys = np.unique((self.consumer * max(nodes, 1) + self.producer)[self.consumer != self.producer])
        return Edges(keys // max(nodes, 1), keys % max(nodes, 1))

    def without(self, others: Edges, nodes: int) -> Edges:
        """Those that are not among ``others``."""
        keys = self.consumer * max(nodes, 1) + self.producer
        return self.where(~np.isin(keys, others.consumer * max(nodes, 1) + others.producer))

    def latest(self, queue: IntArray) -> Edges:
        """Of several producers in one queue, the last: nodes of a queue follow each other; -1 is none."""
        place = queue[self.producer]
        alone = place < 0
        rows = np.flatnonzero(~alone)
        rows = rows[np.lexsort((self.producer[rows], place[rows], self.consumer[rows]))]
        consumer, where = self.consumer[rows], place[rows]
        last = np.ones(len(rows), np.bool_)
        last[:-1] = (consumer[1:] != consumer[:-1]) | (where[1:] != where[:-1])
        kept = np.concatenate([np.flatnonzero(alone), rows[last]])
        return Edges(self.consumer[kept], self.producer[kept])

    def csr(self, nodes: int) -> Csr:
        """As ragged rows, by consumer."""
        return Csr.from_pairs(self.consumer, self.producer, nodes)


def chain(queue: IntArray) -> Edges:
    """Each node waits for the one before it in its queue; queue -1 is none."""
    rows = np.flatnonzero(queue >= 0)
    rows = rows[np.argsort(queue[rows], kind="stable")]
    same = queue[rows[1:]] == queue[rows[:-1]]
    return Edges(rows[1:][same], rows[:-1][same])


class Flow(NamedTuple):
    """``data``: a reader waits for the last writer. ``order``: a writer waits for earlier readers and writers
    of the same storage.
    """

    data: Edges
    order: Edges


def flow_of(reads: Csr, writes: Csr) -> Flow:
    """Dependencies between operations that stand in order of execution. O(reads + writes)."""
    data, order = (array("q"), array("q")), (array("q"), array("q"))
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for node, (read, written) in enumerate(zip(reads.to_lists(), writes.to_lists(), strict=True)):
        for storage in read:
            made = writer.get(storage, -1)
            if made >= 0:
                data[0].append(node)
                data[1].append(made)
        for storage in written:
            before = readers.pop(storage, [])
            made = writer.get(storage, -1)
            if made >= 0:
                before.append(made)
            order[0].extend([node] * len(before))
            order[1].extend(before)
            writer[storage] = node
        for storage in read:
            readers.setdefault(storage, []).append(node)
    return Flow(_edges(data), _edges(order))


def _edges(pairs: tuple[array[int], array[int]]) -> Edges:
    return Edges(np.array(pairs[0], np.int64), np.array(pairs[1], np.int64))
