"""The units of a graph: operations, or chains that every compiler makes one of, each as a small program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from hespas.estimators.compiled.programs import Unit
from hespas.estimators.compiled.recipes import Asked, write_operation
from hespas.estimators.compiled.values import Tensor, Value
from hespas.estimators.free import takes_no_time
from hespas.graph import NodeKind, OpClass, OpGraph, Resource
from hespas.graph.passes import topological_order

__all__ = ["Found", "units_of"]

_JOIN = frozenset(
    {
        OpClass.FREE,
        OpClass.ELEMENTWISE,
        OpClass.TRANSCENDENTAL,
        OpClass.BROADCAST,
        OpClass.GENERATE,
        OpClass.SLICE,
        OpClass.MOVE,
        OpClass.QUANTIZE,
    }
)
_TAKE = frozenset({OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.QUANTIZE, OpClass.REDUCTION})
_INTO_PRODUCT = frozenset({OpClass.FREE, OpClass.MOVE})
"""What a compiler reads in place, when a product is the only one that wants it: transposed operands."""
_REPEATED = frozenset({OpClass.GENERATE, OpClass.BROADCAST, OpClass.FREE})
"""What a compiler makes anew for each of several users rather than keep."""
_NOT_STABLEHLO = frozenset({"tf32", "token", "opaque"})
_MOST_NODES = 64
_MOST_REPEATED = 3


class Found(NamedTuple):
    """The distinct units of a graph, which nodes each stands for (by its number), and what has none."""

    units: tuple[Unit, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...]
    """Unit, and the nodes that share its time; a unit that stands several times has several entries."""
    uncovered: Counter[str]


def units_of(graph: OpGraph, *, fused: bool) -> Found:
    """The units of all nodes that take time. ``fused``: chains of elementwise work into their consumer.

    O(nodes + edges), in Python: what follows compiles.
    """
    reader = _Reader(graph)
    wanted = reader.wanted
    groups = _groups(graph, wanted) if fused else [(node,) for node, asked in enumerate(wanted) if asked]
    number: dict[Unit, int] = {}
    members: list[tuple[int, tuple[int, ...]]] = []
    uncovered: Counter[str] = Counter()
    for group in groups:
        whole = reader.unit(group, repeats=fused)
        parts = [(group, whole)] if whole is not None else [((node,), reader.unit((node,))) for node in group]
        for nodes, unit in parts:
            paid = tuple(node for node in nodes if wanted[node])
            if unit is None:
                uncovered.update(graph.op_name(node) for node in paid)
            elif paid:
                members.append((number.setdefault(unit, len(number)), paid))
    return Found(tuple(number), tuple(members), uncovered)


def _groups(graph: OpGraph, wanted: Sequence[bool]) -> Iterator[tuple[int, ...]]:
    """Chains by their last node: what only one consumer uses joins it."""
    uses: list[int] = np.bincount(graph.data_deps.values, minlength=len(graph)).tolist()
    held = np.zeros(len(graph), np.bool_)
    held[graph.regions.carried_producer] = True
    held |= np.bincount(graph.control_deps.values, minlength=len(graph)) > 0
    kept: list[bool] = held.tolist()
    classes: list[int] = graph.op_class.tolist()
    kinds: list[int] = graph.kind.tolist()
    region: list[int] = graph.region.tolist()
    deps = graph.data_deps.to_lists()
    order: list[int] = topological_order(graph).tolist()
    owner = list(range(len(graph)))
    size = [1] * len(graph)
    for node in reversed(order):
        root = owner[node]
        joining = _joining(classes, node, root)
        for dep in deps[node]:
            joins = classes[dep] in joining and uses[dep] == 1 and not kept[dep]
            joins = joins and kinds[dep] == NodeKind.COMPUTE
            if joins and owner[dep] == dep and region[dep] == region[root] and size[root] < _MOST_NODES:
                owner[dep] = root
                size[root] += 1
    found: dict[int, list[int]] = {}
    for node in order:
        found.setdefault(owner[node], []).append(node)
    yield from (tuple(nodes) for nodes in found.values() if any(wanted[node] for node in nodes))


def _joining(classes: Sequence[int], node: int, root: int) -> frozenset[OpClass]:
    """The classes of producers that a node takes in."""
    if classes[root] == OpClass.CONTRACTION:
        return _INTO_PRODUCT
    return _JOIN if classes[node] in _TAKE or root != node else frozenset()


class _Writing:
    """A unit under way."""

    __slots__ = ("arguments", "lines", "names", "outside", "values")

    def __init__(self) -> None:
        self.names = count()
        self.lines: list[str] = []
        self.arguments: list[Tensor] = []
        self.values: dict[int, tuple[Value, ...]] = {}
        self.outside: dict[tuple[int, Tensor], Value] = {}

    def argument(self, producer: int, tensor: Tensor) -> Value:
        """What a node outside makes; an unknown producer (-1) is another each time."""
        known = self.outside.get((producer, tensor)) if producer >= 0 else None
        if known is not None:
            return known
        value = Value(f"%p{len(self.arguments)}", tensor)
        self.arguments.append(tensor)
        if producer >= 0:
            self.outside[producer, tensor] = value
        return value


class _Reader:
    """A graph as its units are read from it."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.deps = graph.data_deps.to_lists()
        self.operands, self.results = graph.operands.to_lists(), graph.results.to_lists()
        self.types = [_tensor(graph, row) for row in range(len(graph.types))]
        self.names: Mapping[int, str] = {
            row: graph.strings[row].rpartition(".")[2] for row in np.unique(graph.op_row).tolist()
        }
        self.op: list[int] = graph.op_row.tolist()
        self.classes: list[int] = graph.op_class.tolist()
        timed = (graph.kind == int(NodeKind.COMPUTE)) & (graph.resource == int(Resource.DEVICE))
        # A node of a branch that is not taken never runs.
        timed &= ~takes_no_time(graph) & (graph.multiplicity != 0)
        self.wanted: list[bool] = timed.tolist()

    def unit(self, nodes: Sequence[int], *, repeats: bool = False) -> Unit | None:
        """The program of some nodes, the last of which makes what others use; None where one has none."""
        writing = _Writing()
        inside = frozenset(nodes)
        for node in nodes:
            if not self._write(writing, node, inside, _MOST_REPEATED if repeats else 0):
                return None
        return Unit(tuple(writing.lines), tuple(writing.arguments), writing.values[nodes[-1]])

    def _write(self, writing: _Writing, node: int, inside: frozenset[int], repeats: int) -> bool:
        results = [self.types[row] for row in self.results[node]]
        wanted = [self.types[row] for row in self.operands[node]]
        stated = [each for each in results if each is not None]
        asked = [each for each in wanted if each is not None]
        if len(stated) < len(results) or len(asked) < len(wanted):
            return False
        operands = self._bound(writing, node, asked, inside, repeats)
        made = write_operation(Asked(self.names[self.op[node]], operands, tuple(stated), writing.names))
        if made is None:
            return False
        lines, writing.values[node] = made
        writing.lines += lines
        return True

    def _bound(
        self, writing: _Writing, node: int, wanted: Sequence[Tensor], inside: frozenset[int], repeats: int
    ) -> tuple[Value, ...]:
        """A value for each operand: of the first producer that makes such a one, in the order of both."""
        left = list(self.deps[node])
        bound: list[Value] = []
        for tensor in wanted:
            producer = next((dep for dep in left if self._makes(dep, tensor)), -1)
            if producer >= 0:
                left.remove(producer)
            if producer >= 0 and producer not in writing.values and producer not in inside and repeats:
                again = self.classes[producer] in _REPEATED
                if again:
                    self._write(writing, producer, inside, repeats - 1)
            made = writing.values.get(producer, ())
            bound.append(
                next((value for value in made if value.type == tensor), None)
                or writing.argument(producer, tensor)
            )
        return tuple(bound)

    def _makes(self, node: int, tensor: Tensor) -> bool:
        return any(self.types[row] == tensor for row in self.results[node])


def _tensor(graph: OpGraph, row: int) -> Tensor | None:
    """A type that a program can state: element type and all extents known, and StableHLO's own."""
    element, shape = graph.types.dtype_of(row), graph.types.shape(row)
    if (
        element is None
        or -1 in shape
        or element.block_elements
        or element.name in {"tf32", "token", "opaque"}
    ):
        return None
    return Tensor(element, shape)
