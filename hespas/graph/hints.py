"""Checks of values against type hints: arguments of public functions and fields of option classes.

A hint may have bounds: ``queues_per_dim: PositiveInt``.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, cast, get_args, get_origin, get_type_hints

import numpy as np

from hespas.graph.errors import UsageError, clipped

__all__ = ["AtLeast", "NonNegativeInt", "PositiveInt", "check_fields", "check_value", "is_option_class"]

_MOST_ELEMENTS = 1000
"""Limit of checked elements of a list: lists of names and paths are shorter."""
_CALLABLE: object = Callable
_ACCEPTED_CLASSES: Mapping[type, tuple[type, ...]] = {
    str: (str, os.PathLike),
    Path: (os.PathLike,),
    int: (Integral,),
    float: (Real,),
    bool: (bool, np.bool_),
}
"""Classes of values that a hint accepts."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Lower bound of a number in its type hint: ``Annotated[int, AtLeast(1)]``."""

    least: float


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]


def is_option_class(kind: type) -> bool:
    """Return True for a frozen dataclass without arrays: its fields are options, not data.

    Results of functions, whose hints only type checkers resolve, are not options either.
    """
    if not is_dataclass(kind) or not getattr(kind, "__dataclass_params__").frozen:  # noqa: B009 # not in stubs
        return False
    try:
        members = [member for hint in _hints_of(kind).values() for member in _members(hint)]
    except NameError:
        return False
    return not any(get_origin(member) is np.ndarray for member in members)


def check_fields(settings: object) -> None:
    """Raise ``UsageError`` if a field of a dataclass has a value that its type hint does not allow."""
    for name, hint in _hints_of(cast("Hashable", type(settings))).items():
        check_value(name, getattr(settings, name), hint)


def check_value(name: str, value: object, hint: object) -> None:
    """Raise ``UsageError`` for a value that its type hint does not allow, or below a bound in the hint."""
    if _fits(value, hint):
        for label, number, least in _below(name, value, hint):
            raise UsageError(
                f"`{label}={number}` is less than {least:g}", hint=f"`{label}={least:g}` or more"
            )
        return
    choices = [
        choice for member in _members(hint) if get_origin(member) is Literal for choice in get_args(member)
    ]
    if choices and isinstance(value, str):
        text = ", ".join(map(repr, choices))
        near = difflib.get_close_matches(value, [str(choice) for choice in choices], 1, 0.0)
        raise UsageError(
            f"`{name}={clipped(value)}`: {clipped(value)!r} is not one of {text}", hint=f"`{name}={near[0]}`"
        )
    shown = f"`{name}={clipped(str(value))}`" if isinstance(value, str | int | float) else f"`{name}`"
    kind = "None" if value is None else _article(clipped(type(value).__name__))
    raise UsageError(f"{shown} is {kind}", hint=f"pass {_described(hint)}")


def _below(name: str, value: object, hint: object) -> Iterator[tuple[str, object, float]]:
    """Yield names, values and bounds of numbers below the bounds of a hint; names of mapping values have
    keys.
    """
    for member in _alternatives(hint):
        origin, inside = get_origin(member), get_args(member)
        if origin is Annotated and _fits(value, inside[0]):
            for bound in inside[1:]:
                if isinstance(bound, AtLeast) and not cast("float", value) >= bound.least:
                    yield name, value, bound.least
        elif isinstance(origin, type) and issubclass(cast("type[object]", origin), Mapping):
            yield from _below_in_mapping(name, value, inside[1])


def _below_in_mapping(name: str, value: object, hint: object) -> Iterator[tuple[str, object, float]]:
    """Yield what :func:`_below` yields for the values of a mapping, nothing for another value."""
    if isinstance(value, Mapping):
        for key, entry in cast("Mapping[object, object]", value).items():
            yield from _below(f"{name}[{key!r}]", entry, hint)


@cache
def _hints_of(kind: Hashable) -> Mapping[str, object]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: object, hint: object) -> bool:
    """Return False if a hint certainly does not allow a value."""
    origin, members = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(value, members[0])
    if origin in {typing.Union, UnionType}:
        return any(_fits(value, member) for member in members)
    if origin is Literal:
        return any(_is_a(value, cast("type[object]", type(choice))) and value == choice for choice in members)
    if isinstance(origin, type):
        return _fits_generic(value, origin, members)
    return hint is None or not isinstance(hint, type) or _is_a(value, cast("type[object]", hint))


def _is_a(value: object, kind: type) -> bool:
    """Return True if a value is of a class; a path fits ``str``, and NumPy's numbers fit ``int`` and
    ``float``.
    """
    if kind in _ACCEPTED_CLASSES:
        return isinstance(value, _ACCEPTED_CLASSES[kind]) and (kind is bool or not isinstance(value, bool))
    if not getattr(kind, "_is_protocol", False):
        return isinstance(value, kind)
    names = {name for name in (*vars(kind), *getattr(kind, "__annotations__", ())) if name[0] != "_"}
    return not isinstance(value, str | Path) and all(hasattr(type(value), name) for name in names)


def _fits_generic(value: object, origin: type, members: tuple[object, ...]) -> bool:
    if cast("object", origin) is _CALLABLE:
        return callable(value)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(key, members[0]) and _fits(entry, members[1])
            for key, entry in cast("Mapping[object, object]", value).items()
        )
    if not issubclass(origin, Sequence):
        return isinstance(value, origin)
    is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if not is_list or isinstance(value, str | bytes | Mapping):
        return False
    elements = cast("Sequence[object]", value)
    if issubclass(origin, tuple) and Ellipsis not in members:
        return len(elements) == len(members) and all(map(_fits, elements, members))
    return all(_fits(elements[index], members[0]) for index in range(min(len(elements), _MOST_ELEMENTS)))


def _alternatives(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the hint itself."""
    return get_args(hint) if get_origin(hint) in {typing.Union, UnionType} else (hint,)


def _members(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the hint itself, without bounds."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    members = _alternatives(hint)
    return members if members == (hint,) else tuple(part for member in members for part in _members(member))


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
            arguments = [_described(argument) for argument in get_args(member) if argument is not Ellipsis]
            names = (" to " if issubclass(origin, Mapping) else " or ").join(dict.fromkeys(arguments))
            words.append(_article(origin.__name__.lower()) + (f" of {names}" if names else ""))
        else:
            words.append(_article(getattr(member, "__name__", str(member))))
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"
