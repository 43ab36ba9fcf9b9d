"""Forward step of a language model in serving, with its KV cache.

``prefill`` processes whole prompts, ``decode`` one token of each sequence. ``mixed`` processes one token of
each sequence and a chunk of a prompt (chunked prefill, arXiv 2308.16369), ``speculative`` several speculative
tokens of each sequence (2211.17192). Keys and values are in pages of a pool (2309.06180): a sequence reads
whole pages. Latent attention reads its latents instead of keys and values: queries absorb the up-projection
of keys (2405.04434, section 2.1.2). If prefill and decode run on separate ranks (disaggregated, 2401.09670),
the cache of a prompt is sent layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from hespas.generators.llm.attention import attended_pairs, heads_of, projection, queries_and_keys
from hespas.generators.llm.feedforward import forward_experts, forward_mlp, fused_experts
from hespas.generators.llm.flops import attention_flops
from hespas.generators.llm.kernels import AttentionShape, KernelWriter, TensorSpec, Value
from hespas.generators.llm.layers import ModelEnds
from hespas.generators.llm.layout import Layout, check_layout, layers_of_stages
from hespas.generators.llm.mamba import ScannedBatch, forward_mamba, served_states
from hespas.generators.llm.model import (
    BLOCK_NAMES,
    Attention,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    matrix_parameters,
    model_parameters,
)
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.schedule import PassTemplate
from hespas.generators.llm.server_memory import ServingLoad, ServingMemory, serving_memory
from hespas.generators.llm.settings import PRECISIONS, ModelPrecision, Style, Training
from hespas.generators.spec import MOST_COUNT, Account, check_positive
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

__all__ = [
    "PHASES",
    "Phase",
    "SequenceBatch",
    "ServingStage",
    "ServingStep",
    "serving_layout",
]


def serving_layout(model: Model, *, tp: int, dp: int, ep: int) -> Layout:
    """Return the layout of a server. ``tp`` ranks share each layer, and ``dp`` replicas of attention each
    serve a share of the requests. Experts are distributed over ``ep`` ranks, and the remaining ranks share
    each expert.

    Replicas of a model without experts are independent servers. Raises ``UsageError`` for ``ep`` without
    experts.
    """
    if not any(isinstance(block, Experts) for block in model.blocks()):
        if ep > 1:
            raise UsageError(f"`ep={ep}`: {model.name} has no experts to distribute", hint="set `ep=1`")
        return Layout(tp=tp, ep=ep)
    ranks = dp * tp
    shared = ranks // ep if ep > 0 and ranks % ep == 0 else 1
    return Layout(dp=dp, tp=tp, ep=ep, etp=shared)


Phase = Literal["prefill", "decode", "mixed", "speculative", "disaggregated"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "mixed", "speculative", "disaggregated")


class SequenceBatch(NamedTuple):
    """Batch of ``batch`` equal sequences in a step, with ``queries`` new tokens each and ``context`` tokens
    in the cache. ``is_prompt`` is True if the new tokens are part of a prompt, and False if they are decoded.
    """

    batch: int
    queries: int
    context: int
    is_prompt: bool = False


@dataclass(frozen=True, kw_only=True)
class ServingStep:
    """Generator of a serving step.

    ``batch`` is the number of sequences on each data-parallel rank, ``context`` the number of cached tokens
    of each sequence. ``prompt`` is the length of a prompt, or of the chunk of a prompt in a mixed step.
    ``drafts`` is the number of speculative tokens per sequence. ``cache`` is the element type of keys and
    values, ``page`` the tokens per page.
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
    precision: ModelPrecision = field(default_factory=lambda: PRECISIONS["bf16"])
    fused: bool = False
    """Kernels of a serving library: residual additions are fused into norms, experts are one kernel, and
    tensor ranks all-reduce whole rows.
    """
    experts: str = ""
    """Element type of experts in one kernel, if it differs from that of other matrices."""

    @property
    def name(self) -> str:
        """Name of the model and the phase."""
        return f"{self.model.name}.{self.phase}"

    @property
    def expert_format(self) -> str:
        """Return the element type of experts; empty for a model without experts."""
        has_experts = any(isinstance(block, Experts) for block in self.model.blocks())
        return (self.experts or self.precision.matmul) if has_experts else ""

    def sequences(self, phase: Phase | None = None) -> tuple[SequenceBatch, ...]:
        """Return the groups of sequences of a step; each group has equal numbers of new and cached tokens."""
        decode = SequenceBatch(self.batch, 1, self.context)
        match phase or self.phase:
            case "prefill":
                return (SequenceBatch(self.batch, self.prompt, 0, is_prompt=True),)
            case "decode" | "disaggregated":
                return (decode,)
            case "mixed":
                return (decode, SequenceBatch(1, self.prompt, self.context, is_prompt=True))
            case "speculative":
                return (SequenceBatch(self.batch, 1 + self.drafts, self.context),)

    def account(self) -> Account:
        """Return the parameters of the model, the FLOPs of all ranks, and the memory of a rank. With separate
        ranks for prefill and decode, the memory is for the pool with the higher peak.
        """
        self._check()
        pools = _pools(self.phase)
        flops = self.layout.dp * sum(self._flops(pool) for pool in pools)
        fullest = max((self._memory(pool) for pool in pools), key=lambda memory: memory.peak_bytes)
        return Account(
            parameters=model_parameters(self.model),
            model_flops_per_step=flops,
            hardware_flops_per_step=flops,
            peak_memory_bytes=float(fullest.peak_bytes),
            device_memory_bytes=float(fullest.device_bytes),
            memory=fullest.filling,
        )

    def _memory(self, phase: Phase) -> ServingMemory:
        """Return the memory of a rank in the stage with the highest peak, in the pool of ``phase``."""
        return max(self._memory_of_stages(phase), key=lambda stage: stage.peak_bytes)

    def _memory_of_stages(self, phase: Phase) -> tuple[ServingMemory, ...]:
        """Return the memory of a rank of each stage; the cache has the context and the new tokens of all
        sequences.
        """
        sequences = self.sequences(phase)
        serving = ServingLoad(
            batch=sum(group.batch for group in sequences),
            context=max(group.context + group.queries for group in sequences),
            pass_tokens=sum(group.batch * group.queries for group in sequences),
            kv_format=self.cache,
            page_tokens=self.page,
            precision=self.precision,
            fused=self.fused,
        )
        return serving_memory(self.model, replace(self.layout, zero=0), serving)

    def _flops(self, phase: Phase) -> float:
        """Return the model FLOPs of one replica in a step.

        Each active parameter costs two FLOPs per token. Attention costs four FLOPs for each head, dimension
        and attended key (latent attention: two for each dimension of keys and values). Mamba blocks are
        counted as in :mod:`hespas.generators.llm.flops`.
        """
        model, total = self.model, 0.0
        for batch, queries, context, _ in self.sequences(phase):
            tokens = batch * queries
            sampled = tokens if phase == "speculative" else batch
            total += 2.0 * model.vocab * model.hidden * sampled
            for block in (block for layer in model.layers for block in layer):
                total += 2.0 * tokens * matrix_parameters(block, model.hidden, active=True)
                match block:
                    case Attention(heads=heads, head_dim=head):
                        total += batch * (4.0 * heads * head * _pairs(block, queries, context))
                    case LatentAttention(heads=heads, head_dim=head, v_dim=value):
                        total += batch * (2.0 * heads * (head + value) * _pairs(block, queries, context))
                    case Mamba():
                        total += batch * attention_flops(block, queries)
                    case Mlp() | Experts():
                        pass
        return total

    def workload(self) -> Workload:
        """Return the step of all ranks. With disaggregation, the first half of the ranks prefill and the
        other half decode.

        Raises ``UsageError`` that names a violated layout rule.
        """
        self._check()
        ranks = self.layout.ranks
        if self.phase == "disaggregated":
            if self.layout.pp > 1:
                raise UsageError(
                    f"`pp={self.layout.pp}`: disaggregated serving does not support a pipeline",
                    code="serving-layout",
                    hint="set `pp=1`",
                )
            graphs = tuple(
                ServingStage(self, 0, pool, f"{self.name}.{pool}").graph() for pool in _pools(self.phase)
            )
            memory = tuple(map(self._memory, _pools(self.phase)))
            rank_class = np.repeat(np.arange(2, dtype=np.int32), ranks)
        else:
            stages = range(self.layout.pp)
            graphs = tuple(
                ServingStage(self, stage, self.phase, f"{self.name}.stage{stage}").graph() for stage in stages
            )
            memory = self._memory_of_stages(self.phase)
            rank_class = np.repeat(np.arange(self.layout.pp, dtype=np.int32), ranks // self.layout.pp)
        pools = _pools(self.phase)
        tokens = sum(group.batch * group.queries for pool in pools for group in self.sequences(pool))
        facts = StepFacts(
            kind="serving",
            model_flops=float(self.layout.dp * sum(map(self._flops, pools))),
            tokens=float(self.layout.dp * tokens),
            ranks=len(rank_class),
            dtype=self.precision.matmul,
            phase=self.phase,
        )
        # The memory of each rank class is stated, because weights and cache are not values of the graph.
        class_bytes: list[str] = []
        for account in memory:
            size = sum(account.parts.get(name, 0) for name in _PERSISTENT)
            class_bytes.append(f"{size} {size} {size} {account.peak_bytes} {account.device_bytes}")
        metadata = {PROGRAM_BYTES: ";".join(class_bytes)} | facts.metadata()
        if len(graphs) == 1:
            return Workload.spmd(replace(graphs[0], name=self.name), ranks, metadata)
        return Workload(name=self.name, classes=graphs, rank_class=rank_class, metadata=metadata)

    def _check(self) -> None:
        check_positive({name: getattr(self, name) for name in ("batch", "prompt", "page", "drafts")})
        if self.context < 0:
            raise UsageError(f"context is {self.context}, but must be 0 or more", hint="set `context=0`")
        for name, feature in (("cp", "context parallelism"), ("vp", "virtual stages")):
            if getattr(self.layout, name) > 1:
                raise UsageError(
                    f"`{name}={getattr(self.layout, name)}`: serving does not support {feature}",
                    code="serving-layout",
                    hint=f"set `{name}=1`",
                )
        if find_dtype(self.cache) is None:
            raise UsageError(
                f"unknown element type {self.cache!r}", hint="choose bf16, f16, f8E4M3FN, i8 ..."
            )
        for phase in _pools(self.phase):
            tokens = sum(group.batch * (group.queries + group.context) for group in self.sequences(phase))
            if tokens > MOST_COUNT:
                raise UsageError(
                    f"{float(tokens):.3g} tokens of a replica and its cache exceed {MOST_COUNT:,}",
                    code="tokens-bounded",
                    hint="choose a smaller `batch`, `context` or `prompt`",
                )
        batch = Training(seq=self.layout.tp, global_batch=self.layout.dp)
        check_layout(self.model, replace(self.layout, zero=0), batch)


_PERSISTENT = ("weights", "keys and values")
"""Parts of the memory account that persist from step to step."""


def _pools(phase: Phase) -> tuple[Phase, ...]:
    """Return the phases that run on separate ranks."""
    return (phase,) if phase != "disaggregated" else ("prefill", "decode")


@dataclass
class ServingStage:
    """Writer of the kernels of a pipeline stage; with disaggregation, of the ranks that prefill or decode."""

    step: ServingStep
    stage: int
    phase: Phase
    name: str
    sequences: tuple[SequenceBatch, ...] = ()
    """Sequences of the step (empty: the sequences of its phase)."""
    has_cores: bool = True
    """Attention itself is written, not only its projections."""

    def __post_init__(self) -> None:
        step = self.step
        self.sequences = self.sequences or step.sequences(self.phase)
        layout = replace(step.layout, zero=0)
        if (
            step.phase == "disaggregated"
        ):  # the layout of both pools: the second half of the data ranks decodes
            layout = replace(layout, dp=2 * layout.dp)
        tokens = sum(group.batch * group.queries for group in self.sequences)
        # With experts on several ranks each tensor rank routes its own tokens, padded to equal numbers.
        routes = not step.fused and any(isinstance(block, Experts) for block in step.model.blocks())
        if routes:
            tokens = -(-tokens // layout.tp) * layout.tp
        layout = replace(layout, sequence_parallel=routes)
        style: Style = "torchtitan" if step.fused else "megatron"
        training = Training(seq=max(tokens, 1), global_batch=layout.dp, precision=step.precision, style=style)
        self.rank = ModelRank(step.model, layout, training, batch_tokens=tokens, serves=True)

    def graph(self) -> OpGraph:
        """Return the graph of all kernels."""
        builder = GraphBuilder(self.name)
        k = KernelWriter(builder, PassTemplate("forward", 0, 0), tf32=self.rank.precision.tf32)
        layout, ends = self.rank.layout, ModelEnds(self.rank)
        forward = self.rank.groups.to_stage(1)
        if self.stage == 0:
            x = ends.embed(k)
        else:
            x = k.message("pipeline.recv", forward, self.rank.stream, 0, sends=False)
        for number in layers_of_stages(replace(self.step.model, mtp_layers=0), layout)[self.stage][0]:
            x = self.layer(k, number, x)
        k.module = ""
        x = self.rank.add_pending(k, x)
        if self.stage < layout.pp - 1:
            k.message("pipeline.send", forward, self.rank.stream, 0, sends=True, after=[x])
        else:
            self.sample(k, x)
        return builder.build()

    def layer(self, k: KernelWriter, number: int, x: Value) -> Value:
        """Add the kernels of layer ``number``; ``x`` and the result are the residual stream before and after
        it.
        """
        for position, block in enumerate(self.step.model.layers[number]):
            key = f"{number}.{position}"
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

    def _mamba(self, k: KernelWriter, block: Mamba, key: str, x: Value) -> Value:
        served = [
            ScannedBatch(group.batch, group.queries, resumes=group.context > 0, steps=not group.is_prompt)
            for group in self.sequences
        ]
        states = served_states(self.rank, block, self.step.batch)
        if self.step.phase == "disaggregated" and self.phase == "decode":
            self._transfer_cache(k, _as_message(k, *states), -1)
        x = forward_mamba(self.rank, k, block, key, x, served=served)
        if self.step.phase == "disaggregated" and self.phase == "prefill":
            self._transfer_cache(k, _as_message(k, *states), f"forward:{key}.gated")
        return x

    def attention(self, k: KernelWriter, block: Attention | LatentAttention, key: str, x: Value) -> Value:
        """Add the kernels of an attention block that reads and extends the cache."""
        r = self.rank
        normed = r.norm(k, "norm", x, f"{key}.norm")
        qkv = queries_and_keys(r, k, block, key, normed)
        # Elements of the cache per token: latents are whole on each tensor rank.
        width = (
            block.kv_lora + block.rope_dim
            if isinstance(block, LatentAttention)
            else 2 * heads_of(r, block)[1] * block.head_dim
        )
        new = TensorSpec((r.tokens, width), r.precision.compute)
        stored = k.vector("cache.write", "copy", [new], [TensorSpec(new.shape, self.step.cache)], after=[qkv])
        if self.step.phase == "disaggregated":
            prompts = TensorSpec((self.step.batch * self.step.prompt, new.shape[1]), self.step.cache)
            self._transfer_cache(k, prompts, stored)
        outs: list[Value] = [stored]
        if self.has_cores:
            outs = self.cores(k, block, qkv, stored)
        layer = projection(r, block)
        out = outs[0]
        if len(outs) > 1:
            values = r.value(layer.rows, layer.inputs)
            out = k.vector("core.join", "copy", [values], [values], after=outs)
        return r.add_block(k, key, x, r.row(k, layer, out))

    def cores(
        self, k: KernelWriter, block: Attention | LatentAttention, qkv: Value, stored: Value
    ) -> list[Value]:
        """Add one attention kernel per batch of equal sequences, and return the results. Each kernel waits
        for ``stored``, the node that writes new keys and values to the cache.
        """
        outs: list[Value] = []
        for number, group in enumerate(self.sequences):
            shape, name = self._shape(block, group), f"core.{number}"
            if isinstance(block, LatentAttention) and self.absorbs(block, group):
                before = self._per_head(k, block, f"q_absorb.{number}", group, qkv)
                latents = self._latent_core(k, name, shape, [before, stored])
                outs.append(self._per_head(k, block, f"v_absorb.{number}", group, latents))
                continue
            element = self.rank.precision.attention
            outs.append(k.attention(name, shape, element, cache=self.step.cache, after=[qkv, stored]))
        return outs

    def _latent_core(self, k: KernelWriter, name: str, shape: AttentionShape, after: list[Value]) -> Value:
        """Add the attention kernel over cached latents, which serve as keys and as values and are read
        once.
        """
        element, tokens = self.rank.precision.attention, shape.batch * shape.queries
        pairs = shape.batch * shape.heads * shape.pairs
        return k.node(
            name,
            "flash_mla::flash_mla_with_kvcache",
            OpClass.ATTENTION,
            [
                TensorSpec((tokens, shape.heads, shape.head_dim), element),
                TensorSpec((shape.batch, shape.keys, shape.head_dim), self.step.cache),
            ],
            [TensorSpec((tokens, shape.heads, shape.value_dim), element)],
            flops=2.0 * pairs * (shape.head_dim + shape.value_dim),
            transcendentals=pairs,
            after=after,
        )

    def absorbs(self, block: Attention | LatentAttention, group: SequenceBatch) -> bool:
        """Return True if latent attention computes with the latents directly: queries are projected to the
        latent space, and keys and values are not. This is cheaper if few queries read many latents.
        """
        return isinstance(block, LatentAttention) and group.queries < 32 and group.context > 0

    def _shape(self, block: Attention | LatentAttention, group: SequenceBatch) -> AttentionShape:
        heads, kv_heads = heads_of(self.rank, block)
        head, value = block.head_dim, block.v_dim if isinstance(block, LatentAttention) else block.head_dim
        if isinstance(block, LatentAttention) and self.absorbs(block, group):
            kv_heads, head, value = 1, block.kv_lora + block.rope_dim, block.kv_lora
        reach = group.context
        if isinstance(block, Attention) and (block.window or block.chunk):
            reach = min(reach, block.window or block.chunk)
        pages = -(-(reach + group.queries) // self.step.page)
        pairs = _pairs(block, group.queries, group.context)
        return AttentionShape(
            batch=group.batch, heads=heads, kv_heads=kv_heads, queries=group.queries,
            keys=pages * self.step.page, head_dim=head, value_dim=value, pairs=pairs,
        )  # fmt: skip

    def _per_head(
        self, k: KernelWriter, block: LatentAttention, name: str, group: SequenceBatch, x: Value
    ) -> Value:
        """Add an up-projection of latent attention that each head applies separately: from queries to the
        latent space, or from attention results to values.
        """
        heads, tokens = heads_of(self.rank, block)[0], group.batch * group.queries
        is_query = name.startswith("q_")
        sizes = (tokens, block.kv_lora, block.nope_dim) if is_query else (tokens, block.v_dim, block.kv_lora)
        compute = self.rank.precision.compute
        return k.product(name, sizes, left=compute, result=compute, batch=heads, after=[x])

    def _transfer_cache(self, k: KernelWriter, cache: TensorSpec, stored: Value) -> None:
        """Add the transfer of a layer's cache from the ranks that prefilled the prompts to the ranks that
        decode.
        """
        ranks = self.step.layout.ranks
        messages = Permutation(2 * ranks, (2, ranks), 1, wraps=False)
        sends = self.phase == "prefill"
        name = "cache.send" if sends else "cache.recv"
        k.message(name, messages, cache, k.count("cache"), sends=sends, after=[stored] if sends else [])

    def sample(self, k: KernelWriter, x: Value) -> None:
        """Add the logits of the tokens to sample: one per sequence, or all speculative ones."""
        r = self.rank
        rows = sum(
            group.batch * (group.queries if self.phase == "speculative" else 1) for group in self.sequences
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
        k.vector("sample", "softmax", [whole], [TensorSpec((rows,), "i64")], after=[logits])


def _as_message(k: KernelWriter, *tensors: TensorSpec) -> TensorSpec:
    """Return one tensor with the bytes of several tensors, to be sent as one message."""
    return TensorSpec((round(sum(map(k.bytes_of, tensors))),), "ui8")


def _pairs(block: Attention | LatentAttention, queries: int, context: int) -> float:
    """Return the number of pairs of new token and attended key in one sequence."""
    window, chunk = (block.window, block.chunk) if isinstance(block, Attention) else (0, 0)
    before = attended_pairs(context, window, chunk) if context else 0.0
    return attended_pairs(context + queries, window, chunk) - before
