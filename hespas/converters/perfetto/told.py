"""What annotations tell of chosen events, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.perfetto.events import EventColumns
from hespas.graph import OpClass, StringTableBuilder
from hespas.graph.columns import BoolArray, FloatArray, IntArray, SmallIntArray

__all__ = ["Told"]

_CLASSES = {member.name.lower(): int(member) for member in OpClass}
_LARGEST = float((1 << 31) - 1)
_TOO_LARGE = 1e300
_LEAST_SHOWN_NS = 2.0


def _agrees(told_ns: FloatArray, shown_ns: FloatArray) -> BoolArray:
    """Whether times are shown as they are told, in whole ns."""
    agrees: BoolArray = np.abs(told_ns - shown_ns) < _LEAST_SHOWN_NS
    return agrees


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
        """Numbers, ``otherwise`` where none is told that may be one."""
        told = self._numbers(key)
        return np.where(np.abs(told) < _TOO_LARGE, told, otherwise)

    def start_ns(self, shown_ns: FloatArray) -> FloatArray:
        """What is told, where it agrees with what is shown: an edited trace does not contradict itself."""
        told_ns = self._numbers("start_ns")
        return np.where(_agrees(told_ns, shown_ns), told_ns, shown_ns)

    def duration_ns(self, shown_ns: FloatArray) -> FloatArray:
        """The same of durations; one that is unknown or negative is shown as none."""
        told_ns = self._numbers("duration_ns", nothing=np.inf)
        agrees = _agrees(np.maximum(np.nan_to_num(told_ns, posinf=np.inf), 0.0), shown_ns)
        return np.where(agrees & ~np.isinf(told_ns), told_ns, shown_ns)

    def _numbers(self, key: str, nothing: float = np.nan) -> FloatArray:
        values = [told.get(key) for told in self.arguments]
        numbers = [value if isinstance(value, float) else nothing for value in values]
        return np.array(numbers, np.float64)[self.rows]

    def run(self) -> SmallIntArray:
        """Numbers of runs, -1 where none is told."""
        numbers = np.nan_to_num(self.exact("run", np.full(len(self.rows), -1.0)), nan=-1.0)
        return np.clip(numbers, -1.0, _LARGEST).astype(np.int32)

    def op_class(self) -> NDArray[np.int8]:
        """Codes of operation classes, 0 for unknown ones."""
        codes = [_CLASSES.get(str(told.get("op_class", "")), 0) for told in self.arguments]
        return np.array(codes, np.int8)[self.rows]
