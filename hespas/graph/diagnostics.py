"""What a conversion has to tell besides its result: nothing is lost or guessed silently.

A reader, pass or writer adds to a :class:`Diagnostics`; repeated findings of one code are counted and
only the first few are kept with their location, so a million unknown ops cost a handful of objects.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

__all__ = ["Diagnostic", "Diagnostics", "Findings", "Renamed", "Severity"]


class Severity(Enum):
    """How much a finding matters: an ``ERROR`` makes a checked file invalid."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding. ``code`` is stable (``stablehlo.unknown-op``, ``ET006``); ``location`` is for people."""

    code: str
    severity: Severity
    location: str
    message: str
    path: str = ""
    rank: int | None = None
    node: int | None = None


@dataclass(slots=True)
class Diagnostics:
    """Collects findings. ``keep`` bounds the findings kept per code; the counts are always exact."""

    keep: int = 20
    _kept: list[Diagnostic] = field(default_factory=list[Diagnostic])
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
        """Take ``count`` findings in. Collectors that say them otherwise, or elsewhere, override this."""
        key = (diagnostic.code, diagnostic.severity)
        seen = self._counts.get(key, 0)
        self._counts[key] = seen + count
        if seen < self.keep:
            self._kept.append(diagnostic)

    def info(self, code: str, location: str, message: str, *, path: str = "", count: int = 1) -> None:
        """Record something worth knowing that changes no figure."""
        self.add(code, Severity.INFO, location, message, path=path, count=count)

    def warning(self, code: str, location: str, message: str, *, path: str = "", count: int = 1) -> None:
        """Record something that was assumed, approximated or left out."""
        self.add(code, Severity.WARNING, location, message, path=path, count=count)

    def error(self, code: str, location: str, message: str, *, path: str = "", count: int = 1) -> None:
        """Record a fault of the input that a lenient reader got past."""
        self.add(code, Severity.ERROR, location, message, path=path, count=count)

    def about(self, location: str, prefix: str) -> Findings:
        """For what there is to tell of one place; codes begin with ``prefix`` and a dot."""
        return Findings(self, location, prefix)

    def extend(self, other: Diagnostics) -> None:
        """Take over everything another collector holds."""
        for diagnostic in other._kept:
            key = (diagnostic.code, diagnostic.severity)
            if sum((kept.code, kept.severity) == key for kept in self._kept) < self.keep:
                self._kept.append(diagnostic)
        for key, count in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + count

    def as_warnings(self, notes: Mapping[str, str]) -> Diagnostics:
        """Return the findings, those of the codes in ``notes`` as warnings that end in the note."""
        raised = Diagnostics(self.keep)
        for kept in self._kept:
            if kept.severity is Severity.INFO and kept.code in notes:
                text = f"{kept.message}; {notes[kept.code]}"
                kept = replace(kept, severity=Severity.WARNING, message=text)  # noqa: PLW2901
            raised._kept.append(kept)
        for (code, severity), count in self._counts.items():
            is_raised = severity is Severity.INFO and code in notes
            key = (code, Severity.WARNING if is_raised else severity)
            raised._counts[key] = raised._counts.get(key, 0) + count
        return raised

    def counts(self) -> dict[str, int]:
        """Exact number of findings per code, in order of first appearance."""
        totals: dict[str, int] = {}
        for (code, _), count in self._counts.items():
            totals[code] = totals.get(code, 0) + count
        return totals

    def count(self, severity: Severity) -> int:
        """Exact number of findings of one severity."""
        return sum(n for (_, found), n in self._counts.items() if found is severity)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self._kept)

    def __len__(self) -> int:
        return sum(self._counts.values())


class Renamed(Diagnostics):
    """Hands findings on to another collector too, those of ``path`` told of ``name``: users know no
    temporary file or copy. Findings whose code is in ``without`` are no news there.
    """

    __slots__ = ("_into", "_name", "_path", "_without")

    def __init__(self, into: Diagnostics, path: str, name: str, without: Collection[str] = ()) -> None:
        super().__init__(into.keep)
        self._into, self._path, self._name, self._without = into, path, name, without

    def record(self, diagnostic: Diagnostic, count: int) -> None:
        """Hand findings on under the name that users know."""
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
    """Findings of one place that a prefix of their codes has in common: see :meth:`Diagnostics.about`."""

    diagnostics: Diagnostics
    location: str
    prefix: str

    def info(self, code: str, message: str, count: int = 1) -> None:
        """As :meth:`Diagnostics.info`."""
        self.diagnostics.info(f"{self.prefix}.{code}", self.location, message, count=count)

    def warning(self, code: str, message: str, count: int = 1) -> None:
        """As :meth:`Diagnostics.warning`."""
        self.diagnostics.warning(f"{self.prefix}.{code}", self.location, message, count=count)

    def error(self, code: str, message: str, count: int = 1) -> None:
        """As :meth:`Diagnostics.error`."""
        self.diagnostics.error(f"{self.prefix}.{code}", self.location, message, count=count)
