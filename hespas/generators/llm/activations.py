"""Activation memory of a layer: bytes saved for its backward pass, working memory, and offload to the host.

All bytes are for one micro-batch on one rank. A layer saves the inputs of norms and of matrix products,
queries, keys and values, the attention result with one 32-bit number per query and head (arXiv 2205.14135),
and the inputs of activation functions. This follows arXiv 2205.05198, section 4.1, but fused kernels save no
scores and no dropout masks. Inputs of products are saved in the format of the products, the rest in the
format of activations. With sequence parallelism, values between tensor-parallel regions are sharded.

Offloaded activations of a layer are copied to the host after its forward pass. They are loaded during the
backward pass of the following layer, before the layer needs them. An optimizer on the host (arXiv 2101.06840)
receives gradients and returns updated weights. The memory account of the device omits the offloaded bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hespas.generators.llm.attention import context_buffers
from hespas.generators.llm.kernels import KernelWriter, TensorSpec, Value
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
from hespas.generators.llm.rank import ModelRank
from hespas.generators.llm.settings import LAYER_INPUT
from hespas.generators.llm.weights import adapted_layers
from hespas.graph.columns import dtype

__all__ = [
    "LayerWork",
    "Parts",
    "load_activations",
    "matrix_shapes",
    "offloaded_bytes",
    "offloaded_ports",
    "saved_of_layer",
    "storage",
    "store_activations",
    "total",
    "whole_of_layer",
    "work_of_layer",
]

Parts = dict[str, int]
"""Bytes by kind of memory."""

_ROUTER_BYTES = 13
"""Router bytes per token and expert: scores and probabilities before and after in 32 bits, and the choice."""


def storage(elements: int, element: str) -> int:
    """Return the bytes that ``elements`` elements of a format need, including the scales of block formats."""
    return dtype(element).storage_bytes(elements)


def total(*parts: Parts) -> Parts:
    """Return the sum of several memory accounts, for each kind of memory."""
    names = dict.fromkeys(name for summand in parts for name in summand)
    return {name: sum(summand.get(name, 0) for summand in parts) for name in names}


class LayerWork(NamedTuple):
    """Peak working memory of a layer beyond its saved activations, in the forward and in the
    backward pass.
    """

    forward: int
    backward: int


class _SavedTensor(NamedTuple):
    """Tensor that is saved for the backward pass. ``part`` is its entry in the memory account. ``module`` is
    the module whose recomputation makes saving the tensor unnecessary.
    """

    part: str
    module: str
    bytes: int


def saved_of_layer(rank: ModelRank, layer: Layer, index: int) -> Parts:
    """Return the bytes that the ``index``-th layer of a pipeline stage saves for its backward pass, by kind
    of memory.
    """
    recompute = rank.training.recompute
    stream = storage(rank.rows * rank.hidden, rank.precision.compute)
    is_covered = recompute.layers < 0 or index < recompute.layers
    offloaded = recompute.offloaded if is_covered else frozenset[str]()
    if recompute.whole(index):
        is_offloaded = bool(offloaded.intersection({"block", LAYER_INPUT}))
        return {"layer inputs": 0 if is_offloaded else stream}
    if recompute.per_operation:
        return total({"layer inputs": stream}, *(_by_operation(rank, block) for block in layer))
    saved: Parts = {}
    for block in layer:
        for tensor in _tensors(rank, block):
            # Names of :data:`hespas.generators.llm.settings.MODULES` whose recomputation drops the tensor.
            modules = [tensor.module]
            if isinstance(block, Mlp | Experts) and tensor.module not in {"", "layernorm"}:
                modules.append("mlp" if isinstance(block, Mlp) else "moe")
            is_dropped = any(recompute.covers(module, index) for module in modules)
            if not is_dropped and not offloaded.intersection((*modules, "block")):
                saved[tensor.part] = saved.get(tensor.part, 0) + tensor.bytes
    return saved


def whole_of_layer(rank: ModelRank, layer: Layer) -> Parts:
    """Return the bytes that a layer saves without recomputation. A recomputed layer needs them during its
    backward pass.
    """
    saved: Parts = {}
    for block in layer:
        for tensor in _tensors(rank, block):
            saved[tensor.part] = saved.get(tensor.part, 0) + tensor.bytes
    return saved


def _tensors(rank: ModelRank, block: Block) -> Iterator[_SavedTensor]:
    compute, hidden = rank.precision.compute, rank.hidden
    stream = storage(rank.rows * hidden, compute)
    yield _SavedTensor("norms and residuals", "", stream * (2 if rank.model.post_norms else 1))
    fused = isinstance(block, Attention | Mlp)
    if _saves_inputs(rank, block):
        normed = storage(rank.rows * hidden, rank.precision.matmul if fused else compute)
        yield _SavedTensor("norms and residuals", "layernorm", normed)
    match block:
        case Attention():
            yield from _attention(rank, block)
        case LatentAttention():
            yield from _latent_attention(rank, block)
        case Mlp():
            module = "mlp_act" if _saves_inputs(rank, block) else ""
            ffn = block.ffn // rank.layout.tp
            yield from _activated(rank, rank.tokens, ffn, gated=block.gated, part="mlp", module=module)
        case Experts():
            yield from _experts(rank, block)
        case Mamba():
            # Input projection, results of the scan, 32-bit states between its chunks, input of the last
            # product.
            tp = rank.layout.tp
            inner = rank.tokens * block.inner // tp
            yield _SavedTensor("mamba", "", storage(rank.tokens * mamba_projected(block) // tp, compute))
            states = scanned_chunks(rank, block)[0] * block.heads * block.head_dim * block.state // tp
            yield _SavedTensor("mamba", "", storage(inner, compute) + 4 * states)
            if rank.trains_weights:
                yield _SavedTensor("mamba", "", storage(inner, rank.precision.matmul))


def _saves_inputs(rank: ModelRank, block: Block) -> bool:
    """Return True if the backward pass needs the inputs of the block's matrices, because the matrices or
    their adapters are trained.
    """
    return rank.trains_weights or bool(adapted_layers(rank, block))


def _kv_heads(rank: ModelRank, block: Attention) -> int:
    return max(1, block.kv_heads // rank.layout.tp)


def _attention(rank: ModelRank, block: Attention) -> Iterator[_SavedTensor]:
    heads, kv_heads = block.heads // rank.layout.tp, _kv_heads(rank, block)
    queries, keys = rank.tokens * heads * block.head_dim, rank.tokens * kv_heads * block.head_dim
    inside = rank.precision.attention
    yield _SavedTensor("attention", "qkv", storage(queries, inside) + 2 * storage(keys, inside))
    if block.qk_norm:
        yield _SavedTensor("attention", "qkv", storage(queries + keys, rank.precision.compute))
    yield from _results(rank, queries, heads)


def _results(rank: ModelRank, elements: int, heads: int) -> Iterator[_SavedTensor]:
    """Yield the saved results of attention. The projection after attention needs an additional copy of the
    result, unless attention computes in the format of activations or of matmuls (and not with
    ``fp8-delayed``).
    """
    training, inside = rank.training, rank.precision.attention
    operand = rank.precision.matmul
    yield _SavedTensor("attention", "", storage(elements, inside))
    if inside not in {rank.precision.compute, operand} or training.precision.name == "fp8-delayed":
        yield _SavedTensor("attention", "", storage(elements, operand))
    if rank.layout.context_all_to_all and rank.layout.cp > 1:
        yield _SavedTensor("attention", "core_attn", storage(elements, inside))
    yield _SavedTensor("attention", "core_attn", 4 * rank.tokens * heads)


def _latent_attention(rank: ModelRank, block: LatentAttention) -> Iterator[_SavedTensor]:
    compute, heads = rank.precision.compute, block.heads // rank.layout.tp
    narrow = rank.rows * (2 * block.q_lora + 2 * block.kv_lora + block.rope_dim)
    yield _SavedTensor("attention", "", storage(narrow, compute))
    inside = rank.precision.attention
    vectors = rank.tokens * heads
    yield _SavedTensor("attention", "mla_up_proj", 2 * storage(vectors * block.head_dim, inside))
    yield _SavedTensor("attention", "mla_up_proj", storage(vectors * block.v_dim, inside))
    yield from _results(rank, vectors * block.v_dim, heads)


def _activated(
    rank: ModelRank, tokens: int, ffn: int, *, gated: bool, part: str, module: str
) -> Iterator[_SavedTensor]:
    """Yield the saved input of an activation function and the saved input of the matmul after it. If
    ``module`` is empty, the input of the matmul is not saved. Uncompiled torchtitan also saves an
    intermediate result of gated functions.
    """
    training, compute = rank.training, rank.precision.compute
    wide = (2 if gated else 1) * tokens * ffn
    yield _SavedTensor(part, "inner", storage(wide, compute))
    if module:
        yield _SavedTensor(part, module, storage(tokens * ffn, rank.precision.matmul))
    if gated and training.style == "torchtitan" and not training.compiled:
        yield _SavedTensor(part, module or "none", storage(tokens * ffn, compute))


def _experts(rank: ModelRank, block: Experts) -> Iterator[_SavedTensor]:
    tokens, layout = rank.received(block), rank.layout
    width = block.latent or rank.hidden
    yield _SavedTensor("experts", "inner", _ROUTER_BYTES * rank.rows * block.experts)
    received = storage(tokens * width, rank.precision.matmul) if rank.trains_weights else 0
    yield _SavedTensor("experts", "inner", received + 4 * tokens)
    module = "moe_act" if rank.trains_weights else ""
    ffn = block.ffn // layout.etp
    yield from _activated(rank, tokens, ffn, gated=block.gated, part="experts", module=module)
    if block.latent and rank.trains_weights:
        yield _SavedTensor("experts", "inner", storage(2 * rank.rows * width, rank.precision.compute))
    if block.shared_ffn:
        shared = block.shared_ffn // layout.tp
        module = "inner" if _saves_inputs(rank, block) else ""
        yield from _activated(rank, rank.tokens, shared, gated=block.gated, part="experts", module=module)


def _by_operation(rank: ModelRank, block: Block) -> Parts:
    """Return the bytes that a block saves with selective checkpointing per operation, as in torchtitan. It
    saves the results of attention, of every second matmul (from the first one on), and of the sums over
    tensor-parallel ranks.

    A compiled layer does not save the result of its last matmul, because no gradient needs it.
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


