"""What is compiled and timed, as small programs of StableHLO: the operations of a graph, or of a table.

A program runs its operations ``%n`` times in a loop: the difference of two lengths is free of what it takes
to start a program. In each turn an element of the largest operand is new, and all operands pass a barrier
(not for IREE 3, which crashes on barriers of several values), so that no compiler may do the work once and
for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import isnan
from typing import NamedTuple

import numpy as np

from hespas.estimators.compiled.copies import copies_of, is_turned, origins_of
from hespas.estimators.interface import takes_no_time
from hespas.graph import DTypeKind, NodeKind, OpClass, OpGraph, Resource
from hespas.graph.columns import DType, dtype, find_dtype
from hespas.graph.groups import member_rows
from hespas.graph.passes import topological_order
from hespas.operations import Operations
from hespas.programs.collectives import collective, permute
from hespas.programs.contractions import convolution_text, find_convolution
from hespas.programs.operations import BINARY, UNARY, operator, reduce_window, select_and_scatter
from hespas.programs.text import Operator, Tensor, Value, dense

__all__ = [
    "Unit",
    "Units",
    "baseline_of",
    "call_text",
    "loop_text",
    "renewed_argument",
    "units_of",
    "units_of_table",
    "write_operation",
]

_INDEX = "tensor<i32>"
_INTEGER = dtype("i32")
_RENEWED = frozenset({DTypeKind.FLOAT, DTypeKind.SIGNED, DTypeKind.UNSIGNED})
_PACKED_BITS = 8


class Unit(NamedTuple):
    """What is timed as one: lines that make ``results`` of arguments ``%p0``, ``%p1``, ..."""

    lines: tuple[str, ...]
    arguments: tuple[Tensor, ...]
    results: tuple[Value, ...]


def renewed_argument(unit: Unit) -> int:
    """The argument an element of which is new in each turn: the largest that can be; -1 where none can."""
    able = [
        place
        for place, each in enumerate(unit.arguments)
        if each.elements and each.element.kind in _RENEWED and each.element.bits >= _PACKED_BITS
    ]
    return max(able, key=lambda place: unit.arguments[place].elements, default=-1)


def baseline_of(unit: Unit) -> Unit:
    """The loop of a unit without its work."""
    place = renewed_argument(unit)
    return Unit((), unit.arguments[place : place + 1] if place >= 0 else (), ())


def loop_text(unit: Unit, *, barrier: bool = True) -> str:
    """The program of a unit: ``@main`` takes the number of turns, then the arguments."""
    renewed = renewed_argument(unit)
    arguments = list(map(str, unit.arguments))
    results = [str(each.type) for each in unit.results]
    places = range(len(arguments))
    inside = ("%t", *(f"%q{place}" if place == renewed else f"%p{place}" for place in places))
    before = ("%i", *(f"%c{place}" for place in places)) if barrier else inside
    carried = [f"{name} = %a{place}" for place, name in enumerate(before[1:])]
    carried += [f"%r{place} = %z{place}" for place in range(len(results))]
    types = ", ".join((_INDEX, *arguments, *results))
    passed = f"{', '.join(inside)} = stablehlo.optimization_barrier {', '.join(before)} : "
    passed += ", ".join((_INDEX, *arguments))
    made = _counted(unit, renewed)
    back = ", ".join(("%t1", *(f"%p{place}" for place in places), *made.names))
    outputs = len(arguments) + len(results) + 1
    first = 1 + len(arguments) if results else 0
    returned = ", ".join(f"%o#{place}" for place in range(first, outputs)) if outputs > 1 else "%o"
    loop = f"%o:{outputs}" if outputs > 1 else "%o"
    kept = results or [_INDEX, *arguments]
    head = ", ".join(("%n: " + _INDEX, *(f"%a{place}: {each}" for place, each in enumerate(arguments))))
    lines = [
        f"func.func public @main({head}) -> ({', '.join(kept)}) {{",
        f"%zero = stablehlo.constant dense<0> : {_INDEX}",
        f"%one = stablehlo.constant dense<1> : {_INDEX}",
        *(f"%z{place} = stablehlo.constant {dense(each.type)}" for place, each in enumerate(unit.results)),
        f"{loop} = stablehlo.while({', '.join((f'{before[0]} = %zero', *carried))}) : {types}",
        "cond {",
        f"%more = stablehlo.compare LT, {before[0]}, %n : ({_INDEX}, {_INDEX}) -> tensor<i1>",
        "stablehlo.return %more : tensor<i1>",
        "} do {",
        *([passed] if barrier else ()),
        *_renewal(unit, renewed),
        *unit.lines,
        *made.lines,
        f"%t1 = stablehlo.add %t, %one : {_INDEX}",
        f"stablehlo.return {back} : {types}",
        "}",
        f"return {returned} : {', '.join(kept)}",
        "}",
    ]
    return "module {\n" + "\n".join(lines) + "\n}\n"


def call_text(unit: Unit) -> str:
    """The program of a unit without a loop: ``@main`` takes its arguments."""
    arguments = ", ".join(f"%p{place}: {each}" for place, each in enumerate(unit.arguments))
    results = unit.results or (Value("%one", Tensor(_INTEGER, ())),)
    types = ", ".join(str(each.type) for each in results)
    lines = [
        f"func.func public @main({arguments}) -> ({types}) {{",
        f"%zero = stablehlo.constant dense<0> : {_INDEX}",
        f"%one = stablehlo.constant dense<1> : {_INDEX}",
        *unit.lines,
        f"return {', '.join(each.name for each in results)} : {types}",
        "}",
    ]
    return "module {\n" + "\n".join(lines) + "\n}\n"


def _renewal(unit: Unit, place: int) -> list[str]:
    """The turn's number as the first element of an argument."""
    if place < 0:
        return []
    tensor = unit.arguments[place]
    scalar, one = tensor.scalar, tensor.reshaped([1] * tensor.rank)
    name = f"%p{place}"
    turn = name if not tensor.rank else "%turn"
    lines = [f"{turn} = stablehlo.convert %t : ({_INDEX}) -> {scalar}"]
    if tensor.rank:
        zeros = ", ".join(["%zero"] * tensor.rank)
        types = ", ".join((str(tensor), str(one), *[_INDEX] * tensor.rank))
        update = f"stablehlo.dynamic_update_slice %q{place}, %turns, {zeros}"
        lines += [
            f"%turns = stablehlo.reshape %turn : ({scalar}) -> {one}",
            f"{name} = {update} : ({types}) -> {tensor}",
        ]
    return lines


