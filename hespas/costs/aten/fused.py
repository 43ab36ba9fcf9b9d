"""Costs of fused kernels: attention of every library, and the kernels of serving libraries.

Attention. Forward: scores = q x k^T and out = weights x v, 2 x pairs x (head + value head) FLOPs a head
where pairs are (query, key) positions; one exponential a pair, and four FLOPs (scale, shift, sum, divide).
Backward: five such products, of which the scores are computed again. ``flops`` counts all pairs,
``useful_flops`` only those that a causal mask leaves. Queries, keys and values are read once; the scores
never reach memory.
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
    needs,
    simple,
    unknown,
)
from hespas.costs.aten.reduce import rms_norm
from hespas.graph import OpClass

__all__ = ["ATTENTION", "FALLBACK", "SERVING", "AttentionLayout", "attention", "triton_kernel"]

_FLOPS_A_PAIR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayout:
    """Where arguments stand; -1: there is none.

    ``heads_first``: (batch, heads, length, head), else (batch, length, heads, head); with ``ragged_q`` given,
    (tokens, heads, head) and offsets of the sequences. ``paged``: keys are (slots, heads, head) of a cache of
    which the tokens at ``pages`` are used. ``causal_kind``: ``flag``, or ``mask-type`` (0 none, 1 from the
    top left, 2 from the bottom right). ``top_left``: which corner a causal mask starts at.
    ``logsumexp``: whether the sums of the softmax are a result, unless the flag at ``logsumexp_flag`` is off.
    """

    q: int = 0
    heads_first: bool = True
    causal: int = -1
    causal_kind: str = "flag"
    top_left: bool = False
    bias: int = -1
    ragged_q: int = -1
    ragged_k: int = -1
    longest_q: int = -1
    longest_k: int = -1
    pages: int = -1
    window: int = -1
    logsumexp: bool = True
    logsumexp_flag: int = -1
    backward: bool = False
    old_causal: int = -1
    """The place of the flag in versions whose argument ``bias`` did not exist."""


_BSHD = AttentionLayout(
    heads_first=False, causal=7, ragged_q=3, ragged_k=4, longest_q=5, longest_k=6, window=10
)
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
    "aten::_flash_attention_forward": AttentionLayout(
        heads_first=False, causal=8, ragged_q=3, ragged_k=4, longest_q=5, longest_k=6, window=11
    ),
    "aten::_efficient_attention_forward": AttentionLayout(
        heads_first=False,
        causal=9,
        causal_kind="mask-type",
        bias=3,
        ragged_q=4,
        ragged_k=5,
        longest_q=6,
        longest_k=7,
        logsumexp_flag=10,
    ),
    "aten::_cudnn_attention_forward": AttentionLayout(
        causal=10, bias=3, ragged_q=4, ragged_k=5, longest_q=6, longest_k=7
    ),
    "aten::_scaled_dot_product_flash_attention_backward": AttentionLayout(
        q=1, causal=11, ragged_q=6, ragged_k=7, longest_q=8, longest_k=9, backward=True
    ),
    "aten::_scaled_dot_product_efficient_attention_backward": AttentionLayout(
        q=1, causal=11, bias=4, top_left=True, backward=True
    ),
    "aten::_scaled_dot_product_cudnn_attention_backward": AttentionLayout(
        q=1, causal=14, bias=8, ragged_q=9, ragged_k=10, longest_q=11, longest_k=12, backward=True
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionLayout(
        q=1, causal=7, bias=8, top_left=True, backward=True
    ),
    "aten::_flash_attention_backward": AttentionLayout(
        q=1, heads_first=False, causal=11, ragged_q=6, ragged_k=7, longest_q=8, longest_k=9, backward=True
    ),
    "aten::_efficient_attention_backward": AttentionLayout(
        q=1,
        heads_first=False,
        causal=14,
        causal_kind="mask-type",
        bias=4,
        ragged_q=6,
        ragged_k=7,
        longest_q=8,
        longest_k=9,
        backward=True,
    ),
    "flash_attn::_flash_attn_forward": AttentionLayout(heads_first=False, causal=5, window=6),
    "flash_attn::_flash_attn_varlen_forward": AttentionLayout(
        heads_first=False, causal=9, ragged_q=3, ragged_k=4, longest_q=5, longest_k=6, window=10
    ),
    "flash_attn::_flash_attn_backward": AttentionLayout(
        q=1, heads_first=False, causal=11, window=12, backward=True
    ),
    "flash_attn::_flash_attn_varlen_backward": AttentionLayout(
        q=1,
        heads_first=False,
        causal=15,
        ragged_q=9,
        ragged_k=10,
        longest_q=11,
        longest_k=12,
        window=16,
        backward=True,
    ),
    "aiter::_flash_attn_forward": AttentionLayout(heads_first=False, causal=5, window=6),
    "aiter::mha_fwd": AttentionLayout(heads_first=False, causal=5, window=6),
    "aiter::fmha_v3_fwd": AttentionLayout(heads_first=False, causal=5, window=6),
    "aiter::mha_batch_prefill": AttentionLayout(
        heads_first=False,
        causal=12,
        ragged_q=3,
        ragged_k=4,
        pages=5,
        longest_q=6,
        longest_k=7,
        window=13,
        logsumexp=False,
    ),
}
"""Operation -> where its arguments stand."""

FALLBACK = AttentionLayout(causal=5, bias=3, top_left=True, logsumexp=False)
"""``aten::scaled_dot_product_attention``, which usually calls one of the others."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Extents, batch and heads multiplied out by the sequences; ``keys_read`` are distinct key positions."""

    batch: int
    heads: int
    kv_heads: int
    length_q: int
    length_k: int
    head: int
    value_head: int
    keys_read: int


