"""Feed-forward blocks on one rank: plain and gated ones, and mixtures of experts.

Experts (arXiv 2401.06066, 2412.19437): a router scores each token, tokens are permuted so that those of an
expert stand together, travel to the ranks that hold their experts, pass two grouped products, and travel
back, where they are summed by their scores. Loads are balanced but for the stated imbalance; with a capacity
factor each expert has room for that many times its share, and all of it travels and is worked on. A shared
expert is a feed-forward block beside it. Biases are added expert by expert where nothing fuses them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hespas.generators.llm.dispatch import two_levels
from hespas.generators.llm.kernels import Kernels, Tensor, Value
from hespas.generators.llm.model import Experts, Mlp
from hespas.generators.llm.rank import Linear, Rank
from hespas.graph import CollectiveKind

__all__ = [
    "activation",
    "backward_experts",
    "backward_mlp",
    "expert_activation",
    "forward_experts",
    "forward_mlp",
    "mlp_layers",
    "shared_expert",
]


def mlp_layers(r: Rank, block: Mlp) -> tuple[Linear, Linear]:
    """Both products of a feed-forward block, the gates beside the first."""
    ffn, adapter = block.ffn // r.layout.tp, r.adapter(block)
    wide = ffn * (2 if block.gated else 1)
    return (
        Linear(name="fc1", inputs=r.hidden, outputs=wide, rows=r.tokens, adapter=adapter),
        Linear(name="fc2", inputs=ffn, outputs=r.hidden, rows=r.tokens, adapter=adapter),
    )


def activation(r: Rank, k: Kernels, block: Mlp, key: str, x: Value) -> Value:
    """The nonlinearity: the port ``act``."""
    fc1, fc2 = mlp_layers(r, block)
    reads, writes = [r.value(r.tokens, fc1.outputs)], [r.value(r.tokens, fc2.inputs)]
    return k.vector("activation", block.activation, reads, writes, after=[x], port=f"{key}.act")


def _activation_backward(
    k: Kernels, block: Mlp | Experts, wide: Tensor, narrow: Tensor, after: list[Value]
) -> Value:
    """The gradient of the nonlinearity's input, from that of its result and from its input."""
    reads, how = [wide, narrow], block.activation
    return k.vector("activation.backward", how, reads, [wide], after=after, scale=2.0)


def forward_mlp(r: Rank, k: Kernels, block: Mlp, key: str, x: Value) -> Value:
    """A block, from the residual stream to the residual stream."""
    fc1, fc2 = mlp_layers(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    wide = r.column(k, fc1, normed, f"{key}.fc1_input", f"{key}.fc1")
    return r.added(k, key, x, r.row(k, fc2, activation(r, k, block, key, wide)))


def backward_mlp(r: Rank, k: Kernels, block: Mlp, key: str, grad: Value) -> Value:
    """The gradient of what entered a block."""
    fc1, fc2 = mlp_layers(r, block)
    inner = r.added_backward(k, key, grad)
    inner = r.row_backward(k, fc2, inner, f"{key}.act")
    wide, narrow = r.value(r.tokens, fc1.outputs), r.value(r.tokens, fc2.inputs)
    inner = _activation_backward(k, block, wide, narrow, [inner, f"{key}.fc1"])
    back = r.column_backward(k, fc1, inner, f"{key}.fc1_input")
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)


# --- mixtures of experts


@dataclass(frozen=True, slots=True)
class _Mixture:
    """Sizes of a mixture on a rank: ``routed`` copies of tokens leave it, ``received`` are there for its
    ``local`` experts of width ``ffn``, after tensor ranks of experts have gathered theirs.
    """

    block: Experts
    routed: int
    received: int
    local: int
    width: int
    ffn: int

    @classmethod
    def of(cls, r: Rank, block: Experts) -> _Mixture:
        local, ffn = block.experts // r.layout.ep, block.ffn // r.layout.etp
        return cls(block, r.routed(block), r.received(block), local, block.latent or r.hidden, ffn)

    @property
    def each(self) -> int:
        """Tokens of a local expert that some token reaches."""
        missed = (1 - 1 / self.local) ** self.received if self.local > 1 else 0.0
        reached = min(self.local, max(1, round(self.local * (1 - missed))))
        return max(1, round(self.received / reached))

    @property
    def busy(self) -> int:
        """Local experts that some token reaches, in the mean: all of them but in steps of few tokens."""
        if self.received >= 4 * self.local:
            return self.local
        return min(self.local, max(1, round(self.received / self.each)))

    def layers(self) -> tuple[Linear, Linear]:
        """Both grouped products."""
        gates = 2 if self.block.gated else 1
        return (
            Linear(name="fc1", inputs=self.width, outputs=self.ffn * gates, rows=self.each, count=self.busy),
            Linear(name="fc2", inputs=self.ffn, outputs=self.width, rows=self.each, count=self.busy),
        )


