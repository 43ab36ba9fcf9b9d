"""The texts of a trace while it is read."""

from __future__ import annotations

from hespas.graph import StringTable

__all__ = ["Texts"]


class Texts:
    """Interns texts as a profile's string table does, and tells them again; row 0 is the empty one."""

    __slots__ = ("_rows", "_texts")

    def __init__(self) -> None:
        """Hold the empty text."""
        self._texts: list[str] = [""]
        self._rows: dict[str, int] = {"": 0}

    def add(self, text: str) -> int:
        """The row of ``text``, new or old."""
        row = self._rows.setdefault(text, len(self._texts))
        if row == len(self._texts):
            self._texts.append(text)
        return row

    def __getitem__(self, row: int) -> str:
        return self._texts[row]

    def build(self) -> StringTable:
        """The finished table."""
        return StringTable.from_strings(self._texts)
