"""A program in another number format: what if it were run in bf16, or in FP8?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hespas.graph.columns import DTYPES, BoolArray, Csr, DType, DTypeKind, FloatArray
from hespas.graph.diagnostics import Diagnostics
from hespas.graph.opgraph import OpGraph

__all__ = ["InPrecision"]


@dataclass(frozen=True, slots=True)
class InPrecision:
    """All floating-point tensors as elements of ``dtype``; integers, booleans and complex numbers stay.

    Bytes of a node, and of its messages, change as those of its tensors do; without tensors as its
    ``rate_dtype`` does. Recorded durations become unknown, and the source program is left out.
    """

    dtype: DType

    def __call__(self, graph: OpGraph, diagnostics: Diagnostics) -> OpGraph:
        """The graph in that precision. O(nodes + tensor types)."""
        floats: BoolArray = np.array([each.kind is DTypeKind.FLOAT for each in DTYPES])
        bits: FloatArray = np.array([max(each.bits, 1) for each in DTYPES], np.float64)
        shrinks = np.where(floats, self.dtype.bits / bits, 1.0)
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
            attachments={},
        )


def _ratio(rows: Csr, before: FloatArray, after: FloatArray, otherwise: FloatArray) -> FloatArray:
    """New bytes of a node's tensors over old ones, ``otherwise`` where they have none that is known."""
    old = np.bincount(rows.row_ids, before[rows.values], len(rows))
    new = np.bincount(rows.row_ids, after[rows.values], len(rows))
    known = np.isfinite(old) & (old > 0)
    return np.where(known, new / np.where(known, old, 1.0), otherwise)