def attention(layout: AttentionLayout) -> AtenRule:
    """The rule of operations whose arguments stand as ``layout`` says."""

    def rule(call: Call) -> AtenCost:
        q, k, v = (call.tensor(layout.q + place) for place in range(3))
        if q is None or k is None or v is None:
            return unknown(call, OpClass.ATTENTION)
        sizes = _sizes(call, layout, q, k, v)
        if sizes is None:
            return unknown(call, OpClass.ATTENTION)
        return _priced(call, layout, (q, k, v), sizes)

    return rule


def _sizes(call: Call, layout: AttentionLayout, q: Strided, k: Strided, v: Strided) -> _Sizes | None:
    offsets = call.tensor(layout.ragged_q)
    if offsets is not None:
        return _ragged(call, layout, (q, k, v), offsets)
    if not (len(q.shape) == len(k.shape) == len(v.shape) == 4):
        return None
    length, heads = (2, 1) if layout.heads_first else (1, 2)
    return _Sizes(
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
) -> _Sizes | None:
    """Sequences of one length, which is where tokens = sequences x longest; others cannot be told."""
    q, k, v = qkv
    longest_q, longest_k = call.integer(layout.longest_q), call.integer(layout.longest_k)
    if longest_q is None or longest_k is None or len(q.shape) not in (3, 4) or not offsets.shape:
        return None
    sequences = offsets.shape[0] - 1
    tokens = q.shape[-3]
    if sequences < 1 or tokens != sequences * longest_q:
        return None
    if layout.pages >= 0:
        # A causal prefill sees at least its own tokens, so keys are as many where the longest are.
        if call.flag(layout.causal) is not True or longest_k != longest_q:
            return None
    elif k.shape[-3] != sequences * longest_k:
        return None
    return _Sizes(
        sequences,
        q.shape[-2],
        k.shape[-2],
        longest_q,
        longest_k,
        q.shape[-1],
        v.shape[-1],
        sequences * longest_k,
    )


def _is_causal(call: Call, layout: AttentionLayout) -> tuple[bool, bool] | None:
    """Whether there is a causal mask, and whether from the top left; None where the trace does not tell."""
    if layout.causal_kind == "mask-type":
        kind = call.integer(layout.causal)
        return None if kind is None else (kind > 0, kind == 1)
    place = layout.causal
    if layout.old_causal >= 0 and call.real(3) is not None:
        place = layout.old_causal
    flag = call.flag(place)
    return None if flag is None else (flag, layout.top_left)


