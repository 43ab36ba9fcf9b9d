"""Arguments of public functions checked against their type hints, as the command line checks its options."""

from __future__ import annotations

import difflib
import inspect
import os
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

import numpy as np

from hespas.graph.errors import UsageError, clipped

__all__ = ["check_fields", "checked"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_MOST_ELEMENTS = 1000
"""Elements of a list that are checked: names and paths are fewer."""
_CALLABLE: object = Callable
_STANDS_FOR: Mapping[type, tuple[type, ...]] = {
    str: (str, os.PathLike),
    Path: (os.PathLike,),
    int: (Integral,),
    float: (Real,),
    bool: (bool, np.bool_),
}
"""Classes of values that are accepted where a hint names one of these."""


def checked(
    **lazily: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that raises ``UsageError`` for an argument that its type hint does not allow.

    ``lazily`` maps names in the hints that are imported for type checkers alone to where they are defined
    (``FitMemory="hespas.validators.calibration:FitMemory"``).
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)

        @cache
        def hints() -> Mapping[str, object]:
            return get_type_hints(function, localns={name: _found(place) for name, place in lazily.items()})

        @wraps(function)
        def call(*positional: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            given = signature.bind_partial(*positional, **named).arguments
            for name, value in given.items():
                kind = signature.parameters[name].kind
                if kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                    _check(name, value, hints().get(name, Any))
            return function(*positional, **named)

        return call

    return decorate


def check_fields(settings: object) -> None:
    """Raise ``UsageError`` for a field of a dataclass whose value its type hint does not allow."""
    for name, hint in _hints_of(cast("Hashable", type(settings))).items():
        _check(name, getattr(settings, name), hint)


@cache
def _hints_of(kind: Hashable) -> Mapping[str, object]:
    return get_type_hints(kind)


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _check(name: str, value: object, hint: object) -> None:
    if _fits(value, hint):
        return
    choices = [choice for each in _members(hint) if get_origin(each) is Literal for choice in get_args(each)]
    if choices and isinstance(value, str):
        text = ", ".join(map(repr, choices))
        near = difflib.get_close_matches(value, [str(choice) for choice in choices], 1, 0.0)
        raise UsageError(
            f"`{name}={clipped(value)}`: {clipped(value)!r} is not one of {text}", hint=f"`{name}={near[0]}`"
        )
    shown = f"`{name}={clipped(str(value))}`" if isinstance(value, str | int | float) else f"`{name}`"
    kind = "None" if value is None else _article(clipped(type(value).__name__))
    raise UsageError(f"{shown} is {kind}", hint=f"pass {_described(hint)}")


def _fits(value: object, hint: object) -> bool:
    """Return False where a value is certainly none that the hint allows."""
    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, members[0])
    if origin in {typing.Union, UnionType}:
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return any(_is_a(value, type(choice)) and value == choice for choice in members)
    if isinstance(origin, type):
        return _fits_generic(value, origin, members)
    return hint is None or not isinstance(hint, type) or _is_a(value, hint)


def _is_a(value: object, kind: type) -> bool:
    """Return whether a value is of a class; names may be paths, and numbers those of NumPy."""
    if kind in _STANDS_FOR:
        return isinstance(value, _STANDS_FOR[kind]) and (kind is bool or not isinstance(value, bool))
    if not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    names = {name for name in (*vars(kind), *getattr(kind, "__annotations__", ())) if name[0] != "_"}
    return not isinstance(value, str | Path) and all(hasattr(type(value), name) for name in names)


def _fits_generic(value: object, origin: type, members: tuple[object, ...]) -> bool:
    if cast("object", origin) is _CALLABLE:
        return callable(value)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(key, members[0]) and _fits(each, members[1])
            for key, each in cast("Mapping[object, object]", value).items()
        )
    if not issubclass(origin, Sequence):
        return isinstance(value, origin)
    is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not is_list or isinstance(value, str | bytes | Mapping):
        return False
    elements = cast("Sequence[object]", value)
    if issubclass(origin, tuple) and Ellipsis not in members:
        return len(elements) == len(members) and all(map(_fits, elements, members))
    return all(_fits(elements[place], members[0]) for place in range(min(len(elements), _MOST_ELEMENTS)))


def _members(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the hint itself."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in {typing.Union, UnionType} else (hint,)


def _described(hint: object) -> str:
    """Return a hint in words: ``a str, a Path or None``."""
    words: list[str] = []
    for member in _members(hint):
        origin = get_origin(member)
        if origin is Literal:
            words.append("one of " + ", ".join(map(repr, get_args(member))))
        elif member in {None, NoneType}:
            words.append("None")
        elif origin is Callable:
            words.append("a function")
        elif isinstance(origin, type):
            inside = [_described(each) for each in get_args(member) if each is not Ellipsis]
            names = (" to " if issubclass(origin, Mapping) else " or ").join(dict.fromkeys(inside))
            words.append(_article(origin.__name__.lower()) + (f" of {names}" if names else ""))
        else:
            words.append(_article(getattr(member, "__name__", str(member))))
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
