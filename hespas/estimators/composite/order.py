"""Which estimators are asked of which kind of operation, and in what order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from hespas.graph.errors import FormatError, UsageError
from hespas.hardware.reader import read_table
from hespas.operations import KINDS

__all__ = ["Order", "read_order", "split_order"]

_MOST = 64
"""Estimators that one composite may name; they are numbered in a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """``default`` holds for every kind that ``kinds`` does not name; spellings as on a command line."""

    default: tuple[str, ...]
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def of(self, kind: str) -> tuple[str, ...]:
        """Who is asked of a kind, the first first."""
        return self.kinds.get(kind, self.default)

    def spellings(self) -> tuple[str, ...]:
        """Every estimator that is asked of anything, once."""
        every = (*self.kinds.values(), self.default)
        return tuple(dict.fromkeys(spelling for order in every for spelling in order))


def split_order(text: str) -> tuple[str, ...]:
    """``a+b:x=1+c`` as its parts. Raises ``UsageError`` for an empty or repeated one."""
    return _checked(tuple(part.strip() for part in text.split("+")), "order")


def _checked(order: tuple[str, ...], where: str) -> tuple[str, ...]:
    if not order or not all(order):
        raise UsageError(f"composite: {where} names no estimator", hint="write database+calibrated+roofline")
    if len(set(order)) < len(order):
        raise UsageError(f"composite: {where} names an estimator twice: {'+'.join(order)}")
    if len(order) > _MOST:
        raise UsageError(f"composite: {where} names more than {_MOST} estimators")
    if any(part.partition(":")[0] == "composite" for part in order):
        raise UsageError(f"composite: {where} names the composite itself")
    return order


def read_order(path: str) -> Order:
    """An order from a TOML file: a list ``order``, and a table ``kinds`` of lists by kind of operation.

    Raises ``FormatError`` naming the key that is wrong.
    """
    root = _table(Path(path))
    unknown = sorted(set(root) - {"order", "kinds"})
    if unknown:
        raise FormatError(f"unknown key {unknown[0]!r}", path=path, hint="known are order and kinds")
    stated = root.get("kinds", {})
    if not isinstance(stated, dict):
        raise FormatError("expected a table of lists by kind", path=path, position="kinds")
    kinds = cast("dict[str, object]", stated)
    for name in kinds:
        if name not in KINDS:
            raise FormatError(
                f"no such kind of operation: {name!r}",
                path=path,
                position="kinds",
                hint=f"known are {', '.join(KINDS)}",
            )
    return Order(
        default=_list(root.get("order"), path, "order"),
        kinds={name: _list(value, path, f"kinds.{name}") for name, value in kinds.items()},
    )


def _table(path: Path) -> Mapping[str, object]:
    return read_table(path, what="an order of estimators").values


def _list(value: object, path: str, where: str) -> tuple[str, ...]:
    stated = cast("list[object]", value) if isinstance(value, list) else []
    items = tuple(item for item in stated if isinstance(item, str))
    if not isinstance(value, list) or len(items) != len(stated):
        raise FormatError("expected a list of estimators", path=path, position=where)
    try:
        return _checked(items, where)
    except UsageError as error:
        raise FormatError(error.message, path=path, position=where, hint=error.hint) from error
