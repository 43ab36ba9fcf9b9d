"""Extrapolation of figures to a third size of an axis, from traces of one program at two sizes.

A figure that is equal in both traces is constant; if its product with (or quotient by) the size is equal, it
is inverse (or linear) in the size. Extents of tensors must be one of these. Counts of work may also have a
constant part, ``a + b / size`` or ``a + b * size``; the shapes of the node determine the form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.generators.rescale.figures import (
    NODE_FIGURES,
    TABLE_FIGURES,
    GraphFigures,
    ResizedTypes,
    node_text,
    same,
    shape_text,
)
from hespas.graph import OpGraph, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import is_recorded_wait, without_waits

__all__ = ["AxisSizes", "extrapolate"]


_HINT = "give a trace whose sizes divide, or rescale along another axis"


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Sizes of ``axis`` in the first trace, in the second trace, and in the rescaled job."""

    axis: str
    first: int
    second: int
    wanted: int

    @property
    def ratio(self) -> float:
        """Ratio of the numbers of ranks."""
        return self.wanted / self.first


def extrapolate(graph: OpGraph, now: GraphFigures, other: OpGraph, sizes: AxisSizes) -> GraphFigures:
    """Extrapolate the figures ``now`` of a graph from ``graph`` at one size and ``other`` at another.

    Raises ``UnsupportedError`` if the programs differ, or for a node without a fitting rule.
    """
    rows = np.flatnonzero(~is_recorded_wait(graph))
    second = without_waits(other)
    _check_structure(graph, rows, second, sizes)
    fit = _FigureFit(graph, rows, second, now, sizes)
    operands, results = fit.types("operands"), fit.types("results")
    node = {name: fit.column(name) for name in NODE_FIGURES}
    tables = {
        table: {name: fit.table_column(table, name) for name in TABLE_FIGURES[table]} for table in now.tables
    }
    return GraphFigures(node, tables, operands, results, fit.rows_of_types.build())


def _check_structure(graph: OpGraph, rows: NDArray[np.int64], other: OpGraph, sizes: AxisSizes) -> None:
    """Raise ``UnsupportedError`` unless both are one program: equal operations in equal order, with equal
    numbers of operands.
    """
    ops = [graph.op_name(node) for node in rows.tolist()]
    others = [other.op_name(node) for node in range(len(other))]
    pairs = enumerate(zip(ops, others, strict=False))
    first = next((index for index, (one, two) in pairs if one != two), None)
    if first is None and len(ops) != len(others):
        first = min(len(ops), len(others)) - 1
    if first is not None:
        raise UnsupportedError(
            f"the traces at {sizes.axis}={sizes.first} and {sizes.axis}={sizes.second} are different "
            "programs: "
            f"{len(ops)} operations against {len(others)}; the first difference is {ops[first]} against "
            f"{others[first]}",
            position=node_text(graph, int(rows[first])),
            hint="trace before a compiler chooses by size (StableHLO), or at sizes with equal choices",
        )
    for name in ("operands", "results"):
        different = np.flatnonzero(getattr(graph, name).lengths[rows] != getattr(other, name).lengths)
        if len(different):
            raise _unfit(graph, int(rows[different[0]]), f"it has other {name} in the second trace", sizes)
    positions = np.cumsum(~is_recorded_wait(graph)) - 1
    for table in TABLE_FIGURES:
        one, two = getattr(graph, table), getattr(other, table)
        if len(one) != len(two) or (positions[one.node] != two.node).any():
            reason = f"the second trace does not have the same {table}: {len(two)} against {len(one)}"
            raise _unfit(graph, int(one.node[0]) if len(one) else 0, reason, sizes)
    kinds = np.flatnonzero(graph.collectives.kind != other.collectives.kind)
    if len(kinds):
        node = int(graph.collectives.node[kinds[0]])
        raise _unfit(graph, node, "it is another collective in the second trace", sizes)
    trips = np.flatnonzero(~same(graph.multiplicity[rows], other.multiplicity))
    if len(trips):
        raise _unfit(graph, int(rows[trips[0]]), "it runs another number of times in the second trace", sizes)


def _unfit(graph: OpGraph, node: int, reason: str, sizes: AxisSizes) -> UnsupportedError:
    return UnsupportedError(
        f"{reason}: axis {sizes.axis} has no rule for it at {sizes.axis}={sizes.wanted}",
        position=node_text(graph, node),
        hint=_HINT,
    )


class _FigureFit:
    """Fits the columns of one graph. Types must be fitted first: they determine the form of the work of a
    node.
    """

    def __init__(
        self, graph: OpGraph, rows: NDArray[np.int64], other: OpGraph, now: GraphFigures, sizes: AxisSizes
    ) -> None:
        self._graph, self._rows, self._other, self._now, self._sizes = graph, rows, other, now, sizes
        self.rows_of_types = ResizedTypes(now.types)
        self._falls: BoolArray = np.zeros(len(graph), np.bool_)
        self._rises: BoolArray = np.zeros(len(graph), np.bool_)

    def types(self, name: str) -> RaggedArray:
        """Return operands or results with their new types. A Python call for each distinct pair of types."""
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
        """Return the row of the new type, and whether any of its extents falls or rises with the size."""
        types, others, sizes = self._graph.types, self._other.types, self._sizes
        first_shape, second_shape = types.shape(a), others.shape(b)
        shapes = f"{shape_text(types, a)} against {shape_text(others, b)}"
        encodings = self._graph.strings[int(types.encoding[a])], self._other.strings[int(others.encoding[b])]
        if (
            len(first_shape) != len(second_shape)
            or types.dtype[a] != others.dtype[b]
            or encodings[0] != encodings[1]
        ):
            raise _unfit(self._graph, node, shapes, sizes)
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
                raise _unfit(self._graph, node, f"{shapes}, extent {first} against {second}", sizes)
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
        """Return each figure by its fitting rule."""
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
        wrong |= new < 0
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            reason = f"{name} is {one[row]:,.0f} against {two[row]:,.0f}"
            raise _unfit(self._graph, int(nodes[row]), reason, self._sizes)
        return new