def work_of_layer(rank: ModelRank, layer: Layer) -> LayerWork:
    """Return the working memory of a layer at the block where the layer needs most.

    The figures are relative to a layer whose blocks have all saved their activations. While a block runs,
    the activations of the blocks after it are not yet saved (forward pass) or already freed (backward pass).
    """
    compute, tp = rank.precision.compute, rank.layout.tp
    stream = storage(rank.rows * rank.hidden, compute)
    forward = backward = absent = 0
    for block in reversed(layer):
        ahead, back = 2 * stream, stream
        match block:
            case Attention() | LatentAttention():
                buffers = [
                    sum(storage(math.prod(tensor.shape), tensor.dtype) for tensor in tensors)
                    for tensors in context_buffers(rank, block)
                ]
                ahead += buffers[0]
                back += _attention_work(rank, block) + buffers[1]
            case Mlp():
                back += _activation_work(rank, rank.tokens, block.ffn // tp, block.gated)
            case Experts():
                # The forward peak is at the return of the results: tokens as sent and as received, the
                # results before and after the return, and two sums. The backward peak is the larger one of
                # the gradients of the results, in the order of arrival and of experts, and the gradients of
                # the activation function.
                tokens = rank.received(block)
                copy = storage(tokens * (block.latent or rank.hidden), compute)
                is_sent, several = rank.layout.ep > 1, block.experts // rank.layout.ep > 1
                ahead += (1 + 2 * is_sent + several) * copy
                ffn = block.ffn // rank.layout.etp
                arriving = (1 + several) * copy + storage(tokens * ffn, compute)
                back += max(arriving, _activation_work(rank, tokens, ffn, block.gated))
            case Mamba():
                back += 2 * storage(rank.tokens * mamba_projected(block) // tp, compute)
        forward, backward = max(forward, ahead - absent), max(backward, back - absent)
        absent += sum(tensor.bytes for tensor in _tensors(rank, block))
    return LayerWork(forward, backward)


def _activation_work(rank: ModelRank, tokens: int, ffn: int, gated: bool) -> int:
    """Return the bytes of two gradients in the backward pass of an activation function: the gradients of its
    result and of its input. The gradient of the result overwrites the result.
    """
    compute = rank.precision.compute
    result = storage(tokens * ffn, compute)
    freed = storage(tokens * ffn, rank.precision.matmul)
    return storage((2 if gated else 1) * tokens * ffn, compute) + result - min(freed, result)


def _attention_work(rank: ModelRank, block: Attention | LatentAttention) -> int:
    """Return the working memory [B] of an attention block in the backward pass.

    It holds the gradients of the result, queries, keys and values, the 32-bit sum of the gradient of queries,
    and a copy of the gradients of queries, keys and values as one tensor, for the projection.
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


def matrix_shapes(rank: ModelRank, block: Block) -> list[tuple[int, int]]:
    """Return the shapes of the weight matrices of a block on one rank; each kind of matrix is listed once."""
    hidden, tp = rank.hidden, rank.layout.tp

    def mlp_shapes(ffn: int, width: int, gated: bool) -> list[tuple[int, int]]:
        return [((2 if gated else 1) * ffn, width), (width, ffn)]

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
            return mlp_shapes(block.ffn // tp, hidden, block.gated)
        case Experts():
            width = block.latent or hidden
            latent = [(width, hidden), (hidden, width)] if block.latent else []
            shared = mlp_shapes(block.shared_ffn // tp, hidden, block.gated) if block.shared_ffn else []
            return latent + shared + mlp_shapes(block.ffn // rank.layout.etp, width, block.gated)
        case Mamba():
            return [(mamba_projected(block) // tp, hidden), (hidden, block.inner // tp)]


def offloaded_bytes(rank: ModelRank, layer: Layer, index: int) -> int:
    """Return the bytes of saved activations that the ``index``-th layer of a stage offloads to the host."""
    training = rank.training
    if not training.recompute.offloaded:
        return 0
    without_offload = replace(training.recompute, offloaded=frozenset())
    whole = replace(rank, training=replace(training, recompute=without_offload))
    return sum(saved_of_layer(whole, layer, index).values()) - sum(
        saved_of_layer(rank, layer, index).values()
    )


_LINEAR = frozenset({"fc1", "act"})
_PROJECTED = frozenset({"qkv", "qk_normed", "kv", "exchanged"})
_NORMED = frozenset({"norm", "qkv_input", "fc1_input", "in_input", "shared.fc1_input"})
_PORTS: Mapping[str, frozenset[str]] = {
    "layernorm": _NORMED,
    "qkv": _PROJECTED,
    "mla_up_proj": _PROJECTED,
    "mlp_act": frozenset({"act"}),
    "moe_act": frozenset({"act"}),
    "mlp": _LINEAR,
    "moe": _LINEAR | {"arrived", "scores", "combined", "shared.fc1", "shared.act"},
}
"""Ports of the values of a block that belong to a module."""
_BLOCK_OF: Mapping[str, type[Block]] = {"mlp_act": Mlp, "mlp": Mlp, "moe_act": Experts, "moe": Experts}


def offloaded_ports(
    rank: ModelRank, layer: Layer, number: int, index: int, ports: Iterable[str]
) -> list[str]:
    """Return the ``ports`` (names of forward values) of the ``index``-th layer of a stage that are offloaded
    to the host.
    """
    recompute = rank.training.recompute
    if recompute.whole(index):
        return [f"{number}.0.input"]
    offloaded: list[str] = []
    for port in ports:
        layer_number, _, rest = port.partition(".")
        position, _, name = rest.partition(".")
        if layer_number != str(number):
            continue
        block = layer[int(position)]
        modules = (
            module for module in recompute.offloaded if isinstance(block, _BLOCK_OF.get(module, object))
        )
        if "block" in recompute.offloaded or any(name in _PORTS.get(module, ()) for module in modules):
            offloaded.append(port)
    return offloaded


def store_activations(k: KernelWriter, number: int, size: int) -> None:
    """Add the copy of a layer's saved activations to the host, after its forward pass."""
    k.module = f"layers.{number}"
    k.transfer(
        "activations.offload",
        TensorSpec((size,), "u8"),
        stores=True,
        after=[k.part.tail],
        port=f"away.{number}",
    )


def load_activations(k: KernelWriter, number: int, size: int, ahead: int, ports: Sequence[str]) -> int:
    """Add the copy that loads the offloaded activations of a layer, and return its node. The copy starts
    after the node ``ahead``. Nodes that later read one of ``ports`` wait for this copy.
    """
    k.module = f"layers.{number}"
    after: list[Value] = [f"away.{number}"]
    node = k.transfer(
        "activations.reload", TensorSpec((size,), "u8"), stores=False, after=after, control=[ahead]
    )
    if ahead < 0:
        k.part.begins.append(node)
    k.local.update(dict.fromkeys(ports, node))
    return node
