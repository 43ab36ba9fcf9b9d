"""Costs of operations that inference and training libraries register with PyTorch: vLLM, SGLang, AITER,
fbgemm, Transformer Engine.

Argument orders follow the schemas that the libraries register, and traces: vLLM
(https://github.com/vllm-project/vllm, ``csrc/torch_bindings.cpp``), SGLang
(https://github.com/sgl-project/sglang, ``sgl-kernel/csrc/common_extension.cc``), AITER
(https://github.com/ROCm/aiter, ``aiter/ops``), fbgemm (https://github.com/pytorch/FBGEMM), Transformer Engine
(https://github.com/NVIDIA/TransformerEngine). Most of them write their result into their first argument.
"""

from __future__ import annotations

from functools import partial
from math import ceil, log2, prod

from hespas.costs.aten import elements, matmul
from hespas.costs.aten.call import (
    FLOAT32,
    AtenCost,
    AtenRule,
    Call,
    Strided,
    dense,
    matrix_product,
    needs,
    scalar_type,
    simple,
)
from hespas.costs.aten.experts import EXPERTS
from hespas.costs.aten.paged import PAGED
from hespas.costs.aten.reduce import rms_norm
from hespas.graph import DType, OpClass, find_dtype

__all__ = ["FORWARD", "SERVING", "SERVING_COMPOSITE"]


@needs(OpClass.ELEMENTWISE, 0, 1)
def _gated(call: Call, out: Strided, source: Strided, *, flops: float) -> AtenCost | None:
    """Return the cost of gated activations such as ``silu_and_mul``: (out, in, scale) with in = [gate, up]
    concatenated.
    """
    if source.elements != 2 * out.elements:
        return None
    quantizes = out.dtype is not None and source.dtype is not None and out.dtype.bits < source.dtype.bits
    scales = call.present(2) if quantizes else []
    return simple(
        [source, *scales],
        [out.dense],
        op_class=OpClass.QUANTIZE if quantizes else OpClass.ELEMENTWISE,
        flops=(flops + 2.0 * quantizes) * out.elements,
        transcendentals=float(out.elements),
    )


@needs(OpClass.ELEMENTWISE, 0, 1)
def _rotary(call: Call, positions: Strided, query: Strided) -> AtenCost | None:
    """Return the cost of a rotary embedding in place (positions, query, key, head size, table of cosines and
    sines): three FLOPs per rotated element.

    The table has one row per position. Its number of columns is the number of elements of each head that are
    rotated.
    """
    table, head = call.tensor(4), call.integer(3)
    if table is None or head is None or head <= 0 or len(table.shape) != 2:
        return None
    share = min(table.shape[1] / head, 1.0)
    turned = call.present(1, 2)
    touched = share * sum(tensor.elements * tensor.width for tensor in turned)
    rows = min(positions.elements, table.shape[0])
    return simple(
        [positions, *turned, table],
        [tensor.dense for tensor in turned],
        flops=3.0 * share * sum(tensor.elements for tensor in turned),
        read=positions.bytes + touched + rows * table.shape[1] * table.width,
        written=touched,
        rate=query.dtype,
    )


@needs(OpClass.SCATTER, 0, 1)
def _store_cache(
    call: Call, key: Strided, value: Strided, *, cache_at: int, slots_at: int
) -> AtenCost | None:
    """Return the cost of copying keys and values of new tokens into their slots of the KV cache."""
    slots, cache = call.tensor(slots_at), call.tensor(cache_at)
    if slots is None:
        return None
    width = key.width if cache is None else cache.width
    return simple([key, value, slots], [], written=(key.elements + value.elements) * width)


@needs(OpClass.SCATTER, 0, 1)
def _update_cache(call: Call, key: Strided, value: Strided) -> AtenCost:
    """Return the cost of updating a KV cache that is not an argument of the operation (key, value, ...)."""
    return simple([key, value], [], written=key.bytes + value.bytes)


