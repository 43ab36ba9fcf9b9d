"""Change of the element types of a program, as if it ran in bf16 or FP8."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

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
    """Pass that changes floating-point tensors to ``dtype``.

    Integers, booleans and complex numbers are unchanged. So are types wider than 16 bits that are also wider
    than the operands of matmuls, such as optimizer states and accumulated gradients.

    The bytes of a node and its messages change in proportion to its tensors; without tensors, in proportion
    to its ``rate_dtype``. Matmuls multiply in ``dtype``. ``products`` is the number of matmuls that emulate
    one f32 matmul: 1 for TF32 units if the device has them, ``FULL_F32_PRODUCTS`` for IEEE f32. If it is
    None, f32 matmuls keep their number, and others get the default of their framework: IEEE f32 in PyTorch,
    TF32 in XLA. Recorded durations become unknown, and the source program is dropped.
    """

    dtype: DType
    products: int | None = None

    @classmethod
    def of(cls, name: str) -> InPrecision:
        """Return the pass for an element type, ``tf32`` or ``f32_full``. Raises ``UsageError`` for others."""
        element = find_dtype(name)
        if name == "f32_full":
            return cls(dtype("f32"), FULL_F32_PRODUCTS)
        if element is None or element.kind is not DTypeKind.FLOAT:
            raise UsageError(f"unknown precision '{name}'", hint="pass a floating-point type or f32_full")
        return cls(dtype("f32"), 1) if element.name == "tf32" else cls(element)

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """Return the graph in that precision. O(nodes + tensor types)."""
        floats = _computed_in(graph)
        bits: FloatArray = np.array([max(_stored_bits(element), 1.0) for element in DTYPES])
        shrinks = np.where(floats, _stored_bits(self.dtype) / bits, 1.0)
        types, rate = graph.types, graph.rate_dtype
        is_float = (types.dtype >= 0) & floats[types.dtype]
        sizes = np.where(is_float, types.bytes * shrinks[types.dtype], types.bytes)
        of_rate = np.where(rate >= 0, shrinks[rate], 1.0)
        reads = _ratio(graph.operands, types.bytes, sizes, of_rate)
        writes = _ratio(graph.results, types.bytes, sizes, of_rate)
        moved = np.where(graph.results.lengths > 0, writes, reads)
        code = np.int16(self.dtype.code)
        collectives, p2p, table = graph.collectives, graph.p2p, graph.extra
        # The types of the program before compilation do not apply to the new one.
        keys = [row for row in np.unique(table.key).tolist() if graph.strings[row] == SOURCE_DTYPE]
        if keys:
            table = ExtraTable.from_rows(
                [
                    (int(table.node[row]), int(table.key[row]), int(table.tag[row]), table.value(row))
                    for row in np.flatnonzero(~np.isin(table.key, keys)).tolist()
                ]
            )
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
            contractions=self._converted_products(graph),
            extra=table,
            attachments={},
        )

    def _converted_products(self, graph: OpGraph) -> ContractionTable:
        """Return the table of matmuls with operands of the new element type. An accumulator type stays if it
        is wider than the new type and differs from the operand types.
        """
        table, code = graph.contractions, np.int16(self.dtype.code)
        floats: BoolArray = np.array([element.kind is DTypeKind.FLOAT for element in DTYPES] + [False])
        bits = np.array([element.bits for element in DTYPES] + [0])
        own = (table.accumulator == table.lhs) | (table.accumulator == table.rhs)
        wider = ~own & (bits[table.accumulator] > self.dtype.bits)
        lhs, rhs = (np.where(floats[operand], code, operand) for operand in (table.lhs, table.rhs))
        # Primitive products of a multiplication, for operands that are floats.
        f32, products = dtype("f32").code, np.ones(len(table), np.uint8)
        if self.dtype.code == f32 and self.products is not None:
            products = np.full(len(table), self.products, np.uint8)
        elif self.dtype.code == f32:
            names = (graph.strings[row] for row in graph.op_id[table.node].tolist())
            default = np.array([FULL_F32_PRODUCTS if name.startswith("aten::") else 1 for name in names])
            was_f32 = (table.lhs == f32) & (table.rhs == f32)
            products = np.where(was_f32, table.products, default).astype(np.uint8)
        return replace(
            table,
            lhs=lhs,
            rhs=rhs,
            accumulator=np.where(floats[table.accumulator] & ~wider, code, table.accumulator),
            products=np.where(floats[table.lhs] & floats[table.rhs], products, table.products),
        )


_NARROW_BITS = 16
"""Minimum width in bits of the types that a graph computes in, because activations between products of
narrower operands have 16 bits.
"""


def _computed_in(graph: OpGraph) -> BoolArray:
    """Return a mask of the element types to convert, shape ``(element types,)``: the types in which the graph
    computes.

    They are the floating-point types of at most 16 bits, or of at most the width of the matmul operands with
    the most FLOPs. In a graph without matmuls they are all floating-point types.
    """
    floats: BoolArray = np.array([element.kind is DTypeKind.FLOAT for element in DTYPES])
    table = graph.contractions
    if not len(table):
        return floats
    work = np.nan_to_num(table.flops * graph.executions[table.node])
    multiplied = np.bincount(np.maximum(table.lhs, 0), np.where(table.lhs >= 0, work, 0.0), len(DTYPES))
    if not (multiplied[floats] > 0).any():
        return floats
    most = DTYPES[int(np.argmax(np.where(floats, multiplied, -1.0)))].bits
    bits = np.array([element.bits for element in DTYPES])
    return floats & (bits <= max(most, _NARROW_BITS))


def _stored_bits(element: DType) -> float:
    """Return the bits of an element in memory, including its part of the scale of its block."""
    scale = element.block_scale_bits / element.block_elements if element.block_elements else 0.0
    return element.bits + scale


def _ratio(rows: RaggedArray, before: FloatArray, after: FloatArray, otherwise: FloatArray) -> FloatArray:
    """Return for each node the new bytes of its tensors divided by the old bytes.

    ``rows`` are the tensor types of each node, ``before`` and ``after`` the bytes of each type. ``otherwise``
    is the result for a node whose old bytes are unknown or 0.
    """
    old = np.bincount(rows.row_ids, before[rows.values], len(rows))
    new = np.bincount(rows.row_ids, after[rows.values], len(rows))
    is_known = np.isfinite(old) & (old > 0)
    return np.where(is_known, new / np.where(is_known, old, 1.0), otherwise)
