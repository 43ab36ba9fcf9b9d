"""Calls of a JAX step: the function to trace or run, and its arguments, which may be given as text.

Arguments are written as ``bf16[8192,1024]@data,model; i32[8192]@data``: types with the mesh axes that split
each dimension.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, cast

from hespas.captures.target import load_object
from hespas.graph.errors import UsageError

__all__ = [
    "Arguments",
    "ArrayArgument",
    "StepCall",
    "is_data",
    "jit_step",
    "name_of",
    "parse_arguments",
    "resolve_arguments",
    "step_call",
    "unwrap_partial",
]

Arguments = Sequence[object] | str | Callable[..., object] | None
"""Arguments of a function: values or abstract values; a text (:func:`parse_arguments`); a function that makes
them, with the mesh as its argument if it takes one; or None, if the function takes only the mesh and returns
the step with its arguments, or takes nothing.
"""

_ARGUMENT = re.compile(r"(?P<dtype>[a-z][a-z0-9_]*)\[(?P<shape>[0-9, ]*)\](?:@(?P<axes>.*))?", re.DOTALL)
_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "pred": "bool",
    "i1": "bool",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
}
_UNSPLIT = frozenset({"", "-", "None"})
_FORM = (
    "write DTYPE[SIZES]@AXES, with semicolons between arguments: bf16[8192,1024]@data,model; i32[8192]@data"
)


class ArrayArgument(NamedTuple):
    """Type of an array argument. ``axes`` are the mesh axes along which each dimension is split; None means
    that the sharding is not stated.
    """

    dtype: str
    shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...] | None


class StepCall(NamedTuple):
    """Function to trace, with its positional and keyword arguments."""

    step: Callable[..., object]
    positional: tuple[Any, ...]
    named: dict[str, Any]


def parse_arguments(text: str) -> list[ArrayArgument]:
    """Parse argument types with shardings. In a sharding, ``-`` means a dimension that is not split, and
    ``+`` joins several axes along which one dimension is split.

    Raises ``UsageError`` for anything else.
    """
    return [_parse_argument(part.strip()) for part in text.split(";") if part.strip()]


def _parse_argument(text: str) -> ArrayArgument:
    match = _ARGUMENT.fullmatch(text)
    if match is None:
        raise UsageError(f"{text[:80]!r} is not a type of an argument, such as bf16[8,128]", hint=_FORM)
    sizes = [size.strip() for size in match["shape"].split(",") if size.strip()]
    if any(len(size) > 18 for size in sizes):
        raise UsageError(f"{text[:80]!r}: a dimension has more than 18 digits", hint=_FORM)
    shape = tuple(map(int, sizes))
    dtype = _DTYPES.get(match["dtype"], match["dtype"])
    if match["axes"] is None:
        return ArrayArgument(dtype, shape, None)
    parts = [part.strip() for part in match["axes"].split(",")]
    axes = tuple(() if part in _UNSPLIT else tuple(part.split("+")) for part in parts)
    if len(axes) > len(shape):
        raise UsageError(
            f"{text[:80]!r}: shardings of {len(axes)} dimensions for an array of {len(shape)}", hint=_FORM
        )
    return ArrayArgument(dtype, shape, axes)


def resolve_arguments(args: Arguments, relative_to: str) -> Arguments:
    """Replace texts in ``args`` by the objects of the user's module that they name, and return the arguments.
    A name without a module is looked up in the module of ``relative_to``.
    """
    if not isinstance(args, str) or "[" in args:
        return args
    value = load_object(args, relative_to)
    if callable(value):
        return value
    return _as_tuple(value) if _is_instance(value, tuple, list) else (value,)


def step_call(
    jax: ModuleType,
    function: Callable[..., object],
    arguments: Arguments,
    keywords: dict[str, Any],
    mesh: object,
) -> StepCall:
    """Return the call to trace. It calls ``function``, or the step that ``function`` builds if it is called
    with the mesh.

    Raises ``UsageError`` if the types of the arguments are unknown.
    """
    if isinstance(arguments, str):
        arrays = tuple(_abstract_array(jax, argument, mesh) for argument in parse_arguments(arguments))
        return StepCall(function, arrays, keywords)
    if callable(arguments):
        made = arguments(mesh) if _required_parameters(arguments) else arguments()
        return StepCall(function, _as_tuple(made) if _is_instance(made, tuple) else (made,), keywords)
    if arguments is not None:
        return StepCall(function, _as_tuple(arguments), keywords)
    required = _required_parameters(function)
    if not required:
        return StepCall(function, (), keywords)
    if required != ["mesh"]:
        raise UsageError(
            f"{name_of(function)} takes {', '.join(required)}, but their types are not given",
            hint="name the function that makes the arguments, or give their types (`args`), or let the "
            "function take only the mesh and return the step with them: def build(mesh): return step, (...)",
        )
    built = function(mesh)
    parts = list(_as_tuple(built)) if _is_instance(built, tuple) else []
    if len(parts) in {2, 3}:
        step, positional = parts[0], parts[1]
        named: Any = parts[2] if len(parts) == 3 else {}
        if callable(step) and _is_instance(positional, tuple, list) and _is_instance(named, dict):
            return StepCall(step, _as_tuple(positional), {**keywords, **named})
    raise UsageError(
        "a function of the mesh must return the step and its arguments, but it returns "
        f"{name_of(type(built))}",
        hint="write def build(mesh): return step, (parameters, batch)",
    )


def _is_instance(value: object, *types: type) -> bool:
    """Return True if the type of ``value`` is one of ``types``. The attribute ``__class__``, which user
    objects may override, is ignored.
    """
    return issubclass(type(value), types)


def _as_tuple(values: object) -> tuple[Any, ...]:
    return tuple(cast("Sequence[Any]", values))


def name_of(function: object) -> str:
    """Return the name of a function, or of the class of another object."""
    bare = unwrap_partial(function)
    return str(getattr(bare, "__name__", type(bare).__name__))


def unwrap_partial(function: object) -> object:
    """Return the function that ``functools.partial`` objects wrap."""
    while isinstance(function, partial):
        function = cast("partial[object]", function).func
    return function


def _required_parameters(function: Callable[..., object]) -> list[str]:
    """Return the names of the parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ["arguments"]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in variable
    ]


