"""Costs of attention over a paged KV cache, whose lengths come from the name of the enclosing step.

Serving engines put the batch into the name of a step (the profiling annotations of vLLM and SGLang):
``execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37(sq37sk34489sqsq37sqsk34489)``. The
numbers are sums over sequences of queries, keys, squared queries, and queries times keys: first over
sequences in their prompt, then over sequences that generate.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import NamedTuple

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

__all__ = ["PAGED", "BatchLengths", "batch_lengths"]

_FLOPS_A_PAIR = 4.0
_LARGEST = 1 << 50
_SUMS = r"\(sq(\d{1,15})sk(\d{1,15})sqsq(\d{1,15})sqsk(\d{1,15})\)"
_STEP = re.compile(rf"execute_\d{{1,12}}_context_\d{{1,9}}{_SUMS}_generation_\d{{1,9}}{_SUMS}")


class BatchLengths(NamedTuple):
    """Sums over all sequences of a batch: number of queries, number of keys, squared number of queries, and
    number of queries times number of keys.
    """

    queries: int
    keys: int
    squares: int
    pairs: int

    @property
    def causal_pairs(self) -> float:
        """Return the number of (query, key) pairs that a causal mask leaves. The last query of a sequence
        attends to all of its keys.
        """
        return self.pairs - (self.squares - self.queries) / 2


def batch_lengths(step: str) -> BatchLengths | None:
    """Return the sums of sequence lengths that the name of a serving engine's step states. Return None if the
    name states none, or if they contradict each other.
    """
    match = _STEP.search(step[:1000])
    if match is None:
        return None
    numbers = [int(number) for number in match.groups()]
    sums = BatchLengths(*(prompt + rest for prompt, rest in zip(numbers[:4], numbers[4:], strict=True)))
    return sums if sums.queries <= sums.keys and sums.squares <= sums.pairs <= _LARGEST else None


def _paged(call: Call, *, q_at: int, k_at: int, v_at: int) -> AtenCost:
    """Return the cost of attention over a paged KV cache. Queries are (tokens, heads, head). The number of
    cached keys is in the name of the step.

    ``flops`` counts all pairs of a sequence, ``useful_flops`` the pairs of a causal mask. A sliding window is
    not recorded, and not counted. Keys and values are read once per key head.
    """
    q, k, v = (call.tensor(position) for position in (q_at, k_at, v_at))
    lengths = batch_lengths(call.step)
    if q is None or k is None or v is None or lengths is None:
        return unknown(call, OpClass.ATTENTION)
    if min(len(q.shape), len(k.shape), len(v.shape)) < 3 or lengths.queries > q.shape[0]:
        return unknown(call, OpClass.ATTENTION)
    return _paged_cost((q, k, v), lengths)


def _paged_cost(qkv: tuple[Strided, Strided, Strided], lengths: BatchLengths) -> AtenCost:
    q, k, v = qkv
    heads, head, value_head = q.shape[-2], q.shape[-1], v.shape[-1]
    useful = lengths.causal_pairs * heads
    # Sequences differ in length: extents are those of one with as many queries a key; the FLOPs are exact.
    keys, queries = max(lengths.keys, 1), max(round(lengths.pairs / max(lengths.keys, 1)), 1)
    shapes = (((heads, queries, keys, head), head), ((heads, queries, value_head, keys), value_head))
    rows = tuple(
        replace(
            matrix_product(extents, (q.dtype, k.dtype, FLOAT32)),
            flops=2.0 * heads * lengths.pairs * depth,
            useful_flops=2.0 * useful * depth,
        )
        for extents, depth in shapes
    )
    softmax = _FLOPS_A_PAIR * heads
    out = dense(q.dtype, (*q.shape[:-1], value_head))
    cached = float(lengths.keys) * k.shape[-2] * (head * k.width + value_head * v.width)
    return simple(
        [q, k, v],
        [out],
        op_class=OpClass.ATTENTION,
        flops=sum(product.flops for product in rows) + softmax * lengths.pairs,
        useful_flops=sum(product.useful_flops for product in rows) + softmax * lengths.causal_pairs,
        transcendentals=useful,
        read=q.bytes + cached,
        rate=q.dtype,
        contractions=rows,
    )


_FIRST_THREE = partial(_paged, q_at=0, k_at=1, v_at=2)

PAGED: dict[str, AtenRule] = {
    **dict.fromkeys(
        (
            "vllm::unified_attention",
            "vllm::unified_attention_with_output",
            "_vllm_fa2_C::varlen_fwd",
            "_vllm_fa3_C::fwd",
            "sgl_kernel::fwd",
            "sglang::unified_attention_with_output",
        ),
        _FIRST_THREE,
    ),
    **dict.fromkeys(
        ("aiter::paged_attention_ragged", "sglang_profiler::attention_paged_attention_ragged"),
        partial(_paged, q_at=2, k_at=3, v_at=4),
    ),
}
"""Operation -> rule."""
