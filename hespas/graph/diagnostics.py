"""Diagnostics of a conversion: everything that was lost, guessed or assumed.

A reader, pass or writer adds findings to a :class:`Diagnostics`. Repeated findings of one code are counted,
and only the first few are stored with their location, so a million unknown operations cost a handful of
objects. Stored findings are also written to the logger ``hespas``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

__all__ = ["Diagnostic", "Diagnostics", "Findings", "Renamed", "Severity"]


class Severity(Enum):
    """Severity of a diagnostic: information, warning or error. An ``ERROR`` makes a checked file invalid."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. ``code`` is stable (``stablehlo.unknown-op``, ``ET006``); ``location`` is for readers."""

    code: str
    severity: Severity
    location: str
    message: str
    path: str = ""
    rank: int | None = None
    node: int | None = None


def _log(diagnostic: Diagnostic) -> None:
    """Write a finding to the logger ``hespas``, for programs that use :mod:`logging`.

    Without such a program the module is not imported, which would delay the start of commands.
    """
    logging = sys.modules.get("logging")
    if logging is None:
        return
    logger = logging.getLogger("hespas")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())  # otherwise warnings are printed
    level = getattr(logging, diagnostic.severity.name)
    if logger.isEnabledFor(level):
        text = f"{diagnostic.location}: {diagnostic.message} [{diagnostic.code}]"
        # names in files may have characters that log files cannot encode
        logger.log(level, "%s", text.encode("utf-8", "backslashreplace").decode("utf-8"))


@dataclass(slots=True)
class Diagnostics:
    """Collector of findings. ``keep`` limits the findings stored per code; counts are always exact."""

    keep: int = 20
    _stored: list[Diagnostic] = field(default_factory=list[Diagnostic])
    _counts: dict[tuple[str, Severity], int] = field(default_factory=dict[tuple[str, Severity], int])

    def add(
        self,
        code: str,
        severity: Severity,
        location: str,
        message: str,
        *,
        path: str = "",
        rank: int | None = None,
        node: int | None = None,
        count: int = 1,
    ) -> None:
        """Record ``count`` findings of ``code``, of which this message describes one."""
        if count > 0:
            self.record(Diagnostic(code, severity, location, message, path, rank, node), count)

    def record(self, diagnostic: Diagnostic, count: int) -> None:
        """Add a finding and its count. Subclasses that change or forward findings override this method."""
        key = (diagnostic.code, diagnostic.severity)
        seen = self._counts.get(key, 0)
        self._counts[key] = seen + count
        if seen < self.keep:
            self._stored.append(diagnostic)
            _log(diagnostic)

    def info(self, code: str, location: str, message: str, *, path: str = "", count: int = 1) -> None:
        """Record a finding that changes no result."""
        self.add(code, Severity.INFO, location, message, path=path, count=count)

    def warning(self, code: str, location: str, message: str, *, path: str = "", count: int = 1) -> None:
        """Record an assumption, an approximation or an omission."""
        self.add(code, Severity.WARNING, location, message, path=path, count=count)

    def error(self, code: str, location: str, message: str, *, path: str = "", count: int = 1) -> None:
        """Record a fault of the input that a lenient reader skipped."""
        self.add(code, Severity.ERROR, location, message, path=path, count=count)

    def about(self, location: str, prefix: str) -> Findings:
        """Return a collector of findings at one location, with codes that begin with ``prefix`` and a dot."""
        return Findings(self, location, prefix)

    def extend(self, other: Diagnostics) -> None:
        """Add all findings of another collector."""
        for diagnostic in other._stored:
            key = (diagnostic.code, diagnostic.severity)
            if sum((entry.code, entry.severity) == key for entry in self._stored) < self.keep:
                self._stored.append(diagnostic)
        for key, count in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + count

    def as_warnings(self, notes: Mapping[str, str]) -> Diagnostics:
        """Return the findings, with notes about some codes added.

        An ``INFO`` finding whose code is in ``notes`` becomes a warning, and its message ends with that note.
        """
        raised = Diagnostics(self.keep)
        for entry in self._stored:
            if entry.severity is Severity.INFO and entry.code in notes:
                text = f"{entry.message}; {notes[entry.code]}"
                raised._stored.append(replace(entry, severity=Severity.WARNING, message=text))
            else:
                raised._stored.append(entry)
        for (code, severity), count in self._counts.items():
            is_raised = severity is Severity.INFO and code in notes
            key = (code, Severity.WARNING if is_raised else severity)
            raised._counts[key] = raised._counts.get(key, 0) + count
        return raised

    def counts(self) -> dict[str, int]:
        """Return the exact number of findings per code, in order of first appearance."""
        totals: dict[str, int] = {}
        for (code, _), count in self._counts.items():
            totals[code] = totals.get(code, 0) + count
        return totals

    def count(self, severity: Severity) -> int:
        """Return the exact number of findings of one severity."""
        return sum(n for (_, entry), n in self._counts.items() if entry is severity)

    def tallies(self) -> list[tuple[Diagnostic, int]]:
        """Return each stored finding with a count. Recording all pairs with :meth:`record` gives an equal
        collector.

        The number of findings that were only counted and not stored is added to the last stored finding of
        the same code.
        """
        stored = Counter((entry.code, entry.severity) for entry in self._stored)
        left = {key: count - stored[key] for key, count in self._counts.items()}
        counted = [(entry, 1 + left.pop((entry.code, entry.severity), 0)) for entry in reversed(self._stored)]
        return counted[::-1]

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self._stored)

    def __len__(self) -> int:
        return sum(self._counts.values())


class Renamed(Diagnostics):
    """Collector that forwards findings to another collector, with ``path`` replaced by ``name``.

    It is used to hide temporary files and copies from users. Findings with a code in ``without`` are dropped.
    """

    __slots__ = ("_into", "_name", "_path", "_without")

    def __init__(self, into: Diagnostics, path: str, name: str, without: Collection[str] = ()) -> None:
        super().__init__(into.keep)
        self._into, self._path, self._name, self._without = into, path, name, without

    def record(self, diagnostic: Diagnostic, count: int) -> None:
        """Record and forward a finding about a temporary file under the name of the file that the user
        gave.
        """
        if diagnostic.code in self._without:
            return
        location, path = (
            text.replace(self._path, self._name) for text in (diagnostic.location, diagnostic.path)
        )
        renamed = replace(diagnostic, location=location, path=path)
        super().record(renamed, count)
        self._into.record(renamed, count)


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings at one location whose codes share a prefix: see :meth:`Diagnostics.about`."""

    diagnostics: Diagnostics
    location: str
    prefix: str

    def info(self, code: str, message: str, count: int = 1) -> None:
        """Record a finding as :meth:`Diagnostics.info` does."""
        self.diagnostics.info(f"{self.prefix}.{code}", self.location, message, count=count)

    def warning(self, code: str, message: str, count: int = 1) -> None:
        """Record a finding as :meth:`Diagnostics.warning` does."""
        self.diagnostics.warning(f"{self.prefix}.{code}", self.location, message, count=count)

    def error(self, code: str, message: str, count: int = 1) -> None:
        """Record a finding as :meth:`Diagnostics.error` does."""
        self.diagnostics.error(f"{self.prefix}.{code}", self.location, message, count=count)
