"""Cases of matrix products, attention and convolutions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from benchmarks.ground_truth.cases import Case, Scale, Work
from fixtures.make.untyped import Array, jax, jnp, lax

__all__ = ["attention", "convolutions", "products"]

_ELEMENT = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f32_full": "float32",
    "i8": "int8",
    "a8w8_fp8": "float8_e4m3fn",
}
_CONTRACTED = {"nt": (1, 1), "nn": (1, 0), "tn": (0, 0)}
"""Contracted dimensions of the left and right operand. ``nt`` is a layer with weights (n, k)."""

Size = tuple[int, int, int, int]
"""batch, m, n, k"""


def _spec(*shape: int, dtype: str) -> Array:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(_ELEMENT.get(dtype, dtype)))


def _multiply(dtype: str, contracted: tuple[int, int], batched: bool, x: Array, y: Array) -> Array:
    left, right = (dim + batched for dim in contracted)
    batch = ((0,), (0,)) if batched else ((), ())
    precision = lax.Precision.HIGHEST if dtype == "f32_full" else lax.Precision.DEFAULT
    wide = jnp.int32 if dtype == "i8" else x.dtype
    return lax.dot_general(
        x, y, (((left,), (right,)), batch), precision=precision, preferred_element_type=wide
    )


def _multiply_scaled(contracted: tuple[int, int], x: Array, y: Array, scale: Array) -> Array:
    """Return the product of 8-bit floats with a scale per tensor, in the form that XLA maps to fp8 units."""
    left, right = contracted
    wide = [each.astype(jnp.bfloat16) * scale for each in (x, y)]
    return lax.dot_general(*wide, (((left,), (right,)), ((), ())))


def _product_work(dtype: str, layout: str, size: Size) -> Work:
    batch, m, n, k = size
    contracted = _CONTRACTED[layout]
    lhs, rhs = ((m, k), (k, m))[contracted[0] == 0], ((n, k), (k, n))[contracted[1] == 0]
    stack = (batch,) if batch > 1 else ()
    arguments = (_spec(*stack, *lhs, dtype=dtype), _spec(*stack, *rhs, dtype=dtype))
    if dtype == "a8w8_fp8":
        scaled = partial(_multiply_scaled, contracted)
        return Work(function=scaled, arguments=(*arguments, _spec(dtype="bf16")))
    return Work(function=partial(_multiply, dtype, contracted, batch > 1), arguments=arguments)


def _product_case(dtype: str, size: Size, layout: str = "nt") -> Case:
    batch, m, n, k = size
    stem = f"{batch}x" if batch > 1 else ""
    columns: dict[str, str | int] = {
        "kind": "matmul", "op": "", "dtype": dtype, "batch": batch, "m": m, "n": n, "k": k,
        "variant": "xla" if layout == "nt" else f"xla {layout}",
    }  # fmt: skip
    return Case(
        family="gemm",
        name=f"gemm-{dtype}-{layout}-{stem}{m}x{n}x{k}",
        build=partial(_product_work, dtype, layout, size),
        columns=columns,
    )


_LAYERS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (1024, 8192))
"""Sizes (n, k) of language model layers, whole or split over devices."""
_ODD = ((1000, 1000, 1000), (4095, 4097, 4096), (2048, 50257, 768), (197, 3072, 768))
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SOME_TOKENS = (1, 16, 64, 512, 4096)
_BATCHED = (
    (8, 512, 512, 64),
    (32, 1024, 1024, 128),
    (64, 128, 128, 64),
    (128, 1, 2048, 128),
    (16, 2048, 128, 2048),
)


def products(scale: Scale) -> Iterator[Case]:
    """Yield matrix products: square, layers with 1 to 8,192 tokens, uneven sizes, batches, other operand
    orders.
    """
    if scale == "tiny":
        yield from (_product_case("f32", (1, size, 64, 64)) for size in (16, 64))
        yield _product_case("bf16", (4, 16, 32, 16), "nn")
        return
    if scale == "small":
        yield from (
            _product_case("f32", (1, *size)) for size in product((1, 32, 256, 1024), (256, 1024), (256, 1024))
        )
        yield from (_product_case("bf16", (1, m, 512, 512)) for m in (1, 64, 512))
        return
    yield from (_product_case("bf16", (1, m, n, k)) for (n, k), m in product(_LAYERS[:2], _TOKENS))
    yield from (_product_case("bf16", (1, m, n, k)) for (n, k), m in product(_LAYERS[2:], _SOME_TOKENS))
    yield from (_product_case("bf16", size) for size in _BATCHED)
    for dtype, sides in (
        ("bf16", 16384),
        ("f16", 8192),
        ("f32", 8192),
        ("f32_full", 4096),
        ("a8w8_fp8", 16384),
    ):
        yield from (_product_case(dtype, (1, side, side, side)) for side in _powers(1024, sides))
        yield from (_product_case(dtype, (1, *size)) for size in _ODD if dtype != "a8w8_fp8")
    some = (*product(("f16", "f32", "f32_full"), _LAYERS[:2], _SOME_TOKENS),)
    some += (*product(("a8w8_fp8",), _LAYERS, _SOME_TOKENS), *product(("i8",), _LAYERS[:3], _SOME_TOKENS))
    yield from (_product_case(dtype, (1, m, n, k)) for dtype, (n, k), m in some)
    yield from (
        _product_case("bf16", (1, m, 4096, 4096), layout) for layout in ("nn", "tn") for m in _SOME_TOKENS
    )


def _powers(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _attend(kind: str, library: str, q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=kind == "context", implementation=library)


def _attention_work(kind: str, library: str, dtype: str, size: tuple[int, int, int, int, int, int]) -> Work:
    batch, q_len, kv_len, heads, kv_heads, head_dim = size
    query = _spec(batch, q_len, heads, head_dim, dtype=dtype)
    key = _spec(batch, kv_len, kv_heads, head_dim, dtype=dtype)
    return Work(function=partial(_attend, kind, library), arguments=(query, key, key))


def _attention_case(
    kind: str, size: tuple[int, int, int], heads: tuple[int, int, int], dtype: str, library: str
) -> Case:
    """Return a case. ``size`` is (batch, query length, key length), ``heads`` is (heads, key heads, head
    size).
    """
    batch, q_len, kv_len = size
    columns: dict[str, str | int] = {
        "kind": f"attention.{kind}", "op": "", "dtype": dtype, "variant": f"xla {library}", "batch": batch,
        "q_len": q_len, "kv_len": kv_len, "heads": heads[0], "kv_heads": heads[1], "head_dim": heads[2],
    }  # fmt: skip
    return Case(
        family="attention",
        name=f"attention-{kind}-{library}-{dtype}-b{batch}-q{q_len}-k{kv_len}-h{heads[0]}-{heads[1]}-{heads[2]}",
        build=partial(_attention_work, kind, library, dtype, (*size, *heads)),
        columns=columns,
        gpu_only=library == "cudnn",
    )


def attention(scale: Scale) -> Iterator[Case]:
    """Yield attention of prompts, of new tokens over cached tokens, and of encoders, by XLA and (on a GPU)
    cuDNN.
    """
    if scale != "full":
        lengths = (32,) if scale == "tiny" else (64, 256, 512)
        for length in lengths:
            yield _attention_case("context", (1, length, length), (4, 2, 16), "f32", "xla")
            yield _attention_case("generation", (2, 1, length), (4, 2, 16), "f32", "xla")
        return
    grouped, own = (32, 8, 128), (16, 16, 64)
    for library, heads in product(("xla", "cudnn"), (grouped, own)):
        for batch, length in (
            (16, 128),
            (4, 512),
            (1, 1024),
            (8, 1024),
            (1, 2048),
            (4, 2048),
            (1, 4096),
            (1, 8192),
        ):
            yield _attention_case("context", (batch, length, length), heads, "bf16", library)
        for batch, length in product((1, 16, 64), (512, 4096)):
            yield _attention_case("generation", (batch, 1, length), heads, "bf16", library)
        for batch, length in ((8, 197), (32, 512), (4, 2048)):
            yield _attention_case(
                "encoder", (batch, length, length), (heads[0], heads[0], heads[2]), "bf16", library
            )


def _convolve(stride: int, x: Array, kernel: Array) -> Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _convolution_work(dtype: str, images: int, layer: tuple[int, int, int, int, int]) -> Work:
    inside, outside, kernel, size, stride = layer
    image = _spec(images, size, size, inside, dtype=dtype)
    weights = _spec(kernel, kernel, inside, outside, dtype=dtype)
    return Work(function=partial(_convolve, stride), arguments=(image, weights))


def _convolution_case(dtype: str, images: int, layer: tuple[int, int, int, int, int]) -> Case:
    inside, outside, kernel, size, stride = layer
    columns: dict[str, str | int] = {
        "kind": "convolution", "op": "", "dtype": dtype, "images": images, "in_channels": inside,
        "out_channels": outside, "kernel": kernel, "in_size": size, "out_size": -(-size // stride),
    }  # fmt: skip
    return Case(
        family="conv",
        name=f"conv-{dtype}-b{images}-{inside}-{outside}-k{kernel}-s{size}-t{stride}",
        build=partial(_convolution_work, dtype, images, layer),
        columns=columns,
    )


_IMAGE_LAYERS = (
    (3, 64, 7, 224, 2), (64, 64, 3, 56, 1), (64, 256, 1, 56, 1), (128, 128, 3, 28, 1),
    (256, 512, 1, 28, 2), (256, 256, 3, 14, 1), (512, 512, 3, 7, 1), (3, 1024, 16, 224, 16),
)  # fmt: skip
"""Input channels, output channels, kernel, image size and stride of ResNet-50 layers and of ViT patches."""


def convolutions(scale: Scale) -> Iterator[Case]:
    """Yield convolutions of square images and kernels with one group."""
    if scale != "full":
        layers = (
            ((4, 8, 3, 8, 1),)
            if scale == "tiny"
            else ((3, 16, 3, 32, 1), (16, 32, 3, 32, 2), (32, 64, 1, 16, 1))
        )
        yield from (_convolution_case("f32", 2, layer) for layer in layers)
        return
    for dtype, images, layer in product(("bf16", "f32"), (1, 32), _IMAGE_LAYERS):
        yield _convolution_case(dtype, images, layer)
