"""Constructors of tables of operations from their sizes, with FLOPs and compulsory bytes.

Arguments are columns of shape ``(ops,)``. A multiply and an add count as two FLOPs. Bytes count each operand
and result once, in the bits of the number format (``scheme``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.operations.model import CHANNELS, Labels, Operations, element_bytes

__all__ = [
    "ConvolutionProduct",
    "attention_context",
    "attention_encoder",
    "attention_generation",
    "collectives",
    "convolution_product",
    "convolutions",
    "elementwise",
    "matmuls",
    "mixtures_of_experts",
]


def _operations(
    kind: str,
    scheme: Labels,
    dims: Mapping[str, FloatArray],
    *,
    flops: FloatArray,
    bytes_moved: FloatArray,
    op: Labels | None = None,
    variant: Labels | None = None,
    transcendentals: FloatArray | None = None,
) -> Operations:
    count = len(scheme)
    return Operations(
        kind=Labels.constant(kind, count),
        op=Labels.constant("", count) if op is None else op,
        scheme=scheme,
        variant=Labels.constant("", count) if variant is None else variant,
        dims={name: np.asarray(column, np.float64) for name, column in dims.items()},
        flops=flops,
        transcendentals=np.zeros(count) if transcendentals is None else transcendentals,
        bytes_moved=bytes_moved,
    )


def matmuls(
    scheme: Labels,
    *,
    batch: FloatArray,
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of batched matmuls: ``batch`` matmuls (m x k) by (k x n) each."""
    moved = (
        m * k * element_bytes(scheme, "activation")
        + n * k * element_bytes(scheme, "weight")
        + m * n * element_bytes(scheme, "output")
    )
    return _operations(
        "matmul",
        scheme,
        {"batch": batch, "m": m, "n": n, "k": k},
        flops=2 * batch * m * n * k,
        bytes_moved=batch * moved,
        variant=variant,
    )


