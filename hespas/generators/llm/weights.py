"""How many parameters a rank has: of a layer, and of what stands outside of layers.

Matrices part over tensor ranks, except that key heads repeat where there are fewer than ranks, and that the
down-projections of latent attention and routers are whole on each. Norms are whole. Experts part over expert
ranks and their tensor ranks.
"""

from __future__ import annotations

from typing import NamedTuple

from hespas.generators.llm.layout import Layout
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    Model,
    expert_parameters,
    matrix_parameters,
    norm_parameters,
    parameters,
)
from hespas.generators.llm.settings import Training

__all__ = ["Weights", "weights_of_layer", "weights_of_rest"]


class Weights(NamedTuple):
    """Trained parameters of a rank: ``dense`` ones are sharded over data ranks, those of ``experts`` over the
    ranks that hold the same experts. ``frozen`` ones are not trained.
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0

    def __add__(self, other: object) -> Weights:
        """The sum, part by part."""
        if not isinstance(other, Weights):
            return NotImplemented
        return Weights(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def weights_of_layer(model: Model, layout: Layout, training: Training, layer: Layer) -> Weights:
    """Parameters of a layer on one rank."""
    norms = len(layer) * (2 if model.post_norms else 1) * norm_parameters(model)
    total = Weights(dense=norms)
    for block in layer:
        total += _of_block(model, layout, block)
    if not training.lora_rank:
        return total
    beside = [block for block in layer if not (training.lora_attention_only and isinstance(block, Mlp))]
    adapters = sum(_adapters(model, layout, block, training.lora_rank) for block in beside)
    return Weights(dense=adapters, frozen=total.dense + total.experts)


def _of_block(model: Model, layout: Layout, block: Block) -> Weights:
    hidden, tp = model.hidden, layout.tp
    match block:
        case Attention():
            return Weights(dense=_attention(block, hidden, tp))
        case LatentAttention():
            down = hidden * (block.q_lora + block.kv_lora + block.rope_dim)
            rest = matrix_parameters(block, hidden) - down
            return Weights(dense=down + rest // tp + block.q_lora + block.kv_lora)
        case Experts():
            each = expert_parameters(block, hidden) // layout.etp
            router = hidden * block.experts * (1 + block.bias) + 2 * hidden * block.latent
            shared = (3 if block.gated else 2) * hidden * block.shared_ffn // tp
            return Weights(dense=router + shared, experts=block.experts // layout.ep * each)
        case Mlp() | Mamba():
            return Weights(dense=parameters(block, hidden) // tp)


def _attention(block: Attention, hidden: int, tp: int) -> int:
    heads, kv_heads = block.heads // tp, max(1, block.kv_heads // tp)
    qkv = block.head_dim * (heads + 2 * kv_heads)
    bias = qkv + hidden if block.bias else 0
    return (
        hidden * qkv + heads * block.head_dim * hidden + bias + (2 * block.head_dim if block.qk_norm else 0)
    )


def _adapters(model: Model, layout: Layout, block: Block, rank: int) -> int:
    """Adapters beside the projections of attention and the dense feed-forward layers of a block."""
    hidden, tp = model.hidden, layout.tp
    match block:
        case Attention():
            qkv = block.head_dim * (block.heads + 2 * block.kv_heads) // tp
            return rank * (hidden + qkv + block.heads * block.head_dim // tp + hidden)
        case LatentAttention():
            return rank * (2 * hidden + 2 * block.heads * block.v_dim // tp)
        case Mlp():
            wide = block.ffn * (2 if block.gated else 1) // tp
            return rank * (2 * hidden + wide + block.ffn // tp)
        case Experts() | Mamba():
            return rank * 4 * hidden // tp


def weights_of_rest(model: Model, layout: Layout, training: Training, *, first: bool, last: bool) -> Weights:
    """Embedding, learned positions, last norm and head on one rank of the stages that have them. A tied head
    is the embedding where a stage has both, and a copy of it where it has only the head.
    """
    table = -(-model.vocab // layout.tp) * model.hidden
    total = 0
    if first:
        total += table + model.max_positions * model.hidden
    if last:
        total += norm_parameters(model) + (0 if model.tied and first else table)
        total += model.mtp_layers * (2 * model.hidden * model.hidden + 3 * norm_parameters(model))
    return Weights(frozen=total) if training.lora_rank else Weights(dense=total)
