"""Figures of a graph that depend on the number of ranks: recomputed from one trace, or extrapolated from two.

Figures are columns such as FLOPs, bytes and tensor types. With one trace, the costs of an operation whose
tensors change are recomputed, provided that its old costs follow from its old tensor types.

With traces at two sizes of an axis, each figure must follow a rule. It is constant if it is equal in both
traces. It is linear in the size if figure / size is equal, and inverse if figure x size is equal. Extents of
tensors must follow one of these rules. Counts of work may also have a constant part, ``a + b / size`` or ``a
+ b * size``; the shapes of the node determine which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import isnan, nan, prod

import numpy as np
from numpy.typing import NDArray

from hespas.graph import DTYPES, DYNAMIC, CollectiveKind, OpClass, OpGraph, RaggedArray, TensorTypes
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import is_recorded_wait, without_waits

__all__ = [
    "NODE_FIGURES",
    "TABLE_FIGURES",
    "AxisSizes",
    "GraphFigures",
    "ResizedTypes",
    "changed_nodes",
    "extrapolate",
    "node_text",
    "recount",
    "same",
    "shape_text",
    "with_figures",
]

NODE_FIGURES = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")
"""Columns of nodes that count work."""

TABLE_FIGURES: Mapping[str, tuple[str, ...]] = {
    "collectives": ("comm_bytes", "operand_bytes", "result_bytes"),
    "p2p": ("comm_bytes",),
    "contractions": ("batch", "m", "n", "k", "flops", "useful_flops"),
}
"""Columns of side tables that count work."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphFigures:
    """Figures of a graph that change with the size of a mesh axis: columns of nodes (``node``) and of the
    graph's tables (``tables``), by name. ``operands`` and ``results`` are rows in the table ``types``.
    """

    node: Mapping[str, FloatArray]
    tables: Mapping[str, Mapping[str, FloatArray]]
    operands: RaggedArray
    results: RaggedArray
    types: TensorTypes

    @classmethod
    def of(cls, graph: OpGraph) -> GraphFigures:
        """Return the current figures of a graph."""
        return cls(
            {name: getattr(graph, name) for name in NODE_FIGURES},
            {
                table: {name: getattr(getattr(graph, table), name).astype(np.float64) for name in names}
                for table, names in TABLE_FIGURES.items()
            },
            graph.operands,
            graph.results,
            graph.types,
        )


def same(one: FloatArray, two: FloatArray) -> BoolArray:
    """Return a mask that is True where both columns have equal figures. Two unknown figures count as
    equal.
    """
    equal: BoolArray = (one == two) | (np.isnan(one) & np.isnan(two))
    return equal


def node_text(graph: OpGraph, node: int) -> str:
    """Return the text of a node for messages: ``node 17 (stablehlo.add, add.3)``."""
    names = [graph.op_name(node), graph.node_name(node)]
    return f"node {node} ({', '.join(dict.fromkeys(filter(None, names)))})"


def shape_text(types: TensorTypes, row: int) -> str:
    """Return the text of a type: ``f32[64,192]``."""
    element = types.dtype_of(row)
    extents = ("?" if extent == DYNAMIC else str(extent) for extent in types.shape(row))
    return f"{element.name if element else '?'}[{','.join(extents)}]"


