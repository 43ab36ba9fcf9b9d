"""Costs of fused attention kernels of all libraries.

Forward: scores = q x k^T and out = weights x v. Each head takes 2 x pairs x (head + value head) FLOPs, where
pairs are (query, key) positions. Each pair also takes one exponential and four FLOPs (scale, shift, sum,
divide). Backward: five such products, because the scores are computed again. ``flops`` counts all pairs,
``useful_flops`` only the pairs that a causal mask leaves. Queries, keys and values are read once; the scores
are never written to memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan

from hespas.costs.aten.call import (
    FLOAT32,
    AtenCost,
    AtenRule,
    Call,
    Strided,
    dense,
    matrix_product,
    simple,
    unknown,
)
from hespas.graph import OpClass

__all__ = ["ATTENTION", "FALLBACK", "AttentionLayout", "attention"]

_FLOPS_A_PAIR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Positions and meaning of the arguments of an attention operation; -1 means that the operation has no
    such argument.

    With ``heads_first`` tensors are (batch, heads, length, head), else (batch, length, heads, head). If
    ``ragged`` is stated, they are (tokens, heads, head). The arguments from that position on are then the
    sequence offsets of queries and of keys, and the maximum lengths of both. ``paged`` means that keys are
    (slots, heads, head) of a cache; the number of used tokens follows the offsets. ``causal`` is the position
    of the causal mask. It is a ``flag`` or a ``mask-type`` (0 none, 1 from the top left, 2 from the bottom
    right), as ``causal_kind`` states. With ``top_left`` a causal mask starts at the top left. With
    ``logsumexp`` the sums of the softmax are a result, unless the flag at ``logsumexp_flag`` is off.
    """

    q: int = 0
    heads_first: bool = True
    causal: int = -1
    causal_kind: str = "flag"
    top_left: bool = False
    bias: int = -1
    ragged: int = -1
    paged: bool = False
    window: int = -1
    logsumexp: bool = True
    logsumexp_flag: int = -1
    backward: bool = False
    old_causal: int = -1
    """Position of the flag in versions without the argument ``bias``."""


_LIBRARY = AttentionLayout(heads_first=False, causal=5, window=6)

