"""A stage from its parts: passes of one micro-batch, written once and repeated in the order of the schedule.

A part is a run of nodes of a template graph. What a pass needs from another pass of the same micro-batch it
names by port, so that either may come in variants (the first forward pass gathers weights, the last backward
pass reduces gradients). Repeating is done in columns: O(nodes + dependencies) of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from hespas.graph import OpGraph, RaggedArray, RegionKind
from hespas.graph.builder import region_multiplicity
from hespas.graph.columns import IntArray
from hespas.graph.errors import InvariantError
from hespas.graph.opgraph import RegionTable
from hespas.graph.passes import take_nodes

__all__ = ["Instance", "Need", "Part", "assembled"]


class Need(NamedTuple):
    """A node needs what stands at a port of a pass of its own micro-batch; ``is_order``: only its end."""

    node: int
    kind: str
    chunk: int
    port: str
    is_order: bool = False


@dataclass(slots=True)
class Part:
    """Nodes ``start:end`` of the template: a ``kind`` of pass of a chunk. ``head`` and ``tail`` are the first
    and last node that compute, ``posts`` are receives, which are posted while the pass before runs.
    """

    kind: str
    chunk: int
    start: int
    end: int = -1
    head: int = -1
    tail: int = -1
    posts: list[int] = field(default_factory=list[int])
    begins: list[int] = field(default_factory=list[int])
    """Nodes that do not run ahead of the pass: they follow the one before."""
    ports: dict[str, int] = field(default_factory=dict[str, int])
    needs: list[Need] = field(default_factory=list[Need])


class Instance(NamedTuple):
    """A part run for a micro-batch: the one before the step is -1. ``kind`` is what others call it by,
    whichever variant ``part`` is; ``trips`` of it and its neighbours with the same ``loop`` run in sequence.
    """

    part: int
    kind: str
    micro_batch: int
    loop: bool = False


class _Edges:
    """Dependencies between instances, in pairs."""

    def __init__(self) -> None:
        self.consumer: list[int] = []
        self.producer: list[int] = []

    def add(self, consumer: int, producer: int) -> None:
        self.consumer.append(consumer)
        self.producer.append(producer)


def assembled(
    template: OpGraph,
    parts: Sequence[Part],
    sequence: Sequence[Instance],
    *,
    trips: int = 1,
    tag_period: int = 1,
) -> OpGraph:
    """The step: ``sequence`` in program order, each pass after the one before. Instances marked ``loop`` are
    the body of a loop of ``trips``; what needs a micro-batch inside the loop needs its last trip. Tags of
    messages grow by ``tag_period`` from one micro-batch to the next.
    """
    chosen = [parts[each.part] for each in sequence]
    sizes = np.array([part.end - part.start for part in chosen], np.int64)
    base = np.concatenate([[0], np.cumsum(sizes)])
    shift = base[:-1] - np.array([part.start for part in chosen], np.int64)
    rows = np.arange(int(base[-1]), dtype=np.int64) - np.repeat(shift, sizes)
    data, order = _between(parts, sequence, shift.tolist())
    graph = take_nodes(
        template,
        rows,
        *_apart(
            _repeated(template.data_deps, rows, shift, sizes, data),
            _repeated(template.control_deps, rows, shift, sizes, order),
        ),
    )
    micro_batch = np.repeat(np.array([max(each.micro_batch, 0) for each in sequence], np.int64), sizes)
    p2p = graph.p2p
    tags = np.where(p2p.tag < 0, p2p.tag, p2p.tag + micro_batch[p2p.node] * tag_period)
    graph = replace(
        graph,
        id=np.arange(len(graph), dtype=np.uint64),
        p2p=replace(p2p, tag=tags),
    )
    in_loop = np.repeat(np.array([each.loop for each in sequence], np.bool_), sizes)
    return _looped(graph, in_loop, trips) if trips > 1 and in_loop.any() else graph


def _repeated(
    deps: RaggedArray, rows: IntArray, shift: IntArray, sizes: IntArray, more: _Edges
) -> RaggedArray:
    """Dependencies inside of parts, moved with them, and those between instances."""
    inner = deps.take(rows)
    moved = inner.values + np.repeat(shift, sizes)[inner.row_ids]
    consumers = np.concatenate([inner.row_ids, np.array(more.consumer, np.int64)])
    producers = np.concatenate([moved, np.array(more.producer, np.int64)])
    return RaggedArray.from_pairs(consumers, producers, len(rows))


def _apart(data: RaggedArray, control: RaggedArray) -> tuple[RaggedArray, RaggedArray]:
    """Each dependency once: what is waited for as data is not listed as order too."""
    count = len(data)
    keys = np.unique(data.row_ids * np.int64(count) + data.values)
    others = np.setdiff1d(control.row_ids * np.int64(count) + control.values, keys)
    return (
        RaggedArray.from_pairs(keys // count, keys % count, count),
        RaggedArray.from_pairs(others // count, others % count, count),
    )


def _between(parts: Sequence[Part], sequence: Sequence[Instance], shift: list[int]) -> tuple[_Edges, _Edges]:
    data, order = _Edges(), _Edges()
    where: dict[tuple[str, int, int], int] = {}
    newest: dict[tuple[str, int], int] = {}
    tails: list[int] = []
    for place, each in enumerate(sequence):
        part, moved = parts[each.part], shift[place]
        where[each.kind, part.chunk, each.micro_batch] = place
        newest[each.kind, part.chunk] = place
        for need in part.needs:
            found = where.get((need.kind, need.chunk, each.micro_batch), newest.get((need.kind, need.chunk)))
            if found is None:
                raise InvariantError(f"{each.kind} needs {need.kind} {need.chunk}, which does not run before")
            producer = parts[sequence[found].part]
            if need.port not in producer.ports:
                raise InvariantError(f"{need.kind} has no port {need.port}")
            edges = order if need.is_order else data
            edges.add(need.node + moved, producer.ports[need.port] + shift[found])
        if part.head >= 0 and tails:
            order.add(part.head + moved, tails[-1])
        for begin in part.begins if tails else ():
            order.add(begin + moved, tails[-1])
        for post in part.posts if len(tails) > 1 else ():
            order.add(post + moved, tails[-2])
        if part.tail >= 0:
            tails.append(part.tail + moved)
    return data, order


def _looped(graph: OpGraph, in_loop: np.ndarray[tuple[int], np.dtype[np.bool_]], trips: int) -> OpGraph:
    """The graph with its marked nodes as the body of a loop."""
    strings = graph.strings
    label = strings.find("micro-batches")
    table = RegionTable.from_rows([(-1, int(RegionKind.LOOP_BODY), float(trips), max(label, 0))])
    region = np.where(in_loop, 0, -1).astype(np.int32)
    return replace(graph, regions=table, region=region, multiplicity=region_multiplicity(table, region))
