"""Extension of mkdocstrings: docstrings as Markdown, and the declared options of public functions.

A function of ``hespas`` that a command calls declares the options of that command in its type hints. The page
of the function lists them with their help, and its signature has the types without declarations.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from functools import cache
from types import UnionType
from typing import Annotated, Any, ForwardRef, Literal, get_args, get_origin

import griffe

import hespas
import hespas.api
from hespas.graph.hints import options_of

__all__ = ["DeclaredOptions", "as_markdown", "options_section", "type_text"]

_SPELLED = {
    "_Path": "str | Path",
    "_Progress": "Callable[[int, int], None]",
    "Value": "Workload | Profile",
    "Rules": "Literal['chakra', 'astra-sim']",
}
"""Private names of types -> the types."""


class DeclaredOptions(griffe.Extension):
    """Griffe extension that processes every object of the package."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Convert the docstring of an object to Markdown. For a public function, add its options."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
        if isinstance(obj, griffe.Function) and (function := _public_functions().get(obj.path)) is not None:
            declared = options_of(function)
            for parameter in obj.parameters:
                option = declared.get(parameter.name)
                own = option if option is not None and option.kind is None else None
                written = str(parameter.annotation or "")
                parameter.annotation = type_text(own.hint) if own else stated_type(function, written)
            if obj.docstring is not None:
                head, heading, examples = obj.docstring.value.partition("\nExamples:\n")
                obj.docstring.value = f"{head}{options_section(function)}\n{heading}{examples}"


@cache
def _public_functions() -> dict[str, Callable[..., object]]:
    """Return the functions of the interface by the path of their definition."""
    found = (getattr(hespas.api, name) for name in hespas.api.__all__)
    return {f"{each.__module__}.{each.__qualname__}": each for each in found if inspect.isfunction(each)}


def as_markdown(doc: str) -> str:
    """Return a docstring as Markdown, with literals and references in one pair of backquotes."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda role: f"`{role[1].rpartition('.')[2]}`", doc)
    return text.replace("``", "`")


def type_text(hint: Any) -> str:
    """Return a type as in the source, without declarations of options and bounds."""
    origin, inside = get_origin(hint), get_args(hint)
    if isinstance(hint, ForwardRef):
        return hint.__forward_arg__
    if hint is type(None):
        return "None"
    if origin is Annotated:
        return type_text(inside[0])
    if origin in {typing.Union, UnionType}:
        return " | ".join(map(type_text, inside))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]"
    name: str = getattr(origin or hint, "__name__", str(hint))
    if not inside:
        return name
    return f"{name}[{', '.join('...' if part is ... else type_text(part) for part in inside)}]"


def stated_type(function: Callable[..., object], annotation: str) -> str:
    """Return the type of a parameter without an option of its own; private names are replaced by types."""
    names: dict[str, object] = getattr(inspect.unwrap(function), "__globals__")  # noqa: B009 - of any callable
    hint = names.get(annotation)
    text = type_text(hint) if get_origin(hint) is Annotated else annotation
    for alias, spelled in _SPELLED.items():
        text = re.sub(rf"\b{alias}\b", spelled, text)
    return text


def options_section(function: Callable[..., object]) -> str:
    """Return the options of a function as a table in Markdown; empty without one."""
    rows: list[str] = []
    for option in options_of(function).values():
        keyword = option.name if option.kind is None else f"{option.parameter}.{option.name}"
        flags = "" if option.option.is_argument else f"`{option.flags}`"
        text = " ".join(option.option.help.split()).replace("|", "\\|")
        rows.append(f"| `{keyword}` | {flags} | {text} |\n")
    return "".join(["\n\n| keyword | command line | effect |\n|---|---|---|\n", *rows]) if rows else ""
