"""Shapes rounded to powers of two, and costs rounded to five binary digits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.graph import (
    PROGRAM_BYTES,
    STEP_FACTS,
    CollectiveTable,
    OpGraph,
    TensorTypesBuilder,
    Workload,
    step_facts,
)
from hespas.graph.columns import FloatArray, IntArray, RaggedArray

__all__ = ["SIGNIFICANT_BITS", "round_shapes", "rounded_costs", "rounded_extents", "with_payload"]

SIGNIFICANT_BITS = 5
"""Binary digits of a cost after rounding: no cost changes by more than 1/32 (3.1 %)."""


def rounded_costs(values: FloatArray) -> FloatArray:
    """Return costs rounded to :data:`SIGNIFICANT_BITS` binary digits; 0, NaN and infinity stay.

    Large costs stay divisible by powers of two, as simulators split them into chunks for ranks.
    """
    mantissa, exponent = np.frexp(values)
    scale = float(1 << SIGNIFICANT_BITS)
    return np.ldexp(np.rint(mantissa * scale) / scale, exponent)


def rounded_extents(extents: IntArray) -> IntArray:
    """Return extents rounded to the nearest power of two (in the logarithm); 0 and unknown extents stay.

    Equal extents stay equal, so shapes agree along edges, collectives and ranks. Parts of an extent that was
    split by a power of two still add up.
    """
    rounded = extents.copy()
    positive = extents > 0
    rounded[positive] = np.int64(1) << np.minimum(np.rint(np.log2(extents[positive])), 62).astype(np.int64)
    return rounded


def round_shapes(workload: Workload) -> Workload:
    """Return a workload with rounded shapes and costs.

    FLOPs, traffic, times, and sizes of collectives and messages change by at most 3.1 % each. The extents of
    matrix products are rounded too, except that their rows (``m``) are chosen so that the work of the product
    stays within 3.1 %. Numbers of tokens and model FLOPs of the step are dropped. O(nodes + types).
    """
    metadata = dict(workload.metadata)
    facts = step_facts(metadata)
    if facts is not None:
        metadata[STEP_FACTS] = replace(facts, tokens=0.0, model_flops=float("nan")).text()
    if PROGRAM_BYTES in metadata:
        sizes = [np.array(text.split(), np.float64) for text in metadata[PROGRAM_BYTES].split(";")]
        texts = (" ".join(f"{size:.0f}" for size in rounded_costs(part).tolist()) for part in sizes)
        metadata[PROGRAM_BYTES] = ";".join(texts)
    return replace(workload, classes=tuple(map(_rounded, workload.classes)), metadata=metadata)


def _rounded(graph: OpGraph) -> OpGraph:
    return replace(
        _with_rounded_types(graph),
        flops=rounded_costs(graph.flops),
        useful_flops=rounded_costs(graph.useful_flops),
        transcendentals=rounded_costs(graph.transcendentals),
        bytes_read=rounded_costs(graph.bytes_read),
        bytes_written=rounded_costs(graph.bytes_written),
        duration_ns=rounded_costs(graph.duration_ns),
        collectives=with_payload(graph.collectives, rounded_costs(graph.collectives.comm_bytes)),
        p2p=replace(graph.p2p, comm_bytes=rounded_costs(graph.p2p.comm_bytes)),
        attachments={},
    )


def with_payload(table: CollectiveTable, payload: FloatArray) -> CollectiveTable:
    """Return collectives with other payloads. Operands and results keep their ratio to the payload, which the
    group size determines.
    """
    ratio = np.divide(payload, table.comm_bytes, out=np.ones(len(payload)), where=table.comm_bytes > 0)
    return replace(
        table,
        comm_bytes=payload,
        operand_bytes=np.rint(table.operand_bytes * ratio),
        result_bytes=np.rint(table.result_bytes * ratio),
    )


def _with_rounded_types(graph: OpGraph) -> OpGraph:
    types, builder = graph.types, TensorTypesBuilder()
    extents = rounded_extents(types.dims)
    bounds: list[int] = types.dim_offsets.tolist()
    dims: list[int] = extents.tolist()
    encodings: list[int] = types.encoding.tolist()
    number = [
        builder.add(
            types.dtype_of(row),
            dims[bounds[row] : bounds[row + 1]],
            encoding=encoding,
            bounded=bool(types.bounded[row]),
        )
        for row, encoding in enumerate(encodings)
    ]
    new_row = np.array(number or [0], np.int32)

    def renumbered(lists: RaggedArray) -> RaggedArray:
        return RaggedArray(lists.offsets, new_row[lists.values])

    table = graph.contractions
    batch, n, k = (rounded_extents(extent) for extent in (table.batch, table.n, table.k))
    work = table.batch.astype(np.float64) * table.m * table.n * table.k
    others = batch.astype(np.float64) * n * k
    m = np.where(others > 0, np.maximum(np.rint(rounded_costs(work) / np.maximum(others, 1.0)), 1.0), table.m)
    return replace(
        graph,
        types=builder.build(),
        operands=renumbered(graph.operands),
        results=renumbered(graph.results),
        contractions=table.resized(
            batch=batch,
            m=m.astype(np.int64),
            n=n,
            k=k,
            flops=rounded_costs(table.flops),
            useful_flops=rounded_costs(table.useful_flops),
        ),
    )
