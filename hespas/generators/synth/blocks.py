"""Change of the number of repeated blocks of a program, with the dependencies between the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hespas.generators.obfuscate.layers import Run
from hespas.graph import OpGraph
from hespas.graph.columns import FloatArray, IntArray, RaggedArray
from hespas.graph.passes import take_nodes

__all__ = ["with_repeats"]


def with_repeats(graph: OpGraph, runs: Sequence[Run], repeats: Sequence[int]) -> tuple[OpGraph, IntArray]:
    """Return a graph in which run ``i`` has ``repeats[i]`` blocks, and the source node of each of its nodes.

    Blocks are added or removed in the middle of a run. Dependencies on the previous blocks of a run keep
    their distance. Dependencies between two runs that change alike keep their direction: if block b of the
    second run depends on block b of the first run, so do the added blocks, and if the order of blocks is
    reversed (a backward pass), it stays reversed. A node outside of runs that depends on a block that is
    copied depends on all copies. ``graph`` must be in topological order, and so is the result. O(nodes).
    """
    return _Repeats(graph, runs, repeats).changed()


class _Repeats:
    """Old and new positions of the nodes of a graph whose runs change."""

    def __init__(self, graph: OpGraph, runs: Sequence[Run], repeats: Sequence[int]) -> None:
        self._graph = graph
        count = len(graph)
        # one more entry than runs: nodes outside of runs have run -1
        self._start, self._period, self._repeats, self._added, self._head = (
            np.zeros(len(runs) + 1, np.int64) for _ in range(5)
        )
        self._run, self._block, self._place = (np.full(count, -1, np.int64) for _ in range(3))
        rows, blocks = list[IntArray](), list[IntArray]()
        size = end = 0
        for number, (run, new) in enumerate(zip(runs, repeats, strict=True)):
            between = np.arange(end, run.start)
            end = run.start + run.period * run.repeats
            old = np.arange(run.period * run.repeats)
            self._run[run.start : end] = number
            self._block[run.start : end] = old // run.period
            self._place[run.start : end] = old % run.period
            # number of blocks before the change
            head = run.repeats // 2 + 1 if new >= run.repeats else max(new // 2, 1)
            sources = np.arange(new)
            sources[head:] = np.maximum(sources[head:] - (new - run.repeats), head - 1)
            self._start[number] = size + len(between)
            self._period[number], self._repeats[number] = run.period, new
            self._added[number], self._head[number] = new - run.repeats, head
            own = run.start + sources[:, None] * run.period + np.arange(run.period)
            rows += [between, own.reshape(-1)]
            blocks += [np.full(len(between), -1), np.repeat(np.arange(new), run.period)]
            size += len(between) + new * run.period
        rows.append(np.arange(end, count))
        blocks.append(np.full(count - end, -1))
        self._rows: IntArray = np.concatenate(rows).astype(np.int64)
        self._new_block: IntArray = np.concatenate(blocks).astype(np.int64)
        self._number = np.zeros(count, np.int64)
        outside = np.flatnonzero(self._new_block < 0)
        self._number[self._rows[outside]] = outside

    def changed(self) -> tuple[OpGraph, IntArray]:
        graph = self._graph
        data, control = self._changed(graph.data_deps), self._changed(graph.control_deps)
        return take_nodes(graph, self._rows, data, control), self._rows

    def _changed(self, deps: RaggedArray) -> RaggedArray:
        if not len(deps.values):
            return RaggedArray.empty(len(self._rows))
        edges = RaggedArray(deps.offsets, np.arange(len(deps.values), dtype=np.int32)).take(self._rows)
        consumer = edges.row_ids
        slope = self._slopes(deps)[edges.values]
        target = deps.values[edges.values].astype(np.int64)
        source = self._rows[consumer]
        run, other = self._run[source], self._run[target]
        moved = self._new_block[consumer] - self._block[source]
        block, added, head = self._block[target], self._added[other], self._head[other]
        new = np.where(block < head, block, np.maximum(block + added, head - 1))
        same = (run == other) & (run >= 0)
        across = (run >= 0) & (other >= 0) & ~same & (self._added[run] == added)
        new = np.where(same | (across & (slope > 0)), block + moved, new)
        new = np.where(across & (slope < 0), block + added - moved, new)
        new = np.clip(new, 0, np.maximum(self._repeats[other] - 1, 0))
        inside = self._start[other] + new * self._period[other] + self._place[target]
        producer = np.where(other >= 0, inside, self._number[target])
        # consumers outside of runs also depend on the copies of a block
        outside, copied = deps.row_ids, deps.values.astype(np.int64)
        run = self._run[copied]
        is_copied = (self._run[outside] < 0) & (run >= 0)
        is_copied &= (self._block[copied] == self._head[run] - 1) & (self._added[run] > 0)
        outside, copied = outside[is_copied], copied[is_copied]
        copies = self._added[run[is_copied]]
        ends = np.cumsum(copies)
        number = np.arange(int(copies.sum())) - np.repeat(ends - copies, copies) + 1
        copied = np.repeat(copied, copies)
        run = self._run[copied]
        added_nodes = self._start[run] + (self._block[copied] + number) * self._period[run]
        consumer = np.concatenate([consumer, self._number[np.repeat(outside, copies)]])
        producer = np.concatenate([producer, added_nodes + self._place[copied]])
        is_earlier = producer < consumer
        pairs = consumer[is_earlier] * len(self._rows) + producer[is_earlier]
        pairs = pairs[np.sort(np.unique(pairs, return_index=True)[1])]
        return RaggedArray.from_pairs(pairs // len(self._rows), pairs % len(self._rows), len(self._rows))

    def _slopes(self, deps: RaggedArray) -> FloatArray:
        """Return for each dependency between two runs how the block of the producer changes with the block of
        the consumer, among the dependencies between the same places of the same runs: a number above 0, below
        0 or 0.
        """
        consumer, producer = deps.row_ids, deps.values.astype(np.int64)
        run, other = self._run[consumer], self._run[producer]
        slopes = np.zeros(len(consumer))
        rows = np.flatnonzero((run >= 0) & (other >= 0) & (run != other))
        if not len(rows):
            return slopes
        consumer, producer = consumer[rows], producer[rows]
        length = int(self._period.max()) + 1
        pair = run[rows] * len(self._start) + other[rows]
        key = (pair * length + self._place[consumer]) * length + self._place[producer]
        group = np.unique(key, return_inverse=True)[1].reshape(-1)
        own, their = (self._block[nodes].astype(np.float64) for nodes in (consumer, producer))
        count = np.bincount(group)
        of_group = (
            np.bincount(group, own * their) - np.bincount(group, own) * np.bincount(group, their) / count
        )
        slopes[rows] = np.where(np.abs(of_group) > 1e-6, of_group, 0.0)[group]
        return slopes
