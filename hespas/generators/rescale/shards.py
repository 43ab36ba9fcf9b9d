"""One trace: which extents an axis splits, followed from its collectives through the program.

What an all-gather takes and a reduce-scatter gives is a part; so is what a product sums over whose result is
all-reduced along a tensor axis. From there parts are followed along data dependencies, through operations
whose shapes leave one way only. Extents that no part reaches do not depend on the axis. Any operation that a
part reaches and that leaves a choice is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hespas.costs.table import canonical_name
from hespas.generators.rescale.extents import (
    Dims,
    Shape,
    Ways,
    broadcasts,
    permuted,
    products,
    reductions,
    reshaped,
)
from hespas.generators.rescale.figures import Figures, node_text, shape_text
from hespas.generators.rescale.recount import recounted
from hespas.graph import CollectiveKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray
from hespas.graph.errors import UnsupportedError

__all__ = ["Change", "sharded"]

_Slot = tuple[int, int]
"""A tensor of a node: operands first, then results."""

_VIEWS = {"reshape", "bitcast", "dynamic_reshape"}
_SLICES = {"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "reverse", "copy"}
_ALIKE = (OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL)
_SUMMED = _VIEWS | {"transpose", "convert", "add", "copy", "multiply"}
"""What a partial sum may pass between the product that makes it and the all-reduce that completes it."""


@dataclass(frozen=True, slots=True)
class Change:
    """An axis from one size to another; ``here`` marks the rows of the table of collectives along it.
    ``by_products``: sums along it complete products of matrices, as a tensor axis does.
    """

    axis: str
    before: int
    after: int
    here: BoolArray
    by_products: bool


def sharded(graph: OpGraph, now: Figures, change: Change) -> Figures:
    """The figures with everything that the axis splits in other parts. Raises ``UnsupportedError``."""
    flow = _Flow(graph, change)
    flow.seed()
    flow.run()
    flow.check()
    marks = {slot: dims for slot, dims in flow.marks.items() if dims}
    return recounted(graph, now, marks, change.before, change.after)


class _Flow:
    """Marks on the tensors of nodes: the dimensions that the axis splits."""

    def __init__(self, graph: OpGraph, change: Change) -> None:
        self._graph, self._change = graph, change
        self._operands, self._results = graph.operands.to_lists(), graph.results.to_lists()
        self._deps = graph.data_deps.to_lists()
        self._consumers = graph.data_deps.transpose(len(graph)).to_lists()
        self._shapes: list[Shape] = [graph.types.shape(row) for row in range(len(graph.types))]
        self._row = dict(zip(graph.collectives.node.tolist(), range(len(graph.collectives)), strict=True))
        self._products = dict(
            zip(graph.contractions.node.tolist(), range(len(graph.contractions)), strict=True)
        )
        self._queue: list[int] = []
        self.marks: dict[_Slot, Dims] = {}

    def _types(self, node: int) -> list[int]:
        return self._operands[node] + self._results[node]

    def _shapes_of(self, node: int) -> list[Shape]:
        return [self._shapes[row] for row in self._types(node)]

    def _refuse(self, node: int, why: str) -> UnsupportedError:
        types = [shape_text(self._graph.types, row) for row in self._types(node)]
        return UnsupportedError(
            f"axis {self._change.axis} splits a tensor of {', '.join(types)}, and {why}",
            position=node_text(self._graph, node),
            hint="give a trace at another size of the axis: `others=OTHER_TRACE`",
        )

    # --- where parts begin

    def seed(self) -> None:
        """Mark what the collectives along the axis say."""
        table = self._graph.collectives
        for row in np.flatnonzero(self._change.here).tolist():
            node, kind = int(table.node[row]), CollectiveKind(int(table.kind[row]))
            if kind is CollectiveKind.ALL_GATHER:
                self._seed_split(node, small=0)
            elif kind in {CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER_BLOCK}:
                self._seed_split(node, small=1)
            elif kind is CollectiveKind.ALL_REDUCE and self._change.by_products:
                self._seed_products(node)
            elif kind in {CollectiveKind.ALL_TO_ALL, CollectiveKind.RAGGED_ALL_TO_ALL}:
                raise self._refuse(node, "what an all-to-all carries follows from more than shapes")

    def _seed_split(self, node: int, *, small: int) -> None:
        """The dimension in which one side is a part of the other."""
        count = len(self._operands[node])
        if not count or count != len(self._results[node]):
            raise self._refuse(node, "its shapes are not in the trace")
        for slot in range(count):
            shapes = [self._shapes[rows[node][slot]] for rows in (self._operands, self._results)]
            part, whole = shapes[small], shapes[1 - small]
            size = self._change.before
            places = [d for d, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b]
            if len(part) != len(whole) or len(places) != 1 or part[places[0]] * size != whole[places[0]]:
                raise self._refuse(node, "no one dimension is split by it alone")
            self._mark(node, slot + small * count, frozenset(places))
            self._mark(node, slot + (1 - small) * count, frozenset())

    def _seed_products(self, node: int) -> None:
        """Mark what the products sum over whose result an all-reduce completes."""
        waiting, seen = list(self._deps[node]), set[int]()
        while waiting:
            each = waiting.pop()
            if each in seen or each in self._row:
                continue
            seen.add(each)
            if each in self._products:
                self._seed_inner(each)
            elif canonical_name(self._graph.op_name(each)) in _SUMMED:
                waiting += self._deps[each]

    def _seed_inner(self, node: int) -> None:
        inner: set[tuple[tuple[int, int], ...]] = set()
        for way in self._ways(node):
            classes = [each for each in way if all(tensor < 2 for tensor, _ in each)]
            inner.add(classes[0] if len(classes) == 1 else ())
        if len(inner) != 1 or not next(iter(inner)):
            raise self._refuse(node, "which dimension the product sums over is not known from its shapes")
        for tensor, place in next(iter(inner)):
            self._mark(node, tensor, frozenset({place}))

    # --- how parts go on

    def _mark(self, node: int, slot: int, dims: Dims) -> None:
        known = self.marks.get((node, slot))
        if known is None:
            if dims or node in self._row:
                self.marks[node, slot] = dims
                self._queue.append(node)
        elif known != dims:
            raise self._refuse(node, "two collectives say differently how")

    def run(self) -> None:
        """Follow marks until nothing is new. O(marked nodes x their tensors)."""
        while self._queue:
            node = self._queue.pop()
            self._inside(node)
            count = len(self._operands[node])
            for slot in range(len(self._types(node))):
                dims = self.marks.get((node, slot))
                if dims is not None:
                    self._outside(node, slot, dims, count)

    def _outside(self, node: int, slot: int, dims: Dims, count: int) -> None:
        """From an operand to what made it, from a result to what takes it."""
        if slot < count:
            source = self._source(node, slot)
            if source is not None:
                self._mark(*source, dims)
            elif dims and any(not self._takes(node, dep) for dep in self._deps[node]):
                raise self._refuse(node, "no result of what it waits for is of the type of that operand")
            return
        for consumer in self._consumers[node]:
            if canonical_name(self._graph.op_name(consumer)) == "return":
                continue  # of the program around the part of one device: its types are those of the whole
            if dims and not self._takes(consumer, node):
                raise self._refuse(consumer, f"it takes no tensor as {node_text(self._graph, node)} gives it")
            for place in range(len(self._operands[consumer])):
                if self._source(consumer, place) == (node, slot):
                    self._mark(consumer, place, dims)

    def _takes(self, node: int, dep: int) -> bool:
        """Whether an operand is of the type of some result of a node that it waits for."""
        return not set(self._operands[node]).isdisjoint(self._results[dep])

    def _source(self, node: int, slot: int) -> _Slot | None:
        """The node that made an operand, None for a parameter. Dependencies are in the order of operands."""
        row = self._operands[node][slot]
        places = [place for place, other in enumerate(self._operands[node]) if other == row]
        makers = [
            (dep, len(self._operands[dep]) + self._results[dep].index(row))
            for dep in self._deps[node]
            if row in self._results[dep]
        ]
        if not makers:
            return None
        if len(places) == len(makers):
            return makers[places.index(slot)]
        if self._graph.op_class[node] in _ALIKE or len(set(makers)) == 1 == len(places):
            return makers[min(places.index(slot), len(makers) - 1)]
        marked = any(self.marks.get(maker) for maker in makers)
        if marked:
            raise self._refuse(node, "which of its equal operands that is, is not known")
        return None

    def _inside(self, node: int) -> None:
        """From the marked tensors of a node to its others."""
        shapes = self._shapes_of(node)
        marks = {slot: self.marks[node, slot] for slot in range(len(shapes)) if (node, slot) in self.marks}
        if not any(marks.values()) or self._is_seed(node):
            return
        name, op_class = canonical_name(self._graph.op_name(node)), self._graph.op_class[node]
        for slot, dims in marks.items():
            if op_class in _ALIKE or node in self._row or name in _SLICES:
                self._same_places(node, slot, dims, shapes)
            elif name in _VIEWS or name == "transpose":
                moved = (permuted if name == "transpose" else reshaped)(shapes[slot], shapes[1 - slot], dims)
                if moved is None:
                    raise self._refuse(node, f"where a {name} puts it is not known from its shapes")
                self._mark(node, 1 - slot, moved)
        if name in {"broadcast_in_dim", "broadcast", "reduce"} or node in self._products:
            self._by_ways(node, marks)
        elif not shapes or (
            op_class not in _ALIKE
            and node not in self._row
            and name not in _SLICES | _VIEWS | {"transpose", "constant", "iota", "parameter"}
        ):
            raise self._refuse(node, f"no rule says what a {name} makes of it")

    def _is_seed(self, node: int) -> bool:
        row = self._row.get(node)
        return row is not None and bool(self._change.here[row]) and self._is_split(row)

    def _is_split(self, row: int) -> bool:
        return self._graph.collectives.kind[row] in {
            CollectiveKind.ALL_GATHER,
            CollectiveKind.REDUCE_SCATTER,
            CollectiveKind.REDUCE_SCATTER_BLOCK,
        }

    def _same_places(self, node: int, slot: int, dims: Dims, shapes: list[Shape]) -> None:
        """Tensors of as many dimensions are split in the same ones, which must be whole in all of them."""
        for other, shape in enumerate(shapes):
            if other == slot or len(shape) != len(shapes[slot]) or not shape:
                continue
            if any(shape[place] != shapes[slot][place] for place in dims):
                raise self._refuse(node, "the split dimension is cut or repeated by it")
            self._mark(node, other, dims)

    def _ways(self, node: int) -> Ways:
        shapes = self._shapes_of(node)
        row = self._products.get(node)
        if row is not None and len(shapes) == 3:
            table = self._graph.contractions
            sizes = (int(table.batch[row]), int(table.m[row]), int(table.n[row]), int(table.k[row]))
            yield from products(shapes[0], shapes[1], shapes[2], sizes)
        elif canonical_name(self._graph.op_name(node)) == "reduce" and len(self._results[node]) == 1:
            yield from self._related(reductions(shapes[0], shapes[-1]), len(shapes) - 1)
        elif len(shapes) == 2:
            yield from broadcasts(shapes[0], shapes[1])

    @staticmethod
    def _related(ways: Ways, last: int) -> Ways:
        """Reductions have initial values between what they take and what they give."""
        for way in ways:
            yield tuple(tuple((last if tensor else 0, place) for tensor, place in each) for each in way)

    def _by_ways(self, node: int, marks: dict[int, Dims]) -> None:
        """What every way that the shapes leave says of the other tensors."""
        if node in self._products and not self._change.by_products:
            raise self._refuse(node, "a product of parts is work that a shard axis does not share")
        told: set[tuple[tuple[int, Dims], ...]] = set()
        for way in self._ways(node):
            found: dict[int, set[int]] = {}
            for each in way:
                if any(place in marks.get(tensor, ()) for tensor, place in each):
                    for tensor, place in each:
                        found.setdefault(tensor, set()).add(place)
            told.add(tuple(sorted((tensor, frozenset(places)) for tensor, places in found.items())))
        if len(told) != 1:
            raise self._refuse(node, "which dimension of its others that is, is not known from its shapes")
        for tensor, dims in next(iter(told)):
            if tensor not in marks:
                self._mark(node, tensor, dims)
            elif not dims <= marks[tensor]:
                raise self._refuse(node, "two collectives say differently how")

    # --- what must hold in the end

    def check(self) -> None:
        """Sums along a tensor axis must complete something; parameters of one type must be split alike."""
        sums = self._change.here & (self._graph.collectives.kind == CollectiveKind.ALL_REDUCE)
        if self._change.by_products and sums.any() and not self.marks:
            node = int(self._graph.collectives.node[sums][0])
            raise self._refuse(node, "no product is known whose parts are summed along it")
        if not self.marks:
            return
        told: dict[int, tuple[Dims, int]] = {}
        for node, operands in enumerate(self._operands):
            made = {row for dep in self._deps[node] for row in self._results[dep]}
            for slot, row in enumerate(operands):
                if not self._shapes[row] or row in made:
                    continue
                dims = self.marks.get((node, slot), frozenset())
                first = told.setdefault(row, (dims, node))
                if first[0] != dims:
                    other = node_text(self._graph, first[1])
                    raise self._refuse(node, f"{other} takes a parameter of its type that is split otherwise")
