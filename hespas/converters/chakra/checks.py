"""Rules of a trace file that a graph cannot express, and the report of faults.

A strict reader raises the first fault. A lenient one records all faults under the codes of the checker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.converters.chakra.contract import INTEGER_BOUNDS, IS_INTEGER, LINTED, AttributeFacts
from hespas.converters.chakra.times import LARGEST_MICROS
from hespas.converters.chakra.wire import Bools, EtColumns, Longs, Words, node_numbers
from hespas.graph import OpGraph
from hespas.graph.diagnostics import Diagnostics, Severity
from hespas.graph.errors import FormatError, HespasError
from hespas.graph.passes import find_cycle
from hespas.schemas.chakra.tables import AttributeField, NodeType

__all__ = ["Faults", "check_acyclic", "check_file"]

_REMEDIES = {
    "ET007": "remove one dependency of the cycle: a simulator would deadlock",
    "ET009": "give the node one of the types of the Chakra schema, or remove it",
    "ET010": "write each attribute once per node, with the type in the Chakra schema",
    "ET014": "write this rank's number, or rename the file to its rank",
    "ET018": "write group ids as decimal numbers >= 1",
    "ET019": "list each rank once, and include every rank that uses the group",
    "ET022": "copy the whole set again: one file per rank (NAME.0.et or NAME.0.json, ...), without gaps",
}
"""Default hint for each code."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Receiver of the faults of one file, or of a whole directory if ``rank`` is None. If ``lenient``, it
    records them as diagnostics, else it raises an error.
    """

    path: str
    rank: int | None
    diagnostics: Diagnostics
    lenient: bool
    recover: bool = False

    def error(
        self, code: str, message: str, *, position: str = "", hint: str | None = None, node: int | None = None
    ) -> None:
        """Report one error; raise :class:`FormatError` unless the reader is lenient."""
        if not self.lenient:
            remedy = hint or _REMEDIES.get(code)
            raise FormatError(message, code=code, path=self.path, position=position or None, hint=remedy)
        self.diagnostics.add(
            code, Severity.ERROR, position, message, path=self.path, rank=self.rank, node=node
        )

    def skip(self, error: HespasError) -> None:
        """Report that a node is skipped because of ``error``; raise it unless the reader is lenient."""
        if not self.lenient:
            raise error
        message = f"{error.text}; the node is skipped"
        self.diagnostics.error(error.code or "", error.position or "", message, path=self.path)

    def nodes(self, code: str, columns: EtColumns, bad: Longs, message: str, hint: str | None = None) -> None:
        """Report an error for all nodes in ``bad``; name the first few with id and position."""
        rows = np.unique(bad)
        if not len(rows):
            return
        for row in rows[: self.diagnostics.keep].tolist():
            node = int(columns.id[row])
            position = f"node {node} at {columns.unit} {int(columns.position[row])}"
            others = f" ({len(rows)} nodes in total)" if not self.lenient and len(rows) > 1 else ""
            self.error(code, message + others, position=position, hint=hint, node=node)
        rest = len(rows) - self.diagnostics.keep
        self.diagnostics.add(
            code, Severity.ERROR, self.path, message, path=self.path, rank=self.rank, count=max(0, rest)
        )

    def repaired(
        self, code: str, columns: EtColumns, bad: Longs, message: str, *, repair: str, hint: str
    ) -> None:
        """Report an error for the nodes in ``bad``. With ``--recover`` it is a warning that states the
        repair.
        """
        if self.recover and not self.lenient:
            self.lint(code, f"{message}: {repair}", len(np.unique(bad)))
        else:
            self.nodes(code, columns, bad, message, f"{hint}; `recover` reads the file without it")

    def lint(self, code: str, message: str, count: int) -> None:
        """Report a warning of the checker with the number (``count``) of affected nodes or attributes."""
        self.diagnostics.add(
            code, Severity.WARNING, self.path, message, path=self.path, rank=self.rank, count=count
        )


_LISTED = 8


def check_file(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """Check one trace file. The rules are ET005 unique ids, ET006 known dependencies, ET007 no
    self-dependency, ET008 no duplicate dependency, ET009 known node types, ET010 attribute types, and GR001
    no negative time.
    """
    order = np.argsort(columns.id, kind="stable")
    ordered = columns.id[order]
    again = order[1:][ordered[1:] == ordered[:-1]]
    hint = "renumber the nodes: a simulator would silently use the last one"
    faults.nodes("ET005", columns, again, "another node has the same id", hint=hint)
    highest = max(NodeType)
    unknown = np.flatnonzero((columns.type < 0) | (columns.type > highest))
    faults.nodes("ET009", columns, unknown, f"the node type is outside 0..{int(highest)}")
    for name, offsets, deps in (
        ("data_deps", columns.data_offsets, columns.data_deps),
        ("ctrl_deps", columns.ctrl_offsets, columns.ctrl_deps),
    ):
        _check_deps(columns, name, offsets, deps, faults)
    # ET010: attributes that simulators read have an accepted type (error) and the canonical one (lint);
    # every attribute has a value (lint); attribute names are unique within a node (error).
    attrs = columns.attrs
    for name, canonical in LINTED.items():
        rows = facts.rows(name)
        field = attrs.field[rows]
        integral = canonical in INTEGER_BOUNDS
        accepted = IS_INTEGER[field] if integral else field == canonical
        bad = facts.owner[rows[~accepted]]
        faults.nodes("ET010", columns, bad, f"attribute {name} has a type that no reader accepts")
        odd = int((accepted & (field != canonical)).sum())
        message = f"attribute {name} does not have its canonical type {canonical.name.lower()}"
        faults.lint("ET010", message, odd)
    valueless = int((attrs.field == AttributeField.UNSET).sum())
    faults.lint("ET010", "an attribute has a name and no value", valueless)
    code = np.sort(facts.owner * max(1, len(attrs.keys)) + attrs.key)
    bad = code[1:][code[1:] == code[:-1]] // max(1, len(attrs.keys))
    faults.nodes("ET010", columns, bad, "two attributes of a node have the same name")
    nanos = facts.integers("duration_nanos")
    for bad, message in (
        (
            np.flatnonzero(columns.duration_micros > LARGEST_MICROS),
            "duration_micros is 2**63 or more: a negative time?",
        ),
        (nanos.node[nanos.value < 0], "duration_nanos is negative"),
    ):
        hint = "write the measured time, or omit it"
        faults.repaired("GR001", columns, bad, message, repair="treated as unknown", hint=hint)


def check_acyclic(columns: EtColumns, graph: OpGraph, faults: Faults) -> None:
    """Check rule ET007: report a cycle among the dependencies of ``graph``, which was read from
    ``columns``.
    """
    cycle = find_cycle(graph)
    if not cycle:
        return
    ids = [str(int(columns.id[node])) for node in cycle]
    more = f" -> ... ({len(ids) - _LISTED:,} more)" if len(ids) > _LISTED else ""
    path = " -> ".join(ids[:_LISTED]) + more
    message = f"dependency cycle: {path} -> {ids[0]}"
    faults.nodes("ET007", columns, np.array(cycle[:1]), message)


def _check_deps(columns: EtColumns, field: str, offsets: Longs, deps: Words, faults: Faults) -> None:
    """Check the entries of one dependency field: known ids, no self-dependency, no duplicates."""
    if not len(deps):
        return
    owner = np.repeat(np.arange(len(columns)), np.diff(offsets))
    missing = node_numbers(columns.id, deps) < 0
    hint = "remove these dependencies or add the nodes: a simulator would deadlock"
    for row in np.flatnonzero(missing)[:1].tolist():
        first = f"{field} names node {int(deps[row])}, which does not exist"
        if columns.is_cut:  # the node may be after the cut
            lost = f"{first}; dependencies on nodes after the cut are ignored"
            faults.lint("ET006", lost, int(missing.sum()))
        else:
            repair = "dependencies on unknown nodes are ignored"
            faults.repaired("ET006", columns, owner[missing], first, repair=repair, hint=hint)
    own: Bools = deps == columns.id[owner]
    faults.nodes("ET007", columns, owner[own], f"{field} names the node itself")
    order = np.lexsort((deps, owner))
    twice = (owner[order][1:] == owner[order][:-1]) & (deps[order][1:] == deps[order][:-1])
    faults.lint("ET008", f"{field} contains an entry twice", int(twice.sum()))
