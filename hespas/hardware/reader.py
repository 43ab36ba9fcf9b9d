"""Strict reading of TOML tables: unknown keys are faults; a fault names file, key, expectation and remedy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isnan, nan
from pathlib import Path
from typing import Literal, TypeVar, cast

from hespas.files.streams import limits, read_document
from hespas.graph.errors import FormatError, clipped

__all__ = ["TableReader", "read_table"]

_Choice = TypeVar("_Choice", bound=str)

_MAX_INTEGER = 2**63 - 1
_LEAST, _MOST = 1e-60, 1e60
"""Real figures lie well within; beyond, products of them overflow."""
_MOST_PARTS = 64
_KEY_PART = re.compile(r"""(?:"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|[\w-]+)[ \t]*(\.?)[ \t]*""")
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_DIGITS = re.compile(r"[\d_]+")
_MOST_DIGITS = 4000
_BRACKET = re.compile(r"[][{}]")
_EXAMPLE = "`hespas hardware show H100-SXM` prints a whole file to start from"
_AS_TEXT = 'write it in quotes: "..."'
_AS_NUMBER = "write it without quotes and unit, as 989.4e12"
_AS_COUNT = "write it without quotes and unit, as 132"
_AS_LIST = "write it in brackets: [ ..., ... ]"
_AS_TABLE = "write it as [table] with a key per line, or as { key = value, ... }"


def read_table(path: Path, *, what: str = "a device file") -> TableReader:
    """The root table of a file that is ``what``. Raises ``FormatError`` if it is missing, no regular file,
    over 1 MiB, or not TOML.
    """
    shown = str(path)
    try:
        content = read_document(path, limits().device_bytes, what)
    except FormatError as error:
        hint = _EXAMPLE if error.position else "check the path; `hespas hardware list` names the devices"
        message = error.message if error.position else f"cannot be read: {error.message}"
        raise FormatError(message, path=shown, position=error.position, hint=hint) from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise FormatError(
            "not UTF-8",
            path=shown,
            position=f"line {line}, byte {error.start}",
            hint="save the file as UTF-8",
        ) from error
    _refuse_deep(text, shown)
    try:
        return TableReader(shown, "", tomllib.loads(text))
    except RecursionError as error:
        raise _too_deep(shown, _deepest(text)) from error
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise FormatError(
            f"not TOML: {_PLACE.sub('', str(error))}",
            path=shown,
            position=_place(str(error), text),
            hint='a line is key = value, with texts in quotes: name = "my device"',
        ) from error


def _place(told: str, text: str) -> str:
    """Where the library says that it stopped; for a number, that it does not place, the first long one."""
    place = _PLACE.search(told)
    if place and place.group(1):
        return f"line {place.group(1)}, column {place.group(2)}"
    at = (
        len(text)
        if place
        else next((m.start() for m in _DIGITS.finditer(text) if len(m[0]) > _MOST_DIGITS), 0)
    )
    return f"line {text.count(chr(10), 0, at) + 1}"


def _deepest(text: str) -> str:
    """The first line at which more brackets are open than any file has."""
    depth = 0
    for number, line in enumerate(text.split("\n"), start=1):
        for bracket in _BRACKET.findall(line):
            depth += 1 if bracket in "[{" else -1
            if depth > _MOST_PARTS:
                return f"line {number}"
    return "line 1"


def _refuse_deep(text: str, shown: str) -> None:
    """Refuse keys of many parts, for which the library takes hours. O(length): no part is looked at twice."""
    parts, end = 0, -1
    for found in _KEY_PART.finditer(text):
        parts = parts + 1 if found.start() == end else 1
        if parts > _MOST_PARTS:
            raise _too_deep(shown, f"line {text.count(chr(10), 0, end) + 1}")
        end = found.end() if found.group(1) else -1


def _too_deep(shown: str, position: str) -> FormatError:
    return FormatError(
        "tables nested too deeply",
        path=shown,
        position=position,
        hint=f"no key has more than three parts; {_EXAMPLE}",
    )