class _Made(NamedTuple):
    lines: Sequence[str]
    names: Sequence[str]


def _counted(unit: Unit, renewed: int) -> _Made:
    """The results; those made from nothing get the turn's number added, or every turn would be alike."""
    names = [each.name for each in unit.results]
    if renewed >= 0 or not unit.results or unit.results[0].type.element.kind not in _RENEWED:
        return _Made((), names)
    tensor = unit.results[0].type
    lines = [
        f"%turn = stablehlo.convert %t : ({_INDEX}) -> {tensor.scalar}",
        f"%turns = stablehlo.broadcast_in_dim %turn, dims = [] : ({tensor.scalar}) -> {tensor}",
        f"%counted = stablehlo.add {names[0]}, %turns : {tensor}",
    ]
    return _Made(lines, ["%counted", *names[1:]])


# --- operations of a graph, or chains of them that every compiler makes one of


def write_operation(
    op: str, operands: Sequence[Value], results: Sequence[Tensor], names: Iterator[int]
) -> tuple[list[str], tuple[Value, ...]] | None:
    """The lines of an operation (named without dialect) and its results, named from ``names``; None where
    types do not say enough.
    """
    before: list[str] = []
    if op == "reduce":  # what a graph states as starts is not read: sums start with 0
        operands = operands[: len(results)]
        starts = [Value(f"%v{next(names)}", each.type.scalar) for each in operands]
        before = [f"{each} = stablehlo.constant {dense(each.type)}" for each in starts]
        operands = [*operands, *starts]
    write = operator(op, tuple(each.type for each in operands), tuple(results))
    if write is None:
        return None
    lines, made = _named(write(operands), results, names)
    return [*before, *lines], made


