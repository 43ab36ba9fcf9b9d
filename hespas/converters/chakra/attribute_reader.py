"""Moving attribute values of a trace into columns, remembering which attributes are accounted for."""

from __future__ import annotations

from math import nan

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.columns import EtColumns
from hespas.converters.chakra.contract import LINTED, TYPE_TO_KIND
from hespas.converters.chakra.contraction_texts import parse_contractions
from hespas.converters.chakra.facts import AttributeFacts, Integers
from hespas.converters.chakra.spans import Bools
from hespas.graph import ContractionTable, NodeKind, StringTableBuilder
from hespas.graph.columns import FloatArray, SmallIntArray, constant

__all__ = ["EXACT", "AttributeReader"]

EXACT = 1 << 53
"""Up to here floats hold every integer."""

_LARGEST = (1 << 62) - 1
"""Beyond this a float that is cast to an integer may not fit."""


class AttributeReader:
    """Moves attribute values into columns and remembers which rows are accounted for."""

    def __init__(self, columns: EtColumns, facts: AttributeFacts) -> None:
        self.columns = columns
        self.facts = facts
        self.kind = _kinds(columns.type)
        self.modelled: Bools = np.zeros(len(columns.attrs), np.bool_)
        self.refused: dict[str, int] = {}
        """How many values of an attribute mean nothing to the graph: negative, too large, of a wrong type."""

    def refuse(self, name: str, count: int) -> None:
        """Count values that stay attributes because they cannot be meant."""
        if count:
            self.refused[name] = self.refused.get(name, 0) + count

    def find(self, name: str, low: int = 0, nodes: Bools | None = None) -> Integers:
        """An integer attribute (of the nodes marked) from ``low`` on that a float holds exactly; others are
        refused.
        """
        found = self.facts.integers(name)
        fits = (found.value >= low) & (found.value <= _LARGEST)
        good = fits & (np.where(fits, found.value, 0).astype(np.float64).astype(np.int64) == found.value)
        return self._within(name, found, good if nodes is None else good & nodes[found.node], nodes)

    def _within(self, name: str, found: Integers, good: Bools, nodes: Bools | None = None) -> Integers:
        """The good ones; all others of the nodes marked are refused."""
        good_ones = found.where(good)
        rows = self.facts.first_rows(name, integral=name in LINTED)
        stated = len(rows) if nodes is None else int(nodes[self.facts.owner[rows]].sum())
        self.refuse(name, stated - len(good_ones.node))
        return good_ones

    def take(self, found: Integers, default: float = nan) -> FloatArray:
        """The values as a float column; they count as accounted for."""
        if not len(found.node):
            return constant(default, len(self.columns))
        column = np.full(len(self.columns), default)
        column[found.node] = found.value
        self.modelled[found.row] = True
        return column

    def integers(self, name: str, nodes: Bools, low: int, high: int) -> Integers:
        """Values of the nodes marked, within bounds; they count as accounted for, others are refused."""
        found = self.facts.integers(name)
        good = nodes[found.node] & (found.value >= low) & (found.value <= high)
        found = self._within(name, found, good, nodes)
        self.modelled[found.row] = True
        return found

    def texts(self, name: str, strings: StringTableBuilder, nodes: Bools | None = None) -> SmallIntArray:
        """A string attribute (of the nodes marked) as string rows, 0 where absent; empty values stay where
        they are.
        """
        found = self.facts.texts(name)
        if nodes is not None:
            found = found.where(nodes[found.node])
        texts, place = self.facts.distinct(found)
        rows = np.array([strings.add(text) for text in texts] or [0], np.int32)
        column = np.zeros(len(self.columns), np.int32)
        column[found.node] = rows[place]
        self.modelled[found.row[rows[place] > 0]] = True
        return column

    def codes(self, name: str, table: dict[str, int], default: NDArray[np.integer]) -> NDArray[np.integer]:
        """A string attribute by what its values mean; unknown values stay where they are, and so do those
        that equal the default.
        """
        found = self.facts.texts(name)
        texts, place = self.facts.distinct(found)
        meaning = np.array([table.get(text, -1) for text in texts] or [-1])[place]
        good = (meaning >= 0) & (meaning != default[found.node])
        column = default.copy()
        column[found.node[good]] = meaning[good]
        self.modelled[found.row[good]] = True
        unknown = np.array([text != "" and text not in table for text in texts] or [False])[place]
        self.refuse(name, int(unknown.sum()) + self._no_texts(name))
        return column

    def _no_texts(self, name: str) -> int:
        """Values of a string attribute that are none."""
        return len(self.facts.first_rows(name)) - len(self.facts.texts(name).row)

    def contractions(self) -> ContractionTable:
        """The matrix products and convolutions that nodes state; other texts stay where they are."""
        found = self.facts.texts("contractions")
        self.refuse("contractions", self._no_texts("contractions"))
        if not len(found.node):
            return ContractionTable.empty()
        table, foreign = parse_contractions(found.node, *self.facts.distinct(found))
        self.refuse("contractions", len(foreign))
        self.modelled[np.delete(found.row, foreign)] = True
        return table


def _kinds(types: NDArray[np.int32]) -> NDArray[np.uint8]:
    table = np.full(max(TYPE_TO_KIND) + 2, NodeKind.INVALID, np.uint8)
    for number, kind in TYPE_TO_KIND.items():
        table[number] = kind
    known = (types >= 0) & (types <= max(TYPE_TO_KIND))
    return table[np.where(known, types, len(table) - 1)]
