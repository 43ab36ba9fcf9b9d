"""One forward step of a language model that serves requests, with its cache of keys and values.

``prefill`` works on whole prompts, ``decode`` on one token of each sequence, ``mixed`` on one token of each
and a chunk of a prompt beside them (chunked prefill, arXiv 2308.16369), ``speculative`` on several drafted
tokens of each (2211.17192). Keys and values are in pages of a pool (2309.06180): a sequence reads whole
pages. Latent attention reads its latents, not keys and values: queries take the up-projection of keys in
(2405.04434, section 2.1.2). Where prefill and decode run on ranks of their own (disaggregated, 2401.09670),
the cache of a prompt goes from one to the other layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from hespas.generators.llm.assemble import Part
from hespas.generators.llm.attention import attended_pairs, heads_of, projection, queries_and_keys
from hespas.generators.llm.ends import Ends
from hespas.generators.llm.feedforward import forward_experts, forward_mlp
from hespas.generators.llm.flops import attention_flops
from hespas.generators.llm.kernels import AttentionShape, Kernels, Tensor, Value
from hespas.generators.llm.layout import Layout, check_layout, layers_of_stages
from hespas.generators.llm.mamba import Scanned, forward_mamba, served_states
from hespas.generators.llm.model import (
    BLOCK_NAMES,
    Attention,
    Block,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    matrix_parameters,
    model_parameters,
)
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.serving_experts import fused_experts
from hespas.generators.llm.serving_memory import Serving, ServingMemory, serving_memory
from hespas.generators.llm.settings import PRECISIONS, Precision, Style, Training
from hespas.generators.spec import MOST_COUNT, Account
from hespas.graph import (
    PROGRAM_BYTES,
    CollectiveKind,
    OpClass,
    OpGraph,
    Permutation,
    StepFacts,
    Workload,
    find_dtype,
)
from hespas.graph.builder import GraphBuilder
from hespas.graph.errors import UsageError

__all__ = ["PHASES", "Phase", "Sequences", "ServingStage", "ServingStep", "serving_layout"]


def serving_layout(model: Model, *, tp: int, dp: int, ep: int) -> Layout:
    """Return the layout of a server: ``tp`` ranks share each layer, ``dp`` replicas of attention each serve a
    part of the requests, experts are spread over ``ep`` ranks, and those that none spreads are shared by all.
    Replicas of a model without experts are servers of their own. Raises ``UsageError`` for ``ep`` without
    experts.
    """
    if not any(isinstance(block, Experts) for block in model.blocks()):
        if ep > 1:
            raise UsageError(f"{model.name} has no experts to spread", hint="`ep=1`")
        return Layout(tp=tp, ep=ep)
    ranks = dp * tp
    shared = ranks // ep if ep > 0 and ranks % ep == 0 else 1
    return Layout(dp=dp, tp=tp, ep=ep, etp=shared)


Phase = Literal["prefill", "decode", "mixed", "speculative", "disaggregated"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "speculative", "disaggregated")


class Sequences(NamedTuple):
    """``batch`` sequences of a step: so many new tokens each, behind ``context`` tokens in the cache; of a
    prompt, or decoded.
    """

    batch: int
    queries: int
    context: int
    is_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class ServingStep:
    """A step of serving: a generator. ``batch`` sequences on each data-parallel rank; ``context`` tokens of
    each are in the cache; ``prompt`` is the length of a prompt, or of the chunk of one beside decoding;
    ``drafts`` are tokens that a smaller model has guessed. ``cache`` is the element type of keys and values,
    ``page`` how many tokens a page of them holds.
    """

    model: Model
    layout: Layout
    phase: Phase = "decode"
    batch: int = 1
    context: int = 1024
    prompt: int = 1024
    drafts: int = 4
    cache: str = "bf16"
    page: int = 16
    precision: Precision = field(default_factory=lambda: PRECISIONS["bf16"])
    fused: bool = False
    """Kernels of a serving library: sums of the residual stream are part of norms, experts one kernel, and
    tensor ranks all-reduce whole rows.
    """
    experts: str = ""
    """Element type of experts in one kernel, where it is another than that of other matrices."""

    @property
    def name(self) -> str:
        """The model and the phase."""
        return f"{self.model.name}.{self.phase}"

    def sequences(self, phase: Phase | None = None) -> tuple[Sequences, ...]:
        """What a step works on."""
        decode = Sequences(self.batch, 1, self.context)
        match phase or self.phase:
            case "prefill":
                return (Sequences(self.batch, self.prompt, 0, is_prompt=True),)
            case "decode" | "disaggregated":
                return (decode,)
            case "mixed":
                return (decode, Sequences(1, self.prompt, self.context, is_prompt=True))
            case "speculative":
                return (Sequences(self.batch, 1 + self.drafts, self.context),)

    def account(self) -> Account:
        """Parameters of the model; FLOPs of all ranks; memory of a rank, which is that of the fullest pool
        where prefill and decode have their own.
        """
        self._check()
        pools = _pools(self.phase)
        flops = self.layout.dp * sum(self._flops(pool) for pool in pools)
        fullest = max((self._memory(pool) for pool in pools), key=lambda each: each.peak_bytes)
        return Account(
            parameters=model_parameters(self.model),
            model_flops_per_step=flops,
            hardware_flops_per_step=flops,
            peak_memory_bytes=float(fullest.peak_bytes),
            memory=fullest.filling,
        )

    def _memory(self, phase: Phase) -> ServingMemory:
        """Memory of a rank of a pool: that of the fullest stage."""
        return max(self._memory_of_stages(phase), key=lambda each: each.peak_bytes)

    def _program_bytes(self, memory: Iterable[ServingMemory]) -> dict[str, str]:
        """Return the metadata of classes with this memory: weights and cache are not values of a step."""
        held = [(sum(each.parts.get(name, 0) for name in _HELD), each.peak_bytes) for each in memory]
        return {PROGRAM_BYTES: ";".join(f"{size} {size} {size} {peak}" for size, peak in held)}

    def _memory_of_stages(self, phase: Phase) -> tuple[ServingMemory, ...]:
        """Memory of a rank of each stage: every sequence has its context and its new tokens in the cache."""
        sequences = self.sequences(phase)
        held = max(each.context + each.queries for each in sequences)
        serving = Serving(
            batch=sum(each.batch for each in sequences),
            context=held,
            pass_tokens=sum(each.batch * each.queries for each in sequences),
            kv_format=self.cache,
            page_tokens=self.page,
            precision=self.precision,
        )
        return serving_memory(self.model, replace(self.layout, zero=0), serving)

    def _flops(self, phase: Phase) -> float:
        """Model FLOPs of a replica's step: two for each active parameter and token, four for each head,
        dimension and key that a query sees (latent attention: two for each dimension of keys and values),
        and those of the scan of Mamba blocks as :mod:`hespas.generators.llm.flops` counts them.
        """
        model, total = self.model, 0.0
        for batch, queries, context, _ in self.sequences(phase):
            tokens = batch * queries
            sampled = tokens if phase == "speculative" else batch
            total += 2.0 * model.vocab * model.hidden * sampled
            for block in (block for layer in model.layers for block in layer):
                total += 2.0 * tokens * matrix_parameters(block, model.hidden, active=True)
                total += batch * _attended(block, queries, context)
        return total

    def workload(self) -> Workload:
        """The step of all ranks. Raises ``UsageError`` that names the rule which a layout breaks."""
        self._check()
        if self.phase == "disaggregated":
            return self._disaggregated()
        stages = range(self.layout.pp)
        graphs = tuple(
            ServingStage(self, stage, self.phase, f"{self.name}.stage{stage}").graph() for stage in stages
        )
        metadata = self._program_bytes(self._memory_of_stages(self.phase)) | self._facts(self.layout.ranks)
        if self.layout.pp == 1:
            return Workload.spmd(replace(graphs[0], name=self.name), self.layout.ranks, metadata)
        ranks = np.repeat(np.arange(self.layout.pp, dtype=np.int32), self.layout.ranks // self.layout.pp)
        return Workload(name=self.name, classes=graphs, rank_class=ranks, metadata=metadata)

    def _facts(self, ranks: int) -> dict[str, str]:
        """Return the metadata that states the facts of a step on ``ranks`` ranks."""
        pools = _pools(self.phase)
        tokens = sum(each.batch * each.queries for pool in pools for each in self.sequences(pool))
        flops = sum(self._flops(pool) for pool in pools)
        facts = StepFacts(
            kind="serving",
            model_flops=float(self.layout.dp * flops),
            tokens=float(self.layout.dp * tokens),
            ranks=ranks,
            dtype=self.precision.matmul,
        )
        return facts.metadata()

    def _check(self) -> None:
        for name in ("batch", "prompt", "page"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name} is {getattr(self, name)}, and must be 1 or more", hint=f"`{name}=1`"
                )
        if self.context < 0 or self.drafts < 1:
            raise UsageError("context is negative, or nothing is drafted", hint="`context=0`, `drafts=1`")
        if self.layout.cp > 1 or self.layout.vp > 1:
            raise UsageError(
                "serving has neither context ranks nor virtual stages",
                code="serving-layout",
                hint="`cp=1` `vp=1`",
            )
        if find_dtype(self.cache) is None:
            raise UsageError(f"no such element type: {self.cache!r}", hint="bf16, f16, f8E4M3FN, i8 ...")
        for phase in _pools(self.phase):
            tokens = sum(each.batch * (each.queries + each.context) for each in self.sequences(phase))
            if tokens > MOST_COUNT:
                raise UsageError(
                    f"{float(tokens):.3g} tokens of a replica and its cache are beyond {MOST_COUNT:,}",
                    code="tokens-bounded",
                    hint="smaller `batch`, `context` and `prompt`",
                )
        batch = Training(seq=self.layout.tp, global_batch=self.layout.dp)
        check_layout(self.model, replace(self.layout, zero=0), batch)

    def _disaggregated(self) -> Workload:
        """As many ranks that prefill as ranks that decode, in front of them."""
        if self.layout.pp > 1:
            raise UsageError("disaggregated serving has no pipeline", code="serving-layout", hint="`pp=1`")
        ranks = self.layout.ranks
        graphs = tuple(
            ServingStage(self, 0, phase, f"{self.name}.{phase}").graph() for phase in ("prefill", "decode")
        )
        return Workload(
            name=self.name,
            classes=graphs,
            rank_class=np.repeat(np.arange(2, dtype=np.int32), ranks),
            metadata=self._program_bytes(map(self._memory, _pools("disaggregated"))) | self._facts(2 * ranks),
        )


_HELD = ("weights", "keys and values")
"""Parts of the memory account that stay from step to step."""


def _pools(phase: Phase) -> tuple[Phase, ...]:
    """The phases that have ranks of their own."""
    return (phase,) if phase != "disaggregated" else ("prefill", "decode")


@dataclass
class ServingStage:
    """The kernels of a pipeline stage, or of the ranks that prefill or decode."""

    step: ServingStep
    stage: int
    phase: Phase
    name: str
    sequences: tuple[Sequences, ...] = ()
    """What the step works on (none: what its phase says)."""
    has_cores: bool = True
    """Attention itself is written, not only what is around it."""

    def __post_init__(self) -> None:
        step = self.step
        self.sequences = self.sequences or step.sequences(self.phase)
        layout = replace(step.layout, zero=0)
        if step.phase == "disaggregated":  # the layout of both pools, whose first data rank begins the second
            layout = replace(layout, dp=2 * layout.dp)
        tokens = sum(each.batch * each.queries for each in self.sequences)
        if self._routes():  # each tensor rank routes its own tokens, which are filled up to as many for each
            tokens = -(-tokens // layout.tp) * layout.tp
        layout = replace(layout, sequence_parallel=self._routes())
        style: Style = "torchtitan" if step.fused else "megatron"
        training = Training(seq=max(tokens, 1), global_batch=layout.dp, precision=step.precision, style=style)
        self.rank = Rank(step.model, layout, training, batch_tokens=tokens, serves=True)

    def _routes(self) -> bool:
        """Whether tokens part over tensor ranks: experts of several ranks want each to route its own."""
        return not self.step.fused and any(isinstance(each, Experts) for each in self.step.model.blocks())

    def graph(self) -> OpGraph:
        """All of its kernels."""
        builder = GraphBuilder(self.name)
        k = Kernels(builder, Part("forward", 0, 0), tf32=self.rank.precision.tf32)
        layout, ends = self.rank.layout, Ends(self.rank)
        forward = self.rank.groups.to_stage(1)
        if self.stage == 0:
            x = ends.embed(k)
        else:
            x = k.message("pipeline.recv", forward, self.rank.stream, 0, sends=False)
        for number in layers_of_stages(replace(self.step.model, mtp_layers=0), layout)[self.stage][0]:
            x = self.layer(k, number, x)
        k.module = ""
        x = self.rank.settled(k, x)
        if self.stage < layout.pp - 1:
            k.message("pipeline.send", forward, self.rank.stream, 0, sends=True, after=[x])
        else:
            self.sample(k, x)
        return builder.build()

    def layer(self, k: Kernels, number: int, x: Value) -> Value:
        """The kernels of a layer, from the residual stream to the residual stream."""
        for place, block in enumerate(self.step.model.layers[number]):
            key = f"{number}.{place}"
            k.module = f"layers.{number}.{BLOCK_NAMES[type(block)]}"
            match block:
                case Attention() | LatentAttention():
                    x = self.attention(k, block, key, x)
                case Mlp():
                    x = forward_mlp(self.rank, k, block, key, x)
                case Experts():
                    if self.step.fused:
                        x = fused_experts(self.rank, k, block, key, x, element=self.step.experts)
                    else:
                        x = forward_experts(self.rank, k, block, key, x)
                case Mamba():
                    x = self._mamba(k, block, key, x)
        return x

    # --- states of Mamba blocks

    def _mamba(self, k: Kernels, block: Mamba, key: str, x: Value) -> Value:
        served = [
            Scanned(each.batch, each.queries, resumes=each.context > 0, steps=not each.is_prompt)
            for each in self.sequences
        ]
        states = served_states(self.rank, block, self.step.batch)
        if self.step.phase == "disaggregated" and self.phase == "decode":
            self._hand_over(k, _bytes(k, *states), -1)
        x = forward_mamba(self.rank, k, block, key, x, served=served)
        if self.step.phase == "disaggregated" and self.phase == "prefill":
            self._hand_over(k, _bytes(k, *states), f"forward:{key}.gated")
        return x

    # --- attention over the cache

    def attention(self, k: Kernels, block: Attention | LatentAttention, key: str, x: Value) -> Value:
        """The kernels of a block of attention over the cache."""
        r = self.rank
        normed = r.norm(k, "norm", x, f"{key}.norm")
        qkv = queries_and_keys(r, k, block, key, normed)
        new = Tensor((r.tokens, self._cache_width(block)), r.precision.compute)
        stored = k.vector("cache.write", "copy", [new], [Tensor(new.shape, self.step.cache)], after=[qkv])
        if self.step.phase == "disaggregated":
            prompts = Tensor((self.step.batch * self.step.prompt, new.shape[1]), self.step.cache)
            self._hand_over(k, prompts, stored)
        outs: list[Value] = [stored]
        if self.has_cores:
            outs = self.cores(k, block, qkv, stored)
        return r.added(k, key, x, self._joined(k, block, outs))

    def cores(self, k: Kernels, block: Attention | LatentAttention, qkv: Value, stored: Value) -> list[Value]:
        """Attention itself, of each kind of sequences, once their keys and values are ``stored``."""
        outs: list[Value] = []
        for place, each in enumerate(self.sequences):
            shape, name = self._shape(block, each), f"core.{place}"
            if self.absorbs(block, each):
                before = self._per_head(k, block, f"q_absorb.{place}", each, qkv)
                latents = self._over_latents(k, name, shape, [before, stored])
                outs.append(self._per_head(k, block, f"v_absorb.{place}", each, latents))
                continue
            element = self.rank.precision.attention
            outs.append(k.attention(name, shape, element, cache=self.step.cache, after=[qkv, stored]))
        return outs

    def _over_latents(self, k: Kernels, name: str, shape: AttentionShape, after: list[Value]) -> Value:
        """Attention whose keys and values are the same latents: they are read once."""
        element, tokens = self.rank.precision.attention, shape.batch * shape.queries
        pairs = shape.batch * shape.heads * shape.pairs
        return k.node(
            name,
            "flash_mla::flash_mla_with_kvcache",
            OpClass.ATTENTION,
            [
                Tensor((tokens, shape.heads, shape.head_dim), element),
                Tensor((shape.batch, shape.keys, shape.head_dim), self.step.cache),
            ],
            [Tensor((tokens, shape.heads, shape.value_dim), element)],
            flops=2.0 * pairs * (shape.head_dim + shape.value_dim),
            transcendentals=pairs,
            after=after,
        )

    def _joined(self, k: Kernels, block: Attention | LatentAttention, outs: list[Value]) -> Value:
        layer = projection(self.rank, block)
        if len(outs) == 1:
            return self.rank.row(k, layer, outs[0])
        values = self.rank.value(layer.rows, layer.inputs)
        return self.rank.row(k, layer, k.vector("core.join", "copy", [values], [values], after=outs))

    def _cache_width(self, block: Attention | LatentAttention) -> int:
        """Elements of the cache of a token on a rank: latents are whole on each tensor rank."""
        if isinstance(block, LatentAttention):
            return block.kv_lora + block.rope_dim
        return 2 * heads_of(self.rank, block)[1] * block.head_dim

    def absorbs(self, block: Attention | LatentAttention, each: Sequences) -> bool:
        """Whether queries go to the latents instead of latents to keys: where few queries read many."""
        return isinstance(block, LatentAttention) and each.queries < 32 and each.context > 0

    def _shape(self, block: Attention | LatentAttention, each: Sequences) -> AttentionShape:
        heads, kv_heads = heads_of(self.rank, block)
        head, value = block.head_dim, block.v_dim if isinstance(block, LatentAttention) else block.head_dim
        if isinstance(block, LatentAttention) and self.absorbs(block, each):
            kv_heads, head, value = 1, block.kv_lora + block.rope_dim, block.kv_lora
        reach = each.context
        if isinstance(block, Attention) and (block.window or block.chunk):
            reach = min(reach, block.window or block.chunk)
        pages = -(-(reach + each.queries) // self.step.page)
        pairs = _pairs(block, each.queries, each.context)
        return AttentionShape(
            batch=each.batch, heads=heads, kv_heads=kv_heads, queries=each.queries,
            keys=pages * self.step.page, head_dim=head, value_dim=value, pairs=pairs,
        )  # fmt: skip

    def _per_head(
        self, k: Kernels, block: Attention | LatentAttention, name: str, each: Sequences, x: Value
    ) -> Value:
        """Each head's part of an up-projection: of queries to the latents, or of what they gave to values."""
        if not isinstance(block, LatentAttention):
            return x
        heads, tokens = heads_of(self.rank, block)[0], each.batch * each.queries
        into = name.startswith("q_")
        sizes = (tokens, block.kv_lora, block.nope_dim) if into else (tokens, block.v_dim, block.kv_lora)
        compute = self.rank.precision.compute
        return k.product(name, sizes, left=compute, result=compute, batch=heads, after=[x])

    def _hand_over(self, k: Kernels, cache: Tensor, stored: Value) -> None:
        """What a layer keeps of prompts, from the ranks that prefill to those that decode the next step."""
        ranks = self.step.layout.ranks
        way = Permutation(2 * ranks, (2, ranks), 1, wraps=False)
        sends = self.phase == "prefill"
        name = "cache.send" if sends else "cache.recv"
        k.message(name, way, cache, k.count("cache"), sends=sends, after=[stored] if sends else [])

    def sample(self, k: Kernels, x: Value) -> None:
        """Logits of the tokens that are sampled: one of a sequence, all that were drafted."""
        r = self.rank
        rows = sum(
            each.batch * (each.queries if self.phase == "speculative" else 1) for each in self.sequences
        )
        k.module = "head"
        columns = -(-r.model.vocab // r.layout.tp)
        picked, compute = r.value(rows, r.hidden), r.precision.compute
        x = r.gather(k, "all_gather", x)
        x = k.vector("pick", "permute", [r.whole], [picked], after=[x])
        x = k.vector("norm", f"{r.model.norm}_norm", [picked], [picked], after=[x])
        logits: Value = k.product(
            "logits", (rows, columns, r.hidden), left=r.precision.head, result=compute, after=[x]
        )
        whole = r.value(rows, columns * r.layout.tp)
        if r.layout.tp > 1:
            logits = k.collective(
                "logits.all_gather", CollectiveKind.ALL_GATHER, r.groups.tensor, whole, after=[logits]
            )
        k.vector("sample", "softmax", [whole], [Tensor((rows,), "i64")], after=[logits])


def _bytes(k: Kernels, *tensors: Tensor) -> Tensor:
    """Several tensors as one message."""
    return Tensor((round(sum(map(k.bytes_of, tensors))),), "ui8")


def _pairs(block: Attention | LatentAttention, queries: int, context: int) -> float:
    """Pairs of a new token and a key that it sees, of one sequence."""
    window, chunk = (block.window, block.chunk) if isinstance(block, Attention) else (0, 0)
    before = attended_pairs(context, window, chunk) if context else 0.0
    return attended_pairs(context + queries, window, chunk) - before


def _attended(block: Block, queries: int, context: int) -> float:
    """FLOPs of a sequence's new tokens in attention, or in the scan of a Mamba block."""
    match block:
        case Attention(heads=heads, head_dim=head):
            return 4.0 * heads * head * _pairs(block, queries, context)
        case LatentAttention(heads=heads, head_dim=head, v_dim=value):
            return 2.0 * heads * (head + value) * _pairs(block, queries, context)
        case Mamba():
            return attention_flops(block, queries)
        case Mlp() | Experts():
            return 0.0
