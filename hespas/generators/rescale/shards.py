"""Tensor extents that a mesh axis divides, derived from one trace by following shards from collectives
through the program.

Shards are the operand of an all-gather and the result of a reduce-scatter. The contracted extent of a product
whose result is all-reduced along a tensor-parallel axis is divided too. From there, divided dimensions are
marked along data dependencies, through operations whose shapes have only one interpretation. Dimensions that
are not reached do not depend on the axis. A reached operation with several interpretations raises an error
that names it.

A graph has no dimension numbers. Therefore all interpretations of the shapes of an operation (relations
between the dimensions of its tensors) are enumerated, and the result is the one on which all of them agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import numpy as np

from hespas.costs.table import canonical_name
from hespas.generators.rescale.figures import GraphFigures, node_text, recount, shape_text
from hespas.generators.rescale.mesh import GROWS
from hespas.graph import CollectiveKind, OpClass, OpGraph
from hespas.graph.columns import BoolArray
from hespas.graph.errors import UnsupportedError

__all__ = [
    "AxisChange",
    "Dims",
    "Relations",
    "Shape",
    "broadcasts",
    "permuted",
    "products",
    "reductions",
    "reshaped",
    "resize_shards",
]

_CONTRADICTION = "two collectives imply different split dimensions of one tensor"

Shape = tuple[int, ...]
Dims = frozenset[int]
"""Indices of dimensions in a shape."""
Relations = Iterator[tuple[tuple[tuple[int, int], ...], ...]]
"""Possible relations of the tensors of an operation: classes of (tensor, dimension) with a common extent."""


def reshaped(source: Shape, target: Shape, dims: Dims) -> Dims | None:
    """Return the dimensions of ``target`` that the axis divides after a reshape, if it divides ``dims`` of
    ``source``; None if the shapes do not determine them.

    Both shapes are cut into runs of dimensions with equal numbers of elements. Within a run, only the slowest
    dimension larger than 1 may be divided.
    """
    split: set[int] = set()
    source_end = target_end = 0
    while source_end < len(source) or target_end < len(target):
        source_start, target_start = source_end, target_end
        source_size = target_size = 1
        while True:
            if source_size <= target_size and source_end < len(source):
                source_size, source_end = source_size * source[source_end], source_end + 1
            elif target_end < len(target):
                target_size, target_end = target_size * target[target_end], target_end + 1
            else:
                break
            if source_size == target_size and source_size > 1:
                break
        slowest = next((dim for dim in range(source_start, source_end) if source[dim] != 1), -1)
        inside = {dim for dim in dims if source_start <= dim < source_end}
        if inside - {slowest}:
            return None
        if inside:
            target_dim = next((dim for dim in range(target_start, target_end) if target[dim] != 1), -1)
            if target_dim < 0:
                return None
            split.add(target_dim)
    return frozenset(split)


def permuted(source: Shape, target: Shape, dims: Dims) -> Dims | None:
    """Return the dimensions that the axis divides after a transpose with an unknown permutation; None if the
    shapes do not determine them.
    """
    split: set[int] = set()
    for extent in {source[dim] for dim in dims}:
        if not {dim for dim, other in enumerate(source) if other == extent} <= dims:
            return None
        split |= {dim for dim, other in enumerate(target) if other == extent}
    return frozenset(split) if len(split) == len(dims) else None


def broadcasts(source: Shape, target: Shape) -> Relations:
    """Yield the possible relations between the dimensions of a tensor and of its broadcast. The order of
    dimensions is preserved, and an extent of 1 is repeated.
    """
    for chosen in combinations(range(len(target)), len(source)):
        if all(source[dim] in (1, target[into]) for dim, into in enumerate(chosen)):
            yield tuple(((0, a), (1, b)) for a, b in enumerate(chosen) if source[a] == target[b])


def reductions(source: Shape, target: Shape) -> Relations:
    """Yield the possible relations between the dimensions of a tensor and of its reduction over some of
    them.
    """
    for chosen in combinations(range(len(source)), len(target)):
        if all(source[dim] == target[into] for into, dim in enumerate(chosen)):
            yield tuple(((0, dim), (1, into)) for into, dim in enumerate(chosen))


def products(lhs: Shape, rhs: Shape, result: Shape, sizes: tuple[int, int, int, int]) -> Relations:
    """Yield the possible relations between the dimensions of the operands and the result of a matmul.
    ``sizes`` has the total extents of its batch, rows, columns and contracted dimensions.
    """

    def size_of(shape: Shape, kinds: Sequence[str], wanted: str) -> int:
        return prod(extent for extent, kind in zip(shape, kinds, strict=True) if kind == wanted)

    for left in product("bmk", repeat=len(lhs)):
        if [size_of(lhs, left, kind) for kind in "bmk"] != [sizes[0], sizes[1], sizes[3]]:
            continue
        for right in product("bnk", repeat=len(rhs)):
            if [size_of(rhs, right, kind) for kind in "bnk"] != [sizes[0], sizes[2], sizes[3]]:
                continue
            relation = _product_relation(lhs, rhs, result, left, right)
            if relation is not None:
                yield relation


def _product_relation(
    lhs: Shape, rhs: Shape, result: Shape, left: Sequence[str], right: Sequence[str]
) -> tuple[tuple[tuple[int, int], ...], ...] | None:
    """Return the relation between the dimensions of the operands and the result of a matmul; None if the
    shapes contradict it. ``left`` and ``right`` give the kind of each operand dimension (batch, row, column,
    contracted).

    Dimensions of the same kind are paired in order.
    """

    def dims_of(kinds: Sequence[str], wanted: str) -> list[int]:
        return [dim for dim, kind in enumerate(kinds) if kind == wanted]

    batch, other = dims_of(left, "b"), dims_of(right, "b")
    inner, partner = dims_of(left, "k"), dims_of(right, "k")
    rows, columns = dims_of(left, "m"), dims_of(right, "n")
    shape = tuple(lhs[dim] for dim in (*batch, *rows)) + tuple(rhs[dim] for dim in columns)
    if shape != result or len(batch) != len(other) or len(inner) != len(partner):
        return None
    pairs = [*zip(batch, other, strict=True), *zip(inner, partner, strict=True)]
    if any(lhs[a] != rhs[b] for a, b in pairs):
        return None
    classes: list[tuple[tuple[int, int], ...]] = [
        ((0, a), (1, b), (2, into)) for into, (a, b) in enumerate(zip(batch, other, strict=True))
    ]
    classes += [((0, a), (1, b)) for a, b in zip(inner, partner, strict=True)]
    classes += [((0, dim), (2, len(batch) + into)) for into, dim in enumerate(rows)]
    classes += [((1, dim), (2, len(batch) + len(rows) + into)) for into, dim in enumerate(columns)]
    return tuple(classes)


_Slot = tuple[int, int]
"""Tensor of a node by (node, index); operands first, then results."""

_VIEWS = {"reshape", "bitcast", "dynamic_reshape"}
_SLICES = {"slice", "dynamic_slice", "dynamic_update_slice", "pad", "concatenate", "reverse", "copy"}
_ELEMENTWISE = (OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL)
_AFTER_PRODUCT = _VIEWS | {"transpose", "convert", "add", "copy", "multiply"}
"""Operations between a product with a partial sum and the all-reduce that completes it."""


@dataclass(frozen=True, slots=True)
class AxisChange:
    """Change of the size of a mesh axis from ``before`` to ``after``. ``is_along`` is True for the rows of
    the graph's table of collectives whose groups run along the axis.

    ``by_products`` is True if reductions along the axis sum partial results of matmuls, as on a
    tensor-parallel axis.
    """

    axis: str
    before: int
    after: int
    is_along: BoolArray
    by_products: bool


def resize_shards(graph: OpGraph, now: GraphFigures, change: AxisChange) -> GraphFigures:
    """Return the figures of a graph after the size of an axis changed. Raises ``UnsupportedError`` for
    ambiguous operations.
    """
    flow = _ShardFlow(graph, change)
    flow.seed()
    flow.run()
    flow.check()
    marks = {slot: dims for slot, dims in flow.marks.items() if dims}
    return recount(graph, now, marks, change.before, change.after)


class _ShardFlow:
    """Propagation of divided dimensions through a graph. A mark is a dimension of a tensor that the mesh axis
    divides.
    """

    def __init__(self, graph: OpGraph, change: AxisChange) -> None:
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

    def _refusal(self, node: int, reason: str) -> UnsupportedError:
        types = [shape_text(self._graph.types, row) for row in self._types(node)]
        return UnsupportedError(
            f"cannot determine the dimensions that axis {self._change.axis} splits: {reason} "
            f"(tensors of the operation: {', '.join(types)})",
            position=node_text(self._graph, node),
            hint="give a trace at another size of the axis: `others=OTHER_TRACE`",
        )

    def seed(self) -> None:
        """Mark the shards of the collectives along the axis."""
        table = self._graph.collectives
        for row in np.flatnonzero(self._change.is_along).tolist():
            node, kind = int(table.node[row]), CollectiveKind(int(table.kind[row]))
            if kind is CollectiveKind.ALL_GATHER:
                self._seed_split(node, small=0)
            elif kind in {CollectiveKind.REDUCE_SCATTER, CollectiveKind.REDUCE_SCATTER_BLOCK}:
                self._seed_split(node, small=1)
            elif kind is CollectiveKind.ALL_REDUCE and self._change.by_products:
                self._seed_products(node)
            elif kind in {CollectiveKind.ALL_TO_ALL, CollectiveKind.RAGGED_ALL_TO_ALL}:
                raise self._refusal(node, "the shapes of an all-to-all do not define its shards")

    def _seed_split(self, node: int, *, small: int) -> None:
        """Mark the divided dimension of a collective such as an all-gather: the only dimension in which
        operand and result differ. ``small`` is the side with the shard (0: operand, 1: result).
        """
        count = len(self._operands[node])
        if not count or count != len(self._results[node]):
            raise self._refusal(node, "the trace does not have the shapes of the operation")
        for slot in range(count):
            shapes = [self._shapes[rows[node][slot]] for rows in (self._operands, self._results)]
            part, whole = shapes[small], shapes[1 - small]
            size = self._change.before
            dims = [dim for dim, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b]
            if len(part) != len(whole) or len(dims) != 1 or part[dims[0]] * size != whole[dims[0]]:
                raise self._refusal(node, "the operand and the result do not differ in exactly one dimension")
            self._mark(node, slot + small * count, frozenset(dims))
            self._mark(node, slot + (1 - small) * count, frozenset())

    def _seed_products(self, reduction: int) -> None:
        """Mark the contracted dimensions of the matrix products whose result the all-reduce ``reduction``
        completes.
        """
        waiting, seen = list(self._deps[reduction]), set[int]()
        while waiting:
            node = waiting.pop()
            if node in seen or node in self._row:
                continue
            seen.add(node)
            if node not in self._products:
                if canonical_name(self._graph.op_name(node)) in _AFTER_PRODUCT:
                    waiting += self._deps[node]
                continue
            contracted: set[tuple[tuple[int, int], ...]] = set()
            for relation in self._relations(node):
                classes = [extent for extent in relation if all(tensor < 2 for tensor, _ in extent)]
                contracted.add(classes[0] if len(classes) == 1 else ())
            if len(contracted) != 1 or not next(iter(contracted)):
                raise self._refusal(
                    node, "the shapes of the matmul do not determine its contracted dimension"
                )
            for tensor, dim in next(iter(contracted)):
                self._mark(node, tensor, frozenset({dim}))

    def _mark(self, node: int, slot: int, dims: Dims) -> None:
        marked = self.marks.get((node, slot))
        if marked is None:
            if dims or node in self._row:
                self.marks[node, slot] = dims
                self._queue.append(node)
        elif marked != dims:
            raise self._refusal(node, _CONTRADICTION)

    def run(self) -> None:
        """Propagate marks until nothing changes. O(marked nodes x their tensors)."""
        while self._queue:
            node = self._queue.pop()
            self._mark_inside(node)
            count = len(self._operands[node])
            for slot in range(len(self._types(node))):
                dims = self.marks.get((node, slot))
                if dims is None:
                    continue
                if slot >= count:
                    self._mark_consumers(node, slot, dims)
                    continue
                source = self._source(node, slot)
                if source is not None:
                    self._mark(*source, dims)
                elif dims and any(not self._shares_type(node, dep) for dep in self._deps[node]):
                    reason = "no dependency has a result with the type of the split operand"
                    raise self._refusal(node, reason)

    def _mark_consumers(self, node: int, slot: int, dims: Dims) -> None:
        for consumer in self._consumers[node]:
            if canonical_name(self._graph.op_name(consumer)) == "return":
                continue  # of the program around the part of one device, with whole types
            if dims and not self._shares_type(consumer, node):
                raise self._refusal(
                    consumer, f"no operand has the type of a result of {node_text(self._graph, node)}"
                )
            for operand in range(len(self._operands[consumer])):
                if self._source(consumer, operand) == (node, slot):
                    self._mark(consumer, operand, dims)

    def _shares_type(self, node: int, dep: int) -> bool:
        """Return True if an operand of ``node`` has the same type as a result of ``dep``."""
        return not set(self._operands[node]).isdisjoint(self._results[dep])

    def _source(self, node: int, slot: int) -> _Slot | None:
        """Return the node and result that produce an operand; None for a parameter. Dependencies are in the
        order of operands.
        """
        row = self._operands[node][slot]
        slots = [index for index, other in enumerate(self._operands[node]) if other == row]
        producers = [
            (dep, len(self._operands[dep]) + self._results[dep].index(row))
            for dep in self._deps[node]
            if row in self._results[dep]
        ]
        if not producers:
            return None
        if len(slots) == len(producers):
            return producers[slots.index(slot)]
        if self._graph.op_class[node] in _ELEMENTWISE or len(set(producers)) == 1 == len(slots):
            return producers[min(slots.index(slot), len(producers) - 1)]
        if any(self.marks.get(producer) for producer in producers):
            raise self._refusal(
                node, "several operands have the same type, and any of them may be the split one"
            )
        return None

    def _mark_inside(self, node: int) -> None:
        """Propagate the marks of a node's operands and results to its other tensors."""
        shapes = self._shapes_of(node)
        marks = {slot: self.marks[node, slot] for slot in range(len(shapes)) if (node, slot) in self.marks}
        row = self._row.get(node)
        is_seed = (
            row is not None
            and bool(self._change.is_along[row])
            and self._graph.collectives.kind[row] in GROWS
        )
        if not any(marks.values()) or is_seed:
            return
        name, op_class = canonical_name(self._graph.op_name(node)), self._graph.op_class[node]
        for slot, dims in marks.items():
            if op_class in _ELEMENTWISE or node in self._row or name in _SLICES:
                for other, shape in enumerate(shapes):
                    if other == slot or len(shape) != len(shapes[slot]) or not shape:
                        continue
                    if any(shape[dim] != shapes[slot][dim] for dim in dims):
                        raise self._refusal(node, "the operation slices or repeats the split dimension")
                    self._mark(node, other, dims)
            elif name in _VIEWS or name == "transpose":
                follow = permuted if name == "transpose" else reshaped
                target_dims = follow(shapes[slot], shapes[1 - slot], dims)
                if target_dims is None:
                    raise self._refusal(
                        node, f"the shapes of the {name} do not determine the split dimension of its result"
                    )
                self._mark(node, 1 - slot, target_dims)
        if name in {"broadcast_in_dim", "broadcast", "reduce"} or node in self._products:
            self._mark_by_relations(node, marks)
        elif not shapes or (
            op_class not in _ELEMENTWISE
            and node not in self._row
            and name not in _SLICES | _VIEWS | {"transpose", "constant", "iota", "parameter"}
        ):
            raise self._refusal(node, f"Hespas has no rule for a {name}")

    def _relations(self, node: int) -> Relations:
        shapes = self._shapes_of(node)
        row = self._products.get(node)
        if row is not None and len(shapes) == 3:
            table = self._graph.contractions
            sizes = (int(table.batch[row]), int(table.m[row]), int(table.n[row]), int(table.k[row]))
            yield from products(shapes[0], shapes[1], shapes[2], sizes)
        elif canonical_name(self._graph.op_name(node)) == "reduce" and len(self._results[node]) == 1:
            # The initial value is between the operand and the result.
            last = len(shapes) - 1
            for relation in reductions(shapes[0], shapes[-1]):
                yield tuple(
                    tuple((last if tensor else 0, dim) for tensor, dim in extent) for extent in relation
                )
        elif len(shapes) == 2:
            yield from broadcasts(shapes[0], shapes[1])

    def _mark_by_relations(self, node: int, marks: dict[int, Dims]) -> None:
        """Mark the dimensions of a node's tensors that the axis divides. If the shapes allow several
        relations between the tensors, only dimensions that are divided under all of them are marked.
        """
        if node in self._products and not self._change.by_products:
            raise self._refusal(node, "the matmul has a split operand, so its work also depends on the axis")
        results: set[tuple[tuple[int, Dims], ...]] = set()
        for relation in self._relations(node):
            split: dict[int, set[int]] = {}
            for extent in relation:
                if any(dim in marks.get(tensor, ()) for tensor, dim in extent):
                    for tensor, dim in extent:
                        split.setdefault(tensor, set()).add(dim)
            results.add(tuple(sorted((tensor, frozenset(dims)) for tensor, dims in split.items())))
        if len(results) != 1:
            raise self._refusal(node, "the shapes do not determine the split dimension of the other tensors")
        for tensor, dims in next(iter(results)):
            if tensor not in marks:
                self._mark(node, tensor, dims)
            elif not dims <= marks[tensor]:
                raise self._refusal(node, _CONTRADICTION)

    def check(self) -> None:
        """Raise ``UnsupportedError`` if a reduction along a tensor-parallel axis has no known matmul before
        it, or if parameters of one type are divided differently.
        """
        sums = self._change.is_along & (self._graph.collectives.kind == CollectiveKind.ALL_REDUCE)
        if self._change.by_products and sums.any() and not self.marks:
            node = int(self._graph.collectives.node[sums][0])
            raise self._refusal(node, "the all-reduce does not sum the results of a known matmul")
        if not self.marks:
            return
        first_use: dict[int, tuple[Dims, int]] = {}
        for node, operands in enumerate(self._operands):
            made = {row for dep in self._deps[node] for row in self._results[dep]}
            for slot, row in enumerate(operands):
                if not self._shapes[row] or row in made:
                    continue
                dims = self.marks.get((node, slot), frozenset())
                first_dims, first_node = first_use.setdefault(row, (dims, node))
                if first_dims != dims:
                    other = node_text(self._graph, first_node)
                    raise self._refusal(
                        node, f"{other} has a parameter of the same type with another split dimension"
                    )
