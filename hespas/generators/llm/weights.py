"""Numbers of parameters of a rank: of its layers, of weights outside of layers, and of LoRA adapters.

Tensor-parallel ranks divide matrices, with exceptions: key heads are repeated if there are fewer of them than
ranks. The down-projections of latent attention, routers, and the projections around experts and of
multi-token prediction are whole on each rank. Norms and the biases of results are whole too. Experts are
divided over expert-parallel ranks and the tensor-parallel ranks of an expert.

A weight that is whole on each tensor-parallel rank gets only part of its gradient there: from the rank's own
tokens with sequence parallelism (arXiv 2205.05198), or from its own heads (norms of queries and keys). These
weights are ``replicated``: only their gradients are summed over tensor-parallel ranks.

Adapters (LoRA, arXiv 2106.09685) belong to the linear layers of attention and of dense feed-forward blocks,
including shared experts, or of attention alone (:meth:`~hespas.generators.llm.rank.ModelRank.adapter`).
Routers, routed experts, state-space blocks, the head and projections of multi-token prediction have no
adapters.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from hespas.generators.llm.attention import latent_layers, projection, qkv_layer
from hespas.generators.llm.feedforward import mlp_layers, shared_expert
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
from hespas.generators.llm.rank import LinearLayer, ModelRank
from hespas.generators.llm.settings import Training

__all__ = [
    "AdaptedLayer",
    "RankWeights",
    "TensorSplit",
    "adapted_layers",
    "adapter_flops",
    "copied_embedding",
    "weights_of_layer",
    "weights_of_rest",
]


class TensorSplit(Enum):
    """Division of a layer's matrix over tensor-parallel ranks: by its outputs, by its inputs, or none."""

    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"


class AdaptedLayer(NamedTuple):
    """Linear layer of a rank with LoRA adapters. ``split`` is the dimension that tensor-parallel ranks
    divide.
    """

    layer: LinearLayer
    split: TensorSplit

    @property
    def down(self) -> int:
        """Elements of the first adapter matrix: inputs x adapter rank."""
        return self.layer.adapter * self.layer.inputs

    @property
    def up(self) -> int:
        """Elements of the second adapter matrix: adapter rank x outputs."""
        return self.layer.adapter * self.layer.outputs


def adapted_layers(rank: ModelRank, block: Block) -> tuple[AdaptedLayer, ...]:
    """Return the linear layers of a block on a rank that have adapters."""
    layers: tuple[AdaptedLayer, ...] = ()
    match block:
        case Attention():
            layers = (
                AdaptedLayer(qkv_layer(rank, block), TensorSplit.COLUMN),
                AdaptedLayer(projection(rank, block), TensorSplit.ROW),
            )
        case LatentAttention():
            down, *up = latent_layers(rank, block)
            layers = (
                AdaptedLayer(down, TensorSplit.WHOLE),
                *(AdaptedLayer(layer, TensorSplit.COLUMN) for layer in up),
                AdaptedLayer(projection(rank, block), TensorSplit.ROW),
            )
        case Mlp():
            fc1, fc2 = mlp_layers(rank, block)
            layers = AdaptedLayer(fc1, TensorSplit.COLUMN), AdaptedLayer(fc2, TensorSplit.ROW)
        case Experts():
            return adapted_layers(rank, shared_expert(block)) if block.shared_ffn else ()
        case Mamba():
            pass
    return tuple(adapted for adapted in layers if adapted.layer.adapter)


def adapter_flops(rank: ModelRank, block: Block, names: Collection[str] | None = None) -> float:
    """Return the forward FLOPs of the adapters of a block on one rank in a micro-batch.

    With ``names``, only the linear layers of these names are counted.
    """
    return sum(
        2.0 * adapted.layer.rows * (adapted.down + adapted.up)
        for adapted in adapted_layers(rank, block)
        if names is None or adapted.layer.name in names
    )