@needs(OpClass.QUANTIZE)
def _quantize(
    call: Call, *, source_at: int, out_at: int, scale_at: int, given: bool = False
) -> AtenCost | None:
    """Return the cost of a quantisation: two FLOPs per element, and two more to compute scales unless they
    are ``given``.
    """
    source, out, scale = (call.tensor(position) for position in (source_at, out_at, scale_at))
    if source is None or out is None or scale is None:
        return None
    inputs = [source, scale] if given else [source]
    results = [out.dense] if given else [out.dense, scale.dense]
    return simple(inputs, results, flops=(2.0 if given else 4.0) * source.elements, rate=source.dtype)


@needs(OpClass.NORMALIZATION, 0, 1, 2)
def _norm_and_quantize(
    call: Call, out: Strided, source: Strided, weight: Strided, *, residual_at: int = -1
) -> AtenCost:
    """Return the cost of a norm with a quantised result (out, in, [residual,] weight, scale)."""
    residual = call.tensor(residual_at)
    inputs = call.present(1, 2, 3) if residual_at == 2 else call.present(1, 2, residual_at)
    results = [out.dense] if residual is None else [out.dense, residual.dense]
    flops = (6.0 + (residual is not None)) * source.elements
    return simple(inputs, results, flops=flops, transcendentals=float(prod(source.shape[:-1])))


@needs(OpClass.ELEMENTWISE, 0, 1)
def _activation(call: Call, out: Strided, source: Strided) -> AtenCost:
    """Return the cost of ``gelu_new`` and ``gelu_fast`` (out, in)."""
    return simple([source], [out.dense], flops=8.0 * out.elements, transcendentals=float(out.elements))


@needs(OpClass.MOVE, 0)
def _column_permutation(call: Call, source: Strided) -> AtenCost:
    """Return the cost of ``permute_pooled_embs``, which copies pooled embeddings to another order of
    columns.
    """
    return simple(call.tensors, [source.dense])


@needs(OpClass.MOVE, 0, 1, 2)
def _sparse_permutation(call: Call, order: Strided, lengths: Strided, indices: Strided) -> AtenCost | None:
    """Return the cost of ``permute_sparse_features`` (order of tables, lengths of bags, indices, weights),
    which copies the bags of tables to another order, in which tables may occur several times or never.

    The lengths are also summed twice, to find where bags start before and after: each sum reads and writes
    them (``sparse_ops_gpu.cu``).
    """
    if len(lengths.shape) != 2 or lengths.shape[0] < 1:
        return None
    share = order.elements / lengths.shape[0]
    copied = [tensor for tensor in call.present(2, 3) if tensor.shape]
    copied_bytes = sum(tensor.bytes for tensor in copied)
    written = share * (copied_bytes + lengths.bytes) + 2 * (1 + share) * lengths.bytes
    read = order.bytes + share * copied_bytes + (1 + 3 * share) * lengths.bytes
    bags = order.elements * prod(lengths.shape[1:])
    moved = dense(indices.dtype, (bags, ceil(share * indices.elements / max(bags, 1))))
    return simple([order, lengths, *copied], [moved], read=read, written=written)


_INDEX_BYTES, _ROW_BYTES = 8.0, 4.0
"""Bytes of a row number in all tables together, and of the position of a lookup."""
_SORTED_BITS = 8.0
"""Bits that one pass of a radix sort orders (CUB, ``DeviceRadixSortPolicy``)."""


@needs(OpClass.SCATTER, 0)
def _table_update(call: Call, grad: Strided) -> AtenCost | None:
    """Return the cost of the gradient of ``split_embedding_codegen_lookup``, which sums gradients by row of
    the tables and updates the rows. The lookup is the only part of the call.

    Each lookup's row number is computed, sorted together with its position, counted and summed. Then the
    gradient of its bag is read (fbgemm, ``embedding_backward_split_template.cu``). Each gradient counts as
    read once. Devices whose cache does not hold all of them read most again, as
    :mod:`hespas.estimators.kernels` adds.
    """
    lookup = call.parts[0] if call.parts else None
    starts, weights, indices = (None if lookup is None else lookup.tensor(at) for at in (6, 1, 11))
    if starts is None or weights is None or indices is None or len(grad.shape) != 2 or starts.elements < 2:
        return None
    length = grad.shape[1] / (starts.elements - 1)
    if not length > 0 or weights.elements < length:
        return None
    rows, lookups = weights.elements / length, float(indices.elements)
    passes = max(ceil(log2(max(rows, 2.0)) / _SORTED_BITS), 1)
    pair = _INDEX_BYTES + _ROW_BYTES
    row_numbers = indices.bytes + passes * lookups * pair + lookups * (2 * _INDEX_BYTES + 2 * _ROW_BYTES)
    changed = min(lookups, rows) * length * weights.width
    bags = dense(grad.dtype, (grad.shape[0] * (starts.elements - 1), max(round(length), 1)))
    return simple(
        [bags, weights, indices],
        [weights.dense],
        flops=lookups * length,
        read=row_numbers + grad.bytes + changed,
        written=lookups * (pair * (1 + passes) + 2 * _ROW_BYTES) + changed,
    )


