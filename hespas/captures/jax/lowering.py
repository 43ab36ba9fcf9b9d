"""A function of JAX -> the StableHLO of the whole mesh, by ``AbstractMesh``: no device is needed."""

from __future__ import annotations

import inspect
import io
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

from hespas.captures.jax.arguments import Argument, parse_arguments
from hespas.captures.mesh import Mesh
from hespas.captures.target import users_code
from hespas.graph import Diagnostics
from hespas.graph.errors import MissingExtraError, UsageError

__all__ = ["Lowered", "Platform", "lower"]

Platform = Literal["cpu", "cuda", "rocm", "tpu"]
"""Whose variant of a program JAX lowers; most programs are the same on all."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """``program`` is MLIR bytecode with locations. ``inputs_unsharded`` arguments of ``inputs`` have no
    sharding, so that the partitioner chooses one.
    """

    name: str
    program: bytes
    mesh: Mesh
    inputs: int
    inputs_unsharded: int


def lower(
    function: Callable[..., object],
    arguments: Sequence[object] | str | Callable[..., object] | None,
    keywords: Mapping[str, object] | None,
    mesh: Mesh,
    *,
    platform: Platform = "tpu",
    explicit: Sequence[str] = (),
    shardy: bool = True,
    diagnostics: Diagnostics,
) -> Lowered:
    """Trace and lower ``function`` on ``mesh``, whose axes in ``explicit`` are typed (``AxisType.Explicit``).
    Shardings are annotated for Shardy, or for GSPMD.

    ``arguments`` are values or abstract values, a text (:mod:`.arguments`), or a function that makes them,
    given the mesh if it takes one. None: ``function`` takes the mesh alone and returns the step with its
    arguments, or takes nothing. Raises ``UsageError`` where it does not trace and ``MissingExtraError``
    without JAX.
    """
    jax = _jax()
    unknown = set(explicit) - set(mesh.names)
    if unknown:
        raise UsageError(f"`explicit`: the mesh {mesh} has no axis {', '.join(sorted(unknown))}")
    kinds = [_kind(jax, explicit=name in explicit) for name in mesh.names]
    abstract = jax.sharding.AbstractMesh(mesh.sizes, mesh.names, axis_types=tuple(kinds))
    name = _name(function)
    with _annotated(jax, shardy=shardy), jax.sharding.use_abstract_mesh(abstract), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        with users_code(f"making the arguments of {name}"):
            call = _call(jax, function, arguments, dict(keywords or {}), abstract)
        positional, named, placed = _abstract(jax, (call.positional, call.named), abstract)
        with users_code(f"tracing {name}"):
            lowered = _traced(jax, call.step, positional, named).lower(lowering_platforms=(platform,))
    _tell(name, placed, mesh, diagnostics)
    return Lowered(name, _bytecode(lowered), mesh, sum(placed), placed[1])


@cache
def _jax() -> ModuleType:
    # Lowering needs no device: one that is there is left to those who use it.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        return import_module("jax")
    except ImportError as error:
        raise MissingExtraError("capturing a program of JAX", "jax") from error


def _kind(jax: ModuleType, *, explicit: bool) -> object:
    kinds = jax.sharding.AxisType
    return kinds.Explicit if explicit else kinds.Auto


@contextmanager
def _annotated(jax: ModuleType, *, shardy: bool) -> Generator[None]:
    """Within, JAX annotates for the one or the other partitioner."""
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update(_WHOSE, shardy)
    try:
        yield
    finally:
        jax.config.update(_WHOSE, before)


_WHOSE = "jax_use_shardy_partitioner"


# --- the step and its arguments


class _Call(NamedTuple):
    """What is traced, with positional and named arguments."""

    step: Callable[..., object]
    positional: tuple[Any, ...]
    named: dict[str, Any]


def _call(
    jax: ModuleType,
    function: Callable[..., object],
    arguments: Sequence[object] | str | Callable[..., object] | None,
    keywords: dict[str, Any],
    mesh: object,
) -> _Call:
    if isinstance(arguments, str):
        return _Call(
            function, tuple(_shaped(jax, each, mesh) for each in parse_arguments(arguments)), keywords
        )
    if callable(arguments):
        made = arguments(mesh) if _required(arguments) else arguments()
        return _Call(function, _listed(made) if _is(made, tuple) else (made,), keywords)
    if arguments is not None:
        return _Call(function, _listed(arguments), keywords)
    required = _required(function)
    if not required:
        return _Call(function, (), keywords)
    if required != ["mesh"]:
        raise UsageError(
            f"{_name(function)} takes {', '.join(required)}, and nothing says of which types",
            hint="name the function that makes the arguments, or state their types (`args`), or let the "
            "function take the mesh alone and return the step with them: def build(mesh): return step, (...)",
        )
    return _built(function(mesh), keywords)


def _built(made: object, keywords: dict[str, Any]) -> _Call:
    """What a function of the mesh returns: the step, its arguments, and those with names if there are any."""
    parts = list(_listed(made)) if _is(made, tuple) else []
    if len(parts) in {2, 3}:
        step, positional = parts[0], parts[1]
        named: Any = parts[2] if len(parts) == 3 else {}
        if callable(step) and _is(positional, tuple, list) and _is(named, dict):
            return _Call(step, _listed(positional), {**keywords, **named})
    raise UsageError(
        f"a function of the mesh returns the step and its arguments, and this one a {_name(type(made))}",
        hint="def build(mesh): return step, (parameters, batch)",
    )


def _is(value: object, *kinds: type) -> bool:
    return issubclass(type(value), kinds)


def _listed(values: object) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", values))


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _required(function: Callable[..., object]) -> list[str]:
    """Names of the parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["arguments"]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def _shaped(jax: ModuleType, argument: Argument, mesh: Any) -> object:
    known = set(mesh.axis_names)
    for name in (name for axes in argument.axes or () for name in axes):
        if name not in known:
            raise UsageError(
                f"an argument is split over {name!r}, and the axes of the mesh are {sorted(known)}"
            )
    try:
        dtype = jax.numpy.dtype(argument.dtype)
    except TypeError as error:
        raise UsageError(
            f"JAX knows no number format {argument.dtype!r}", hint="bf16, f32, i32, ..."
        ) from error
    sharding = None
    if argument.axes is not None:
        spec = jax.sharding.PartitionSpec(*((axes or None) for axes in argument.axes))
        sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(argument.shape, dtype, sharding=sharding)


