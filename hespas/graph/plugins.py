"""Tables of things that are loaded by name: ours, and those that other packages register.

Rows are strings, ``module:attribute``, so a table imports nothing until a row is wanted. Other packages'
rows come from an entry point group, which is looked at only when no row of ours will do.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, UsageError, clipped

__all__ = ["PluginTable", "attribute_of", "registered", "set_aside", "tell_aside"]

_Result = TypeVar("_Result")

_SET_ASIDE: ContextVar[dict[tuple[str, str], str] | None] = ContextVar("_SET_ASIDE", default=None)


def attribute_of(target: str) -> Any:
    """What ``module:attribute`` names; the module is imported."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def registered(group: str) -> Iterable[tuple[str, str]]:
    """(name, target) of each entry point of a group in the installed packages."""
    from importlib.metadata import entry_points

    return [(point.name, point.value) for point in entry_points(group=group)]


@contextmanager
def set_aside() -> Generator[Mapping[tuple[str, str], str]]:
    """A sentence for each plug-in, or rule of the user's, that does not work within, by what it is and its
    name. Tables are asked in places that have no findings to add to; who shows messages asks here.
    """
    found: dict[tuple[str, str], str] = {}
    before = _SET_ASIDE.set(found)
    try:
        yield found
    finally:
        _SET_ASIDE.reset(before)


def tell_aside(what: str, name: str, sentence: str) -> None:
    """Say a sentence about a plug-in, or a rule of the user's, that does not do as it should: once a name."""
    told = _SET_ASIDE.get()
    if told is not None:
        told[what, name] = sentence


@dataclass(frozen=True, slots=True)
class PluginTable:
    """``what`` the rows are (``format``), the entry point ``group`` of others, and our ``builtin`` rows."""

    what: str
    group: str
    builtin: Mapping[str, str]

    def plugins(self) -> dict[str, str]:
        """Rows of other packages. One of a taken name is set aside: it must not stop others."""
        found: dict[str, str] = {}
        for name, target in registered(self.group):
            taken = self.builtin.get(name) or found.get(name)
            if taken:
                twice = f"registered twice: by {taken}, which is used, and by {target}"
                tell_aside(self.what, name, f"{self.what} {name!r} is {twice}")
            else:
                found[name] = target
        return found

    def names(self) -> tuple[str, ...]:
        """All names, ours first, in a fixed order."""
        return (*self.builtin, *sorted(self.plugins()))

    def load(self, name: str) -> object:
        """Import one row. Raises ``UsageError`` for an unknown name, ``UnsupportedError`` for a plug-in that
        cannot be imported, ``InvariantError`` for a row of ours that names nothing.
        """
        builtin = self.builtin.get(name)
        if builtin:
            try:
                return attribute_of(builtin)
            except (ImportError, AttributeError) as error:
                raise self.unusable(name, f"{type(error).__name__}: {clipped(str(error))}") from error
        target = self.plugins().get(name)
        if target is None:
            raise UsageError(f"unknown {self.what} {name!r}", hint=f"one of: {', '.join(self.names())}")
        return self.guarded(name, lambda: attribute_of(target))

    def guarded(self, name: str, use: Callable[[], _Result]) -> _Result:
        """What ``use`` of a row gives. Raises ``UnsupportedError`` for whatever a plug-in raises, and sets it
        aside; errors of our own rows, and those a plug-in means, pass.
        """
        if name in self.builtin:
            return use()
        try:
            return use()
        except HespasError:
            raise
        except (Exception, SystemExit) as error:  # other people's code may raise anything
            raise self.unusable(name, f"{type(error).__name__}: {clipped(str(error))}") from error

    def unusable(self, name: str, why: str) -> UnsupportedError | InvariantError:
        """The error about a row that does not work: a plug-in, which is set aside, or one of ours."""
        if name in self.builtin:
            return InvariantError(f"{self.what} {name!r} ({self.builtin[name]}) does not work: {why}")
        target = dict(registered(self.group)).get(name, "")
        message = f"{self.what} {name!r} of another package ({target}) does not work: {why}"
        tell_aside(self.what, name, message)
        return UnsupportedError(message, hint="update that package, or uninstall it")
