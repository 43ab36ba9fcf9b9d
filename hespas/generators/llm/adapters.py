"""Adapters (LoRA, arXiv 2106.09685): which linear layers have them, and how they part over tensor ranks.

They stand beside the linear layers of attention and of dense feed-forward blocks, shared experts among them,
or of attention alone: :meth:`~hespas.generators.llm.rank.Rank.adapter` says so, and the graph, parameters and
FLOPs follow it. Routers, routed experts, state-space blocks, the head and projections of further predictions
have none.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from hespas.generators.llm.attention import latent_layers, projection, qkv_layer
from hespas.generators.llm.feedforward import mlp_layers, shared_expert
from hespas.generators.llm.model import Attention, Block, Experts, LatentAttention, Mamba, Mlp
from hespas.generators.llm.rank import Linear, Rank

__all__ = ["Adapted", "Parting", "adapted_layers", "adapter_flops"]


class Parting(Enum):
    """How tensor ranks share a matrix: by its outputs, by its inputs, or not."""

    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"


class Adapted(NamedTuple):
    """A linear layer of a rank that has adapters."""

    layer: Linear
    parting: Parting

    @property
    def down(self) -> int:
        """Elements of the adapter from the inputs to the rank of adapters."""
        return self.layer.adapter * self.layer.inputs

    @property
    def up(self) -> int:
        """Elements of the adapter from there to the outputs."""
        return self.layer.adapter * self.layer.outputs


def adapted_layers(rank: Rank, block: Block) -> tuple[Adapted, ...]:
    """The linear layers of a block on a rank that have adapters."""
    return tuple(each for each in _layers(rank, block) if each.layer.adapter)


def _layers(rank: Rank, block: Block) -> tuple[Adapted, ...]:
    match block:
        case Attention():
            return (
                Adapted(qkv_layer(rank, block), Parting.COLUMN),
                Adapted(projection(rank, block), Parting.ROW),
            )
        case LatentAttention():
            down, *up = latent_layers(rank, block)
            parted = (Adapted(each, Parting.COLUMN) for each in up)
            return (
                Adapted(down, Parting.WHOLE),
                *parted,
                Adapted(projection(rank, block), Parting.ROW),
            )
        case Mlp():
            fc1, fc2 = mlp_layers(rank, block)
            return Adapted(fc1, Parting.COLUMN), Adapted(fc2, Parting.ROW)
        case Experts():
            return _layers(rank, shared_expert(block)) if block.shared_ffn else ()
        case Mamba():
            return ()


def adapter_flops(rank: Rank, block: Block, names: Collection[str] | None = None) -> float:
    """Forward FLOPs of the adapters of a block on a rank in a micro-batch; of layers of those ``names``."""
    return sum(
        2.0 * each.layer.rows * (each.down + each.up)
        for each in adapted_layers(rank, block)
        if names is None or each.layer.name in names
    )
