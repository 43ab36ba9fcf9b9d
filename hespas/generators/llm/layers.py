"""Layers on one rank, block by block, forward and backward, and what is computed again in between.

Ports are named ``<layer>.<block>.<value>``; a backward kernel reads forward values by them. What
:class:`~hespas.generators.llm.settings.Recompute` covers is made again in the backward pass, before it is
read.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hespas.generators.llm.attention import (
    backward_attention,
    core_again,
    exchange_again,
    forward_attention,
    latent_up,
    queries_and_keys,
)
from hespas.generators.llm.feedforward import (
    activation,
    backward_experts,
    backward_mlp,
    expert_activation,
    forward_experts,
    forward_mlp,
)
from hespas.generators.llm.kernels import Kernels, Value
from hespas.generators.llm.mamba import backward_mamba, forward_mamba
from hespas.generators.llm.model import BLOCK_NAMES, Attention, Block, Experts, LatentAttention, Mamba, Mlp
from hespas.generators.llm.rank import Rank
from hespas.generators.llm.settings import MODULES

__all__ = ["backward_layer", "forward_layer"]


@contextmanager
def _again(k: Kernels) -> Generator[None]:
    """Forward kernels inside the backward pass: what they make is found before what the forward pass made."""
    k.again = True
    yield
    k.again = False


def _forward(r: Rank, k: Kernels, block: Block, key: str, x: Value) -> Value:
    match block:
        case Attention() | LatentAttention():
            return forward_attention(r, k, block, key, x)
        case Mlp():
            return forward_mlp(r, k, block, key, x)
        case Experts():
            return forward_experts(r, k, block, key, x)
        case Mamba():
            return forward_mamba(r, k, block, key, x)


def _backward(r: Rank, k: Kernels, block: Block, key: str, grad: Value) -> Value:
    match block:
        case Attention() | LatentAttention():
            return backward_attention(r, k, block, key, grad)
        case Mlp():
            return backward_mlp(r, k, block, key, grad)
        case Experts():
            return backward_experts(r, k, block, key, grad)
        case Mamba():
            return backward_mamba(r, k, block, key, grad)


def forward_layer(r: Rank, k: Kernels, layer: tuple[Block, ...], number: int, x: Value) -> Value:
    """A layer's blocks; ``x`` is the residual stream that enters."""
    for place, block in enumerate(layer):
        key = f"{number}.{place}"
        k.module = f"layers.{number}.{BLOCK_NAMES[type(block)]}"
        k.name_port(f"{key}.input", x)
        x = _forward(r, k, block, key, x)
    return x


def backward_layer(
    r: Rank, k: Kernels, layer: tuple[Block, ...], number: int, grad: Value, *, place: int
) -> Value:
    """The gradient of what entered a layer, of that of what left it."""
    covers = r.training.recompute.covers
    whole = r.training.recompute.whole(place)
    if whole:
        with _again(k):
            forward_layer(r, k, layer, number, f"{number}.0.input")
    for position, block in reversed(list(enumerate(layer))):
        key = f"{number}.{position}"
        k.module = f"layers.{number}.{BLOCK_NAMES[type(block)]}"
        if not whole:
            with _again(k):
                _recompute(r, k, block, key, {each for each in MODULES if covers(each, place)})
        grad = _backward(r, k, block, key, grad)
    return grad


def _recompute(r: Rank, k: Kernels, block: Block, key: str, covered: set[str]) -> None:
    """Make again what a block's backward pass reads and the forward pass did not keep."""
    if ("mlp" in covered and isinstance(block, Mlp)) or ("moe" in covered and isinstance(block, Experts)):
        _forward(r, k, block, key, f"{key}.input")
        return
    if "layernorm" in covered:
        normed = r.norm(k, "norm", f"{key}.input", f"{key}.norm")
        for same in ("qkv_input", "fc1_input", "in_input", "shared.fc1_input"):
            k.name_port(f"{key}.{same}", normed)
    match block:
        case Attention() | LatentAttention():
            if "qkv" in covered:
                exchange_again(r, k, block, key, queries_and_keys(r, k, block, key, f"{key}.norm"))
            elif "mla_up_proj" in covered and isinstance(block, LatentAttention):
                exchange_again(r, k, block, key, latent_up(r, k, block, key, f"{key}.latent"))
            if "core_attn" in covered:
                core_again(r, k, block, key)
        case Mlp() if "mlp_act" in covered:
            activation(r, k, block, key, f"{key}.fc1")
        case Experts() if "moe_act" in covered:
            expert_activation(r, k, block, key, f"{key}.fc1")
        case _:
            pass
