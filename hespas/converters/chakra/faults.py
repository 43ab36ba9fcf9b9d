"""Faults of a trace: errors in a strict reader, diagnostics in a lenient one, with the checker's codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.chakra.columns import EtColumns
from hespas.converters.chakra.spans import Bools
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError

__all__ = ["Faults"]

_REMEDIES = {
    "ET007": "a simulator would wait for ever; drop one dependency of the cycle",
    "ET009": "give the node one of the types of the Chakra schema, or remove it",
    "ET010": "write each attribute once per node, with the type of the Chakra schema",
    "ET014": "write this rank's number, or rename the file to the rank it is of",
    "ET018": "write group ids as decimal numbers from 1 on",
    "ET019": "list each rank once, and every rank that uses the group",
    "ET022": "copy the whole set again: one file per rank, from NAME.0.et on without gaps",
}
"""What helps against a fault, where its place has nothing better to say."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Where the faults of one file go. ``rank`` is None for faults of a whole directory."""

    path: str
    rank: int | None
    diagnostics: Diagnostics
    lenient: bool
    recover: bool = False

    def error(
        self, code: str, message: str, *, position: str = "", hint: str | None = None, node: int | None = None
    ) -> None:
        """One error: raises :class:`FormatError` unless the reader is lenient."""
        if not self.lenient:
            remedy = hint or _REMEDIES.get(code)
            raise FormatError(f"{code}: {message}", path=self.path, position=position or None, hint=remedy)
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

    def repaired(
        self, code: str, columns: EtColumns, bad: Bools, message: str, *, repair: str, hint: str
    ) -> None:
        """An error of the nodes marked, or where the user asked for it (``--recover``) a warning of what was
        made of them.
        """
        if self.recover and not self.lenient:
            self.lint(code, f"{message}: {repair}", int(bad.sum()))
        else:
            self.nodes(code, columns, bad, message, f"{hint}; --recover reads it without")

    def lint(self, code: str, message: str, count: int) -> None:
        """A warning about ``count`` nodes or attributes."""
        self.diagnostics.add(
            code, Severity.WARNING, self.path, message, path=self.path, rank=self.rank, count=count
        )