def _pairs(sizes: _Sizes, causal: bool, top_left: bool) -> float:
    """(query, key) positions of one head that a mask leaves."""
    rows, columns = sizes.length_q, sizes.length_k
    if not causal:
        return float(rows * columns)
    # Row i sees i + 1 + shift keys, at least none and at most all.
    shift = 0 if top_left else columns - rows
    first, last = max(0, -shift), max(0, min(rows, columns - shift))
    partial = last - first
    seen = partial * (first + 1 + shift) + partial * (partial - 1) // 2 if partial > 0 else 0
    return float(seen + max(0, rows - max(last, first)) * columns)


def _has_window(call: Call, layout: AttentionLayout) -> bool:
    """Whether keys are limited to those nearby, which this table does not count."""
    left = call.integer(layout.window)
    return left is not None and left >= 0


def _priced(
    call: Call, layout: AttentionLayout, qkv: tuple[Strided, Strided, Strided], sizes: _Sizes
) -> AtenCost:
    q, k, v = qkv
    causal = _is_causal(call, layout)
    pairs = nan if causal is None or _has_window(call, layout) else _pairs(sizes, *causal)
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
    stored = key_bytes if layout.pages >= 0 else min(key_bytes, k.bytes + v.bytes)
    bias = call.tensor(layout.bias)
    out = dense(q.dtype, (*q.shape[:-1], sizes.value_head))
    logsumexp = dense(FLOAT32, (sizes.batch, sizes.heads, m))
    read = q.bytes + stored + (0.0 if bias is None else bias.bytes)
    has_logsumexp = call.flag(layout.logsumexp_flag)
    results = [out, logsumexp] if layout.logsumexp and has_logsumexp is not False else [out]
    if layout.backward:
        read += 2 * out.bytes + logsumexp.bytes
        results = [dense(each.dtype, each.shape) for each in qkv]
    return simple(
        OpClass.ATTENTION,
        [q, k, v] if bias is None else [q, k, v, bias],
        results,
        flops=sum(each.flops for each in rows) + softmax * m * n,
        useful_flops=nan if isnan(pairs) else sum(each.useful_flops for each in rows) + softmax * pairs,
        transcendentals=groups * (float(m * n) if isnan(pairs) else pairs),
        read=read,
        rate=q.dtype,
        contractions=rows,
    )


# --- kernels that are not PyTorch's own: serving libraries, fbgemm, Triton.
#
# Argument orders follow what the traces in hand and the sources of the libraries show: AITER
# (https://github.com/ROCm/aiter), SGLang (https://github.com/sgl-project/sglang), vLLM
# (https://github.com/vllm-project/vllm), fbgemm (https://github.com/pytorch/FBGEMM). These operations
# mostly get their result as an argument, first.


def _gated(flops: float) -> AtenRule:
    """``silu_and_mul`` and its kin: (out, in) with in = [gate, up] side by side."""

    @needs(OpClass.ELEMENTWISE, 0, 1)
    def rule(call: Call, out: Strided, source: Strided) -> AtenCost | None:
        if source.elements != 2 * out.elements:
            return None
        return simple(
            OpClass.ELEMENTWISE,
            [source],
            [dense(out.dtype, out.shape)],
            flops=flops * out.elements,
            transcendentals=float(out.elements),
        )

    return rule


@needs(OpClass.ELEMENTWISE, 0, 1)
def _rotary(call: Call, positions: Strided, query: Strided) -> AtenCost | None:
    """(positions, query, key, head size, table of cosines and sines): three FLOPs an element, in place.

    The table has one row of ``rotated`` columns a position; of each head only so many elements turn.
    """
    table, head = call.tensor(4), call.integer(3)
    if table is None or not head or len(table.shape) != 2:
        return None
    share = min(table.shape[1] / head, 1.0)
    turned = call.present(1, 2)
    touched = share * sum(each.elements * each.width for each in turned)
    rows = min(positions.elements, table.shape[0])
    return simple(
        OpClass.ELEMENTWISE,
        [positions, *turned, table],
        [dense(each.dtype, each.shape) for each in turned],
        flops=3.0 * share * sum(each.elements for each in turned),
        read=positions.bytes + touched + rows * table.shape[1] * table.width,
        written=touched,
        rate=query.dtype,
    )


