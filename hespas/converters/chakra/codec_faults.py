"""Faults of a file as a whole: raised, or recorded where the reader is lenient or recovers a cut file."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hespas.converters.chakra.frames import CutOffError
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError

__all__ = ["CodecFaults"]

_CODED = re.compile(r"(ET\d{3}): (.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CodecFaults:
    """Where the faults of one file go; with ``recover`` a cut is a warning."""

    path: str
    diagnostics: Diagnostics
    lenient: bool
    recover: bool = False

    def report(self, code: str, message: str, position: str, hint: str) -> None:
        """An error of the file as a whole."""
        if not self.lenient:
            raise FormatError(f"{code}: {message}", path=self.path, position=position, hint=hint)
        self.diagnostics.add(code, Severity.ERROR, position, message, path=self.path)

    def is_recovered(self, error: FormatError) -> bool:
        """Whether the user asked to go on behind this error."""
        return self.recover and isinstance(error, CutOffError)

    def framing(self, error: FormatError, nodes: int) -> None:
        """A fault of the wire format; a reader that is lenient or recovers keeps what is whole before it."""
        recovers = self.is_recovered(error)
        if not (self.lenient or recovers):
            if isinstance(error, CutOffError) and nodes:
                error.hint = f"{error.hint}; --recover keeps the {nodes:,} nodes before the cut"
            raise error
        coded = _CODED.fullmatch(error.message)
        code, text = (coded[1], coded[2]) if coded else ("ET001", error.message)
        message = f"{text}; the {nodes} nodes before it were kept" if nodes else text
        severity = Severity.WARNING if recovers else Severity.ERROR
        self.diagnostics.add(code, severity, error.position or "", message, path=self.path)