class RankWeights(NamedTuple):
    """Numbers of parameters on a rank.

    Optimizer state of ``dense`` parameters is sharded over data-parallel ranks, and of ``experts`` over the
    ranks with the same experts. ``frozen`` and ``frozen_experts`` are not trained. ``replicated`` is the
    number of dense parameters whose gradients are summed over tensor-parallel ranks.
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0
    frozen_experts: int = 0
    replicated: int = 0

    def __add__(self, other: object) -> RankWeights:
        """Return the sum of two counts of weights, field by field."""
        if not isinstance(other, RankWeights):
            return NotImplemented
        return RankWeights(*(left + right for left, right in zip(self, other, strict=True)))


def weights_of_layer(model: Model, layout: Layout, training: Training, layer: Layer) -> RankWeights:
    """Return the parameters of a layer on one rank."""
    norms = len(layer) * (2 if model.post_norms else 1) * norm_parameters(model)
    total = RankWeights(dense=norms, replicated=_summed(layout, by_token=norms))
    for block in layer:
        total += _of_block(model, layout, block)
    if not training.lora_rank:
        return total
    rank = ModelRank(model, layout, training)
    adapters = sum((_adapters(rank, block) for block in layer), RankWeights())
    return adapters + RankWeights(frozen=total.dense, frozen_experts=total.experts)


def _summed(layout: Layout, *, by_token: int = 0, by_head: int = 0) -> int:
    """Return the number of replicated weights whose gradients are summed over tensor-parallel ranks.
    ``by_token`` is the number of weights that are applied to tokens, outside tensor-parallel regions.
    ``by_head`` is the number of weights that are applied to the heads of a rank.
    """
    return (by_token if layout.has_sequence_parallel else 0) + (by_head if layout.tp > 1 else 0)


def _of_block(model: Model, layout: Layout, block: Block) -> RankWeights:
    hidden, tp = model.hidden, layout.tp
    match block:
        case Attention():
            qkv = block.head_dim * (block.heads // tp + 2 * max(1, block.kv_heads // tp))
            matrices = hidden * (qkv + block.heads // tp * block.head_dim)
            bias = hidden if block.bias else 0
            norms = 2 * block.head_dim if block.qk_norm else 0
            return RankWeights(
                dense=matrices + (qkv if block.bias else 0) + bias + norms,
                replicated=_summed(layout, by_token=bias, by_head=norms),
            )
        case LatentAttention():
            projected = hidden * (block.q_lora + block.kv_lora + block.rope_dim)
            divided = (matrix_parameters(block, hidden) - projected) // tp
            down = projected + block.q_lora + block.kv_lora
            return RankWeights(dense=down + divided, replicated=_summed(layout, by_token=down))
        case Experts():
            router = hidden * block.experts + (block.experts if block.bias else 0)
            around = router + 2 * hidden * block.latent
            shared = (3 if block.gated else 2) * hidden * block.shared_ffn // tp
            expert = expert_parameters(block, hidden) // layout.etp
            if block.bias:
                expert += (2 if block.gated else 1) * block.ffn // layout.etp + (block.latent or hidden)
            return RankWeights(
                dense=around + shared,
                experts=block.experts // layout.ep * expert,
                replicated=_summed(layout, by_token=around),
            )
        case Mlp():
            wide = (2 if block.gated else 1) * block.ffn // tp if block.bias else 0
            bias = hidden if block.bias else 0
            return RankWeights(
                dense=matrix_parameters(block, hidden) // tp + wide + bias,
                replicated=_summed(layout, by_token=bias),
            )
        case Mamba():
            return RankWeights(dense=parameters(block, hidden) // tp)


def _adapters(rank: ModelRank, block: Block) -> RankWeights:
    """Return the number of parameters of a block's adapters on one rank.

    An adapter consists of two matrices. If tensor-parallel ranks divide the outputs of the layer, each rank
    has the whole first matrix; if they divide the inputs, each rank has the whole second matrix.
    """
    weights = RankWeights()
    for adapted in adapted_layers(rank, block):
        by_head = {TensorSplit.COLUMN: adapted.down, TensorSplit.ROW: adapted.up, TensorSplit.WHOLE: 0}[
            adapted.split
        ]
        by_token = adapted.down + adapted.up if adapted.split is TensorSplit.WHOLE else 0
        summed = _summed(rank.layout, by_token=by_token, by_head=by_head)
        weights += RankWeights(dense=adapted.down + adapted.up, replicated=summed)
    return weights


def copied_embedding(model: Model, layout: Layout) -> int:
    """Return the number of elements of the embedding that the last stage also holds, in addition to the first
    stage.

    A tied head needs the token embedding. Multi-token prediction embeds tokens again, so it also needs
    learned position embeddings.
    """
    table = -(-model.vocab // layout.tp) * model.hidden
    if model.mtp_layers:
        return table + model.max_positions * model.hidden
    return table if model.tied else 0


def weights_of_rest(
    model: Model, layout: Layout, training: Training, *, first: bool, last: bool
) -> RankWeights:
    """Return the weights outside of layers on one rank: embedding, learned positions, last norm, head, and
    the projections of multi-token prediction.
    """
    table = -(-model.vocab // layout.tp) * model.hidden
    total = whole = 0
    if first:
        total += table + model.max_positions * model.hidden
    if last:
        total += (0 if model.tied else table) + (0 if first else copied_embedding(model, layout))
        whole = norm_parameters(model) * (1 + 3 * model.mtp_layers)
        whole += model.mtp_layers * 2 * model.hidden * model.hidden
        total += whole
    if training.lora_rank:
        return RankWeights(frozen=total)
    return RankWeights(dense=total, replicated=_summed(layout, by_token=whole))
