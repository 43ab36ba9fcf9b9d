"""A program in another number format: what if it were run in bf16, or in FP8?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hespas.graph.columns import (
    DTYPES,
    BoolArray,
    DType,
    DTypeKind,
    FloatArray,
    RaggedArray,
    dtype,
    find_dtype,
)
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.errors import UsageError
from hespas.graph.opgraph import FULL_F32_PRODUCTS, SOURCE_DTYPE, ContractionTable, ExtraTable, OpGraph

__all__ = ["InPrecision"]


@dataclass(frozen=True, slots=True)
class InPrecision:
    """Floating-point tensors as elements of ``dtype``; integers, booleans and complex numbers stay, and so do
    types wider than those that products multiply and than 16 bits: optimizer states, accumulated gradients.

    Bytes of a node, and of its messages, change as those of its tensors do; without tensors as its
    ``rate_dtype`` does. Matrix products multiply in ``dtype``. ``products`` are those of a multiplication of
    f32 (1: TF32 units where there are some, ``FULL_F32_PRODUCTS``: IEEE f32); None leaves products that were
    of f32 as they are and gives others the default of their framework: IEEE f32 in PyTorch, TF32 in XLA.
    Recorded durations become unknown, and the source program is left out.
    """

    dtype: DType
    products: int | None = None

    @classmethod
    def of(cls, name: str) -> InPrecision:
        """Return the pass for an element type, ``tf32`` or ``f32_full``. Raises ``UsageError`` for others."""
        known = find_dtype(name)
        if name == "f32_full":
            return cls(dtype("f32"), FULL_F32_PRODUCTS)
        if known is None or known.kind is not DTypeKind.FLOAT:
            raise UsageError(f"no precision '{name}'", hint="a floating-point type, or f32_full")
        return cls(dtype("f32"), 1) if known.name == "tf32" else cls(known)

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph in that precision. O(nodes + tensor types)."""
        floats = _computed_in(graph)
        bits: FloatArray = np.array([max(_stored_bits(each), 1.0) for each in DTYPES])
        shrinks = np.where(floats, _stored_bits(self.dtype) / bits, 1.0)
        types, rate = graph.types, graph.rate_dtype
        is_float = (types.dtype >= 0) & floats[types.dtype]
        sizes = np.where(is_float, types.bytes * shrinks[types.dtype], types.bytes)
        of_rate = np.where(rate >= 0, shrinks[rate], 1.0)
        reads = _ratio(graph.operands, types.bytes, sizes, of_rate)
        writes = _ratio(graph.results, types.bytes, sizes, of_rate)
        moved = np.where(graph.results.lengths > 0, writes, reads)
        code = np.int16(self.dtype.code)
        collectives, p2p = graph.collectives, graph.p2p
        return replace(
            graph,
            types=replace(types, dtype=np.where(is_float, code, types.dtype), bytes=sizes),
            rate_dtype=np.where((rate >= 0) & floats[rate], code, rate),
            bytes_read=graph.bytes_read * reads,
            bytes_written=graph.bytes_written * writes,
            duration_ns=np.full(len(graph), np.nan),
            collectives=replace(
                collectives,
                comm_bytes=collectives.comm_bytes * moved[collectives.node],
                operand_bytes=collectives.operand_bytes * reads[collectives.node],
                result_bytes=collectives.result_bytes * writes[collectives.node],
            ),
            p2p=replace(p2p, comm_bytes=p2p.comm_bytes * moved[p2p.node]),
            contractions=self._multiplied(graph),
            extra=_without_source_types(graph),
            attachments={},
        )

    def _multiplied(self, graph: OpGraph) -> ContractionTable:
        """Return the matrix products of operands in this precision. Accumulators of another type than the
        operands stay where they are wider.
        """
        table, code = graph.contractions, np.int16(self.dtype.code)
        floats: BoolArray = np.array([each.kind is DTypeKind.FLOAT for each in DTYPES] + [False])
        bits = np.array([each.bits for each in DTYPES] + [0])
        own = (table.accumulator == table.lhs) | (table.accumulator == table.rhs)
        wider = ~own & (bits[table.accumulator] > self.dtype.bits)
        lhs, rhs = (np.where(floats[each], code, each) for each in (table.lhs, table.rhs))
        return replace(
            table,
            lhs=lhs,
            rhs=rhs,
            accumulator=np.where(floats[table.accumulator] & ~wider, code, table.accumulator),
            products=np.where(floats[table.lhs] & floats[table.rhs], self._products(graph), table.products),
        )

    def _products(self, graph: OpGraph) -> NDArray[np.uint8]:
        """Return the products that a multiplication of each row is worth where both operands are floats."""
        table, f32 = graph.contractions, dtype("f32").code
        if self.dtype.code != f32:
            return np.ones(len(table), np.uint8)
        if self.products is not None:
            return np.full(len(table), self.products, np.uint8)
        names = (graph.strings[row] for row in graph.op_row[table.node].tolist())
        default = np.array([FULL_F32_PRODUCTS if name.startswith("aten::") else 1 for name in names])
        was_f32 = (table.lhs == f32) & (table.rhs == f32)
        return np.where(was_f32, table.products, default).astype(np.uint8)


_NARROW_BITS = 16
"""Activations between products of fewer bits have this many."""


def _computed_in(graph: OpGraph) -> BoolArray:
    """Return which element types a graph computes in, shape ``(element types,)``: floating-point types that
    are not wider than the operands of most FLOPs of its products. All of them without products.
    """
    floats: BoolArray = np.array([each.kind is DTypeKind.FLOAT for each in DTYPES])
    table = graph.contractions
    if not len(table):
        return floats
    work = np.nan_to_num(table.flops * graph.multiplicity[table.node])
    multiplied = np.bincount(np.maximum(table.lhs, 0), np.where(table.lhs >= 0, work, 0.0), len(DTYPES))
    if not (multiplied[floats] > 0).any():
        return floats
    most = DTYPES[int(np.argmax(np.where(floats, multiplied, -1.0)))].bits
    bits = np.array([each.bits for each in DTYPES])
    return floats & (bits <= max(most, _NARROW_BITS))


def _stored_bits(element: DType) -> float:
    """Return the bits of an element with its share of a block's scale."""
    scale = element.block_scale_bits / element.block_elements if element.block_elements else 0.0
    return element.bits + scale


def _without_source_types(graph: OpGraph) -> ExtraTable:
    """Return the attributes without those that name the types a program had before it was compiled."""
    keys = {row for row in np.unique(graph.extra.key).tolist() if graph.strings[row] == SOURCE_DTYPE}
    if not keys:
        return graph.extra
    table = graph.extra
    kept = np.flatnonzero(~np.isin(table.key, list(keys))).tolist()
    rows = [
        (int(table.node[row]), int(table.key[row]), int(table.tag[row]), table.value(row)) for row in kept
    ]
    return ExtraTable.from_rows(rows)


def _ratio(rows: RaggedArray, before: FloatArray, after: FloatArray, otherwise: FloatArray) -> FloatArray:
    """New bytes of a node's tensors over old ones, ``otherwise`` where they have none that is known."""
    old = np.bincount(rows.row_ids, before[rows.values], len(rows))
    new = np.bincount(rows.row_ids, after[rows.values], len(rows))
    known = np.isfinite(old) & (old > 0)
    return np.where(known, new / np.where(known, old, 1.0), otherwise)
