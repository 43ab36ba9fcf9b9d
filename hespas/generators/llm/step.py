"""Training step of a language model as a workload: passes of each pipeline stage, and one rank class per
stage.

Weights and gradients are communicated as in the frameworks. With a sharded optimizer (ZeRO-1), gradients are
reduce-scattered once a step and updated weights are gathered, layer by layer, overlapping computation if the
settings request it. FSDP (ZeRO-2, -3) gathers the weights of a layer one layer ahead: before its forward
pass, and before its backward pass if they were freed. It reduce-scatters gradients after each micro-batch.
Weights outside of layers are treated the same way; this includes an embedding, although its backward pass
does not read it. Gradients of experts are reduced over the ranks with the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import nan
from typing import NamedTuple

import numpy as np

from hespas.generators.llm.activations import (
    load_activations,
    offloaded_bytes,
    offloaded_ports,
    store_activations,
)
from hespas.generators.llm.flops import hardware_flops, model_flops
from hespas.generators.llm.kernels import KernelWriter, TensorSpec, Value
from hespas.generators.llm.layers import ModelEnds, backward_layer, forward_layer
from hespas.generators.llm.layout import Layout, RankGroups, check_layout, layers_of_stages, micro_batches
from hespas.generators.llm.memory import memory_of
from hespas.generators.llm.model import Experts, Layer, Model, model_parameters
from hespas.generators.llm.rank import ModelRank, keeps_weights
from hespas.generators.llm.schedule import (
    PassInstance,
    PassTemplate,
    assemble_step,
    beside_previous,
    order_of,
)
from hespas.generators.llm.settings import Training
from hespas.generators.llm.weights import RankWeights, weights_of_layer, weights_of_rest
from hespas.generators.spec import Account
from hespas.graph import PROGRAM_BYTES, CollectiveKind, OpGraph, StepFacts, StridedGroups, Workload
from hespas.graph.builder import GraphBuilder

__all__ = [
    "Board",
    "LlmStep",
    "StagePasses",
    "WeightShare",
    "frees_weights",
    "ordered_passes",
    "stage_graph",
    "stage_passes",
    "training_facts",
    "training_workload",
    "weight_shares",
]


def stage_graph(model: Model, layout: Layout, training: Training, stage: int, name: str) -> OpGraph:
    """Return the op graph that the ranks of a stage run in a step. O(nodes)."""
    passes = _StageWriter(model, layout, training, stage, name).passes()
    return ordered_passes(passes, layout, training, stage, micro_batches(layout, training))


class StagePasses(NamedTuple):
    """Passes of a pipeline stage, each written once into ``graph``.

    ``variants`` maps the kind of a pass, its chunk and a flag to an index in ``parts``. The flag is True for
    the first forward and the last backward pass of a step. ``end`` is the index in ``parts`` of the end of
    the step (the optimizer).
    """

    graph: OpGraph
    parts: tuple[PassTemplate, ...]
    variants: dict[tuple[str, int, bool], int]
    end: int

    def part(self, kind: str, chunk: int, *, special: bool) -> int:
        """Return the index of a pass in ``parts``. ``special`` is True for the first forward or the last
        backward pass, which may be separate variants.
        """
        default = self.variants[kind, chunk, True]
        return self.variants.get((kind, chunk, special), default)


def stage_passes(model: Model, layout: Layout, training: Training, stage: int) -> StagePasses:
    """Return the passes of a stage, each written once; :func:`ordered_passes` puts them in order.
    O(nodes).
    """
    return _StageWriter(model, layout, training, stage, f"{model.name}.stage{stage}").passes()


def ordered_passes(
    passes: StagePasses, layout: Layout, training: Training, stage: int, count: int
) -> OpGraph:
    """Return the step of a stage with ``count`` micro-batches: its passes in the order of the schedule.

    ``passes`` may have been written for another stage with equal layers. O(nodes of the step).
    """
    last, overlaps = count - 1, training.overlap.microbatches
    order = order_of(training.schedule, layout, stage, count, overlaps=overlaps)
    sequence: list[PassInstance] = []
    for action, joins in zip(order, beside_previous(order), strict=True):
        special = action.micro_batch == (0 if action.kind == "forward" else last)
        part = passes.part(action.kind, action.chunk, special=special)
        sequence.append(PassInstance(part, action.kind, action.micro_batch, joins=overlaps and joins))
    trips = 1
    if layout.pp == 1 and last > 2 and not overlaps:
        trips = last - 1
        body = [run._replace(loop=True) for run in sequence[2:4]]
        sequence = sequence[:2] + body + sequence[-2:]
    sequence.append(PassInstance(passes.end, "end", -1))
    return assemble_step(passes.graph, passes.parts, sequence, trips=trips, tag_period=2 * layout.vp)


class WeightShare(NamedTuple):
    """Weights that several ranks hold. Each group in ``shards`` holds one copy, divided over its ranks. The
    ranks of a group in ``copies`` hold the same shard.
    """

    name: str
    trained: int
    frozen: int
    shards: StridedGroups
    copies: StridedGroups


def frees_weights(layout: Layout, training: Training) -> bool:
    """Return True if weights are gathered for each micro-batch and freed afterwards, as in FSDP.

    With ZeRO-3 they are gathered for the forward pass and again for the backward pass. With ZeRO-2, FSDP
    holds them until the backward pass, and Megatron-Core never frees them. In a pipeline, PyTorch's FSDP
    holds them during the whole step.
    """
    if keeps_weights(layout, training):
        return False
    return layout.zero == 3 or (layout.zero == 2 and training.style != "megatron")


def weight_shares(layout: Layout, groups: RankGroups, weights: RankWeights) -> Iterator[WeightShare]:
    """Yield dense weights and expert weights with the groups of ranks that hold them, if there are several
    ranks. Without a sharded optimizer each rank holds a whole copy.
    """
    if layout.zero:
        dense_groups = groups.shards, groups.copies
        expert_groups = groups.expert_shards, groups.expert_copies
    else:
        single = StridedGroups.from_mesh([layout.ranks, 1], [1])
        dense_groups, expert_groups = (single, groups.data), (single, groups.expert_data)
    for share in (
        WeightShare("", weights.dense, weights.frozen, *dense_groups),
        WeightShare(".experts", weights.experts, weights.frozen_experts, *expert_groups),
    ):
        if (share.trained or share.frozen) and share.shards.group_size * share.copies.group_size > 1:
            yield share


@dataclass
class _StageWriter:
    model: Model
    layout: Layout
    training: Training
    stage: int
    name: str
    parts: list[PassTemplate] = field(default_factory=list[PassTemplate])

    @cached_property
    def builder(self) -> GraphBuilder:
        builder = GraphBuilder(self.name)
        builder.strings.add("micro-batches")
        return builder

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Layer numbers of each chunk."""
        return layers_of_stages(self.model, self.layout)[self.stage]

    @property
    def splits(self) -> bool:
        """True if gradients of weights are computed in a separate pass (zero bubble)."""
        return self.training.schedule == "zero-bubble" and self.layout.pp > 1

    @property
    def has_variants(self) -> bool:
        """True if the first forward and the last backward pass of a step have additional communication."""
        overlap = self.training.overlap
        gathers = (
            self.layout.zero in {1, 2}
            and not frees_weights(self.layout, self.training)
            and overlap.parameters
        )
        gathers |= self.rank.keeps_weights
        return gathers or (self.layout.zero < 2 and overlap.gradients)

    @cached_property
    def rank(self) -> ModelRank:
        return ModelRank(self.model, self.layout, self.training, [] if self.splits else None)

    @cached_property
    def ends(self) -> ModelEnds:
        return ModelEnds(self.rank)

    def layer(self, number: int) -> Layer:
        return self.model.all_layers[number]

    def passes(self) -> StagePasses:
        """Write all passes of the stage."""
        last = micro_batches(self.layout, self.training) - 1
        variants: dict[tuple[str, int, bool], int] = {}
        for chunk in range(len(self.chunks)):
            for special in (True, False) if last and self.has_variants else (True,):
                k = self._begin("forward", chunk)
                self._forward(k, special)
                variants["forward", chunk, special] = self._close(k)
                k = self._begin("backward", chunk)
                self._backward(k, special)
                variants["backward", chunk, special] = self._close(k)
                if self.splits:  # directly after the backward pass, which deferred its gradients of weights
                    k = self._begin("weights", chunk)
                    for make in self.rank.deferred or []:
                        make(k)
                    k.module = ""
                    k.name_port("done", k.part.tail)
                    done: Value = "backward:done" if k.part.tail < 0 else k.part.tail
                    for number in reversed(self.chunks[k.part.chunk]):
                        k.module = f"layers.{number}"
                        self._reduce_layer(k, number, done, special)
                    self._reduce_rest(k, [*k.made, done])
                    if self.rank.deferred is not None:
                        self.rank.deferred.clear()
                    variants["weights", chunk, special] = self._close(k)
        end = self._end()
        return StagePasses(self.builder.build(), tuple(self.parts), variants, end)

    def _begin(self, kind: str, chunk: int) -> KernelWriter:
        part = PassTemplate(kind, chunk, len(self.builder))
        self.parts.append(part)
        training = self.rank.training
        grouped = training.style != "megatron" or training.launch == "whole"
        return KernelWriter(self.builder, part, queues=True, tf32=training.precision.tf32, grouped=grouped)

    def _close(self, k: KernelWriter) -> int:
        """End the current pass and return its index."""
        k.part.end = len(self.builder)
        return len(self.parts) - 1

    def _gather_layer(self, k: KernelWriter, number: int, ahead: int) -> list[int]:
        """Add the gather of a layer's weights. It waits for the node ``ahead``, so that only a few layers are
        gathered at a time.
        """
        k.module = f"layers.{number}"
        return self._gather(k, self._weights_of(number), ahead)

    def _gather(self, k: KernelWriter, weights: RankWeights, ahead: int) -> list[int]:
        nodes: list[int] = []
        for share in self._shares(weights):
            frees = frees_weights(self.layout, self.training)
            elements = share.trained + (share.frozen if self.layout.zero == 3 or frees else 0)
            if not elements or share.shards.group_size == 1:
                continue
            nodes.append(
                k.collective(
                    f"weights{share.name}.all_gather",
                    CollectiveKind.ALL_GATHER,
                    share.shards,
                    TensorSpec((elements,), self.training.precision.compute),
                    control=[ahead],
                    in_place=True,
                )
            )
        if ahead < 0 and k.part.kind != "end":
            k.part.begins += nodes
        return nodes

    def _shares(self, weights: RankWeights) -> Iterator[WeightShare]:
        return weight_shares(self.layout, self.rank.groups, weights)

    def _reducible(self, weights: RankWeights) -> list[WeightShare]:
        """Return the weights of :meth:`_shares` that have gradients."""
        return [share for share in self._shares(weights) if share.trained]

    def _reduce(self, k: KernelWriter, weights: RankWeights, after: Sequence[Value]) -> list[int]:
        """Add the reduction of gradients over the ranks that hold the same weights: a reduce-scatter if the
        optimizer is sharded, and an all-reduce over copies.

        Return the last node of the reduction for each entry of :meth:`_reducible`.
        """
        element, nodes = self.rank.gradient, list[int]()
        for name, trained, _, shards, copies in self._reducible(weights):
            node, before = -1, after
            if shards.group_size > 1:
                whole = TensorSpec((trained,), element)
                kind = CollectiveKind.REDUCE_SCATTER
                op_name = f"gradients{name}.reduce_scatter"
                node = k.collective(op_name, kind, shards, whole, after=before, in_place=True)
                before = [node]
            if copies.group_size > 1:
                shard = TensorSpec((-(-trained // shards.group_size),), element)
                op_name = f"gradients{name}{'.copies' if node >= 0 else ''}.all_reduce"
                node = k.collective(
                    op_name, CollectiveKind.ALL_REDUCE, copies, shard, after=before, in_place=True
                )
            nodes.append(node)
        return nodes

    def _weights_of(self, number: int) -> RankWeights:
        return weights_of_layer(self.model, self.layout, self.training, self.layer(number))

    @cached_property
    def rest(self) -> RankWeights:
        """Weights outside of layers: embedding, head, last norm."""
        return weights_of_rest(
            self.model,
            self.layout,
            self.training,
            first=self.stage == 0,
            last=self.stage == self.layout.pp - 1,
        )

    def _is_first(self, chunk: int) -> bool:
        return self.stage == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self.stage == self.layout.pp - 1 and chunk == self.layout.vp - 1

    def _has_rest(self, chunk: int) -> bool:
        """Return True if the weights outside of layers (embedding, head) are in this chunk; only one chunk of
        a stage has them.
        """
        return self._is_first(chunk) or self._is_last(chunk)

    def _receive(self, k: KernelWriter, backward: bool) -> int:
        messages = self.rank.groups.to_stage(-1 if backward else 1, wraps=self.layout.vp > 1)
        tag = 2 * k.part.chunk + backward
        return k.message("pipeline.recv", messages, self.rank.stream, tag, sends=False)

    def _send(self, k: KernelWriter, x: Value, backward: bool) -> None:
        """Add the send to the next chunk (in the backward pass, to the previous chunk).

        The message tag contains the number of the receiving chunk. Sender and receiver have the same chunk
        number, except when the last stage sends to the first stage.
        """
        messages = self.rank.groups.to_stage(-1 if backward else 1, wraps=self.layout.vp > 1)
        chunk = k.part.chunk
        chunk += (self.stage == self.layout.pp - 1) if not backward else -(self.stage == 0)
        k.module = ""
        node = k.message(
            "pipeline.send", messages, self.rank.stream, 2 * chunk + backward, sends=True, after=[x]
        )
        if not self.training.overlap.pipeline:
            k.part.tail = node

    def _forward(self, k: KernelWriter, first: bool) -> None:
        chunk = k.part.chunk
        numbers = self.chunks[chunk]
        once = self.layout.zero in {1, 2} and first and self.training.overlap.parameters
        keeps = self.rank.keeps_weights and first
        frees = frees_weights(self.layout, self.training)
        gathers = frees or once or keeps
        if (frees or keeps) and self._has_rest(chunk):
            k.module = "ends"
            k.follow = self._gather(k, self.rest, -1)
        x: Value = self.ends.embed(k) if self._is_first(chunk) else self._receive(k, backward=False)
        ahead = -1
        pending = self._gather_layer(k, numbers[0], -1) if gathers and numbers else []
        for position, number in enumerate(numbers):
            k.follow = [*k.follow, *pending]
            pending = []
            before = len(self.builder)
            if gathers and position + 1 < len(numbers):
                pending = self._gather_layer(k, numbers[position + 1], ahead)
            if number >= len(self.model.layers):  # multi-token prediction, after the loss of the one before
                self.ends.loss(k, x)
                x = self.ends.next_token(k, number, x)
            x = forward_layer(self.rank, k, self.layer(number), number, x)
            ahead = k.first_compute(before)
            size = offloaded_bytes(self.rank, self.layer(number), self._index_in_stage(chunk, position))
            if size:
                store_activations(k, number, size)
        k.module = ""
        if self._is_last(chunk):
            self.ends.loss(k, x)
            return
        x = self.rank.add_pending(k, x)
        k.name_port("out", x)
        self._send(k, x, backward=False)

    def _backward(self, k: KernelWriter, last: bool) -> None:
        chunk = k.part.chunk
        numbers = self.chunks[chunk]
        gathers, pending, ahead = (
            self.layout.zero == 3 and frees_weights(self.layout, self.training),
            list[int](),
            -1,
        )
        if gathers and self._is_last(chunk):
            k.module = "ends"
            k.follow = self._gather(k, self.rest, -1)
        grad = self.ends.loss_backward(k) if self._is_last(chunk) else self._receive(k, backward=True)
        head_gradients, k.made = k.made, []
        if gathers and numbers:
            pending = self._gather_layer(k, numbers[-1], -1)
        pending += self._fetch(k, len(numbers) - 1, -1)
        for position in reversed(range(len(numbers))):
            number = numbers[position]
            k.follow, pending, before = [*k.follow, *pending], [], len(self.builder)
            if gathers and position:
                pending = self._gather_layer(k, numbers[position - 1], ahead)
            pending += self._fetch(k, position - 1, ahead)
            index = self._index_in_stage(chunk, position)
            grad = backward_layer(self.rank, k, self.layer(number), number, grad, index=index)
            if number >= len(self.model.layers):  # multi-token prediction
                grad = self.ends.loss_backward(k, self.ends.next_token_backward(k, number, grad))
            ahead = k.first_compute(before)
            k.module = f"layers.{number}"
            if not self.splits:
                self._reduce_layer(k, number, k.part.tail, last)
            k.made = []
        k.module = ""
        if self._is_first(chunk):
            if gathers and not self._is_last(chunk):
                k.module = "ends"
                k.follow = self._gather(k, self.rest, ahead)
            self.ends.embed_backward(k, grad)
        else:
            self._send(k, grad, backward=True)
        k.name_port("done", grad if k.part.tail < 0 else k.part.tail)
        if not self.splits:
            self._reduce_rest(k, [*head_gradients, k.part.tail])

    def _index_in_stage(self, chunk: int, position: int) -> int:
        """Return the index within the stage of the layer at ``position`` of a chunk."""
        return sum(map(len, self.chunks[:chunk])) + position

    def _fetch(self, k: KernelWriter, position: int, ahead: int) -> list[int]:
        """Add the load of the offloaded activations of the layer at ``position``. It waits for the node
        ``ahead``.

        Return the loading node if no kernel of the layer's backward pass reads a loaded value, so that the
        caller must make the pass wait for it. Return an empty list otherwise.
        """
        chunk = k.part.chunk
        if position < 0:
            return []
        number = self.chunks[chunk][position]
        layer, index = self.layer(number), self._index_in_stage(chunk, position)
        size = offloaded_bytes(self.rank, layer, index)
        if not size:
            return []
        forward = next(part for part in self.parts if (part.kind, part.chunk) == ("forward", chunk))
        ports = offloaded_ports(self.rank, layer, number, index, forward.ports)
        node = load_activations(k, number, size, ahead, ports)
        return [] if ports else [node]

    @property
    def _reduces_each(self) -> bool:
        """True if gradients are reduced after each micro-batch."""
        return self.layout.zero >= 2 and not self.rank.keeps_weights

    @property
    def _reduces_early(self) -> bool:
        """True if gradients are reduced during the last backward pass, instead of after it."""
        return self.training.overlap.gradients and not self.rank.keeps_weights

    def _reduce_layer(self, k: KernelWriter, number: int, done: Value, last: bool) -> None:
        """Add the reduction of a layer's gradients after its backward pass. With ZeRO-2 and ZeRO-3 it is
        added for each micro-batch. Otherwise it is added for the last micro-batch, if reductions overlap the
        backward pass.
        """
        if self._reduces_each or (last and self._reduces_early):
            for index, node in enumerate(self._reduce(k, self._weights_of(number), [*k.made, done])):
                k.name_port(f"reduced.{number}.{index}", node)

    def _reduce_rest(self, k: KernelWriter, after: Sequence[Value]) -> None:
        """Add the reduction of gradients of weights outside of layers, which ZeRO-2 and 3 do for each
        micro-batch.
        """
        if not self._reduces_each or not self._has_rest(k.part.chunk):
            return
        k.module = "ends"
        for index, node in enumerate(self._reduce(k, self.rest, after)):
            k.name_port(f"reduced.rest.{index}", node)

    def _end(self) -> int:
        k = self._begin("end", 0)
        kind = "weights" if self.splits else "backward"
        reduced = list[Value]()
        early = self._reduces_each or self._reduces_early
        for chunk, numbers in enumerate(self.chunks):
            # The weights pass may end before the backward pass has sent its last gradients.
            passes = {part.kind for part in self.parts if part.chunk == chunk and "done" in part.ports}
            done: list[Value] = [f"{name}@{chunk}:done" for name in ("backward", "weights") if name in passes]
            reduced += done
            for number in numbers:
                k.module = f"layers.{number}"
                weights = self._weights_of(number)
                if early:
                    shares = range(len(self._reducible(weights)))
                    reduced += [f"{kind}@{chunk}:reduced.{number}.{index}" for index in shares]
                else:
                    reduced += self._reduce(k, weights, done)
        k.module = ""
        total = sum((self._weights_of(number) for numbers in self.chunks for number in numbers), self.rest)
        finished = [value for value in reduced if isinstance(value, str) and value.endswith(":done")]
        k.module = "ends"
        nodes: list[Value] = list(reduced)
        if self._reduces_each:
            chunk = next(filter(self._has_rest, range(self.layout.vp)), 0)
            shares = range(len(self._reducible(self.rest)))
            nodes += [f"{kind}@{chunk}:reduced.rest.{index}" for index in shares]
        else:
            nodes += self._reduce(k, self.rest, finished)
        nodes += self.ends.shared_gradients(k, self.stage, finished, total)
        k.module = ""

        def regather(k: KernelWriter, updated: Value) -> None:
            """Add the gather of updated weights. Nothing is added if every pass gathers weights (FSDP), or if
            each rank holds all weights. Layers whose weights are gathered shortly before their use are left
            out.
            """
            is_gathered = self.layout.zero in {0, 3} or frees_weights(self.layout, self.training)
            if is_gathered or isinstance(updated, str):
                return
            if not self.training.overlap.parameters:
                for numbers in self.chunks:
                    for number in numbers:
                        self._gather_layer(k, number, updated)
            k.module = "ends"
            self._gather(k, self.rest, updated)

        self.ends.finish(k, total, nodes, regather)
        return self._close(k)


def training_workload(
    model: Model, layout: Layout, training: Training, metadata: Mapping[str, str] | None = None
) -> Workload:
    """Return a training step of ``model`` on ``layout.ranks`` ranks. Equal arguments give equal workloads.

    The metadata has the facts of the step; entries of ``metadata`` override them. Raises ``UsageError`` that
    names a violated layout rule. O(nodes of all stages + ranks).
    """
    check_layout(model, layout, training)
    metadata = replace(training_facts(model, training, layout=layout), ranks=layout.ranks).metadata() | dict(
        metadata or {}
    )
    stages = range(layout.pp)
    graphs = tuple(
        stage_graph(model, layout, training, stage, f"{model.name}.stage{stage}") for stage in stages
    )
    if layout.pp == 1:
        return Workload.spmd(replace(graphs[0], name=model.name), layout.ranks, metadata)
    ranks = np.repeat(np.arange(layout.pp, dtype=np.int32), layout.ranks // layout.pp)
    return Workload(name=model.name, classes=graphs, rank_class=ranks, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Differences of a GPU board from its device file: the power limit (0: as in the file), the ratio of its
    memory bandwidth to the bandwidth in the file, and the size of its memory (NaN: as in the file).
    """

    device: str
    power_w: float = 0.0
    bandwidth: float = 1.0
    capacity_bytes: float = nan


def training_facts(
    model: Model, training: Training, board: Board | None = None, *, layout: Layout | None = None
) -> StepFacts:
    """Return the facts of a step that simulators need in addition to its graph. Megatron-Core launches the
    kernels of experts one expert at a time; their number on a rank follows from ``layout``.
    """
    experts = max((block.experts for block in model.blocks() if isinstance(block, Experts)), default=0)
    local = experts // layout.ep if layout is not None else 0
    library = training.library or ("flash2" if training.style == "torchtitan" else "cudnn")
    facts = StepFacts(
        kind="training",
        model_flops=float(model_flops(model, training)),
        tokens=float(training.global_batch * training.seq),
        dtype="tf32" if training.precision.tf32 else training.precision.matmul,
        launch="whole" if training.style == "maxtext" else training.launch,
        reads_counts=training.capacity == 0,
        separate_experts=0 if training.style != "megatron" else local,
        library=library,
        compiled=training.compiled,
        framework=training.style,
        phase="training",
    )
    if board is None:
        return facts
    return replace(facts, **asdict(board))


_STATES = ("weights", "master weights", "optimizer moments", "gradients")
"""Parts of the memory account that persist from step to step."""


@dataclass(frozen=True, kw_only=True)
class LlmStep:
    """Generator of an optimizer step of a language model."""

    model: Model
    layout: Layout
    training: Training
    board: Board | None = None

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    def workload(self) -> Workload:
        """Return the step of all ranks.

        The metadata has the peak memory of each stage. It also has the bytes of weights, gradients and
        optimizer state, which the step overwrites and which are not values of its graph. Raises
        ``UsageError`` with the name of a violated layout rule.
        """
        check_layout(self.model, self.layout, self.training)
        stage_bytes: list[str] = []
        for stage in memory_of(self.model, self.layout, self.training):
            size = sum(stage.parts.get(name, 0) for name in _STATES)
            stage_bytes.append(f"{size} {size} {size} {stage.peak_bytes} {stage.device_bytes}")
        facts = training_facts(self.model, self.training, self.board, layout=self.layout)
        facts = replace(facts, ranks=self.layout.ranks)
        metadata = facts.metadata() | {PROGRAM_BYTES: ";".join(stage_bytes)}
        return training_workload(self.model, self.layout, self.training, metadata)

    def account(self) -> Account:
        """Return parameters of the model, FLOPs of all ranks, and memory of the stage with the highest peak.

        Raises ``UsageError`` that names a violated layout rule.
        """
        check_layout(self.model, self.layout, self.training)
        fullest = max(memory_of(self.model, self.layout, self.training), key=lambda stage: stage.device_bytes)
        return Account(
            parameters=model_parameters(self.model),
            model_flops_per_step=model_flops(self.model, self.training),
            hardware_flops_per_step=hardware_flops(self.model, self.training, self.layout),
            peak_memory_bytes=float(fullest.peak_bytes),
            reserved_memory_bytes=fullest.reserved_bytes,
            device_memory_bytes=float(fullest.device_bytes),
            memory=fullest.filling,
        )
