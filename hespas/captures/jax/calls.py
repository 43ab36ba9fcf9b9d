"""What is called when a program of JAX is captured or run: a step with its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

from hespas.captures.jax.arguments import Argument, parse_arguments
from hespas.captures.target import load_object
from hespas.graph.errors import UsageError

__all__ = ["Call", "Described", "call_of", "described", "is_data", "jitted", "name_of", "unwrapped"]

Described = Sequence[object] | str | Callable[..., object] | None
"""Arguments: values or abstract values; a text (:mod:`.arguments`); a function that makes them, given the
mesh if it takes one; or None: the function that is called takes the mesh alone and returns the step with its
arguments, or takes nothing.
"""


def described(args: Described, beside: str) -> Described:
    """The same, where a text may also name what makes the arguments, in the module of ``beside``."""
    if not isinstance(args, str) or "[" in args:
        return args
    made = load_object(args, beside)
    if callable(made):
        return made
    return _listed(made) if _is(made, tuple, list) else (made,)


class Call(NamedTuple):
    """What is traced, with positional and named arguments."""

    step: Callable[..., object]
    positional: tuple[Any, ...]
    named: dict[str, Any]


def call_of(
    jax: ModuleType,
    function: Callable[..., object],
    arguments: Described,
    keywords: dict[str, Any],
    mesh: object,
) -> Call:
    """What ``function`` is called with, or the step that it makes with what that is called with.

    Raises ``UsageError`` where nothing says of which types arguments are.
    """
    if isinstance(arguments, str):
        return Call(
            function, tuple(_shaped(jax, each, mesh) for each in parse_arguments(arguments)), keywords
        )
    if callable(arguments):
        made = arguments(mesh) if _required(arguments) else arguments()
        return Call(function, _listed(made) if _is(made, tuple) else (made,), keywords)
    if arguments is not None:
        return Call(function, _listed(arguments), keywords)
    required = _required(function)
    if not required:
        return Call(function, (), keywords)
    if required != ["mesh"]:
        raise UsageError(
            f"{name_of(function)} takes {', '.join(required)}, and nothing says of which types",
            hint="name the function that makes the arguments, or state their types (`args`), or let the "
            "function take the mesh alone and return the step with them: def build(mesh): return step, (...)",
        )
    return _built(function(mesh), keywords)


def _built(made: object, keywords: dict[str, Any]) -> Call:
    """What a function of the mesh returns: the step, its arguments, and those with names if there are any."""
    parts = list(_listed(made)) if _is(made, tuple) else []
    if len(parts) in {2, 3}:
        step, positional = parts[0], parts[1]
        named: Any = parts[2] if len(parts) == 3 else {}
        if callable(step) and _is(positional, tuple, list) and _is(named, dict):
            return Call(step, _listed(positional), {**keywords, **named})
    raise UsageError(
        f"a function of the mesh returns the step and its arguments, and this one a {name_of(type(made))}",
        hint="def build(mesh): return step, (parameters, batch)",
    )


def _is(value: object, *kinds: type) -> bool:
    return issubclass(type(value), kinds)


def _listed(values: object) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", values))


def name_of(function: object) -> str:
    """What a function is called, of an object its class."""
    bare = unwrapped(function)
    return str(getattr(bare, "__name__", type(bare).__name__))


def unwrapped(function: object) -> object:
    """The function that ``functools.partial`` fills arguments of in."""
    while isinstance(function, partial):
        function = cast("partial[object]", function).func
    return function


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


def jitted(jax: ModuleType, call: Call, *, kind: str = "") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The step as ``jax.jit`` has it, with its arguments: a jitted function (of this ``kind``) as its user
    jitted it, another one jitted here. What is no array in the arguments (functions, names, objects without
    arrays) is then part of the program.
    """
    if hasattr(call.step, "trace") and kind in {"", type(call.step).__name__}:
        return call.step, call.positional, call.named
    leaves, tree = jax.tree.flatten((call.positional, call.named))
    moving = [index for index, leaf in enumerate(leaves) if is_data(leaf)]

    def of_arrays(*arrays: object) -> object:
        filled = list(leaves)
        for index, array in zip(moving, arrays, strict=True):
            filled[index] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        # What a program can return of what a function does.
        return [leaf for leaf in jax.tree.leaves(call.step(*args, **kwargs)) if is_data(leaf)]

    of_arrays.__name__ = name_of(call.step)
    return jax.jit(of_arrays), tuple(leaves[index] for index in moving), {}


def is_data(leaf: object) -> bool:
    """Whether a value is an array, an abstract one, or a number."""
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return is_array or isinstance(leaf, bool | int | float | complex)
