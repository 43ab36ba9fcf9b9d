"""The figures of a graph that depend on how many ranks share the work, as columns that a rule may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import nan, prod

import numpy as np

from hespas.graph import DTYPES, DYNAMIC, OpGraph, RaggedArray, TensorTypes
from hespas.graph.columns import BoolArray, FloatArray, SmallIntArray
from hespas.graph.errors import UnsupportedError

__all__ = [
    "NODE_FIGURES",
    "TABLE_FIGURES",
    "Figures",
    "TypeRows",
    "changed_nodes",
    "node_text",
    "same",
    "shape_text",
    "with_figures",
]

NODE_FIGURES = ("flops", "useful_flops", "transcendentals", "bytes_read", "bytes_written")
"""Columns of nodes that work is counted in."""

TABLE_FIGURES: Mapping[str, tuple[str, ...]] = {
    "collectives": ("comm_bytes", "operand_bytes", "result_bytes"),
    "p2p": ("comm_bytes",),
    "contractions": ("batch", "m", "n", "k", "flops", "useful_flops"),
}
"""Columns of side tables that do."""


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """``node`` and ``tables`` by the names above; ``operands`` and ``results`` are rows of ``types``."""

    node: Mapping[str, FloatArray]
    tables: Mapping[str, Mapping[str, FloatArray]]
    operands: RaggedArray
    results: RaggedArray
    types: TensorTypes

    @classmethod
    def of(cls, graph: OpGraph) -> Figures:
        """Those of a graph as it stands."""
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
    """Which figures are equal; unknown ones are."""
    equal: BoolArray = (one == two) | (np.isnan(one) & np.isnan(two))
    return equal


def node_text(graph: OpGraph, node: int) -> str:
    """``node 17 (stablehlo.add, add.3)``: where a refusal stands."""
    names = [graph.op_name(node), graph.node_name(node)]
    return f"node {node} ({', '.join(dict.fromkeys(filter(None, names)))})"


def shape_text(types: TensorTypes, row: int) -> str:
    """``f32[64,192]``."""
    element = types.dtype_of(row)
    extents = ("?" if extent == DYNAMIC else str(extent) for extent in types.shape(row))
    return f"{element.name if element else '?'}[{','.join(extents)}]"


class TypeRows:
    """Types of a graph, to which others of the same elements are added as they are asked for."""

    __slots__ = ("_base", "_bytes", "_new", "_rows")

    def __init__(self, types: TensorTypes) -> None:
        self._base = types
        self._new: list[tuple[int, tuple[int, ...]]] = []
        self._bytes: list[float] = []
        self._rows: dict[tuple[int, tuple[int, ...]], int] = {}

    def with_shape(self, row: int, shape: tuple[int, ...]) -> int:
        """The row of the type of ``row`` in another shape. Raises ``UnsupportedError`` for one whose bytes
        are not those of its elements.
        """
        base = self._base
        if shape == base.shape(row):
            return row
        key = (row, shape)
        if key not in self._rows:
            self._rows[key] = len(base) + len(self._new)
            self._new.append(key)
            self._bytes.append(_bytes_in(base, row, shape))
        return self._rows[key]

    def build(self) -> TensorTypes:
        """All types, those that were there first."""
        base = self._base
        if not self._new:
            return base
        of = np.array([row for row, _ in self._new], np.int64)
        lengths = np.array([len(shape) for _, shape in self._new], np.int64)
        return TensorTypes(
            dtype=np.concatenate([base.dtype, base.dtype[of]]),
            dim_offsets=np.concatenate([base.dim_offsets, base.dim_offsets[-1] + np.cumsum(lengths)]),
            dims=np.concatenate(
                [base.dims, np.array([d for _, shape in self._new for d in shape], np.int64)]
            ),
            bytes=np.concatenate([base.bytes, np.array(self._bytes, np.float64)]),
            bounded=np.concatenate([base.bounded, base.bounded[of]]),
            encoding=np.concatenate([base.encoding, base.encoding[of]]),
        )


def _bytes_in(types: TensorTypes, row: int, shape: tuple[int, ...]) -> float:
    """Bytes of a type in another shape."""
    element, before = types.dtype_of(row), float(types.bytes[row])
    if element is None or DYNAMIC in shape or np.isnan(before):
        return nan
    if before != element.storage_bytes(types.elements(row)):
        raise UnsupportedError(
            f"{shape_text(types, row)} takes {before:,.0f} bytes, more than its elements: no rule says how "
            f"many as {list(shape)}",
            position="tensor types",
            hint="rescale along another axis, or trace the larger run",
        )
    return float(DTYPES[element.code].storage_bytes(prod(shape)))


def changed_nodes(graph: OpGraph, after: Figures) -> BoolArray:
    """Which nodes have other figures than before."""
    before = Figures.of(graph)
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


def with_figures(graph: OpGraph, after: Figures) -> OpGraph:
    """The graph with other figures; everything else stays."""
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
        contractions=replace(
            graph.contractions,
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
