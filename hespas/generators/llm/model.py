"""Language model: its layers, block by block, and their numbers of parameters.

A layer is a sequence of blocks. Each block reads the residual stream through a norm and adds to it:
``x + block(norm(x))``. A transformer layer is an attention and a feed-forward block; layers of a hybrid
model may be a single block. Sizes are of the whole model, before any parallel layout.

Parameter counts follow published formulas: arXiv 1706.03762 (attention, feed-forward), 2305.13245 (grouped
keys), 2405.04434 section 2.1 (multi-head latent attention), 2401.06066 (experts, shared experts),
2405.21060 (Mamba-2), 2412.19437 section 2.2 (multi-token prediction).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hespas.generators.spec import Bounded
from hespas.graph.errors import UsageError

__all__ = [
    "BLOCK_NAMES",
    "Activation",
    "Attention",
    "Block",
    "Experts",
    "LatentAttention",
    "Layer",
    "Mamba",
    "Mlp",
    "Model",
    "NormKind",
    "Positions",
    "expert_parameters",
    "layer_parameters",
    "mamba_channels",
    "mamba_projected",
    "matrix_parameters",
    "model_parameters",
    "norm_parameters",
    "parameters",
]

NormKind = Literal["rms", "layer"]
Positions = Literal["rope", "learned", "none"]
Activation = Literal["silu", "gelu", "relu2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention(Bounded):
    """Multi-head attention with ``kv_heads`` key heads.

    ``window`` is the maximum number of keys that a query attends to (0: no limit). ``chunk`` divides the
    sequence into blocks of this many tokens; tokens attend only to tokens of their block (0: no blocks).
    ``qk_norm``: heads of queries and keys are normalised.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    chunk: int = 0
    qk_norm: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention(Bounded):
    """Multi-head latent attention.

    Queries are projected to ``q_lora`` dimensions first (0: not), keys and values to ``kv_lora`` dimensions.
    Each head has ``nope_dim`` query and key dimensions without rotary embedding, ``rope_dim`` dimensions with
    rotary embedding, and ``v_dim`` value dimensions. All heads share the rotated key.
    """

    heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    @property
    def head_dim(self) -> int:
        """Dimensions of a query head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Bounded):
    """Feed-forward block of a transformer of width ``ffn``: three matrices if ``gated``, otherwise two."""

    ffn: int
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Bounded):
    """Mixture of ``experts`` feed-forward blocks of width ``ffn``. A token uses ``topk`` of these experts,
    and a shared expert of width ``shared_ffn`` (0: none). If ``latent`` is not 0, tokens are projected to
    this width before the experts and back to the hidden width after them.
    """

    experts: int
    topk: int
    ffn: int
    gated: bool = True
    activation: Activation = "silu"
    shared_ffn: int = 0
    latent: int = 0
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(Bounded):
    """Mamba-2 block with ``heads`` heads of ``head_dim`` dimensions and a state of ``state`` dimensions.

    Heads are divided into ``groups`` groups; the heads of a group share the input and output maps (B and C).
    ``conv`` is the length of the convolution, ``chunk`` the number of tokens that are scanned together.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv: int = 4
    chunk: int = 128

    @property
    def inner(self) -> int:
        """Width of the scanned values."""
        return self.heads * self.head_dim


Block = Attention | LatentAttention | Mlp | Experts | Mamba
Layer = tuple[Block, ...]

