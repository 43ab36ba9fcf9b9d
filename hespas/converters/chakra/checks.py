"""Structural rules of one trace file that a graph cannot express, and are therefore checked on reading."""

from __future__ import annotations

import numpy as np

from hespas.converters.chakra.columns import EtColumns
from hespas.converters.chakra.facts import AttributeFacts, check_types
from hespas.converters.chakra.faults import Faults
from hespas.converters.chakra.spans import Bools, Longs, Words
from hespas.converters.chakra.timing import LARGEST_MICROS
from hespas.converters.chakra.to_graph import node_numbers
from hespas.graph import OpGraph
from hespas.graph.passes import find_cycle
from hespas.schemas.chakra.tables import NodeType

__all__ = ["check_acyclic", "check_file"]

_LISTED = 8


def check_file(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """ET005 unique ids, ET006 known dependencies, ET007 no self-dependency, ET008 no dependency twice,
    ET009 known node types, ET010 attribute types.
    """
    _check_ids(columns, faults)
    highest = max(NodeType)
    unknown = (columns.type < 0) | (columns.type > highest)
    faults.nodes("ET009", columns, unknown, f"the node type is none of 0..{int(highest)}")
    for field, offsets, deps in (
        ("data_deps", columns.data_offsets, columns.data_deps),
        ("ctrl_deps", columns.ctrl_offsets, columns.ctrl_deps),
    ):
        _check_deps(columns, field, offsets, deps, faults)
    check_types(columns, facts, faults)
    _check_times(columns, facts, faults)


def _check_times(columns: EtColumns, facts: AttributeFacts, faults: Faults) -> None:
    """GR001: no time is negative. Microseconds of 2**63 and more are what a negative number looks like."""
    nanos = facts.integers("duration_nanos")
    for bad, message in (
        (columns.duration_micros > LARGEST_MICROS, "duration_micros is 2**63 or more: a negative time?"),
        (_marked(columns, nanos.node[nanos.value < 0]), "duration_nanos is negative"),
    ):
        hint = "write the time as it was measured, or none"
        faults.repaired("GR001", columns, bad, message, repair="taken as unknown", hint=hint)


def check_acyclic(columns: EtColumns, graph: OpGraph, faults: Faults) -> None:
    """ET007: no node waits for itself through others. ``graph`` is that of ``columns``."""
    cycle = find_cycle(graph)
    if not cycle:
        return
    ids = [str(int(columns.id[node])) for node in cycle]
    more = f" -> ... ({len(ids) - _LISTED:,} more)" if len(ids) > _LISTED else ""
    path = " -> ".join(ids[:_LISTED]) + more
    message = f"dependency cycle, each waits for the next: {path} -> {ids[0]}"
    faults.nodes("ET007", columns, _marked(columns, np.array(cycle[:1])), message)


def _check_ids(columns: EtColumns, faults: Faults) -> None:
    order = np.argsort(columns.id, kind="stable")
    ordered = columns.id[order]
    again = np.zeros(len(columns), np.bool_)
    again[order[1:][ordered[1:] == ordered[:-1]]] = True
    hint = "a simulator would silently take the last of them; number the nodes anew"
    faults.nodes("ET005", columns, again, "another node has the same id", hint=hint)


def _check_deps(columns: EtColumns, field: str, offsets: Longs, deps: Words, faults: Faults) -> None:
    if not len(deps):
        return
    owner = np.repeat(np.arange(len(columns)), np.diff(offsets))
    missing = node_numbers(columns.id, deps) < 0
    hint = "a simulator would wait for ever; drop these dependencies or add the nodes"
    for row in np.flatnonzero(missing)[:1].tolist():
        first = f"{field} names node {int(deps[row])}, which does not exist"
        if columns.is_cut:  # it may be one of those behind the cut
            lost = f"{first}; dependencies on nodes behind the cut are left out"
            faults.lint("ET006", lost, int(missing.sum()))
        else:
            where = _marked(columns, owner[missing])
            repair = "dependencies on no node are left out"
            faults.repaired("ET006", columns, where, first, repair=repair, hint=hint)
    own: Bools = deps == columns.id[owner]
    faults.nodes("ET007", columns, _marked(columns, owner[own]), f"{field} names the node itself")
    order = np.lexsort((deps, owner))
    twice = (owner[order][1:] == owner[order][:-1]) & (deps[order][1:] == deps[order][:-1])
    faults.lint("ET008", f"an entry stands twice in {field}", int(twice.sum()))


def _marked(columns: EtColumns, nodes: Longs) -> Bools:
    marked = np.zeros(len(columns), np.bool_)
    marked[nodes] = True
    return marked
