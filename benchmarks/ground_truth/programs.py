"""Cases of collectives over all devices, and of whole programs (fixtures and a larger Llama step)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

from benchmarks.ground_truth.cases import Case, Scale, Work
from fixtures.make.llama import LlamaShape, arguments, train_step
from fixtures.make.programs import PROGRAMS
from fixtures.make.untyped import Array, Spec, jax, jnp, lax

__all__ = ["collectives", "models"]

_AXIS = "ranks"


def _all_reduce(x: Array) -> Array:
    return lax.psum(x, _AXIS)


def _all_gather(x: Array) -> Array:
    return lax.all_gather(x, _AXIS, tiled=True)


def _reduce_scatter(x: Array) -> Array:
    return lax.psum_scatter(x, _AXIS, tiled=True)


def _all_to_all(x: Array) -> Array:
    return lax.all_to_all(x, _AXIS, 0, 0, tiled=True)


def _permute(x: Array) -> Array:
    ranks = lax.axis_size(_AXIS)
    return lax.ppermute(x, _AXIS, [(rank, (rank + 1) % ranks) for rank in range(ranks)])


_COLLECTIVES: dict[str, Callable[[Array], Array]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _permute,
}


def _collective_work(op: str, elements: int) -> Work:
    """Return the work of a collective in which each rank holds ``elements`` f32 elements."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), (_AXIS,), devices=devices)
    split = jax.sharding.NamedSharding(mesh, Spec(_AXIS))
    mapped = jax.shard_map(
        _COLLECTIVES[op], mesh=mesh, in_specs=Spec(_AXIS), out_specs=Spec(_AXIS), check_vma=False
    )
    whole = jax.ShapeDtypeStruct((elements * len(devices),), jnp.float32, sharding=split)
    return Work(function=mapped, arguments=(whole,))


def collectives(scale: Scale) -> Iterator[Case]:
    """Yield collectives over all devices of the machine. With one device the cases have no row in the
    table.
    """
    ranks = len(jax.devices())
    sizes = {"tiny": (1 << 10,), "small": (1 << 12, 1 << 18)}.get(
        scale, (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
    )
    for op in _COLLECTIVES:
        for elements in sizes:
            row: dict[str, str | int] = {
                "kind": "collective", "op": op, "dtype": "f32", "ranks": ranks, "ranks_per_node": ranks,
                "message_bytes": 4 * elements,
            }  # fmt: skip
            yield Case(
                family="collectives",
                name=f"collectives-{op}-{ranks}-{elements}",
                build=partial(_collective_work, op, elements),
                columns=row if ranks > 1 else {},
            )


_FIXTURES = (
    "mlp",
    "mlp_train",
    "cnn_train",
    "scan_layers_train",
    "scan_nested",
    "fori_static",
    "gather_scatter",
    "top_k",
    "sort_and_fft",
    "random_mask",
    "dot_fp8",
    "dot_int",
)
"""Single-device fixtures that run with arbitrary values."""


def _fixture_work(name: str) -> Work:
    """Return the function and the abstract arguments that the script of a fixture lowers."""
    program = PROGRAMS[name]
    module = import_module(program.script.removesuffix(".py").replace("/", "."))
    with mock.patch.object(module, "jax_program", return_value=[]) as lowered:
        program.build()
    _, function, given = lowered.call_args.args
    return Work(function=function, arguments=tuple(given))


def _llama_work(shape: LlamaShape) -> Work:
    given: tuple[Any, ...] = arguments(shape, None)
    return Work(function=train_step(shape, None), arguments=given, below=shape.vocabulary)


def models(scale: Scale) -> Iterator[Case]:
    """Yield the programs of the fixtures, and a training step of Llama."""
    shapes = {
        "tiny": LlamaShape(
            layers=1, hidden=32, mlp=64, heads=2, sequence=16, vocabulary=64, batch=2, dtype="float32"
        ),
        "small": LlamaShape(batch=4, dtype="float32"),
        "full": LlamaShape(
            layers=4, hidden=2048, mlp=8192, heads=16, sequence=1024, vocabulary=32000, batch=8
        ),
    }
    for name in _FIXTURES[:1] if scale == "tiny" else _FIXTURES:
        yield Case(family="models", name=f"models-{name}", build=partial(_fixture_work, name))
    yield Case(family="models", name=f"models-llama_train-{scale}", build=partial(_llama_work, shapes[scale]))