class ResizedTypes:
    """Tensor types of a graph, to which types with the same element type and another shape are added on
    demand.
    """

    __slots__ = ("_base", "_bytes", "_new", "_rows")

    def __init__(self, types: TensorTypes) -> None:
        self._base = types
        self._new: list[tuple[int, tuple[int, ...]]] = []
        self._bytes: list[float] = []
        self._rows: dict[tuple[int, tuple[int, ...]], int] = {}

    def with_shape(self, row: int, shape: tuple[int, ...]) -> int:
        """Return the row of a type that has the element type of ``row`` and the given shape.

        Raises ``UnsupportedError`` for a type with more bytes than its elements.
        """
        base = self._base
        if shape == base.shape(row):
            return row
        key = (row, shape)
        if key not in self._rows:
            self._rows[key] = len(base) + len(self._new)
            self._new.append(key)
            element, before = base.dtype_of(row), float(base.bytes[row])
            if element is None or DYNAMIC in shape or np.isnan(before):
                self._bytes.append(nan)
            elif before == element.storage_bytes(base.elements(row)):
                self._bytes.append(float(DTYPES[element.code].storage_bytes(prod(shape))))
            else:
                raise UnsupportedError(
                    f"{shape_text(base, row)} takes {before:,.0f} bytes, more than its elements: its bytes "
                    "with "
                    f"the shape {list(shape)} are unknown",
                    position="tensor types",
                    hint="rescale along another axis, or trace the larger run",
                )
        return self._rows[key]

    def build(self) -> TensorTypes:
        """Return all types, the original ones first."""
        base = self._base
        if not self._new:
            return base
        origins = np.array([row for row, _ in self._new], np.int64)
        lengths = np.array([len(shape) for _, shape in self._new], np.int64)
        return TensorTypes(
            dtype=np.concatenate([base.dtype, base.dtype[origins]]),
            dim_offsets=np.concatenate([base.dim_offsets, base.dim_offsets[-1] + np.cumsum(lengths)]),
            dims=np.concatenate(
                [base.dims, np.array([d for _, shape in self._new for d in shape], np.int64)]
            ),
            bytes=np.concatenate([base.bytes, np.array(self._bytes, np.float64)]),
            bounded=np.concatenate([base.bounded, base.bounded[origins]]),
            encoding=np.concatenate([base.encoding, base.encoding[origins]]),
        )


def changed_nodes(graph: OpGraph, after: GraphFigures) -> BoolArray:
    """Return a mask of the nodes whose figures changed."""
    before = GraphFigures.of(graph)
    changed = np.zeros(len(graph), np.bool_)
    for name, column in after.node.items():
        changed |= ~same(before.node[name], column)
    for table, columns in after.tables.items():
        rows: SmallIntArray = getattr(graph, table).node
        for name, column in columns.items():
            changed[rows[~same(before.tables[table][name], column)]] = True
    for one, two in ((before.operands, after.operands), (before.results, after.results)):
        changed[one.row_ids[one.values != two.values]] = True
    return changed


def with_figures(graph: OpGraph, after: GraphFigures) -> OpGraph:
    """Return the graph with other figures; everything else is unchanged."""
    node, calls, products = after.node, after.tables["collectives"], after.tables["contractions"]
    batch, m, n, k = (products[name].astype(np.int64) for name in ("batch", "m", "n", "k"))
    return replace(
        graph,
        flops=node["flops"],
        useful_flops=node["useful_flops"],
        transcendentals=node["transcendentals"],
        bytes_read=node["bytes_read"],
        bytes_written=node["bytes_written"],
        collectives=replace(
            graph.collectives,
            comm_bytes=calls["comm_bytes"],
            operand_bytes=calls["operand_bytes"],
            result_bytes=calls["result_bytes"],
        ),
        p2p=replace(graph.p2p, comm_bytes=after.tables["p2p"]["comm_bytes"]),
        contractions=graph.contractions.resized(
            batch=batch,
            m=m,
            n=n,
            k=k,
            flops=products["flops"],
            useful_flops=products["useful_flops"],
        ),
        operands=after.operands,
        results=after.results,
        types=after.types,
    )


_MOST_TENSORS = 10
_PER_ELEMENT = (OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL, OpClass.REDUCTION)


def recount(
    graph: OpGraph,
    now: GraphFigures,
    marks: Mapping[tuple[int, int], frozenset[int]],
    before: int,
    after: int,
) -> GraphFigures:
    """Return the figures after the marked dimensions of tensors are divided over ``after`` ranks instead of
    ``before``.

    ``marks`` maps a node and the index of one of its tensors (operands first, then results) to the divided
    dimensions. Raises ``UnsupportedError`` if the present figures do not agree with the tensor types.
    """
    rows = ResizedTypes(now.types)
    operands, results = now.operands.values.copy(), now.results.values.copy()
    for (node, slot), dims in marks.items():
        count = int(now.operands.lengths[node])
        column, ragged, position = (
            (operands, now.operands, slot) if slot < count else (results, now.results, slot - count)
        )
        at = int(ragged.offsets[node]) + position
        shape = list(now.types.shape(int(column[at])))
        for dim in dims:
            if shape[dim] * before % after:
                raise UnsupportedError(
                    f"{shape_text(now.types, int(column[at]))} cannot be split over {after} ranks: "
                    f"its whole extent {shape[dim] * before} is not divisible",
                    position=node_text(graph, node),
                    hint="choose a size of the axis that divides the extent",
                )
            shape[dim] = shape[dim] * before // after
        column[at] = rows.with_shape(int(column[at]), tuple(shape))
    new = replace(
        now, operands=replace(now.operands, values=operands), results=replace(now.results, values=results)
    )
    return _CostRecount(graph, now, replace(new, types=rows.build())).run(sorted({node for node, _ in marks}))


