"""Arguments of public functions checked against their type hints, as the command line checks its options."""

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
    """Return a decorator that raises ``UsageError`` for an argument that its type hint does not allow, and
    for an option object with such a field.

    ``lazily`` maps names in the hints that are imported for type checkers alone to where they are defined
    (``FitMemory="hespas.validators.calibration:FitMemory"``).
    """

    def decorate(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(function)

        @cache
        def hints() -> Mapping[str, object]:
            return get_type_hints(
                function,
                localns={name: _found(place) for name, place in lazily.items()},
                include_extras=True,
            )

        @wraps(function)
        def call(*positional: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
            given = signature.bind_partial(*positional, **named).arguments
            for name, value in given.items():
                kind = signature.parameters[name].kind
                if kind not in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
                    check_value(name, value, hints().get(name, Any))
                    if is_option_class(cast("type[object]", type(value))):
                        check_fields(value)
            return function(*positional, **named)

        return call

    return decorate


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
