"""Results of a reader for an input, cached while that input is tested.

Commands, conversions and checks each read an input again. A reader that looked at the same options would do
the same again: that says nothing new, and is most of the time that an input takes.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hespas.converters import ReadOptions, Value, load_format
from hespas.converters.registry import BUILTIN
from hespas.graph import Diagnostics
from hespas.graph.errors import HespasError, InvariantError

__all__ = ["kept_readings"]

_OPTIONS = tuple(each.name for each in fields(ReadOptions))


class _Noted(ReadOptions):
    """Options that record which of them are read."""

    __slots__ = ("looked_at",)
    looked_at: dict[str, object]

    def __init__(self, **options: Any) -> None:
        object.__setattr__(self, "looked_at", {})
        super().__init__(**options)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in _OPTIONS:
            object.__getattribute__(self, "looked_at")[name] = value
        return value


@dataclass(frozen=True, slots=True)
class _Reading:
    """Result of a reader: the options that it read, findings, and the value or error."""

    options: dict[str, object]
    findings: Diagnostics
    made: Value | HespasError

    def is_for(self, options: ReadOptions) -> bool:
        return all(getattr(options, name) == value for name, value in self.options.items())

    def again(self, found: Diagnostics) -> Value:
        """The same once more."""
        found.extend(self.findings)
        if isinstance(self.made, HespasError):
            raise self.made
        return self.made


@contextmanager
def kept_readings(name: str, source: Path) -> Generator[None]:
    """Within, a built-in format reads ``source`` once for each set of values of the options that its reader
    looks at. Readers get no progress to report.
    """
    form = load_format(name)
    read = form.read
    if read is None:
        raise TypeError(f"{name} has a reader")
    kept: list[_Reading] = []

    def once(path: Path, options: ReadOptions, found: Diagnostics) -> Value:
        if path != source:
            return read(path, options, found)
        known = next((each for each in kept if each.is_for(options)), None)
        if known is None:
            noted = _Noted(**{key: getattr(options, key) for key in _OPTIONS if key != "progress"})
            findings = Diagnostics(found.keep)
            made: Value | HespasError
            try:
                made = read(path, noted, findings)
            except InvariantError:
                raise
            except HespasError as error:
                made = error
            looked_at = {key: value for key, value in noted.looked_at.items() if key != "progress"}
            known = _Reading(looked_at, findings, made)
            kept.append(known)
        return known.again(found)

    module, _, attribute = BUILTIN[name].partition(":")
    place = import_module(module)
    setattr(place, attribute, replace(form, read=once))
    try:
        yield
    finally:
        setattr(place, attribute, form)
