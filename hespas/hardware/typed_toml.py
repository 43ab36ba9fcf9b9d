"""Reader of TOML files whose rows are typed structs, with errors about the first key that does not match its
type.

The types of figures have a ``description``, which errors state as the expected value. NaN violates every
bound of a type, so figures that may be ``unknown`` are checked by a function, ``within``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import isnan
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import asdict
from msgspec.structs import fields as struct_fields

from hespas.files.documents import read_toml
from hespas.graph.errors import FormatError, clipped

__all__ = [
    "ClockOrNan",
    "Count",
    "CountOrUnknown",
    "FigureSource",
    "FileKind",
    "NotNegativeOrNan",
    "Positive",
    "PositiveOrNan",
    "Text",
    "TomlRow",
    "check_source_keys",
    "inline_table",
    "read_rows",
    "refuse_repeats",
    "scalar",
    "toml_error",
    "unexpected_value",
]


_LEAST, _MOST = 1e-60, 1e60
"""Bounds of real figures: larger and smaller ones could overflow in products."""

_MOST_COUNT = 2**63 - 1


def _positive_or_nan(value: float) -> bool:
    return isnan(value) or _LEAST <= value <= _MOST


def _not_negative_or_nan(value: float) -> bool:
    return value == 0 or _positive_or_nan(value)


Text = Annotated[str, Meta(min_length=1, description="a string that is not empty")]

Positive = Annotated[float, Meta(ge=_LEAST, le=_MOST, description="a positive number (up to 1e60)")]

_CLOCKS_HZ = (1e7, 1e11)


def _clock_or_nan(value: float) -> bool:
    return isnan(value) or _CLOCKS_HZ[0] <= value <= _CLOCKS_HZ[1]


ClockOrNan = Annotated[
    float,
    Meta(
        description="a clock in Hz (1e7 to 1e11) or nan",
        extra={"within": _clock_or_nan, "remedy": "write 1.98 GHz as 1.98e9; nan if unknown"},
    ),
]

PositiveOrNan = Annotated[
    float,
    Meta(
        description="a positive number or nan (up to 1e60)",
        extra={"unknown": "nan", "within": _positive_or_nan},
    ),
]

NotNegativeOrNan = Annotated[
    float,
    Meta(
        description="a number that is 0 or more or nan (up to 1e60)",
        extra={"unknown": "nan", "within": _not_negative_or_nan},
    ),
]

Count = Annotated[int, Meta(ge=1, le=_MOST_COUNT, description="a positive whole number")]

CountOrUnknown = Annotated[
    int,
    Meta(
        ge=-1,
        le=_MOST_COUNT,
        description="a positive whole number or -1 (unknown)",
        extra={"unknown": "-1", "within": bool},
    ),
]


class TomlRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of the rows of a hardware file, which are TOML tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureSource:
    """Source of figures: ``key`` is the name by which rows refer to it, ``text`` names the document and its
    column.
    """

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class FileKind:
    """Kind of a hardware file, with texts for error messages: the name of the kind (``what``), a hint to find
    such files (``where``), and a hint with an ``example``.
    """

    what: str
    where: str
    example: str


_Document = TypeVar("_Document", bound=Struct)

_MAX_INTEGER = 2**63 - 1

_REFUSED_AT = re.compile(r" - at `\$([\w.\[\]]*)`$")

_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


def _refuse_wide(value: object, where: str, path: Path) -> None:
    """Raise ``FormatError`` for an integer beyond 64 bits. TOML excludes these, and as real numbers they
    would be rounded.
    """
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise unexpected_value(value, float, where, path)
    if isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            _refuse_wide(item, f"{where}[{index}]", path)
    elif isinstance(value, dict):
        for name, item in cast("dict[str, object]", value).items():
            _refuse_wide(item, f"{where}.{name}" if where else name, path)


def read_rows(path: Path, kind: type[_Document], about: FileKind) -> tuple[dict[str, object], _Document]:
    """Return the root table of a TOML file twice: as a plain dictionary, and decoded as ``kind``.

    Raises ``FormatError`` for the first key that does not match the type.
    """
    table = read_toml(path, about.what, where=about.where, example=about.example)
    try:
        document = convert(table, kind)
    except ValidationError as error:
        raise _translated(str(error), table, kind, path, about.example) from error
    _refuse_wide(table, "", path)
    _check_within(document, "", path)
    return table, document


def _check_within(row: Struct, where: str, path: Path) -> None:
    """Check the figures of a row that may be NaN (unknown). Type bounds cannot express this, so they are
    checked here.
    """
    for name, kind, within in _figures_and_rows(type(row)):
        value, position = getattr(row, name), f"{where}{name}"
        if within:
            if not within(value):
                raise unexpected_value(value, kind, position, path)
        elif isinstance(value, tuple):
            for index, item in enumerate(cast("tuple[Struct, ...]", value)):
                _check_within(item, f"{position}[{index}].", path)
        elif value is not None:
            _check_within(value, f"{position}.", path)


@cache
def _figures_and_rows(kind: type[Struct]) -> tuple[tuple[str, Any, Callable[[float], bool] | None], ...]:
    """Return name, type and check function of each field that has a check or is a nested row."""
    kinds = {name: (hint, _extra(hint, "within")) for name, hint in _kinds(kind).items()}
    return tuple(
        (name, hint, within)
        for name, (hint, within) in kinds.items()
        if within or any(map(_row_type, (hint, *get_args(hint))))
    )


def _row_type(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _translated(
    refusal: str, table: dict[str, object], kind: Any, path: Path, file_example: str
) -> FormatError:
    """Return a ``FormatError`` for an error of msgspec, with the key, the expected value, and how to write
    it.
    """
    value, where = cast("Any", table), ""
    unknown = refusal.startswith("Object contains unknown")
    at_root = unknown and refusal.endswith(tuple(f"`{key}`" for key in table))
    position = None if at_root else _REFUSED_AT.search(refusal)
    for name, index in _STEP.findall(position[1]) if position else []:
        if name:
            where, kind, value = f"{where}.{name}" if where else name, _kinds(kind)[name], value[name]
        elif get_origin(kind) is dict:  # msgspec does not report the key
            kind = get_args(kind)[1]
            key = next(key for key, item in value.items() if not _converts(item, kind))
            where, value = f"{where}.{key}", value[key]
        elif get_args(kind)[1:] == (...,):
            where, kind, value = f"{where}[{index}]", get_args(kind)[0], value[int(index)]
        if NoneType in get_args(kind):
            kind = get_args(kind)[0]
    if _bare(kind) is not dict or not isinstance(value, dict):
        return unexpected_value(value, kind, where, path)
    fields, inside = _kinds(kind), f"{where}." if where else ""
    if unknown:
        name = next(key for key in cast("dict[str, object]", value) if key not in fields)
        close = get_close_matches(name, fields, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"known keys are {', '.join(fields)}"
        return toml_error(path, inside + name, "unknown key", hint)
    name = next(key for key in fields if f"`{key}`" in refusal)
    bare = _bare(fields[name])
    example = _extra(fields[name], "unknown") or _KINDS[bare][2]
    if bare is Literal:
        example = f'"{get_args(fields[name])[0]}"'
    required = [field.name for field in struct_fields(kind) if field.required]
    others = [key for key in required if key not in value and key != name]
    rest = f"; also missing: {', '.join(others)}" if others else ""
    return toml_error(path, inside + name, "missing key", f"add {name} = {example}{rest}; {file_example}")


_KINDS: Mapping[object, tuple[str, str, str]] = {
    str: ("a string", 'write it in quotes: "..."', '"..."'),
    bool: ("true or false", "write true or false without quotes", "true"),
    float: ("a number", "write it without quotes and unit, as 2.5 or 989.4e12", "989.4e12"),
    int: ("a whole number", "write it without quotes and unit, as 132", "132"),
    dict: ("a table", "write it as [table] with a key per line, or as { key = value, ... }", "{ ... }"),
    tuple: ("a list", "write it in brackets: [ ..., ... ]", "[ ... ]"),
    Literal: ("a string", "", '"..."'),
    UnionType: ("a whole number or an expression", 'write it as 4096, or as "4 * hidden"', "4096"),
}
"""Expectation, remedy and example by type of a key."""


def unexpected_value(value: object, kind: Any, where: str, path: Path) -> FormatError:
    """Return a ``FormatError`` for a value that does not match its type ``kind``."""
    expected, remedy, _ = _KINDS[_bare(kind)]
    shown = _describe(value)
    meta = _meta(kind)
    if _bare(kind) is Literal:
        allowed: tuple[str, ...] = get_args(kind)
        close = get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
        expected = f"one of {', '.join(allowed)}"
        remedy = f'write one of them in quotes: {where.rpartition(".")[2]} = "{(close or allowed)[0]}"'
    elif _bare(kind) is tuple and ... not in get_args(kind):
        count = len(get_args(get_args(kind)[0] if meta else kind))
        expected, remedy = f"a list of {count} numbers", f"write it as [{', '.join(['1.0'] * count)}]"
        if isinstance(value, list):
            shown = clipped(str(cast("list[object]", value)))
    elif meta and _converts(value, _bare(kind)):
        expected = meta.description or expected
    if unknown := _extra(kind, "unknown"):
        remedy += f"; {unknown} if unknown"
    hint = _extra(kind, "remedy") or remedy
    mark = ";" if _bare(kind) is Literal else ","
    return toml_error(path, where, f"expected {expected}{mark} got {shown}", hint)


def _bare(kind: Any) -> object:
    """Return the plain type (without annotations) under which :data:`_KINDS` describes a type."""
    bare: object = get_args(kind)[0] if _meta(kind) else kind
    return dict if _row_type(bare) else get_origin(bare) or bare


def _converts(value: object, kind: Any) -> bool:
    try:
        convert(value, kind)
    except ValidationError:
        return False
    return True


@cache
def _kinds(kind: type[Struct]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _meta(kind: Any) -> Meta | None:
    return next((argument for argument in get_args(kind) if isinstance(argument, Meta)), None)


def _extra(kind: Any, name: str) -> Any:
    meta = _meta(kind)
    return meta.extra.get(name) if meta and meta.extra else None


def toml_error(path: Path, where: str, message: str, hint: str) -> FormatError:
    """Return a ``FormatError`` about the key ``where``; ``hint`` is the remedy."""
    return FormatError(message, path=str(path), position=clipped(where), hint=hint)


def _describe(value: object) -> str:
    """Return a description of a value for error messages: its kind and, if short, its content."""
    kinds: dict[type, Literal["a table", "a list"]] = {dict: "a table", list: "a list"}
    if type(value) in kinds:
        return kinds[type(value)]
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return "a number beyond 64 bits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def check_source_keys(row: Mapping[str, object], where: str, known: Mapping[str, str], path: Path) -> None:
    """Raise ``FormatError`` for a figure whose source is not a key of the sources table."""
    for name, key in row.items():
        if name.endswith("source") and key not in known:
            hint = f"use one of the file's sources: {', '.join(sorted(known))}"
            raise toml_error(path, where + name, f"'{key}' is not a key of the sources table", hint)


def refuse_repeats(path: Path, name: str, keys: Iterable[tuple[object, ...]]) -> None:
    """Raise ``FormatError`` for the first row whose key equals the key of an earlier row."""
    seen: dict[tuple[object, ...], int] = {}
    for index, key in enumerate(keys):
        if key in seen:
            shown = " ".join(part for part in key if isinstance(part, str) and part)
            message = f"'{clipped(shown)}' is stated already in {name}[{seen[key]}]"
            raise toml_error(path, f"{name}[{index}]", message, "keep one of the two rows")
        seen[key] = index


def scalar(value: str | float) -> str:
    """Return a value as TOML text. JSON's escapes are valid in TOML, except that TOML also escapes DEL."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def inline_table(row: TomlRow) -> str:
    """Return a row of a device file as a TOML inline table, without empty optional texts and unknown
    energies.
    """
    pairs = list(asdict(row).items())
    omitted = {"energy_pj_per_flop", "energy_pj_per_byte"} if ("energy_source", "") in pairs else set[str]()
    shown = [(name, value) for name, value in pairs if value != "" and name not in omitted]
    return "{ " + ", ".join(f"{name} = {scalar(value)}" for name, value in shown) + " }"