def convolutions(
    scheme: Labels,
    *,
    images: FloatArray,
    in_channels: FloatArray,
    out_channels: FloatArray,
    kernel: FloatArray,
    in_size: FloatArray,
    out_size: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of square 2-D convolutions with one group, described as matmuls (m = images x
    out_size^2).
    """
    m, n, k = images * out_size**2, out_channels, in_channels * kernel**2
    read = images * in_channels * in_size**2 * element_bytes(scheme, "activation")
    moved = read + n * k * element_bytes(scheme, "weight") + m * n * element_bytes(scheme, "output")
    dims = {"batch": np.ones(len(scheme)), "m": m, "n": n, "k": k, "kernel": kernel, "spatial": in_size}
    dims[CHANNELS] = in_channels
    return _operations("convolution", scheme, dims, flops=2 * m * n * k, bytes_moved=moved, variant=variant)


def attention_context(
    scheme: Labels,
    *,
    batch: FloatArray,
    length: FloatArray,
    heads: FloatArray,
    kv_heads: FloatArray,
    head_dim: FloatArray,
    window: FloatArray,
    kv_bytes: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of causal attention over whole prompts (prefill).

    ``window`` is the sliding window in tokens (0: none); ``kv_bytes`` are the bytes per cached element.
    """
    full = length * (length + 1) / 2
    outside = np.where((window > 0) & (window < length), length - window, 0.0)
    pairs = full - outside * (outside + 1) / 2
    act = element_bytes(scheme, "activation")
    moved = batch * length * head_dim * (2 * heads * act + 2 * kv_heads * np.maximum(kv_bytes, act))
    dims = {
        "batch": batch,
        "q_len": length,
        "kv_len": length,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "pairs": pairs,
    }
    return _operations(
        "attention.context",
        scheme,
        dims,
        flops=4 * batch * heads * head_dim * pairs,
        bytes_moved=moved,
        variant=variant,
    )


def attention_generation(
    scheme: Labels,
    *,
    batch: FloatArray,
    kv_len: FloatArray,
    heads: FloatArray,
    kv_heads: FloatArray,
    head_dim: FloatArray,
    kv_bytes: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of the attention of one new token per sequence to ``kv_len`` cached tokens (decode). If
    there is a sliding window, ``kv_len`` must not exceed it.
    """
    act = element_bytes(scheme, "activation")
    moved = batch * head_dim * (2 * kv_heads * kv_len * kv_bytes + 2 * heads * act)
    dims = {"batch": batch, "kv_len": kv_len, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    return _operations(
        "attention.generation",
        scheme,
        dims,
        flops=4 * batch * heads * head_dim * kv_len,
        bytes_moved=moved,
        variant=variant,
    )


def attention_encoder(
    scheme: Labels,
    *,
    batch: FloatArray,
    length: FloatArray,
    heads: FloatArray,
    head_dim: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of attention without a mask, of every token to every token."""
    moved = 4 * batch * length * heads * head_dim * element_bytes(scheme, "activation")
    return _operations(
        "attention.encoder",
        scheme,
        {"batch": batch, "q_len": length, "heads": heads, "head_dim": head_dim},
        flops=4 * batch * heads * head_dim * length**2,
        bytes_moved=moved,
        variant=variant,
    )


def mixtures_of_experts(
    scheme: Labels,
    *,
    op: Labels,
    tokens: FloatArray,
    hidden: FloatArray,
    inter: FloatArray,
    topk: FloatArray,
    experts: FloatArray,
    tensor_parallel: FloatArray,
    expert_parallel: FloatArray,
    matrices: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of mixture-of-experts layers, each with the shard of one rank. ``op`` is the
    distribution of tokens over experts.

    ``matrices`` is the number of weight matrices per expert: 3 for gated layers, 2 otherwise. The number of
    experts that receive tokens is the expected number of distinct results of ``tokens x topk`` independent
    draws.
    """
    local_experts = experts / expert_parallel
    width = inter / tensor_parallel
    pairs = tokens * topk / expert_parallel
    hit = local_experts * -np.expm1(tokens * topk * np.log1p(-1 / np.maximum(experts, 2)))
    weights = np.maximum(hit, np.minimum(local_experts, 1)) * matrices * hidden * width
    act, out = element_bytes(scheme, "activation"), element_bytes(scheme, "output")
    moved = (
        weights * element_bytes(scheme, "weight") + pairs * hidden * (act + out) + pairs * width * (act + out)
    )
    dims = {
        "tokens": tokens,
        "hidden": hidden,
        "inter": inter,
        "topk": topk,
        "experts": experts,
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "matrices": matrices,
    }
    return _operations(
        "moe",
        scheme,
        dims,
        flops=2 * pairs * matrices * hidden * width,
        bytes_moved=moved,
        op=op,
        variant=variant,
    )


def elementwise(
    kind: str,
    scheme: Labels,
    *,
    op: Labels,
    rows: FloatArray,
    columns: FloatArray,
    passes: FloatArray,
    flops_per_element: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of operations that read or write ``rows x columns`` elements ``passes`` times in
    total.
    """
    elements = rows * columns
    return _operations(
        kind,
        scheme,
        {"rows": rows, "columns": columns},
        flops=elements * flops_per_element,
        bytes_moved=elements * passes * element_bytes(scheme, "activation"),
        op=op,
        variant=variant,
    )


def collectives(
    scheme: Labels,
    *,
    op: Labels,
    ranks: FloatArray,
    message_bytes: FloatArray,
    ranks_per_node: FloatArray,
    variant: Labels | None = None,
) -> Operations:
    """Return a table of collectives over ``ranks`` ranks.

    ``message_bytes`` is the size of the whole buffer. For gathers it is the size of the shard, as in Chakra.
    """
    zeros = np.zeros(len(scheme))
    return _operations(
        "collective",
        scheme,
        {"ranks": ranks, "message_bytes": message_bytes, "ranks_per_node": ranks_per_node},
        flops=zeros,
        bytes_moved=message_bytes,
        op=op,
        variant=variant,
    )


class ConvolutionProduct(NamedTuple):
    """Matmuls to which a convolution is converted: ``batch`` sequential matmuls (m, k) by (k, n)."""

    m: FloatArray
    n: FloatArray
    k: FloatArray
    batch: FloatArray


def convolution_product(
    *,
    height: FloatArray,
    width: FloatArray,
    kernel_height: FloatArray,
    kernel_width: FloatArray,
    channels: FloatArray,
    filters: FloatArray,
    stride: FloatArray,
    images: FloatArray | None = None,
    groups: FloatArray | None = None,
    dilation: FloatArray | None = None,
) -> ConvolutionProduct:
    """Return the matmul to which SCALE-Sim converts each convolution (im2col, every window read again).

    Sizes are of padded inputs. ``m`` of the result counts output positions of all ``images``; ``k`` is the
    number of input elements per window. Groups are sequential matmuls; dilation only changes the number of
    positions. SCALE-Sim itself supports one image and one group, without dilation.
    """
    one = np.ones_like(height)
    spread, parts = one if dilation is None else dilation, one if groups is None else groups
    positions = one if images is None else images
    for size, kernel in ((height, kernel_height), (width, kernel_width)):
        reach = spread * (kernel - 1) + 1
        positions = positions * np.maximum(np.ceil((size - reach + stride) / stride), 0.0)
    return ConvolutionProduct(
        positions, filters / parts, kernel_height * kernel_width * channels / parts, parts
    )
