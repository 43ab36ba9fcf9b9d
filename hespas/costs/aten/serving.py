"""Costs of kernels that are not PyTorch's own: serving libraries, fbgemm, Triton.

Argument orders follow what the traces in hand and the sources of the libraries show: AITER
(https://github.com/ROCm/aiter), SGLang (https://github.com/sgl-project/sglang), vLLM
(https://github.com/vllm-project/vllm), fbgemm (https://github.com/pytorch/FBGEMM). These operations mostly
get their result as an argument, first.
"""

from __future__ import annotations

from math import nan

from hespas.costs.aten.args import Call
from hespas.costs.aten.cost import AtenCost, AtenRule, dense, simple, unknown
from hespas.costs.aten.reduce import rms_norm
from hespas.graph import OpClass

__all__ = ["SERVING", "triton_kernel"]


def _gated(flops: float) -> AtenRule:
    """``silu_and_mul`` and its kin: (out, in) with in = [gate, up] side by side."""

    def rule(call: Call) -> AtenCost:
        out, source = call.tensor(0), call.tensor(1)
        if out is None or source is None or source.elements != 2 * out.elements:
            return unknown(call, OpClass.ELEMENTWISE)
        return simple(
            OpClass.ELEMENTWISE,
            [source],
            [dense(out.dtype, out.shape)],
            flops=flops * out.elements,
            transcendentals=float(out.elements),
        )

    return rule


def _rotary(call: Call) -> AtenCost:
    """(positions, query, key, head size, table of cosines and sines): three FLOPs an element, in place.

    The table has one row of ``rotated`` columns a position; of each head only so many elements turn.
    """
    positions, query, key = call.tensor(0), call.tensor(1), call.tensor(2)
    table, head = call.tensor(4), call.integer(3)
    if positions is None or query is None or table is None or not head or len(table.shape) != 2:
        return unknown(call, OpClass.ELEMENTWISE)
    share = min(table.shape[1] / head, 1.0)
    turned = [each for each in (query, key) if each is not None]
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

    def rule(call: Call) -> AtenCost:
        key, value, slots = call.tensor(0), call.tensor(1), call.tensor(slots_at)
        if key is None or value is None or slots is None:
            return unknown(call, OpClass.SCATTER)
        written = key.elements * key.width + value.elements * value.width
        return simple(OpClass.SCATTER, [key, value, slots], [], written=written)

    return rule


def _column_permutation(call: Call) -> AtenCost:
    """``permute_pooled_embs``: the pooled embeddings in another order of columns."""
    source = call.tensor(0)
    if source is None:
        return unknown(call, OpClass.MOVE)
    return simple(OpClass.MOVE, call.tensors, [dense(source.dtype, source.shape)])


def _bounds_check(call: Call) -> AtenCost:
    """(rows of each table, indices, offsets, ...): every index compared with two bounds; few are mended."""
    rows, indices, offsets = call.tensor(0), call.tensor(1), call.tensor(2)
    if rows is None or indices is None or offsets is None:
        return unknown(call, OpClass.ELEMENTWISE)
    return simple(OpClass.ELEMENTWISE, [rows, indices, offsets], [], flops=2.0 * indices.elements)


def _complete_sum(call: Call) -> AtenCost:
    """``asynchronous_complete_cumsum``: running sums with a 0 in front."""
    source = call.tensor(0)
    if source is None or len(source.shape) != 1:
        return unknown(call, OpClass.REDUCTION)
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
        OpClass.FUSION, tensors[:-1], [dense(tensors[-1].dtype, tensors[-1].shape)], flops=nan,
        transcendentals=nan, written=tensors[-1].bytes, rate=tensors[0].dtype,
    )  # fmt: skip


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