@needs(OpClass.REDUCTION, 0, 1, 2)
def _bounds_check(call: Call, rows: Strided, indices: Strided, offsets: Strided) -> AtenCost:
    """Return the cost of a bounds check (rows of each table, indices, offsets, ...), which counts invalid
    indices bag by bag: every index is compared with two bounds.
    """
    bags = max(offsets.elements - 1, 1)
    checked = dense(indices.dtype, (bags, max(round(indices.elements / bags), 1)))
    read = rows.bytes + indices.bytes + offsets.bytes
    return simple([checked, rows, offsets], [], flops=2.0 * indices.elements, read=read)


@needs(OpClass.REDUCTION, 0)
def _complete_sum(call: Call, source: Strided) -> AtenCost | None:
    """Return the cost of ``asynchronous_complete_cumsum``: cumulative sums, preceded by a 0."""
    if len(source.shape) != 1:
        return None
    result = dense(source.dtype, (source.shape[0] + 1,))
    return simple([source], [result], flops=float(source.elements))


_POOLED_BACKWARD = (
    "torch::autograd::CppNode<fbgemm_gpu::PermutePooledEmbsFunction<&fbgemm_gpu::permute_pooled_embs_gpu> >"
)
_OPTIMIZERS = ("rowwise_adagrad", "approx_rowwise_adagrad")
_LOOKUP = "fbgemm::split_embedding_codegen_lookup_{}_function"
FORWARD: dict[str, str] = {
    f"torch::autograd::CppNode<SplitLookupFunction_{optimizer}_Op>": _LOOKUP.format(optimizer)
    for optimizer in _OPTIMIZERS
}
"""Backward operation -> forward operation whose inputs the rule of the backward operation reads."""

_FP4 = find_dtype("f4E2M1FN")


@needs(OpClass.CONTRACTION)
def _weighted(
    call: Call,
    *,
    x_at: int = 0,
    weight_at: int = 1,
    scales_at: tuple[int, ...] = (),
    bias_at: int = -1,
    out_at: int = -1,
    type_at: int = -1,
    packed: bool = False,
) -> AtenCost | None:
    """Return the cost of a matmul of x (..., K) by a weight (N, K) or (K, N), with optional scales and bias.

    The result has the type of the tensor at ``out_at``, or the ``c10::ScalarType`` code at ``type_at``.
    Without these, it is bf16 for operands of at most 8 bits. ``packed`` means two 4-bit values per byte along
    K.
    """
    x, weight, bias, out = (call.tensor(position) for position in (x_at, weight_at, bias_at, out_at))
    if x is None or weight is None or not x.shape or len(weight.shape) != 2:
        return None
    depth, rows = x.shape[-1], prod(x.shape[:-1])
    if depth not in weight.shape:
        return None
    n = weight.shape[0] if weight.shape[1] == depth else weight.shape[1]
    types = (_FP4, _FP4) if packed else (x.dtype, weight.dtype)
    result = dense(_result_type(call, x, out, type_at), (*x.shape[:-1], n))
    row = matrix_product((1, rows, n, 2 * depth if packed else depth), (*types, FLOAT32))
    added = 0.0 if bias is None else float(result.elements)
    inputs = [x, weight, *call.present(*scales_at), *([] if bias is None else [bias])]
    return simple(inputs, [result], flops=row.flops + added, rate=types[0], contractions=(row,))


