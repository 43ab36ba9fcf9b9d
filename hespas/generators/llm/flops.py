"""FLOPs of a training step in closed form: model FLOPs as in publications, and hardware FLOPs.

Model FLOPs (arXiv 2104.04473, section 5.1 without recomputation; 2204.02311, appendix B) are 6 per token for
each active matrix parameter. For attention they are 12 per token for each layer, head, dimension of a head
and attended key. The attended keys are half of a sequence under a causal mask, and at most the window. With
adapters (LoRA) the gradients of frozen weights are omitted, which leaves 4 per parameter. The head is
counted, the embedding is not. Multi-token prediction adds its layers and the head once more. A Mamba-2 block
is counted by its chunked scan (2405.21060, section 6). Hardware FLOPs add recomputation, repeated work of
ranks, and padding.

``HALF`` counts half of the square of attention, like most publishers; ``EXACT`` the s (s + 1) / 2 pairs;
``FULL`` the whole square, like llm-foundry and older reports of MaxText and Megatron-LM.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from enum import Enum

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
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import Recompute, Training
from hespas.generators.llm.weights import adapter_flops

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
    """Convention of a source for counting attention FLOPs: all pairs of query and key, or only the pairs that
    a causal mask leaves.
    """

    HALF = "half"
    EXACT = "exact"
    FULL = "full"


def _pairs(block: Attention | LatentAttention, seq: int, convention: Convention) -> float:
    """Return the number of attended pairs of query and key in one sequence."""
    window, chunk = (block.window, block.chunk) if isinstance(block, Attention) else (0, 0)
    if convention is Convention.FULL:
        return float(seq) * min(window or seq, chunk or seq, seq)
    pairs = attended_pairs(seq, window, chunk)
    return pairs if convention is Convention.EXACT else pairs - min(window or seq, chunk or seq, seq) / 2


def attention_flops(block: Block, seq: int, convention: Convention = Convention.HALF) -> float:
    """Return the forward FLOPs of one sequence in attention scores and weighted sums. For a Mamba-2 block,
    return the FLOPs of its scan.
    """
    match block:
        case Attention(heads=heads, head_dim=head):
            return 4.0 * heads * head * _pairs(block, seq, convention)
        case LatentAttention(heads=heads, head_dim=head, v_dim=value):
            return 2.0 * heads * (head + value) * _pairs(block, seq, convention)
        case Mamba():
            # Per token: scores of its chunk once per group, their product with the values, the final state of
            # the chunk, and the contribution of the state before.
            chunk = min(block.chunk, seq)
            scores = 2.0 * block.groups * chunk * block.state
            return seq * (scores + 2.0 * block.inner * chunk + 4.0 * block.inner * block.state)
        case Mlp() | Experts():
            return 0.0


_PARTS: Mapping[type[Block], str] = {
    Attention: "attention projections",
    LatentAttention: "attention projections",
    Mlp: "feed-forward",
    Mamba: "state-space projections",
}


def forward_parts(model: Model, seq: int, convention: Convention = Convention.HALF) -> dict[str, float]:
    """Return the forward FLOPs per token for each component of the model. FLOPs that depend on the length of
    the sequence are averaged over its tokens.
    """
    parts: defaultdict[str, float] = defaultdict(float)
    for block, count in Counter(model.blocks()).items():
        active = float(matrix_parameters(block, model.hidden, active=True))
        sizes: dict[str, float] = {}
        if isinstance(block, Experts):
            matrices = 3 if block.gated else 2
            fixed = {
                "router": float(model.hidden * block.experts),
                "shared experts": float(matrices * model.hidden * block.shared_ffn),
                "latent projections": 2.0 * model.hidden * block.latent,
            }
            sizes = {"experts": active - sum(fixed.values())} | fixed
        else:
            sizes[_PARTS[type(block)]] = active
        for name, size in sizes.items():
            parts[name] += 2.0 * count * size
        name = "state-space scan" if isinstance(block, Mamba) else "attention"
        parts[name] += count * attention_flops(block, seq, convention) / seq
    parts["head"] = 2.0 * model.vocab * model.hidden * (1 + model.mtp_layers)
    parts["further predictions"] = 4.0 * model.hidden**2 * model.mtp_layers
    return {name: flops for name, flops in parts.items() if flops}


def forward_flops(model: Model, seq: int, convention: Convention = Convention.HALF) -> float:
    """Return the forward FLOPs of one sequence."""
    return seq * sum(forward_parts(model, seq, convention).values())


def model_flops(model: Model, training: Training, convention: Convention = Convention.HALF) -> float:
    """Return the model FLOPs of a training step: three times the forward pass.

    If only adapters are trained, matmuls with frozen matrices count two times instead of three, because the
    matrices have no gradient. Attention counts three times, because all of its operands have gradients.
    """
    blocks = Counter(model.blocks())
    attention = sum(
        count * attention_flops(block, training.seq, convention) for block, count in blocks.items()
    )
    forward = forward_flops(model, training.seq, convention)
    matrices = 2 if training.lora_rank else 3
    return training.global_batch * (matrices * (forward - attention) + 3 * attention)


def hardware_flops(model: Model, training: Training, layout: Layout | None = None) -> float:
    """Return the hardware FLOPs of a training step: model FLOPs, recomputation, and work that ranks repeat or
    pad (:func:`rank_flops`), including padding tokens of experts.

    Recomputation includes the modules that the settings name. It also includes the scores in the backward
    pass of fused attention, which has five matmuls instead of four (arXiv 2205.14135, 2307.08691). ``layout``
    gives the layers of each stage; without it, one rank is assumed. All ranks are counted like the busiest
    one, as in an op graph. Adapters are counted on every rank that has them.
    """
    seq, layout = training.seq, layout or Layout()
    recomputed = 0.0
    for numbers in _stages(model, layout):
        for index, number in enumerate(numbers):
            for block in model.all_layers[number]:
                scores = 0.0
                if isinstance(block, Attention | LatentAttention):
                    scores = 2.0 * block.heads * block.head_dim * _pairs(block, seq, Convention.EXACT)
                recomputed += scores + _recomputed_flops(block, training, index, model.hidden, layout.tp)
    stage_ranks = layout.ranks / layout.pp
    ranks = sum(_flops_without_adapters(model, layout, training)) * stage_ranks
    repeated = ranks - training.global_batch * forward_flops(model, seq, Convention.EXACT)
    passes = 2 if training.lora_rank else 3
    once = model_flops(model, training, Convention.EXACT) + passes * repeated
    adapters = sum(_adapters(model, layout, training, backward=True)) * stage_ranks
    return once + training.global_batch * recomputed + adapters


def _adapters(model: Model, layout: Layout, training: Training, *, backward: bool) -> Iterator[float]:
    """Yield the FLOPs of the adapters in a step, for one rank of each stage. If ``backward`` is True, the two
    gradient matmuls of each adapter matrix and recomputation are included.
    """
    rank = ModelRank(model, layout, training)
    count = micro_batches(layout, training)
    for numbers in _stages(model, layout):
        flops = 0.0
        for index, number in enumerate(numbers):
            for block in model.all_layers[number]:
                flops += (3 if backward else 1) * adapter_flops(rank, block)
                if backward:
                    names = _recomputed_layers(block, training.recompute, index)
                    flops += adapter_flops(rank, block, names)
        yield count * flops


def _recomputed_layers(block: Block, recompute: Recompute, index: int) -> Collection[str] | None:
    """Return the names of the linear layers of a block that the backward pass computes again; None if all
    are.
    """
    whole = "mlp" if isinstance(block, Mlp) else "moe" if isinstance(block, Experts) else "block"
    if recompute.covers(whole, index):
        return None
    if isinstance(block, Attention | LatentAttention) and recompute.covers("qkv", index):
        return ("qkv", "qkv_down", "q_up", "kv_up")
    return ("q_up", "kv_up") if recompute.covers("mla_up_proj", index) else ()


def _stages(model: Model, layout: Layout) -> list[list[int]]:
    """Return the layer numbers of each pipeline stage."""
    return [[number for chunk in chunks for number in chunk] for chunks in layers_of_stages(model, layout)]


def _padding_elements(block: Block, hidden: int, training: Training) -> float:
    """Return the mean number of expert matrix elements per token that process padding or the surplus of load
    imbalance.
    """
    if not isinstance(block, Experts):
        return 0.0
    return block.topk * expert_parameters(block, hidden) * (training.expert_load - 1)


def _recomputed_flops(block: Block, training: Training, index: int, hidden: int, tp: int) -> float:
    """Return the forward FLOPs of a sequence that the backward pass of the ``index``-th layer of a stage
    recomputes on all ``tp`` tensor-parallel ranks.
    """
    recompute, seq = training.recompute, training.seq
    attention = attention_flops(block, seq, Convention.EXACT)
    elements = matrix_parameters(block, hidden, active=True) + _padding_elements(block, hidden, training)
    matrices = 2.0 * seq * elements
    if recompute.whole(index):
        return matrices + attention
    match block:
        case Attention() if recompute.per_operation and recompute.covers("qkv", index):
            heads = block.kv_heads + (block.heads if tp == 1 else 0)  # keys, and the output projection
            return 2.0 * seq * hidden * block.head_dim * heads
        case Mlp() if recompute.per_operation and recompute.covers("mlp_act", index):
            return 2.0 * seq * hidden * block.ffn if block.gated else 0.0
        case Attention() | LatentAttention():
            core = attention if recompute.covers("core_attn", index) else 0.0
            projected = 0.0  # elements of the recomputed projections of queries, keys and values
            if recompute.covers("qkv", index):
                value_dim = block.v_dim if isinstance(block, LatentAttention) else block.head_dim
                projected = matrix_parameters(block, hidden) - block.heads * value_dim * hidden
            elif isinstance(block, LatentAttention) and recompute.covers("mla_up_proj", index):
                queries = (block.q_lora or hidden) * block.heads * block.head_dim
                projected = queries + block.kv_lora * block.heads * (block.nope_dim + block.v_dim)
            return core + 2.0 * seq * projected
        case Mlp() if recompute.covers("mlp", index):
            return matrices
        case Experts() if recompute.covers("moe", index):
            return matrices
        case _:
            return 0.0


def rank_flops(model: Model, layout: Layout, training: Training) -> tuple[float, ...]:
    """Return the forward FLOPs of a step on one rank of each stage.

    The sum over all ranks exceeds the FLOPs of the model by the work that tensor-parallel ranks repeat: key
    heads (if fewer than ranks), down-projections of latent attention without sequence parallelism, the first
    and last matrices of adapters, and padding rows of the head.
    """
    adapters = _adapters(model, layout, training, backward=False)
    return tuple(map(sum, zip(_flops_without_adapters(model, layout, training), adapters, strict=True)))


def _flops_without_adapters(model: Model, layout: Layout, training: Training) -> list[float]:
    tokens = training.global_batch * training.seq / (layout.dp * layout.cp)
    flops: list[float] = []
    for stage, numbers in enumerate(_stages(model, layout)):
        sizes = sum(
            _elements_of_rank(block, model.hidden, layout, training)
            for number in numbers
            for block in model.all_layers[number]
        )
        attention = sum(
            attention_flops(block, training.seq, Convention.EXACT)
            for number in numbers
            for block in model.all_layers[number]
        )
        if stage == layout.pp - 1:
            rows = layout.tp if layout.has_sequence_parallel else 1
            sizes += -(-model.vocab // layout.tp) * model.hidden * (1 + model.mtp_layers)
            sizes += 2 * model.hidden**2 * model.mtp_layers / rows
        flops.append(tokens * (2.0 * sizes + attention / training.seq / layout.tp))
    return flops


def _elements_of_rank(block: Block, hidden: int, layout: Layout, training: Training) -> float:
    """Return the number of active matrix elements of a block on one rank, per token of the rank's
    sequences.
    """
    tp = layout.tp
    whole = matrix_parameters(block, hidden, active=True)
    match block:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=head):
            return hidden * head * (2 * heads / tp + 2 * max(1, kv_heads // tp))
        case LatentAttention():
            down = hidden * (block.q_lora + block.kv_lora + block.rope_dim)
            return (whole - down) / tp + down / (tp if layout.has_sequence_parallel else 1)
        case Experts():
            return (whole + _padding_elements(block, hidden, training)) / tp
        case Mlp() | Mamba():
            return whole / tp
