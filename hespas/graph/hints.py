"""Type hints of public functions and option classes: checks of values, and declarations of options.

A hint may have bounds (``queues_per_dim: PositiveInt``), and declare an option of the command line::

    Jobs = Annotated[PositiveInt, Option("Run N processes.", metavar="N")]

    @checked()
    def league(table: str | Path, *, jobs: Jobs = 2) -> LeagueReport: ...
"""

from __future__ import annotations

import builtins
import difflib
import inspect
import os
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import numpy as np

from hespas.graph.errors import UsageError, clipped

__all__ = [
    "DEVICE",
    "INPUT",
    "OUTPUT",
    "REQUIRED",
    "Access",
    "AtLeast",
    "AtMost",
    "DeclaredOption",
    "NonNegativeInt",
    "Option",
    "OptionsOf",
    "PositiveInt",
    "check_fields",
    "check_value",
    "is_option_class",
    "members_of",
    "options_of",
    "parameters_of",
]

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
"""Classes whose instances are accepted where a type hint names the key."""


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Lower bound of a number in its type hint: ``Annotated[int, AtLeast(1)]``."""

    least: float


@dataclass(frozen=True, slots=True)
class AtMost:
    """Upper bound of a number in its type hint."""

    most: float


PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]


def is_option_class(kind: type) -> bool:
    """Return True if the objects of a class are options and not data: a frozen dataclass without array
    fields.

    Classes whose type hints cannot be resolved at run time are results of functions, so they are not option
    classes.
    """
    if not is_dataclass(kind) or not getattr(kind, "__dataclass_params__").frozen:  # noqa: B009 # not in stubs
        return False
    try:
        members = [member for hint in _hints_of(kind).values() for member in members_of(hint)]
    except NameError:
        return False
    return not any(_origin_of(member) is np.ndarray for member in members)


def check_fields(settings: object) -> None:
    """Raise ``UsageError`` if a field of a dataclass has a value that its type hint does not allow."""
    for name, hint in _hints_of(cast("Hashable", type(settings))).items():
        check_value(name, getattr(settings, name), hint)


def check_value(name: str, value: object, hint: object) -> None:
    """Raise ``UsageError`` for a value that its type hint does not allow, or beyond a bound in the hint."""
    if _fits(value, hint):
        for message, remedy in _beyond(name, value, hint):
            raise UsageError(message, hint=remedy)
        return
    choices = [
        choice for member in members_of(hint) if get_origin(member) is Literal for choice in get_args(member)
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


def _beyond(name: str, value: object, hint: object) -> Iterator[tuple[str, str]]:
    """Yield a message and a remedy for each number in ``value`` that violates a bound in its type hint.

    Values of a mapping are checked too; messages name them with their key, such as ``sizes['x']``.
    """
    for member in _alternatives(hint):
        origin, inside = get_origin(member), get_args(member)
        if origin is Annotated and _fits(value, inside[0]):
            yield from _beyond(name, value, inside[0])
            number = cast("float", value)
            for bound in inside[1:] if isinstance(value, Real) else ():
                if isinstance(bound, AtLeast) and not number >= bound.least:
                    remedy = f"`{name}={bound.least:g}` or more"
                    fault = "not a number" if isnan(number) else f"less than {bound.least:g}"
                    yield f"`{name}={value}` is {fault}", remedy
                elif isinstance(bound, AtMost) and not number <= bound.most:
                    remedy = f"`{name}={bound.most:g}` or less"
                    yield f"`{name}={value}` is more than {bound.most:g}", remedy
        elif isinstance(origin, type) and issubclass(cast("type[object]", origin), Mapping):
            yield from _beyond_in_mapping(name, value, inside[1])


def _beyond_in_mapping(name: str, value: object, hint: object) -> Iterator[tuple[str, str]]:
    """Yield messages as :func:`_beyond` does for the values of a mapping; yield nothing if it is not a
    mapping.
    """
    if isinstance(value, Mapping):
        for key, entry in cast("Mapping[object, object]", value).items():
            yield from _beyond(f"{name}[{key!r}]", entry, hint)


def _origin_of(hint: object) -> Any:
    """Return the origin of a hint, ``np.ndarray`` for ``NDArray``, which is a type alias since NumPy 2.5."""
    origin: object = get_origin(hint)
    return get_origin(getattr(origin, "__value__", None)) or origin


@cache
def _hints_of(kind: Hashable) -> Mapping[str, object]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: object, hint: object) -> bool:
    """Return False if a hint certainly does not allow a value."""
    origin, members = _origin_of(hint), get_args(hint)
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


def members_of(hint: object) -> tuple[object, ...]:
    """Return the members of a union, or the hint itself, each without its bounds."""
    if get_origin(hint) is Annotated:
        return members_of(get_args(hint)[0])
    members = _alternatives(hint)
    return members if members == (hint,) else tuple(part for member in members for part in members_of(member))


def _described(hint: object) -> str:
    """Return a hint in words: ``a str, a Path or None``."""
    words: list[str] = []
    for member in members_of(hint):
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


INPUT = "Input"
"""Headings under which ``--help`` groups options. Options without a heading come first."""
DEVICE = "Device and estimate"
OUTPUT = "Output"

REQUIRED = inspect.Parameter.empty
"""Default of an option that must be given."""

Access = Literal["", "reads", "stream", "writes", "document", "folder"]
_Completed = Literal["", "devices", "systems", "estimators", "formats", "models"]


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of a command-line option in a type hint.

    ``help`` is its help text. It names other options by their Python names in backticks, like messages
    of the library: ```num_devices```. ``flag`` is the spelling on the command line (empty: the name); for a
    switch it may include the negation (``interference/no-interference``). ``panel`` is a heading of
    ``--help``. ``completes`` are the names that a shell completes. ``is_argument``: the option is given by
    position. ``repeats``: it can be given several times, each time with one value. ``is_text``: the text need
    not be a path. ``is_required``: the command line needs it (None: if the parameter has no default).
    ``parse`` converts the text of the command line (for an option that ``repeats``, the list of texts) to a
    value. ``default_text`` replaces the default in ``--help`` (empty: none is shown).

    ``access`` is the use of a file that the option names (empty: it is read; ``stream``: the function itself
    reads standard input). ``label`` names that file in messages (empty: the flag). ``opens`` are the
    suffixes, before ``.gz``, of written files that ``--open`` opens in the Perfetto UI.
    """

    help: str
    _: KW_ONLY
    flag: str = ""
    metavar: str | None = None
    panel: str = ""
    completes: _Completed = ""
    is_argument: bool = False
    repeats: bool = False
    is_text: bool = False
    is_required: bool | None = None
    parse: Callable[[Any], object] | None = None
    default_text: str | None = None
    access: Access = ""
    label: str = ""
    opens: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class OptionsOf:
    """Part of a type hint that offers the fields of an option class as command-line options.

    ``names`` are the offered fields (empty: all fields that declare an option).
    """

    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """Option of a command that calls a function. It sets a keyword parameter of the function, or a field of
    an option class.

    For a field, ``kind`` is the option class, and ``parameter`` is the keyword parameter whose argument is an
    object of this class.
    """

    name: str
    option: Option
    hint: object
    default: object
    parameter: str
    kind: type | None = None

    @property
    def flags(self) -> str:
        """Return the spellings on the command line: ``--launches/--no-launches``."""
        return "/".join(f"--{flag}" for flag in (self.option.flag or self.name.replace("_", "-")).split("/"))

    @property
    def flag(self) -> str:
        """Return the name of the option in messages: its flag, or a positional argument's placeholder."""
        if self.option.is_argument:
            return (self.option.metavar or self.name).strip("[].")
        return self.flags.partition("/")[0]

    @property
    def is_required(self) -> bool:
        """Return True if the command line needs a value."""
        return self.default is REQUIRED if self.option.is_required is None else self.option.is_required