def _result_type(call: Call, x: Strided, out: Strided | None, type_at: int) -> DType | None:
    if out is not None:
        return out.dtype
    explicit = scalar_type(call.integer(type_at))
    if explicit is not None:
        return explicit
    return find_dtype("bf16") if x.dtype is not None and x.dtype.bits <= 8 else x.dtype


@needs(OpClass.NORMALIZATION, 0, 1, 3)
def _norm_linear(call: Call, x: Strided, weight: Strided, projection: Strided) -> AtenCost | None:
    """Return the cost of ``_LayerNormLinear`` (x, norm weight, norm bias, weight, bias): a norm, then a
    matmul.
    """
    product = _weighted(call, x_at=0, weight_at=3, bias_at=4)
    if not product.results:
        return None
    norm = call.present(1, 2)
    return simple(
        [x, *norm, projection, *call.present(4)],
        [dense(x.dtype, product.results[0].shape)],
        op_class=OpClass.CONTRACTION,
        flops=product.cost.flops + (3.0 + len(norm)) * x.elements,
        transcendentals=float(prod(x.shape[:-1])),
        contractions=product.cost.contractions,
    )


@needs(OpClass.SORT)
def _route(call: Call, *, logits_at: int, count_at: int = -1, ids_at: int = -1) -> AtenCost | None:
    """Return the cost of routing tokens to experts: a softmax over the experts of each token, and the
    selection of the experts with the largest results.

    For each token and expert, it takes four FLOPs, one exponential, and one comparison per selected expert.
    """
    logits, ids = call.tensor(logits_at), call.tensor(ids_at)
    if logits is None or len(logits.shape) != 2 or (ids is not None and not ids.shape):
        return None
    chosen = call.integer(count_at) if ids is None else ids.shape[-1]
    if chosen is None or not 0 < chosen <= logits.shape[1]:
        return None
    results = [dense(FLOAT32, (logits.shape[0], chosen)), dense(find_dtype("i32"), (logits.shape[0], chosen))]
    flops = (4.0 + chosen) * logits.elements
    return simple([logits], results, flops=flops, transcendentals=float(logits.elements))


@needs(OpClass.SORT, 0, 1)
def _sort_tokens(call: Call, weights: Strided, experts: Strided) -> AtenCost:
    """Return the cost of ``SortTokens`` (weights, experts, count), which counts tokens and sorts them by
    expert.
    """
    places = dense(find_dtype("i32"), (2 * experts.elements,))
    return simple([weights, experts], [weights.dense, places], flops=2.0 * experts.elements)


@needs(OpClass.REDUCTION, 0, 1)
def _sum_of_experts(call: Call, source: Strided, out: Strided) -> AtenCost:
    """Return the cost of ``moe_sum`` (results of each expert, out), which adds the results of a token's
    experts.
    """
    return simple([source], [out.dense], flops=float(max(source.elements - out.elements, 0)))


_NORM = partial(rms_norm, source_at=1, weight_at=2, out_at=0)
_ADDED_IN_PLACE = partial(rms_norm, weight_at=2, residual_at=1)
_ADDED_APART = partial(rms_norm, source_at=1, weight_at=4, residual_at=2, residual_out_at=3, out_at=0)
_NAMESPACES = ("_C", "sgl_kernel", "aiter", "vllm")
_INTO_CACHE = partial(_store_cache, cache_at=2, slots_at=4)

_EVERYWHERE: dict[str, AtenRule] = {
    **dict.fromkeys(("rms_norm", "rmsnorm", "rmsnorm2d_fwd", "gemma_rmsnorm"), _NORM),
    **dict.fromkeys(("fused_add_rms_norm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm"), _ADDED_IN_PLACE),
    **dict.fromkeys(("silu_and_mul", "mul_and_silu", "silu_and_mul_quant"), partial(_gated, flops=2.0)),
    **dict.fromkeys(("swigluoai_and_mul", "fatrelu_and_mul"), partial(_gated, flops=6.0)),
    "gelu_and_mul": partial(_gated, flops=5.0),
    "gelu_tanh_and_mul": partial(_gated, flops=9.0),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_quick"), _activation),
    "rotary_embedding": _rotary,
    "rms_norm_static_fp8_quant": _norm_and_quantize,
    "rms_norm_dynamic_per_token_quant": partial(_norm_and_quantize, residual_at=6),
    "fused_add_rms_norm_static_fp8_quant": partial(_norm_and_quantize, residual_at=2),
}
"""Operations that several libraries register under one name."""

