"""FLOPs of a training step in closed form, as publishers count them and as a machine does them.

Model FLOPs (arXiv 2104.04473, section 5.1 without recomputation; 2204.02311, appendix B): six for each active
parameter of a matrix and token, and for attention twelve for each layer, head, dimension of a head and key
that a query sees: half of a sequence under a causal mask, at most its window. Adapters (LoRA) leave out the
gradients of frozen weights: four for a parameter. The head counts, the embedding does not; further
predictions count their layers and the head once more. A Mamba-2 block counts its chunked scan (2405.21060,
section 6).

``HALF`` takes half of the square, as most publishers do; ``EXACT`` the s (s + 1) / 2 pairs; ``FULL`` all of
it, which llm-foundry and older reports of MaxText and Megatron-LM count.
"""

from __future__ import annotations

from enum import Enum

from hespas.generators.llm.attention import attended_pairs
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    matrix_parameters,
)
from hespas.generators.llm.settings import Recompute, Training

__all__ = ["Convention", "attention_flops", "forward_flops", "hardware_flops", "model_flops"]


class Convention(Enum):
    """How pairs of query and key are counted."""

    HALF = "half"
    EXACT = "exact"
    FULL = "full"


def _pairs(block: Attention | LatentAttention, seq: int, convention: Convention) -> float:
    """Pairs of one sequence."""
    window, chunk = (block.window, block.chunk) if isinstance(block, Attention) else (0, 0)
    if convention is Convention.FULL:
        return float(seq) * min(window or seq, chunk or seq, seq)
    pairs = attended_pairs(seq, window, chunk)
    return pairs if convention is Convention.EXACT else pairs - min(window or seq, chunk or seq, seq) / 2


def attention_flops(block: Block, seq: int, convention: Convention = Convention.HALF) -> float:
    """Forward FLOPs of scores and weighted sums of one sequence; of a Mamba-2 block those of its scan."""
    match block:
        case Attention(heads=heads, head_dim=head):
            return 4.0 * heads * head * _pairs(block, seq, convention)
        case LatentAttention(heads=heads, head_dim=head, v_dim=value):
            return 2.0 * heads * (head + value) * _pairs(block, seq, convention)
        case Mamba():
            return seq * _scan_flops(block, seq)
        case Mlp() | Experts():
            return 0.0


def _scan_flops(block: Mamba, seq: int) -> float:
    """Forward FLOPs of a token in the scan: scores of its chunk once a group, their product with the values,
    the state that the chunk leaves, and what the state before adds.
    """
    chunk = min(block.chunk, seq)
    scores = 2.0 * block.groups * chunk * block.state
    return scores + 2.0 * block.inner * chunk + 4.0 * block.inner * block.state


def forward_flops(model: Model, seq: int, convention: Convention = Convention.HALF) -> float:
    """Forward FLOPs of one sequence."""
    predictions = 1 + model.mtp_layers
    head = model.vocab * model.hidden * predictions + 2 * model.hidden**2 * model.mtp_layers
    matrices = sum(matrix_parameters(block, model.hidden, active=True) for block in model.blocks()) + head
    return 2.0 * matrices * seq + sum(attention_flops(block, seq, convention) for block in model.blocks())


def model_flops(model: Model, training: Training, convention: Convention = Convention.HALF) -> float:
    """Model FLOPs of a step: three times the forward pass. Where only adapters are trained matrices count
    twice, attention, whose operands all have gradients, three times.
    """
    attention = sum(attention_flops(block, training.seq, convention) for block in model.blocks())
    forward = forward_flops(model, training.seq, convention)
    matrices = 2 if training.lora_rank else 3
    return training.global_batch * (matrices * (forward - attention) + 3 * attention)


def hardware_flops(model: Model, training: Training) -> float:
    """Those and what is computed again: by the backward pass of fused attention, which needs the scores
    twice more in 2.5 passes of it, and as asked for.
    """
    again = sum(_again(model, training, place) for place in range(len(model.layers)))
    attention = sum(attention_flops(block, training.seq, Convention.EXACT) for block in model.blocks())
    scores = 0.5 * attention
    base = model_flops(model, training, Convention.EXACT)
    return base + training.global_batch * (scores + again)


def _again(model: Model, training: Training, place: int) -> float:
    """Forward FLOPs of a sequence that a layer's backward pass does again."""
    seq, recompute = training.seq, training.recompute
    total = 0.0
    for block in model.layers[place]:
        matrices = 2.0 * seq * matrix_parameters(block, model.hidden, active=True)
        attention = attention_flops(block, seq, Convention.EXACT)
        total += _share(block, recompute, place, matrices, attention)
    return total


def _share(block: Block, recompute: Recompute, place: int, matrices: float, attention: float) -> float:
    if recompute.whole(place):
        return matrices + attention
    match block:
        case Attention() | LatentAttention() if recompute.covers("core_attn", place):
            return attention
        case Mlp() if recompute.covers("mlp", place):
            return matrices
        case Experts() if recompute.covers("moe", place):
            return matrices
        case _:
            return 0.0
