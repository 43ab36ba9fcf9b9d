"""What a program keeps in memory: the values its nodes make, who reads them, and who may overwrite them.

A node that computes makes one value per result. Views, tuples, loops, calls and completions make none: they
hand on what they are given, so that whoever reads them reads that. A value that a loop carries has a place of
its own from trip to trip, the *slot*: the first trip finds there what stood before the loop, every other one
what the trip before it made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from math import isnan

import numpy as np

from hespas.graph import NodeKind, OpClass, OpGraph, RegionKind, Resource
from hespas.graph.columns import BoolArray
from hespas.simulator.memory.facts import elements, end_of, overwritten

__all__ = ["Kind", "Value", "Values", "values_of"]

_PARAMETERS = frozenset({"parameter"})
_CONSTANTS = frozenset({"constant", "stablehlo.constant", "mhlo.constant"})
_HANDS_ON = (OpClass.FREE, OpClass.CONTROL)
_MADE_BY_USERS = (OpClass.BROADCAST, OpClass.GENERATE)
"""What costs nothing where its users compute it, and then has no memory either."""
_IN_PLACE = (
    OpClass.ELEMENTWISE,
    OpClass.TRANSCENDENTAL,
    OpClass.QUANTIZE,
    OpClass.FUSION,
    OpClass.SORT,
    OpClass.LINALG,
)
"""What reads an element before it writes the one in its place, so that it can write over an operand."""
_START, _ENDS = "-start", ("-done", "-update")


class Kind(IntEnum):
    """What a value is to the program."""

    TEMPORARY = 0
    PARAMETER = 1
    CONSTANT = 2
    OUTPUT = 3


@dataclass(slots=True)
class Value:
    """One tensor. ``node`` makes it; of a slot it is the one that makes the next trip's, and ``slot`` is the
    loop's region (-1: no slot). ``over`` are values whose place it may take where they end; it is made
    ``in_place`` where it is one of them with a part replaced.
    """

    node: int
    type_row: int
    size_bytes: float
    region: int
    kind: Kind = Kind.TEMPORARY
    slot: int = -1
    over: list[int] = field(default_factory=list[int])
    in_place: bool = False
    users: list[int] = field(default_factory=list[int])
    until: list[int] = field(default_factory=list[int])
    """Loops to the end of whose trips it is kept."""
    before: list[int] = field(default_factory=list[int])
    """Loops whose first trip finds it in a slot."""


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """The values of a graph.

    ``results`` are those that the program returns, in order (-1: one that no node makes); None where the
    graph does not say. ``handed`` are slots of loops and the values that stand in them for the next trip.
    ``unknown`` counts tensors of unknown size and nodes that do not say what they make.
    """

    values: list[Value]
    results: list[int] | None
    handed: list[tuple[int, int]]
    unknown: int


def values_of(graph: OpGraph) -> Values:
    """The values of all nodes that run. O(nodes + edges + tensors)."""
    tracer = _Tracer(graph)
    for node in np.flatnonzero(tracer.runs).tolist():
        tracer.visit(node)
    handed = tracer.handed()
    return Values(tracer.values, tracer.returned(), handed, tracer.unknown)


class _Tracer:
    """Visits nodes in program order."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.runs: BoolArray = graph.multiplicity != 0
        self.values: list[Value] = []
        self.unknown = 0
        self._runs: list[bool] = self.runs.tolist()
        self._types: list[float] = graph.types.bytes.tolist()
        self._operands = graph.operands.to_lists()
        self._results = graph.results.to_lists()
        self._deps = graph.data_deps.to_lists()
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = graph.regions.parent.tolist()
        self._op_class: list[int] = graph.op_class.tolist()
        self._op_row: list[int] = graph.op_row.tolist()
        self._names = {row: graph.strings[row] for row in set(self._op_row)}
        self._written: list[float] = graph.bytes_written.tolist()
        self._hands_on: list[bool] = _hands_on(graph).tolist()
        self._away: list[bool] = _away(graph).tolist()
        self._index = elements(graph)
        self._overwritten = overwritten(graph)
        self._leaves: list[list[int]] = [[] for _ in range(len(graph))]
        """Per node, the value behind each result; -1: none that is kept."""
        self._slots: dict[tuple[int, int], list[int]] = {}
        self._carries = _by_consumer(graph)
        self._started: dict[int, list[int]] = {}
        """What an asynchronous operation reads until it is done, by the nodes from its start on."""

    def visit(self, node: int) -> None:
        """Find what a node reads and what it makes."""
        read = self._read(node)
        if self._hands_on[node]:
            self._leaves[node] = self._handed_on(node, read)
            self._hold(node)
            return
        used = self._used(node, read)
        for value in used:
            self.values[value].users.append(node)
        if self._op(node).endswith(_START):
            self._started[node] = used
        self._leaves[node] = self._made(node, used)

    def _hold(self, node: int) -> None:
        """Keep what an asynchronous operation reads until it is done."""
        if not self._started:
            return
        for dep in self._deps[node]:
            if dep in self._started and self._op(node).endswith(_ENDS):
                self._started[node] = self._started[dep]
                for value in self._started[dep]:
                    self.values[value].users.append(node)

    def _op(self, node: int) -> str:
        return self._names[self._op_row[node]]

    # --- What a node reads

    def _read(self, node: int) -> list[list[int]]:
        """The values behind each node it waits for, and those that loops carry to it."""
        deps = [dep for dep in self._deps[node] if self._runs[dep]]
        read = [self._leaves[dep] for dep in deps]
        if self._is_element(node) and len(deps) == 1 and len(read[0]) > 1:
            read = [self._element(node, read[0])]
        for region, producer in self._carries.get(node, ()):
            slots = self._slot(region, producer)
            read = self._without_initial(region, slots, read)
            read.insert(0, slots)
        return read

    def _is_element(self, node: int) -> bool:
        return node in self._index

    def _element(self, node: int, leaves: list[int]) -> list[int]:
        """The element of a tuple that a node takes; the whole tuple where that cannot be told."""
        place = self._index[node]
        return [leaves[place]] if 0 <= place < len(leaves) and len(self._results[node]) == 1 else leaves

    def _slot(self, region: int, producer: int) -> list[int]:
        """The slots for what ``producer`` hands to the next trip of a loop."""
        key = (region, producer)
        if key not in self._slots:
            self._slots[key] = [
                self._new(producer, row, region=region, slot=region) for row in self._results[producer]
            ]
        return self._slots[key]

    def _without_initial(self, region: int, slots: list[int], read: list[list[int]]) -> list[list[int]]:
        """``read`` without what the first trip finds in the slots: a value from outside of the same type.
        Where several could be that, none is taken for it.
        """
        found: list[list[int]] = [list(leaves) for leaves in read]
        for slot in slots:
            row = self.values[slot].type_row
            fits = [
                (place, at)
                for place, leaves in enumerate(found)
                for at, value in enumerate(leaves)
                if value >= 0 and self.values[value].type_row == row and self._is_outside(value, region)
            ]
            if len(fits) == 1:
                place, at = fits[0]
                initial = found[place].pop(at)
                self.values[slot].over.append(initial)
                self.values[initial].before.append(region)
        return found

    def _is_outside(self, value: int, region: int) -> bool:
        here = self.values[value].region
        while here > region:
            here = self._parent[here]
        return here != region

    def _used(self, node: int, read: Iterable[list[int]]) -> list[int]:
        """Of nodes with several results, a node reads those that its operands have the type of."""
        wanted = set(self._operands[node])
        used: dict[int, None] = {}
        for leaves in read:
            alike = [each for each in leaves if each >= 0 and self.values[each].type_row in wanted]
            several = len(leaves) > 1 and alike
            used.update(dict.fromkeys(alike if several else [each for each in leaves if each >= 0]))
        return list(used)

    # --- What a node makes

    def _handed_on(self, node: int, read: list[list[int]]) -> list[int]:
        """The values behind the results of a node that makes none, by their types in order."""
        wanted = self._results[node]
        pool = [value for leaves in read for value in leaves]
        if not pool:
            return self._given(node) if not self._operands[node] and not read else [-1] * len(wanted)
        if len(wanted) == 1 and len(pool) == 1:
            return pool
        if len(wanted) == len(pool):
            return pool
        alike: dict[int, list[int]] = {}
        for value in reversed(pool):
            if value >= 0:
                alike.setdefault(self.values[value].type_row, []).append(value)
        found: list[int] = []
        for row in wanted:
            same = alike.get(row, ())
            found.append((same.pop() if len(same) > 1 else same[0]) if isinstance(same, list) else -1)
        return pool[:1] if len(wanted) == 1 and found == [-1] else found

    def _given(self, node: int) -> list[int]:
        """The values of a node that is given them: parameters and constants."""
        name = self._op(node)
        kind = Kind.PARAMETER if name in _PARAMETERS else Kind.TEMPORARY
        if name in _CONSTANTS:
            kind = Kind.CONSTANT
        return [self._new(node, row, kind=kind) for row in self._results[node]]

    def _made(self, node: int, used: list[int]) -> list[int]:
        """New values of a node that computes, with those whose place each may take."""
        rows = self._results[node]
        if not rows:
            self.unknown += self._written[node] != 0
            return []
        if self._away[node]:
            return [-1] * len(rows)
        if self._op(node) in _CONSTANTS:
            return self._given(node)
        whole = sum(self._types[row] for row in rows)
        in_place = self._written[node] < whole or self._op_class[node] == OpClass.LINALG
        overwrites = in_place or self._op_class[node] in _IN_PLACE
        given = used if in_place else self._overwritable(node, used)
        made: list[int] = []
        for row in rows:
            value = self._new(node, row)
            if overwrites:
                self.values[value].in_place = in_place
                self.values[value].over = [each for each in given if self.values[each].type_row == row]
            made.append(value)
        return made

    def _overwritable(self, node: int, used: list[int]) -> list[int]:
        """Of the values that a node reads, those that it reads element by element."""
        if self._overwritten is None or self._op_class[node] != OpClass.FUSION:
            return used
        deps = self._deps[node]
        places = self._overwritten.get(node, ())
        return [
            value
            for place in places
            if place < len(deps)
            for value in self._leaves[deps[place]]
            if value >= 0
        ]

    def _new(
        self, node: int, row: int, *, kind: Kind = Kind.TEMPORARY, region: int | None = None, slot: int = -1
    ) -> int:
        size = self._types[row]
        if isnan(size):
            self.unknown += slot < 0
            size = 0.0
        where = self._region[node] if region is None else region
        self.values.append(Value(node, row, size, where, kind, slot))
        return len(self.values) - 1

    # --- What stays beyond its readers

    def handed(self) -> list[tuple[int, int]]:
        """Slots and what a trip leaves in them for the next one: it is kept to the end of the trip."""
        found: list[tuple[int, int]] = []
        for (region, producer), slots in self._slots.items():
            for slot, value in zip(slots, self._leaves[producer], strict=False):
                if value >= 0:
                    self.values[value].until.append(region)
                    found.append((slot, value))
        return found

    def returned(self) -> list[int] | None:
        """The values that the program returns."""
        end = end_of(self.graph)
        if end < 0 or not self._runs[end]:
            return None
        return list(self._leaves[end]) if self._results[end] else self._aligned(end)

    def _aligned(self, node: int) -> list[int]:
        """The value behind each operand; -1 for one that no node makes."""
        alike: dict[int, list[int]] = {}
        for dep in reversed(self._deps[node]):
            for value in reversed(self._leaves[dep]):
                if value >= 0:
                    alike.setdefault(self.values[value].type_row, []).append(value)
        return [alike[row].pop() if alike.get(row) else -1 for row in self._operands[node]]


