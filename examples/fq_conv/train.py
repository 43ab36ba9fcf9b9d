"""Training of a fully quantised network for analog accelerators, after FQ-Conv (arXiv 1912.09356).

Run: python train.py OUT

It trains a convolutional network on the 8x8 digits of scikit-learn in FP32, and quantises it gradually to
8 bits, 4 bits, and ternary weights with 4-bit activations. Scales are learned. At inference there is no batch
norm and no nonlinearity except the quantisers. The last stage is trained twice, without and with noise on
weights, activations and MAC results. The programs and the test data are written to OUT for
``hespas-validate noise``.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

Array = jax.Array
Parameters = dict[str, Any]

LAYERS = ((3, 1, 16, 1), (3, 16, 32, 2), (3, 32, 32, 2), (2, 32, 10, 1))
"""Kernel size, input channels, output channels and stride of each convolution."""
TEST_IMAGES = 500
BATCH = 64
OUTPUT_BITS = 8
"""Bits of the logits; all other activations have the bits of the stage."""


class Precision(NamedTuple):
    """Bits of weights (2: ternary) and activations; 0 is FP32."""

    weights: int
    activations: int


class Noise(NamedTuple):
    """Standard deviation of the noise on weights, activations and MAC results, in LSB."""

    weights: float = 0.0
    activations: float = 0.0
    mac: float = 0.0


STAGES = {
    "fp32": Precision(0, 0),
    "8-bit": Precision(8, 8),
    "4-bit": Precision(4, 4),
    "ternary": Precision(2, 4),
}
NO_NOISE = Noise()
TRAINING_NOISE = Noise(weights=0.2, activations=0.4, mac=1.0)


def levels(bits: int, *, signed: bool) -> int:
    """Return the number of steps from 0 to the largest value of a quantiser."""
    return 2 ** (bits - 1) - 1 if signed else 2**bits - 1


def quantise(values: Array, log_scale: Array, steps: int, *, signed: bool) -> Array:
    """Return values on the grid of a quantiser with a learned scale; gradients pass through the rounding."""
    scale = jnp.exp(log_scale)
    clipped = jnp.clip(values / scale, -1.0 if signed else 0.0, 1.0) * steps
    rounded = clipped + jax.lax.stop_gradient(jnp.round(clipped) - clipped)
    return rounded * (scale / steps)


def noisy(values: Array, sigma: Array | float, lsb: Array | float, key: Array | None) -> Array:
    """Return values with Gaussian noise of ``sigma`` LSB, unchanged without a key."""
    if key is None:
        return values
    amount = sigma * jax.lax.stop_gradient(jnp.asarray(lsb))
    return values + amount * jax.random.normal(key, values.shape)


def quantised_weights(layer: Parameters, bits: int) -> Array:
    """Return the weights of a layer on their grid."""
    if not bits:
        return layer["kernel"]
    return quantise(layer["kernel"], layer["weight_scale"], levels(bits, signed=True), signed=True)


def network(
    parameters: Parameters,
    images: Array,
    precision: Precision,
    noise: Noise = NO_NOISE,
    key: Array | None = None,
) -> Array:
    """Return the logits of images with pixels from 0 to 16."""
    keys = iter(jax.random.split(key, 3 * len(LAYERS)) if key is not None else [None] * 3 * len(LAYERS))
    weight_bits, bits = precision
    steps = levels(bits, signed=False) if bits else 0
    values, scale = images / 16.0, jnp.zeros(())
    if bits:
        values = quantise(values, scale, steps, signed=False)
    for layer, (_, _, _, stride) in zip(parameters["layers"], LAYERS, strict=True):
        kernel = quantised_weights(layer, weight_bits)
        is_last = layer is parameters["layers"][-1]
        if bits:
            weight_lsb = jnp.exp(layer["weight_scale"]) / levels(weight_bits, signed=True)
            kernel = noisy(kernel, noise.weights, weight_lsb, next(keys))
            values = noisy(values, noise.activations, jnp.exp(scale) / steps, next(keys))
        values = jax.lax.conv_general_dilated(
            values, kernel, (stride, stride), "VALID" if is_last else "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        if not bits:
            values = values if is_last else jax.nn.relu(values)
            continue
        scale, steps = layer["output_scale"], levels(OUTPUT_BITS if is_last else bits, signed=is_last)
        values = noisy(values, noise.mac, jnp.exp(scale) / steps, next(keys))
        values = quantise(values, scale, steps, signed=is_last)
    return values.reshape(values.shape[0], -1)


def initial_parameters(seed: int) -> Parameters:
    """Return random kernels and zero scales."""
    layers: list[Parameters] = []
    for key, (size, inputs, outputs, _) in zip(
        jax.random.split(jax.random.key(seed), len(LAYERS)), LAYERS, strict=True
    ):
        deviation = (2.0 / (size * size * inputs)) ** 0.5
        kernel = deviation * jax.random.normal(key, (size, size, inputs, outputs))
        layers.append({"kernel": kernel, "weight_scale": jnp.zeros(()), "output_scale": jnp.zeros(())})
    return {"layers": layers}


def with_scales(parameters: Parameters, before: Precision, after: Precision, images: Array) -> Parameters:
    """Return the parameters with first scales for a stage: of weights by their size, of activations by their
    99.9th percentile where the stage before had none.
    """
    layers = [dict(layer) for layer in parameters["layers"]]
    values = images / 16.0
    for layer, (_, _, _, stride) in zip(layers, LAYERS, strict=True):
        sizes = jnp.abs(layer["kernel"])
        if after.weights == 2 and before.weights != 2:
            # The threshold, half of the scale, is 0.7 of the mean size, as in ternary weight networks.
            layer["weight_scale"] = jnp.log(1.4 * sizes.mean())
        elif not before.weights:
            layer["weight_scale"] = jnp.log(sizes.max())
        if not before.activations:
            is_last = layer is layers[-1]
            values = jax.lax.conv_general_dilated(
                values, layer["kernel"], (stride, stride), "VALID" if is_last else "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )  # fmt: skip
            values = values if is_last else jax.nn.relu(values)
            layer["output_scale"] = jnp.log(jnp.percentile(jnp.abs(values), 99.9))
    return {"layers": layers}


def shifted(images: Array, key: Array) -> Array:
    """Return images moved by at most one pixel in each direction."""
    padded = jnp.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    starts = jax.random.randint(key, (images.shape[0], 2), 0, 3)

    def moved(image: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice(image, (start[0], start[1], 0), (8, 8, 1))

    return jax.vmap(moved)(padded, starts)


def loss(
    parameters: Parameters, data: tuple[Array, Array], precision: Precision, noise: Noise, key: Array
) -> Array:
    """Return the mean cross entropy of a batch of images and labels."""
    images, labels = data
    shift, draw = jax.random.split(key)
    is_noisy = any(noise)
    logits = network(parameters, shifted(images, shift), precision, noise, draw if is_noisy else None)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -chosen.mean()


@partial(jax.jit, static_argnames=("precision", "noise"))
def epoch(
    state: tuple[Parameters, Parameters, Parameters, Array],
    data: tuple[Array, Array],
    key: Array,
    rate: Array,
    *,
    precision: Precision,
    noise: Noise,
) -> tuple[Parameters, Parameters, Parameters, Array]:
    """Run one epoch of Adam over shuffled images."""
    images, labels = data
    order_key, step_key = jax.random.split(key)
    count = images.shape[0] // BATCH
    order = jax.random.permutation(order_key, images.shape[0])[: count * BATCH].reshape(count, BATCH)

    def step(
        state: tuple[Parameters, Parameters, Parameters, Array], rows_and_key: tuple[Array, Array]
    ) -> tuple[tuple[Parameters, Parameters, Parameters, Array], None]:
        parameters, first, second, number = state
        rows, key = rows_and_key
        gradient = jax.grad(loss)(parameters, (images[rows], labels[rows]), precision, noise, key)
        number = number + 1
        first = jax.tree.map(lambda mean, part: 0.9 * mean + 0.1 * part, first, gradient)
        second = jax.tree.map(lambda mean, part: 0.99 * mean + 0.01 * part**2, second, gradient)
        parameters = jax.tree.map(
            lambda value, mean, square: value
            - rate * (mean / (1 - 0.9**number)) / (jnp.sqrt(square / (1 - 0.99**number)) + 1e-8),
            parameters, first, second,
        )  # fmt: skip
        return (parameters, first, second, number), None

    return jax.lax.scan(step, state, (order, jax.random.split(step_key, count)))[0]


def train(
    parameters: Parameters,
    data: tuple[Array, Array],
    precision: Precision,
    noise: Noise,
    *,
    epochs: int,
    rate: float,
    seed: int,
) -> Parameters:
    """Train a stage with a learning rate that falls to 0 along a cosine."""
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state = (parameters, zeros, zeros, jnp.zeros(()))
    for number, key in enumerate(jax.random.split(jax.random.key(seed), epochs)):
        now = jnp.asarray(rate * 0.5 * (1 + np.cos(np.pi * number / epochs)))
        state = epoch(state, data, key, now, precision=precision, noise=noise)
    return state[0]


def accuracy(parameters: Parameters, data: tuple[Array, Array], precision: Precision) -> float:
    """Return the share of images whose largest logit is that of their label."""
    images, labels = data
    return float((network(parameters, images, precision).argmax(1) == labels).mean())


def digits() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return images and labels for training and for tests."""
    loaded: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(loaded.images))
    images = jnp.asarray(loaded.images[order, :, :, None], jnp.float32)
    labels = jnp.asarray(loaded.target[order])
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def program(parameters: Parameters, precision: Precision, images: int) -> bytes:
    """Return the network as a StableHLO program with its quantised weights as constants."""
    layers = [
        dict(layer) | {"kernel": np.asarray(quantised_weights(layer, precision.weights))}
        for layer in parameters["layers"]
    ]
    constants = jax.tree.map(np.asarray, {"layers": layers})
    function: Callable[[Array], Array] = lambda pixels: network(  # noqa: E731
        constants, pixels, Precision(0, 0)._replace(activations=precision.activations)
    )
    lowered = jax.jit(function).lower(jax.ShapeDtypeStruct((images, 8, 8, 1), jnp.float32))
    return gzip.compress(lowered.as_text().encode(), 9, mtime=0)