ATTENTION: dict[str, AttentionLayout] = {
    "aten::_scaled_dot_product_flash_attention": AttentionLayout(causal=4),
    "aten::_scaled_dot_product_fused_attention_overrideable": AttentionLayout(causal=5, bias=3),
    "aten::_scaled_dot_product_efficient_attention": AttentionLayout(
        causal=6, bias=3, top_left=True, logsumexp_flag=4
    ),
    "aten::_scaled_dot_product_cudnn_attention": AttentionLayout(
        causal=6, bias=3, old_causal=4, logsumexp_flag=4
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu": AttentionLayout(causal=4, bias=5, top_left=True),
    "aten::_flash_attention_forward": AttentionLayout(heads_first=False, causal=8, ragged=3, window=11),
    "aten::_efficient_attention_forward": AttentionLayout(
        heads_first=False, causal=9, causal_kind="mask-type", bias=3, ragged=4, logsumexp_flag=10
    ),
    "aten::_cudnn_attention_forward": AttentionLayout(causal=10, bias=3, ragged=4),
    "aten::_scaled_dot_product_flash_attention_backward": AttentionLayout(
        q=1, causal=11, ragged=6, backward=True
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionLayout(
        q=1, causal=11, bias=4, top_left=True, backward=True
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": AttentionLayout(
        q=1, causal=14, bias=8, ragged=9, backward=True
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionLayout(
        q=1, causal=7, bias=8, top_left=True, backward=True
    ),
    "aten::_flash_attention_backward": AttentionLayout(
        q=1, heads_first=False, causal=11, ragged=6, backward=True
    ),
    "aten::_efficient_attention_backward": AttentionLayout(
        q=1, heads_first=False, causal=14, causal_kind="mask-type", bias=4, ragged=6, backward=True
    ),
    "flash_attn::_flash_attn_forward": _LIBRARY,
    "flash_attn::_flash_attn_varlen_forward": AttentionLayout(
        heads_first=False, causal=9, ragged=3, window=10
    ),
    "flash_attn::_flash_attn_backward": AttentionLayout(
        q=1, heads_first=False, causal=11, window=12, backward=True
    ),
    "flash_attn::_flash_attn_varlen_backward": AttentionLayout(
        q=1, heads_first=False, causal=15, ragged=9, window=16, backward=True
    ),
    "FlashAttnFunc": _LIBRARY,
    "FlashAttnVarlenFunc": AttentionLayout(heads_first=False, causal=9, ragged=3, window=10),
    # Sequences of several lengths do not state how long the keys of the longest are: those stay unknown.
    "xformers::efficient_attention_forward_cutlass": AttentionLayout(
        heads_first=False, causal=9, causal_kind="mask-type", bias=3, ragged=4, logsumexp_flag=8
    ),
    "xformers_flash::flash_fwd": AttentionLayout(heads_first=False, causal=10, ragged=3, window=11),
    "aiter::_flash_attn_forward": _LIBRARY,
    "aiter::mha_fwd": _LIBRARY,
    "aiter::fmha_v3_fwd": _LIBRARY,
    "aiter::mha_batch_prefill": AttentionLayout(
        heads_first=False, causal=12, ragged=3, paged=True, window=13, logsumexp=False
    ),
}
"""Operation -> positions of its arguments."""

FALLBACK = AttentionLayout(causal=5, bias=3, top_left=True, logsumexp=False)
"""``aten::scaled_dot_product_attention``, which usually calls one of the others."""


@dataclass(frozen=True, slots=True)
class _AttentionSizes:
    """Sizes from which the FLOPs of an attention operation are computed. ``keys_read`` is the number of
    distinct key positions that are read.
    """

    batch: int
    heads: int
    kv_heads: int
    length_q: int
    length_k: int
    head: int
    value_head: int
    keys_read: int


def attention(layout: AttentionLayout) -> AtenRule:
    """Return the cost rule of attention operations with the argument positions of ``layout``."""

    def rule(call: Call) -> AtenCost:
        q, k, v = (call.tensor(layout.q + position) for position in range(3))
        if q is None or k is None or v is None:
            return unknown(call, OpClass.ATTENTION)
        sizes = _sizes(call, layout, q, k, v)
        if sizes is None:
            return unknown(call, OpClass.ATTENTION)
        return _attention_cost(call, layout, (q, k, v), sizes)

    return rule


def _sizes(call: Call, layout: AttentionLayout, q: Strided, k: Strided, v: Strided) -> _AttentionSizes | None:
    offsets = call.tensor(layout.ragged)
    if offsets is not None:
        return _ragged(call, layout, (q, k, v), offsets)
    if not (len(q.shape) == len(k.shape) == len(v.shape) == 4):
        return None
    length, heads = (2, 1) if layout.heads_first else (1, 2)
    return _AttentionSizes(
        q.shape[0],
        q.shape[heads],
        k.shape[heads],
        q.shape[length],
        k.shape[length],
        q.shape[3],
        v.shape[3],
        q.shape[0] * k.shape[length],
    )


def _ragged(
    call: Call, layout: AttentionLayout, qkv: tuple[Strided, Strided, Strided], offsets: Strided
) -> _AttentionSizes | None:
    """Return the attention sizes of a batch of packed sequences. Return None unless all sequences have the
    maximum length (number of tokens = sequences x maximum length), and if numbers of dimensions differ. Only
    paged keys and values may have others than the queries.
    """
    q, k, v = qkv
    ranks = {len(tensor.shape) for tensor in (qkv[1:] if layout.paged else qkv)}
    if len(ranks) > 1 or min(ranks) < 3:
        return None
    position = layout.ragged + 2 + layout.paged
    longest_q, longest_k = call.integer(position), call.integer(position + 1)
    if longest_q is None or longest_k is None or len(q.shape) not in (3, 4) or not offsets.shape:
        return None
    sequences = offsets.shape[0] - 1
    tokens = q.shape[-3]
    if sequences < 1 or tokens != sequences * longest_q:
        return None
    if layout.paged:
        # A causal prefill sees at least its own tokens, so keys are as many where the longest are.
        if call.flag(layout.causal) is not True or longest_k != longest_q:
            return None
    elif k.shape[-3] != sequences * longest_k:
        return None
    return _AttentionSizes(
        sequences,
        q.shape[-2],
        k.shape[-2],
        longest_q,
        longest_k,
        q.shape[-1],
        v.shape[-1],
        sequences * longest_k,
    )


def _pairs(sizes: _AttentionSizes, causal: bool, top_left: bool) -> float:
    """Return the number of (query, key) pairs of one head that the mask does not exclude."""
    rows, columns = sizes.length_q, sizes.length_k
    if not causal:
        return float(rows * columns)
    # Row i sees i + 1 + shift keys, at least none and at most all.
    shift = 0 if top_left else columns - rows
    first, last = max(0, -shift), max(0, min(rows, columns - shift))
    partial = last - first
    seen = partial * (first + 1 + shift) + partial * (partial - 1) // 2 if partial > 0 else 0
    return float(seen + max(0, rows - max(last, first)) * columns)


def _attention_cost(
    call: Call, layout: AttentionLayout, qkv: tuple[Strided, Strided, Strided], sizes: _AttentionSizes
) -> AtenCost:
    q, k, v = qkv
    # Two flags: the mask is causal, and it starts at the top left; None if the trace does not state the mask.
    if layout.causal_kind == "mask-type":
        kind = call.integer(layout.causal)
        causal = None if kind is None else (kind > 0, kind == 1)
    else:
        position = layout.causal
        if layout.old_causal >= 0 and call.real(3) is not None:
            position = layout.old_causal
        flag = call.flag(position)
        causal = None if flag is None else (flag, layout.top_left)
    window = call.integer(layout.window)
    has_window = window is not None and window >= 0  # the pairs of a sliding window are not counted
    pairs = nan if causal is None or has_window else _pairs(sizes, *causal)
    groups = sizes.batch * sizes.heads
    m, n = sizes.length_q, sizes.length_k
    head, value_head = sizes.head, sizes.value_head
    shapes = [((groups, m, n, head), head), ((groups, m, value_head, n), value_head)]
    if layout.backward:
        # scores again, dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q
        shapes = [
            ((groups, m, n, head), head),
            ((groups, n, value_head, m), value_head),
            ((groups, m, n, value_head), value_head),
            ((groups, m, head, n), head),
            ((groups, n, head, m), head),
        ]
    types = (q.dtype, k.dtype, FLOAT32)
    rows = tuple(matrix_product(shape, types, 2.0 * groups * pairs * depth) for shape, depth in shapes)
    softmax = _FLOPS_A_PAIR * groups
    key_bytes = float(sizes.keys_read * sizes.kv_heads) * (sizes.head * k.width + sizes.value_head * v.width)
    # Expanded keys and values are stored once.
    stored = key_bytes if layout.paged else min(key_bytes, k.bytes + v.bytes)
    bias = call.tensor(layout.bias)
    out = dense(q.dtype, (*q.shape[:-1], sizes.value_head))
    logsumexp = dense(FLOAT32, (sizes.batch, sizes.heads, m))
    read = q.bytes + stored + (0.0 if bias is None else bias.bytes)
    has_logsumexp = call.flag(layout.logsumexp_flag)
    results = [out, logsumexp] if layout.logsumexp and has_logsumexp is not False else [out]
    if layout.backward:
        read += 2 * out.bytes + logsumexp.bytes
        results = [tensor.dense for tensor in qkv]
    return simple(
        [q, k, v] if bias is None else [q, k, v, bias],
        results,
        op_class=OpClass.ATTENTION,
        flops=sum(product.flops for product in rows) + softmax * m * n,
        useful_flops=nan if isnan(pairs) else sum(product.useful_flops for product in rows) + softmax * pairs,
        transcendentals=groups * (float(m * n) if isnan(pairs) else pairs),
        read=read,
        rate=q.dtype,
        contractions=rows,
    )
