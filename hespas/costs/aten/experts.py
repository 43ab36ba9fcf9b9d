"""Costs of mixture-of-experts layers, which multiply each token with the weights of its chosen experts.

An expert computes two products: (rows, hidden) by its first weights (gate and up concatenated), and (rows,
inner) by its second weights, where rows = tokens x experts per token. The weights of as many experts as the
rows can reach are read. Intermediate results are written and read, because the products are separate kernels.
"""

from __future__ import annotations

from functools import partial
from math import isnan
from typing import NamedTuple

from hespas.costs.aten.call import (
    FLOAT32,
    AtenCost,
    AtenRule,
    Call,
    Strided,
    matrix_product,
    simple,
    unknown,
)
from hespas.graph import DType, OpClass, find_dtype

__all__ = ["EXPERTS", "PARTS"]

_MXFP4 = find_dtype("mxfp4")
_FLOPS_OF_GATE = 2.0


class _ExpertWeights(NamedTuple):
    """Weights of all experts with shape (experts, out, depth), and their element type."""

    experts: int
    out: int
    depth: int
    dtype: DType | None

    @property
    def bytes_each(self) -> float:
        """Return the bytes of the weights of one expert, including block scales."""
        return float("nan") if self.dtype is None else float(self.dtype.storage_bytes(self.out * self.depth))


def _expert_weights(weights: Strided, depth: int) -> _ExpertWeights | None:
    """Return the weights of all experts if they are three-dimensional and multiply rows of ``depth``
    elements; else None. Weights of 4 bits are packed, two per byte, along the depth.
    """
    if len(weights.shape) != 3:
        return None
    experts, *sides = weights.shape
    is_bytes = weights.dtype is not None and weights.dtype.name in ("ui8", "f4E2M1FN")
    for length, dtype in ((depth, weights.dtype), (depth // 2, _MXFP4)):
        if (dtype is _MXFP4) == is_bytes and length in sides:
            other = sides[0] if sides[1] == length else sides[1]
            return _ExpertWeights(experts, other, depth, dtype)
    return None


def _second_weights(weights: Strided, hidden: int, inner: int) -> _ExpertWeights | None:
    """Return the weights of the second matmul of all experts, which map ``inner`` elements (or half of them
    in gated layers) to ``hidden`` elements. Return None if the shape does not fit.
    """
    for depth in (inner // 2, inner):
        answer = _expert_weights(weights, depth)
        if answer is not None and answer.out == hidden:
            return answer
    return None


def _experts_cost(
    x: Strided, rows: int, pair: tuple[Strided, Strided], extra: list[Strided]
) -> AtenCost | None:
    """Return the cost of both matmuls of an expert layer; None if the shapes do not fit.

    ``rows`` is the total number of token rows of all experts, ``pair`` has the weights of the two matmuls,
    and ``extra`` further inputs.
    """
    first, second = pair
    hidden = x.shape[-1]
    up = _expert_weights(first, hidden)
    down = None if up is None else _second_weights(second, hidden, up.out)
    if up is None or down is None:
        return None
    products = tuple(
        matrix_product((1, rows, matrix.out, matrix.depth), (x.dtype, matrix.dtype, FLOAT32))
        for matrix in (up, down)
    )
    reached = min(up.experts, rows)
    between = rows * down.depth * x.width
    weights = reached * (up.bytes_each + down.bytes_each)
    inner = float(rows * down.depth)
    combined = 2.0 * rows * hidden
    return simple(
        [x, first, second, *extra],
        [x.dense],
        op_class=OpClass.CONTRACTION,
        flops=sum(product.flops for product in products) + _FLOPS_OF_GATE * inner + combined,
        transcendentals=inner,
        read=x.bytes + weights + between + sum(tensor.bytes for tensor in extra),
        written=x.bytes + between,
        rate=x.dtype,
        contractions=products,
    )


def _fused_experts(call: Call, *, ids_at: int = 4) -> AtenCost:
    """Return the cost of a fused expert layer (x, first weights, second weights, routing weights, chosen
    experts per token, ...).
    """
    x, first, second, ids = (call.tensor(position) for position in (0, 1, 2, ids_at))
    if x is None or first is None or second is None or ids is None or len(x.shape) < 2:
        return unknown(call, OpClass.CONTRACTION)
    answer = _experts_cost(x, ids.elements, (first, second), call.present(3, ids_at))
    return unknown(call, OpClass.CONTRACTION) if answer is None else answer


_ROUTES = {"TopK": 1, "sgl_kernel::moe_fused_gate": 4}
"""Enclosed operation -> position of the number of experts per token."""
_CHOICES = {"_moe_C::topk_softmax": 1, "aiter::topk_softmax": 1, "sgl_kernel::topk_softmax": 1}
"""Enclosed operation -> position of a tensor with one column per expert of a token."""
_VIEW = "aten::view"

PARTS: dict[str, frozenset[str]] = dict.fromkeys(
    ("vllm::moe_forward", "vllm::moe_forward_shared"), frozenset({_VIEW, *_ROUTES, *_CHOICES})
)
"""Operation -> enclosed operations that its rule reads."""


def _experts_a_token(parts: tuple[Call, ...]) -> int | None:
    for part in parts:
        if part.name in _ROUTES:
            return part.integer(_ROUTES[part.name])
        chosen = part.tensor(_CHOICES.get(part.name, -1))
        if chosen is not None and len(chosen.shape) == 2:
            return chosen.shape[1]
    return None


def _moe_forward(call: Call) -> AtenCost:
    """Return the cost of vLLM's ``moe_forward`` (x, logits of the experts, ...), whose arguments do not
    include the weights.

    The weights are found among the three-dimensional views that were recorded inside the call. The first
    extent of such a view is the number of experts. The first pair of views whose shapes fit x is used.
    """
    x, logits = call.tensor(0), call.tensor(1)
    chosen = _experts_a_token(call.parts)
    if x is None or logits is None or len(x.shape) != 2 or len(logits.shape) != 2 or not chosen:
        return unknown(call, OpClass.CONTRACTION)
    seen = [part.tensor(0) for part in call.parts if part.name == _VIEW]
    weights = [
        tensor
        for tensor in seen
        if tensor is not None and len(tensor.shape) == 3 and tensor.shape[0] == logits.shape[1]
    ]
    for position, first in enumerate(weights):
        for second in weights[position + 1 :]:
            answer = _experts_cost(x, x.shape[0] * chosen, (first, second), [logits])
            if answer is not None and not isnan(answer.cost.bytes_read):
                return answer
    return unknown(call, OpClass.CONTRACTION)


EXPERTS: dict[str, AtenRule] = {
    **dict.fromkeys(
        (
            "vllm::inplace_fused_experts",
            "vllm::outplace_fused_experts",
            "vllm::rocm_aiter_fused_moe",
            "vllm::rocm_aiter_asm_moe_tkw1",
            "sglang::inplace_fused_experts",
            "sglang::outplace_fused_experts",
            "aiter::fused_moe_",
            "aiter::fused_moe",
        ),
        partial(_fused_experts, ids_at=4),
    ),
    **dict.fromkeys(PARTS, _moe_forward),
}
"""Operation -> rule."""