def _abstract_array(jax: ModuleType, argument: ArrayArgument, mesh: Any) -> object:
    axis_names = set(mesh.axis_names)
    for name in (name for axes in argument.axes or () for name in axes):
        if name not in axis_names:
            raise UsageError(
                f"an argument is split over axis {name!r}, but the mesh has the axes "
                f"{', '.join(sorted(axis_names))}",
                hint="split the argument over an axis of the mesh, or add the axis to `mesh`",
            )
    try:
        dtype = jax.numpy.dtype(argument.dtype)
    except TypeError as error:
        raise UsageError(
            f"JAX has no number format {argument.dtype!r}", hint="use bf16, f32, i32, ..."
        ) from error
    sharding = None
    if argument.axes is not None:
        spec = jax.sharding.PartitionSpec(*((axes or None) for axes in argument.axes))
        sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(argument.shape, dtype, sharding=sharding)


def jit_step(
    jax: ModuleType, call: StepCall, *, type_name: str = ""
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return the step as a jitted function, with its positional and named arguments.

    A function that the user jitted is returned as it is (if its type is ``type_name``); any other function is
    jitted. Its arguments that are not arrays (functions, names, objects without arrays) then become part of
    the program.
    """
    if hasattr(call.step, "trace") and type_name in {"", type(call.step).__name__}:
        return call.step, call.positional, call.named
    leaves, tree = jax.tree.flatten((call.positional, call.named))
    data_positions = [position for position, leaf in enumerate(leaves) if is_data(leaf)]

    def of_arrays(*arrays: object) -> object:
        filled = list(leaves)
        for position, array in zip(data_positions, arrays, strict=True):
            filled[position] = array
        args, kwargs = jax.tree.unflatten(tree, filled)
        # A jitted program can only return data.
        return [leaf for leaf in jax.tree.leaves(call.step(*args, **kwargs)) if is_data(leaf)]

    of_arrays.__name__ = name_of(call.step)
    return jax.jit(of_arrays), tuple(leaves[position] for position in data_positions), {}


def is_data(leaf: object) -> bool:
    """Return True if JAX can trace the value as data: an array, an abstract array, or a number."""
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    return is_array or isinstance(leaf, bool | int | float | complex)
