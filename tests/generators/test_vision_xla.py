"""Vision and diffusion transformers, compared with the same models in JAX, lowered by XLA's front end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hespas
from hespas.generators.vision import VisionModel, VisionStep
from hespas.graph import OpClass, Workload

jax: Any = pytest.importorskip("jax")
BATCH = 2
VIT = VisionModel(
    name="vit", image=32, patch=8, channels=3, hidden=64, layers=2, heads=4, ffn=256, classes=10
)  # fmt: skip
DIT = VisionModel(
    name="dit", image=16, patch=2, channels=4, hidden=64, layers=2, heads=4, ffn=256, classes=10,
    diffusion=True,
)  # fmt: skip


def shapes_of(model: VisionModel) -> dict[str, tuple[int, ...]]:
    h, f = model.hidden, model.ffn
    found: dict[str, tuple[int, ...]] = {"patches": (model.pixels, h)}
    for layer in range(model.layers):
        block = {"qkv": (h, 3 * h), "proj": (h, h), "fc1": (h, f), "fc2": (f, h)}
        block |= {"mod": (h, 6 * h)} if model.diffusion else {}
        found |= {f"{layer}.{name}": shape for name, shape in block.items()}
    if model.diffusion:
        return found | {"t0": (256, h), "t2": (h, h), "mod": (h, 2 * h), "out": (h, 2 * model.pixels)}
    return found | {"cls": (1, h), "out": (h, model.classes)}


def loss(model: VisionModel, weights: dict[str, Any], images: Any, times: Any) -> Any:
    jnp, nn = jax.numpy, jax.nn
    x: Any = images @ weights["patches"]
    said = None
    if model.diffusion:
        said = nn.silu(nn.silu(times @ weights["t0"]) @ weights["t2"])
    else:
        x = jnp.concatenate([jnp.broadcast_to(weights["cls"], (BATCH, 1, model.hidden)), x], axis=1)

    def norm(x: Any, scale: Any = None) -> Any:
        x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
        return x if scale is None else x * (1 + scale[:, None])

    for layer in range(model.layers):
        said_here: Any = [None] * 4
        if model.diffusion:
            said_here = jnp.split(said @ weights[f"{layer}.mod"], 6, axis=-1)
        q, k, v = jnp.split(norm(x, said_here[0]) @ weights[f"{layer}.qkv"], 3, axis=-1)
        q, k, v = (each.reshape(BATCH, -1, model.heads, model.hidden // model.heads) for each in (q, k, v))
        scores = nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape) @ weights[f"{layer}.proj"]
        x = x + (mixed if said_here[1] is None else mixed * said_here[1][:, None])
        mixed = nn.gelu(norm(x, said_here[2]) @ weights[f"{layer}.fc1"]) @ weights[f"{layer}.fc2"]
        x = x + (mixed if said_here[3] is None else mixed * said_here[3][:, None])
    if model.diffusion:
        scale = jnp.split(said @ weights["mod"], 2, axis=-1)[0]
        return (norm(x, scale) @ weights["out"]).var()
    return nn.logsumexp(norm(x)[:, 0] @ weights["out"], axis=-1).sum()


@pytest.mark.parametrize("model", [VIT, DIT], ids=["vit", "dit"])
def test_flops_of_products_are_those_that_xla_has(model: VisionModel, tmp_path: Path) -> None:
    f32 = jax.numpy.float32
    weights = {name: jax.ShapeDtypeStruct(shape, f32) for name, shape in shapes_of(model).items()}
    images = jax.ShapeDtypeStruct((BATCH, model.patches, model.pixels), f32)
    times = jax.ShapeDtypeStruct((BATCH, 256), f32)

    def step(weights: Any, images: Any, times: Any) -> Any:
        def given(weights: Any) -> Any:
            return loss(model, weights, images, times)

        return jax.value_and_grad(given)(weights)

    file = tmp_path / "step.mlir"
    file.write_text(jax.jit(step).lower(weights, images, times).as_text())
    lowered = hespas.read(file)
    assert isinstance(lowered, Workload)
    ours = VisionStep(model=model, batch=BATCH).workload().classes[0]
    attended = ours.flops[ours.op_class == OpClass.ATTENTION].sum() * 12 / 14
    xla = lowered.classes[0].contractions.flops.sum()
    assert ours.contractions.flops.sum() + attended == pytest.approx(xla, rel=0.01)