def _store_cache(slots_at: int) -> AtenRule:
    """Keys and values of new tokens go to their slots of the cache; the rest of the cache is not touched."""

    @needs(OpClass.SCATTER, 0, 1, slots_at)
    def rule(call: Call, key: Strided, value: Strided, slots: Strided) -> AtenCost:
        written = key.elements * key.width + value.elements * value.width
        return simple(OpClass.SCATTER, [key, value, slots], [], written=written)

    return rule


@needs(OpClass.MOVE, 0)
def _column_permutation(call: Call, source: Strided) -> AtenCost:
    """``permute_pooled_embs``: the pooled embeddings in another order of columns."""
    return simple(OpClass.MOVE, call.tensors, [dense(source.dtype, source.shape)])


@needs(OpClass.ELEMENTWISE, 0, 1, 2)
def _bounds_check(call: Call, rows: Strided, indices: Strided, offsets: Strided) -> AtenCost:
    """(rows of each table, indices, offsets, ...): every index compared with two bounds; few are mended."""
    return simple(OpClass.ELEMENTWISE, [rows, indices, offsets], [], flops=2.0 * indices.elements)


@needs(OpClass.REDUCTION, 0)
def _complete_sum(call: Call, source: Strided) -> AtenCost | None:
    """``asynchronous_complete_cumsum``: running sums with a 0 in front."""
    if len(source.shape) != 1:
        return None
    result = dense(source.dtype, (source.shape[0] + 1,))
    return simple(OpClass.REDUCTION, [source], [result], flops=float(source.elements))


def triton_kernel(call: Call) -> AtenCost:
    """A generated kernel: its arguments are moved once, what it computes is not stated.

    Inductor passes results last, so the last argument stands for what is written.
    """
    tensors = call.tensors
    if not tensors:
        return unknown(call, OpClass.FUSION)
    return simple(
        OpClass.FUSION,
        tensors[:-1],
        [dense(tensors[-1].dtype, tensors[-1].shape)],
        flops=nan,
        transcendentals=nan,
        written=tensors[-1].bytes,
        rate=tensors[0].dtype,
    )


_NORM = rms_norm(1, 2, out_at=0)
_ADDED_IN_PLACE = rms_norm(0, 2, residual_at=1)
_ADDED_APART = rms_norm(1, 4, residual_at=2, residual_out_at=3, out_at=0)
_NAMESPACES = ("_C", "sgl_kernel", "aiter", "vllm")

SERVING: dict[str, AtenRule] = {
    **{
        f"{space}::{name}": _NORM
        for space in _NAMESPACES
        for name in ("rms_norm", "rmsnorm", "rmsnorm2d_fwd")
    },
    **{
        f"{space}::fused_add_{name}": _ADDED_IN_PLACE
        for space in _NAMESPACES
        for name in ("rms_norm", "rmsnorm")
    },
    **{f"{space}::silu_and_mul": _gated(2.0) for space in _NAMESPACES},
    **{f"{space}::gelu_and_mul": _gated(5.0) for space in _NAMESPACES},
    **{f"{space}::gelu_tanh_and_mul": _gated(9.0) for space in _NAMESPACES},
    **{f"{space}::rotary_embedding": _rotary for space in _NAMESPACES},
    # AITER's own `rms_norm` returns its result.
    "aiter::rms_norm": rms_norm(0, 1),
    "aiter::add_rmsnorm": _ADDED_APART,
    "aiter::rmsnorm2d_fwd_with_add": _ADDED_APART,
    "sglang::store_cache": _store_cache(4),
    "_C_cache_ops::reshape_and_cache": _store_cache(4),
    "_C_cache_ops::reshape_and_cache_flash": _store_cache(4),
    "fbgemm::permute_pooled_embs": _column_permutation,
    "fbgemm::permute_pooled_embs_auto_grad": _column_permutation,
    "fbgemm::recat_embedding_grad_output_mixed_D_batch": _column_permutation,
    "fbgemm::bounds_check_indices": _bounds_check,
    "fbgemm::asynchronous_complete_cumsum": _complete_sum,
    "fb::asynchronous_complete_cumsum": _complete_sum,
}
"""Operation with its namespace -> rule."""
