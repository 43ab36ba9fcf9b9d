"""Cases of memory-bound operations: elementwise, normalisation, reductions, gathers, data movement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

from benchmarks.ground_truth.cases import Case, Scale, Work
from fixtures.make.untyped import Array, jax, jnp, lax

__all__ = ["elementwise", "gathers", "movement", "normalisation", "reductions"]

_ELEMENT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_HALVED = 2


class _Operation(NamedTuple):
    """An operation: ``op`` as in programs, reads and writes of each element (``passes``), full-size
    operands.
    """

    op: str
    passes: float
    operands: int
    function: Callable[..., Array]


def _layer_norm(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    return (centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _rms_norm(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype)


def _softmax(x: Array) -> Array:
    return jax.nn.softmax(x, axis=-1)


def _add(x: Array, y: Array) -> Array:
    return x + y


def _multiply(x: Array, y: Array) -> Array:
    return x * y


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x)


_ELEMENTWISE = (
    _Operation("add", 3, 2, _add),
    _Operation("mul", 3, 2, _multiply),
    _Operation("exp", 2, 1, jnp.exp),
    _Operation("tanh", 2, 1, jnp.tanh),
    _Operation("gelu", 2, 1, _gelu),
)
_NORMS = (
    _Operation("layer_norm", 2, 1, _layer_norm),
    _Operation("rms_norm", 2, 1, _rms_norm),
    _Operation("softmax", 2, 1, _softmax),
)


def _sum(axis: int, x: Array) -> Array:
    return jnp.sum(x, axis=axis)


def _max(axis: int, x: Array) -> Array:
    return jnp.max(x, axis=axis)


def _spec(*shape: int, dtype: str) -> Array:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(_ELEMENT.get(dtype, dtype)))


def _streamed(function: Callable[..., Array], operands: int, dtype: str, size: tuple[int, int]) -> Work:
    return Work(function=function, arguments=(_spec(*size, dtype=dtype),) * operands)


def _columns(kind: str, op: str, dtype: str, size: tuple[int, int], passes: float) -> dict[str, str | int]:
    """Return the columns of a row. Fractional ``passes`` become text that parses as a number."""
    rows, columns = size
    shown: str | int = int(passes) if passes == int(passes) else repr(passes)
    return {"kind": kind, "op": op, "dtype": dtype, "rows": rows, "columns": columns, "passes": shown}


def _case(family: str, kind: str, operation: _Operation, dtype: str, size: tuple[int, int]) -> Case:
    return Case(
        family=family,
        name=f"{family}-{operation.op}-{dtype}-{size[0]}x{size[1]}",
        build=partial(_streamed, operation.function, operation.operands, dtype, size),
        columns=_columns(kind, operation.op, dtype, size, operation.passes),
    )


def elementwise(scale: Scale) -> Iterator[Case]:
    """Yield elementwise operations on rows of 4096, from cache size to a gigabyte."""
    rows = {"tiny": (1, 2, 3, 4, 6, 8, 12, 16, 24), "small": (1, 8, 64, 512, 2048)}.get(
        scale, (1, 16, 64, 256, 1024, 4096, 16384, 65536)
    )
    dtypes = ("bf16", "f32") if scale == "full" else ("f32",)
    operations = _ELEMENTWISE[:3] if scale == "tiny" else _ELEMENTWISE
    for operation, dtype, count in product(operations, dtypes, rows):
        yield _case("elementwise", "vector", operation, dtype, (count, 4096))


def _sizes(scale: Scale) -> tuple[tuple[int, int], ...]:
    if scale == "tiny":
        return ((64, 128),)
    if scale == "small":
        return ((64, 256), (512, 1024), (1024, 4096))
    return (
        (1, 4096),
        (128, 1024),
        (512, 4096),
        (4096, 4096),
        (4096, 14336),
        (8192, 1024),
        (16384, 8192),
        (65536, 512),
    )


def normalisation(scale: Scale) -> Iterator[Case]:
    """Yield layer norm and RMS norm without weights, and softmax, over the last dimension."""
    dtypes = ("bf16", "f32") if scale == "full" else ("f32",)
    for operation, dtype, size in product(_NORMS, dtypes, _sizes(scale)):
        yield _case("norm", "normalization", operation, dtype, size)


def _pool(x: Array) -> Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def _pool_work(dtype: str, images: int, side: int, channels: int) -> Work:
    return Work(function=_pool, arguments=(_spec(images, side, side, channels, dtype=dtype),))


def reductions(scale: Scale) -> Iterator[Case]:
    """Yield sums along and across rows, the maximum of each row, and pooling."""
    dtypes = ("bf16", "f32") if scale == "full" else ("f32",)
    functions = (
        ("sum-rows", partial(_sum, -1)),
        ("sum-columns", partial(_sum, 0)),
        ("max-rows", partial(_max, -1)),
    )
    for (name, function), dtype, size in product(functions, dtypes, _sizes(scale)):
        yield Case(
            family="reduce",
            name=f"reduce-{name}-{dtype}-{size[0]}x{size[1]}",
            build=partial(_streamed, function, 1, dtype, size),
            columns=_columns("reduction", "reduce", dtype, size, 1) | {"variant": f"xla {name}"},
        )
    if scale == "tiny":
        return
    pools = ((8, 112, 64), (64, 56, 256)) if scale == "full" else ((2, 32, 16),)
    for dtype, (images, side, channels) in product(dtypes, pools):
        size = (images * side * side, channels)
        yield Case(
            family="reduce",
            name=f"reduce-pool-{dtype}-{images}x{side}x{side}x{channels}",
            build=partial(_pool_work, dtype, images, side, channels),
            columns=_columns("pooling", "reduce_window", dtype, size, 1.25),
        )


def _take(table: Array, rows: Array) -> Array:
    return jnp.take(table, rows, axis=0, mode="clip")


def _scatter(table: Array, rows: Array, updates: Array) -> Array:
    return table.at[rows].add(updates, mode="drop")


def _gather_work(dtype: str, table: int, size: tuple[int, int], adds: bool) -> Work:
    stored, rows = _spec(table, size[1], dtype=dtype), _spec(size[0], dtype="int32")
    if adds:
        return Work(function=_scatter, arguments=(stored, rows, _spec(*size, dtype=dtype)), below=table)
    return Work(function=_take, arguments=(stored, rows), below=table)


def gathers(scale: Scale) -> Iterator[Case]:
    """Yield gathers of table rows, and scatters that add to a copy of the table (all of it is copied)."""
    if scale == "tiny":
        sizes: tuple[tuple[int, int, int], ...] = ((256, 32, 64),)
    elif scale == "small":
        sizes = ((1024, 64, 256), (4096, 512, 256))
    else:
        sizes = (
            *(
                (table, count, width)
                for table, width in ((32000, 4096), (131072, 1024))
                for count in (1, 1024, 32768)
            ),
        )
    dtypes = ("bf16", "f32") if scale == "full" else ("f32",)
    for dtype, (table, count, width), adds in product(dtypes, sizes, (False, True)):
        op = "scatter" if adds else "gather"
        moved = (table, width) if adds else (count, width)
        yield Case(
            family="gather",
            name=f"gather-{op}-{dtype}-{count}-of-{table}x{width}",
            build=partial(_gather_work, dtype, table, (count, width), adds),
            columns=_columns("gather", op, dtype, moved, 2) | {"variant": f"xla {op}"},
        )


def _transpose(x: Array) -> Array:
    return jnp.transpose(x)


def _join(axis: int, *parts: Array) -> Array:
    return jnp.concatenate(parts, axis=axis)


def _slice(x: Array) -> Array:
    return x[:, : x.shape[1] // _HALVED]


def _pad(x: Array) -> Array:
    return jnp.pad(x, ((0, 0), (0, 1)))


def movement(scale: Scale) -> Iterator[Case]:
    """Yield transpositions, concatenations along and across rows, slices of half of each row, and padding."""
    dtypes = ("bf16", "f32") if scale == "full" else ("f32",)
    for dtype, size in product(dtypes, _sizes(scale)[-5:]):
        rows, columns = size
        moves: tuple[tuple[str, str, int, Callable[..., Array], tuple[int, int]], ...] = (
            ("transpose", "transpose", 1, _transpose, size),
            ("cat-rows", "concatenate", 2, partial(_join, 0), (2 * rows, columns)),
            ("cat-columns", "concatenate", 2, partial(_join, 1), (rows, 2 * columns)),
            ("slice", "slice", 1, _slice, (rows, columns // _HALVED)),
            ("pad", "pad", 1, _pad, (rows, columns + 1)),
        )
        for name, op, operands, function, moved in moves:
            yield Case(
                family="move",
                name=f"move-{name}-{dtype}-{rows}x{columns}",
                build=partial(_streamed, function, operands, dtype, size),
                columns=_columns("move", op, dtype, moved, 2) | {"variant": f"xla {name}"},
            )
