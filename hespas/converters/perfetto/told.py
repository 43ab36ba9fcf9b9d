"""What annotations tell of chosen events, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.perfetto.events import EventColumns
from hespas.graph import OpClass, StringTableBuilder
from hespas.graph.columns import FloatArray, IntArray, SmallIntArray

__all__ = ["Told"]

_CLASSES = {member.name.lower(): int(member) for member in OpClass}
_LARGEST = float((1 << 31) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """``rows`` says which of ``arguments`` each event has."""

    arguments: tuple[dict[str, str | float], ...]
    rows: IntArray
    strings: StringTableBuilder

    @classmethod
    def of(cls, columns: EventColumns, event: IntArray) -> Told:
        """What was told of the given events."""
        rows = np.array(columns.argument, np.int64)[event]
        return cls(tuple(dict(told) for told in columns.arguments), rows, columns.strings)

    def text(self, key: str) -> SmallIntArray:
        """String rows, 0 where nothing is told."""
        texts = [told.get(key, "") for told in self.arguments]
        rows = [self.strings.add(text) if isinstance(text, str) else 0 for text in texts]
        return np.array(rows, np.int32)[self.rows]

    def exact(self, key: str, otherwise: FloatArray) -> FloatArray:
        """Numbers, ``otherwise`` where none is told."""
        values = [told.get(key) for told in self.arguments]
        is_told = np.array([isinstance(value, float) for value in values], np.bool_)[self.rows]
        numbers = np.array([value if isinstance(value, float) else 0.0 for value in values], np.float64)
        return np.where(is_told, numbers[self.rows], otherwise)

    def run(self) -> SmallIntArray:
        """Numbers of runs, -1 where none is told."""
        numbers = np.nan_to_num(self.exact("run", np.full(len(self.rows), -1.0)), nan=-1.0)
        return np.clip(numbers, -1.0, _LARGEST).astype(np.int32)

    def op_class(self) -> NDArray[np.int8]:
        """Codes of operation classes, 0 for unknown ones."""
        codes = [_CLASSES.get(str(told.get("op_class", "")), 0) for told in self.arguments]
        return np.array(codes, np.int8)[self.rows]