_OUT_FIRST = partial(_quantize, source_at=1, out_at=0, scale_at=2)
_IN_FIRST = partial(_quantize, source_at=0, out_at=1, scale_at=2)

_QUANTIZATION: dict[str, AtenRule] = {
    **dict.fromkeys(
        ("_C::static_scaled_fp8_quant", "_C::static_scaled_int8_quant", "aiter::static_per_tensor_quant"),
        partial(_OUT_FIRST, given=True),
    ),
    **dict.fromkeys(
        (
            "_C::dynamic_scaled_fp8_quant",
            "_C::dynamic_per_token_scaled_fp8_quant",
            "_C::dynamic_scaled_int8_quant",
            "aiter::dynamic_per_tensor_quant",
            "aiter::dynamic_per_token_scaled_quant",
            "aiter::dynamic_per_group_scaled_quant_fp4",
        ),
        _OUT_FIRST,
    ),
    **dict.fromkeys(
        (
            "sgl_kernel::sgl_per_token_group_quant_fp8",
            "sgl_kernel::sgl_per_token_group_quant_int8",
            "sgl_kernel::sgl_per_token_group_quant_8bit",
            "sgl_kernel::sgl_per_token_quant_fp8",
            "sgl_kernel::sgl_per_tensor_quant_fp8",
            "_C::per_token_group_fp8_quant",
        ),
        _IN_FIRST,
    ),
}

_SCALED = partial(_weighted, scales_at=(2, 3), bias_at=5, type_at=4)
_SCALED_INTO = partial(_weighted, x_at=1, weight_at=2, scales_at=(3, 4), bias_at=5, out_at=0)
_INTO = partial(_weighted, x_at=1, weight_at=2, out_at=0)
_WEIGHT_FIRST = partial(_weighted, x_at=1, weight_at=0)

_PRODUCTS: dict[str, AtenRule] = {
    **dict.fromkeys(("_C::cutlass_scaled_mm", "_C::cutlass_scaled_mm_azp"), _SCALED_INTO),
    "_C::cutlass_scaled_fp4_mm": partial(
        _weighted, x_at=1, weight_at=2, scales_at=(3, 4), out_at=0, packed=True
    ),
    "sgl_kernel::cutlass_scaled_fp4_mm": partial(
        _weighted, x_at=1, weight_at=2, scales_at=(3, 4), out_at=0, packed=True
    ),
    **dict.fromkeys(
        ("sgl_kernel::fp8_scaled_mm", "sgl_kernel::int8_scaled_mm", "sgl_kernel::fp8_blockwise_scaled_mm"),
        _SCALED,
    ),
    **dict.fromkeys(
        (
            "sgl_kernel::dsv3_fused_a_gemm",
            "sgl_kernel::dsv3_router_gemm",
            "_C::dsv3_fused_a_gemm",
            "_C::dsv3_router_gemm",
        ),
        _INTO,
    ),
    **dict.fromkeys(("_rocm_C::wvSplitK", "_rocm_C::LLMM1", "aiter::wvSpltK", "aiter::LLMM1"), _WEIGHT_FIRST),
    **dict.fromkeys(
        (
            "aiter::gemm_a8w8",
            "aiter::gemm_a8w8_CK",
            "aiter::gemm_a8w8_bpreshuffle",
            "vllm::rocm_aiter_gemm_w8a8",
        ),
        partial(_weighted, scales_at=(2, 3), bias_at=4),
    ),
    **dict.fromkeys(
        (
            "aiter::gemm_a8w8_blockscale",
            "aiter::gemm_a8w8_blockscale_bpreshuffle",
            "vllm::rocm_aiter_gemm_w8a8_blockscale",
            "vllm::w8a8_block_fp8_matmul_func",
            "vllm::w8a8_triton_block_scaled_mm_func",
        ),
        partial(_weighted, scales_at=(2, 3)),
    ),
    "aiter::gemm_a4w4": partial(_weighted, scales_at=(2, 3), packed=True),
    "_Linear": partial(_weighted, x_at=1, weight_at=0, bias_at=2),
    "_LayerNormLinear": _norm_linear,
    "FusedRMSNormAffineFunction": partial(rms_norm, weight_at=1),
}