def _named(text: str, results: Sequence[Tensor], names: Iterator[int]) -> tuple[list[str], tuple[Value, ...]]:
    name = f"%v{next(names)}"
    if len(results) == 1:
        return [f"{name} = {text}"], (Value(name, results[0]),)
    made = tuple(Value(f"{name}#{place}", each) for place, each in enumerate(results))
    return [f"{name}:{len(results)} = {text}"], made


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
_MOST_NODES = 64
_MOST_REPEATED = 3
_TALKS = (int(NodeKind.COLLECTIVE), int(NodeKind.PERMUTE))
"""Communication that every device takes part in."""


class Units(NamedTuple):
    """The distinct units of a graph, which nodes each stands for (by its number), and what has none."""

    units: tuple[Unit, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...]
    """Unit, and the nodes that share its time; a unit that stands several times has several entries."""
    uncovered: Counter[str]


def units_of(graph: OpGraph, *, fused: bool, devices: int = 1) -> Units:
    """The units of all nodes that take time. ``fused``: chains of elementwise work into their consumer.
    Collectives are units where all of their groups are of ``devices`` and there are several of these.

    O(nodes + edges), in Python: what follows compiles.
    """
    reader = _Reader(graph, devices)
    wanted = reader.wanted
    groups = _groups(graph, reader) if fused else [(node,) for node in np.flatnonzero(wanted).tolist()]
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
    return Units(tuple(number), tuple(members), uncovered)


def _groups(graph: OpGraph, reader: _Reader) -> Iterator[tuple[int, ...]]:
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
            joins = classes[dep] in joining or dep in reader.copies.get(root, ())
            joins = joins and uses[dep] == 1 and not kept[dep]
            joins = joins and kinds[dep] == NodeKind.COMPUTE
            if joins and owner[dep] == dep and region[dep] == region[root] and size[root] < _MOST_NODES:
                owner[dep] = root
                size[root] += 1
    found: dict[int, list[int]] = {}
    for node in order:
        found.setdefault(owner[node], []).append(node)
    yield from (tuple(nodes) for nodes in found.values() if any(reader.wanted[node] for node in nodes))


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


class _Repeats(NamedTuple):
    """What is done once more: so many steps back what compilers make anew, and what goes into a copy."""

    steps: int = 0
    copy: frozenset[int] = frozenset()


