"""What a node is and costs, interned: equal operations on equal types share one row, and one evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hespas.converters.costs import Cost, CustomFacts, Facts
from hespas.converters.costs import Operation as CostInput
from hespas.converters.stablehlo.names import has_rule, price
from hespas.converters.stablehlo.types import TypeInfo
from hespas.graph import DYNAMIC

__all__ = ["Key", "Signature", "Signatures"]


class Signature(NamedTuple):
    """One row: the operation's full name, rows of the type table, cost of one execution.

    ``is_bounded``: extents are upper bounds; ``is_dynamic``: some are unknown. ``needs_report``: figures
    are unknown or bounds. ``label`` names nodes: the operation without its dialect, or a custom call's
    target.
    """

    op_name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    cost: Cost
    is_bounded: bool
    is_dynamic: bool
    has_rule: bool
    needs_report: bool
    label: str


Key = tuple[str, tuple[TypeInfo, ...], tuple[TypeInfo, ...], tuple[int, ...], Facts]
"""Operation name, types of operands and of results, places of repeated operands, facts."""


class _Known(dict[Key, int]):
    """Rows by key; an unknown key is priced when it is looked up."""

    def __init__(self, price: Callable[[Key], int]) -> None:
        super().__init__()
        self._price = price

    def __missing__(self, key: Key) -> int:
        self[key] = row = self._price(key)
        return row


class Signatures:
    """The table of signatures of one program: ``known[key]`` is a row of ``rows``."""

    def __init__(self) -> None:
        self.rows: list[Signature] = []
        self.known = _Known(self._add)

    def plain(self, name: str, operands: tuple[TypeInfo, ...], results: tuple[TypeInfo, ...]) -> int:
        """The row of an operation whose cost its name and types give."""
        return self.known[name, operands, results, (), None]

    def _add(self, key: Key) -> int:
        name, operands, results, repeated, facts = key
        described = CostInput(
            tuple(tensor for info in operands for tensor in info.tensors),
            tuple(tensor for info in results for tensor in info.tensors),
            facts,
            repeated,
        )
        label = facts.target if isinstance(facts, CustomFacts) else ""
        return self.priced(name, operands, results, price(name, described), label)

    def priced(
        self,
        name: str,
        operands: tuple[TypeInfo, ...],
        results: tuple[TypeInfo, ...],
        cost: Cost,
        label: str = "",
    ) -> int:
        """A row with a cost of its own."""
        infos = (*operands, *results)
        is_bounded = any(info.is_bounded for info in infos)
        self.rows.append(
            Signature(
                name,
                tuple(row for info in operands for row in info.rows),
                tuple(row for info in results for row in info.rows),
                cost,
                is_bounded,
                any(DYNAMIC in tensor.shape for info in infos for tensor in info.tensors),
                has_rule(name),
                is_bounded or not cost.is_known,
                label or name.rpartition(".")[2],
            )
        )
        return len(self.rows) - 1
