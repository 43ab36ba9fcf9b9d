"""Peak memory of the ranks of each pipeline stage, and what fills it at that moment.

A step is followed through its schedule: every pass that has gone forward and not yet back holds what its
layers keep; beside that is what the running layer, the loss or the gradient of the embedding needs. Counted
is what tensors take (``torch.cuda.max_memory_allocated``), without the device's context and the buffers of
communication libraries. For PyTorch's own FSDP it is also known what the allocator
holds back (``max_memory_reserved``, which torchtitan prints): each stream has a pool of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hespas.generators.llm.kept import (
    Parts,
    kept_of_layer,
    storage,
    total,
    whole_of_layer,
    work_of_layer,
)
from hespas.generators.llm.layout import Layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import Layer, Model
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.schedule import order_of
from hespas.generators.llm.settings import Training
from hespas.generators.llm.state import State
from hespas.generators.spec import Filling, fillings

__all__ = ["StageMemory", "memory_of"]

_STEADY = 4
"""Rounds of the pipeline after which no more micro-batches are in flight."""


@dataclass(frozen=True)
class StageMemory:
    """The fullest moment of the ranks of a stage: ``parts`` are bytes by what they are of, ``pooled`` what
    the allocator holds back beside them, None where that is not known.
    """

    stage: int
    moment: str
    parts: Mapping[str, int]
    pooled: Mapping[str, int] | None = field(default=None)

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors."""
        return sum(self.parts.values())

    @property
    def filling(self) -> tuple[Filling, ...]:
        """What fills the memory, the most first."""
        return fillings(self.parts)

    @property
    def reserved_bytes(self) -> float:
        """Bytes that the allocator holds; NaN where not known."""
        return math.nan if self.pooled is None else float(self.peak_bytes + sum(self.pooled.values()))


class _Moment(NamedTuple):
    """A point in a pass, and what that pass holds then."""

    name: str
    parts: Parts

    @property
    def bytes(self) -> int:
        return sum(self.parts.values())


def memory_of(model: Model, layout: Layout, training: Training) -> tuple[StageMemory, ...]:
    """The memory of a rank of every stage. The layout must keep its rules (``check_layout``)."""
    rank = Rank(model, layout, training)
    stages = layers_of_stages(model, layout)
    return tuple(_Stage(rank, stage, chunks).memory() for stage, chunks in enumerate(stages))