@dataclass(slots=True)
class TableReader:
    """A table with the keys asked for so far; ``close`` objects to the ones nobody asked for."""

    path: str
    key: str
    values: dict[str, object]
    _claimed: list[str] = field(default_factory=list[str])

    def text(self, name: str, *, default: str | None = None, empty: bool = False) -> str:
        """A string, not empty unless allowed."""
        value = self._claim(name, default is not None, '"..."')
        if value is None:
            return default or ""
        if not isinstance(value, str):
            raise self.fault(name, f"expected a string, got {_describe(value)}", hint=_AS_TEXT)
        if not value and not empty:
            raise self.fault(name, "expected a string that is not empty", hint=_AS_TEXT)
        return value

    def choice(self, name: str, allowed: Sequence[_Choice]) -> _Choice:
        """One of the given strings."""
        value = self._claim(name, False, f'"{allowed[0]}"')
        for option in allowed:
            if value == option:
                return option
        hint = f'write one of them in quotes: {name} = "{_closest(value, allowed)}"'
        raise self.fault(name, f"expected one of {', '.join(allowed)}; got {_describe(value)}", hint=hint)

    def real(
        self, name: str, *, default: float | None = None, unknown: bool = False, zero: bool = False
    ) -> float:
        """A positive number; ``unknown`` also takes nan, ``zero`` also 0."""
        hint = f"{_AS_NUMBER}{'; nan where it is not known' if unknown else ''}"
        value = self._claim(name, default is not None, "nan" if unknown else "989.4e12")
        if value is None:
            return nan if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, f"expected a number, got {_describe(value)}", hint=hint)
        number = inf if isinstance(value, int) and abs(value) > _MAX_INTEGER else float(value)
        if isnan(number) and unknown:
            return number
        if not (_LEAST <= number <= _MOST or (zero and number == 0)):
            kind = "a number that is 0 or more" if zero else "a positive number"
            kind += f" (up to {_MOST:g})" if number > _MOST else ""
            expected = f"expected {kind}{' or nan' if unknown else ''}, got {_describe(value)}"
            raise self.fault(name, expected, hint=hint)
        return number

    def count(self, name: str, *, default: int | None = None, unknown: bool = False) -> int:
        """A positive whole number; ``unknown`` also takes -1."""
        hint = f"{_AS_COUNT}{'; -1 where it is not known' if unknown else ''}"
        value = self._claim(name, default is not None, "-1" if unknown else "132")
        if value is None:
            return -1 if default is None else default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(name, f"expected a whole number, got {_describe(value)}", hint=hint)
        if (value < 1 and not (unknown and value == -1)) or value > _MAX_INTEGER:
            note = " or -1 (unknown)" if unknown else ""
            expected = f"expected a positive whole number{note}, got {_describe(value)}"
            raise self.fault(name, expected, hint=hint)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        value = self._claim(name, True, "true")
        if value is None:
            return default
        if not isinstance(value, bool):
            expected = f"expected true or false, got {_describe(value)}"
            raise self.fault(name, expected, hint="write true or false without quotes")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent means empty."""
        items = self._items(name, optional=True)
        for index, item in enumerate(items):
            if not isinstance(item, str) or not item:
                expected = f"expected a string, got {_describe(item)}"
                raise self.fault(f"{name}[{index}]", expected, hint=_AS_TEXT)
        return tuple(cast("list[str]", items))

    def reals(self, name: str, length: int, *, hint: str | None = None) -> tuple[float, ...]:
        """A list of ``length`` numbers, or for one a bare number; any sign, nan and inf too."""
        value = self._claim(name, False, f"[{', '.join(['1.0'] * length)}]" if length > 1 else "1.0")
        items: object = [value] if length == 1 else value
        return self._numbers(name, items, length, hint)

    def real_rows(self, name: str, length: int) -> list[tuple[float, ...]]:
        """A list of lists of ``length`` numbers."""
        rows = self._items(name, optional=False)
        return [self._numbers(f"{name}[{index}]", row, length) for index, row in enumerate(rows)]

    def _numbers(self, name: str, value: object, length: int, hint: str | None = None) -> tuple[float, ...]:
        shown = _describe(value)
        items = cast("list[object]", value) if isinstance(value, list) else []
        numbers = [float(item) for item in items if isinstance(item, int | float) and _is_number(item)]
        if len(items) != length or len(numbers) != length:
            wanted = "a number" if length == 1 else f"a list of {length} numbers"
            usual = _AS_NUMBER if length == 1 else f"write it as [{', '.join(['1.0'] * length)}]"
            raise self.fault(name, f"expected {wanted}, got {shown}", hint=hint or usual)
        return tuple(numbers)

    def table(self, name: str, *, optional: bool = False) -> TableReader | None:
        """A sub-table; None only where ``optional`` and absent."""
        value = self._claim(name, optional, "{ ... }")
        return None if value is None else self._nested(name, value)

    def tables(self, name: str, *, optional: bool = False) -> list[TableReader]:
        """A list of tables."""
        items = self._items(name, optional=optional)
        return [self._nested(f"{name}[{index}]", item) for index, item in enumerate(items)]

    def names(self) -> list[str]:
        """Every key of the table, in file order."""
        return list(self.values)

    def close(self) -> None:
        """Raise ``FormatError`` for the first key that nothing asked for."""
        for name in self.values:
            if name not in self._claimed:
                from difflib import get_close_matches

                close = get_close_matches(name, self._claimed, n=1)
                hint = (
                    f"did you mean '{close[0]}'?" if close else f"known keys are {', '.join(self._claimed)}"
                )
                raise self.fault(name, "unknown key", hint=hint)

    def fault(self, name: str, message: str, *, hint: str) -> FormatError:
        """The error to raise about a key of this table; ``hint`` says what to write instead."""
        return FormatError(message, path=self.path, position=clipped(self._where(name)), hint=hint)

    def _where(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key and name else self.key or name

    def _claim(self, name: str, optional: bool, example: str) -> object:
        """The value of a key; ``example`` is what a remedy shows where it is missing."""
        self._claimed.append(name)
        if name in self.values:
            return self.values[name]
        if optional:
            return None
        raise self.fault(name, "missing key", hint=f"add {name} = {example}; {_EXAMPLE}")

    def _items(self, name: str, *, optional: bool) -> list[object]:
        value = self._claim(name, optional, "[ ... ]")
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(name, f"expected a list, got {_describe(value)}", hint=_AS_LIST)
        return cast("list[object]", value)

    def _nested(self, name: str, value: object) -> TableReader:
        if not isinstance(value, dict):
            raise self.fault(name, f"expected a table, got {_describe(value)}", hint=_AS_TABLE)
        return TableReader(self.path, self._where(name), cast("dict[str, object]", value))


def _closest(value: object, allowed: Sequence[_Choice]) -> _Choice:
    """The choice that a misspelt one probably means; the first where nothing is like it."""
    from difflib import get_close_matches

    close = get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
    return next((option for option in allowed if option in close), allowed[0])


def _is_number(value: float) -> bool:
    """Neither a truth value nor an integer beyond 64 bits."""
    return not isinstance(value, bool) and not (isinstance(value, int) and abs(value) > _MAX_INTEGER)


def _describe(value: object) -> str:
    """A value as a message shows it: what it is and, if short, what it says."""
    kinds: dict[type, Literal["a table", "a list"]] = {dict: "a table", list: "a list"}
    if type(value) in kinds:
        return kinds[type(value)]
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return "a number beyond 64 bits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