def expert_activation(r: Rank, k: Kernels, block: Experts, key: str, x: Value) -> Value:
    """The nonlinearity of routed experts."""
    mixture = _Mixture.of(r, block)
    fc1, fc2 = mixture.layers()
    reads = [r.value(mixture.received, fc1.outputs)]
    writes = [r.value(mixture.received, fc2.inputs)]
    return k.vector("activation", block.activation, reads, writes, after=[x], port=f"{key}.act")


def _router(r: Rank, block: Experts) -> Linear:
    return Linear(
        name="router", inputs=r.hidden, outputs=block.experts, rows=r.expert_rows, format=r.precision.compute
    )


def _latent(r: Rank, block: Experts) -> tuple[Linear, Linear]:
    down = Linear(name="latent_down", inputs=r.hidden, outputs=block.latent, rows=r.expert_rows)
    return down, Linear(name="latent_up", inputs=block.latent, outputs=r.hidden, rows=r.expert_rows)


def _travel(r: Rank, k: Kernels, name: str, mixture: _Mixture, x: Value, *, back: bool) -> Value:
    """Tokens to the ranks of their experts and their tensor ranks, or back."""
    if r.layout.expert_node:
        return two_levels(r, k, name, mixture.block, x, back=back)
    sent = r.value(mixture.routed, mixture.width)
    spread = r.value(mixture.received, mixture.width)
    groups, inner = r.groups.experts, r.groups.expert_tensor
    if back:
        x = r.collective(k, f"{name}.reduce_scatter", CollectiveKind.REDUCE_SCATTER, inner, of=spread, x=x)
    x = r.collective(k, f"{name}.all_to_all", CollectiveKind.ALL_TO_ALL, groups, of=sent, x=x)
    if not back:
        x = r.collective(k, f"{name}.all_gather", CollectiveKind.ALL_GATHER, inner, of=spread, x=x)
    return x


def shared_expert(block: Experts) -> Mlp:
    """The feed-forward block beside a mixture."""
    return Mlp(ffn=block.shared_ffn, gated=block.gated, activation=block.activation)


def _shared_forward(r: Rank, k: Kernels, block: Experts, key: str, normed: Value) -> Value:
    module = k.module
    k.module = f"{module}.shared"
    own, inside = f"{key}.shared", shared_expert(block)
    fc1, fc2 = mlp_layers(r, inside)
    wide = r.column(k, fc1, normed, f"{own}.fc1_input", f"{own}.fc1")
    y = r.row(k, fc2, activation(r, k, inside, own, wide))
    k.module = module
    return y


def _bias_sizes(r: Rank, mixture: _Mixture) -> tuple[Tensor, Tensor, Tensor] | None:
    """Results of experts, the same in 32 bits, and the scores of their rows, where biases are added expert by
    expert: a compiler makes them part of other kernels.
    """
    if not mixture.block.bias or r.training.style != "megatron":
        return None
    rows, width = mixture.received, mixture.width
    return r.value(rows, width), Tensor((rows, width), "f32"), Tensor((rows, 1), "f32")


def _biased(r: Rank, k: Kernels, mixture: _Mixture, y: Value) -> Value:
    """Results with the biases of their experts times the scores of their rows, in 32 bits, put together
    again: Megatron-Core has no fused kernel for it (``TEGroupedMLP``).
    """
    sizes = _bias_sizes(r, mixture)
    if sizes is None:
        return y
    narrow, wide, scores = sizes
    bias = k.vector("fc2.bias", "mul", [scores], [wide], after=[y])
    y = k.vector("fc2.bias_add", "add", [narrow, wide], [wide], after=[y, bias])
    y = k.vector("fc2.bias_cat", "cat", [wide], [wide], after=[y])
    return k.vector("fc2.bias_to", "cast", [wide], [narrow], after=[y])


def _biased_backward(r: Rank, k: Kernels, mixture: _Mixture, grad: Value) -> Value:
    """The gradient of results without biases; beside it those of biases and of scores."""
    sizes = _bias_sizes(r, mixture)
    if sizes is None:
        return grad
    narrow, wide, scores = sizes
    grad = k.vector("fc2.bias_to.backward", "cast", [narrow], [wide], after=[grad])
    for name, summed in (("bias", Tensor((1, mixture.width), "f32")), ("scores", scores)):
        part = k.vector(f"fc2.{name}.mul", "mul", [wide, summed], [wide], after=[grad])
        k.vector(f"fc2.{name}.sum", "sum", [wide], [summed], after=[part])
    back = k.vector("fc2.bias_add.backward", "cast", [wide], [narrow], after=[grad])
    return k.vector("fc2.bias_cat.backward", "cat", [narrow], [narrow], after=[back])


