"""Pipeline schedules: the order of the passes of a stage, and the graph of a step assembled from its passes.

Schedules are GPipe (arXiv 1811.06965), 1F1B (1806.03377), interleaved 1F1B (2104.04473), and zero bubble with
the memory of 1F1B (2401.10241, ZB-H1). Let a forward pass of a stage take F and a backward pass B. Then the
idle time of a stage is (p - 1)(F + B) in GPipe and 1F1B, and this divided by the number of virtual stages in
interleaved 1F1B. Zero bubble splits B into the gradient of inputs, for which the previous stage waits, and
the gradient of weights, which fills gaps.

A pass is written once as a run of nodes of a template graph, and repeated for every micro-batch in the order
of the schedule. Dependencies on other passes of the same micro-batch are named by port, so that passes may
have variants (the first forward pass gathers weights, the last backward pass reduces gradients). Repetition
is done in columns: O(nodes + dependencies) of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from typing import Literal, NamedTuple

import numpy as np

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.settings import ScheduleName
from hespas.graph import OpGraph, RaggedArray, RegionKind
from hespas.graph.builder import region_executions
from hespas.graph.columns import IntArray
from hespas.graph.errors import InvariantError
from hespas.graph.opgraph import RegionTable
from hespas.graph.passes import take_nodes

__all__ = [
    "Pass",
    "PassAction",
    "PassInstance",
    "PassTemplate",
    "PortNeed",
    "assemble_step",
    "beside_previous",
    "most_in_flight",
    "order_of",
]

Pass = Literal["forward", "backward", "weights"]


class PassAction(NamedTuple):
    """One entry of a pipeline schedule: a pass of one micro-batch through one chunk (virtual stage). ``kind``
    is forward, backward, or the gradient of weights.
    """

    kind: Pass
    micro_batch: int
    chunk: int


def order_of(
    name: ScheduleName, layout: Layout, stage: int, micro_batches: int, *, overlaps: bool = False
) -> list[PassAction]:
    """Return the passes of a stage in the order of a pipeline schedule. A single stage runs each micro-batch
    forward and backward in turn. Schedule ``1f1b`` is interleaved 1F1B if there are several virtual stages.

    ``overlaps``: a stage is one forward pass further ahead, so that a forward pass and the backward pass
    after it are of different micro-batches and can run at the same time (:func:`beside_previous`).
    """
    if layout.pp == 1:
        name = "1f1b"
    elif name == "1f1b" and layout.vp > 1:
        name = "interleaved"
    if name == "interleaved":
        # The stage runs one chunk for as many micro-batches as there are stages, then the next chunk.
        # Backward passes go through the chunks in reverse order.
        stages, chunks = layout.pp, layout.vp
        forward: list[PassAction] = []
        backward: list[PassAction] = []
        for position in range(micro_batches * chunks):
            round_, within = divmod(position, stages * chunks)
            chunk, offset = divmod(within, stages)
            forward.append(PassAction("forward", round_ * stages + offset, chunk))
            backward.append(PassAction("backward", round_ * stages + offset, chunks - 1 - chunk))
        ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages + overlaps
        return _alternate(forward, backward, min(ahead, len(forward)))
    if name == "zero-bubble":
        return _zero_bubble_orders(layout.pp, micro_batches)[stage]
    forward = [PassAction("forward", micro_batch, 0) for micro_batch in range(micro_batches)]
    backward = [PassAction("backward", micro_batch, 0) for micro_batch in range(micro_batches)]
    if layout.pp == 1:
        return _alternate(forward, backward, min(int(overlaps), micro_batches))
    if name == "gpipe":
        return forward + backward
    return _alternate(forward, backward, min(layout.pp - 1 - stage, micro_batches))


def beside_previous(order: Sequence[PassAction]) -> list[bool]:
    """Return for each pass whether it can run at the same time as the pass before it: a backward pass after a
    forward pass, if forward passes also follow the first backward pass. Otherwise all forward passes fill the
    pipeline, and a backward pass may wait for one of them on another stage.
    """
    kinds = [action.kind for action in order]
    steady = "forward" in kinds[kinds.index("backward") :] if "backward" in kinds else False
    pairs = zip([*order[:1], *order], order, strict=False)
    return [
        steady and (before.kind, action.kind) == ("forward", "backward") and before[1:] != action[1:]
        for before, action in pairs
    ]


def _alternate(forward: list[PassAction], backward: list[PassAction], ahead: int) -> list[PassAction]:
    """Return ``ahead`` forward passes, then one backward and one forward pass in turn, then the remaining
    backward passes.
    """
    order = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        order += pair
    return order + backward[len(forward) - ahead :]


def _zero_bubble_orders(stages: int, micro_batches: int) -> list[list[PassAction]]:
    """Return the order of passes of every stage in the zero bubble schedule, from a simulation in which each
    pass takes one time unit.

    In each time unit a stage runs a forward pass if its input has arrived, if the stage is at most as far
    ahead as in 1F1B, and if it has fewer than ``stages`` micro-batches in flight. Otherwise it runs a
    backward pass if possible, and else a weight gradient.
    """
    done_forward, done_backward = [0] * stages, [0] * stages
    done_weights = [0] * stages
    orders: list[list[PassAction]] = [[] for _ in range(stages)]
    while any(done < micro_batches for done in done_weights):
        before_forward, before_backward = list(done_forward), list(done_backward)
        for stage, order in enumerate(orders):
            forward, backward = before_forward[stage], before_backward[stage]
            arrived = before_forward[stage - 1] if stage else micro_batches
            returned = before_backward[stage + 1] if stage + 1 < stages else forward
            ahead = forward - backward < stages - stage and forward - done_weights[stage] < stages
            if forward < arrived and ahead:
                order.append(PassAction("forward", forward, 0))
                done_forward[stage] += 1
            elif backward < min(returned, forward):
                order.append(PassAction("backward", backward, 0))
                done_backward[stage] += 1
            elif done_weights[stage] < backward:
                order.append(PassAction("weights", done_weights[stage], 0))
                done_weights[stage] += 1
    return orders


def most_in_flight(order: list[PassAction]) -> int:
    """Return the maximum number of passes (a micro-batch in a chunk) whose activations are saved at the same
    time.
    """
    last_kind = "weights" if any(action.kind == "weights" for action in order) else "backward"
    in_flight = most = 0
    for action in order:
        in_flight += (action.kind == "forward") - (action.kind == last_kind)
        most = max(most, in_flight)
    return most


class PortNeed(NamedTuple):
    """Dependency of a node on the value named ``port`` of another pass (``kind`` and ``chunk``) of the same
    micro-batch. It is a control dependency if ``is_order`` is True.
    """

    node: int
    kind: str
    chunk: int
    port: str
    is_order: bool = False


@dataclass(slots=True)
class PassTemplate:
    """One kind of pass through a chunk of layers: the nodes ``start:end`` of the template graph.

    ``head`` and ``tail`` are the first and the last compute node. ``posts`` are receives that are posted
    during the previous pass. ``ports`` maps the names of values to their nodes.
    """

    kind: str
    chunk: int
    start: int
    end: int = -1
    head: int = -1
    tail: int = -1
    posts: list[int] = field(default_factory=list[int])
    begins: list[int] = field(default_factory=list[int])
    """Nodes that must not run ahead of the pass: they follow the pass before."""
    breaks: list[int] = field(default_factory=list[int])
    """Nodes before which the host issues kernels of a pass that runs beside this one."""
    ports: dict[str, int] = field(default_factory=dict[str, int])
    needs: list[PortNeed] = field(default_factory=list[PortNeed])


class PassInstance(NamedTuple):
    """Execution of a pass in a step: the index of its template (``part``) and its micro-batch (-1: none).

    ``kind`` is the name by which other passes refer to it; all variants of a pass have the same name.
    Consecutive passes whose ``loop`` is True form the body of a loop. A pass with ``joins`` runs at the same
    time as the previous one.
    """

    part: int
    kind: str
    micro_batch: int
    loop: bool = False
    joins: bool = False


class _PassEdges:
    """Dependencies between different passes of a step, collected as pairs of node numbers."""

    def __init__(self) -> None:
        self.consumer: list[int] = []
        self.producer: list[int] = []

    def add(self, consumer: int, producer: int) -> None:
        self.consumer.append(consumer)
        self.producer.append(producer)


def assemble_step(
    template: OpGraph,
    parts: Sequence[PassTemplate],
    sequence: Sequence[PassInstance],
    *,
    trips: int = 1,
    tag_period: int = 1,
) -> OpGraph:
    """Return the graph of a step: the passes of ``sequence`` in program order, each after the previous one.

    The nodes of two passes that run at the same time are issued in turn, up to a break of each. Passes
    marked ``loop`` are the body of a loop of ``trips`` iterations. Dependencies on a micro-batch in
    the loop refer to its last iteration. Message tags increase by ``tag_period`` per micro-batch.
    """
    chosen = [parts[run.part] for run in sequence]
    sizes = np.array([part.end - part.start for part in chosen], np.int64)
    base = np.concatenate([[0], np.cumsum(sizes)])
    shift = base[:-1] - np.array([part.start for part in chosen], np.int64)
    rows = np.arange(int(base[-1]), dtype=np.int64) - np.repeat(shift, sizes)
    data_edges, order_edges = _edges_between(parts, sequence, shift.tolist())
    data = _repeat_deps(template.data_deps, rows, shift, sizes, data_edges)
    control = _repeat_deps(template.control_deps, rows, shift, sizes, order_edges)
    micro_batch = np.repeat(np.array([max(run.micro_batch, 0) for run in sequence], np.int64), sizes)
    in_loop = np.repeat(np.array([run.loop for run in sequence], np.bool_), sizes)
    if any(run.joins for run in sequence):
        order = _issue_order(chosen, sequence, base.tolist())
        rows, micro_batch, in_loop = rows[order], micro_batch[order], in_loop[order]
        new_row = np.empty_like(order)
        new_row[order] = np.arange(len(order))
        data, control = (
            RaggedArray.from_pairs(new_row[deps.row_ids], new_row[deps.values], len(rows))
            for deps in (data, control)
        )
    # Keep each dependency once: a data dependency is not a control dependency too.
    count = len(rows)
    data_keys = np.unique(data.row_ids * np.int64(count) + data.values)
    control_keys = np.setdiff1d(control.row_ids * np.int64(count) + control.values, data_keys)
    graph = take_nodes(
        template,
        rows,
        RaggedArray.from_pairs(data_keys // count, data_keys % count, count),
        RaggedArray.from_pairs(control_keys // count, control_keys % count, count),
    )
    p2p = graph.p2p
    tags = np.where(p2p.tag < 0, p2p.tag, p2p.tag + micro_batch[p2p.node] * tag_period)
    graph = replace(
        graph,
        id=np.arange(len(graph), dtype=np.uint64),
        p2p=replace(p2p, tag=tags),
    )
    if trips <= 1 or not in_loop.any():
        return graph
    label = max(graph.strings.find("micro-batches"), 0)
    table = RegionTable.from_rows([(-1, int(RegionKind.LOOP_BODY), float(trips), label)])
    region = np.where(in_loop, 0, -1).astype(np.int32)
    return replace(graph, regions=table, region=region, executions=region_executions(table, region))


def _issue_order(
    chosen: Sequence[PassTemplate], sequence: Sequence[PassInstance], base: list[int]
) -> IntArray:
    """Return the nodes of a step in the order in which they are issued. Of two passes at the same time, the
    later one is first: a backward pass begins with communication, which the kernels of the forward pass hide.
    """
    pieces: list[IntArray] = []
    for position in range(len(sequence)):
        if position + 1 < len(sequence) and sequence[position + 1].joins:
            continue
        turns: list[list[IntArray]] = []
        pair = [position, position - 1] if sequence[position].joins else [position]
        for member in pair:
            mine, start = chosen[member], base[member]
            cuts = [0, *(node - mine.start for node in mine.breaks), mine.end - mine.start]
            turns.append([np.arange(start + a, start + b) for a, b in pairwise(cuts)])
        for turn in zip_longest(*turns):
            pieces += [piece for piece in turn if piece is not None]
    return np.concatenate(pieces).astype(np.int64)


def _repeat_deps(
    deps: RaggedArray, rows: IntArray, shift: IntArray, sizes: IntArray, edges: _PassEdges
) -> RaggedArray:
    """Return the dependencies of the whole step. Dependencies inside a pass are copied to each instance, with
    ``shift`` added to their node numbers. ``edges`` are the dependencies between passes.
    """
    inner = deps.take(rows)
    shifted = inner.values + np.repeat(shift, sizes)[inner.row_ids]
    consumers = np.concatenate([inner.row_ids, np.array(edges.consumer, np.int64)])
    producers = np.concatenate([shifted, np.array(edges.producer, np.int64)])
    return RaggedArray.from_pairs(consumers, producers, len(rows))


def _edges_between(
    parts: Sequence[PassTemplate], sequence: Sequence[PassInstance], shift: list[int]
) -> tuple[_PassEdges, _PassEdges]:
    data, order = _PassEdges(), _PassEdges()
    position_of: dict[tuple[str, int, int], int] = {}
    newest: dict[tuple[str, int], int] = {}
    tails: list[int] = []
    before: list[int] = []  # last compute nodes of the pass before, or of two passes beside each other
    current: list[int] = []
    for position, run in enumerate(sequence):
        part, offset = parts[run.part], shift[position]
        position_of[run.kind, part.chunk, run.micro_batch] = position
        newest[run.kind, part.chunk] = position
        for need in part.needs:
            latest = newest.get((need.kind, need.chunk))
            source = position_of.get((need.kind, need.chunk, run.micro_batch), latest)
            if source is None:
                raise InvariantError(f"{run.kind} needs {need.kind} {need.chunk}, which does not run before")
            producer = parts[sequence[source].part]
            if need.port not in producer.ports:
                raise InvariantError(f"{need.kind} has no port {need.port}")
            edges = order if need.is_order else data
            edges.add(need.node + offset, producer.ports[need.port] + shift[source])
        if current and not run.joins:
            before, current = current, []
        for follower in (part.head, *part.begins):
            for tail in before if follower >= 0 else ():
                order.add(follower + offset, tail)
        for post in part.posts if len(tails) > 1 else ():
            order.add(post + offset, tails[-2])
        if part.tail >= 0:
            tails.append(part.tail + offset)
            current.append(part.tail + offset)
    return data, order
