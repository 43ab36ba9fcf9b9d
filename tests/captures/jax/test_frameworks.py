"""Equinox and Flax models in user files; `make test-capture` installs their packages."""

from __future__ import annotations

from pathlib import Path

import pytest

import hespas

SHARED = """
import functools
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P


def array(mesh, shape, *axes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

"""
EQUINOX = """
import equinox as eqx, optax


def build(mesh):
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 8, 256, 3, key=jax.random.key(0)))
    optimizer = optax.adam(1e-3)

    @eqx.filter_jit
    def step(model, state, x, y):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, value

    state = jax.eval_shape(optimizer.init, eqx.filter(model, lambda leaf: hasattr(leaf, "shape")))
    return step, (model, state, array(mesh, (512, 64), "data"), array(mesh, (512, 8), "data"))
"""
LINEN = """
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

normal = nn.initializers.lecun_normal()


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(512, kernel_init=nn.with_partitioning(normal, (None, "model")))(nn.LayerNorm()(x))
        down = nn.Dense(x.shape[-1], kernel_init=nn.with_partitioning(normal, ("model", None)))
        return x + down(nn.gelu(h))


def build(mesh):
    net = nn.Sequential([Block(), Block(), nn.Dense(10)])
    x, y = array(mesh, (256, 128), "data"), array(mesh, (256,), "data", dtype=jnp.int32)

    def init(key, x):
        return TrainState.create(apply_fn=net.apply, params=net.init(key, x), tx=optax.adamw(1e-3))

    abstract = jax.eval_shape(init, jax.random.key(0), x)
    boxed = lambda leaf: isinstance(leaf, nn.Partitioned)
    bare = jax.tree.map(lambda leaf: leaf.value if boxed(leaf) else leaf, abstract, is_leaf=boxed)
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        bare,
        nn.get_sharding(abstract, mesh),
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y):
        def loss(parameters):
            logits = state.apply_fn(parameters, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

        value, gradients = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradients), value

    return step, (state, x, y)
"""
NNX = """
import optax
from flax import nnx

normal = nnx.initializers.lecun_normal()


class Block(nnx.Module):
    def __init__(self, width, rngs):
        split = [nnx.with_partitioning(normal, axes) for axes in ((None, "model"), ("model", None))]
        self.up = nnx.Linear(width, 4 * width, rngs=rngs, kernel_init=split[0])
        self.down = nnx.Linear(4 * width, width, rngs=rngs, kernel_init=split[1])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.relu(self.up(x))))


def build(mesh):
    def made():
        model = Block(64, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    model, optimizer = nnx.eval_shape(made)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    return step, (model, optimizer, array(mesh, (512, 64), "data"))
"""
MAXTEXT = """
RULES = {"batch": "data", "embed": "data", "mlp": "model", "heads": "model", "layers": None, None: None}
L, D, F, H, B, S = 8, 512, 2048, 8, 64, 256


def build(mesh):
    def logical(x, *names):
        return jax.lax.with_sharding_constraint(x, P(*(RULES[name] for name in names)))

    def weight(shape, *names, dtype=jnp.bfloat16):
        return array(mesh, shape, *(RULES[name] for name in names), dtype=dtype)

    qkv = weight((L, D, H, D // H), "layers", "embed", "heads", None)
    parameters = {
        "q": qkv, "k": qkv, "v": qkv,
        "o": weight((L, H, D // H, D), "layers", "heads", None, "embed"),
        "wi": weight((L, D, F), "layers", "embed", "mlp"),
        "wo": weight((L, F, D), "layers", "mlp", "embed"),
        "table": weight((32000, D), "mlp", "embed"),
    }

    def layer(x, w):
        h = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)).astype(x.dtype)
        q, k, v = (jnp.einsum("bsd,dhk->bshk", h, w[name]) for name in "qkv")
        scores = jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32)
        mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores, -1).astype(x.dtype), v)
        x = logical(x + jnp.einsum("bshk,hkd->bsd", mixed, w["o"]), "batch", None, None)
        return logical(x + jax.nn.silu(x @ w["wi"]) @ w["wo"], "batch", None, None), None

    def loss(p, tokens):
        x = logical(p["table"][tokens], "batch", None, None)
        body = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        x, _ = jax.lax.scan(body, x, {name: w for name, w in p.items() if name != "table"})
        logits = logical(jnp.einsum("bsd,vd->bsv", x, p["table"]), "batch", None, "mlp")
        likely = jax.nn.log_softmax(logits.astype(jnp.float32))[:, :-1]
        return -jnp.mean(jnp.take_along_axis(likely, tokens[:, 1:, None], -1))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(p, tokens):
        value, gradients = jax.value_and_grad(loss)(p, tokens)
        return jax.tree.map(lambda a, b: a - 1e-3 * b, p, gradients), value

    return step, (parameters, weight((B, S), "batch", None, dtype=jnp.int32))
"""

CASES = [
    # Four layers with a bias each, and the loss.
    pytest.param("equinox", EQUINOX, ["equinox", "optax"], {("all_reduce", "data"): 9}, id="equinox"),
    # Each block's down projection forward, its up projection backward.
    pytest.param("linen", LINEN, ["flax", "optax"], {("all_reduce", "model"): 4}, id="flax linen"),
    pytest.param("nnx", NNX, ["flax", "optax"], {("all_reduce", "model"): 1}, id="flax nnx"),
    # Eight layers of gathered weights, forward and again in the backward pass.
    pytest.param("maxtext", MAXTEXT, ["jax"], {("all_gather", "data"): 98}, id="as in MaxText"),
]


@pytest.mark.parametrize(("name", "text", "needs", "expected"), CASES)
def test_models_are_captured_as_their_users_write_them(
    tmp_path: Path, name: str, text: str, needs: list[str], expected: dict[tuple[str, str], float]
) -> None:
    for each in needs:
        pytest.importorskip(each, reason=f"{each} is not installed: make test-capture installs it")
    file = tmp_path / f"model_of_{name}.py"
    file.write_text(SHARED + text, encoding="utf-8")
    done = hespas.capture(f"{file}:build", mesh="data=16,model=4")
    assert done.workload.num_ranks == 64
    assert "capture.fallback" not in done.diagnostics.counts()
    found = {(row.kind, row.axes): row.times for row in done.collectives}
    assert expected.items() <= found.items()
