"""A transformer training step in JAX, captured for 512 devices that nobody has, and predicted.

``python examples/train_jax.py [--system dgx-h100] [--data 64] [--model 8]``

The function ``build`` also works with the command line::

    cd examples; hespas capture train_jax:build --mesh data=64,model=8 --out traces
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import hespas

__all__ = ["build", "main"]

_LAYERS, _WIDTH, _HEADS, _TOKENS, _BATCH, _VOCABULARY = 4, 4096, 32, 2048, 256, 32_000


def _normed(x: Any) -> Any:
    size = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(size + 1e-6).astype(x.dtype)


def _layer(x: Any, weights: Any, mesh: Any) -> Any:
    """Return the output of a layer, shape ``(batch, tokens, width)``.

    Activations are constrained to the axes of the batch and of the heads. Without constraints, XLA may move
    activations instead of weights.
    """

    def placed(value: Any, *axes: str | None) -> Any:
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec("data", *axes)))

    qkv, out, up, down = weights
    heads = [(_normed(x) @ part).reshape(*x.shape[:2], _HEADS, -1) for part in qkv]
    q, k, v = (placed(part, None, "model", None) for part in heads)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = placed(x + placed(attended.reshape(*x.shape), None, "model") @ out, None, None)
    hidden = placed(jax.nn.silu(_normed(x) @ up), None, "model")
    return placed(x + hidden @ down, None, None)


def build(mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the step and its abstract arguments, sharded over the axes ``data`` (FSDP) and ``model``."""

    def spec(shape: tuple[int, ...], *axes: str | None) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    def loss(weights: Any, tokens: Any) -> Any:
        embedding, layers = weights
        x = embedding[tokens]
        for layer in layers:
            x = _layer(x, layer, mesh)
        scores = (_normed(x) @ embedding.T).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(scores[:, :-1])[..., 0])

    def step(weights: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, tokens)
        return jax.tree.map(lambda weight, gradient: weight - 1e-3 * gradient, weights, gradients), value

    layer = (
        (spec((_WIDTH, _WIDTH), "data", "model"),) * 3,
        spec((_WIDTH, _WIDTH), "model", "data"),
        spec((_WIDTH, 4 * _WIDTH), "data", "model"),
        spec((4 * _WIDTH, _WIDTH), "model", "data"),
    )
    embedding = spec((_VOCABULARY, _WIDTH), "model", "data")
    sharding = NamedSharding(mesh, PartitionSpec("data", None))
    tokens = jax.ShapeDtypeStruct((_BATCH, _TOKENS), jnp.int32, sharding=sharding)
    return step, ((embedding, (layer,) * _LAYERS), tokens)


def main(arguments: list[str] | None = None) -> float:
    """Capture and predict the step, print both, and return the predicted time in nanoseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", default="dgx-h100")
    parser.add_argument("--data", type=int, default=64)
    parser.add_argument("--model", type=int, default=8)
    chosen = parser.parse_args(arguments)
    captured = hespas.capture(build, mesh={"data": chosen.data, "model": chosen.model})
    print(captured)
    step = hespas.simulate(captured.workload, system=chosen.system)
    print(step)
    return step.step_ns


if __name__ == "__main__":
    main()
