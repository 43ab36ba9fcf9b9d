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

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from enum import Enum

from hespas.generators.llm.adapters import adapter_flops
from hespas.generators.llm.attention import attended_pairs
from hespas.generators.llm.layout import Layout, layers_of_stages, micro_batches
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Mamba,
    Mlp,
    Model,
    expert_parameters,
    matrix_parameters,
)
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.settings import Recompute, Training

__all__ = [
    "Convention",
    "attention_flops",
    "forward_flops",
    "forward_parts",
    "hardware_flops",
    "model_flops",
    "rank_flops",
]


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


def _block_parts(block: Block, hidden: int) -> dict[str, float]:
    """Active elements of the matrices of a block, by part."""
    whole = float(matrix_parameters(block, hidden, active=True))
    if not isinstance(block, Experts):
        return {_PARTS[type(block)]: whole}
    matrices = 3 if block.gated else 2
    fixed = {
        "router": float(hidden * block.experts),
        "shared experts": float(matrices * hidden * block.shared_ffn),
        "latent projections": 2.0 * hidden * block.latent,
    }
    return {"experts": whole - sum(fixed.values())} | {name: size for name, size in fixed.items() if size}


_PARTS: Mapping[type[Block], str] = {
    Attention: "attention projections",
    LatentAttention: "attention projections",
    Mlp: "feed-forward",
    Mamba: "state-space projections",
}


def forward_parts(model: Model, seq: int, convention: Convention = Convention.HALF) -> dict[str, float]:
    """Forward FLOPs of a token, by part; they add up to those of a sequence over its length."""
    parts: defaultdict[str, float] = defaultdict(float)
    for block, count in Counter(model.blocks()).items():
        for name, size in _block_parts(block, model.hidden).items():
            parts[name] += 2.0 * count * size
        name = "state-space scan" if isinstance(block, Mamba) else "attention"
        parts[name] += count * attention_flops(block, seq, convention) / seq
    parts["head"] = 2.0 * model.vocab * model.hidden * (1 + model.mtp_layers)
    parts["further predictions"] = 4.0 * model.hidden**2 * model.mtp_layers
    return {name: flops for name, flops in parts.items() if flops}


def forward_flops(model: Model, seq: int, convention: Convention = Convention.HALF) -> float:
    """Forward FLOPs of one sequence."""
    return seq * sum(forward_parts(model, seq, convention).values())


def _attention(model: Model, seq: int, convention: Convention) -> float:
    """Forward FLOPs of attention and scans of one sequence."""
    blocks = Counter(model.blocks())
    return sum(count * attention_flops(block, seq, convention) for block, count in blocks.items())


def model_flops(model: Model, training: Training, convention: Convention = Convention.HALF) -> float:
    """Model FLOPs of a step: three times the forward pass. Where only adapters are trained matrices count
    twice, attention, whose operands all have gradients, three times.
    """
    attention = _attention(model, training.seq, convention)
    forward = forward_flops(model, training.seq, convention)
    matrices = 2 if training.lora_rank else 3
    return training.global_batch * (matrices * (forward - attention) + 3 * attention)


# --- as a machine does them


def hardware_flops(model: Model, training: Training, layout: Layout | None = None) -> float:
    """Those, what is computed again, and what ranks do alike or on padding, tokens that fill experts up among
    it (:func:`rank_flops`). Again are computed scores, in the backward pass of fused attention (arXiv
    2205.14135, 2307.08691: five products where the model has four), and what the settings ask for. Which
    layers are the first of their stage is the ``layout``'s; without one there is one rank. All ranks count as
    the busiest one, as they do in a graph. Adapters count too, as often as they are there.
    """
    seq, layout = training.seq, layout or Layout()
    again = 0.0
    for numbers in _stages(model, layout):
        for place, number in enumerate(numbers):
            for block in model.all_layers[number]:
                again += _scores(block, seq) + _again(block, training, place, model.hidden)
    each = layout.ranks / layout.pp
    ranks = sum(_without_adapters(model, layout, training)) * each
    beside = ranks - training.global_batch * forward_flops(model, seq, Convention.EXACT)
    passes = 2 if training.lora_rank else 3
    once = model_flops(model, training, Convention.EXACT) + passes * beside
    adapters = sum(_adapters(model, layout, training, backward=True)) * each
    return once + training.global_batch * again + adapters


def _adapters(model: Model, layout: Layout, training: Training, *, backward: bool) -> Iterator[float]:
    """FLOPs of a step in adapters on one rank of each stage: forward, or with two gradients each and what is
    computed again.
    """
    rank = Rank(model, layout, training)
    count = micro_batches(layout, training)
    for numbers in _stages(model, layout):
        found = 0.0
        for place, number in enumerate(numbers):
            for block in model.all_layers[number]:
                found += (3 if backward else 1) * adapter_flops(rank, block)
                if backward:
                    found += adapter_flops(rank, block, _layers_again(block, training.recompute, place))
        yield count * found


