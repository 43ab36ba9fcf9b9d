"""Costs of mixtures of experts: each token multiplied with the weights of the few experts chosen for it.

Two products: (rows, hidden) by the first weights of an expert, gate and up side by side, and (rows, inner) by
its second, where rows = tokens x experts a token. All weights are read that rows can reach. What passes
between the products is written and read, as the kernels are apart.
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


class _Weights(NamedTuple):
    """The weights of all experts as (experts, out, depth), and their element type."""

    experts: int
    out: int
    depth: int
    dtype: DType | None

    @property
    def bytes_each(self) -> float:
        """Bytes of one expert's, scales of blocks included."""
        return float("nan") if self.dtype is None else float(self.dtype.storage_bytes(self.out * self.depth))


def _read(weights: Strided, depth: int) -> _Weights | None:
    """Weights of three dimensions by which rows of ``depth`` are multiplied. Two values of 4 bits stand in a
    byte along the depth, which is then half as long.
    """
    if len(weights.shape) != 3:
        return None
    experts, *sides = weights.shape
    is_bytes = weights.dtype is not None and weights.dtype.name in ("ui8", "f4E2M1FN")
    for length, dtype in ((depth, weights.dtype), (depth // 2, _MXFP4)):
        if (dtype is _MXFP4) == is_bytes and length in sides:
            other = sides[0] if sides[1] == length else sides[1]
            return _Weights(experts, other, depth, dtype)
    return None


def _second(weights: Strided, hidden: int, inner: int) -> _Weights | None:
    """The weights from ``inner``, or half of it where a gate takes the other half, back to ``hidden``."""
    for depth in (inner // 2, inner):
        found = _read(weights, depth)
        if found is not None and found.out == hidden:
            return found
    return None


def _priced(x: Strided, rows: int, pair: tuple[Strided, Strided], beside: list[Strided]) -> AtenCost | None:
    """``rows`` are those of all experts together, ``pair`` the weights of both products."""
    first, second = pair
    hidden = x.shape[-1]
    up = _read(first, hidden)
    down = None if up is None else _second(second, hidden, up.out)
    if up is None or down is None:
        return None
    products = tuple(
        matrix_product((1, rows, each.out, each.depth), (x.dtype, each.dtype, FLOAT32)) for each in (up, down)
    )
    reached = min(up.experts, rows)
    between = rows * down.depth * x.width
    weights = reached * (up.bytes_each + down.bytes_each)
    inner = float(rows * down.depth)
    combined = 2.0 * rows * hidden
    return simple(
        [x, first, second, *beside],
        [x.dense],
        op_class=OpClass.CONTRACTION,
        flops=sum(each.flops for each in products) + _FLOPS_OF_GATE * inner + combined,
        transcendentals=inner,
        read=x.bytes + weights + between + sum(each.bytes for each in beside),
        written=x.bytes + between,
        rate=x.dtype,
        contractions=products,
    )


def _fused_experts(call: Call, *, ids_at: int = 4) -> AtenCost:
    """(x, first weights, second weights, weights of the choice, chosen experts of each token, ...)."""
    x, first, second, ids = (call.tensor(place) for place in (0, 1, 2, ids_at))
    if x is None or first is None or second is None or ids is None or len(x.shape) < 2:
        return unknown(call, OpClass.CONTRACTION)
    found = _priced(x, ids.elements, (first, second), call.present(3, ids_at))
    return unknown(call, OpClass.CONTRACTION) if found is None else found


_ROUTES = {"TopK": 1, "sgl_kernel::moe_fused_gate": 4}
"""Parts that state how many experts a token has, and where."""
_CHOICES = {"_moe_C::topk_softmax": 1, "aiter::topk_softmax": 1, "sgl_kernel::topk_softmax": 1}
"""Parts one of whose tensors has a column for each expert of a token, and where."""
_VIEW = "aten::view"

PARTS: dict[str, frozenset[str]] = dict.fromkeys(
    ("vllm::moe_forward", "vllm::moe_forward_shared"), frozenset({_VIEW, *_ROUTES, *_CHOICES})
)
"""Operation -> the operations inside it that its rule reads."""


def _experts_a_token(parts: tuple[Call, ...]) -> int | None:
    for part in parts:
        if part.name in _ROUTES:
            return part.integer(_ROUTES[part.name])
        chosen = part.tensor(_CHOICES.get(part.name, -1))
        if chosen is not None and len(chosen.shape) == 2:
            return chosen.shape[1]
    return None


def _moe_forward(call: Call) -> AtenCost:
    """(x, logits of the experts, ...): no argument holds the weights. Kernels that are launched without an
    operation of their own look at them: of the views inside, the first of three dimensions whose first is
    the number of experts and which fits x is the first, the next that fits that the second.
    """
    x, logits = call.tensor(0), call.tensor(1)
    chosen = _experts_a_token(call.parts)
    if x is None or logits is None or len(x.shape) != 2 or len(logits.shape) != 2 or not chosen:
        return unknown(call, OpClass.CONTRACTION)
    seen = [part.tensor(0) for part in call.parts if part.name == _VIEW]
    weights = [
        each
        for each in seen
        if each is not None and len(each.shape) == 3 and each.shape[0] == logits.shape[1]
    ]
    for place, first in enumerate(weights):
        for second in weights[place + 1 :]:
            found = _priced(x, x.shape[0] * chosen, (first, second), [logits])
            if found is not None and not isnan(found.cost.bytes_read):
                return found
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