BLOCK_NAMES: Mapping[type[Block], str] = {
    Attention: "attention",
    LatentAttention: "attention",
    Mlp: "mlp",
    Experts: "moe",
    Mamba: "mamba",
}
"""Names of blocks in the module path of their operations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model(Bounded):
    """Decoder model.

    ``tied``: the output head shares the weights of the embedding. ``post_norms``: the result of a block is
    normalised too. ``max_positions`` is the number of learned position embeddings. ``mtp_layers`` is the
    number of layers of multi-token prediction. Each of them projects two hidden vectors to one, followed by a
    layer with the sizes of the last layer. All of them use the embedding and the head of the model.
    """

    name: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = False
    norm: NormKind = "rms"
    positions: Positions = "rope"
    max_positions: int = 0
    post_norms: bool = False
    mtp_layers: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        """Check the numbers. Raises ``UsageError`` for one that is too small or too large."""
        Bounded.__post_init__(self)
        for name, least in (("hidden", 1), ("vocab", 1), ("max_positions", 0), ("mtp_layers", 0)):
            value: object = getattr(self, name)
            if isinstance(value, int) and value < least:
                hint = f"`{name}={least}` or more"
                raise UsageError(f"`{name}={value}` of a model is less than {least}", hint=hint)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """Layers of the model, followed by the layers of multi-token prediction."""
        return self.layers + self.layers[-1:] * self.mtp_layers

    def blocks(self) -> Iterator[Block]:
        """Return all blocks of all layers."""
        return (block for layer in self.all_layers for block in layer)


def matrix_parameters(block: Block, hidden: int, *, active: bool = False) -> int:
    """Return the number of matrix elements of a block, without biases, norms and convolutions.

    If ``active`` is True, only the experts that one token uses are counted.
    """
    match block:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=head):
            return hidden * head * (2 * heads + 2 * kv_heads)
        case LatentAttention(heads=heads):
            q_in = block.q_lora or hidden
            down = hidden * (block.q_lora + block.kv_lora + block.rope_dim)
            up = q_in * heads * block.head_dim + block.kv_lora * heads * (block.nope_dim + block.v_dim)
            return down + up + heads * block.v_dim * hidden
        case Mlp(ffn=ffn, gated=gated):
            return (3 if gated else 2) * hidden * ffn
        case Experts():
            matrices = 3 if block.gated else 2
            count = block.topk if active else block.experts
            shared = matrices * hidden * block.shared_ffn
            latent = 2 * hidden * block.latent
            return hidden * block.experts + latent + shared + count * expert_parameters(block, hidden)
        case Mamba():
            return hidden * (mamba_projected(block) + block.inner)


def expert_parameters(block: Experts, hidden: int) -> int:
    """Return the number of matrix elements of one routed expert."""
    return (3 if block.gated else 2) * (block.latent or hidden) * block.ffn


def mamba_projected(block: Mamba) -> int:
    """Return the output width of a Mamba block's input projection: gate, values, input and output maps, time
    steps.
    """
    return 2 * block.inner + 2 * block.groups * block.state + block.heads


def mamba_channels(block: Mamba) -> int:
    """Return the number of channels of the convolution: values, input and output maps."""
    return block.inner + 2 * block.groups * block.state


def parameters(block: Block, hidden: int) -> int:
    """Return the number of parameters of a block, without its norm."""
    matrices = matrix_parameters(block, hidden)
    match block:
        case Attention(heads=heads, kv_heads=kv_heads, head_dim=head):
            bias = head * (heads + 2 * kv_heads) + hidden if block.bias else 0
            return matrices + bias + (2 * head if block.qk_norm else 0)
        case LatentAttention():
            return matrices + block.q_lora + block.kv_lora
        case Mlp(ffn=ffn, gated=gated):
            return matrices + ((2 if gated else 1) * ffn + hidden if block.bias else 0)
        case Experts(experts=experts, ffn=ffn):
            width = block.latent or hidden
            bias = experts * ((2 if block.gated else 1) * ffn + width) + experts if block.bias else 0
            return matrices + bias
        case Mamba():
            return matrices + mamba_channels(block) * (block.conv + 1) + 3 * block.heads + block.inner


def norm_parameters(model: Model) -> int:
    """Return the number of parameters of one norm over the hidden dimensions."""
    return model.hidden * (2 if model.norm == "layer" else 1)


def layer_parameters(model: Model, layer: Layer) -> int:
    """Return the number of parameters of a layer with its norms."""
    norms = len(layer) * (2 if model.post_norms else 1) * norm_parameters(model)
    return norms + sum(parameters(block, model.hidden) for block in layer)


def model_parameters(model: Model) -> int:
    """Return the number of parameters of the whole model, including multi-token prediction."""
    layers = sum(layer_parameters(model, layer) for layer in model.all_layers)
    embedding = model.vocab * model.hidden * (1 if model.tied else 2) + model.max_positions * model.hidden
    further = model.mtp_layers * (2 * model.hidden * model.hidden + 3 * norm_parameters(model))
    return layers + embedding + norm_parameters(model) + further