class _CostRecount:
    """Computation of new node costs after the shapes of tensors changed."""

    def __init__(self, graph: OpGraph, old: GraphFigures, new: GraphFigures) -> None:
        self._graph, self._old, self._new = graph, old, new
        self._node = {name: column.copy() for name, column in old.node.items()}
        self._tables = {
            table: {name: column.copy() for name, column in columns.items()}
            for table, columns in old.tables.items()
        }

    def run(self, nodes: list[int]) -> GraphFigures:
        """Recompute the costs of ``nodes`` and return all figures."""
        collectives = {node: row for row, node in enumerate(self._graph.collectives.node.tolist())}
        products = {node: row for row, node in enumerate(self._graph.contractions.node.tolist())}
        for node in nodes:
            for name in ("bytes_read", "bytes_written"):
                self._node[name][node] = self._traffic(node, name)
            if node in products:
                self._recount_product(node, products[node])
            else:
                self._recount_arithmetic(node)
            if node in collectives:
                self._recount_collective(node, collectives[node])
        return replace(self._new, node=self._node, tables=self._tables)

    def _refusal(self, node: int, figure: str) -> UnsupportedError:
        return UnsupportedError(
            f"the {figure} of the operation cannot be computed from the types of its tensors",
            position=node_text(self._graph, node),
            hint="give a trace at another size of the axis: `others=OTHER_TRACE`",
        )

    def _traffic(self, node: int, name: str) -> float:
        """Return the new memory traffic of a node. The old traffic must be the sum of the bytes of some of
        its tensors.
        """
        traffic = float(self._old.node[name][node])
        if traffic == 0 or isnan(traffic):
            return traffic
        old, new = (_bytes_of(figures, node) for figures in (self._old, self._new))
        sums: set[float] = set()
        if len(old) <= _MOST_TENSORS:
            choices = product((0.0, 1.0), repeat=len(old))
            sums = {float(np.dot(chosen, new)) for chosen in choices if np.dot(chosen, old) == traffic}
        if len(sums) != 1:
            raise self._refusal(node, name.replace("_", " "))
        return sums.pop()

    def _recount_arithmetic(self, node: int) -> None:
        """Scale the FLOPs of a node in proportion to the elements of its result, or of its operand if it is a
        reduction.
        """
        names = ("flops", "useful_flops", "transcendentals")
        if not any(self._old.node[name][node] for name in names):
            return
        op_class = self._graph.op_class[node]
        if op_class not in _PER_ELEMENT:
            raise self._refusal(node, "FLOPs")
        counts: list[float] = []
        for figures in (self._old, self._new):
            elements = float(figures.types.elements(_types_of(figures, node, 1)[0]))
            if op_class == OpClass.REDUCTION:
                elements = _elements(figures, node, 0) - elements
            counts.append(elements)
        for name in names:
            self._node[name][node] *= counts[1] / counts[0] if counts[0] else nan

    def _recount_product(self, node: int, row: int) -> None:
        """Scale the extents of a matrix product in proportion to the extents of its tensors."""
        table = self._tables["contractions"]
        lhs, rhs, result = (
            (_elements(self._old, node, slot), _elements(self._new, node, slot)) for slot in range(3)
        )
        left, right, whole = lhs[1] / lhs[0], rhs[1] / rhs[0], result[1] / result[0]
        # The ratios of B M K, B K N and B M N; only one of the four extents is split by the axis.
        inner = (left * right / whole) ** 0.5
        factors = {"m": left / inner, "n": right / inner, "k": inner, "batch": 1.0}
        if left == right == whole != 1.0:
            factors = {"batch": left, "m": 1.0, "n": 1.0, "k": 1.0}
        for name, factor in factors.items():
            table[name][row] = np.rint(table[name][row] * factor)
        total = float(np.prod(list(factors.values())))
        for name in ("flops", "useful_flops"):
            table[name][row] *= total
            self._node[name][node] *= total

    def _recount_collective(self, node: int, row: int) -> None:
        """Scale the buffers of a collective in proportion to its operands and results."""
        table = self._tables["collectives"]
        old, new = (
            [float(sum(_bytes_of(figures, node, side))) for side in (0, 1)]
            for figures in (self._old, self._new)
        )
        for side, name in enumerate(("operand_bytes", "result_bytes")):
            table[name][row] *= new[side] / old[side]
        payload = self._old.tables["collectives"]["comm_bytes"][row]
        fits = [side for side in (0, 1) if payload == old[side]]
        if not fits or len({new[side] for side in fits}) > 1:
            raise self._refusal(node, "payload")
        table["comm_bytes"][row] = new[fits[0]]


