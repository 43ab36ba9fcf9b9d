"""What operations cost whose tensors became larger or smaller, where types tell what they did cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import isnan, nan

import numpy as np

from hespas.generators.rescale.figures import Figures, TypeRows, node_text, shape_text
from hespas.graph import OpClass, OpGraph, RaggedArray, TensorTypes
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError

__all__ = ["recounted"]

_MOST_TENSORS = 10
_ALIKE = (OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL)


def recounted(
    graph: OpGraph, now: Figures, marks: Mapping[tuple[int, int], frozenset[int]], before: int, after: int
) -> Figures:
    """The figures with the marked dimensions of tensors (operands of a node first, then its results) split
    into ``after`` parts instead of ``before``. Raises ``UnsupportedError``.
    """
    rows = TypeRows(now.types)
    operands, results = now.operands.values.copy(), now.results.values.copy()
    for (node, slot), dims in marks.items():
        count = int(now.operands.lengths[node])
        column, csr, place = (
            (operands, now.operands, slot) if slot < count else (results, now.results, slot - count)
        )
        at = int(csr.offsets[node]) + place
        shape = list(now.types.shape(int(column[at])))
        for dim in dims:
            if shape[dim] * before % after:
                raise UnsupportedError(
                    f"extent {shape[dim]} of {shape_text(now.types, int(column[at]))} is one of {before} "
                    f"parts: the whole does not divide by {after}",
                    position=node_text(graph, node),
                    hint="choose a size that divides it",
                )
            shape[dim] = shape[dim] * before // after
        column[at] = rows.with_shape(int(column[at]), tuple(shape))
    new = replace(
        now, operands=replace(now.operands, values=operands), results=replace(now.results, values=results)
    )
    return _Count(graph, now, replace(new, types=rows.build())).run(sorted({node for node, _ in marks}))


class _Count:
    """New costs of nodes, one after the other."""

    def __init__(self, graph: OpGraph, old: Figures, new: Figures) -> None:
        self._graph, self._old, self._new = graph, old, new
        self._node = {name: column.copy() for name, column in old.node.items()}
        self._tables = {
            table: {name: column.copy() for name, column in columns.items()}
            for table, columns in old.tables.items()
        }

    def run(self, nodes: list[int]) -> Figures:
        """All figures."""
        calls = self._rows("collectives")
        products = self._rows("contractions")
        for node in nodes:
            for name in ("bytes_read", "bytes_written"):
                self._node[name][node] = self._moved(node, name)
            if node in products:
                self._product(node, products[node])
            else:
                self._arithmetic(node)
            if node in calls:
                self._call(node, calls[node])
        return replace(self._new, node=self._node, tables=self._tables)

    def _rows(self, table: str) -> dict[int, int]:
        nodes: list[int] = getattr(self._graph, table).node.tolist()
        return {node: row for row, node in enumerate(nodes)}

    def _refuse(self, node: int, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"its {what} do not follow from the types of its tensors",
            position=node_text(self._graph, node),
            hint="give a trace at another size of the axis: `others=OTHER_TRACE`",
        )

    def _moved(self, node: int, name: str) -> float:
        """Traffic that is the sum of some of the tensors, whichever they are, before and after."""
        stated = float(self._old.node[name][node])
        if stated == 0 or isnan(stated):
            return stated
        one, two = (_bytes_of(each, node) for each in (self._old, self._new))
        if len(one) > _MOST_TENSORS:
            raise self._refuse(node, name.replace("_", " "))
        sums = {
            float(np.dot(chosen, two))
            for chosen in product((0.0, 1.0), repeat=len(one))
            if np.dot(chosen, one) == stated
        }
        if len(sums) != 1:
            raise self._refuse(node, name.replace("_", " "))
        return sums.pop()

    def _arithmetic(self, node: int) -> None:
        """FLOPs go with the elements of the result, or of what is reduced to it."""
        names = ("flops", "useful_flops", "transcendentals")
        if not any(self._old.node[name][node] for name in names):
            return
        op_class = self._graph.op_class[node]
        if op_class not in (*_ALIKE, OpClass.REDUCTION):
            raise self._refuse(node, "FLOPs")
        counts = [
            _steps(each, node, reduces=op_class == OpClass.REDUCTION) for each in (self._old, self._new)
        ]
        for name in names:
            self._node[name][node] *= counts[1] / counts[0] if counts[0] else nan

    def _product(self, node: int, row: int) -> None:
        """A product of matrices: its extents by those of its tensors."""
        table = self._tables["contractions"]
        lhs, rhs, result = (
            (_elements(self._old, node, slot), _elements(self._new, node, slot)) for slot in range(3)
        )
        left, right, whole = lhs[1] / lhs[0], rhs[1] / rhs[0], result[1] / result[0]
        # B M K, B K N and B M N change by these; one of the four extents is that of the axis
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

    def _call(self, node: int, row: int) -> None:
        """Buffers of a collective are those of its operands and results."""
        table = self._tables["collectives"]
        old, new = (
            [float(sum(_bytes_of(each, node, side))) for side in (0, 1)] for each in (self._old, self._new)
        )
        for side, name in enumerate(("operand_bytes", "result_bytes")):
            table[name][row] *= new[side] / old[side]
        payload = self._old.tables["collectives"]["comm_bytes"][row]
        fits = [side for side in (0, 1) if payload == old[side]]
        if not fits or len({new[side] for side in fits}) > 1:
            raise self._refuse(node, "payload")
        table["comm_bytes"][row] = new[fits[0]]


def _types_of(figures: Figures, node: int, side: int | None = None) -> list[int]:
    sides: tuple[RaggedArray, ...] = (figures.operands, figures.results)
    chosen = sides if side is None else (sides[side],)
    return [int(row) for csr in chosen for row in csr.row(node)]


def _bytes_of(figures: Figures, node: int, side: int | None = None) -> FloatArray:
    """Bytes of each tensor of a node."""
    return figures.types.bytes[_types_of(figures, node, side)]


def _elements(figures: Figures, node: int, slot: int) -> float:
    types: TensorTypes = figures.types
    return float(types.elements(_types_of(figures, node)[slot]))


def _steps(figures: Figures, node: int, *, reduces: bool) -> float:
    """Elements of the first result; with ``reduces``, how many more the first operand has."""
    result = float(figures.types.elements(_types_of(figures, node, 1)[0]))
    return _elements(figures, node, 0) - result if reduces else result
