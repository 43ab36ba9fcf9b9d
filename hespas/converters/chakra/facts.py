"""Attribute values by name: from rows of a trace to (nodes, values), whatever integer type was used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hespas.converters.chakra.columns import AttributeColumns, ByteRows, EtColumns
from hespas.converters.chakra.contract import ATTRIBUTES, INTEGER_FIELDS, LINTED
from hespas.converters.chakra.wire import Bools, Longs, Window, copy_spans
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError
from hespas.schemas.chakra.tables import AttributeField

__all__ = ["AttributeFacts", "Faults", "Integers", "Texts", "check_types", "is_canonical"]

_IS_INTEGER = np.isin(np.arange(33), [int(field) for field in INTEGER_FIELDS])
_UNSIGNED = (AttributeField.UINT64, AttributeField.FIXED64)


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """An integer attribute: ``value`` of ``node``, stated by attribute row ``row``; nodes ascend."""

    node: Longs
    value: Longs
    row: Longs

    def where(self, mask: Bools) -> Integers:
        """Some of them."""
        return Integers(self.node[mask], self.value[mask], self.row[mask])


@dataclass(frozen=True, slots=True, eq=False)
class Texts:
    """A string attribute: ``payload`` row of ``node``, stated by attribute row ``row``; nodes ascend."""

    node: Longs
    payload: Longs
    row: Longs

    def where(self, mask: Bools) -> Texts:
        """Some of them."""
        return Texts(self.node[mask], self.payload[mask], self.row[mask])


@dataclass(frozen=True, slots=True, eq=False)
class AttributeFacts:
    """The attributes of a trace by name; of several of one name on a node the first counts."""

    attrs: AttributeColumns
    owner: Longs

    @classmethod
    def of(cls, attrs: AttributeColumns) -> AttributeFacts:
        """Facts over all rows."""
        return cls(attrs, attrs.owner)

    def rows(self, name: str) -> Longs:
        """All rows of one name."""
        if name not in self.attrs.keys:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.attrs.key == self.attrs.keys.index(name))

    def _first(self, rows: Longs) -> Longs:
        """Only the first row of each node."""
        owner = self.owner[rows]
        first = np.ones(len(rows), np.bool_)
        first[1:] = owner[1:] != owner[:-1]
        return rows[first]

    def first_rows(self, name: str, *, integral: bool = False) -> Longs:
        """The rows of one name that count, of any type or (``integral``) of an integer type."""
        rows = self._first(self.rows(name))
        return rows[_IS_INTEGER[self.attrs.field[rows]]] if integral else rows

    def integers(self, name: str) -> Integers:
        """Values of any integer type or bool that fit 64 signed bits."""
        rows = self._first(self.rows(name))
        field = self.attrs.field[rows]
        value = self.attrs.bits[rows].view(np.int64)
        too_large = np.isin(field, _UNSIGNED) & (value < 0)
        good = _IS_INTEGER[field] & ~too_large
        return Integers(self.owner[rows[good]], value[good], rows[good])

    def texts(self, name: str) -> Texts:
        """Values of type string."""
        rows = self._first(self.rows(name))
        rows = rows[self.attrs.field[rows] == AttributeField.STRING]
        return Texts(self.owner[rows], self.attrs.bits[rows].view(np.int64), rows)

    def distinct(self, texts: Texts) -> tuple[list[str], NDArray[np.int64]]:
        """The distinct values of a string attribute, and which of them each node has."""
        wanted = self.values(texts)
        found: dict[bytes, int] = {}
        place = np.fromiter((found.setdefault(text, len(found)) for text in wanted), np.int64, len(wanted))
        return [text.decode() for text in found], place

    def values(self, texts: Texts) -> ByteRows:
        """The values themselves, one row per node."""
        payload = self.attrs.payload
        start = payload.offsets[texts.payload]
        length = payload.offsets[texts.payload + 1] - start
        return ByteRows(*copy_spans(Window.holding(payload.data), start, length))


def check_types(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """ET010: attributes that simulators read have an accepted type (error) and the canonical one (lint);
    every attribute has a value (lint); no node has two attributes of one name.
    """
    attrs = columns.attrs
    for name, canonical in LINTED.items():
        rows = facts.rows(name)
        field = attrs.field[rows]
        integral = canonical in INTEGER_FIELDS
        accepted = _IS_INTEGER[field] if integral else field == canonical
        bad = np.zeros(len(columns), np.bool_)
        bad[facts.owner[rows[~accepted]]] = True
        faults.nodes("ET010", columns, bad, f"attribute {name} has a type that no reader accepts")
        odd = int((accepted & (field != canonical)).sum())
        message = f"attribute {name} is not of its canonical type {canonical.name.lower()}"
        faults.lint("ET010", message, odd)
    valueless = int((attrs.field == AttributeField.UNSET).sum())
    faults.lint("ET010", "an attribute has a name and no value", valueless)
    code = facts.owner * max(1, len(attrs.keys)) + attrs.key
    ordered = np.sort(code)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    bad = np.zeros(len(columns), np.bool_)
    bad[twice // max(1, len(attrs.keys))] = True
    faults.nodes("ET010", columns, bad, "two attributes of a node have the same name")


def is_canonical(attrs: AttributeColumns) -> Bools:
    """Which rows have the canonical type of their name (or a name the graph does not model)."""
    wanted = np.array([ATTRIBUTES.get(name, -1) for name in attrs.keys] or [-1])
    stated = wanted[attrs.key] if len(attrs) else np.empty(0, np.int64)
    canonical: Bools = (stated < 0) | (stated == attrs.field)
    return canonical


# Faults of a trace: errors in a strict reader, diagnostics in a lenient one, with the checker's codes.

_REMEDIES = {
    "ET007": "a simulator would wait for ever; drop one dependency of the cycle",
    "ET009": "give the node one of the types of the Chakra schema, or remove it",
    "ET010": "write each attribute once per node, with the type of the Chakra schema",
    "ET014": "write this rank's number, or rename the file to the rank it is of",
    "ET018": "write group ids as decimal numbers from 1 on",
    "ET019": "list each rank once, and every rank that uses the group",
    "ET022": "copy the whole set again: one file per rank, from NAME.0.et on without gaps",
}
"""What helps against a fault, where its place has nothing better to say."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Where the faults of one file go. ``rank`` is None for faults of a whole directory."""

    path: str
    rank: int | None
    diagnostics: Diagnostics
    lenient: bool
    recover: bool = False

    def error(
        self, code: str, message: str, *, position: str = "", hint: str | None = None, node: int | None = None
    ) -> None:
        """One error: raises :class:`FormatError` unless the reader is lenient."""
        if not self.lenient:
            remedy = hint or _REMEDIES.get(code)
            raise FormatError(f"{code}: {message}", path=self.path, position=position or None, hint=remedy)
        self.diagnostics.add(
            code, Severity.ERROR, position, message, path=self.path, rank=self.rank, node=node
        )

    def nodes(self, code: str, columns: EtColumns, bad: Bools, message: str, hint: str | None = None) -> None:
        """An error of all nodes marked in ``bad``; the first few are named with id and byte offset."""
        rows = np.flatnonzero(bad)
        if not len(rows):
            return
        for row in rows[: self.diagnostics.keep].tolist():
            node = int(columns.id[row])
            position = f"node {node} at byte {int(columns.frame_byte[row])}"
            others = f" ({len(rows)} nodes in all)" if not self.lenient and len(rows) > 1 else ""
            self.error(code, message + others, position=position, hint=hint, node=node)
        rest = len(rows) - self.diagnostics.keep
        self.diagnostics.add(
            code, Severity.ERROR, self.path, message, path=self.path, rank=self.rank, count=max(0, rest)
        )

    def repaired(
        self, code: str, columns: EtColumns, bad: Bools, message: str, *, repair: str, hint: str
    ) -> None:
        """An error of the nodes marked, or where the user asked for it (``--recover``) a warning of what was
        made of them.
        """
        if self.recover and not self.lenient:
            self.lint(code, f"{message}: {repair}", int(bad.sum()))
        else:
            self.nodes(code, columns, bad, message, f"{hint}; --recover reads it without")

    def lint(self, code: str, message: str, count: int) -> None:
        """A warning about ``count`` nodes or attributes."""
        self.diagnostics.add(
            code, Severity.WARNING, self.path, message, path=self.path, rank=self.rank, count=count
        )
