"""Tables of objects that are loaded by name, from this package and from plug-ins.

Rows are strings, ``module:attribute``, so a table imports nothing until a row is used. Rows of other packages
come from an entry point group, which is read only if no built-in row has the name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from hespas.graph.errors import HespasError, InvariantError, UnsupportedError, UsageError, clipped

__all__ = [
    "PluginTable",
    "attribute_of",
    "collect_plugin_errors",
    "lazy_names",
    "registered",
    "report_plugin_error",
]

_Result = TypeVar("_Result")

_PLUGIN_ERRORS: ContextVar[dict[tuple[str, str], str] | None] = ContextVar("_PLUGIN_ERRORS", default=None)


def attribute_of(target: str) -> Any:
    """Import and return the object that ``module:attribute`` names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def lazy_names(package: str, **modules: tuple[str, ...]) -> Callable[[str], Any]:
    """Return a function for use as ``__getattr__`` of a package, which imports a name on its first use:
    ``modules`` maps modules of the package to their names.
    """
    module_of = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{module_of[name]}"), name)

    return find


def registered(group: str) -> Iterable[tuple[str, str]]:
    """Return (name, target) of each entry point of a group in the installed packages."""
    from importlib.metadata import entry_points

    return [(point.name, point.value) for point in entry_points(group=group)]


@contextmanager
def collect_plugin_errors() -> Generator[Mapping[tuple[str, str], str]]:
    """Collect the messages of plug-ins or user rules that fail within the context: one message per kind and
    name.

    Plug-ins are used in places without a collector of diagnostics. The code that prints messages reads them
    from the result.
    """
    messages: dict[tuple[str, str], str] = {}
    before = _PLUGIN_ERRORS.set(messages)
    try:
        yield messages
    finally:
        _PLUGIN_ERRORS.reset(before)


def report_plugin_error(what: str, name: str, sentence: str) -> None:
    """Report that a plug-in, or a user rule, fails; one message per name is stored."""
    messages = _PLUGIN_ERRORS.get()
    if messages is not None:
        messages[what, name] = sentence


@dataclass(frozen=True, slots=True)
class PluginTable:
    """Table of objects that are loaded by name.

    ``what`` is the name of their kind in messages (``format``). ``group`` is the entry point group in which
    other packages register plug-ins. ``builtin`` maps each name of this package to its import target.
    """

    what: str
    group: str
    builtin: Mapping[str, str]

    def plugins(self) -> dict[str, str]:
        """Return the plug-ins of this table that other packages register: name and import target. A plug-in
        whose name exists already is reported and skipped.
        """
        targets: dict[str, str] = {}
        for name, target in registered(self.group):
            taken = self.builtin.get(name) or targets.get(name)
            if taken:
                twice = f"registered twice: by {taken}, which is used, and by {target}"
                report_plugin_error(self.what, name, f"{self.what} {name!r} is {twice}")
            else:
                targets[name] = target
        return targets

    def names(self) -> tuple[str, ...]:
        """Return all names: built-in names, then sorted names of plug-ins."""
        return (*self.builtin, *sorted(self.plugins()))

    def load(self, name: str) -> object:
        """Import the object with a name.

        Raises ``UsageError`` for an unknown name, ``UnsupportedError`` for a plug-in that cannot be imported,
        ``InvariantError`` for a built-in name whose target does not exist.
        """
        builtin = self.builtin.get(name)
        if builtin:
            try:
                return attribute_of(builtin)
            except (ImportError, AttributeError) as error:
                raise self.unusable(name, f"{type(error).__name__}: {clipped(str(error))}") from error
        target = self.plugins().get(name)
        if target is None:
            raise UsageError(f"unknown {self.what} {name!r}", hint=f"use one of: {', '.join(self.names())}")
        return self.guarded(name, lambda: attribute_of(target))

    def guarded(self, name: str, use: Callable[[], _Result]) -> _Result:
        """Return the result of ``use``, which calls the object ``name`` of this table.

        If a plug-in raises any exception other than ``HespasError``, it is reported and ``UnsupportedError``
        is raised. Exceptions of built-in objects are not changed.
        """
        if name in self.builtin:
            return use()
        try:
            return use()
        except HespasError:
            raise
        except (Exception, SystemExit) as error:  # a plug-in may raise anything
            raise self.unusable(name, f"{type(error).__name__}: {clipped(str(error))}") from error

    def unusable(self, name: str, why: str) -> UnsupportedError | InvariantError:
        """Return the error about a row that fails; a failing plug-in is also reported."""
        if name in self.builtin:
            return InvariantError(f"{self.what} {name!r} ({self.builtin[name]}) does not work: {why}")
        target = dict(registered(self.group)).get(name, "")
        message = f"{self.what} {name!r} of another package ({target}) does not work: {why}"
        report_plugin_error(self.what, name, message)
        return UnsupportedError(message, hint="update that package, or uninstall it")
