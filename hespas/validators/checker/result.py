"""What a check says: violations of coded rules, the inputs they were found in, and both as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hespas._version import __version__
from hespas.files.documents import document_bytes
from hespas.graph import Diagnostic, Diagnostics, Severity
from hespas.graph.errors import HespasError, exit_code

__all__ = ["SCHEMA_ID", "CheckResult", "CheckedInput", "Findings", "Violation", "check_json"]


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule. ``rank`` and ``node`` (the format's own id) are None where it has no single place."""

    code: str
    severity: Severity
    path: str
    rank: int | None
    node: int | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedInput:
    """One input: ``complete`` says whether all ranks of the job were there to be checked together."""

    path: str
    format: str
    num_ranks: int
    num_classes: int
    num_nodes: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The outcome. ``counts`` is exact per code; ``violations`` holds the first findings of each code only.

    ``unreadable`` are the errors of inputs that could not be read at all (their violation is listed too).
    """

    profile: str | None
    inputs: tuple[CheckedInput, ...]
    violations: tuple[Violation, ...]
    counts: Mapping[str, int]
    diagnostics: tuple[Diagnostic, ...]
    unreadable: tuple[HespasError, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether every input was read and no violation is an error."""
        errors = any(violation.severity is Severity.ERROR for violation in self.violations)
        return not errors and not self.unreadable

    @property
    def exit_code(self) -> int:
        """0 valid, 1 not valid, 3 or 4 where an input could not be read."""
        if self.unreadable:
            return max(map(exit_code, self.unreadable))
        return 0 if self.valid else 1


@dataclass(slots=True)
class Findings:
    """Violations of one input: the first ``keep`` of each code and severity, exact counts, no place twice.

    A rule over hub values and the reader may both see a fault; the place (code, rank, node) tells.
    """

    keep: int
    violations: list[Violation] = field(default_factory=list[Violation])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    notes: Diagnostics = field(default_factory=Diagnostics)
    _kept: dict[tuple[str, Severity], int] = field(default_factory=dict[tuple[str, Severity], int])
    _places: set[tuple[str, int | None, int]] = field(default_factory=set[tuple[str, int | None, int]])

    def add(self, violation: Violation, count: int = 1) -> None:
        """Record ``count`` findings, of which ``violation`` describes one."""
        if violation.node is not None and count == 1:
            place = (violation.code, violation.rank, violation.node)
            if place in self._places:
                return
            self._places.add(place)
        self.counts[violation.code] = self.counts.get(violation.code, 0) + count
        key = (violation.code, violation.severity)
        kept = self._kept.get(key, 0)
        if kept < self.keep:
            self._kept[key] = kept + 1
            self.violations.append(violation)

    def has(self, code: str) -> bool:
        """Whether a code was found, at any severity."""
        return code in self.counts


SCHEMA_ID = "hespas.check/1"
"""What a document of this version says in ``schema``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Document:
    schema: str
    hespas_version: str
    profile: str | None
    valid: bool
    inputs: tuple[CheckedInput, ...]
    counts: dict[str, int]
    violations: tuple[Violation, ...]
    diagnostics: tuple[Diagnostic, ...]


def check_json(result: CheckResult) -> bytes:
    """The document as indented UTF-8 JSON that ends in a newline."""
    document = _Document(
        schema=SCHEMA_ID,
        hespas_version=__version__,
        profile=result.profile,
        valid=result.valid,
        inputs=result.inputs,
        counts=dict(result.counts),
        violations=result.violations,
        diagnostics=result.diagnostics,
    )
    return document_bytes(document)
