"""Feed-forward blocks on one rank: plain, gated, and mixtures of experts, also in serving.

Training of experts (arXiv 2401.06066, 2412.19437): a router scores each token. Tokens are sorted by expert,
sent to the ranks of their experts, multiplied by two grouped products, sent back, and summed with their
scores as weights. Loads are balanced except for the given imbalance. With a capacity factor each expert has
slots for that multiple of its mean number of tokens, and all slots are sent and processed. A shared expert is
an additional feed-forward block. Biases are added expert by expert if they are not fused.

Serving libraries run one kernel for all experts of a rank. If tensor-parallel ranks share attention, each of
them has all tokens. It runs its experts, or its part of each expert, on their tokens, and the results are
all-reduced. Data-parallel ranks first gather each other's tokens and reduce-scatter the sums. If there are
more expert-parallel ranks than experts per token, tokens are sent only to the ranks of their experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import comb, expm1, log1p, prod
from typing import NamedTuple

from hespas.generators.llm.kernels import KernelWriter, TensorSpec, Value
from hespas.generators.llm.model import Experts, Mlp
from hespas.generators.llm.rank import LinearLayer, ModelRank
from hespas.graph import CollectiveKind, OpClass

__all__ = [
    "activation",
    "backward_experts",
    "backward_mlp",
    "dispatch_in_two_levels",
    "expert_activation",
    "forward_experts",
    "forward_mlp",
    "fused_experts",
    "mlp_layers",
    "reached_parts",
    "shared_expert",
    "unsaved_half",
]


def reached_parts(experts: int, chosen: int, parts: int) -> float:
    """Return the mean number of groups of experts to which a token is sent. There are ``parts`` equal groups
    of ``experts`` experts in total, and the token chooses ``chosen`` different experts at random.
    """
    missed = comb(experts - experts // parts, chosen) / comb(experts, chosen)
    return parts * (1.0 - missed)


def dispatch_in_two_levels(
    r: ModelRank, k: KernelWriter, name: str, block: Experts, x: Value, *, back: bool
) -> Value:
    """Add the all-to-alls that send tokens to the ranks of their experts: first between nodes, then inside
    each node. If ``back`` is True, add the all-to-alls that return the results, in the reverse order.
    """
    width = block.latent or r.hidden
    levels = [
        ("nodes", r.groups.expert_nodes, r.groups.expert_nodes.group_size),
        ("inside", r.groups.expert_inside, r.layout.ep),
    ]
    for level, groups, parts in reversed(levels) if back else levels:
        rows = round(r.expert_rows * reached_parts(block.experts, block.topk, parts))
        sent = r.value(rows, width)
        x = r.collective(k, f"{name}.{level}.all_to_all", CollectiveKind.ALL_TO_ALL, groups, of=sent, x=x)
    return x


def mlp_layers(r: ModelRank, block: Mlp) -> tuple[LinearLayer, LinearLayer]:
    """Return both linear layers of a feed-forward block; the first one includes the gates."""
    ffn, adapter = block.ffn // r.layout.tp, r.adapter(block)
    wide = ffn * (2 if block.gated else 1)
    return (
        LinearLayer(name="fc1", inputs=r.hidden, outputs=wide, rows=r.tokens, adapter=adapter),
        LinearLayer(name="fc2", inputs=ffn, outputs=r.hidden, rows=r.tokens, adapter=adapter),
    )


def activation(r: ModelRank, k: KernelWriter, block: Mlp, key: str, x: Value) -> Value:
    """Add the activation function of a feed-forward block. The result has the port ``act``."""
    fc1, fc2 = mlp_layers(r, block)
    reads, writes = [r.value(r.tokens, fc1.outputs)], [r.value(r.tokens, fc2.inputs)]
    return k.vector("activation", block.activation, reads, writes, after=[x], port=f"{key}.act")


def unsaved_half(r: ModelRank, k: KernelWriter, block: Mlp, key: str) -> Value:
    """Add the recomputation of the matmul that selective checkpointing per operation does not save: the
    second of the two whose results are multiplied. Return the input of the activation function.
    """
    fc1, _ = mlp_layers(r, block)
    if not block.gated:
        return f"{key}.fc1"
    second = replace(fc1, name="fc1_second", outputs=fc1.outputs // 2)
    return r.column(k, second, f"{key}.norm", f"{key}.fc1_input")


def _activation_backward(
    k: KernelWriter, block: Mlp | Experts, wide: TensorSpec, narrow: TensorSpec, after: list[Value]
) -> Value:
    """Add the backward pass of the activation function, which reads the gradient of the result and the saved
    input.
    """
    return k.vector("activation.backward", block.activation, [wide, narrow], [wide], after=after, scale=2.0)


def forward_mlp(r: ModelRank, k: KernelWriter, block: Mlp, key: str, x: Value) -> Value:
    """Add a feed-forward block; ``x`` and the result are the residual stream before and after it."""
    fc1, fc2 = mlp_layers(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    wide = r.column(k, fc1, normed, f"{key}.fc1_input", f"{key}.fc1")
    return r.add_block(k, key, x, r.row(k, fc2, activation(r, k, block, key, wide)))


def backward_mlp(r: ModelRank, k: KernelWriter, block: Mlp, key: str, grad: Value) -> Value:
    """Add the backward pass of a feed-forward block, and return the gradient of its input."""
    fc1, fc2 = mlp_layers(r, block)
    inner = r.add_block_backward(k, key, grad)
    inner = r.row_backward(k, fc2, inner, f"{key}.act")
    wide, narrow = r.value(r.tokens, fc1.outputs), r.value(r.tokens, fc2.inputs)
    inner = _activation_backward(k, block, wide, narrow, [inner, f"{key}.fc1"])
    back = r.column_backward(k, fc1, inner, f"{key}.fc1_input")
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)


@dataclass(frozen=True, slots=True)
class _MixtureSizes:
    """Sizes of a mixture of experts on one rank.

    ``routed`` is the number of token copies that the rank sends. ``received`` is the number of copies that it
    receives for its ``local`` experts, including the gather over the tensor-parallel ranks of an expert.
    ``ffn`` is the width of an expert on this rank.
    """

    block: Experts
    routed: int
    received: int
    local: int
    width: int
    ffn: int

    @classmethod
    def of(cls, r: ModelRank, block: Experts) -> _MixtureSizes:
        local, ffn = block.experts // r.layout.ep, block.ffn // r.layout.etp
        return cls(block, r.routed(block), r.received(block), local, block.latent or r.hidden, ffn)

    @property
    def rows_per_expert(self) -> int:
        """Return the mean number of tokens of a local expert, over the experts that receive any."""
        missed = (1 - 1 / self.local) ** self.received if self.local > 1 else 0.0
        reached = min(self.local, max(1, round(self.local * (1 - missed))))
        return max(1, round(self.received / reached))

    @property
    def busy(self) -> int:
        """Return the mean number of local experts that receive tokens. It is less than all only in steps of
        few tokens.
        """
        if self.received >= 4 * self.local:
            return self.local
        return min(self.local, max(1, round(self.received / self.rows_per_expert)))

    def layers(self) -> tuple[LinearLayer, LinearLayer]:
        """Return both linear layers of the experts as grouped products."""
        gates = 2 if self.block.gated else 1
        return (
            LinearLayer(
                name="fc1",
                inputs=self.width,
                outputs=self.ffn * gates,
                rows=self.rows_per_expert,
                count=self.busy,
            ),
            LinearLayer(
                name="fc2", inputs=self.ffn, outputs=self.width, rows=self.rows_per_expert, count=self.busy
            ),
        )


def expert_activation(r: ModelRank, k: KernelWriter, block: Experts, key: str, x: Value) -> Value:
    """Add the activation function of the routed experts."""
    mixture = _MixtureSizes.of(r, block)
    fc1, fc2 = mixture.layers()
    reads = [r.value(mixture.received, fc1.outputs)]
    writes = [r.value(mixture.received, fc2.inputs)]
    return k.vector("activation", block.activation, reads, writes, after=[x], port=f"{key}.act")


def _router(r: ModelRank, block: Experts) -> LinearLayer:
    return LinearLayer(
        name="router", inputs=r.hidden, outputs=block.experts, rows=r.expert_rows, format=r.precision.compute
    )


def _latent(r: ModelRank, block: Experts) -> tuple[LinearLayer, LinearLayer]:
    down = LinearLayer(name="latent_down", inputs=r.hidden, outputs=block.latent, rows=r.expert_rows)
    return down, LinearLayer(name="latent_up", inputs=block.latent, outputs=r.hidden, rows=r.expert_rows)


def _dispatch(
    r: ModelRank, k: KernelWriter, name: str, mixture: _MixtureSizes, x: Value, *, back: bool
) -> Value:
    """Add the communication that sends tokens to the ranks of their experts, including the gather over the
    tensor-parallel ranks of an expert. If ``back`` is True, add the communication that returns the results.

    An all-to-all delivers rows in the order of their senders. If a rank has several experts, it brings the
    rows into the order of its experts, and the results back into the order of the ranks. 8-bit and 4-bit
    matmuls need a multiple of 16 or 32 rows for each expert. Without a capacity, rows are therefore copied to
    padded places, and results back (Megatron-Core: ``MoEAlltoAllTokenDispatcher`` and ``Fp8Padding``).
    Dispatch in two levels does both while it receives.
    """
    if r.layout.expert_node:
        x = dispatch_in_two_levels(r, k, name, mixture.block, x, back=back)
        k.part.breaks.append(len(k.builder))
        return x
    sent = r.value(mixture.routed, mixture.width)
    gathered = r.value(mixture.received, mixture.width)
    groups, inner = r.groups.experts, r.groups.expert_tensor
    sorts = mixture.local > 1 and groups.group_size * inner.group_size > 1
    is_padded = r.precision.quantizes and r.training.capacity == 0 and r.training.style == "megatron"
    copies = [("sort", "sort")] * sorts + [("pad", "copy")] * is_padded
    if back:
        for kernel_name, kernel in reversed(copies):
            x = k.vector(f"{name}.{kernel_name}", kernel, [gathered], [gathered], after=[x])
        x = r.collective(k, f"{name}.reduce_scatter", CollectiveKind.REDUCE_SCATTER, inner, of=gathered, x=x)
    x = r.collective(k, f"{name}.all_to_all", CollectiveKind.ALL_TO_ALL, groups, of=sent, x=x)
    if not back:
        x = r.collective(k, f"{name}.all_gather", CollectiveKind.ALL_GATHER, inner, of=gathered, x=x)
    k.part.breaks.append(len(k.builder))
    if not back:
        for kernel_name, kernel in copies:
            x = k.vector(f"{name}.{kernel_name}", kernel, [gathered], [gathered], after=[x])
    return x


def shared_expert(block: Experts) -> Mlp:
    """Return the shared expert of a mixture as a feed-forward block."""
    return Mlp(ffn=block.shared_ffn, gated=block.gated, activation=block.activation)


def _shared_forward(r: ModelRank, k: KernelWriter, block: Experts, key: str, normed: Value) -> Value:
    module = k.module
    k.module = f"{module}.shared"
    own, inside = f"{key}.shared", shared_expert(block)
    fc1, fc2 = mlp_layers(r, inside)
    wide = r.column(k, fc1, normed, f"{own}.fc1_input", f"{own}.fc1")
    y = r.row(k, fc2, activation(r, k, inside, own, wide))
    k.module = module
    return y


def _bias_sizes(r: ModelRank, mixture: _MixtureSizes) -> tuple[TensorSpec, TensorSpec, TensorSpec] | None:
    """Return the tensors that the kernels read to add the biases of experts: the results, the results in 32
    bits, and the router scores of the rows.

    None if biases have no separate kernels, because the block has no biases or a compiler fuses them.
    """
    if not mixture.block.bias or r.training.style != "megatron":
        return None
    rows, width = mixture.received, mixture.width
    return r.value(rows, width), TensorSpec((rows, width), "f32"), TensorSpec((rows, 1), "f32")


def forward_experts(r: ModelRank, k: KernelWriter, block: Experts, key: str, x: Value) -> Value:
    """Add a mixture of experts; ``x`` and the result are the residual stream before and after it."""
    mixture = _MixtureSizes.of(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    scores = r.linear(k, _router(r, block), normed)
    table = TensorSpec((r.expert_rows, block.experts), "f32")
    chosen = k.vector("scores", "softmax", [table], [table], after=[scores], port=f"{key}.scores")
    chosen = k.vector(
        "topk", "topk", [table], [TensorSpec((r.expert_rows, block.topk), "f32")], after=[chosen]
    )
    inputs = normed
    if block.latent:
        inputs = r.linear(k, _latent(r, block)[0], normed)
    early = block.shared_ffn > 0 and not r.training.overlap.experts
    shared = _shared_forward(r, k, block, key, normed) if early else -1
    routed, whole = r.value(mixture.routed, mixture.width), r.value(r.expert_rows, mixture.width)
    sent = k.vector("permute", "permute", [whole], [routed], after=[inputs, chosen])
    arrived = _dispatch(r, k, "dispatch", mixture, sent, back=False)
    if block.shared_ffn and not early:  # overlaps the dispatch
        shared = _shared_forward(r, k, block, key, normed)
    fc1, fc2 = mixture.layers()
    k.name_port(f"{key}.arrived", arrived)
    wide = r.linear(k, fc1, arrived, f"{key}.fc1")
    y = r.linear(k, fc2, expert_activation(r, k, block, key, wide))
    bias_sizes = _bias_sizes(r, mixture)
    if bias_sizes is not None:
        # Biases times scores in 32 bits, concatenated: Megatron-Core has no fused kernel (``TEGroupedMLP``).
        narrow, wide_results, row_scores = bias_sizes
        bias = k.vector("fc2.bias", "mul", [row_scores], [wide_results], after=[y])
        y = k.vector("fc2.bias_add", "add", [narrow, wide_results], [wide_results], after=[y, bias])
        y = k.vector("fc2.bias_cat", "cat", [wide_results], [wide_results], after=[y])
        y = k.vector("fc2.bias_to", "cast", [wide_results], [narrow], after=[y])
    y = _dispatch(r, k, "combine", mixture, y, back=True)
    y = k.vector("unpermute", "unpermute", [routed], [whole], after=[y, chosen], port=f"{key}.combined")
    if block.latent:
        y = r.linear(k, _latent(r, block)[1], y)
    if block.shared_ffn:
        y = k.vector("shared.add", "add", [r.stream, r.stream], [r.stream], after=[y, shared])
    return r.add_block(k, key, x, y)


def backward_experts(r: ModelRank, k: KernelWriter, block: Experts, key: str, grad: Value) -> Value:
    """Add the backward pass of a mixture of experts, and return the gradient of its input."""
    mixture = _MixtureSizes.of(r, block)
    fc1, fc2 = mixture.layers()
    inner = r.add_block_backward(k, key, grad)
    early = block.shared_ffn > 0 and not r.training.overlap.experts
    shared = _shared_backward(r, k, block, key, inner) if early else -1
    routed = r.linear_backward(k, _latent(r, block)[1], inner, f"{key}.combined") if block.latent else inner
    sent, whole = r.value(mixture.routed, mixture.width), r.value(r.expert_rows, mixture.width)
    after: list[Value] = [routed, f"{key}.scores"]
    routed = k.vector("unpermute.backward", "unpermute_backward", [whole], [sent], after=after)
    routed = _dispatch(r, k, "combine.backward", mixture, routed, back=False)
    if block.shared_ffn and not early:
        shared = _shared_backward(r, k, block, key, inner)
    bias_sizes = _bias_sizes(r, mixture)
    if bias_sizes is not None:
        # Gradients of biases and scores, and the gradient of the results before the biases.
        narrow, wide, row_scores = bias_sizes
        grad_32 = k.vector("fc2.bias_to.backward", "cast", [narrow], [wide], after=[routed])
        for name, summed in (("bias", TensorSpec((1, mixture.width), "f32")), ("scores", row_scores)):
            part = k.vector(f"fc2.{name}.mul", "mul", [wide, summed], [wide], after=[grad_32])
            k.vector(f"fc2.{name}.sum", "sum", [wide], [summed], after=[part])
        routed = k.vector("fc2.bias_add.backward", "cast", [wide], [narrow], after=[grad_32])
        routed = k.vector("fc2.bias_cat.backward", "cat", [narrow], [narrow], after=[routed])
    routed = r.linear_backward(k, fc2, routed, f"{key}.act")
    wide, narrow = r.value(mixture.received, fc1.outputs), r.value(mixture.received, fc2.inputs)
    routed = _activation_backward(k, block, wide, narrow, [routed, f"{key}.fc1"])
    routed = r.linear_backward(k, fc1, routed, f"{key}.arrived")
    routed = _dispatch(r, k, "dispatch.backward", mixture, routed, back=True)
    routed = k.vector("permute.backward", "unpermute", [sent], [whole], after=[routed])
    if block.latent:
        routed = r.linear_backward(k, _latent(r, block)[0], routed, f"{key}.norm")
    table = TensorSpec((r.expert_rows, block.experts), "f32")
    scores = k.vector("scores.backward", "softmax", [table], [table], after=[f"{key}.scores", routed])
    gate = r.linear_backward(k, _router(r, block), scores, f"{key}.norm")
    back = k.vector("router.add", "add", [r.stream, r.stream], [r.stream], after=[routed, gate])
    if block.shared_ffn:
        back = k.vector("shared.add.backward", "add", [r.stream, r.stream], [r.stream], after=[back, shared])
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)


def _shared_backward(r: ModelRank, k: KernelWriter, block: Experts, key: str, grad: Value) -> Value:
    module = k.module
    k.module = f"{module}.shared"
    own, inside = f"{key}.shared", shared_expert(block)
    fc1, fc2 = mlp_layers(r, inside)
    inner = r.row_backward(k, fc2, grad, f"{own}.act")
    wide, narrow = r.value(r.tokens, fc1.outputs), r.value(r.tokens, fc2.inputs)
    inner = _activation_backward(k, block, wide, narrow, [inner, f"{own}.fc1"])
    back = r.column_backward(k, fc1, inner, f"{own}.fc1_input")
    k.module = module
    return back


def fused_experts(
    r: ModelRank, k: KernelWriter, block: Experts, key: str, x: Value, *, element: str = ""
) -> Value:
    """Add a mixture of experts for serving, with one kernel for all experts of a rank. ``x`` and the result
    are the residual stream before and after it.

    ``element`` is the element type of the experts' matrices if it differs from other matrices.
    """
    normed = r.norm(k, "norm", x, f"{key}.norm")
    router = LinearLayer(
        name="router", inputs=r.hidden, outputs=block.experts, rows=r.tokens, format=r.precision.compute
    )
    table = TensorSpec((r.tokens, block.experts), "f32")
    chosen = k.vector(
        "topk",
        "topk",
        [table],
        [TensorSpec((r.tokens, block.topk), "f32")],
        after=[r.linear(k, router, normed)],
    )
    width, inputs = block.latent or r.hidden, normed
    if block.latent:
        down = LinearLayer(name="latent_down", inputs=r.hidden, outputs=block.latent, rows=r.tokens)
        inputs = r.linear(k, down, normed)
    replicated = r.layout.dp > 1
    sends_tokens = replicated and r.layout.ep > block.topk
    all_ranks, rows = r.groups.everyone, r.tokens * (r.layout.dp if replicated else 1)
    sent = r.value(r.tokens * block.topk if sends_tokens else rows, width)
    if replicated:
        kind = CollectiveKind.ALL_TO_ALL if sends_tokens else CollectiveKind.ALL_GATHER
        inputs = k.collective(f"dispatch.{kind.name.lower()}", kind, all_ranks, sent, after=[inputs])
    matrices = _ExpertMatrices(block, rows, element or r.precision.matmul)
    y: Value = _experts_kernel(r, k, matrices, after=[inputs, chosen])
    if replicated:
        kind = CollectiveKind.ALL_TO_ALL if sends_tokens else CollectiveKind.REDUCE_SCATTER
        y = k.collective(f"combine.{kind.name.lower()}", kind, all_ranks, sent, after=[y])
    if block.latent:
        up = LinearLayer(name="latent_up", inputs=block.latent, outputs=r.hidden, rows=r.tokens)
        y = r.linear(k, up, y)
    if block.shared_ffn:
        # A rank's part of the shared expert is all-reduced with the routed experts.
        module = k.module
        k.module = f"{module}.shared"
        inside = shared_expert(block)
        fc1, fc2 = mlp_layers(r, inside)
        shared = r.linear(k, fc2, activation(r, k, inside, module, r.linear(k, fc1, normed)))
        k.module = module
        y = k.vector("shared.add", "add", [r.whole, r.whole], [r.whole], after=[y, shared])
    if r.layout.tp > 1 and not replicated:
        y = k.collective("all_reduce", CollectiveKind.ALL_REDUCE, r.groups.tensor, r.whole, after=[y])
    return r.add_block(k, key, x, y)


class _ExpertMatrices(NamedTuple):
    """Matrices of the experts of a layer: the ``block``, the element type, and the number of tokens routed to
    them (``rows``).
    """

    block: Experts
    rows: int
    element: str


def _experts_kernel(r: ModelRank, k: KernelWriter, matrices: _ExpertMatrices, after: list[Value]) -> int:
    """Add the fused kernel of a mixture: both grouped matmuls with the activation function between them.

    Estimators read all sizes from its operands: tokens, the matrices of a rank, the scores of all experts,
    and the chosen experts.
    """
    block, rows, element = matrices
    local, ffn = block.experts // r.layout.ep, block.ffn // r.layout.etp
    width, gates = block.latent or r.hidden, 2 if block.gated else 1
    copies = rows * block.topk / r.layout.ep
    reached = local * -expm1(rows * block.topk * log1p(-1 / max(block.experts, 2)))
    first, second = TensorSpec((local, gates * ffn, width), element), TensorSpec((local, width, ffn), element)
    weights = (k.bytes_of(first) + k.bytes_of(second)) * min(1.0, reached / local)
    tokens = TensorSpec((rows, width), element)
    token_bytes = k.bytes_of(tokens) / prod(tokens.shape) * copies * width
    scores = TensorSpec((rows, block.experts), "f32")
    return k.node(
        "experts",
        "fused_moe",
        OpClass.CONTRACTION,
        [tokens, first, second, scores, TensorSpec((rows, block.topk), "i32")],
        [r.value(rows, width)],
        flops=2.0 * copies * (gates + 1) * width * ffn,
        transcendentals=copies * ffn,
        bytes_read=weights + token_bytes,
        bytes_written=token_bytes,
        after=after,
    )
