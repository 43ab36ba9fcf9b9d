"""Peak memory of the ranks of each pipeline stage in training, and its parts at that moment.

The account follows the schedule of a step. Between its forward and backward pass, a micro-batch holds the
saved activations of its layers. The running layer, the loss or the gradient of the embedding needs working
memory in addition. Three figures include each other:

* allocated: all tensors (``torch.cuda.max_memory_allocated``);
* reserved: also the other memory of the allocator (``max_memory_reserved``, which torchtitan prints). Each
  stream has a separate pool, and blocks have unused parts. It is unknown for XLA, and for ZeRO-2 and ZeRO-3
  of Megatron-Core;
* device: also the context of the GPU and the buffers of the communication library. This figure must fit in
  the memory of the device. Unused parts of blocks are not included, because PyTorch frees unused blocks
  before it reports that memory is exhausted (``nvidia-smi`` shows them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hespas.generators.llm.activations import (
    Parts,
    matrix_shapes,
    saved_of_layer,
    storage,
    total,
    whole_of_layer,
    work_of_layer,
)
from hespas.generators.llm.layout import Layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import Experts, Layer, Model
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.schedule import beside_previous, order_of
from hespas.generators.llm.settings import Training
from hespas.generators.llm.weights import RankWeights, weights_of_layer, weights_of_rest
from hespas.generators.spec import Filling, fillings
from hespas.graph.columns import dtype

__all__ = ["RankState", "StageMemory", "memory_of", "outside_memory"]

_WORKSPACE_BYTES = 32 * 2**20
"""Workspace of a matrix library per stream: the size that the cuBLAS manual recommends for Hopper
(``cublasSetWorkspace``), which PyTorch and Transformer Engine use. Older devices have 4 to 8 MiB.
"""
_UNUSED_PARTS = 0.05
"""Unused parts of the allocator's blocks, as a share of the allocated memory. Blocks above 1 MiB are cut from
segments of 20 MiB or more, in steps of 512 bytes (PyTorch: ``CUDACachingAllocator``), so that their number is
not known in advance. The share is the mean of 43 runs of Megatron-Core (3 to 9 %) and was chosen with these.
"""
_CONTEXT_BYTES = 400 * 10**6
"""Context of a GPU with the kernels that a process uses (github.com/pytorch/pytorch, issue 109888: CUDA 11.7
and later, which load kernels at first use).
"""
_PAIR_BYTES, _GROUP_BYTES = 544 * 2**20, 688 * 2**20
"""Buffers of a communicator of two ranks, and of more ranks, for collectives: measured on A100 with NVLink
(github.com/NVIDIA/nccl, issue 964). Each channel has receive buffers for three protocols per neighbour in the
ring and tree, one of them of ``NCCL_BUFFSIZE`` = 4 MiB. RCCL needs as much (github.com/Lumi-supercomputer,
LUMI-AI-Guide, issue 111: 0.65 GiB per communicator).
"""
_PEER_BYTES = 32 * (10 + 2) * 2**20
"""Buffers for messages to and from a rank of the same node: 32 channels with 10 MiB to receive and 2 MiB to
send (github.com/NVIDIA/nccl, issue 1685, an all-to-all between eight H100).
"""
_MOST_PEERS = 7
"""Limit on ranks with own message buffers: all others in a node of eight. Ranks of other nodes share one
buffer (github.com/NVIDIA/nccl, issue 1450).
"""


@dataclass(frozen=True)
class RankState:
    """Memory of a rank between passes: weights of its ``layers``, gradients, optimizer state and gathered
    weights.

    Mixed precision with Adam has 16-bit weights, gradients accumulated in 32 bits, 32-bit weights and two
    32-bit moments (arXiv 1710.03740, 1412.6980). ZeRO-1 shards the 32-bit weights and the moments over
    data-parallel ranks, ZeRO-2 also the gradients, ZeRO-3 also the weights (arXiv 1910.02054). Sharded
    weights are gathered layer by layer. Trained four-bit weights are converted from a 16-bit copy (arXiv
    2509.25149). Frozen weights, and all weights of a rank that ``serves``, have no such copy.
    """

    rank: ModelRank
    layers: tuple[Layer, ...]
    first: bool
    last: bool
    serves: bool = False

    @cached_property
    def rest(self) -> RankWeights:
        """Return the parameters that belong to no layer, such as the embedding."""
        rank = self.rank
        return weights_of_rest(rank.model, rank.layout, rank.training, first=self.first, last=self.last)

    def of_layer(self, layer: Layer) -> RankWeights:
        """Return the parameters of a layer."""
        return weights_of_layer(self.rank.model, self.rank.layout, self.rank.training, layer)

    @cached_property
    def weights(self) -> RankWeights:
        """All parameters of the rank."""
        return sum(map(self.of_layer, self.layers), self.rest)

    @property
    def shards_weights(self) -> bool:
        """True if weights are gathered layer by layer."""
        return self.rank.layout.zero == 3

    @property
    def in_torch(self) -> bool:
        """True if the optimizer updates the weights of the model directly, and these are converted to other
        formats at each use. This holds for all frameworks except Megatron-Core.
        """
        return self.rank.training.style != "megatron"

    @property
    def in_xla(self) -> bool:
        """True if XLA compiles the layers as a loop. The loop body then gathers the weights of a layer; other
        weights are gathered where they are used.
        """
        return self.rank.training.style == "maxtext"

    def _trained_bytes(self, level: int, bytes_each: int) -> int:
        """Return the bytes of a state with ``bytes_each`` bytes per trained parameter, such as gradients. The
        state is sharded if the ZeRO level of the layout is at least ``level``.
        """
        dense, experts = bytes_each * self.weights.dense, bytes_each * self.weights.experts
        return self._shard(dense, experts) if self.rank.layout.zero >= level else dense + experts

    def _shard(self, dense: int, experts: int) -> int:
        """Return the bytes of one rank's shard of dense weights and of expert weights."""
        layout = self.rank.layout
        return -(-dense // layout.sharded) + -(-experts // layout.expert_sharded)

    @cached_property
    def parts(self) -> Parts:
        """Return the bytes by kind of state (weights, optimizer), without gradients."""
        training, weights = self.rank.training, self.weights
        wide = 2 if training.pure_16bit else 4
        moments = self._trained_bytes(1, 2 * wide)
        master = self._trained_bytes(3 if self.in_torch else 1, wide)
        if training.optimizer_offload:
            moments = 0
            master = master if self.in_torch else 0
        if self.in_torch:
            compute = self.rank.precision.compute
            dense, experts = storage(weights.frozen, compute), storage(weights.frozen_experts, compute)
            frozen = self._shard(dense, experts) if self.shards_weights else dense + experts
            return {"weights": master + frozen, "optimizer moments": moments}
        keeps_master = not training.pure_16bit and self.rank.precision.compute != "f32"
        return {
            "weights": self.working,
            "master weights": master if keeps_master else 0,
            "optimizer moments": moments,
        }

    @cached_property
    def gradients(self) -> int:
        """Return the bytes of accumulated gradients."""
        if self.rank.keeps_weights:  # summed over micro-batches before they are reduced
            return storage(self.weights.dense + self.weights.experts, self.rank.gradient)
        return self.reduced_gradients

    @cached_property
    def reduced_gradients(self) -> int:
        """Return the bytes of the gradients that a rank has after they are reduced."""
        return self._trained_bytes(2, storage(1, self.rank.gradient))

    @cached_property
    def working(self) -> int:
        """Return the bytes of the weights in the formats in which layers use them."""
        weights = self.weights
        dense, experts = weights.dense + weights.frozen, weights.experts + weights.frozen_experts
        # Elements of the matrices of linear layers: dense ones, and of experts.
        narrow = narrow_experts = 0
        for block in (block for layer in self.layers for block in layer if self.rank.precision.quantizes):
            shapes = matrix_shapes(self.rank, block)
            narrow += sum(rows * columns for rows, columns in shapes)
            if isinstance(block, Experts):
                expert = sum(rows * columns for rows, columns in shapes[-2:])
                narrow -= expert
                narrow_experts += block.experts // self.rank.layout.ep * expert
        if not self.shards_weights:
            return self._bytes_in_use(dense + experts, narrow + narrow_experts)
        return self._shard(self._bytes_in_use(dense, narrow), self._bytes_in_use(experts, narrow_experts))

    def _bytes_in_use(self, elements: int, narrow: int) -> int:
        """Return the bytes of ``elements`` weights; ``narrow`` of them are used in the number format of
        matrix products.
        """
        rank, training = self.rank, self.rank.training
        element = rank.precision.matmul
        layouts = 2 if training.transposed_weights or element == "mxfp8" else 1
        copies = layouts * storage(narrow, element)
        frozen = self.serves or training.lora_rank
        if training.narrow_weights and (dtype(element).bits == 8 or frozen):
            elements -= narrow
        return storage(elements, rank.precision.compute) + copies

    @cached_property
    def placeholders(self) -> int:
        """Bytes of the placeholder gradients of Transformer Engine: autograd needs a gradient tensor,
        although the gradients are added directly to the accumulated gradients. All matrices of one shape
        share a placeholder.
        """
        rank = self.rank
        if self.in_torch or not rank.trains_weights or self.shards_weights:
            return 0
        shapes = {shape for layer in self.layers for block in layer for shape in matrix_shapes(rank, block)}
        if self.last:
            shapes.add((-(-rank.model.vocab // rank.layout.tp), rank.hidden))
            if rank.model.mtp_layers:
                shapes.add((rank.hidden, 2 * rank.hidden))
        return storage(sum(rows * columns for rows, columns in shapes), rank.precision.compute)

    @cached_property
    def workspaces(self) -> int:
        """Bytes of the workspaces of matmul libraries. Megatron-Core has separate workspaces for layers, for
        other matmuls in both passes, and for four streams of experts.
        """
        if self.in_torch:
            return _WORKSPACE_BYTES
        has_experts = any(isinstance(block, Experts) for layer in self.layers for block in layer)
        return _WORKSPACE_BYTES * (7 if has_experts else 3)

    def gathered(self, layer: Layer | None) -> int:
        """Return the bytes of the gathered weights of a layer, or of the weights outside of layers (None)."""
        weights = self.rest if layer is None else self.of_layer(layer)
        elements = weights.dense + weights.experts + weights.frozen + weights.frozen_experts
        return storage(elements, self.rank.precision.compute)

    def trained(self, layer: Layer | None) -> int:
        """Return the trained parameters of a layer, or of the weights outside of layers (None)."""
        weights = self.rest if layer is None else self.of_layer(layer)
        return weights.dense + weights.experts

    @property
    def head(self) -> int:
        """Return the number of trained parameters of the head."""
        rank = self.rank
        return -(-rank.model.vocab // rank.layout.tp) * rank.hidden if self.rest.dense else 0

    def fixed(self) -> Parts:
        """Return the bytes, without gradients, that stay allocated during the whole step."""
        return total(
            self.parts,
            {"gradient placeholders": self.placeholders, "workspaces": self.workspaces},
        )


_UNUSED = "unused parts of blocks"
"""Memory of the allocator that no tensor uses."""
_STEADY = 4
"""Rounds of the pipeline after which the number of micro-batches in flight does not increase."""


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of the ranks of a pipeline stage. ``moment`` describes the time of the peak. ``parts`` are
    the allocated bytes by kind. ``pooled`` are the additional bytes that the allocator reserves (None:
    unknown), and ``outside`` the bytes that other libraries allocate.
    """

    stage: int
    moment: str
    parts: Mapping[str, int]
    pooled: Mapping[str, int] | None = field(default=None)
    outside: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def peak_bytes(self) -> int:
        """Bytes of all tensors at the peak."""
        return sum(self.parts.values())

    @property
    def filling(self) -> tuple[Filling, ...]:
        """Parts of the memory by the figure that includes them first; of each figure, the largest first."""
        reserved, outside = fillings(self.pooled or {}, "reserved"), fillings(self.outside, "device")
        return (*fillings(self.parts), *reserved, *outside)

    @property
    def device_bytes(self) -> int:
        """Bytes that the memory of the device must have: without unused parts of the allocator's blocks."""
        pools = {name: size for name, size in (self.pooled or {}).items() if name != _UNUSED}
        return self.peak_bytes + sum(pools.values()) + sum(self.outside.values())

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator reserves; NaN if unknown."""
        return math.nan if self.pooled is None else float(self.peak_bytes + sum(self.pooled.values()))


class _MemoryMoment(NamedTuple):
    """Point in a forward or backward pass, and the memory that the pass needs at that point."""

    name: str
    parts: Parts

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def memory_of(model: Model, layout: Layout, training: Training) -> tuple[StageMemory, ...]:
    """Return the memory of a rank of every stage. The layout must be valid (``check_layout``)."""
    rank = ModelRank(model, layout, training)
    stages = layers_of_stages(model, layout)
    return tuple(_StageAccount(rank, stage, chunks).memory() for stage, chunks in enumerate(stages))


def outside_memory(groups: Iterable[int], peers: int) -> Parts:
    """Return the bytes of the context of a GPU and of the buffers of the communication library. A rank is in
    a communicator for each size in ``groups`` (1: none), and exchanges messages with ``peers`` ranks.
    """
    buffers = sum(_PAIR_BYTES if size == 2 else _GROUP_BYTES for size in groups if size > 1)
    buffers += min(peers, _MOST_PEERS) * _PEER_BYTES
    return {"GPU context": _CONTEXT_BYTES, "communication library": buffers}


@dataclass(frozen=True)
class _StageAccount:
    """Memory account of a rank of a pipeline stage; ``chunks`` has the layer numbers of each of its virtual
    stages.
    """

    rank: ModelRank
    stage: int
    chunks: tuple[tuple[int, ...], ...]

    @cached_property
    def _layers(self) -> tuple[tuple[Layer, ...], ...]:
        all_layers = self.rank.model.all_layers
        return tuple(tuple(all_layers[number] for number in chunk) for chunk in self.chunks)

    @cached_property
    def _state(self) -> RankState:
        layers = tuple(layer for chunk in self._layers for layer in chunk)
        return RankState(self.rank, layers, self.stage == 0, self.stage == self.rank.layout.pp - 1)

    @property
    def _accumulates(self) -> bool:
        """True if gradients are summed over several micro-batches."""
        return micro_batches(self.rank.layout, self.rank.training) > 1

    def _has_head(self, chunk: int) -> bool:
        return self._state.last and chunk == len(self.chunks) - 1

    @cached_property
    def _saved(self) -> tuple[tuple[Parts, ...], ...]:
        """Return the saved activations of each layer of each chunk (virtual stage)."""
        chunks: list[tuple[Parts, ...]] = []
        start = 0
        for layers in self._layers:
            chunks.append(
                tuple(saved_of_layer(self.rank, layer, index) for index, layer in enumerate(layers, start))
            )
            start += len(layers)
        return tuple(chunks)

    @cached_property
    def _stream(self) -> int:
        return storage(self.rank.rows * self.rank.hidden, self.rank.precision.compute)

    @cached_property
    def _whole_stream(self) -> int:
        return storage(self.rank.tokens * self.rank.hidden, self.rank.precision.compute)

    def _in_flight(self, chunk: int) -> Parts:
        """Return the memory that a micro-batch needs in ``chunk`` between its forward and its backward
        pass.
        """
        saved = total(*self._saved[chunk])
        if not self._has_head(chunk):
            return saved
        compute = storage(self._logits, self.rank.precision.compute)
        loss = compute if self.rank.training.fused_loss else 4 * self._logits
        return total(saved, total(self._last_norm, {"logits and loss": loss}))

    @property
    def _logits(self) -> int:
        """Number of logits of a micro-batch on a rank."""
        heads = 1 + self.rank.model.mtp_layers
        return self.rank.tokens * -(-self.rank.model.vocab // self.rank.layout.tp) * heads

    @property
    def _last_norm(self) -> Parts:
        """Bytes saved by the norms after the layers.

        The last norm saves its input and its result, once per head. Each layer of multi-token prediction has
        a further head. It also adds two norms, for the hidden stream and the embedding.
        """
        norms = 1 + 3 * self.rank.model.mtp_layers
        return {"norms and residuals": 2 * norms * self._stream}

    @property
    def _loss(self) -> int:
        """Peak bytes of logits and loss, which are reached in the backward pass.

        With a fused loss, the gradient replaces the logits, or is fused into the matmuls that read it (XLA).
        If PyTorch compiles the loss, the gradient is an additional tensor. Without fusion, PyTorch makes
        32-bit logits and their log-softmax; in the backward pass the log-softmax, its gradient and the
        gradient of the logits exist together. Megatron-Core has one 32-bit copy, and copies it once more for
        a scatter.
        """
        count, training = self._logits, self.rank.training
        narrow = storage(count, self.rank.precision.compute)
        if training.fused_loss:
            return 2 * narrow if training.style == "torchtitan" else narrow
        return narrow + 8 * count if training.style == "megatron" else 12 * count

    def _gathered(self, chunk: int, position: int, *, backward: bool) -> Parts:
        """Return the bytes of gathered weights that exist while the layer at ``position`` of ``chunk`` runs.

        With ZeRO-3 these are the weights outside of layers (except in XLA), the weights of the layer, and the
        weights of the next layer if they are gathered in advance. With ZeRO-2 these are all weights, except
        in Megatron-Core, and also if weights are kept gathered during the step. With other levels there are
        none. In the backward pass the gradients of the layer are added.
        """
        state, training, zero = self._state, self.rank.training, self.rank.layout.zero
        layers = self._layers[chunk]
        gathered: list[Layer | None]
        if (zero == 2 and state.in_torch) or self.rank.keeps_weights:
            gathered = [None, *state.layers]
        elif zero == 3:
            gathered = [layers[position]] if state.in_xla else [None, layers[position]]
            ahead = position - 1 if backward else position + 1
            if training.overlap.parameters and not state.in_xla and 0 <= ahead < len(layers):
                gathered.append(layers[ahead])
        else:
            return {}
        parts = {"gathered weights": sum(state.gathered(layer) for layer in gathered)}
        if backward:
            outside = self._has_head(chunk) and not state.in_xla
            trained = state.trained(layers[position]) + (state.head if outside else 0)
            parts["gradients before they are reduced"] = storage(trained, self.rank.precision.compute)
        return parts

    def _forward(self, chunk: int) -> Iterator[_MemoryMoment]:
        before: Parts = {}
        for position, (layer, saved) in enumerate(zip(self._layers[chunk], self._saved[chunk], strict=True)):
            gathered = self._gathered(chunk, position, backward=False)
            work = {"working space": work_of_layer(self.rank, layer).forward}
            before = total(before, saved)
            yield _MemoryMoment("forward pass of a layer", total(before, gathered, work))

    def _backward(self, chunk: int) -> Iterator[_MemoryMoment]:
        """Yield the moments of a backward pass.

        PyTorch's FSDP in a pipeline saves the whole gradients of each layer until the end of the last
        backward pass. If this pass is the only one, they are part of the moments.
        """
        layers, saved = self._layers[chunk], self._saved[chunk]
        if self._has_head(chunk):
            yield from self._backward_of_head(chunk)
        before = total(*saved)
        collects = self.rank.keeps_weights and not self._accumulates
        finished = 0
        for position in reversed(range(len(layers))):
            before = {name: size - saved[position].get(name, 0) for name, size in before.items()}
            layer = layers[position]
            current = max(saved[position], whole_of_layer(self.rank, layer), key=_sum)
            work = {"working space": work_of_layer(self.rank, layer).backward}
            gradients = {"gradients": storage(finished, self.rank.gradient)}
            parts = total(before, current, work, self._gathered(chunk, position, backward=True), gradients)
            yield _MemoryMoment("backward pass of a layer", parts)
            finished += self._state.trained(layer) if collects else 0
            if self.chunks[chunk][position] >= len(self.rank.model.layers) and self._state.rest.dense:
                embedding = self._embedding()
                yield embedding._replace(parts=total(before, embedding.parts, gradients))
        gradients = {"gradients": storage(finished, self.rank.gradient)}
        if self._state.first and chunk == 0 and self._state.rest.dense:
            embedding = self._embedding()
            yield embedding._replace(parts=total(embedding.parts, gradients))
        if collects:
            gathered = self._gathered(chunk, 0, backward=False)
            parts = total(gathered, {"gradients": self._state.gradients})
            yield _MemoryMoment("reduction of gradients", parts)

    def _backward_of_head(self, chunk: int) -> Iterator[_MemoryMoment]:
        layers = self._layers[chunk]
        gathers = layers and not self._state.in_xla
        gathered = self._gathered(chunk, len(layers) - 1, backward=False) if gathers else {}
        held = total(*self._saved[chunk], self._last_norm, gathered)
        yield _MemoryMoment("gradient of the loss", total(held, {"logits and loss": self._loss}))
        narrow = storage(self._logits, self.rank.precision.compute)
        work = self._whole_stream + (self._stream if self.rank.layout.has_sequence_parallel else 0)
        parts = {"logits and loss": narrow, "working space": work}
        if self._state.in_torch:
            gradient = storage(self._state.head, self.rank.precision.compute)
            parts["gradients before they are reduced"] = gradient
        yield _MemoryMoment("backward pass of the head", total(held, parts))

    def _embedding(self) -> _MemoryMoment:
        """Return the memory while the gradient of the embedding is computed. Before it is accumulated or
        reduced, this gradient is a whole tensor in the format of activations.
        """
        state, rank = self._state, self.rank
        table = -(-rank.model.vocab // rank.layout.tp) * rank.hidden
        parts = {"gradients before they are reduced": storage(table, rank.precision.compute)}
        if state.in_torch and state.shards_weights:
            rest = state.trained(None)
            parts["gradients before they are reduced"] = storage(rest, rank.precision.compute)
            if rank.keeps_weights:
                parts |= self._gathered(0, 0, backward=False)
            else:
                parts["gradients before they are reduced"] += storage(rest, rank.gradient)
                parts["gathered weights"] = state.gathered(None)
        return _MemoryMoment("gradient of the embedding", parts)

    def _fixed(self, *, step: bool = False) -> Parts:
        """Return the memory that does not depend on the running pass; with ``step``, the memory during the
        optimizer step.
        """
        layout, rank, state = self.rank.layout, self.rank, self._state
        parts = state.fixed()
        in_passes = state.gradients if self._accumulates or not state.in_torch else 0
        parts["gradients"] = state.reduced_gradients if step else in_passes
        buffers = self._whole_stream if layout.has_sequence_parallel else 0
        buffers += self._stream if layout.pp > 1 else 0
        parts["communication buffers"] = buffers
        parts["token numbers and masks"] = 32 * rank.tokens if self._state.first or self._state.last else 0
        return parts

    def memory(self) -> StageMemory:
        """Return the memory at its peak over the schedule."""
        # Find the memory peak: the number of micro-batches in flight in each chunk, and the memory of the
        # running pass at its own peak.
        layout, training = self.rank.layout, self.rank.training
        chunks = range(len(self.chunks))
        nothing = _MemoryMoment("", {})

        def size_of(moment: _MemoryMoment) -> int:
            return moment.bytes

        forward = [max(self._forward(chunk), key=size_of, default=nothing) for chunk in chunks]
        backward = [max(self._backward(chunk), key=size_of, default=nothing) for chunk in chunks]
        sizes = [_sum(self._in_flight(chunk)) for chunk in chunks]
        count = min(micro_batches(layout, training), _STEADY * layout.pp)
        order = order_of(training.schedule, layout, self.stage, count, overlaps=training.overlap.microbatches)
        last_kind = "weights" if any(action.kind == "weights" for action in order) else "backward"
        joins = beside_previous(order) if training.overlap.microbatches else [False] * len(order)
        layer = [max(self._saved[chunk], key=_sum, default=nothing.parts) for chunk in chunks]
        in_flight = dict.fromkeys(chunks, 0)
        most, peak = -1, (dict(in_flight), nothing)
        for number, (kind, _, chunk) in enumerate(order):
            in_flight[chunk] -= kind != "forward"
            if kind != "weights":
                moment = forward[chunk] if kind == "forward" else backward[chunk]
                waiting = dict(in_flight)
                if joins[number] or any(joins[number + 1 : number + 2]):
                    # Two passes run at the same time: the forward pass saves the activations of a layer when
                    # the backward pass has freed those of another one. One layer exists in both.
                    beside = order[number - 1 if joins[number] else number + 1].chunk
                    waiting[beside] -= 1
                    moment = moment._replace(parts=total(moment.parts, layer[beside]))
                others = sum(held * sizes[other] for other, held in waiting.items())
                if others + moment.bytes > most:
                    most, peak = others + moment.bytes, (waiting, moment)
            in_flight[chunk] += kind != last_kind
        in_flight, moment = peak
        fixed = self._fixed()
        passes = [
            {name: count * size for name, size in self._in_flight(chunk).items()}
            for chunk, count in in_flight.items()
        ]
        parts = total(fixed, *passes, moment.parts)
        has_gradients = fixed["gradients"] or self.rank.keeps_weights
        in_passes = _sum(parts) + (0 if has_gradients else self._state.reduced_gradients)
        step = self._fixed(step=True)
        name = moment.name
        if sum(step.values()) > sum(parts.values()):
            parts, name = step, "optimizer step"
        parts = {kind: size for kind, size in parts.items() if size}
        return StageMemory(self.stage, name, parts, self._pooled(_sum(parts), in_passes), self._outside())

    def _pooled(self, allocated: int, in_passes: int) -> Parts | None:
        """Return the additional bytes that the allocator reserves. None if they are unknown. ``allocated``
        are the bytes of all tensors at the peak, ``in_passes`` those of the fullest pass with the gradients.

        PyTorch's FSDP (torchtitan with ZeRO-3) has memory pools of other streams. These hold gathered
        weights, gradients that are being reduced, and their shards unless ``allocated`` includes them. Blocks
        of 16-bit logits are also counted, because they are too small to be reused for 32-bit logits. For
        Megatron-Core without sharded gradients these are the unused parts of blocks.
        """
        state, training = self._state, self.rank.training
        if training.style == "megatron" and self.rank.layout.zero < 2:
            return {_UNUSED: round(_UNUSED_PARTS * allocated)}
        if training.style != "torchtitan" or not state.shards_weights:
            return None
        groups = (None, *dict.fromkeys(state.layers))
        reduced = storage(max(state.trained(layer) for layer in groups), self.rank.gradient)
        logits = (
            0 if training.fused_loss or not state.last else storage(self._logits, self.rank.precision.compute)
        )
        return {
            "pool of gathers": max(state.gathered(layer) for layer in groups),
            "pool of reductions": reduced + max(in_passes - allocated, 0),
            "room of 16-bit logits": logits,
        }

    def _outside(self) -> Parts:
        """Return the bytes that other libraries allocate. Empty for XLA (MaxText), which runs on TPUs too.

        Frameworks make a communicator for each of the groups of tensor-, context-, data- and
        expert-parallel ranks, of the stages, and of all ranks.
        """
        layout = self.rank.layout
        if self.rank.training.style == "maxtext":
            return {}
        gathers_keys = not (layout.ring_attention or layout.context_all_to_all)
        copies = layout.edp if layout.ep > 1 or layout.etp > 1 else 1
        everyone = layout.ranks if layout.ranks > layout.replicas else 1
        groups = (layout.tp, layout.cp if gathers_keys else 1, layout.replicas, layout.pp, layout.etp, copies)
        peers = layout.ep - 1
        if layout.ring_attention:
            peers += min(layout.cp - 1, 2)
        elif layout.context_all_to_all:
            peers += layout.cp - 1
        return outside_memory((*groups, everyone), peers)


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())
