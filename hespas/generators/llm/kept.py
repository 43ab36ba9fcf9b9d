"""What a layer keeps for its backward pass, and what it needs beside that while it runs.

Bytes of one micro-batch on one rank. Inputs of norms and of matrix products are kept, queries, keys, values,
results of attention with one 32-bit number a query and head (arXiv 2205.14135), and inputs of activations:
what fused kernels keep (arXiv 2205.05198, section 4.1, without its scores and dropout masks). Inputs of
products are kept in the format of the products, the rest in that of activations. With
sequence parallelism what stands between tensor-parallel regions is kept in parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hespas.generators.llm.adapters import adapted_layers
from hespas.generators.llm.mamba import scanned_chunks
from hespas.generators.llm.model import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    Layer,
    Mamba,
    Mlp,
    mamba_projected,
)
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.settings import LAYER_INPUT
from hespas.graph.columns import dtype

__all__ = [
    "Parts",
    "Work",
    "kept_of_layer",
    "matrix_shapes",
    "storage",
    "total",
    "whole_of_layer",
    "work_of_layer",
]

Parts = dict[str, int]
"""Bytes by what they are of."""

_ROUTER_BYTES = 13
"""Of each token and expert: scores and probabilities before and after, 32 bits, and whether it is chosen."""


def storage(elements: int, element: str) -> int:
    """Bytes of so many elements, with their scales."""
    return dtype(element).storage_bytes(elements)


def total(*parts: Parts) -> Parts:
    """The sum, by what they are of."""
    names = dict.fromkeys(name for each in parts for name in each)
    return {name: sum(each.get(name, 0) for each in parts) for name in names}


class Work(NamedTuple):
    """What a layer needs beyond what it keeps, at its worst: in the forward and in the backward pass."""

    forward: int
    backward: int


class _Kept(NamedTuple):
    """One tensor: what it is of, the module that computes it again, whether only the layer's input is."""

    of: str
    module: str
    bytes: int


def kept_of_layer(rank: Rank, layer: Layer, place: int) -> Parts:
    """What the ``place``-th layer of a stage keeps, by part."""
    recompute = rank.training.recompute
    stream = storage(rank.rows * rank.hidden, rank.precision.compute)
    reaches = recompute.layers < 0 or place < recompute.layers
    offloaded = recompute.offloaded if reaches else frozenset[str]()
    if recompute.whole(place):
        away = offloaded.intersection({"block", LAYER_INPUT})
        return {"layer inputs": 0 if away else stream}
    if recompute.per_operation:
        return total({"layer inputs": stream}, *(_by_operation(rank, block) for block in layer))
    kept: Parts = {}
    for block in layer:
        for each in _tensors(rank, block):
            again = _again(block, each.module)
            dropped = any(recompute.covers(name, place) for name in again)
            if not dropped and not offloaded.intersection((*again, "block")):
                kept[each.of] = kept.get(each.of, 0) + each.bytes
    return kept


def whole_of_layer(rank: Rank, layer: Layer) -> Parts:
    """What a layer keeps where nothing is computed again: what is there while it is computed again."""
    kept: Parts = {}
    for block in layer:
        for each in _tensors(rank, block):
            kept[each.of] = kept.get(each.of, 0) + each.bytes
    return kept


def _again(block: Block, module: str) -> tuple[str, ...]:
    """Names of :data:`hespas.generators.llm.settings.MODULES` under which a tensor of a block is dropped."""
    inner = module not in {"", "layernorm"}
    if isinstance(block, Mlp):
        return (module, "mlp") if inner else (module,)
    if isinstance(block, Experts):
        return (module, "moe") if inner else (module,)
    return (module,)