class _Names(dict[str, Any]):
    """Namespace in which the type hints of a module are evaluated. Names that only type checkers import are
    ``Any``.
    """

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, Any)


def _declared_option(name: str, hint: object, default: object) -> DeclaredOption | None:
    """Return the option that a type hint declares; None if it declares none."""
    if get_origin(hint) is not Annotated:
        return None
    inside, *metadata = get_args(hint)
    declared = [entry for entry in metadata if isinstance(entry, Option)]
    bounds = [entry for entry in metadata if not isinstance(entry, Option)]
    plain = Annotated[(inside, *bounds)] if bounds else inside
    return DeclaredOption(name, declared[-1], plain, default, name) if declared else None


@cache
def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name."""
    return inspect.signature(inspect.unwrap(function)).parameters


@cache
def options_of(function: Callable[..., object]) -> Mapping[str, DeclaredOption]:
    """Return the options of a function by name, in the order of its parameters."""
    function = inspect.unwrap(function)
    names = _Names(getattr(function, "__globals__"))  # noqa: B009 - of a callable
    hints = get_type_hints(function, localns=names, include_extras=True)
    options: dict[str, DeclaredOption] = {}
    for name, parameter in parameters_of(function).items():
        hint = hints.get(name)
        if option := _declared_option(name, hint, parameter.default):
            options[name] = option
        elif get_origin(hint) is Annotated:
            kind, *metadata = get_args(hint)
            for entry in metadata:
                if isinstance(entry, OptionsOf):
                    options |= _options_of_class(name, kind, entry.names)
    return options


def _options_of_class(parameter: str, hint: object, names: tuple[str, ...]) -> dict[str, DeclaredOption]:
    """Return the options that the fields of an option class declare.

    ``hint`` is the type hint of the keyword ``parameter``, whose argument is an object of the class.
    ``names`` selects fields (empty: all).
    """
    kinds = [member for member in (hint, *get_args(hint)) if hasattr(member, "__dataclass_fields__")]
    kind = cast("type", kinds[0])
    hints = get_type_hints(kind, include_extras=True)
    of_class: dict[str, DeclaredOption] = {}
    all_fields: tuple[Field[Any], ...] = fields(kind)
    for field in all_fields:
        default = REQUIRED if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found = _declared_option(field.name, hints[field.name], default)
        if found is not None and (not names or field.name in names):
            of_class[field.name] = DeclaredOption(
                found.name, found.option, found.hint, default, parameter, kind
            )
    return {name: of_class[name] for name in names or of_class}
