"""How many parameters a rank has: of a layer, and of what stands outside of layers.

Matrices part over tensor ranks, except that key heads repeat where there are fewer than ranks, and that the
down-projections of latent attention, routers, projections around experts and of further predictions are whole
on each. Norms and what is added to the residual stream are whole. Experts part over expert ranks and their
tensor ranks.

A weight that is whole on each tensor rank has a part of its gradient there: of the rank's own tokens where
sequences part over tensor ranks (arXiv 2205.05198), or of its own heads, which norms of queries and keys are
applied to. These are ``replicated``: their gradients are summed over tensor ranks, and no others.
"""

from __future__ import annotations

from typing import NamedTuple

from hespas.generators.llm.adapters import Parting, adapted_layers
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
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.settings import Training

__all__ = ["Weights", "copied_embedding", "weights_of_layer", "weights_of_rest"]


class Weights(NamedTuple):
    """Trained parameters of a rank: ``dense`` ones are sharded over data ranks, those of ``experts`` over the
    ranks that hold the same experts. ``frozen`` ones, and ``frozen_experts``, are not trained. ``replicated``
    counts the dense ones whose gradients tensor ranks sum.
    """

    dense: int = 0
    experts: int = 0
    frozen: int = 0
    frozen_experts: int = 0
    replicated: int = 0

    def __add__(self, other: object) -> Weights:
        """The sum, part by part."""
        if not isinstance(other, Weights):
            return NotImplemented
        return Weights(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def weights_of_layer(model: Model, layout: Layout, training: Training, layer: Layer) -> Weights:
    """Parameters of a layer on one rank."""
    norms = len(layer) * (2 if model.post_norms else 1) * norm_parameters(model)
    total = Weights(dense=norms, replicated=_summed(layout, by_token=norms))
    for block in layer:
        total += _of_block(model, layout, block)
    if not training.lora_rank:
        return total
    rank = Rank(model, layout, training)
    adapters = sum((_adapters(rank, block) for block in layer), Weights())
    return adapters + Weights(frozen=total.dense, frozen_experts=total.experts)


def _summed(layout: Layout, *, by_token: int = 0, by_head: int = 0) -> int:
    """Of weights that are whole on each tensor rank those whose gradients are summed: of what is applied to
    tokens outside of tensor-parallel regions, and to heads of a rank.
    """
    return (by_token if layout.has_sequence_parallel else 0) + (by_head if layout.tp > 1 else 0)


def _of_block(model: Model, layout: Layout, block: Block) -> Weights:
    hidden, tp = model.hidden, layout.tp
    match block:
        case Attention():
            qkv = block.head_dim * (block.heads // tp + 2 * max(1, block.kv_heads // tp))
            matrices = hidden * (qkv + block.heads // tp * block.head_dim)
            added = hidden if block.bias else 0
            norms = 2 * block.head_dim if block.qk_norm else 0
            return Weights(
                dense=matrices + (qkv if block.bias else 0) + added + norms,
                replicated=_summed(layout, by_token=added, by_head=norms),
            )
        case LatentAttention():
            projected = hidden * (block.q_lora + block.kv_lora + block.rope_dim)
            parted = (matrix_parameters(block, hidden) - projected) // tp
            down = projected + block.q_lora + block.kv_lora
            return Weights(dense=down + parted, replicated=_summed(layout, by_token=down))
        case Experts():
            router = hidden * block.experts + (block.experts if block.bias else 0)
            around = router + 2 * hidden * block.latent
            shared = (3 if block.gated else 2) * hidden * block.shared_ffn // tp
            return Weights(
                dense=around + shared,
                experts=block.experts // layout.ep * _expert(block, hidden, layout.etp),
                replicated=_summed(layout, by_token=around),
            )
        case Mlp():
            wide = (2 if block.gated else 1) * block.ffn // tp if block.bias else 0
            added = hidden if block.bias else 0
            return Weights(
                dense=matrix_parameters(block, hidden) // tp + wide + added,
                replicated=_summed(layout, by_token=added),
            )
        case Mamba():
            return Weights(dense=parameters(block, hidden) // tp)


def _expert(block: Experts, hidden: int, etp: int) -> int:
    """Parameters of one expert on a rank."""
    bias = (2 if block.gated else 1) * block.ffn // etp + (block.latent or hidden) if block.bias else 0
    return expert_parameters(block, hidden) // etp + bias


def _adapters(rank: Rank, block: Block) -> Weights:
    """Adapters of a block. Beside a matrix whose outputs part, the first is whole on each tensor rank; beside
    one whose inputs part the second.
    """
    found = Weights()
    for each in adapted_layers(rank, block):
        by_head = {Parting.COLUMN: each.down, Parting.ROW: each.up, Parting.WHOLE: 0}[each.parting]
        by_token = each.down + each.up if each.parting is Parting.WHOLE else 0
        summed = _summed(rank.layout, by_token=by_token, by_head=by_head)
        found += Weights(dense=each.down + each.up, replicated=summed)
    return found


def copied_embedding(model: Model, layout: Layout) -> int:
    """Elements of the embedding on a rank of the first stage of which a last stage that is another one holds
    a copy: for a tied head, and for further predictions, which look tokens up again, learned positions too.
    """
    table = -(-model.vocab // layout.tp) * model.hidden
    if model.mtp_layers:
        return table + model.max_positions * model.hidden
    return table if model.tied else 0


def weights_of_rest(model: Model, layout: Layout, training: Training, *, first: bool, last: bool) -> Weights:
    """Embedding, learned positions, last norm, head and what joins further predictions on one rank of the
    stages that have them.
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
        return Weights(frozen=total)
    return Weights(dense=total, replicated=_summed(layout, by_token=whole))