def _tensors(rank: Rank, block: Block) -> Iterator[_Kept]:
    compute, hidden = rank.precision.compute, rank.hidden
    stream = storage(rank.rows * hidden, compute)
    yield _Kept("norms and residuals", "", stream * (2 if rank.model.post_norms else 1))
    fused = isinstance(block, Attention | Mlp)
    if _keeps_inputs(rank, block):
        normed = storage(rank.rows * hidden, _operand(rank) if fused else compute)
        yield _Kept("norms and residuals", "layernorm", normed)
    match block:
        case Attention():
            yield from _attention(rank, block)
        case LatentAttention():
            yield from _latent(rank, block)
        case Mlp():
            act = "mlp_act" if _keeps_inputs(rank, block) else "none"
            yield from _mlp(rank, block.ffn // rank.layout.tp, gated=block.gated, of="mlp", act=act)
        case Experts():
            yield from _experts(rank, block)
        case Mamba():
            yield from _mamba(rank, block)


def _keeps_inputs(rank: Rank, block: Block) -> bool:
    """Whether matrices of a block, or adapters beside them, are trained: else their inputs are not kept."""
    return rank.trains_weights or bool(adapted_layers(rank, block))


def _operand(rank: Rank) -> str:
    """Format in which inputs of products are kept."""
    return rank.precision.matmul


def _kv_heads(rank: Rank, block: Attention) -> int:
    return max(1, block.kv_heads // rank.layout.tp)


def _attention(rank: Rank, block: Attention) -> Iterator[_Kept]:
    heads, kv_heads = block.heads // rank.layout.tp, _kv_heads(rank, block)
    queries, keys = rank.tokens * heads * block.head_dim, rank.tokens * kv_heads * block.head_dim
    inside = rank.precision.attention
    yield _Kept("attention", "qkv", storage(queries, inside) + 2 * storage(keys, inside))
    if block.qk_norm:
        yield _Kept("attention", "qkv", storage(queries + keys, rank.precision.compute))
    yield from _results(rank, queries, heads)


def _results(rank: Rank, elements: int, heads: int) -> Iterator[_Kept]:
    """Results of attention, kept by it and by the projection after it: one tensor where they agree."""
    training, inside = rank.training, rank.precision.attention
    yield _Kept("attention", "", storage(elements, inside))
    if inside not in {rank.precision.compute, _operand(rank)} or training.precision.name == "fp8-delayed":
        yield _Kept("attention", "", storage(elements, _operand(rank)))
    if rank.layout.context_all_to_all and rank.layout.cp > 1:
        yield _Kept("attention", "core_attn", storage(elements, inside))
    yield _Kept("attention", "core_attn", 4 * rank.tokens * heads)


def _latent(rank: Rank, block: LatentAttention) -> Iterator[_Kept]:
    compute, heads = rank.precision.compute, block.heads // rank.layout.tp
    narrow = rank.rows * (2 * block.q_lora + 2 * block.kv_lora + block.rope_dim)
    yield _Kept("attention", "", storage(narrow, compute))
    inside = rank.precision.attention
    each = rank.tokens * heads
    yield _Kept("attention", "mla_up_proj", 2 * storage(each * block.head_dim, inside))
    yield _Kept("attention", "mla_up_proj", storage(each * block.v_dim, inside))
    yield from _results(rank, each * block.v_dim, heads)


def _mlp(rank: Rank, ffn: int, *, gated: bool, of: str, act: str) -> Iterator[_Kept]:
    yield from _activated(rank, rank.tokens, ffn, gated=gated, of=of, act=act)


def _activated(rank: Rank, tokens: int, ffn: int, *, gated: bool, of: str, act: str) -> Iterator[_Kept]:
    """The input of an activation and of the product behind it."""
    training, compute = rank.training, rank.precision.compute
    wide = (2 if gated else 1) * tokens * ffn
    yield _Kept(of, "inner", storage(wide, compute))
    if act != "none":
        yield _Kept(of, act, storage(tokens * ffn, _operand(rank)))
    if gated and training.style == "torchtitan" and not training.compiled:
        yield _Kept(of, act, storage(tokens * ffn, compute))


def _experts(rank: Rank, block: Experts) -> Iterator[_Kept]:
    tokens, layout = rank.received(block), rank.layout
    width = block.latent or rank.hidden
    yield _Kept("experts", "inner", _ROUTER_BYTES * rank.rows * block.experts)
    arrived = storage(tokens * width, _operand(rank)) if rank.trains_weights else 0
    yield _Kept("experts", "inner", arrived + 4 * tokens)
    act = "moe_act" if rank.trains_weights else "none"
    yield from _activated(rank, tokens, block.ffn // layout.etp, gated=block.gated, of="experts", act=act)
    if block.latent and rank.trains_weights:
        yield _Kept("experts", "inner", storage(2 * rank.rows * width, rank.precision.compute))
    if block.shared_ffn:
        shared = block.shared_ffn // layout.tp
        act = "inner" if _keeps_inputs(rank, block) else "none"
        yield from _mlp(rank, shared, gated=block.gated, of="experts", act=act)


def _mamba(rank: Rank, block: Mamba) -> Iterator[_Kept]:
    """Input projection, results of the scan, 32-bit states between its chunks, input of the last product."""
    compute, tp = rank.precision.compute, rank.layout.tp
    inner = rank.tokens * block.inner // tp
    yield _Kept("mamba", "", storage(rank.tokens * mamba_projected(block) // tp, compute))
    states = scanned_chunks(rank, block)[0] * block.heads * block.head_dim * block.state // tp
    yield _Kept("mamba", "", storage(inner, compute) + 4 * states)
    if rank.trains_weights:
        yield _Kept("mamba", "", storage(inner, _operand(rank)))


def _by_operation(rank: Rank, block: Block) -> Parts:
    """Results of attention and of every other product, of those of a block in order, and of the sums over
    tensor ranks. A compiled layer does not keep the results of its last product, which no gradient needs.
    """
    tp, tokens, compute = rank.layout.tp, rank.tokens, rank.precision.compute
    summed = rank.rows * rank.hidden if tp > 1 else 0
    wide = 0 if rank.training.compiled else tokens * rank.hidden + summed
    match block:
        case Attention():
            heads, kv_heads = block.heads // tp, _kv_heads(rank, block)
            queries = tokens * heads * block.head_dim
            results = 2 * queries + tokens * kv_heads * block.head_dim + summed
            return {"attention": storage(results, compute) + 4 * tokens * heads}
        case LatentAttention():
            heads = block.heads // tp
            up = heads * (block.head_dim + block.v_dim) + block.kv_lora
            return {"attention": storage(tokens * up + summed, compute) + 4 * tokens * heads}
        case Mlp():
            return {"mlp": storage(tokens * block.ffn // tp + wide, compute)}
        case Experts():
            routed = rank.received(block) * block.ffn // rank.layout.etp
            return {"experts": storage(routed + tokens * block.shared_ffn // tp + wide, compute)}
        case Mamba():
            return {"mamba": storage(tokens * mamba_projected(block) // tp, compute)}


def work_of_layer(rank: Rank, layer: Layer) -> Work:
    """The most that the last block of a layer needs beside what is kept: it is the last to run forward, with
    all before it kept, and the first to run backward.
    """
    forward, backward = _work(rank, layer[-1])
    return Work(forward, backward)


def _work(rank: Rank, block: Block) -> Work:
    compute, tp = rank.precision.compute, rank.layout.tp
    stream = storage(rank.rows * rank.hidden, compute)
    match block:
        case Attention() | LatentAttention():
            return Work(2 * stream, stream + _attention_work(rank, block))
        case Mlp():
            return Work(
                2 * stream, stream + _activation_work(rank, rank.tokens, block.ffn // tp, block.gated)
            )
        case Experts():
            return _experts_work(rank, block, stream)
        case Mamba():
            projected = storage(rank.tokens * mamba_projected(block) // tp, compute)
            return Work(2 * stream, stream + 2 * projected)


def _activation_work(rank: Rank, tokens: int, ffn: int, gated: bool) -> int:
    """Gradients of an activation's result and input, of which the first takes the place of the result."""
    compute = rank.precision.compute
    result = storage(tokens * ffn, compute)
    freed = storage(tokens * ffn, _operand(rank))
    return storage((2 if gated else 1) * tokens * ffn, compute) + result - min(freed, result)


def _attention_work(rank: Rank, block: Attention | LatentAttention) -> int:
    """Gradients of the result, of queries, keys and values, the sum of queries' in 32 bits, and all of these
    once more as the gradient of one projection's result.
    """
    heads = block.heads // rank.layout.tp
    if isinstance(block, Attention):
        keys = _kv_heads(rank, block) * block.head_dim
        queries, values, result = heads * block.head_dim, keys, heads * block.head_dim
    else:
        queries = keys = heads * block.head_dim
        values = result = heads * block.v_dim
    all_three = queries + keys + values
    return storage(rank.tokens * (result + 2 * all_three), rank.precision.compute) + 4 * rank.tokens * queries


def _experts_work(rank: Rank, block: Experts, stream: int) -> Work:
    """Forward: when results return, the tokens sent and received, and the results before and after they
    travel back are all still there, beside two sums. Backward: gradients of the results as they arrive and in
    the order of experts, or those of the activation.
    """
    layout, compute = rank.layout, rank.precision.compute
    tokens = rank.received(block)
    copy = storage(tokens * (block.latent or rank.hidden), compute)
    travels, several = layout.ep > 1, block.experts // layout.ep > 1
    forward = (1 + 2 * travels + several) * copy + 2 * stream
    ffn = block.ffn // layout.etp
    arriving = (1 + several) * copy + storage(tokens * ffn, compute)
    return Work(forward, stream + max(arriving, _activation_work(rank, tokens, ffn, block.gated)))


def matrix_shapes(rank: Rank, block: Block) -> list[tuple[int, int]]:
    """Shapes of the matrices of a block's linear layers on a rank, each kind once."""
    hidden, tp = rank.hidden, rank.layout.tp
    match block:
        case Attention():
            inner = block.heads // tp * block.head_dim
            return [(inner + 2 * _kv_heads(rank, block) * block.head_dim, hidden), (hidden, inner)]
        case LatentAttention():
            heads = block.heads // tp
            q_in = block.q_lora or hidden
            down = [(block.q_lora, hidden)] if block.q_lora else []
            down.append((block.kv_lora + block.rope_dim, hidden))
            up = [(heads * block.head_dim, q_in), (heads * (block.nope_dim + block.v_dim), block.kv_lora)]
            return [*down, *up, (hidden, heads * block.v_dim)]
        case Mlp():
            return _two(block.ffn // tp, hidden, block.gated)
        case Experts():
            width = block.latent or hidden
            latent = [(width, hidden), (hidden, width)] if block.latent else []
            shared = _two(block.shared_ffn // tp, hidden, block.gated) if block.shared_ffn else []
            return latent + shared + _two(block.ffn // rank.layout.etp, width, block.gated)
        case Mamba():
            return [(mamba_projected(block) // tp, hidden), (hidden, block.inner // tp)]


def _two(ffn: int, width: int, gated: bool) -> list[tuple[int, int]]:
    return [((2 if gated else 1) * ffn, width), (width, ffn)]