class _Reader:
    """A graph as its units are read from it."""

    def __init__(self, graph: OpGraph, devices: int) -> None:
        self.graph, self.devices = graph, devices
        self.deps = graph.data_deps.to_lists()
        self.operands, self.results = graph.operands.to_lists(), graph.results.to_lists()
        self.types = [_tensor(graph, row) for row in range(len(graph.types))]
        self.names: Mapping[int, str] = {
            row: graph.strings[row].rpartition(".")[2].replace("-", "_")  # as HLO spells it
            for row in np.unique(graph.op_row).tolist()
        }
        self.op: list[int] = graph.op_row.tolist()
        collectives, p2p, products = graph.collectives, graph.p2p, graph.contractions
        self.group_set: dict[int, int] = dict(
            zip(collectives.node.tolist(), collectives.group_set.tolist(), strict=True)
        )
        self.permutation: dict[int, int] = dict(zip(p2p.node.tolist(), p2p.permutation.tolist(), strict=True))
        of_product: list[int] = products.node.tolist()
        self.product = {node: row for row, node in reversed(list(enumerate(of_product)))}
        """The first product of a node, by its row."""
        self.classes: list[int] = graph.op_class.tolist()
        kinds = [NodeKind.COMPUTE, *(_TALKS if devices > 1 else ())]
        timed = np.isin(graph.kind, kinds) & (graph.resource == int(Resource.DEVICE))
        # A node of a branch that is not taken never runs.
        timed &= ~takes_no_time(graph) & (graph.multiplicity != 0)
        self.wanted: list[bool] = timed.tolist()
        self.origins = origins_of(graph)
        self.copies = copies_of(graph, self.origins, self._turned)

    def unit(self, nodes: Sequence[int], *, repeats: bool = False) -> Unit | None:
        """The program of some nodes, the last of which makes what others use; None where one has none."""
        writing = _Writing()
        inside = frozenset(nodes)
        again = _Repeats(_MOST_REPEATED, self.copies.get(nodes[-1], frozenset())) if repeats else _Repeats()
        for node in nodes:
            if not self._write(writing, node, inside, again):
                return None
        return Unit(tuple(writing.lines), tuple(writing.arguments), writing.values[nodes[-1]])

    def _write(self, writing: _Writing, node: int, inside: frozenset[int], repeats: _Repeats) -> bool:
        results = [self.types[row] for row in self.results[node]]
        wanted = [self.types[row] for row in self.operands[node]]
        stated = [each for each in results if each is not None]
        known = [each for each in wanted if each is not None]
        if len(stated) < len(results) or len(known) < len(wanted):
            return False
        operands = self._bound(writing, node, known, inside, repeats)
        made = self._said(node, operands, stated, writing.names)
        if made is None:
            return False
        lines, writing.values[node] = made
        writing.lines += lines
        return True

    def _said(
        self, node: int, operands: Sequence[Value], results: Sequence[Tensor], names: Iterator[int]
    ) -> tuple[list[str], tuple[Value, ...]] | None:
        """The lines of a node and what they make, with what the graph knows beside types."""
        op = self.names[self.op[node]]
        types, made = tuple(each.type for each in operands), tuple(results)
        match op, int(self.graph.kind[node]):
            case _, NodeKind.COLLECTIVE:
                groups = self._groups(node)
                write = None if groups is None else collective(op, types, made, groups)
            case _, NodeKind.PERMUTE:
                pairs = self._pairs(node)
                write = None if pairs is None else permute(types, made, pairs)
            case ("convolution", _):
                write = self._convolution(node, types, made)
            case (("reduce_window" | "select_and_scatter"), _):
                write = self._pool(op, node, types, made)
            case _:
                return write_operation(op, operands, results, names)
        return None if write is None else _named(write(operands), results, names)

    def _convolution(
        self, node: int, types: tuple[Tensor, ...], results: tuple[Tensor, ...]
    ) -> Operator | None:
        """The convolution whose FLOPs are the node's, those on padding left out."""
        if len(types) != 2 or len(results) != 1:
            return None
        shapes = types[0].shape, types[1].shape, results[0].shape
        table, row = self.graph.contractions, self.product.get(node)
        if row is None:
            return operator("convolution", types, results)
        plan = find_convolution(*shapes, float(table.flops[row]), float(table.useful_flops[row]))
        if plan is None:
            return None
        return lambda values: convolution_text(values[0], values[1], results[0], plan)

    def _pool(
        self, op: str, node: int, types: tuple[Tensor, ...], results: tuple[Tensor, ...]
    ) -> Operator | None:
        """A window of as many places as the node's FLOPs say: one fewer operations for each result."""
        flops = float(self.graph.flops[node])
        if op == "reduce_window":
            return reduce_window(types, results, flops / max(results[0].elements, 1) + 1) if results else None
        sources = types[1].elements if len(types) > 1 else 1
        return select_and_scatter(types, results, flops / max(sources, 1))

    def _groups(self, node: int) -> list[list[int]] | None:
        """Who takes part; None where others than the devices at hand do."""
        row, everyone = self.group_set.get(node, -1), list(range(self.devices))
        if row < 0:
            return [everyone]
        found = [list(map(int, group)) for group in member_rows(self.graph.group_sets[row])]
        return found if sorted(rank for group in found for rank in group) == everyone else None

    def _pairs(self, node: int) -> list[tuple[int, int]] | None:
        """Who sends to whom; None where nobody says, or others than the devices at hand do."""
        row = self.permutation.get(node, -1)
        if row < 0 or self.graph.permutations[row].num_ranks != self.devices:
            return None
        targets = self.graph.permutations[row].targets_of(np.arange(self.devices, dtype=np.int64)).tolist()
        return [(source, target) for source, target in enumerate(targets) if target >= 0]

    def _bound(
        self,
        writing: _Writing,
        node: int,
        wanted: Sequence[Tensor],
        inside: frozenset[int],
        repeats: _Repeats,
    ) -> tuple[Value, ...]:
        """A value for each operand: of the first producer that makes such a one, in the order of both."""
        left = list(self.deps[node])
        bound: list[Value] = []
        for tensor in wanted:
            producer = next((dep for dep in left if self._makes(dep, tensor)), -1)
            if producer >= 0:
                left.remove(producer)
                producer = self.origins.get(producer, producer)
            is_outside = producer >= 0 and producer not in writing.values and producer not in inside
            if is_outside and (again := self._repeats(producer, repeats)) is not None:
                self._write(writing, producer, inside, again)
            made = writing.values.get(producer, ())
            bound.append(
                next((value for value in made if value.type == tensor), None)
                or writing.argument(producer, tensor)
            )
        return tuple(bound)

    def _repeats(self, producer: int, repeats: _Repeats) -> _Repeats | None:
        """What is done once more before a producer outside; None: it is an argument."""
        if producer in repeats.copy:
            return repeats
        again = repeats.steps > 0 and self.classes[producer] in _REPEATED
        return repeats._replace(steps=repeats.steps - 1) if again else None

    def _turned(self, node: int) -> int:
        """Who makes the operand of a product that is copied into another order; -1: none is."""
        match [self.types[row] for row in (*self.operands[node], *self.results[node])]:
            case [Tensor() as left, Tensor() as right, Tensor() as result] if self._is_product(node):
                makers = (dep for dep in self.deps[node] if self._makes(dep, left))
                return next(makers, -1) if is_turned(left, right, result) else -1
            case _:
                return -1

    def _is_product(self, node: int) -> bool:
        return self.names[self.op[node]] in {"dot", "dot_general"}

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


