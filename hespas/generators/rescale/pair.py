"""What two recordings of one program at two sizes of an axis prove about a third size.

A figure that is equal in both is constant; one whose product with (or quotient by) the size is equal is
inverse (or linear) in it. Extents of tensors must be one of these. A count of work may also be a constant and
such a part together, ``a + b / size`` or ``a + b * size``, where the shapes of its node say which.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.generators.rescale.figures import (
    NODE_FIGURES,
    TABLE_FIGURES,
    Figures,
    TypeRows,
    node_text,
    same,
    shape_text,
)
from hespas.graph import OpGraph, RaggedArray
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray
from hespas.graph.errors import UnsupportedError
from hespas.graph.passes import is_recorded_wait, without_waits

__all__ = ["Sizes", "extended"]

_INVERSE, _CONSTANT, _LINEAR, _MIXED = -1, 0, 1, 2
_HINT = "give a trace whose sizes divide, or rescale along another axis"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of ``axis`` in the first trace, in the second and in the job to be."""

    axis: str
    first: int
    second: int
    wanted: int

    @property
    def ratio(self) -> float:
        """How many times as many ranks."""
        return self.wanted / self.first


def extended(graph: OpGraph, now: Figures, other: OpGraph, sizes: Sizes) -> Figures:
    """Figures ``now`` of a graph, as ``graph`` at one size and ``other`` at another say that they go on.

    Raises ``UnsupportedError`` where the programs differ, or for a node that no rule fits.
    """
    rows = np.flatnonzero(~is_recorded_wait(graph))
    alike = without_waits(other)
    _check_structure(graph, rows, alike, sizes)
    fit = _Fit(graph, rows, alike, now, sizes)
    operands, results = fit.types("operands"), fit.types("results")
    node = {name: fit.column(name) for name in NODE_FIGURES}
    tables = {
        table: {name: fit.of_table(table, name) for name in TABLE_FIGURES[table]} for table in now.tables
    }
    return Figures(node, tables, operands, results, fit.rows_of_types.build())


def _check_structure(graph: OpGraph, rows: NDArray[np.int64], other: OpGraph, sizes: Sizes) -> None:
    """Both must be one program: the same operations, in the same order, with as many operands."""
    _check_operations(graph, rows, other, sizes)
    for name in ("operands", "results"):
        unlike = np.flatnonzero(getattr(graph, name).lengths[rows] != getattr(other, name).lengths)
        if len(unlike):
            raise _unfit(graph, int(rows[unlike[0]]), f"it has other {name} in the second trace", sizes)
    places = np.cumsum(~is_recorded_wait(graph)) - 1
    for table in TABLE_FIGURES:
        one, two = getattr(graph, table), getattr(other, table)
        if len(one) != len(two) or (places[one.node] != two.node).any():
            why = f"the second trace does not have the same {table}: {len(two)} against {len(one)}"
            raise _unfit(graph, int(one.node[0]) if len(one) else 0, why, sizes)
    kinds = np.flatnonzero(graph.collectives.kind != other.collectives.kind)
    if len(kinds):
        node = int(graph.collectives.node[kinds[0]])
        raise _unfit(graph, node, "it is another collective in the second trace", sizes)
    trips = np.flatnonzero(~same(graph.multiplicity[rows], other.multiplicity))
    if len(trips):
        raise _unfit(graph, int(rows[trips[0]]), "it runs another number of times in the second trace", sizes)


def _check_operations(graph: OpGraph, rows: NDArray[np.int64], other: OpGraph, sizes: Sizes) -> None:
    ops = [graph.op_name(node) for node in rows.tolist()]
    others = [other.op_name(node) for node in range(len(other))]
    pairs = enumerate(zip(ops, others, strict=False))
    first = next((place for place, (one, two) in pairs if one != two), None)
    if first is None and len(ops) != len(others):
        first = min(len(ops), len(others)) - 1
    if first is None:
        return
    raise UnsupportedError(
        f"the traces at {sizes.axis}={sizes.first} and {sizes.axis}={sizes.second} are not the same program: "
        f"{len(ops)} operations against {len(others)}, the first that differs is {ops[first]} against "
        f"{others[first]}",
        position=node_text(graph, int(rows[first])),
        hint="trace before a compiler chooses by size (StableHLO), or at sizes where it chooses alike",
    )


def _unfit(graph: OpGraph, node: int, why: str, sizes: Sizes) -> UnsupportedError:
    return UnsupportedError(
        f"{why}: no rule of axis {sizes.axis} says what it is at {sizes.axis}={sizes.wanted}",
        position=node_text(graph, node),
        hint=_HINT,
    )


