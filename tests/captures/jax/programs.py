"""Sharded programs as users write them: functions of the mesh that give a step and its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fixtures.make import llama
from fixtures.make.untyped import Array, Spec, jax, jnp, lax

__all__ = ["PROGRAMS", "Build"]

Build = Callable[[Any], tuple[Callable[..., Any], tuple[Any, ...]]]


def spec(mesh: Any, shape: tuple[int, ...], *axes: Any, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(
        shape, jnp.dtype(dtype), sharding=jax.sharding.NamedSharding(mesh, Spec(*axes))
    )


def step_of_llama(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Two layers, FSDP x TP, with backward pass and SGD."""
    data, model = dict(mesh.shape).values()
    shape = llama.LlamaShape(
        fsdp=data, tp=model, hidden=64, mlp=128, heads=4, sequence=32, vocabulary=64, batch=8, dtype="float32"
    )
    return llama.train_step(shape, mesh), llama.arguments(shape, mesh)


def vocabulary(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An embedding and a loss over a vocabulary that is split: what Shardy's own lowering dies of."""

    def step(table: Array, tokens: Array, targets: Array) -> Array:
        def loss(table: Array) -> Array:
            logits = jnp.tanh(table[tokens]) @ table.T
            likely = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
            return -jnp.mean(likely)

        return jax.value_and_grad(loss)(table)

    ids = spec(mesh, (8, 32), "data", None, dtype="int32")
    return step, (spec(mesh, (1024, 64), "model", None), ids, ids)


def convolution(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Images that are split along their height too: neighbours exchange rows."""

    def step(w: Array, x: Array) -> Array:
        def loss(w: Array) -> Array:
            y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(jax.nn.relu(y))

        return jax.value_and_grad(loss)(w)

    return step, (spec(mesh, (3, 3, 3, 16)), spec(mesh, (16, 32, 32, 3), "data", "model"))


def scanned(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Layers under scan, computed again in the backward pass."""

    def step(w: tuple[Array, Array], x: Array) -> Array:
        def layer(h: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
            return h + jnp.tanh(h @ w[0]) @ w[1], None

        def loss(w: tuple[Array, Array]) -> Array:
            return jnp.mean(lax.scan(jax.checkpoint(layer), x, w)[0] ** 2)

        return jax.value_and_grad(loss)(w)

    weights = (
        spec(mesh, (6, 64, 256), None, "data", "model"),
        spec(mesh, (6, 256, 64), None, "model", "data"),
    )
    return step, (weights, spec(mesh, (16, 64), "data", None))


def loop(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A loop of unknown trips whose condition needs all devices."""

    def step(x: Array) -> Array:
        def goes_on(state: tuple[Array, Array]) -> Array:
            return jnp.sum(state[1]) < 1e3

        def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
            return state[0] + 1, state[1] * 1.1

        return lax.while_loop(goes_on, body, (0, jnp.exp(x)))[1]

    return step, (spec(mesh, (16, 64), "data", None),)


def moved(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Gather, scatter, sort, slices and rolls along a split dimension."""

    def step(x: Array, i: Array, u: Array) -> list[Array]:
        return [x.at[i].add(u), x[i], jnp.sort(x, axis=0), x[3:77], jnp.roll(x, 1, 0), jnp.cumsum(x, 0)]

    rows = spec(mesh, (32,), dtype="int32")
    return step, (spec(mesh, (128, 64), "data", None), rows, spec(mesh, (32, 64), "data"))


def experts(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A mixture of experts under shard_map: tokens travel by all_to_all."""

    def layer(router: Array, w_in: Array, w_out: Array, x: Array) -> Array:
        n = router.shape[-1]
        gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
        hot = jax.nn.one_hot(chosen, n)
        slot = jnp.cumsum(hot.reshape(-1, n), 0).reshape(hot.shape) - 1
        sent = hot[..., None] * jax.nn.one_hot(slot.astype(jnp.int32), 16)
        buckets = jnp.einsum("tkec,td->ecd", sent, x)
        here = lax.all_to_all(buckets, "data", 0, 1, tiled=True)
        done = jnp.einsum("ecf,efd->ecd", jax.nn.silu(jnp.einsum("ecd,edf->ecf", here, w_in)), w_out)
        back = lax.all_to_all(done, "data", 1, 0, tiled=True)
        return jnp.einsum("tkec,ecd->td", sent * gates[..., None, None], back)

    split = Spec("data")
    step = jax.shard_map(layer, mesh=mesh, in_specs=(Spec(), split, split, split), out_specs=split)
    weights = (spec(mesh, (8, 64, 128), "data"), spec(mesh, (8, 128, 64), "data"))
    return step, (spec(mesh, (64, 8)), *weights, spec(mesh, (256, 64), "data"))


def ring(mesh: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Ring attention over the sequence, with its gradient."""
    n = dict(mesh.shape)["model"]
    pairs = [(i, (i + 1) % n) for i in range(n)]

    def attention(q: Array, k: Array, v: Array) -> Array:
        def zeros(*shape: int) -> Array:
            return lax.pcast(jnp.zeros(shape), ("data", "model"), to="varying")

        def one(carry: Any, _: None) -> tuple[Any, None]:
            k, v, out, total, top = carry
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            new = jnp.maximum(top, scores.max(-1))
            weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
            out = out * scale[..., None] + jnp.einsum("bhqk,bkhd->bhqd", weights, v)
            k, v = lax.ppermute((k, v), "model", pairs)
            return (k, v, out, total * scale + weights.sum(-1), new), None

        b, s, h, d = q.shape
        start = (k, v, zeros(b, h, s, d), zeros(b, h, s), zeros(b, h, s) - 1e9)
        (_, _, out, total, _), _ = lax.scan(one, start, None, length=n)
        return out / total[..., None]

    split = Spec("data", "model")
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=split, out_specs=Spec("data", None, "model"))

    def step(q: Array, k: Array, v: Array) -> Array:
        def total(q: Array) -> Array:
            return jnp.sum(mapped(q, k, v))

        return jax.grad(total)(q)

    return step, (spec(mesh, (4, 64, 4, 16), "data", "model"),) * 3


PROGRAMS: dict[str, Build] = {
    build.__name__: build
    for build in (step_of_llama, vocabulary, convolution, scanned, loop, moved, experts, ring)
}