def _types_of(figures: GraphFigures, node: int, side: int | None = None) -> list[int]:
    sides: tuple[RaggedArray, ...] = (figures.operands, figures.results)
    chosen = sides if side is None else (sides[side],)
    return [int(row) for ragged in chosen for row in ragged.row(node)]


def _bytes_of(figures: GraphFigures, node: int, side: int | None = None) -> FloatArray:
    """Return the bytes of each tensor of a node; ``side`` selects operands or results."""
    return figures.types.bytes[_types_of(figures, node, side)]


def _elements(figures: GraphFigures, node: int, slot: int) -> float:
    types: TensorTypes = figures.types
    return float(types.elements(_types_of(figures, node)[slot]))


_HINT = "give a trace whose sizes divide, or rescale along another axis"
_SAME_PROGRAM = "trace both sizes with the same program and compiler options, or rescale along another axis"
_NO_RULE = ", which is neither constant, proportional nor inversely proportional"
_CALLS = {"collectives": "collectives", "p2p": "messages", "contractions": "matmuls"}


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Sizes of ``axis`` in the first trace, in the second trace, and in the rescaled job."""

    axis: str
    first: int
    second: int
    wanted: int

    @property
    def ratio(self) -> float:
        """Return the ratio of the numbers of ranks of the rescaled job and the first trace."""
        return self.wanted / self.first


def extrapolate(graph: OpGraph, now: GraphFigures, other: OpGraph, sizes: AxisSizes) -> GraphFigures:
    """Return the figures for a new size of an axis, extrapolated from ``graph`` at one size and ``other`` at
    a second size.

    ``now`` has the figures of ``graph``, after possible changes of other axes. Raises ``UnsupportedError`` if
    the programs differ, or if a figure has no rule for extrapolation.
    """
    rows = np.flatnonzero(~is_recorded_wait(graph))
    second = without_waits(other)
    _check_same_program(graph, rows, second, sizes)
    fit = _FigureFit(graph, rows, second, now, sizes)
    operands, results = fit.types("operands"), fit.types("results")
    columns = {name: fit.column(name) for name in NODE_FIGURES}
    tables = {
        table: {name: fit.table_column(table, name) for name in TABLE_FIGURES[table]} for table in now.tables
    }
    return GraphFigures(columns, tables, operands, results, fit.rows_of_types.build())


def _check_same_program(graph: OpGraph, rows: NDArray[np.int64], second: OpGraph, sizes: AxisSizes) -> None:
    """Raise ``UnsupportedError`` unless ``second`` has the operations of ``graph`` (the nodes ``rows``) in
    the same order, with equal numbers of operands, collectives, messages and executions.
    """
    ops = [graph.op_name(node) for node in rows.tolist()]
    others = [second.op_name(node) for node in range(len(second))]
    pairs = enumerate(zip(ops, others, strict=False))
    first = next((index for index, (one, two) in pairs if one != two), None)
    if first is None and len(ops) != len(others):
        first = min(len(ops), len(others))
    if first is not None:
        differing = (names[first] if first < len(names) else "the end" for names in (ops, others))
        raise UnsupportedError(
            f"the traces at {sizes.axis}={sizes.first} and {sizes.axis}={sizes.second} are different "
            f"programs: {len(ops)} operations against {len(others)}; the first difference is "
            f"{' against '.join(differing)}",
            position=node_text(graph, int(rows[min(first, len(rows) - 1)])) if len(rows) else graph.name,
            hint="trace before a compiler chooses by size (StableHLO), or at sizes with equal choices",
        )
    for name in ("operands", "results"):
        different = np.flatnonzero(getattr(graph, name).lengths[rows] != getattr(second, name).lengths)
        if len(different):
            row = int(different[0])
            counts = tuple(
                f"it has {int(lengths[row])} {name}"
                for lengths in (getattr(graph, name).lengths[rows], getattr(second, name).lengths)
            )
            raise _unfit(graph, int(rows[row]), "the operation", counts, sizes, hint=_SAME_PROGRAM)
    positions = np.cumsum(~is_recorded_wait(graph)) - 1
    for table in TABLE_FIGURES:
        one, two = getattr(graph, table), getattr(second, table)
        if len(one) != len(two) or (positions[one.node] != two.node).any():
            if len(one) != len(two):
                counts = tuple(f"it has {len(calls)} {_CALLS[table]}" for calls in (one, two))
                node = int(one.node[0]) if len(one) else 0
                raise _unfit(graph, node, "the program", counts, sizes, hint=_SAME_PROGRAM)
            row = int(np.flatnonzero(positions[one.node] != two.node)[0])
            node = int(one.node[row])
            calls = node_text(graph, node), node_text(second, int(two.node[row]))
            what = f"{_CALLS[table]} of the program"
            facts = tuple(f"number {row + 1} is {call}" for call in calls)
            raise _unfit(graph, node, what, facts, sizes, hint=_SAME_PROGRAM)
    kinds = np.flatnonzero(graph.collectives.kind != second.collectives.kind)
    if len(kinds):
        node = int(graph.collectives.node[kinds[0]])
        codes = (int(side.collectives.kind[kinds[0]]) for side in (graph, second))
        names = tuple(f"it is {CollectiveKind(code).name.lower().replace('_', '-')}" for code in codes)
        hint = "trace both sizes with the same choice of collectives, or rescale along another axis"
        raise _unfit(graph, node, "the collective", names, sizes, hint=hint)
    trips = np.flatnonzero(~same(graph.executions[rows], second.executions))
    if len(trips):
        row = int(trips[0])
        counts = tuple(
            f"it runs {float(count[row]):,g} times" for count in (graph.executions[rows], second.executions)
        )
        raise _unfit(graph, int(rows[row]), "the operation", counts, sizes, hint=_SAME_PROGRAM)


def _unfit(
    graph: OpGraph,
    node: int,
    what: str,
    facts: tuple[str, ...],
    sizes: AxisSizes,
    *,
    reason: str = "",
    hint: str = _HINT,
) -> UnsupportedError:
    """Return the error for ``what``, of which ``facts`` are true in the first and in the second trace."""
    first, second = facts[0], facts[1].removeprefix("it is ")
    return UnsupportedError(
        f"cannot extrapolate {what} to {sizes.axis}={sizes.wanted}: {first} at {sizes.axis}={sizes.first} "
        f"and {second} at {sizes.axis}={sizes.second}{reason}",
        position=node_text(graph, node),
        hint=hint,
    )


class _FigureFit:
    """Extrapolation of the figures of one graph from traces at two sizes of an axis. Tensor types must be
    extrapolated first, because the rule for the work of a node depends on them.
    """

    def __init__(
        self, graph: OpGraph, rows: NDArray[np.int64], other: OpGraph, now: GraphFigures, sizes: AxisSizes
    ) -> None:
        self._graph, self._rows, self._other, self._now, self._sizes = graph, rows, other, now, sizes
        self.rows_of_types = ResizedTypes(now.types)
        self._falls: BoolArray = np.zeros(len(graph), np.bool_)
        self._rises: BoolArray = np.zeros(len(graph), np.bool_)

    def types(self, name: str) -> RaggedArray:
        """Return operands or results with their new types. O(distinct pairs of types) Python calls."""
        one: RaggedArray = getattr(self._graph, name)
        now: RaggedArray = getattr(self._now, name)
        has_row = np.zeros(len(self._graph), np.bool_)
        has_row[self._rows] = True
        positions = np.flatnonzero(has_row[one.row_ids])
        two: SmallIntArray = getattr(self._other, name).values
        triples = np.stack([one.values[positions], two, now.values[positions]], axis=1)
        distinct, first, inverse = np.unique(triples, axis=0, return_index=True, return_inverse=True)
        inverse = inverse.reshape(-1)
        nodes = one.row_ids[positions]
        new_types = np.empty(len(distinct), np.int32)
        changes = np.empty((len(distinct), 2), np.bool_)
        for row, (a, b, current) in enumerate(distinct.tolist()):
            new_types[row], changes[row] = self._type(int(nodes[first[row]]), a, b, current)
        values = now.values.copy()
        values[positions] = new_types[inverse]
        self._falls[nodes[changes[inverse, 0]]] = True
        self._rises[nodes[changes[inverse, 1]]] = True
        return replace(now, values=values)

    def _type(self, node: int, a: int, b: int, current: int) -> tuple[int, tuple[bool, bool]]:
        """Return the row of the extrapolated tensor type, and two flags: True if an extent decreases with the
        axis size, and True if an extent increases.

        ``a`` and ``b`` are the rows of the type at the two traced sizes, ``current`` its row after changes of
        other axes.
        """
        types, others, sizes = self._graph.types, self._other.types, self._sizes
        first_shape, second_shape = types.shape(a), others.shape(b)
        shapes = f"it is {shape_text(types, a)}", f"it is {shape_text(others, b)}"
        tensor = "a tensor of the operation"
        encodings = self._graph.strings[int(types.encoding[a])], self._other.strings[int(others.encoding[b])]
        if (
            len(first_shape) != len(second_shape)
            or types.dtype[a] != others.dtype[b]
            or encodings[0] != encodings[1]
        ):
            reason = ", in different encodings" if encodings[0] != encodings[1] else ""
            raise _unfit(self._graph, node, tensor, shapes, sizes, reason=reason, hint=_SAME_PROGRAM)
        new_shape: list[int] = []
        falls = rises = False
        current_shape = self._now.types.shape(current)
        for first, second, extent in zip(first_shape, second_shape, current_shape, strict=True):
            if first == second:
                new_shape.append(extent)
                continue
            is_inverse = first * sizes.first == second * sizes.second
            is_linear = not is_inverse and first * sizes.second == second * sizes.first
            scaled, parts = extent * sizes.wanted, sizes.first
            if is_inverse:
                scaled, parts = extent * sizes.first, sizes.wanted
            if not (is_inverse or is_linear) or scaled % parts:
                follows = is_inverse or is_linear
                reason = f", but extent {scaled}/{parts} is not a whole number" if follows else _NO_RULE
                raise _unfit(self._graph, node, tensor, shapes, sizes, reason=reason)
            new_shape.append(scaled // parts)
            falls, rises = falls or is_inverse, rises or is_linear
        return self.rows_of_types.with_shape(current, tuple(new_shape)), (falls, rises)

    def column(self, name: str) -> FloatArray:
        """Return a column of the nodes at the new size."""
        now = self._now.node[name]
        values = now.copy()
        values[self._rows] = self._fitted(
            name,
            getattr(self._graph, name)[self._rows],
            getattr(self._other, name),
            now[self._rows],
            self._rows,
        )
        return values

    def table_column(self, table: str, name: str) -> FloatArray:
        """Return a column of a side table at the new size."""
        one, two = getattr(self._graph, table), getattr(self._other, table)
        first, second = (getattr(rows, name).astype(np.float64) for rows in (one, two))
        return self._fitted(name, first, second, self._now.tables[table][name], one.node)

    def _fitted(
        self,
        name: str,
        one: FloatArray,
        two: FloatArray,
        now: FloatArray,
        nodes: NDArray[np.integer],
    ) -> FloatArray:
        """Return each figure at the new size, by the rule that its values in both traces follow."""
        first, second, wanted = self._sizes.first, self._sizes.second, self._sizes.wanted
        constant = same(one, two)
        inverse = ~constant & (one * first == two * second)
        linear = ~constant & ~inverse & (one * second == two * first)
        mixed = ~(constant | inverse | linear)
        falls, rises = self._falls[nodes], self._rises[nodes]
        wrong = mixed & ((falls == rises) | np.isnan(one) | np.isnan(two) | (now != one))
        if name in {"batch", "m", "n", "k"}:
            wrong |= mixed
        x, y, z = (np.where(falls, 1 / size, float(size)) for size in (first, second, wanted))
        slope = (two - one) / (y - x)
        new = np.where(mixed, one + slope * (z - x), now)
        new = np.where(inverse, now * first / wanted, np.where(linear, now * wanted / first, new))
        new = np.where(mixed, np.rint(new), new)
        negative = ~wrong & (new < 0)
        if (wrong | negative).any():
            row = int(np.flatnonzero(wrong | negative)[0])
            figures = f"it is {one[row]:,.0f}", f"it is {two[row]:,.0f}"
            reason = ", which extrapolates to a negative number" if negative[row] else _NO_RULE
            what = f"{name.replace('_', ' ')} of the operation"
            raise _unfit(self._graph, int(nodes[row]), what, figures, self._sizes, reason=reason)
        return new
