"""Tables of things that are loaded by name: ours, and those that other packages register.

Rows are strings, ``module:attribute``, so a table imports nothing until a row is wanted. Other packages'
rows come from an entry point group, which is looked at only when no row of ours will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module

from hespas.graph.errors import UsageError

__all__ = ["PluginTable", "registered"]


def registered(group: str) -> Iterable[tuple[str, str]]:
    """(name, target) of each entry point of a group in the installed packages."""
    from importlib.metadata import entry_points

    return [(point.name, point.value) for point in entry_points(group=group)]


@dataclass(frozen=True, slots=True)
class PluginTable:
    """``what`` the rows are (``format``), the entry point ``group`` of others, and our ``builtin`` rows."""

    what: str
    group: str
    builtin: Mapping[str, str]

    def plugins(self) -> dict[str, str]:
        """Rows of other packages. Raises ``UsageError`` for a taken name, naming both owners."""
        found: dict[str, str] = {}
        for name, target in registered(self.group):
            taken = self.builtin.get(name) or found.get(name)
            if taken:
                raise UsageError(
                    f"{self.what} {name!r} is registered twice: by {taken} and by {target}",
                    hint="uninstall one of the two packages",
                )
            found[name] = target
        return found

    def names(self) -> tuple[str, ...]:
        """All names, ours first, in a fixed order."""
        return (*self.builtin, *sorted(self.plugins()))

    def load(self, name: str) -> object:
        """Import one row. Raises ``UsageError`` for an unknown name."""
        target = self.builtin.get(name) or self.plugins().get(name)
        if target is None:
            raise UsageError(f"unknown {self.what} {name!r}", hint=f"one of: {', '.join(self.names())}")
        module, _, attribute = target.partition(":")
        return getattr(import_module(module), attribute)
