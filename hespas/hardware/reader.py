"""Strict reading of TOML tables: unknown keys are faults; a fault names file, key path and expectation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isnan, nan
from pathlib import Path
from typing import Literal, TypeVar, cast

from hespas.graph.errors import FormatError

__all__ = ["TableReader", "read_table"]

_Choice = TypeVar("_Choice", bound=str)

_MAX_FILE_BYTES = 1 << 20
_MAX_INTEGER = 2**63 - 1
_LEAST, _MOST = 1e-60, 1e60
"""Real figures lie well within; beyond, products of them overflow."""
_DEEP = re.compile(r"(?<![\w\"'-])(?:[\w\"'-]+[ \t]*\.[ \t]*){64}")


def read_table(path: Path, *, what: str = "a device file") -> TableReader:
    """The root table of a file that is ``what``. Raises ``FormatError`` if it is missing, over 1 MiB, or not
    TOML.
    """
    try:
        with path.open("rb") as stream:
            content = stream.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror}", path=str(path)) from error
    if len(content) > _MAX_FILE_BYTES:
        raise FormatError(f"more than 1 MiB is not {what}", path=str(path))
    try:
        text = content.decode("utf-8")
        if _DEEP.search(text):  # the library takes hours for such keys
            raise FormatError("tables nested too deeply", path=str(path))
        return TableReader(str(path), "", tomllib.loads(text))
    except UnicodeDecodeError as error:
        raise FormatError("not UTF-8", path=str(path), position=f"byte {error.start}") from error
    except RecursionError as error:
        raise FormatError("tables nested too deeply", path=str(path)) from error
    except ValueError as error:  # TOMLDecodeError, and integers of thousands of digits
        raise FormatError(f"not TOML: {error}", path=str(path)) from error


@dataclass(slots=True)
class TableReader:
    """A table with the keys asked for so far; ``close`` objects to the ones nobody asked for."""

    path: str
    key: str
    values: dict[str, object]
    _claimed: list[str] = field(default_factory=list[str])

    def text(self, name: str, *, default: str | None = None, empty: bool = False) -> str:
        """A string, not empty unless allowed."""
        value = self._claim(name, default is not None)
        if value is None:
            return default or ""
        if not isinstance(value, str):
            raise self.fault(name, f"expected a string, got {_describe(value)}")
        if not value and not empty:
            raise self.fault(name, "expected a string that is not empty")
        return value

    def choice(self, name: str, allowed: Sequence[_Choice]) -> _Choice:
        """One of the given strings."""
        value = self._claim(name, False)
        for option in allowed:
            if value == option:
                return option
        raise self.fault(name, f"expected one of {', '.join(allowed)}; got {_describe(value)}")

    def real(
        self, name: str, *, default: float | None = None, unknown: bool = False, zero: bool = False
    ) -> float:
        """A positive number; ``unknown`` also takes nan, ``zero`` also 0."""
        value = self._claim(name, default is not None)
        if value is None:
            return nan if default is None else default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(name, f"expected a number, got {_describe(value)}")
        number = inf if isinstance(value, int) and abs(value) > _MAX_INTEGER else float(value)
        if isnan(number) and unknown:
            return number
        if not (_LEAST <= number <= _MOST or (zero and number == 0)):
            kind = "a number that is 0 or more" if zero else "a positive number"
            kind += f" (up to {_MOST:g})" if number > _MOST else ""
            raise self.fault(name, f"expected {kind}{' or nan' if unknown else ''}, got {_describe(value)}")
        return number

    def count(self, name: str, *, default: int | None = None, unknown: bool = False) -> int:
        """A positive whole number; ``unknown`` also takes -1."""
        value = self._claim(name, default is not None)
        if value is None:
            return -1 if default is None else default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(name, f"expected a whole number, got {_describe(value)}")
        if (value < 1 and not (unknown and value == -1)) or value > _MAX_INTEGER:
            note = " or -1 (unknown)" if unknown else ""
            raise self.fault(name, f"expected a positive whole number{note}, got {_describe(value)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """true or false."""
        value = self._claim(name, True)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, f"expected true or false, got {_describe(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; absent means empty."""
        items = self._items(name, optional=True)
        for index, item in enumerate(items):
            if not isinstance(item, str) or not item:
                raise self.fault(f"{name}[{index}]", f"expected a string, got {_describe(item)}")
        return tuple(cast("list[str]", items))

    def reals(self, name: str, length: int, *, hint: str | None = None) -> tuple[float, ...]:
        """A list of ``length`` numbers, or for one a bare number; any sign, nan and inf too."""
        value = self._claim(name, False)
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
            raise self.fault(name, f"expected {wanted}, got {shown}", hint=hint)
        return tuple(numbers)

    def table(self, name: str, *, optional: bool = False) -> TableReader | None:
        """A sub-table; None only where ``optional`` and absent."""
        value = self._claim(name, optional)
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

    def fault(self, name: str, message: str, *, hint: str | None = None) -> FormatError:
        """The error to raise about a key of this table."""
        return FormatError(message, path=self.path, position=self._where(name), hint=hint)

    def _where(self, name: str) -> str:
        return f"{self.key}.{name}" if self.key and name else self.key or name

    def _claim(self, name: str, optional: bool) -> object:
        self._claimed.append(name)
        if name in self.values:
            return self.values[name]
        if optional:
            return None
        raise self.fault(name, "missing key")

    def _items(self, name: str, *, optional: bool) -> list[object]:
        value = self._claim(name, optional)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(name, f"expected a list, got {_describe(value)}")
        return cast("list[object]", value)

    def _nested(self, name: str, value: object) -> TableReader:
        if not isinstance(value, dict):
            raise self.fault(name, f"expected a table, got {_describe(value)}")
        return TableReader(self.path, self._where(name), cast("dict[str, object]", value))


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
