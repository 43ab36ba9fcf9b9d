"""Mixtures of experts as serving libraries run them: one kernel for all experts of a rank.

Where tensor ranks share attention, each of them has all tokens: it runs its experts, or its part of each, on
those that chose them, and results are all-reduced. Data-parallel ranks gather each other's tokens first and
scatter the sums; with more expert ranks than a token has experts, tokens travel to the ranks they chose.
"""

from __future__ import annotations

from math import expm1, log1p, prod
from typing import NamedTuple

from hespas.generators.llm.feedforward import activation, mlp_layers, shared_expert
from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.model import Experts
from hespas.generators.llm.rank import Linear, Rank
from hespas.graph import CollectiveKind, OpClass

__all__ = ["fused_experts"]


def fused_experts(r: Rank, k: Kernels, block: Experts, key: str, x: Value, *, element: str = "") -> Value:
    """A mixture, from the residual stream to the residual stream. ``element``: the type of its matrices where
    it is not that of others.
    """
    normed = r.norm(k, "norm", x, f"{key}.norm")
    router = Linear(
        name="router", inputs=r.hidden, outputs=block.experts, rows=r.tokens, format=r.precision.compute
    )
    table = Tensor((r.tokens, block.experts), "f32")
    chosen = k.vector(
        "topk", "topk", [table], [Tensor((r.tokens, block.topk), "f32")], after=[r.linear(k, router, normed)]
    )
    width, inputs = block.latent or r.hidden, normed
    if block.latent:
        down = Linear(name="latent_down", inputs=r.hidden, outputs=block.latent, rows=r.tokens)
        inputs = r.linear(k, down, normed)
    replicated = r.layout.dp > 1
    travels = replicated and r.layout.ep > block.topk
    everyone, rows = r.groups.everyone, r.tokens * (r.layout.dp if replicated else 1)
    sent = r.value(r.tokens * block.topk if travels else rows, width)
    if replicated:
        kind = CollectiveKind.ALL_TO_ALL if travels else CollectiveKind.ALL_GATHER
        inputs = k.collective(f"dispatch.{kind.name.lower()}", kind, everyone, sent, after=[inputs])
    matrices = _Matrices(block, rows, element or r.precision.matmul)
    y: Value = _experts(r, k, matrices, after=[inputs, chosen])
    if replicated:
        kind = CollectiveKind.ALL_TO_ALL if travels else CollectiveKind.REDUCE_SCATTER
        y = k.collective(f"combine.{kind.name.lower()}", kind, everyone, sent, after=[y])
    if block.latent:
        up = Linear(name="latent_up", inputs=block.latent, outputs=r.hidden, rows=r.tokens)
        y = r.linear(k, up, y)
    if block.shared_ffn:
        y = k.vector(
            "shared.add", "add", [r.whole, r.whole], [r.whole], after=[y, _shared(r, k, block, normed)]
        )
    if r.layout.tp > 1 and not replicated:
        y = k.collective("all_reduce", CollectiveKind.ALL_REDUCE, r.groups.tensor, r.whole, after=[y])
    return r.added(k, key, x, y)


class _Matrices(NamedTuple):
    """Experts whose matrices have elements of a type, and the tokens that they may be chosen by."""

    block: Experts
    rows: int
    element: str


def _experts(r: Rank, k: Kernels, matrices: _Matrices, after: list[Value]) -> int:
    """Both grouped products and what is between them. Its operands say all of its sizes: tokens, the matrices
    of a rank, the scores of all experts, and the chosen ones.
    """
    block, rows, element = matrices
    local, ffn = block.experts // r.layout.ep, block.ffn // r.layout.etp
    width, gates = block.latent or r.hidden, 2 if block.gated else 1
    copies = rows * block.topk / r.layout.ep
    reached = local * -expm1(rows * block.topk * log1p(-1 / max(block.experts, 2)))
    first, second = Tensor((local, gates * ffn, width), element), Tensor((local, width, ffn), element)
    weights = (k.bytes_of(first) + k.bytes_of(second)) * min(1.0, reached / local)
    tokens = Tensor((rows, width), element)
    moved = k.bytes_of(tokens) / prod(tokens.shape) * copies * width
    scores = Tensor((rows, block.experts), "f32")
    return k.node(
        "experts",
        "fused_moe",
        OpClass.CONTRACTION,
        [tokens, first, second, scores, Tensor((rows, block.topk), "i32")],
        [r.value(rows, width)],
        flops=2.0 * copies * (gates + 1) * width * ffn,
        transcendentals=copies * ffn,
        bytes_read=weights + moved,
        bytes_written=moved,
        after=after,
    )


def _shared(r: Rank, k: Kernels, block: Experts, normed: Value) -> Value:
    """The part of a shared expert on a rank, which is all-reduced with those of the others."""
    module = k.module
    k.module = f"{module}.shared"
    inside = shared_expert(block)
    fc1, fc2 = mlp_layers(r, inside)
    done = r.linear(k, fc2, activation(r, k, inside, module, r.linear(k, fc1, normed)))
    k.module = module
    return done
