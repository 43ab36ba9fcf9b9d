"""Checks of the arguments of public functions against their type hints."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

from hespas.graph.hints import check_fields, check_value, is_option_class

__all__ = ["checked"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def checked(
    **lazily: str,
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that raises ``UsageError`` for an argument, or a field of an option object, whose
    value its type hint does not allow.

    ``lazily`` maps names in the hints that are imported only for type checkers to their module and name
    (``FitMemory="hespas.fitting.approaches:FitMemory"``).
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)

        @cache
        def hints() -> Mapping[str, object]:
            names: dict[str, object] = {}
            for name, target in lazily.items():
                module, _, attribute = target.partition(":")
                names[name] = getattr(import_module(module), attribute)
            return get_type_hints(function, localns=names, include_extras=True)

        @wraps(function)
        def call(*positional: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            for name, value in signature.bind_partial(*positional, **named).arguments.items():
                kind = signature.parameters[name].kind
                if kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                    check_value(name, value, hints().get(name, Any))
                    if is_option_class(cast("type[object]", type(value))):
                        check_fields(value)
            return function(*positional, **named)

        return call

    return decorate
