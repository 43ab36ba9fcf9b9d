"""Units: small StableHLO programs that are compiled and timed for an estimate.

A unit computes one operation, or a chain of operations that every compiler fuses. Units come from the nodes
of a graph or from a table of sizes.

The program of a unit repeats its operations ``%n`` times in a loop. The time of one iteration is the
difference between a long and a short loop, which excludes the start of the program. In each iteration one
element of the largest operand changes, and all operands pass an optimization barrier (not for IREE 3, which
crashes on barriers of several values), so that a compiler cannot hoist the work out of the loop.
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
    "GraphUnits",
    "Unit",
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
    """Program (StableHLO text) that is timed as a whole: one or several operations that compute ``results``
    from arguments ``%p0``, ``%p1``, ...
    """

    lines: tuple[str, ...]
    arguments: tuple[Tensor, ...]
    results: tuple[Value, ...]


def renewed_argument(unit: Unit) -> int:
    """Return the index of the argument in which the timing loop changes one element per iteration, so that no
    work can be hoisted out of the loop. It is the largest suitable argument; -1 if there is none.
    """
    suitable = [
        index
        for index, tensor in enumerate(unit.arguments)
        if tensor.elements and tensor.element.kind in _RENEWED and tensor.element.bits >= _PACKED_BITS
    ]
    return max(suitable, key=lambda index: unit.arguments[index].elements, default=-1)


def baseline_of(unit: Unit) -> Unit:
    """Return the unit without its operations. Its time is the cost of the timing loop alone."""
    index = renewed_argument(unit)
    return Unit((), unit.arguments[index : index + 1] if index >= 0 else (), ())


def loop_text(unit: Unit, *, barrier: bool = True) -> str:
    """Return the StableHLO program that runs a unit (see the module) in a loop. The arguments of its function
    ``@main`` are the number of iterations, then the arguments of the unit.
    """
    renewed = renewed_argument(unit)
    arguments = list(map(str, unit.arguments))
    results = [str(value.type) for value in unit.results]
    positions = range(len(arguments))
    inside = ("%t", *(f"%q{index}" if index == renewed else f"%p{index}" for index in positions))
    before = ("%i", *(f"%c{index}" for index in positions)) if barrier else inside
    carried = [f"{name} = %a{index}" for index, name in enumerate(before[1:])]
    carried += [f"%r{index} = %z{index}" for index in range(len(results))]
    types = ", ".join((_INDEX, *arguments, *results))
    passed = f"{', '.join(inside)} = stablehlo.optimization_barrier {', '.join(before)} : "
    passed += ", ".join((_INDEX, *arguments))
    made = _counted(unit, renewed)
    back = ", ".join(("%t1", *(f"%p{index}" for index in positions), *made.names))
    outputs = len(arguments) + len(results) + 1
    first = 1 + len(arguments) if results else 0
    returned = ", ".join(f"%o#{index}" for index in range(first, outputs)) if outputs > 1 else "%o"
    loop = f"%o:{outputs}" if outputs > 1 else "%o"
    outputs_of_main = results or [_INDEX, *arguments]
    head = ", ".join(
        ("%n: " + _INDEX, *(f"%a{index}: {argument}" for index, argument in enumerate(arguments)))
    )
    lines = [
        f"func.func public @main({head}) -> ({', '.join(outputs_of_main)}) {{",
        f"%zero = stablehlo.constant dense<0> : {_INDEX}",
        f"%one = stablehlo.constant dense<1> : {_INDEX}",
        *(f"%z{index} = stablehlo.constant {dense(value.type)}" for index, value in enumerate(unit.results)),
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
        f"return {returned} : {', '.join(outputs_of_main)}",
        "}",
    ]
    return "module {\n" + "\n".join(lines) + "\n}\n"


def call_text(unit: Unit) -> str:
    """Return the StableHLO program that runs a unit once. ``@main`` takes the arguments of the unit."""
    arguments = ", ".join(f"%p{index}: {argument}" for index, argument in enumerate(unit.arguments))
    results = unit.results or (Value("%one", Tensor(_INTEGER, ())),)
    types = ", ".join(str(value.type) for value in results)
    lines = [
        f"func.func public @main({arguments}) -> ({types}) {{",
        f"%zero = stablehlo.constant dense<0> : {_INDEX}",
        f"%one = stablehlo.constant dense<1> : {_INDEX}",
        *unit.lines,
        f"return {', '.join(value.name for value in results)} : {types}",
        "}",
    ]
    return "module {\n" + "\n".join(lines) + "\n}\n"


def _renewal(unit: Unit, index: int) -> list[str]:
    """Return the StableHLO lines that write the iteration number into the first element of argument
    ``index``, so that the operands differ between iterations.
    """
    if index < 0:
        return []
    tensor = unit.arguments[index]
    scalar, one = tensor.scalar, tensor.reshaped([1] * tensor.rank)
    name = f"%p{index}"
    turn = name if not tensor.rank else "%turn"
    lines = [f"{turn} = stablehlo.convert %t : ({_INDEX}) -> {scalar}"]
    if tensor.rank:
        zeros = ", ".join(["%zero"] * tensor.rank)
        types = ", ".join((str(tensor), str(one), *[_INDEX] * tensor.rank))
        update = f"stablehlo.dynamic_update_slice %q{index}, %turns, {zeros}"
        lines += [
            f"%turns = stablehlo.reshape %turn : ({scalar}) -> {one}",
            f"{name} = {update} : ({types}) -> {tensor}",
        ]
    return lines


class _CountedResults(NamedTuple):
    lines: Sequence[str]
    names: Sequence[str]


def _counted(unit: Unit, renewed: int) -> _CountedResults:
    """Return StableHLO lines to add to a unit, and the names of its results. If no argument changes between
    iterations, the lines add the iteration number to the first result, so that the compiler cannot compute
    the result once for all iterations.
    """
    names = [value.name for value in unit.results]
    if renewed >= 0 or not unit.results or unit.results[0].type.element.kind not in _RENEWED:
        return _CountedResults((), names)
    tensor = unit.results[0].type
    lines = [
        f"%turn = stablehlo.convert %t : ({_INDEX}) -> {tensor.scalar}",
        f"%turns = stablehlo.broadcast_in_dim %turn, dims = [] : ({tensor.scalar}) -> {tensor}",
        f"%counted = stablehlo.add {names[0]}, %turns : {tensor}",
    ]
    return _CountedResults(lines, ["%counted", *names[1:]])


def write_operation(
    op: str, operands: Sequence[Value], results: Sequence[Tensor], names: Iterator[int]
) -> tuple[list[str], tuple[Value, ...]] | None:
    """Return the StableHLO lines of an operation and the values of its results, or None if the types do not
    determine the operation.

    ``op`` is the name without the dialect. ``names`` yields numbers for the names of new values.
    """
    before: list[str] = []
    if op == "reduce":  # the graph's start values are not read: sums start with 0
        operands = operands[: len(results)]
        starts = [Value(f"%v{next(names)}", operand.type.scalar) for operand in operands]
        before = [f"{start} = stablehlo.constant {dense(start.type)}" for start in starts]
        operands = [*operands, *starts]
    write = operator(op, tuple(operand.type for operand in operands), tuple(results))
    if write is None:
        return None
    lines, made = _named(write(operands), results, names)
    return [*before, *lines], made


def _named(text: str, results: Sequence[Tensor], names: Iterator[int]) -> tuple[list[str], tuple[Value, ...]]:
    name = f"%v{next(names)}"
    if len(results) == 1:
        return [f"{name} = {text}"], (Value(name, results[0]),)
    made = tuple(Value(f"{name}#{index}", tensor) for index, tensor in enumerate(results))
    return [f"{name}:{len(results)} = {text}"], made


_FUSED_PRODUCERS = frozenset(
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
_FUSING_CONSUMERS = frozenset(
    {OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.QUANTIZE, OpClass.REDUCTION}
)
_INTO_PRODUCT = frozenset({OpClass.FREE, OpClass.MOVE})
"""Producers that a compiler fuses into a product as their only consumer: transposed operands."""
_REPEATED = frozenset({OpClass.GENERATE, OpClass.BROADCAST, OpClass.FREE})
"""Operations that a compiler computes again for each of several users."""
_MOST_NODES = 64
_MOST_REPEATED = 3
_COMMUNICATION = (int(NodeKind.COLLECTIVE), int(NodeKind.PERMUTE))
"""Communication of all devices."""


class GraphUnits(NamedTuple):
    """Units (programs to time, see the module) of a graph, without duplicates. ``members`` has the nodes
    whose time each unit measures. ``uncovered`` counts by name the operations that no unit measures.
    """

    units: tuple[Unit, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...]
    """Unit number, and the nodes that share its time; a unit that occurs several times has
    several entries.
    """
    uncovered: Counter[str]


def units_of(graph: OpGraph, *, fused: bool, devices: int = 1) -> GraphUnits:
    """Return the units (programs to time) that cover all nodes that take time.

    ``fused``: chains of elementwise work are in one unit with their consumer, as compilers fuse them.
    ``devices``: number of devices that run a unit together. A collective is included only if there are
    several devices and all of its groups are within them. O(nodes + edges), in Python, which is fast relative
    to compilation.
    """
    writer = _UnitWriter(graph, devices)
    wanted = writer.wanted
    groups = _groups(graph, writer) if fused else [(node,) for node in np.flatnonzero(wanted).tolist()]
    number: dict[Unit, int] = {}
    members: list[tuple[int, tuple[int, ...]]] = []
    uncovered: Counter[str] = Counter()
    for group in groups:
        whole = writer.unit(group, repeats=fused)
        parts = [(group, whole)] if whole is not None else [((node,), writer.unit((node,))) for node in group]
        for nodes, unit in parts:
            paid = tuple(node for node in nodes if wanted[node])
            if unit is None:
                uncovered.update(graph.op_name(node) for node in paid)
            elif paid:
                members.append((number.setdefault(unit, len(number)), paid))
    return GraphUnits(tuple(number), tuple(members), uncovered)


def _groups(graph: OpGraph, writer: _UnitWriter) -> Iterator[tuple[int, ...]]:
    """Yield groups of nodes that are compiled and timed as one unit; the last node of a group is its
    consumer. A producer is in the group of its consumer if it has only one.
    """
    uses: list[int] = np.bincount(graph.data_deps.values, minlength=len(graph)).tolist()
    pinned = np.zeros(len(graph), np.bool_)
    pinned[graph.regions.carried_producer] = True
    pinned |= np.bincount(graph.control_deps.values, minlength=len(graph)) > 0
    stays: list[bool] = pinned.tolist()
    classes: list[int] = graph.op_class.tolist()
    kinds: list[int] = graph.kind.tolist()
    region: list[int] = graph.region.tolist()
    deps = graph.data_deps.to_lists()
    order: list[int] = topological_order(graph).tolist()
    owner = list(range(len(graph)))
    size = [1] * len(graph)
    for node in reversed(order):
        root = owner[node]
        joining = frozenset[OpClass]()  # classes of producers that join the node
        if classes[root] == OpClass.CONTRACTION:
            joining = _INTO_PRODUCT
        elif classes[node] in _FUSING_CONSUMERS or root != node:
            joining = _FUSED_PRODUCERS
        for dep in deps[node]:
            joins = classes[dep] in joining or dep in writer.copies.get(root, ())
            joins = joins and uses[dep] == 1 and not stays[dep]
            joins = joins and kinds[dep] == NodeKind.COMPUTE
            if joins and owner[dep] == dep and region[dep] == region[root] and size[root] < _MOST_NODES:
                owner[dep] = root
                size[root] += 1
    chains: dict[int, list[int]] = {}
    for node in order:
        chains.setdefault(owner[node], []).append(node)
    yield from (tuple(nodes) for nodes in chains.values() if any(writer.wanted[node] for node in nodes))


class _UnitText:
    """Text of a unit while it is written: its StableHLO lines, arguments and values."""

    __slots__ = ("arguments", "lines", "names", "outside", "values")

    def __init__(self) -> None:
        self.names = count()
        self.lines: list[str] = []
        self.arguments: list[Tensor] = []
        self.values: dict[int, tuple[Value, ...]] = {}
        self.outside: dict[tuple[int, Tensor], Value] = {}

    def argument(self, producer: int, tensor: Tensor) -> Value:
        """Return the argument that replaces the result of a node outside the unit. Each producer gets one
        argument; an unknown producer (-1) gets a new one each time.
        """
        existing = self.outside.get((producer, tensor)) if producer >= 0 else None
        if existing is not None:
            return existing
        value = Value(f"%p{len(self.arguments)}", tensor)
        self.arguments.append(tensor)
        if producer >= 0:
            self.outside[producer, tensor] = value
        return value


class _RepeatedNodes(NamedTuple):
    """Nodes that are computed inside a unit although other units compute them too, because compilers
    duplicate them: cheap producers up to ``steps`` nodes back, and the nodes in ``copy``.
    """

    steps: int = 0
    copy: frozenset[int] = frozenset()


class _UnitWriter:
    """Writer of the units (StableHLO programs to time) of one graph."""

    def __init__(self, graph: OpGraph, devices: int) -> None:
        self.graph, self.devices = graph, devices
        self.deps = graph.data_deps.to_lists()
        self.operands, self.results = graph.operands.to_lists(), graph.results.to_lists()
        # Types that a program can state: all extents known, and an element type of StableHLO.
        self.types: list[Tensor | None] = []
        for row in range(len(graph.types)):
            element, shape = graph.types.dtype_of(row), graph.types.shape(row)
            is_stated = element is not None and -1 not in shape and not element.block_elements
            if element is None or not is_stated or element.name in {"tf32", "token", "opaque"}:
                self.types.append(None)
            else:
                self.types.append(Tensor(element, shape))
        self.names: Mapping[int, str] = {
            row: graph.strings[row].rpartition(".")[2].replace("-", "_")  # as HLO spells it
            for row in np.unique(graph.op_id).tolist()
        }
        self.op: list[int] = graph.op_id.tolist()
        collectives, p2p, products = graph.collectives, graph.p2p, graph.contractions
        self.group_set: dict[int, int] = dict(
            zip(collectives.node.tolist(), collectives.group_set.tolist(), strict=True)
        )
        self.permutation: dict[int, int] = dict(zip(p2p.node.tolist(), p2p.permutation.tolist(), strict=True))
        of_product: list[int] = products.node.tolist()
        self.product = {node: row for row, node in reversed(list(enumerate(of_product)))}
        """Row of the first product of a node."""
        self.classes: list[int] = graph.op_class.tolist()
        kinds = [NodeKind.COMPUTE, *(_COMMUNICATION if devices > 1 else ())]
        timed = np.isin(graph.kind, kinds) & (graph.resource == int(Resource.DEVICE))
        # A node of a branch that is not taken never runs.
        timed &= ~takes_no_time(graph) & (graph.executions != 0)
        self.wanted: list[bool] = timed.tolist()
        self.origins = origins_of(graph)
        self.copies = copies_of(graph, self.origins, self._turned)

    def unit(self, nodes: Sequence[int], *, repeats: bool = False) -> Unit | None:
        """Return a unit (program to time) that computes ``nodes``. Its results are the results of the last
        node. Return None if one of the nodes cannot be written as StableHLO.
        """
        writing = _UnitText()
        inside = frozenset(nodes)
        again = (
            _RepeatedNodes(_MOST_REPEATED, self.copies.get(nodes[-1], frozenset()))
            if repeats
            else _RepeatedNodes()
        )
        for node in nodes:
            if not self._write(writing, node, inside, again):
                return None
        return Unit(tuple(writing.lines), tuple(writing.arguments), writing.values[nodes[-1]])

    def _write(self, writing: _UnitText, node: int, inside: frozenset[int], repeats: _RepeatedNodes) -> bool:
        """Add the lines of a node to a unit. Return False if its types are unknown or do not determine the
        operation.
        """
        results = [self.types[row] for row in self.results[node]]
        operand_types = [self.types[row] for row in self.operands[node]]
        result_tensors = [tensor for tensor in results if tensor is not None]
        operand_tensors = [tensor for tensor in operand_types if tensor is not None]
        if len(result_tensors) < len(results) or len(operand_tensors) < len(operand_types):
            return False
        operands = self._bound(writing, node, operand_tensors, inside, repeats)
        made = self._operation(node, operands, result_tensors, writing.names)
        if made is None:
            return False
        lines, writing.values[node] = made
        writing.lines += lines
        return True

    def _operation(
        self, node: int, operands: Sequence[Value], results: Sequence[Tensor], names: Iterator[int]
    ) -> tuple[list[str], tuple[Value, ...]] | None:
        """Return the StableHLO lines of a node and its result values. Attributes that the operand types do
        not determine are derived from the groups, permutations and FLOPs of the graph.
        """
        op = self.names[self.op[node]]
        types, made = tuple(operand.type for operand in operands), tuple(results)
        match op, int(self.graph.kind[node]):
            case _, NodeKind.COLLECTIVE:
                groups = self._groups(node)
                write = None if groups is None else collective(op, types, made, groups)
            case _, NodeKind.PERMUTE:
                row, permutations = self.permutation.get(node, -1), self.graph.permutations
                write = None
                if row >= 0 and permutations[row].num_ranks == self.devices:  # of these devices only
                    ranks = np.arange(self.devices, dtype=np.int64)
                    targets = enumerate(permutations[row].targets_of(ranks).tolist())
                    pairs = [(source, target) for source, target in targets if target >= 0]
                    write = permute(types, made, pairs)
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
        """Return a function that writes a convolution with the same total FLOPs and the same useful FLOPs
        (without padding) as the node; None if there is none.
        """
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
        """Return a function that writes a window operation such as max pooling. Its window size is derived
        from the FLOPs of the node: a window of n elements takes n - 1 operations per result.
        """
        flops = float(self.graph.flops[node])
        if op == "reduce_window":
            return reduce_window(types, results, flops / max(results[0].elements, 1) + 1) if results else None
        sources = types[1].elements if len(types) > 1 else 1
        return select_and_scatter(types, results, flops / max(sources, 1))

    def _groups(self, node: int) -> list[list[int]] | None:
        """Return the groups of a collective; None if they include ranks beyond the available devices."""
        row, everyone = self.group_set.get(node, -1), list(range(self.devices))
        if row < 0:
            return [everyone]
        groups = [list(map(int, group)) for group in member_rows(self.graph.group_sets[row])]
        return groups if sorted(rank for group in groups for rank in group) == everyone else None

    def _bound(
        self,
        writing: _UnitText,
        node: int,
        wanted: Sequence[Tensor],
        inside: frozenset[int],
        repeats: _RepeatedNodes,
    ) -> tuple[Value, ...]:
        """Return the value to write for each operand of ``node``. ``wanted`` are the operand types.

        Each operand is computed by the first producer of its type that no earlier operand uses. If that
        producer is outside the unit and is not repeated in it, the operand becomes an argument of the unit.
        """
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

    def _repeats(self, producer: int, repeats: _RepeatedNodes) -> _RepeatedNodes | None:
        """Return the nodes that may be repeated in the unit before ``producer``, if ``producer`` (outside the
        unit) is itself repeated in it. Return None if the result of ``producer`` becomes an argument of the
        unit.
        """
        if producer in repeats.copy:
            return repeats
        again = repeats.steps > 0 and self.classes[producer] in _REPEATED
        return repeats._replace(steps=repeats.steps - 1) if again else None

    def _turned(self, node: int) -> int:
        """Return the node that produces the left operand of a matmul, if a compiler copies this operand into
        another memory order; else -1.
        """
        match [self.types[row] for row in (*self.operands[node], *self.results[node])]:
            case [Tensor() as left, Tensor() as right, Tensor() as result] if self.names[self.op[node]] in {
                "dot",
                "dot_general",
            }:
                makers = (dep for dep in self.deps[node] if self._makes(dep, left))
                return next(makers, -1) if is_turned(left, right, result) else -1
            case _:
                return -1

    def _makes(self, node: int, tensor: Tensor) -> bool:
        """Return True if a node has a result of the type ``tensor``."""
        return any(self.types[row] == tensor for row in self.results[node])


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
    """Return a unit (program to time) for each operation of a table. Only matmuls, elementwise operations and
    sums of rows have one; the entry of other operations is None.
    """
    return [_unit_of_row(ops, row) for row in range(len(ops))]


def _unit_of_row(ops: Operations, row: int) -> Unit | None:
    element = find_dtype(ops.scheme[row].removesuffix("_full"))
    if element is None or element.block_elements or element.name == "tf32":
        return None
    match ops.kind[row]:
        case "matmul":
            return _product(ops, row, element)
        case "vector" | "reduction":
            sizes = _sizes(ops, row, "rows", "columns")
            if sizes is None:
                return None
            whole = Tensor(element, sizes)
            if ops.kind[row] == "reduction":
                is_sum = ops.op[row] in {"sum", "reduce", "reduce_sum"}
                return _written("reduce", (whole,), whole.reshaped(sizes[:1])) if is_sum else None
            op = _SPELLED.get(ops.op[row], ops.op[row])
            if op in _VIEWS or op not in UNARY | BINARY:
                return None
            return _written(op, (whole,) * (2 if op in BINARY else 1), whole)
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


def _written(op: str, operands: tuple[Tensor, ...], result: Tensor) -> Unit | None:
    values = tuple(Value(f"%p{index}", tensor) for index, tensor in enumerate(operands))
    made = write_operation(op, values, (result,), count())
    return None if made is None else Unit(tuple(made[0]), operands, made[1])
