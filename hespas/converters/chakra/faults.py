"""Faults of a trace: errors in a strict reader, diagnostics in a lenient one, with the checker's codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.chakra.columns import EtColumns
from hespas.converters.chakra.spans import Bools
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError

__all__ = ["Faults"]


@dataclass(frozen=True, slots=True)
class Faults:
    """Where the faults of one file go. ``rank`` is None for faults of a whole directory."""

    path: str
    rank: int | None
    diagnostics: Diagnostics
    lenient: bool

    def error(
        self, code: str, message: str, *, position: str = "", hint: str | None = None, node: int | None = None
    ) -> None:
        """One error: raises :class:`FormatError` unless the reader is lenient."""
        if not self.lenient:
            raise FormatError(f"{code}: {message}", path=self.path, position=position or None, hint=hint)
        self.diagnostics.add(
            code, Severity.ERROR, position, message, path=self.path, rank=self.rank, node=node
        )

    def nodes(self, code: str, columns: EtColumns, bad: Bools, message: str, hint: str | None = None) -> None:
        """An error of all nodes marked in ``bad``; the first few are named with id and byte offset."""
        rows = np.flatnonzero(bad)
        if not len(rows):
            return
        for row in rows[: self.diagnostics.keep].tolist():
            node = int(columns.id[row])
            position = f"node {node} at byte {int(columns.frame_byte[row])}"
            others = f" ({len(rows)} nodes in all)" if not self.lenient and len(rows) > 1 else ""
            self.error(code, message + others, position=position, hint=hint, node=node)
        rest = len(rows) - self.diagnostics.keep
        self.diagnostics.add(
            code, Severity.ERROR, self.path, message, path=self.path, rank=self.rank, count=max(0, rest)
        )

    def lint(self, code: str, message: str, count: int) -> None:
        """A warning about ``count`` nodes or attributes."""
        self.diagnostics.add(
            code, Severity.WARNING, self.path, message, path=self.path, rank=self.rank, count=count
        )
