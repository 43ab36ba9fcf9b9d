"""Kernels of serving steps on a grid of sizes, from which the times of any step are interpolated.

Most kernels of a step depend only on its number of tokens. Attention depends on the cached tokens of the
decoding sequences, or on the prompts and the tokens before them; the head on the number of sampled tokens.
Each of these parts has a separate grid. Equal layers are written once and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from hespas.generators.llm.activations import storage
from hespas.generators.llm.attention import latent_layers
from hespas.generators.llm.kernels import KernelWriter
from hespas.generators.llm.layers import ModelEnds
from hespas.generators.llm.model import Attention, Experts, LatentAttention, Mamba
from hespas.generators.llm.schedule import PassTemplate
from hespas.generators.llm.server_memory import ServingLoad, ServingMemory, serving_memory
from hespas.generators.llm.serving import SequenceBatch, ServingStage, ServingStep
from hespas.graph import OpGraph
from hespas.graph.builder import GraphBuilder
from hespas.graph.columns import FloatArray, IntArray
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device

__all__ = [
    "ADAPTER_GB_PER_S",
    "LatticeGrids",
    "ServingLatticeKernels",
    "cache_transfer_ns",
    "cached_tokens",
    "draft_layer",
    "lattice_kernels",
    "with_draft_layer",
]

_LatticePart = Literal["tokens", "rows", "decode", "prompts"]
_PARTS: tuple[_LatticePart, ...] = ("tokens", "rows", "decode", "prompts")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatticeGrids:
    """Sizes of serving steps at which kernels are estimated (ascending grid points).

    ``tokens`` are the tokens of a step, ``rows`` the sampled tokens. Decode attention has a grid of sequences
    (``batch``) and cached tokens per sequence (``context``). Prompt attention has a grid of ``prompts``, new
    tokens per prompt (``length``), and cached tokens before them (``before``).
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    batch: tuple[int, ...]
    context: tuple[int, ...]
    prompts: tuple[int, ...]
    length: tuple[int, ...]
    before: tuple[int, ...]

    @classmethod
    def up_to(cls, *, tokens: int, sequences: int, context: int) -> LatticeGrids:
        """Return grids that cover steps of up to ``tokens`` tokens and ``sequences`` sequences, with up to
        ``context`` tokens each. Grids for other limits have the same points up to the smaller limit, so step
        times within the limits do not depend on them.
        """
        return cls(
            tokens=_points(1, tokens, has_middle=True),
            rows=_points(1, sequences),
            batch=_points(1, sequences, has_middle=True),
            context=_points(64, context),
            prompts=_points(1, min(sequences, tokens // 16), 4),
            length=_points(16, min(tokens, context)),
            before=(0, *_points(512, context, 4)),
        )


def _points(low: int, high: int, factor: int = 2, *, has_middle: bool = False) -> tuple[int, ...]:
    """Return integers from ``low`` to the first one that is not below ``high``, each ``factor`` times the
    previous one. ``has_middle`` adds 1.5 times each even point.
    """
    points, base = [low], low
    while points[-1] < high:
        if has_middle and base % 2 == 0 and points[-1] == base:
            points.append(base * 3 // 2)
        else:
            base *= factor
            points.append(base)
    return tuple(points)


@dataclass(frozen=True, slots=True, eq=False)
class ServingLatticeKernels:
    """Kernels at all grid points, as nodes of one ``graph``.

    The columns have one entry per kernel: ``node[i]`` is executed ``times[i]`` times at grid point
    ``point[i]``. ``part[i]`` is the part of the step to which it belongs (kernels that depend on the same
    sizes). Points are in the order of the grids; the last size varies fastest.
    """

    grids: LatticeGrids
    graph: OpGraph
    node: IntArray
    part: IntArray
    point: IntArray
    times: FloatArray

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts of a step, indexed by the column ``part``."""
        return _PARTS


@dataclass
class _LatticeNodes:
    """Columns of :class:`ServingLatticeKernels` while they are filled."""

    node: list[int] = field(default_factory=list[int])
    part: list[int] = field(default_factory=list[int])
    point: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])

    def add(self, nodes: Sequence[int], part: _LatticePart, point: int, times: float) -> None:
        self.node += nodes
        self.part += [_PARTS.index(part)] * len(nodes)
        self.point += [point] * len(nodes)
        self.times += [times] * len(nodes)


def lattice_kernels(step: ServingStep, grids: LatticeGrids, *, queries: int = 1) -> ServingLatticeKernels:
    """Return the kernels of one rank at every grid point. Decoding sequences have ``queries`` new tokens
    each: more than one if the step verifies speculative tokens.

    Raises ``UsageError`` with the name of a violated layout rule. Raises ``UnsupportedError`` for pipelines,
    and for models that have states instead of a KV cache.
    """
    _check_supported(step)
    step.account()
    builder, nodes = GraphBuilder(step.name), _LatticeNodes()
    writer = _LatticeWriter(step, builder, nodes)
    for point, count in enumerate(grids.tokens):
        writer.tokens(point, count)
    for point, count in enumerate(grids.rows):
        writer.rows(point, count)
    pairs = [(batch, context) for batch in grids.batch for context in grids.context]
    for point, (batch, context) in enumerate(pairs):
        writer.attention("decode", point, SequenceBatch(batch, queries, context))
    prompts = [
        (count, length, before)
        for count in grids.prompts
        for length in grids.length
        for before in grids.before
    ]
    for point, (count, length, before) in enumerate(prompts):
        writer.attention("prompts", point, SequenceBatch(count, length, before, is_prompt=True))
    graph = builder.build()
    makes_keys = np.array([name.endswith(_KEY_KERNELS) for name in graph.strings], np.bool_)[graph.name_id]
    node, part = np.array(nodes.node, np.int64), np.array(nodes.part, np.int64)
    selected = (part != _PARTS.index("tokens")) | ~makes_keys[node]
    return ServingLatticeKernels(
        grids=grids,
        graph=graph,
        node=node[selected],
        part=part[selected],
        point=np.array(nodes.point, np.int64)[selected],
        times=np.array(nodes.times)[selected],
    )


def _check_supported(step: ServingStep) -> None:
    if step.layout.pp > 1:
        raise UnsupportedError(
            f"`pp={step.layout.pp}`: serving with a pipeline cannot be simulated",
            hint="set `pp=1`, and a larger `tp`",
        )
    if any(isinstance(block, Mamba) for block in step.model.blocks()):
        raise UnsupportedError(
            f"{step.model.name} has Mamba layers, whose serving cannot be simulated",
            hint="choose a model without Mamba layers, or generate single steps: hespas generate llm",
        )


_KEY_KERNELS = ("kv_up.quantize", "kv_up", "kv_join")
"""Kernels that make keys and values from latents, of prompts and of the tokens before them."""


@dataclass
class _LatticeWriter:
    """Writer of the kernels of a serving step at all grid points (sizes) into one graph, so that they are
    estimated together.
    """

    step: ServingStep
    builder: GraphBuilder
    nodes: _LatticeNodes

    def _stage(
        self, sequences: SequenceBatch, *, has_cores: bool = True
    ) -> tuple[ServingStage, KernelWriter]:
        stage = ServingStage(self.step, 0, "decode", self.step.name, (sequences,), has_cores)
        return stage, KernelWriter(self.builder, PassTemplate("forward", 0, 0), tf32=self.step.precision.tf32)

    def tokens(self, point: int, count: int) -> None:
        """Write the kernels that depend only on the number of tokens, for a prompt of ``count`` tokens: all
        kernels except attention and the head.
        """
        stage, k = self._stage(SequenceBatch(1, count, 0, is_prompt=True), has_cores=False)
        start = len(self.builder)
        x = ModelEnds(stage.rank).embed(k)
        self._add(start, "tokens", point, 1)
        for layer, times in Counter(self.step.model.layers).items():
            start = len(self.builder)
            x = stage.rank.add_pending(k, stage.layer(k, self.step.model.layers.index(layer), x))
            self._add(start, "tokens", point, times)

    def rows(self, point: int, count: int) -> None:
        """Write the head for ``count`` sampled tokens."""
        stage, k = self._stage(SequenceBatch(count, 1, 1))
        start = len(self.builder)
        stage.sample(k, -1)
        self._add(start, "rows", point, 1)

    def attention(self, part: _LatticePart, point: int, sequences: SequenceBatch) -> None:
        """Write the attention kernels of all layers for ``sequences``. The projection from latents to keys
        and values is included if attention needs it. All other projections depend only on the number of
        tokens and are left out.
        """
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
            self._add(start, part, point, times)

    def _add(self, start: int, part: _LatticePart, point: int, times: int) -> None:
        self.nodes.add(range(start, len(self.builder)), part, point, times)


_CONTEXTS = (1 << 14, 1 << 15)
"""Context lengths from which the memory per cached token is derived."""


def draft_layer(step: ServingStep) -> ServingStep:
    """Return the serving step of an additional layer that generates speculative tokens (MTP, EAGLE): the
    embedding, a layer as the last one of the model, and the head.
    """
    return replace(step, model=replace(step.model, layers=step.model.layers[-1:]))


def with_draft_layer(step: ServingStep) -> ServingStep:
    """Return a serving step with the additional layer of :func:`draft_layer`, which shares the embedding and
    the head.
    """
    layers = step.model.layers
    return replace(step, model=replace(step.model, layers=(*layers, layers[-1])))


def cached_tokens(
    step: ServingStep,
    device: Device,
    memory_share: float,
    *,
    tokens: int,
    sequences: int,
    draft: ServingStep | None = None,
) -> float:
    """Return the KV-cache capacity of a rank: the number of tokens, over all sequences, that fit into
    ``memory_share`` of the memory of ``device`` after weights and working memory of the model and of a
    ``draft`` model. On a GPU, the context and the buffers of the communication library are subtracted too, as
    vLLM does.

    The working memory is for steps with up to ``tokens`` tokens and ``sequences`` sequences. The result is 0
    or less if there is no memory left for the cache. Raises the errors of :func:`lattice_kernels`.
    """
    fixed_bytes, token_bytes, outside_bytes = _cache_bytes(step, tokens, sequences)
    if device.kind == "gpu":
        fixed_bytes += outside_bytes
    if draft is not None:
        drafted_bytes = _cache_bytes(draft, tokens, sequences)
        fixed_bytes, token_bytes = fixed_bytes + drafted_bytes[0], token_bytes + drafted_bytes[1]
    return (device.main_memory.capacity_bytes * memory_share - fixed_bytes) / token_bytes


def _cache_bytes(step: ServingStep, tokens: int, sequences: int) -> tuple[float, float, float]:
    """Return the bytes of weights and working memory of a rank, the bytes of a cached token, and the bytes of
    other libraries.
    """
    _check_supported(step)

    def fullest(context: int) -> ServingMemory:
        serving = ServingLoad(
            batch=1, context=context, pass_tokens=max(tokens, sequences), kv_format=step.cache,
            page_tokens=step.page, precision=step.precision, fused=step.fused,
        )  # fmt: skip
        stages = serving_memory(step.model, replace(step.layout, zero=0), serving)
        return max(stages, key=lambda stage: stage.peak_bytes)

    memory, longer = (fullest(context) for context in _CONTEXTS)
    short, long = float(memory.peak_bytes), float(longer.peak_bytes)
    token_bytes = (long - short) / (_CONTEXTS[1] - _CONTEXTS[0])
    saved = 0.0  # by a narrower element type of experts
    for block in (block for layer in step.model.layers for block in layer):
        if isinstance(block, Experts) and step.experts:
            width, matrices = block.latent or step.model.hidden, 3 if block.gated else 2
            count = block.experts // step.layout.ep * (block.ffn // step.layout.etp) * width * matrices
            saved += storage(count, step.precision.matmul) - storage(count, step.experts)
    fixed = short - token_bytes * _CONTEXTS[0] - saved
    logits = 4.0 * sequences * -(-step.model.vocab // step.layout.tp)
    return fixed + logits, token_bytes, float(memory.device_bytes - memory.peak_bytes)


ADAPTER_GB_PER_S = 50.0
"""Rate of a network adapter of 400 Gb/s."""


def cache_transfer_ns(
    steps: Iterable[ServingStep], prompts: IntArray, gb_per_s: float = ADAPTER_GB_PER_S
) -> FloatArray:
    """Return the times [ns] in which a prefill server sends the KV caches of ``prompts`` tokens to a decode
    server, shape ``(prompts,)``; ``steps`` are their serving steps. The rank with the most bytes, which
    moves ``gb_per_s`` (0: no time), determines the time. Lengths between powers of two are interpolated.
    Raises ``UsageError`` for a layout that does not fit the model.
    """
    longest_ns = np.zeros(len(prompts))
    if not gb_per_s:
        return longest_ns
    longest = int(prompts.max(initial=1))
    lengths = [1 << power for power in range((longest - 1).bit_length() + 1)]
    for step in steps:
        layout = replace(step.layout, zero=0)
        loads = [
            ServingLoad(
                batch=1, context=length, kv_format=step.cache, page_tokens=1, precision=step.precision
            )
            for length in lengths
        ]
        held = [float(serving_memory(step.model, layout, load)[0].parts["keys and values"]) for load in loads]
        longest_ns = np.maximum(longest_ns, np.interp(prompts, lengths, held) / gb_per_s)
    return longest_ns
