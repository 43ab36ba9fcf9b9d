"""Values that a program stores in memory: results of its nodes, with their readers and possible overwriters.

A computing node makes one value per result. Views, tuples, loops, calls and completions of asynchronous
operations forward their inputs: a reader of their results reads the values of the inputs. A value that a loop
carries has separate memory between iterations, the *slot*. The first iteration reads from the slot the value
from before the loop, each later iteration the value of the previous iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from math import isnan

import numpy as np

from hespas.graph import DONATED_TO, IN_PLACE, RETURNED, NodeKind, OpClass, OpGraph, RegionKind, Resource
from hespas.graph.columns import BoolArray

__all__ = [
    "MemoryValue",
    "ProgramValues",
    "ValueKind",
    "donated_to",
    "elements",
    "end_of",
    "overwritten",
    "values_of",
]


_RETURNS = frozenset({"func.return", "return"})

_INDEX = "index"
"""Key of the tuple element that a node takes."""

_LONGEST = 9
"""Maximum number of digits of a number."""


def donated_to(graph: OpGraph) -> dict[int, int]:
    """Return a map from donated parameter nodes to the position of the result that overwrites them."""
    return {node: places[0] for node, places in _numbers(graph, DONATED_TO).items()}


def overwritten(graph: OpGraph) -> dict[int, list[int]] | None:
    """Return for each fusion that may overwrite inputs the positions of these inputs among its dependencies.
    None if the graph has no such information.
    """
    return _numbers(graph, IN_PLACE) or None


def end_of(graph: OpGraph) -> int:
    """Return the node that ends the program and determines its results; -1 if the graph has no such node.

    The results of this node, or its operands if it has no results, are the results of the program.
    """
    row = graph.strings.find(RETURNED)
    marked = graph.extra.node[graph.extra.key == row]
    if row > 0 and len(marked):
        return int(marked[-1])
    last = len(graph) - 1
    return last if last >= 0 and graph.op_name(last) in _RETURNS and graph.region[last] < 0 else -1


def elements(graph: OpGraph) -> dict[int, int]:
    """Return for each node that selects a tuple element the index of that element."""
    return {node: places[0] for node, places in _numbers(graph, _INDEX).items()}


def _numbers(graph: OpGraph, key: str) -> dict[int, list[int]]:
    """Return for each node the numbers that the graph's extra texts have under ``key``, separated by
    commas.
    """
    row = graph.strings.find(key)
    numbers: dict[int, list[int]] = {}
    if row < 0:
        return numbers
    for extra in np.flatnonzero(graph.extra.key == row).tolist():
        parts = graph.extra.value(extra).split(b",")
        if graph.extra.node[extra] >= 0 and all(part.isdigit() and len(part) <= _LONGEST for part in parts):
            numbers[int(graph.extra.node[extra])] = [int(part) for part in parts]
    return numbers


_PARAMETERS = frozenset({"parameter"})

_CONSTANTS = frozenset({"constant", "stablehlo.constant", "mhlo.constant"})

_FORWARDING = (OpClass.FREE, OpClass.CONTROL)

_MADE_BY_USERS = (OpClass.BROADCAST, OpClass.GENERATE)
"""Classes that are free if their users compute them, and then have no memory."""

_LINALG = int(OpClass.LINALG)

_IN_PLACE = frozenset(
    int(op_class)
    for op_class in (
        OpClass.ELEMENTWISE,
        OpClass.TRANSCENDENTAL,
        OpClass.QUANTIZE,
        OpClass.FUSION,
        OpClass.SORT,
        OpClass.LINALG,
    )
)
"""Classes that read an element before writing the element in its place, so that they can overwrite an
operand.
"""

_START, _ENDS = "-start", ("-done", "-update")


class ValueKind(IntEnum):
    """Role of a value in the program."""

    TEMPORARY = 0
    PARAMETER = 1
    CONSTANT = 2
    OUTPUT = 3


@dataclass(slots=True)
class MemoryValue:
    """One tensor in memory.

    ``node`` computes the value. If ``slot`` is not -1, the value is the slot of a loop-carried value (see the
    module): ``slot`` is the region of the loop, and ``node`` computes the value of the next iteration.
    ``over`` lists values that this one may overwrite when their lifetime ends. ``in_place`` is True if this
    value is one of them with a part replaced.
    """

    node: int
    type_row: int
    size_bytes: float
    region: int
    kind: ValueKind = ValueKind.TEMPORARY
    slot: int = -1
    over: tuple[int, ...] = ()
    in_place: bool = False
    users: list[int] = field(default_factory=list[int])
    until: tuple[int, ...] = ()
    """Loops that keep it to the end of each iteration."""
    before: tuple[int, ...] = ()
    """Loops whose first iteration finds it in a slot."""


@dataclass(frozen=True, slots=True, eq=False)
class ProgramValues:
    """Values of a graph.

    ``results`` has the index of each value that the program returns, in order (-1: no node computes it); None
    if the graph does not state its results. ``handed`` lists pairs of a loop slot and the value that an
    iteration stores in it for the next iteration. ``unknown`` counts tensors of unknown size and nodes
    without stated results.
    """

    values: list[MemoryValue]
    results: list[int] | None
    handed: list[tuple[int, int]]
    unknown: int


def values_of(graph: OpGraph) -> ProgramValues:
    """Return the values of all nodes that run. O(nodes + edges + tensors)."""
    tracer = _ValueTracer(graph)
    for node in np.flatnonzero(tracer.runs).tolist():
        tracer.visit(node)
    handed = tracer.handed()
    return ProgramValues(tracer.values, tracer.returned(), handed, tracer.unknown)


class _ValueTracer:
    """Collector of the values (tensors) that nodes make, in program order."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.runs: BoolArray = graph.executions != 0
        self.values: list[MemoryValue] = []
        self.unknown = 0
        self._runs: list[bool] = self.runs.tolist()
        self._types: list[float] = graph.types.bytes.tolist()
        self._operands: list[int] = graph.operands.values.tolist()
        self._operand_bounds: list[int] = graph.operands.offsets.tolist()
        self._results = graph.results.to_lists()
        self._deps = graph.data_deps.to_lists()
        self._region: list[int] = graph.region.tolist()
        self._parent: list[int] = graph.regions.parent.tolist()
        self._op_class: list[int] = graph.op_class.tolist()
        self._op_id: list[int] = graph.op_id.tolist()
        names = {row: graph.strings[row] for row in set(self._op_id)}
        self._parameters = {row for row, name in names.items() if name in _PARAMETERS}
        self._constants = {row for row, name in names.items() if name in _CONSTANTS}
        self._starting = {row for row, name in names.items() if name.endswith(_START)}
        self._ending = {row for row, name in names.items() if name.endswith(_ENDS)}
        self._written: list[float] = graph.bytes_written.tolist()
        self._forwards: list[bool] = _forwards(graph).tolist()
        self._away: list[bool] = _away(graph).tolist()
        self._index = elements(graph)
        self._overwritten = overwritten(graph)
        self._leaves: list[list[int]] = [[] for _ in range(len(graph))]
        """Per node, the value behind each result; -1: no value."""
        self._slots: dict[tuple[int, int], list[int]] = {}
        table = graph.regions
        loops = table.kind[table.carried_region] == int(RegionKind.LOOP_BODY)
        by_consumer: dict[int, list[tuple[int, int]]] = {}
        for region, producer, consumer in zip(
            table.carried_region[loops].tolist(),
            table.carried_producer[loops].tolist(),
            table.carried_consumer[loops].tolist(),
            strict=True,
        ):
            by_consumer.setdefault(consumer, []).append((region, producer))
        self._carries = by_consumer
        self._started: dict[int, list[int]] = {}
        """Inputs of pending asynchronous operations, by the nodes from their start on."""

    def visit(self, node: int) -> None:
        """Record the values that a node reads and makes."""
        read = self._read(node)
        if self._forwards[node]:
            self._leaves[node] = self._forwarded(node, read)
            if self._started and self._op_id[node] in self._ending:
                for dep in self._deps[node]:  # an asynchronous operation keeps its inputs until it is done
                    if dep in self._started:
                        self._started[node] = self._started[dep]
                        for value in self._started[dep]:
                            self.values[value].users.append(node)
            return
        by_value: dict[int, None] = {}
        for leaves in read:
            if len(leaves) == 1:
                if leaves[0] >= 0:
                    by_value[leaves[0]] = None
                continue
            made = [value for value in leaves if value >= 0]
            wanted = self._operands_of(node)
            made = [value for value in made if self.values[value].type_row in wanted] or made
            by_value.update(dict.fromkeys(made))
        used = list(by_value)
        for value in used:
            self.values[value].users.append(node)
        if self._op_id[node] in self._starting:
            self._started[node] = used
        self._leaves[node] = self._made(node, used)

    def _operands_of(self, node: int) -> list[int]:
        return self._operands[self._operand_bounds[node] : self._operand_bounds[node + 1]]

    def _read(self, node: int) -> list[list[int]]:
        """Return for each dependency of a node the values of its results, and the values that loops carry to
        the node.
        """
        read = [self._leaves[dep] for dep in self._deps[node] if self._runs[dep]]
        if node in self._index and len(read) == 1 and len(read[0]) > 1:
            leaves = read[0]
            index = self._index[node]
            if 0 <= index < len(leaves) and len(self._results[node]) == 1:
                read = [[leaves[index]]]
        for region, producer in self._carries.get(node, ()):
            key = (region, producer)
            if key not in self._slots:
                self._slots[key] = [
                    self._new(producer, row, region=region, slot=region) for row in self._results[producer]
                ]
            slots = self._slots[key]
            remaining: list[list[int]] = [list(leaves) for leaves in read]
            for slot in slots:
                row = self.values[slot].type_row
                fits = [
                    (row_index, at)
                    for row_index, leaves in enumerate(remaining)
                    for at, value in enumerate(leaves)
                    if value >= 0 and self.values[value].type_row == row and self._is_outside(value, region)
                ]
                if len(fits) == 1:
                    row_index, at = fits[0]
                    initial = remaining[row_index].pop(at)
                    self.values[slot].over += (initial,)
                    self.values[initial].before += (region,)
            read = remaining
            read.insert(0, slots)
        return read

    def _is_outside(self, value: int, region: int) -> bool:
        here = self.values[value].region
        while here > region:
            here = self._parent[here]
        return here != region

    def _forwarded(self, node: int, read: list[list[int]]) -> list[int]:
        """Return the values that a node forwards as its results: all of them in order, or matched by tensor
        type if the numbers differ. A node without inputs gets new values.
        """
        wanted = self._results[node]
        pool = [value for leaves in read for value in leaves]
        if not pool:
            return self._given(node) if not self._operands_of(node) and not read else [-1] * len(wanted)
        if len(wanted) == 1 and len(pool) == 1:
            return pool
        if len(wanted) == len(pool):
            return pool
        alike: dict[int, list[int]] = {}
        for value in reversed(pool):
            if value >= 0:
                alike.setdefault(self.values[value].type_row, []).append(value)
        forwarded: list[int] = []
        for row in wanted:
            same = alike.get(row, ())
            forwarded.append((same.pop() if len(same) > 1 else same[0]) if isinstance(same, list) else -1)
        return pool[:1] if len(wanted) == 1 and forwarded == [-1] else forwarded

    def _given(self, node: int) -> list[int]:
        """Return the new values of a node without inputs: a parameter, a constant, or a temporary value."""
        op_id = self._op_id[node]
        kind = ValueKind.PARAMETER if op_id in self._parameters else ValueKind.TEMPORARY
        if op_id in self._constants:
            kind = ValueKind.CONSTANT
        return [self._new(node, row, kind=kind) for row in self._results[node]]

    def _made(self, node: int, used: list[int]) -> list[int]:
        """Return the new values of a computing node, with the values in ``used`` that each of them may
        overwrite.
        """
        rows = self._results[node]
        if not rows:
            self.unknown += self._written[node] != 0
            return []
        if self._away[node]:
            return [-1] * len(rows)
        if self._op_id[node] in self._constants:
            return self._given(node)
        whole = self._types[rows[0]] if len(rows) == 1 else sum(self._types[row] for row in rows)
        op_class = self._op_class[node]
        in_place = self._written[node] < whole or op_class == _LINALG
        made = [self._new(node, row) for row in rows]
        if in_place or op_class in _IN_PLACE:
            given = used if in_place else self._overwritable(node, used)
            for value in made:
                entry = self.values[value]
                entry.in_place = in_place
                entry.over = tuple(
                    [other for other in given if self.values[other].type_row == entry.type_row]
                )
        return made

    def _overwritable(self, node: int, used: list[int]) -> list[int]:
        """Return the inputs that the results of a node may overwrite, because it reads them element by
        element.
        """
        if self._overwritten is None or self._op_class[node] != OpClass.FUSION:
            return used
        deps = self._deps[node]
        places = self._overwritten.get(node, ())
        return [
            value
            for position in places
            if position < len(deps)
            for value in self._leaves[deps[position]]
            if value >= 0
        ]

    def _new(
        self,
        node: int,
        row: int,
        *,
        kind: ValueKind = ValueKind.TEMPORARY,
        region: int | None = None,
        slot: int = -1,
    ) -> int:
        size = self._types[row]
        if isnan(size):
            self.unknown += slot < 0
            size = 0.0
        where = self._region[node] if region is None else region
        self.values.append(MemoryValue(node, row, size, where, kind, slot))
        return len(self.values) - 1

    def handed(self) -> list[tuple[int, int]]:
        """Return pairs of a loop slot and the value that an iteration stores in it for the next one. Also
        mark these values as live until the end of the iteration.
        """
        handed: list[tuple[int, int]] = []
        for (region, producer), slots in self._slots.items():
            for slot, value in zip(slots, self._leaves[producer], strict=False):
                if value >= 0:
                    self.values[value].until += (region,)
                    handed.append((slot, value))
        return handed

    def returned(self) -> list[int] | None:
        """Return the values that the program returns."""
        end = end_of(self.graph)
        if end < 0 or not self._runs[end]:
            return None
        if self._results[end]:
            return list(self._leaves[end])
        # Without results: the value of each operand; -1 if no node makes it.
        alike: dict[int, list[int]] = {}
        for dep in reversed(self._deps[end]):
            for value in reversed(self._leaves[dep]):
                if value >= 0:
                    alike.setdefault(self.values[value].type_row, []).append(value)
        return [alike[row].pop() if alike.get(row) else -1 for row in self._operands_of(end)]


def _forwards(graph: OpGraph) -> BoolArray:
    """Return a mask of the nodes that compute no values. They forward their inputs, or have none
    (parameters).
    """
    forwards = np.isin(graph.op_class, _FORWARDING) | (graph.kind == int(NodeKind.METADATA))
    elsewhere = np.isin(graph.op_class, _MADE_BY_USERS) & (graph.bytes_written == 0)
    forwards |= elsewhere & (graph.data_deps.lengths + graph.operands.lengths > 0)
    handing: BoolArray = forwards & (graph.kind != int(NodeKind.COLLECTIVE))
    return handing


def _away(graph: OpGraph) -> BoolArray:
    """Return a mask of the nodes whose results are not in device memory."""
    away: BoolArray = (graph.resource == int(Resource.HOST)) | (graph.kind == int(NodeKind.MEM_STORE))
    return away
