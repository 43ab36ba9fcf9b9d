"""What a conversion has to tell, gathered while the graph is built and reported once, each kind with its
count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hespas.converters.hlo.module import Computation
from hespas.converters.hlo.program import Program
from hespas.graph import Diagnostics, Severity

__all__ = ["Findings"]


@dataclass(slots=True)
class _Kind:
    severity: Severity
    message: str
    first: tuple[Computation, int]
    names: list[str] = field(default_factory=list[str])
    count: int = 0


_KEPT_NAMES = 10
_SHOWN_NAME = 120


@dataclass(slots=True)
class Findings:
    """Findings by code and subject (an opcode, a custom call target): one diagnostic each, with all
    counts.
    """

    program: Program
    _kinds: dict[tuple[str, str], _Kind] = field(default_factory=dict[tuple[str, str], _Kind])

    def add(
        self,
        code: str,
        subject: str,
        place: tuple[Computation, int],
        message: str,
        severity: Severity = Severity.WARNING,
    ) -> None:
        """Record one instruction at ``place``."""
        kind = self._kinds.get((code, subject))
        if kind is None:
            kind = self._kinds[code, subject] = _Kind(severity, message, place)
        kind.count += 1
        if len(kind.names) < _KEPT_NAMES:
            kind.names.append(f"%{place[0].names[place[1]][:_SHOWN_NAME]}")

    def report(self, diagnostics: Diagnostics) -> None:
        """Hand everything over. O(kinds)."""
        path = self.program.module.source.path
        for (code, subject), kind in self._kinds.items():
            listed = ", ".join(dict.fromkeys(kind.names))
            more = f" and {kind.count - len(kind.names)} more" if kind.count > len(kind.names) else ""
            where = f" ({listed}{more})" if kind.count > 1 else ""
            prefix = f"{subject}: " if subject else ""
            diagnostics.add(
                code,
                kind.severity,
                self.program.location(*kind.first),
                f"{prefix}{kind.message}{where}",
                path=path,
                count=kind.count,
            )
