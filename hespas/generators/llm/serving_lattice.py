"""The kernels of serving steps of many sizes, once each: what times of any step are interpolated from.

Most kernels of a step depend on its tokens alone; attention on what the sequences that decode have in the
cache, or on the prompts and what stands before them; the head on the tokens that are sampled. Each of these
parts has grid points of its own, and layers that are alike are written once and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from hespas.generators.llm.assemble import Part
from hespas.generators.llm.attention import latent_layers
from hespas.generators.llm.ends import Ends
from hespas.generators.llm.kept import storage
from hespas.generators.llm.kernels import Kernels
from hespas.generators.llm.model import Attention, Experts, LatentAttention, Mamba
from hespas.generators.llm.serving import Sequences, ServingStage, ServingStep
from hespas.generators.llm.serving_memory import Serving, serving_memory
from hespas.graph import OpGraph
from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError

__all__ = ["Grids", "LatticeKernels", "cached_tokens", "lattice_kernels"]

_Part = Literal["tokens", "rows", "decode", "prompts"]
_PARTS: tuple[_Part, ...] = ("tokens", "rows", "decode", "prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grids:
    """Ascending grid points: ``tokens`` of a step; ``rows`` that are sampled; ``batch`` sequences that decode
    with ``context`` tokens in the cache; ``prompts`` of ``length`` new tokens each behind ``before`` ones.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    batch: tuple[int, ...]
    context: tuple[int, ...]
    prompts: tuple[int, ...]
    length: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    def up_to(cls, *, tokens: int, sequences: int, context: int) -> Grids:
        """Grids of steps of so many tokens and sequences, each of at most ``context`` tokens."""
        longest = min(tokens, context)
        return cls(
            tokens=_between(1, tokens, 2.0**0.5),
            rows=_between(1, sequences, 2.0),
            batch=_between(1, sequences, 2.0**0.5),
            context=_between(64, context, 2.0),
            prompts=_between(1, max(1, min(sequences, tokens // 16)), 4.0),
            length=_between(16, max(longest, 16), 2.0),
            before=(0, *_between(512, context, 4.0)),
        )


def _between(low: int, high: int, factor: float) -> tuple[int, ...]:
    """Whole numbers that grow by a factor, both ends among them; steps of a token are whole."""
    found, value = [low], float(low)
    while (value := max(value * factor, found[-1] + 1)) < high:
        found.append(round(value))
    return (*found, high) if high > low else tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class LatticeKernels:
    """Kernels of all grid points, in one graph. Of node ``node[i]``, ``times[i]`` executions are part of
    point ``point[i]`` of :attr:`part` ``part[i]``, in order of the grids, the last one fastest.
    """

    grids: Grids
    graph: OpGraph
    node: IntArray
    part: IntArray
    point: IntArray
    times: FloatArray

    @property
    def parts(self) -> tuple[str, ...]:
        """What ``part`` numbers."""
        return _PARTS


@dataclass
class _Collected:
    """Nodes under way: of which part, which point, how often."""

    node: list[int] = field(default_factory=list[int])
    part: list[int] = field(default_factory=list[int])
    point: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])

    def take(self, nodes: Sequence[int], part: _Part, point: int, times: float) -> None:
        self.node += nodes
        self.part += [_PARTS.index(part)] * len(nodes)
        self.point += [point] * len(nodes)
        self.times += [times] * len(nodes)


def lattice_kernels(step: ServingStep, grids: Grids) -> LatticeKernels:
    """The kernels of a rank at every grid point. Raises ``UsageError`` that names the rule which the layout
    breaks, ``UnsupportedError`` for pipelines and for models with states instead of a cache.
    """
    _check_kept(step)
    step.account()
    builder, found = GraphBuilder(step.name), _Collected()
    writer = _Writer(step, builder, found)
    for place, count in enumerate(grids.tokens):
        writer.tokens(place, count)
    for place, count in enumerate(grids.rows):
        writer.rows(place, count)
    pairs = [(batch, context) for batch in grids.batch for context in grids.context]
    for place, (batch, context) in enumerate(pairs):
        writer.attention("decode", place, Sequences(batch, 1, context))
    prompts = [
        (count, length, before)
        for count in grids.prompts
        for length in grids.length
        for before in grids.before
    ]
    for place, (count, length, before) in enumerate(prompts):
        writer.attention("prompts", place, Sequences(count, length, before, is_prompt=True))
    graph = builder.build()
    of_keys = np.array([name.endswith(_OF_KEYS) for name in graph.strings], np.bool_)[graph.name_row]
    node, part = np.array(found.node, np.int64), np.array(found.part, np.int64)
    kept = (part != _PARTS.index("tokens")) | ~of_keys[node]
    return LatticeKernels(
        grids=grids,
        graph=graph,
        node=node[kept],
        part=part[kept],
        point=np.array(found.point, np.int64)[kept],
        times=np.array(found.times)[kept],
    )


def _check_kept(step: ServingStep) -> None:
    if step.layout.pp > 1:
        raise UnsupportedError("serving by a pipeline is not simulated", hint="`pp=1`, and a larger `tp`")
    if any(isinstance(block, Mamba) for block in step.model.blocks()):
        raise UnsupportedError(f"{step.model.name} keeps states, whose steps are not simulated")


_OF_KEYS = ("kv_up.quantize", "kv_up", "kv_join")
"""Kernels that make keys and values of latents: of prompts, and of the tokens before them."""


@dataclass
class _Writer:
    """Writes the kernels of points into one graph."""

    step: ServingStep
    builder: GraphBuilder
    found: _Collected

    def _stage(self, sequences: Sequences, *, has_cores: bool = True) -> tuple[ServingStage, Kernels]:
        stage = ServingStage(self.step, 0, "decode", self.step.name, (sequences,), has_cores)
        return stage, Kernels(self.builder, Part("forward", 0, 0), tf32=self.step.precision.tf32)

    def tokens(self, place: int, count: int) -> None:
        """All kernels but attention and the head: those of a prompt of so many tokens."""
        stage, k = self._stage(Sequences(1, count, 0, is_prompt=True), has_cores=False)
        start = len(self.builder)
        x = Ends(stage.rank).embed(k)
        self._take(start, "tokens", place, 1)
        for layer, times in Counter(self.step.model.layers).items():
            start = len(self.builder)
            x = stage.rank.settled(k, stage.layer(k, self.step.model.layers.index(layer), x))
            self._take(start, "tokens", place, times)

    def rows(self, place: int, count: int) -> None:
        """The head, of so many sampled tokens."""
        stage, k = self._stage(Sequences(count, 1, 1))
        start = len(self.builder)
        stage.sample(k, -1)
        self._take(start, "rows", place, 1)

    def attention(self, part: _Part, place: int, sequences: Sequences) -> None:
        """Attention of all layers, without the projections around it."""
        blocks = Counter(block for layer in self.step.model.layers for block in layer)
        for block, times in blocks.items():
            if not isinstance(block, Attention | LatentAttention):
                continue
            stage, k = self._stage(sequences)
            k.module = "layers.attention"
            start = len(self.builder)
            if isinstance(block, LatentAttention) and not stage.absorbs(block, sequences):
                rows = sequences.batch * (sequences.queries + sequences.context)
                stage.rank.linear(k, replace(latent_layers(stage.rank, block)[2], rows=rows), -1)
            stage.cores(k, block, -1, -1)
            self._take(start, part, place, times)

    def _take(self, start: int, part: _Part, place: int, times: int) -> None:
        self.found.take(range(start, len(self.builder)), part, place, times)


_CONTEXTS = (1 << 14, 1 << 15)


def cached_tokens(step: ServingStep, memory_bytes: float, *, tokens: int, sequences: int) -> float:
    """Tokens of all sequences for whose keys and values a rank has room, beside its weights and what steps of
    so many tokens and sequences work in; 0 or less where it has none. Raises ``UnsupportedError`` as
    :func:`lattice_kernels`.
    """
    _check_kept(step)

    def filled(context: int) -> float:
        serving = Serving(
            batch=1, context=context, pass_tokens=max(tokens, sequences), kv_format=step.cache,
            page_tokens=step.page, precision=step.precision,
        )  # fmt: skip
        parts = serving_memory(step.model, replace(step.layout, zero=0), serving)
        return float(max(each.peak_bytes for each in parts))

    short, long = (filled(context) for context in _CONTEXTS)
    each = (long - short) / (_CONTEXTS[1] - _CONTEXTS[0])
    fixed = short - each * _CONTEXTS[0] - _narrower_experts(step)
    logits = 4.0 * sequences * -(-step.model.vocab // step.layout.tp)
    return (memory_bytes - fixed - logits) / each


def _narrower_experts(step: ServingStep) -> float:
    """Bytes that experts of a rank take less than in the format of other matrices."""
    if not step.experts:
        return 0.0
    saved = 0.0
    for block in (block for layer in step.model.layers for block in layer):
        if isinstance(block, Experts):
            width, matrices = block.latent or step.model.hidden, 3 if block.gated else 2
            count = block.experts // step.layout.ep * (block.ffn // step.layout.etp) * width * matrices
            saved += storage(count, step.precision.matmul) - storage(count, step.experts)
    return saved