def _abstract(jax: ModuleType, tree: Any, mesh: object) -> tuple[Any, Any, tuple[int, int]]:
    """Positional and named arguments with arrays of devices as their types, and how many arrays have a
    sharding and have none.
    """
    counts = [0, 0]
    arrays = jax.Array

    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        placed: Any = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
        counts[1 if placed is None else 0] += 1
        if isinstance(leaf, arrays) and not isinstance(leaf, jax.core.Tracer):
            spec = None if placed is None else jax.sharding.NamedSharding(mesh, placed.spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec)
        return leaf

    positional, named = jax.tree.map(one, tree)
    return positional, named, (counts[0], counts[1])


def _traced(jax: ModuleType, step: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """The traced step: a jitted function as its user jitted it, another one jitted here. What is no array in
    the arguments (functions, names, objects without arrays) is part of the program.
    """
    if hasattr(step, "trace"):
        return step.trace(*positional, **named)
    leaves, tree = jax.tree.flatten((positional, named))
    moving = [index for index, leaf in enumerate(leaves) if _is_data(leaf)]

    def of_arrays(*arrays: object) -> object:
        filled = list(leaves)
        for index, array in zip(moving, arrays, strict=True):
            filled[index] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        return _arrays_of(jax, step(*args, **kwargs))

    of_arrays.__name__ = _name(step)
    return jax.jit(of_arrays).trace(*(leaves[index] for index in moving))


def _is_data(leaf: object) -> bool:
    return isinstance(leaf, bool | int | float | complex) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    )


def _arrays_of(jax: ModuleType, result: object) -> list[object]:
    """What a program can return of what a function does."""
    return [leaf for leaf in jax.tree.leaves(result) if _is_data(leaf)]


def _bytecode(lowered: Any) -> bytes:
    sink = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(sink)
    return sink.getvalue()


def _tell(name: str, sharded: tuple[int, int], mesh: Mesh, diagnostics: Diagnostics) -> None:
    placed, free = sharded
    if free and not placed and mesh.num_devices > 1:
        diagnostics.warning(
            "capture.unsharded",
            name,
            f"none of the {free} arguments says how it is sharded over {mesh}: where no constraint within "
            "the program does, every device does the same work",
        )
    elif free:
        diagnostics.info(
            "capture.unsharded",
            name,
            f"{free} of {placed + free} arguments have no sharding: the partitioner chooses",
        )