def _layers_again(block: Block, recompute: Recompute, place: int) -> Collection[str] | None:
    """Names of the linear layers of a block that are computed again; None: all."""
    whole = "mlp" if isinstance(block, Mlp) else "moe" if isinstance(block, Experts) else "block"
    if recompute.covers(whole, place):
        return None
    if isinstance(block, Attention | LatentAttention) and recompute.covers("qkv", place):
        return ("qkv", "qkv_down", "q_up", "kv_up")
    return ("q_up", "kv_up") if recompute.covers("mla_up_proj", place) else ()


def _stages(model: Model, layout: Layout) -> list[list[int]]:
    """The numbers of the layers of each stage."""
    return [[each for chunk in chunks for each in chunk] for chunks in layers_of_stages(model, layout)]


def _scores(block: Block, seq: int) -> float:
    if isinstance(block, Attention | LatentAttention):
        return 2.0 * block.heads * block.head_dim * _pairs(block, seq, Convention.EXACT)
    return 0.0


def _filled(block: Block, hidden: int, training: Training) -> float:
    """Elements of matrices of experts that a token meets beyond those it is routed to, in the mean."""
    if not isinstance(block, Experts):
        return 0.0
    return block.topk * expert_parameters(block, hidden) * (training.expert_load - 1)


def _again(block: Block, training: Training, place: int, hidden: int) -> float:
    """Forward FLOPs of a sequence that the backward pass of the ``place``-th layer of a stage does again."""
    recompute, seq = training.recompute, training.seq
    attention = attention_flops(block, seq, Convention.EXACT)
    met = matrix_parameters(block, hidden, active=True) + _filled(block, hidden, training)
    matrices = 2.0 * seq * met
    if recompute.whole(place):
        return matrices + attention
    match block:
        case Attention() | LatentAttention():
            core = attention if recompute.covers("core_attn", place) else 0.0
            return core + 2.0 * seq * _projected_again(block, recompute, place, hidden)
        case Mlp() if recompute.covers("mlp", place):
            return matrices
        case Experts() if recompute.covers("moe", place):
            return matrices
        case _:
            return 0.0


def _projected_again(
    block: Attention | LatentAttention, recompute: Recompute, place: int, hidden: int
) -> float:
    """Elements of the projections of queries, keys and values that are computed again."""
    if recompute.covers("qkv", place):
        out = block.heads * (block.v_dim if isinstance(block, LatentAttention) else block.head_dim) * hidden
        return matrix_parameters(block, hidden) - out
    if isinstance(block, LatentAttention) and recompute.covers("mla_up_proj", place):
        queries = (block.q_lora or hidden) * block.heads * block.head_dim
        return queries + block.kv_lora * block.heads * (block.nope_dim + block.v_dim)
    return 0.0


def rank_flops(model: Model, layout: Layout, training: Training) -> tuple[float, ...]:
    """Forward FLOPs of a step on one rank of each stage. Over all ranks they are those of the model and what
    tensor ranks do alike: key heads fewer than ranks, down-projections of latent attention without sequence
    parallelism, first and last adapters, and rows of the head that pad it.
    """
    adapters = _adapters(model, layout, training, backward=False)
    return tuple(map(sum, zip(_without_adapters(model, layout, training), adapters, strict=True)))


def _without_adapters(model: Model, layout: Layout, training: Training) -> list[float]:
    tokens = training.global_batch * training.seq / (layout.dp * layout.cp)
    found: list[float] = []
    for stage, numbers in enumerate(_stages(model, layout)):
        sizes = sum(
            _elements_of_rank(block, model.hidden, layout, training)
            for each in numbers
            for block in model.all_layers[each]
        )
        attention = sum(
            attention_flops(block, training.seq, Convention.EXACT)
            for each in numbers
            for block in model.all_layers[each]
        )
        if stage == layout.pp - 1:
            rows = layout.tp if layout.has_sequence_parallel else 1
            sizes += -(-model.vocab // layout.tp) * model.hidden * (1 + model.mtp_layers)
            sizes += 2 * model.hidden**2 * model.mtp_layers / rows
        found.append(tokens * (2.0 * sizes + attention / training.seq / layout.tp))
    return found


def _elements_of_rank(block: Block, hidden: int, layout: Layout, training: Training) -> float:
    """Active elements of matrices that a token of a rank's sequences meets on that rank."""
    tp = layout.tp
    whole = matrix_parameters(block, hidden, active=True)
    match block:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=head):
            return hidden * head * (2 * heads / tp + 2 * max(1, kv_heads // tp))
        case LatentAttention():
            down = hidden * (block.q_lora + block.kv_lora + block.rope_dim)
            return (whole - down) / tp + down / (tp if layout.has_sequence_parallel else 1)
        case Experts():
            return (whole + _filled(block, hidden, training)) / tp
        case Mlp() | Mamba():
            return whole / tp