def _hands_on(graph: OpGraph) -> BoolArray:
    """Which nodes make nothing themselves."""
    found = np.isin(graph.op_class, _HANDS_ON) | (graph.kind == int(NodeKind.METADATA))
    elsewhere = np.isin(graph.op_class, _MADE_BY_USERS) & (graph.bytes_written == 0)
    found |= elsewhere & (graph.data_deps.lengths + graph.operands.lengths > 0)
    handing: BoolArray = found & (graph.kind != int(NodeKind.COLLECTIVE))
    return handing


def _away(graph: OpGraph) -> BoolArray:
    """Which nodes make what is not in the memory of the device."""
    away: BoolArray = (graph.resource == int(Resource.HOST)) | (graph.kind == int(NodeKind.MEM_STORE))
    return away


def _by_consumer(graph: OpGraph) -> dict[int, list[tuple[int, int]]]:
    """Per node, the loops that carry something to it, and who makes that."""
    table = graph.regions
    loops = table.kind[table.carried_region] == int(RegionKind.LOOP_BODY)
    found: dict[int, list[tuple[int, int]]] = {}
    for region, producer, consumer in zip(
        table.carried_region[loops].tolist(),
        table.carried_producer[loops].tolist(),
        table.carried_consumer[loops].tolist(),
        strict=True,
    ):
        found.setdefault(consumer, []).append((region, producer))
    return found