def forward_experts(r: Rank, k: Kernels, block: Experts, key: str, x: Value) -> Value:
    """A mixture, from the residual stream to the residual stream."""
    mixture = _Mixture.of(r, block)
    normed = r.norm(k, "norm", x, f"{key}.norm")
    scores = r.linear(k, _router(r, block), normed)
    table = Tensor((r.expert_rows, block.experts), "f32")
    chosen = k.vector("scores", "softmax", [table], [table], after=[scores], port=f"{key}.scores")
    chosen = k.vector("topk", "topk", [table], [Tensor((r.expert_rows, block.topk), "f32")], after=[chosen])
    inputs = normed
    if block.latent:
        inputs = r.linear(k, _latent(r, block)[0], normed)
    early = block.shared_ffn > 0 and not r.training.overlap.experts
    shared = _shared_forward(r, k, block, key, normed) if early else -1
    travelled, whole = r.value(mixture.routed, mixture.width), r.value(r.expert_rows, mixture.width)
    sent = k.vector("permute", "permute", [whole], [travelled], after=[inputs, chosen])
    arrived = _travel(r, k, "dispatch", mixture, sent, back=False)
    if block.shared_ffn and not early:  # beside the dispatch
        shared = _shared_forward(r, k, block, key, normed)
    fc1, fc2 = mixture.layers()
    k.name_port(f"{key}.arrived", arrived)
    wide = r.linear(k, fc1, arrived, f"{key}.fc1")
    y = r.linear(k, fc2, expert_activation(r, k, block, key, wide))
    y = _biased(r, k, mixture, y)
    y = _travel(r, k, "combine", mixture, y, back=True)
    y = k.vector("unpermute", "unpermute", [travelled], [whole], after=[y, chosen], port=f"{key}.combined")
    if block.latent:
        y = r.linear(k, _latent(r, block)[1], y)
    if block.shared_ffn:
        y = k.vector("shared.add", "add", [r.stream, r.stream], [r.stream], after=[y, shared])
    return r.added(k, key, x, y)


def backward_experts(r: Rank, k: Kernels, block: Experts, key: str, grad: Value) -> Value:
    """The gradient of what entered a mixture."""
    mixture = _Mixture.of(r, block)
    fc1, fc2 = mixture.layers()
    inner = r.added_backward(k, key, grad)
    early = block.shared_ffn > 0 and not r.training.overlap.experts
    shared = _shared_backward(r, k, block, key, inner) if early else -1
    routed = r.linear_backward(k, _latent(r, block)[1], inner, f"{key}.combined") if block.latent else inner
    sent, whole = r.value(mixture.routed, mixture.width), r.value(r.expert_rows, mixture.width)
    routed = k.vector("unpermute.backward", "permute", [whole], [sent], after=[routed, f"{key}.scores"])
    routed = _travel(r, k, "combine.backward", mixture, routed, back=False)
    if block.shared_ffn and not early:
        shared = _shared_backward(r, k, block, key, inner)
    routed = r.linear_backward(k, fc2, _biased_backward(r, k, mixture, routed), f"{key}.act")
    wide, narrow = r.value(mixture.received, fc1.outputs), r.value(mixture.received, fc2.inputs)
    routed = _activation_backward(k, block, wide, narrow, [routed, f"{key}.fc1"])
    routed = r.linear_backward(k, fc1, routed, f"{key}.arrived")
    routed = _travel(r, k, "dispatch.backward", mixture, routed, back=True)
    routed = k.vector("permute.backward", "unpermute", [sent], [whole], after=[routed])
    if block.latent:
        routed = r.linear_backward(k, _latent(r, block)[0], routed, f"{key}.norm")
    table = Tensor((r.expert_rows, block.experts), "f32")
    scores = k.vector("scores.backward", "softmax", [table], [table], after=[f"{key}.scores", routed])
    gate = r.linear_backward(k, _router(r, block), scores, f"{key}.norm")
    back = k.vector("router.add", "add", [r.stream, r.stream], [r.stream], after=[routed, gate])
    if block.shared_ffn:
        back = k.vector("shared.add.backward", "add", [r.stream, r.stream], [r.stream], after=[back, shared])
    return r.norm_backward(k, "norm.backward", back, f"{key}.input", grad)


def _shared_backward(r: Rank, k: Kernels, block: Experts, key: str, grad: Value) -> Value:
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
