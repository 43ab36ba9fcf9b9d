"""Memory of a rank that serves a model: weights, the cache of keys and values, and the tokens of one pass.

A cache keeps keys and values of each key head (arXiv 2305.13245), the compressed ones and the rotated key of
latent attention, whole on each tensor rank (2405.04434), and no more tokens than a window sees. Pages are
filled one after the other (2309.06180): the last of each sequence counts whole. A Mamba block keeps its state
in 32 bits and the last inputs of its convolution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from hespas.generators.llm.kept import Parts, storage
from hespas.generators.llm.layout import Layout, layers_of_stages
from hespas.generators.llm.mamba import served_states
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
    mamba_projected,
)
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.settings import Precision, Training, precision_of
from hespas.generators.llm.state import State
from hespas.generators.spec import Filling, fillings

__all__ = ["Serving", "ServingMemory", "serving_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """``batch`` sequences of ``context`` tokens on each data-parallel rank, of which a pass works on
    ``pass_tokens`` together (0: one of each sequence). ``kv_format`` is that of the cache, in pages of
    ``page_tokens``.
    """

    batch: int
    context: int
    pass_tokens: int = 0
    kv_format: str = "bf16"
    page_tokens: int = 16
    precision: Precision = field(default_factory=lambda: precision_of("bf16"))

    @property
    def tokens(self) -> int:
        """Tokens of a pass."""
        return self.pass_tokens or self.batch


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes of a rank of a stage by what they are of."""

    stage: int
    parts: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        """Bytes of tensors."""
        return sum(self.parts.values())

    @property
    def filling(self) -> tuple[Filling, ...]:
        """What fills the memory, the most first."""
        return fillings(self.parts)


def serving_memory(model: Model, layout: Layout, serving: Serving) -> tuple[ServingMemory, ...]:
    """The memory of a rank of every stage."""
    whole = replace(layout, zero=0, sequence_parallel=False)
    training = Training(
        seq=serving.tokens * layout.cp,
        global_batch=layout.dp,
        precision=serving.precision,
        transposed_weights=False,
    )
    rank = Rank(model, whole, training)
    found: list[ServingMemory] = []
    for stage, chunks in enumerate(layers_of_stages(_served(model), layout)):
        layers = tuple(model.layers[number] for chunk in chunks for number in chunk)
        first, last = stage == 0, stage == layout.pp - 1
        found.append(ServingMemory(stage, _parts(rank, serving, layers, first=first, last=last)))
    return tuple(found)


def _served(model: Model) -> Model:
    """The model without further predictions, which no pass that serves makes."""
    return replace(model, mtp_layers=0)


def _parts(rank: Rank, serving: Serving, layers: tuple[Layer, ...], *, first: bool, last: bool) -> Parts:
    without = replace(rank, model=_served(rank.model))
    state = State(without, layers, first, last, serves=True)
    blocks = [block for layer in layers for block in layer]
    logits = 4 * serving.batch * -(-rank.model.vocab // rank.layout.tp) if last else 0
    return {
        "weights": state.working,
        "keys and values": sum(_cache(rank, serving, block) for block in blocks),
        "working space": max((_work(rank, block) for block in dict.fromkeys(blocks)), default=0),
        "logits": logits,
        "workspaces": state.workspaces,
    }


def _cache(rank: Rank, serving: Serving, block: Block) -> int:
    """Bytes that a block keeps of all sequences."""
    tp, tokens = rank.layout.tp, -(-serving.context // rank.layout.cp)
    match block:
        case Attention():
            reach = block.window or block.chunk or tokens
            width = 2 * max(1, block.kv_heads // tp) * block.head_dim
            return _pages(serving, min(tokens, reach), width)
        case LatentAttention():
            return _pages(serving, tokens, block.kv_lora + block.rope_dim)
        case Mamba():
            return sum(
                storage(prod(each.shape), each.dtype) for each in served_states(rank, block, serving.batch)
            )
        case Mlp() | Experts():
            return 0


def _pages(serving: Serving, tokens: int, width: int) -> int:
    pages = -(-tokens // serving.page_tokens)
    return storage(serving.batch * pages * serving.page_tokens * width, serving.kv_format)


def _work(rank: Rank, block: Block) -> int:
    """The stream before and after a block, and the widest values inside it."""
    compute, tp, tokens = rank.precision.compute, rank.layout.tp, rank.tokens
    match block:
        case Attention():
            wide = tokens * block.head_dim * (2 * block.heads + 2 * block.kv_heads) // tp
        case LatentAttention():
            wide = tokens * block.heads * (2 * block.head_dim + 2 * block.v_dim) // tp
        case Mlp():
            wide = tokens * block.ffn * (3 if block.gated else 2) // tp
        case Experts():
            each = (block.latent or rank.hidden) * 2 + block.ffn * (
                3 if block.gated else 2
            ) // rank.layout.etp
            wide = rank.received(block) * each + tokens * block.shared_ffn * 3 // tp
        case Mamba():
            wide = tokens * (mamba_projected(block) + 2 * block.inner) // tp
    return storage(2 * tokens * rank.hidden + wide, compute)