class _Fit:
    """Fits the columns of one graph; types first: they say which way the work of a node goes."""

    def __init__(
        self, graph: OpGraph, rows: NDArray[np.int64], other: OpGraph, now: Figures, sizes: Sizes
    ) -> None:
        self._graph, self._rows, self._other, self._now, self._sizes = graph, rows, other, now, sizes
        self.rows_of_types = TypeRows(now.types)
        self._falls: BoolArray = np.zeros(len(graph), np.bool_)
        self._rises: BoolArray = np.zeros(len(graph), np.bool_)

    def types(self, name: str) -> RaggedArray:
        """Operands or results in their new types. A Python call for each distinct pair of types."""
        one: RaggedArray = getattr(self._graph, name)
        now: RaggedArray = getattr(self._now, name)
        inside = np.zeros(len(self._graph), np.bool_)
        inside[self._rows] = True
        places = np.flatnonzero(inside[one.row_ids])
        two: SmallIntArray = getattr(self._other, name).values
        triples = np.stack([one.values[places], two, now.values[places]], axis=1)
        distinct, first, place = np.unique(triples, axis=0, return_index=True, return_inverse=True)
        nodes = one.row_ids[places]
        found = np.empty(len(distinct), np.int32)
        codes = np.empty((len(distinct), 2), np.bool_)
        for row, (a, b, current) in enumerate(distinct.tolist()):
            found[row], codes[row] = self._type(int(nodes[first[row]]), a, b, current)
        values = now.values.copy()
        values[places] = found[place.reshape(-1)]
        self._falls[nodes[codes[place.reshape(-1), 0]]] = True
        self._rises[nodes[codes[place.reshape(-1), 1]]] = True
        return replace(now, values=values)

    def _type(self, node: int, a: int, b: int, current: int) -> tuple[int, tuple[bool, bool]]:
        """The row of the new type, and whether an extent of it falls or rises with the size."""
        types, others, sizes = self._graph.types, self._other.types, self._sizes
        one, two = types.shape(a), others.shape(b)
        spelled = self._graph.strings[int(types.encoding[a])], self._other.strings[int(others.encoding[b])]
        if len(one) != len(two) or types.dtype[a] != others.dtype[b] or spelled[0] != spelled[1]:
            why = f"{shape_text(types, a)} against {shape_text(others, b)}"
            raise _unfit(self._graph, node, why, sizes)
        new: list[int] = []
        codes: set[int] = set()
        for before, behind, extent in zip(one, two, self._now.types.shape(current), strict=True):
            code = _code_of(before, behind, sizes)
            grown = _grown(extent, code, sizes)
            if grown < 0:
                shapes = f"{shape_text(types, a)} against {shape_text(others, b)}"
                raise _unfit(self._graph, node, f"{shapes}, extent {before} against {behind}", sizes)
            new.append(grown)
            codes.add(code)
        return self.rows_of_types.with_shape(current, tuple(new)), (_INVERSE in codes, _LINEAR in codes)

    def column(self, name: str) -> FloatArray:
        """A column of the nodes at its new size."""
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

    def of_table(self, table: str, name: str) -> FloatArray:
        """A column of a side table at its new size."""
        one, two = getattr(self._graph, table), getattr(self._other, table)
        before, behind = (getattr(each, name).astype(np.float64) for each in (one, two))
        return self._fitted(name, before, behind, self._now.tables[table][name], one.node)

    def _fitted(
        self,
        name: str,
        one: FloatArray,
        two: FloatArray,
        now: FloatArray,
        nodes: NDArray[np.integer],
    ) -> FloatArray:
        """Each figure by the rule that fits it."""
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
            why = f"{name} is {one[row]:,.0f} against {two[row]:,.0f}"
            raise _unfit(self._graph, int(nodes[row]), why, self._sizes)
        return new


def _code_of(one: int, two: int, sizes: Sizes) -> int:
    if one == two:
        return _CONSTANT
    if one * sizes.first == two * sizes.second:
        return _INVERSE
    return _LINEAR if one * sizes.second == two * sizes.first else _MIXED


def _grown(extent: int, code: int, sizes: Sizes) -> int:
    """An extent at the wanted size, -1 where no whole number is one."""
    if code == _CONSTANT:
        return extent
    times, parts = (sizes.first, sizes.wanted) if code == _INVERSE else (sizes.wanted, sizes.first)
    return -1 if code == _MIXED or extent * times % parts else extent * times // parts
