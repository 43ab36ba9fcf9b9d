"""The texts of an export: a table by number, of which a profile needs some."""

from __future__ import annotations

import numpy as np

from hespas.converters.gpu_trace.trace import listed
from hespas.files.sqlite import MISSING, Database
from hespas.graph import StringTableBuilder
from hespas.graph.columns import IntArray

__all__ = ["Strings"]


class Strings:
    """Table ``StringIds``. ``builder`` takes the texts that are asked for."""

    def __init__(self, database: Database, builder: StringTableBuilder) -> None:
        """Read the table; it may be missing."""
        self.builder = builder
        table = database.read("StringIds", ("id",), ("value",))
        order = np.argsort(table.integers["id"], kind="stable")
        self._ids = table.integers["id"][order]
        self._places = table.texts["value"][order]
        self._distinct = table.distinct

    def text(self, number: int) -> str:
        """One text, "" for a number that is not there."""
        at = int(np.searchsorted(self._ids, number))
        if number == MISSING or at >= len(self._ids) or self._ids[at] != number or self._places[at] < 0:
            return ""
        return self._distinct[int(self._places[at])].decode("utf-8", "replace")

    def rows(self, numbers: IntArray) -> IntArray:
        """The rows of texts by number in ``builder``, 0 for those that are not there."""
        distinct, codes = np.unique(numbers, return_inverse=True)
        rows = [self.builder.add(self.text(number)) for number in listed(distinct)]
        return np.array(rows, np.int64)[codes] if rows else np.zeros(0, np.int64)
