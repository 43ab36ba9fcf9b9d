"""MLIR locations as two strings: where in the source, and what the framework calls the operation.

JAX nests them: ``loc("jit(step)/mlp/dot_general"("model.py":12:8))``. The outermost name is the framework's
name, the first file position the source. Equal locations are decoded once.
"""

from __future__ import annotations

import re

from hespas.converters.stablehlo.mlir import Location
from hespas.graph.columns import StringTableBuilder

__all__ = ["Locations"]

_NAME = r'loc\((?:callsite\()?(?:fused(?:<[^>]*>)?\[)?"((?:[^"\\]|\\.)*)"(?!:\d)'
_FILE = r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)'
_UNKNOWN_FILE = "-"


class Locations:
    """Interns locations. ``rows[i]`` is (source string row, framework string row); row 0 is nothing known.

    ``path`` stands for the input itself, whose own lines are locations where the program has no others;
    ``""`` where the input has no lines.
    """

    def __init__(self, strings: StringTableBuilder, path: str, *, enabled: bool) -> None:
        self.rows: list[tuple[int, int]] = [(0, 0)]
        self._strings = strings
        self._path = path
        self.enabled = enabled
        self._known: dict[Location, int] = {}
        self._names = [""]
        self._within: dict[tuple[int, int], int] = {}

    def row(self, location: Location) -> int:
        """The row of a location, 0 where it says nothing. Ask only where they are ``enabled``."""
        row = self._known.get(location)
        if row is None:
            source, name = self.describe(location)
            row = self._known[location] = self._add(self._strings.add(source), name)
        return row

    def _add(self, source_row: int, name: str) -> int:
        pair = (source_row, self._strings.add(name))
        if pair == (0, 0):
            return 0
        self.rows.append(pair)
        self._names.append(name)
        return len(self.rows) - 1

    def place(self, row: int) -> str:
        """What a location says, for an error; ``""`` where it says nothing."""
        strings = self._strings.build()
        source, name = (strings[part] for part in self.rows[row])
        line = source.removeprefix(f"{self._path}:")
        return " ".join(filter(None, (f"line {line}" if line != source else source, name)))

    def within(self, call: int, rows: list[int]) -> list[int]:
        """The rows of a function's operations as the call at row ``call`` runs them.

        Frameworks name the operations of a function from its own start (``select_n``); XLA puts the name of
        the call before it where it inlines one, so that profiles say ``jit(step)/jit(_where)/select_n``.
        """
        if not call or not self._names[call]:
            return rows
        known = self._within
        return [known.get((call, row)) or self._prefixed(call, row) for row in rows]

    def _prefixed(self, call: int, row: int) -> int:
        outer, inner = self._names[call], self._names[row]
        source = self.rows[row][0] or self.rows[call][0]
        if not inner:
            inner = outer
        elif inner.partition("/")[0] != outer.partition("/")[0]:
            inner = f"{outer}/{inner}"
        found = self._within[call, row] = self._add(source, inner)
        return found

    def describe(self, location: Location) -> tuple[str, str]:
        """Source position and framework name of a location, each ``""`` where absent."""
        text = str(location)
        name, file = re.match(_NAME, text), re.search(_FILE, text)
        source = ""
        name_of_file = file[1] if file is not None else ""
        if name_of_file == _UNKNOWN_FILE:
            name_of_file = self._path
        if file is not None and name_of_file:
            source = f"{name_of_file}:{file[2]}:{file[3]}"
        return source, name[1] if name else ""
