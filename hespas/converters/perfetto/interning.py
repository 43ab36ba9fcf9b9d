"""Texts that are written once and referred to by number."""

from __future__ import annotations

from dataclasses import dataclass, field

from hespas.converters.perfetto.wire import field_bytes
from hespas.schemas.perfetto.tables import InternedDataField, InternedField

__all__ = ["Interning"]


@dataclass(slots=True)
class Interning:
    """Numbers texts by kind; :meth:`taken` gives those that are new since it was last called."""

    _numbers: dict[tuple[InternedDataField, str], int] = field(
        default_factory=dict[tuple[InternedDataField, str], int]
    )
    _new: list[bytes] = field(default_factory=list[bytes])

    def number(self, kind: InternedDataField, text: str) -> int:
        """The id of a text, from 1."""
        known = self._numbers.get((kind, text))
        if known is None:
            known = self._numbers[kind, text] = len(self._numbers) + 1
            entry = field_bytes(InternedField.IID, known) + field_bytes(InternedField.NAME, text.encode())
            self._new.append(field_bytes(kind, entry))
        return known

    def taken(self) -> bytes:
        """The message ``InternedData`` of new texts; empty where there is none."""
        data = b"".join(self._new)
        self._new.clear()
        return data
