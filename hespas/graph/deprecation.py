"""Deprecated names: aliases that warn for one minor version.

A public name that changes keeps its old spelling through one of these helpers, so that callers get a
``DeprecationWarning`` with the new name instead of an error.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import ParamSpec, TypeVar

__all__ = ["RenamedAttribute", "moved_names", "renamed_arguments", "renamed_fields", "warn_renamed"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class", bound=type)


def warn_renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is now called ``new``; the position is the caller's caller by default."""
    message = f"{old} is deprecated and will be removed in the next minor version: use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=stacklevel)


def moved_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a function for use as ``__getattr__`` of a package whose names moved: ``modules`` maps each name
    to the module that has it now.
    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warn_renamed(f"{package}.{name}", f"{modules[name]}.{name}")
        return getattr(import_module(modules[name]), name)

    return find


class RenamedAttribute:
    """Descriptor that forwards a deprecated attribute to its new name.

    Assign it without an annotation, so that a dataclass does not make it a field::

        path = RenamedAttribute("critical_path")
    """

    def __init__(self, new: str) -> None:
        """Forward reads to the attribute ``new`` of the same object."""
        self._new = new
        self._old = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._old = name

    def __get__(self, instance: object, owner: type) -> object:
        """Return the value of the new attribute, with a warning; the descriptor itself on the class."""
        if instance is None:
            return self
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        return getattr(instance, self._new)


def renamed_arguments(
    **new_names: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator for functions whose keyword arguments were renamed (``old="new"``): old names still
    work, with a warning. A call with both names raises ``TypeError``.
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(function)
        def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            _rename(kwargs, new_names, function.__name__)
            return function(*args, **kwargs)

        return wrapper

    return decorate


def renamed_fields(**new_names: str) -> Callable[[_Class], _Class]:
    """Return a decorator for dataclasses whose fields were renamed (``old="new"``): old names still work in
    the constructor and as attributes, with a warning.
    """

    def decorate(kind: _Class) -> _Class:
        construct: Callable[..., None] = getattr(kind, "__init__")  # noqa: B009 - unsound for type checkers

        @functools.wraps(construct)
        def construct_renamed(self: object, *args: object, **kwargs: object) -> None:
            _rename(kwargs, new_names, kind.__name__)
            construct(self, *args, **kwargs)

        setattr(kind, "__init__", construct_renamed)  # noqa: B010 - type checkers refuse the assignment
        for old, new in new_names.items():
            attribute = RenamedAttribute(new)
            attribute.__set_name__(kind, old)
            setattr(kind, old, attribute)
        return kind

    return decorate


def _rename(arguments: dict[str, object], new_names: Mapping[str, str], called: str) -> None:
    """Replace deprecated names of keyword arguments in place, with a warning at the caller of the decorated
    function. Raises ``TypeError`` if a call has both names of an argument.
    """
    for old in new_names.keys() & arguments.keys():
        new = new_names[old]
        if new in arguments:
            raise TypeError(f"{called}() got both {new!r} and its deprecated name {old!r}")
        warn_renamed(f"{called}({old}=)", f"{called}({new}=)", stacklevel=4)
        arguments[new] = arguments.pop(old)
