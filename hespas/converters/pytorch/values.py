"""Values of events as columns: numbers however they are spelled, rows of texts, parts of an exchange."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import numpy as np

from hespas.converters.pytorch.records import Number
from hespas.graph.columns import IntArray

__all__ = ["Rows", "differ", "integer", "integers"]

_ABSENT = -1
_Value = TypeVar("_Value", bound=int | str | bytes | None)


def integers(values: Sequence[Number]) -> IntArray:
    """A column of numbers, -1 where there is none."""
    for absent in (False, True):
        stated = [_ABSENT if value is None else value for value in values] if absent else values
        try:
            return np.frombuffer(array("q", cast("Sequence[int]", stated)), np.int64)
        except (TypeError, OverflowError):
            continue  # one is absent, or a text, or does not fit
    return np.array(list(map(integer, values)), np.int64)


def integer(value: Number) -> int:
    """A number however it is written, -1 where there is none."""
    if value is None:
        return _ABSENT
    try:
        whole = int(value)
    except (ValueError, OverflowError):
        return _ABSENT
    return whole if -(1 << 63) <= whole < 1 << 63 else _ABSENT


class Rows(dict[_Value, int]):
    """Rows of values; ``add`` makes one for a value that is new."""

    __slots__ = ("_add",)

    def __init__(self, add: Callable[[_Value], int]) -> None:
        super().__init__()
        self._add = add

    def __missing__(self, value: _Value) -> int:
        """The row of a new value."""
        row = self[value] = self._add(value)
        return row

    def of(self, values: Iterable[_Value]) -> list[int]:
        """The row of each value."""
        return list(map(self.__getitem__, values))


def differ(split: str | list[int] | None) -> bool:
    """Whether the parts of an exchange have several sizes; long lists are written cut, with dots."""
    if isinstance(split, str):
        split = [int(part) for part in split.strip("[] ").split(",") if part.strip().isdecimal()]
    return len(set(split or ())) > 1