# Operations of a table as programs: what a row's sizes and number format say, and no more.

_SPELLED = {
    "sub": "subtract",
    "mul": "multiply",
    "div": "divide",
    "exp": "exponential",
    "neg": "negate",
    "max": "maximum",
    "min": "minimum",
    "sigmoid": "logistic",
    "pow": "power",
    "sin": "sine",
    "cos": "cosine",
}
_VIEWS = frozenset({"reshape", "bitcast_convert", "convert", "optimization_barrier", "real", "imag"})
_LARGEST = 1 << 31


def units_of_table(ops: Operations) -> list[Unit | None]:
    """A unit for each operation; None where a row is no product, elementwise operation or sum of rows."""
    return [_unit(ops, row) for row in range(len(ops))]


def _unit(ops: Operations, row: int) -> Unit | None:
    element = find_dtype(ops.scheme[row].removesuffix("_full"))
    if element is None or element.block_elements or element.name == "tf32":
        return None
    match ops.kind[row]:
        case "matmul":
            return _product(ops, row, element)
        case "vector" | "reduction":
            return _elementwise(ops, row, element)
        case _:
            return None


def _sizes(ops: Operations, row: int, *names: str) -> tuple[int, ...] | None:
    sizes = [float(ops.dim(name)[row]) for name in names]
    if any(isnan(size) or size < 1 or size > _LARGEST or size != int(size) for size in sizes):
        return None
    return tuple(int(size) for size in sizes)


def _product(ops: Operations, row: int, element: DType) -> Unit | None:
    sizes = _sizes(ops, row, "batch", "m", "n", "k")
    if sizes is None:
        return None
    batch, m, n, k = sizes
    head = (batch,) if batch > 1 else ()
    lhs, rhs = Tensor(element, (*head, m, k)), Tensor(element, (*head, k, n))
    made = element if element.kind is not DTypeKind.SIGNED else find_dtype("i32") or element
    return _written("dot_general", (lhs, rhs), Tensor(made, (*head, m, n)))


def _elementwise(ops: Operations, row: int, element: DType) -> Unit | None:
    sizes = _sizes(ops, row, "rows", "columns")
    if sizes is None:
        return None
    whole = Tensor(element, sizes)
    if ops.kind[row] == "reduction":
        known = ops.op[row] in {"sum", "reduce", "reduce_sum"}
        return _written("reduce", (whole,), whole.reshaped(sizes[:1])) if known else None
    op = _SPELLED.get(ops.op[row], ops.op[row])
    if op in _VIEWS or op not in UNARY | BINARY:
        return None
    return _written(op, (whole,) * (2 if op in BINARY else 1), whole)


def _written(op: str, operands: tuple[Tensor, ...], result: Tensor) -> Unit | None:
    values = tuple(Value(f"%p{place}", each) for place, each in enumerate(operands))
    made = write_operation(op, values, (result,), count())
    return None if made is None else Unit(tuple(made[0]), operands, made[1])
