"""One pipeline stage: its passes of a micro-batch, what begins and ends a step, and all in order.

Weights and gradients travel as frameworks have them travel. With a sharded optimizer (ZeRO-1) gradients are
reduce-scattered once a step and updated weights gathered, layer by layer, beside computation where that is
asked for. FSDP (ZeRO-2, -3) gathers the weights of a layer before its forward pass, and before its backward
pass where they were freed, one layer ahead, and reduce-scatters gradients after each micro-batch; so too with
what stands outside of layers, an embedding among it, whose backward pass does not read it. Experts' weights
are reduced over the ranks that hold the same experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from hespas.generators.llm.assemble import Instance, Part, assembled
from hespas.generators.llm.ends import Ends
from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.layers import backward_layer, forward_layer
from hespas.generators.llm.layout import Layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import Layer, Model
from hespas.generators.llm.offload import bytes_away, load_activations, ports_away, store_activations
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.schedule import order_of
from hespas.generators.llm.settings import Training
from hespas.generators.llm.weights import Weights, weights_of_layer, weights_of_rest
from hespas.graph import CollectiveKind, OpGraph, StridedGroups
from hespas.graph.builder import GraphBuilder

__all__ = ["StagePasses", "ordered_passes", "stage_graph", "stage_passes"]


def stage_graph(model: Model, layout: Layout, training: Training, stage: int, name: str) -> OpGraph:
    """What the ranks of a stage do in a step. O(nodes)."""
    passes = _Stage(model, layout, training, stage, name).passes()
    return ordered_passes(passes, layout, training, stage, micro_batches(layout, training))


class StagePasses(NamedTuple):
    """The passes of a stage, each written once: runs of nodes of ``graph``. ``variants`` are the numbers of
    ``parts`` by kind, chunk and whether they are that of the first forward or last backward pass of a step;
    ``end`` is what ends the step.
    """

    graph: OpGraph
    parts: tuple[Part, ...]
    variants: dict[tuple[str, int, bool], int]
    end: int

    def part(self, kind: str, chunk: int, *, special: bool) -> int:
        """The number of a pass; the special one is the only one where both do the same."""
        found = self.variants.get((kind, chunk, special))
        return self.variants[kind, chunk, True] if found is None else found


def stage_passes(model: Model, layout: Layout, training: Training, stage: int) -> StagePasses:
    """The passes of a stage apart from their order: what a schedule of passes is made of. O(nodes)."""
    return _Stage(model, layout, training, stage, f"{model.name}.stage{stage}").passes()


def ordered_passes(
    passes: StagePasses, layout: Layout, training: Training, stage: int, count: int
) -> OpGraph:
    """Return the step of a stage with ``count`` micro-batches: its passes in the order of the schedule. The
    passes may be of another stage that has the same layers. O(nodes of the step).
    """
    last = count - 1
    sequence: list[Instance] = []
    for action in order_of(training.schedule, layout, stage, count):
        special = action.micro_batch == (0 if action.kind == "forward" else last)
        part = passes.part(action.kind, action.chunk, special=special)
        sequence.append(Instance(part, action.kind, action.micro_batch))
    trips = 1
    if layout.pp == 1 and last > 2:
        trips = last - 1
        body = [each._replace(loop=True) for each in sequence[2:4]]
        sequence = sequence[:2] + body + sequence[-2:]
    sequence.append(Instance(passes.end, "end", -1))
    return assembled(passes.graph, passes.parts, sequence, trips=trips, tag_period=2 * layout.vp)


class _Share(NamedTuple):
    """Weights that several ranks hold: ``shards`` part one copy, ``copies`` hold the same part."""

    name: str
    trained: int
    frozen: int
    shards: StridedGroups
    copies: StridedGroups


@dataclass
class _Stage:
    model: Model
    layout: Layout
    training: Training
    stage: int
    name: str
    parts: list[Part] = field(default_factory=list[Part])

    @cached_property
    def builder(self) -> GraphBuilder:
        builder = GraphBuilder(self.name)
        builder.strings.add("micro-batches")
        return builder

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of layers of each chunk."""
        return layers_of_stages(self.model, self.layout)[self.stage]

    @property
    def splits(self) -> bool:
        """Whether gradients of weights have a pass of their own."""
        return self.training.schedule == "zero-bubble" and self.layout.pp > 1

    @property
    def has_variants(self) -> bool:
        """Whether the first forward and the last backward pass of a step do more than the others."""
        overlap = self.training.overlap
        gathers = self.layout.zero in {1, 2} and not self.frees_weights and overlap.parameters
        return gathers or (self.layout.zero < 2 and overlap.gradients)

    @property
    def frees_weights(self) -> bool:
        """Whether weights are gathered for each pass: FSDP, which keeps them until the backward pass where
        only gradients are sharded. Megatron-Core keeps them whole.
        """
        return self.layout.zero == 3 or (self.layout.zero == 2 and self.training.style != "megatron")

    @cached_property
    def rank(self) -> Rank:
        return Rank(self.model, self.layout, self.training, [] if self.splits else None)

    @cached_property
    def ends(self) -> Ends:
        return Ends(self.rank)

    def layer(self, number: int) -> Layer:
        return self.model.all_layers[number]

    # --- the step

    def passes(self) -> StagePasses:
        """All parts, and which is which."""
        last = micro_batches(self.layout, self.training) - 1
        variants: dict[tuple[str, int, bool], int] = {}
        for chunk in range(len(self.chunks)):
            for special in (True, False) if last and self.has_variants else (True,):
                # gradients of weights that a backward pass leaves are for the pass behind it
                for kind in ("forward", "backward", *(("weights",) if self.splits else ())):
                    variants[kind, chunk, special] = self._part(kind, chunk, special)
        end = self._end()
        return StagePasses(self.builder.build(), tuple(self.parts), variants, end)

    def _begin(self, kind: str, chunk: int) -> Kernels:
        part = Part(kind, chunk, len(self.builder))
        self.parts.append(part)
        return Kernels(self.builder, part, queues=True, tf32=self.rank.precision.tf32)

    def _part(self, kind: str, chunk: int, special: bool) -> int:
        k = self._begin(kind, chunk)
        {"forward": self._forward, "backward": self._backward, "weights": self._weights}[kind](k, special)
        k.part.end = len(self.builder)
        return len(self.parts) - 1

    # --- weights on their way

    def _gathered(self, k: Kernels, number: int, ahead: int) -> list[int]:
        """Gather a layer's weights; behind the node ``ahead``, so that not all are gathered at once."""
        k.module = f"layers.{number}"
        weights = weights_of_layer(self.model, self.layout, self.training, self.layer(number))
        return self._gather(k, weights, ahead)

    def _gather(self, k: Kernels, weights: Weights, ahead: int) -> list[int]:
        nodes: list[int] = []
        for share in self._shares(weights):
            elements = share.trained + (share.frozen if self.frees_weights else 0)
            if not elements or share.shards.group_size == 1:
                continue
            nodes.append(
                k.collective(
                    f"weights{share.name}.all_gather",
                    CollectiveKind.ALL_GATHER,
                    share.shards,
                    Tensor((elements,), self.training.precision.compute),
                    control=[ahead],
                    in_place=True,
                )
            )
        if ahead < 0 and k.part.kind != "end":
            k.part.begins += nodes
        return nodes

    def _shares(self, weights: Weights) -> Iterator[_Share]:
        """Dense weights and those of experts, where several ranks hold them. Without a sharded optimizer
        they all are copies.
        """
        groups = self.rank.groups
        if self.layout.zero:
            of_dense = groups.shards, groups.copies
            of_experts = groups.expert_shards, groups.expert_copies
        else:
            alone = StridedGroups.from_mesh([self.layout.ranks, 1], [1])
            of_dense, of_experts = (alone, groups.data), (alone, groups.expert_data)
        for each in (
            _Share("", weights.dense, weights.frozen, *of_dense),
            _Share(".experts", weights.experts, weights.frozen_experts, *of_experts),
        ):
            if (each.trained or each.frozen) and each.shards.group_size * each.copies.group_size > 1:
                yield each

    def _reducible(self, weights: Weights) -> list[_Share]:
        """Of those the ones that have gradients."""
        return [each for each in self._shares(weights) if each.trained]

    def _reduced(self, k: Kernels, weights: Weights, after: Sequence[Value]) -> list[int]:
        """Sum gradients over the ranks that hold the same weights, sharded where the optimizer is: a node for
        each of :meth:`_reducible`.
        """
        element, nodes = self.rank.gradient, list[int]()
        for name, trained, _, shards, copies in self._reducible(weights):
            node, before = -1, after
            if shards.group_size > 1:
                whole = Tensor((trained,), element)
                kind = CollectiveKind.REDUCE_SCATTER
                called = f"gradients{name}.reduce_scatter"
                node = k.collective(called, kind, shards, whole, after=before, in_place=True)
                before = [node]
            if copies.group_size > 1:
                shard = Tensor((-(-trained // shards.group_size),), element)
                called = f"gradients{name}{'.copies' if node >= 0 else ''}.all_reduce"
                node = k.collective(
                    called, CollectiveKind.ALL_REDUCE, copies, shard, after=before, in_place=True
                )
            nodes.append(node)
        return nodes

    def _weights_of(self, number: int) -> Weights:
        return weights_of_layer(self.model, self.layout, self.training, self.layer(number))

    @cached_property
    def rest(self) -> Weights:
        """Weights outside of layers: embedding, head, last norm."""
        return weights_of_rest(
            self.model,
            self.layout,
            self.training,
            first=self.stage == 0,
            last=self.stage == self.layout.pp - 1,
        )

    # --- passes

    def _is_first(self, chunk: int) -> bool:
        return self.stage == 0 and chunk == 0

    def _is_last(self, chunk: int) -> bool:
        return self.stage == self.layout.pp - 1 and chunk == self.layout.vp - 1

    def _has_rest(self, chunk: int) -> bool:
        """Whether what stands outside of layers is this chunk's: only one of a stage has any."""
        return self._is_first(chunk) or self._is_last(chunk)

    def _receive(self, k: Kernels, backward: bool) -> int:
        way = self.rank.groups.to_stage(-1 if backward else 1, wraps=self.layout.vp > 1)
        tag = 2 * k.part.chunk + backward
        return k.message("pipeline.recv", way, self.rank.stream, tag, sends=False)

    def _send(self, k: Kernels, x: Value, backward: bool) -> None:
        """To the next chunk, whose number a message bears: the same, or the next one from the last stage."""
        way = self.rank.groups.to_stage(-1 if backward else 1, wraps=self.layout.vp > 1)
        chunk = k.part.chunk
        chunk += (self.stage == self.layout.pp - 1) if not backward else -(self.stage == 0)
        k.module = ""
        node = k.message("pipeline.send", way, self.rank.stream, 2 * chunk + backward, sends=True, after=[x])
        if not self.training.overlap.pipeline:
            k.part.tail = node

    def _forward(self, k: Kernels, first: bool) -> None:
        chunk = k.part.chunk
        numbers = self.chunks[chunk]
        once = self.layout.zero in {1, 2} and first and self.training.overlap.parameters
        gathers = self.frees_weights or once
        if self.frees_weights and self._has_rest(chunk):
            k.module = "ends"
            k.follow = self._gather(k, self.rest, -1)
        x: Value = self.ends.embed(k) if self._is_first(chunk) else self._receive(k, backward=False)
        ahead = -1
        pending = self._gathered(k, numbers[0], -1) if gathers and numbers else []
        for place, number in enumerate(numbers):
            k.follow = [*k.follow, *pending]
            pending = []
            before = len(self.builder)
            if gathers and place + 1 < len(numbers):
                pending = self._gathered(k, numbers[place + 1], ahead)
            x = self._layer(k, number, x)
            ahead = k.first_compute(before)
            away = bytes_away(self.rank, self.layer(number), self._place(chunk, place))
            if away:
                store_activations(k, number, away)
        k.module = ""
        if self._is_last(chunk):
            self.ends.loss(k, x)
            return
        x = self.rank.settled(k, x)
        k.name_port("out", x)
        self._send(k, x, backward=False)

    def _layer(self, k: Kernels, number: int, x: Value) -> Value:
        if number < len(self.model.layers):
            return forward_layer(self.rank, k, self.layer(number), number, x)
        self.ends.loss(k, x)  # of the prediction before this one
        x = self.ends.next_token(k, number, x)
        return forward_layer(self.rank, k, self.layer(number), number, x)

    def _backward(self, k: Kernels, last: bool) -> None:
        chunk = k.part.chunk
        numbers = self.chunks[chunk]
        gathers, pending, ahead = self.layout.zero == 3, list[int](), -1
        if gathers and self._is_last(chunk):
            k.module = "ends"
            k.follow = self._gather(k, self.rest, -1)
        grad = self.ends.loss_backward(k) if self._is_last(chunk) else self._receive(k, backward=True)
        made_of_head, k.made = k.made, []
        if gathers and numbers:
            pending = self._gathered(k, numbers[-1], -1)
        pending += self._fetch(k, len(numbers) - 1, -1)
        for place in reversed(range(len(numbers))):
            number = numbers[place]
            k.follow, pending, before = [*k.follow, *pending], [], len(self.builder)
            if gathers and place:
                pending = self._gathered(k, numbers[place - 1], ahead)
            pending += self._fetch(k, place - 1, ahead)
            grad = self._layer_backward(k, number, grad, self._place(chunk, place))
            ahead = k.first_compute(before)
            k.module = f"layers.{number}"
            if not self.splits:
                self._reduce_here(k, number, k.part.tail, last)
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
            self._reduce_rest_here(k, [*made_of_head, k.part.tail])

    def _place(self, chunk: int, place: int) -> int:
        """Which of the stage's layers the ``place``-th of a chunk is."""
        return sum(map(len, self.chunks[:chunk])) + place

    def _fetch(self, k: Kernels, place: int, ahead: int) -> list[int]:
        """Activations of the ``place``-th layer of a chunk that are on the host, behind the node ``ahead``;
        what the layer's backward pass has to wait for where no value of it does.
        """
        chunk = k.part.chunk
        if place < 0:
            return []
        number = self.chunks[chunk][place]
        layer, nth = self.layer(number), self._place(chunk, place)
        away = bytes_away(self.rank, layer, nth)
        if not away:
            return []
        forward = next(each for each in self.parts if (each.kind, each.chunk) == ("forward", chunk))
        ports = ports_away(self.rank, layer, number, nth, forward.ports)
        node = load_activations(k, number, away, ahead, ports)
        return [] if ports else [node]

    def _layer_backward(self, k: Kernels, number: int, grad: Value, place: int) -> Value:
        grad = backward_layer(self.rank, k, self.layer(number), number, grad, place=place)
        if number < len(self.model.layers):
            return grad
        grad = self.ends.next_token_backward(k, number, grad)
        return self.ends.loss_backward(k, grad)

    def _reduce_here(self, k: Kernels, number: int, done: Value, last: bool) -> None:
        """Reduce a layer's gradients after its pass: each micro-batch with FSDP, else after the last."""
        if self.layout.zero >= 2 or (last and self.training.overlap.gradients):
            for place, node in enumerate(self._reduced(k, self._weights_of(number), [*k.made, done])):
                k.name_port(f"reduced.{number}.{place}", node)

    def _reduce_rest_here(self, k: Kernels, after: Sequence[Value]) -> None:
        """Reduce gradients of what stands outside of layers each micro-batch, with FSDP."""
        if self.layout.zero < 2 or not self._has_rest(k.part.chunk):
            return
        k.module = "ends"
        for place, node in enumerate(self._reduced(k, self.rest, after)):
            k.name_port(f"reduced.rest.{place}", node)

    def _weights(self, k: Kernels, last: bool) -> None:
        made = self.rank.deferred or []
        for make in made:
            make(k)
        k.module = ""
        k.name_port("done", k.part.tail)
        done: Value = "backward:done" if k.part.tail < 0 else k.part.tail
        for number in reversed(self.chunks[k.part.chunk]):
            k.module = f"layers.{number}"
            self._reduce_here(k, number, done, last)
        self._reduce_rest_here(k, [*k.made, done])
        if self.rank.deferred is not None:
            self.rank.deferred.clear()

    # --- the end of a step

    def _end(self) -> int:
        k = self._begin("end", 0)
        kind = "weights" if self.splits else "backward"
        reduced = list[Value]()
        early = self.layout.zero >= 2 or self.training.overlap.gradients
        for chunk, numbers in enumerate(self.chunks):
            done = self._done(chunk)
            reduced += done
            for number in numbers:
                k.module = f"layers.{number}"
                weights = self._weights_of(number)
                if early:
                    places = range(len(self._reducible(weights)))
                    reduced += [f"{kind}@{chunk}:reduced.{number}.{place}" for place in places]
                else:
                    reduced += self._reduced(k, weights, done)
        k.module = ""
        total = sum((self._weights_of(number) for numbers in self.chunks for number in numbers), self.rest)
        self.ends.finish(k, total, self._reduce_rest(k, reduced, total), self._regather)
        k.part.end = len(self.builder)
        return len(self.parts) - 1

    def _done(self, chunk: int) -> list[Value]:
        """When a chunk's passes are done: that of weights, whose products wait for gradients only, may be
        done before the backward pass has sent its last ones.
        """
        passes = {each.kind for each in self.parts if each.chunk == chunk and "done" in each.ports}
        return [f"{kind}@{chunk}:done" for kind in ("backward", "weights") if kind in passes]

    def _reduce_rest(self, k: Kernels, reduced: list[Value], total: Weights) -> list[Value]:
        """Gradients of what stands outside of layers, and of ``total`` what tensor ranks hold whole."""
        done = [each for each in reduced if isinstance(each, str) and each.endswith(":done")]
        k.module = "ends"
        nodes: list[Value] = list(reduced)
        if self.layout.zero >= 2:
            kind = "weights" if self.splits else "backward"
            chunk = next(filter(self._has_rest, range(self.layout.vp)), 0)
            places = range(len(self._reducible(self.rest)))
            nodes += [f"{kind}@{chunk}:reduced.rest.{place}" for place in places]
        else:
            nodes += self._reduced(k, self.rest, done)
        nodes += self.ends.shared_gradients(k, self.stage, done, total)
        k.module = ""
        return nodes

    def _regather(self, k: Kernels, updated: Value) -> None:
        """Updated weights, where they are not gathered ahead of their use."""
        if self.frees_weights or not self.layout.zero or isinstance(updated, str):
            return
        if not self.training.overlap.parameters:
            for numbers in self.chunks:
                for number in numbers:
                    self._gathered(k, number, updated)
        k.module = "ends"
        self._gather(k, self.rest, updated)
