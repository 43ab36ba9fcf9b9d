"""Memory of the ranks of an LLM server: weights, KV cache, working memory, and memory of other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from hespas.generators.llm.activations import storage
from hespas.generators.llm.layout import Layout, layers_of_stages
from hespas.generators.llm.mamba import served_states
from hespas.generators.llm.memory import RankState, outside_memory
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    mamba_projected,
)
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import ModelPrecision, Training, precision_of
from hespas.generators.spec import Filling, fillings

__all__ = ["ServingLoad", "ServingMemory", "serving_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingLoad:
    """Load of a server, which determines its memory: ``batch`` sequences of ``context`` tokens on each
    data-parallel rank.

    A forward pass processes ``pass_tokens`` tokens in total (0: one token per sequence). ``kv_format`` is the
    element type of the KV cache, ``page_tokens`` the number of tokens per cache page. ``fused``: a serving
    library has the kernels, as in a fused :class:`hespas.generators.llm.serving.ServingStep`.
    """

    batch: int
    context: int
    pass_tokens: int = 0
    kv_format: str = "bf16"
    page_tokens: int = 16
    precision: ModelPrecision = field(default_factory=lambda: precision_of("bf16"))
    fused: bool = False

    @property
    def tokens(self) -> int:
        """Number of tokens that a pass processes."""
        return self.pass_tokens or self.batch


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Memory of a rank of a pipeline stage in bytes, by kind: of tensors (``parts``), and of other libraries
    (``outside``).

    The cache has the keys and values of each key head (arXiv 2305.13245). For latent attention it has the
    latents and the rotated key, which every tensor-parallel rank stores in full (2405.04434). With a window,
    only its tokens are stored. Pages are filled one after the other (2309.06180): the last page of each
    sequence counts as full. A Mamba block stores its state in 32 bits and the last inputs of its convolution.
    """

    stage: int
    parts: Mapping[str, int]
    outside: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(self.parts.values())

    @property
    def device_bytes(self) -> int:
        """Return the bytes that the memory of the device must have."""
        return self.peak_bytes + sum(self.outside.values())

    @property
    def filling(self) -> tuple[Filling, ...]:
        """Parts of the memory by the figure that includes them first; of each figure, the largest first."""
        return (*fillings(self.parts), *fillings(self.outside, "device"))


def serving_memory(model: Model, layout: Layout, serving: ServingLoad) -> tuple[ServingMemory, ...]:
    """Return the memory of a rank of every stage.

    The collectives of a step determine the communicators. With kernels of a serving library, tensor-parallel
    ranks have one, and all ranks if several replicas share experts; many expert-parallel ranks send tokens to
    each other. Otherwise experts have groups as in training.
    """
    unsharded = replace(layout, zero=0, sequence_parallel=False)
    served = replace(model, mtp_layers=0)  # serving does not run layers of multi-token prediction
    training = Training(
        seq=serving.tokens * layout.cp,
        global_batch=layout.dp,
        precision=serving.precision,
        transposed_weights=False,
    )
    rank = ModelRank(served, unsharded, training)
    groups, peers = [layout.tp, layout.pp], 0
    topk = max((block.topk for block in model.blocks() if isinstance(block, Experts)), default=0)
    if topk and not serving.fused:
        groups.append(layout.etp)
        peers = layout.ep - 1
    elif topk and layout.dp > 1:
        groups.append(layout.ranks // layout.pp)
        peers = layout.ep - 1 if layout.ep > topk else 0
    outside = outside_memory(groups, peers)
    stages: list[ServingMemory] = []
    for stage, chunks in enumerate(layers_of_stages(served, layout)):
        layers = tuple(model.layers[number] for chunk in chunks for number in chunk)
        is_last = stage == layout.pp - 1
        state = RankState(rank, layers, stage == 0, is_last, serves=True)
        blocks = [block for layer in layers for block in layer]
        parts = {
            "weights": state.working,
            "keys and values": sum(_cache(rank, serving, block) for block in blocks),
            "working space": max((_work(rank, block) for block in dict.fromkeys(blocks)), default=0),
            "logits": 4 * serving.batch * -(-model.vocab // layout.tp) if is_last else 0,
            "workspaces": state.workspaces,
        }
        stages.append(ServingMemory(stage, parts, outside))
    return tuple(stages)


def _cache(rank: ModelRank, serving: ServingLoad, block: Block) -> int:
    """Return the bytes that a block has in the KV cache for all sequences."""
    tp, tokens = rank.layout.tp, -(-serving.context // rank.layout.cp)
    match block:
        case Attention():
            width = 2 * max(1, block.kv_heads // tp) * block.head_dim
            tokens = min(tokens, block.window or block.chunk or tokens)
        case LatentAttention():
            width = block.kv_lora + block.rope_dim
        case Mamba():
            states = served_states(rank, block, serving.batch)
            return sum(storage(prod(state.shape), state.dtype) for state in states)
        case Mlp() | Experts():
            return 0
    pages = -(-tokens // serving.page_tokens)
    return storage(serving.batch * pages * serving.page_tokens * width, serving.kv_format)


def _work(rank: ModelRank, block: Block) -> int:
    """Return the working memory of a block: the residual stream before and after it, and the largest tensors
    inside it.
    """
    compute, tp, tokens = rank.precision.compute, rank.layout.tp, rank.tokens
    match block:
        case Attention():
            wide = tokens * block.head_dim * (2 * block.heads + 2 * block.kv_heads) // tp
        case LatentAttention():
            wide = tokens * block.heads * (2 * block.head_dim + 2 * block.v_dim) // tp
        case Mlp():
            wide = tokens * block.ffn * (3 if block.gated else 2) // tp
        case Experts():
            matrices = 3 if block.gated else 2
            per_token = (block.latent or rank.hidden) * 2 + block.ffn * matrices // rank.layout.etp
            wide = rank.received(block) * per_token + tokens * block.shared_ffn * 3 // tp
        case Mamba():
            wide = tokens * (mamba_projected(block) + 2 * block.inner) // tp
    return storage(2 * tokens * rank.hidden + wide, compute)