_ROUTING: dict[str, AtenRule] = {
    "TopK": partial(_route, logits_at=0, count_at=1),
    "SortTokens": _sort_tokens,
    "_moe_C::topk_softmax": partial(_route, logits_at=3, ids_at=1),
    "sgl_kernel::topk_softmax": partial(_route, logits_at=2, ids_at=1),
    "aiter::topk_softmax": partial(_route, logits_at=3, ids_at=1),
    "sgl_kernel::moe_fused_gate": partial(_route, logits_at=0, count_at=4),
    **dict.fromkeys(("_moe_C::moe_sum", "aiter::moe_sum", "sgl_kernel::moe_sum"), _sum_of_experts),
}

SERVING: dict[str, AtenRule] = {
    **{f"{space}::{name}": rule for space in _NAMESPACES for name, rule in _EVERYWHERE.items()},
    # AITER's own `rms_norm` returns its result.
    **dict.fromkeys(("aiter::rms_norm", "aiter::rmsnorm2d_fwd_ck"), partial(rms_norm, weight_at=1)),
    "aiter::add_rmsnorm": _ADDED_APART,
    "aiter::rmsnorm2d_fwd_with_add": _ADDED_APART,
    "aiter::rmsnorm2d_fwd_with_add_ck": _ADDED_APART,
    "sglang::store_cache": _INTO_CACHE,
    "_C_cache_ops::reshape_and_cache": _INTO_CACHE,
    "_C_cache_ops::reshape_and_cache_flash": _INTO_CACHE,
    "aiter::reshape_and_cache": _INTO_CACHE,
    "aiter::reshape_and_cache_flash": _INTO_CACHE,
    "_C_cache_ops::concat_and_cache_mla": partial(_store_cache, cache_at=2, slots_at=3),
    **_QUANTIZATION,
    **_PRODUCTS,
    **_ROUTING,
    **EXPERTS,
    **PAGED,
    "fbgemm::permute_pooled_embs": _column_permutation,
    "fbgemm::permute_pooled_embs_auto_grad": _column_permutation,
    "fbgemm::recat_embedding_grad_output_mixed_D_batch": _column_permutation,
    "fbgemm::bounds_check_indices": _bounds_check,
    _POOLED_BACKWARD: _column_permutation,
    "fbgemm::permute_sparse_features": _sparse_permutation,
    **dict.fromkeys(map(_LOOKUP.format, _OPTIMIZERS), partial(elements.table_lookup, state_at=20)),
    **dict.fromkeys(FORWARD, _table_update),
    "fbgemm::asynchronous_complete_cumsum": _complete_sum,
    "fb::asynchronous_complete_cumsum": _complete_sum,
}
"""Operation with its namespace -> rule."""

SERVING_COMPOSITE: dict[str, AtenRule] = {
    **dict.fromkeys(
        (
            "aiter::gemm_a16w16",
            "vllm::rocm_unquantized_gemm",
            "vllm::rocm_unquantized_gemm_impl",
            "vllm::rocm_aiter_tuned_gemm_impl",
            "vllm::cpu_unquantized_gemm",
        ),
        matmul.linear,
    ),
    "vllm::rocm_aiter_rms_norm": partial(rms_norm, weight_at=1),
    **dict.fromkeys(
        ("vllm::rocm_aiter_rmsnorm2d_fwd_with_add", "vllm::rocm_aiter_rmsnorm_fused_add"),
        partial(rms_norm, weight_at=2, residual_at=1),
    ),
    "vllm::unified_kv_cache_update": _update_cache,
}
"""Operation -> rule that applies if no recorded part of it has a cost."""