@dataclass(frozen=True)
class _Stage:
    """One stage: the layers of each of its chunks by number."""

    rank: Rank
    stage: int
    chunks: tuple[tuple[int, ...], ...]

    @cached_property
    def _layers(self) -> tuple[tuple[Layer, ...], ...]:
        every = self.rank.model.all_layers
        return tuple(tuple(every[number] for number in chunk) for chunk in self.chunks)

    @cached_property
    def _state(self) -> State:
        layers = tuple(layer for chunk in self._layers for layer in chunk)
        return State(self.rank, layers, self.stage == 0, self.stage == self.rank.layout.pp - 1)

    def _has_head(self, chunk: int) -> bool:
        return self._state.last and chunk == len(self.chunks) - 1

    @cached_property
    def _kept(self) -> tuple[tuple[Parts, ...], ...]:
        """What each layer of each chunk keeps."""
        found: list[tuple[Parts, ...]] = []
        place = 0
        for layers in self._layers:
            found.append(
                tuple(kept_of_layer(self.rank, layer, place + each) for each, layer in enumerate(layers))
            )
            place += len(layers)
        return tuple(found)

    @cached_property
    def _stream(self) -> int:
        return storage(self.rank.rows * self.rank.hidden, self.rank.precision.compute)

    @cached_property
    def _whole_stream(self) -> int:
        return storage(self.rank.tokens * self.rank.hidden, self.rank.precision.compute)

    def _held(self, chunk: int) -> Parts:
        """What a pass that went forward and waits holds."""
        kept = total(*self._kept[chunk])
        return total(kept, self._ends()) if self._has_head(chunk) else kept

    # --- the end of the model

    def _heads(self) -> int:
        return 1 + self.rank.model.mtp_layers

    def _logits(self) -> int:
        """Logits of a micro-batch on a rank."""
        return self.rank.tokens * -(-self.rank.model.vocab // self.rank.layout.tp) * self._heads()

    def _last_norm(self) -> Parts:
        """What norms keep behind the layers: input and result of the last one for each head; for each further
        prediction those of two more, of the stream and of the embedding.
        """
        norms = self._heads() + 2 * (self._heads() - 1)
        return {"norms and residuals": 2 * norms * self._stream}

    def _ends(self) -> Parts:
        """What the last norm and the loss keep."""
        compute = storage(self._logits(), self.rank.precision.compute)
        kept = compute if self.rank.training.fused_loss else 4 * self._logits()
        return total(self._last_norm(), {"logits and loss": kept})

    def _loss(self) -> tuple[int, int]:
        """Bytes of logits and of the loss at most, forward and backward. Fused, the gradient takes the place
        of the logits, or is part of the products that read it (XLA); compiled by PyTorch it stands beside
        them. Else PyTorch makes 32-bit logits and their log-softmax, which backward stands beside its own
        gradient and that of logits; Megatron-Core works in one 32-bit copy, copied once to scatter into it.
        """
        count, training = self._logits(), self.rank.training
        narrow = storage(count, self.rank.precision.compute)
        if training.fused_loss:
            return narrow, 2 * narrow if training.style == "torchtitan" else narrow
        return (narrow + 4 * count, narrow + 8 * count) if training.style == "megatron" else (
            narrow + 8 * count, 12 * count
        )  # fmt: skip

    # --- moments

    def _gathered(self, chunk: int, place: int, *, back: bool) -> Parts:
        """Weights that are gathered while a layer runs: what stands outside of layers, its own, those of the
        next where they are fetched ahead; backward its gradients too.
        """
        state, training, zero = self._state, self.rank.training, self.rank.layout.zero
        layers = self._layers[chunk]
        if zero == 2 and state.in_torch:
            return {"gathered weights": sum(state.gathered(each) for each in (None, *state.layers))}
        if zero != 3:
            return {}
        near: list[Layer | None] = [layers[place]] if state.in_xla else [None, layers[place]]
        ahead = place - 1 if back else place + 1
        if training.overlap.parameters and not state.in_xla and 0 <= ahead < len(layers):
            near.append(layers[ahead])
        found = {"gathered weights": sum(state.gathered(each) for each in near)}
        if back:
            outside = self._has_head(chunk) and not state.in_xla
            trained = state.trained(layers[place]) + (state.head if outside else 0)
            found["gradients before they are reduced"] = storage(trained, self.rank.precision.compute)
        return found

    def _forward(self, chunk: int) -> Iterator[_Moment]:
        before: Parts = {}
        for place, (layer, kept) in enumerate(zip(self._layers[chunk], self._kept[chunk], strict=True)):
            gathered = self._gathered(chunk, place, back=False)
            work = {"working space": work_of_layer(self.rank, layer).forward}
            before = total(before, kept)
            yield _Moment("forward pass of a layer", total(before, gathered, work))
        if self._has_head(chunk):
            last = len(self._layers[chunk]) - 1
            gathered = self._gathered(chunk, last, back=False) if last >= 0 and not self._state.in_xla else {}
            loss = {"logits and loss": self._loss()[0]}
            yield _Moment("loss", total(before, self._last_norm(), loss, gathered))

    def _backward(self, chunk: int) -> Iterator[_Moment]:
        layers, kept = self._layers[chunk], self._kept[chunk]
        if self._has_head(chunk):
            yield from self._backward_of_head(chunk)
        before = total(*kept)
        for place in reversed(range(len(layers))):
            before = {name: size - kept[place].get(name, 0) for name, size in before.items()}
            layer = layers[place]
            now = max(kept[place], whole_of_layer(self.rank, layer), key=_sum)
            work = {"working space": work_of_layer(self.rank, layer).backward}
            parts = total(before, now, work, self._gathered(chunk, place, back=True))
            yield _Moment("backward pass of a layer", parts)
            if self.chunks[chunk][place] >= len(self.rank.model.layers) and self._state.rest.dense:
                embedding = self._embedding()
                yield embedding._replace(parts=total(before, embedding.parts))
        if self._state.first and chunk == 0 and self._state.rest.dense:
            yield self._embedding()

    def _backward_of_head(self, chunk: int) -> Iterator[_Moment]:
        layers = self._layers[chunk]
        gathered = self._gathered(chunk, len(layers) - 1, back=False) if layers else {}
        if self._state.in_xla:
            gathered = {}
        held = total(*self._kept[chunk], self._last_norm(), gathered)
        yield _Moment("gradient of the loss", total(held, {"logits and loss": self._loss()[1]}))
        narrow = storage(self._logits(), self.rank.precision.compute)
        work = self._whole_stream + (self._stream if self.rank.layout.has_sequence_parallel else 0)
        parts = {"logits and loss": narrow, "working space": work}
        if self._state.in_torch:
            gradient = storage(self._state.head, self.rank.precision.compute)
            parts["gradients before they are reduced"] = gradient
        yield _Moment("backward pass of the head", total(held, parts))

    def _embedding(self) -> _Moment:
        """The gradient of an embedding is made whole, in the format of activations, then added or reduced."""
        state, rank = self._state, self.rank
        table = -(-rank.model.vocab // rank.layout.tp) * rank.hidden
        parts = {"gradients before they are reduced": storage(table, rank.precision.compute)}
        if state.in_torch and state.shards_weights:
            rest = state.trained(None)
            parts["gradients before they are reduced"] = storage(rest, rank.precision.compute) + 4 * rest
            parts["gathered weights"] = state.gathered(None)
        return _Moment("gradient of the embedding", parts)

    # --- the schedule

    def _fixed(self, *, step: bool = False) -> Parts:
        layout, rank = self.rank.layout, self.rank
        found = self._state.fixed()
        many = micro_batches(layout, rank.training) > 1
        kept_all_step = not self._state.in_torch or many
        found["gradients"] = self._state.gradients if kept_all_step or step else 0
        buffers = self._whole_stream if layout.has_sequence_parallel else 0
        buffers += self._stream if layout.pp > 1 else 0
        found["communication buffers"] = buffers
        found["token numbers and masks"] = 32 * rank.tokens if self._state.first or self._state.last else 0
        return found

    def memory(self) -> StageMemory:
        """The fullest moment over the schedule."""
        held, moment = self._fullest()
        fixed = self._fixed()
        passes = [
            {name: count * size for name, size in self._held(chunk).items()} for chunk, count in held.items()
        ]
        parts = total(fixed, *passes, moment.parts)
        step = self._fixed(step=True)
        name = moment.name
        if sum(step.values()) > sum(parts.values()):
            parts, name = step, "optimizer step"
        kept = {what: size for what, size in parts.items() if size}
        return StageMemory(self.stage, name, kept, self._pooled())

    def _fullest(self) -> tuple[dict[int, int], _Moment]:
        """Passes of each chunk that wait at the fullest moment, and that moment of the running one."""
        layout, training = self.rank.layout, self.rank.training
        chunks = range(len(self.chunks))
        forward = {each: max(self._forward(each), key=_bytes, default=_Moment("", {})) for each in chunks}
        back = {each: max(self._backward(each), key=_bytes, default=_Moment("", {})) for each in chunks}
        waiting = {each: _sum(self._held(each)) for each in chunks}
        count = min(micro_batches(layout, training), _STEADY * layout.pp)
        order = order_of(training.schedule, layout, self.stage, count)
        ends = "weights" if any(each.kind == "weights" for each in order) else "backward"
        held = dict.fromkeys(chunks, 0)
        most, found = -1, (dict(held), _Moment("", {}))
        for kind, _, chunk in order:
            held[chunk] -= kind != "forward"
            if kind != "weights":
                moment = forward[chunk] if kind == "forward" else back[chunk]
                others = sum(held[each] * waiting[each] for each in chunks)
                if others + moment.bytes > most:
                    most, found = others + moment.bytes, (dict(held), moment)
            held[chunk] += kind != ends
        return found

    def _pooled(self) -> Parts | None:
        """What pools of streams hold beside the peak: weights as they are gathered, gradients as they are
        reduced in 32 bits and their shards, and 16-bit logits, whose room is too small for 32-bit ones.
        """
        state, training = self._state, self.rank.training
        if training.style != "torchtitan" or not state.shards_weights:
            return None
        groups = (None, *dict.fromkeys(state.layers))
        shards = 0 if self._fixed()["gradients"] else state.gradients
        logits = (
            0
            if training.fused_loss or not state.last
            else storage(self._logits(), self.rank.precision.compute)
        )
        return {
            "pool of gathers": max(state.gathered(each) for each in groups),
            "pool of reductions": 4 * max(state.trained(each) for each in groups) + shards,
            "room of 16-bit logits": logits,
        }


def _sum(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _bytes(moment: _Moment) -> int:
    return moment.bytes