def main() -> None:
    """Train all stages, print their accuracy, and write programs and data."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder for the programs and the test data")
    parser.add_argument("--seed", type=int, default=0, help="seed of the training [default: 0]")
    parser.add_argument("--epochs", type=int, default=40, help="epochs of each stage [default: 40]")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    training, test = digits()
    began = perf_counter()
    results: dict[str, float] = {}
    parameters, before = initial_parameters(options.seed), STAGES["fp32"]
    for number, (name, precision) in enumerate(STAGES.items()):
        if precision.weights:
            parameters = with_scales(parameters, before, precision, training[0])
        parameters = train(
            parameters, training, precision, NO_NOISE,
            epochs=options.epochs, rate=0.003 if number == 0 else 0.002, seed=options.seed + number,
        )  # fmt: skip
        before = precision
        results[name] = accuracy(parameters, test, precision)
        print(f"{name:8} {results[name]:.1%} after {perf_counter() - began:.0f} s", flush=True)
    for name, noise in {"plain": NO_NOISE, "noise-aware": TRAINING_NOISE}.items():
        trained = train(
            parameters, training, STAGES["ternary"], noise,
            epochs=2 * options.epochs, rate=0.002, seed=options.seed + 9,
        )  # fmt: skip
        results[name] = accuracy(trained, test, STAGES["ternary"])
        print(f"{name:12} {results[name]:.1%} after {perf_counter() - began:.0f} s", flush=True)
        text = program(trained, STAGES["ternary"], TEST_IMAGES // 2)
        (out / f"digits-{name}.mlir.gz").write_bytes(text)
    np.savez_compressed(
        out / "digits-test.npz",
        inputs=np.asarray(test[0]).astype(np.uint8),
        labels=np.asarray(test[1]).astype(np.uint8),
    )
    (out / "accuracy.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
