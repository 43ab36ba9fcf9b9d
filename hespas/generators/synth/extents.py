"""Change of the extents of tensors: equal extents stay equal, so shapes agree along edges and across ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hespas.generators.obfuscate.keys import Key
from hespas.graph import OpGraph, TensorTypesBuilder
from hespas.graph.columns import FloatArray, IntArray, RaggedArray

__all__ = ["changed_extents", "with_changed_extents"]

_LEAST = 512
"""Smallest extent that changes. Smaller ones are sizes of heads, vectors and groups of ranks."""
_GRID = 8
_SPREAD = 0.24
"""Largest decrease of the logarithm of an extent, before it is rounded."""


def changed_extents(extents: IntArray, key: Key, scale: float = 1.0) -> IntArray:
    """Return other extents, determined by ``key``, of which the largest are about ``scale`` times as large.

    Extents that differ by a power of two get the same factor, so that parts of a split extent still add up,
    and keep almost all factors of two, so that they still fill the tiles of a matrix unit.
    """
    changed = extents.copy()
    distinct = np.unique(extents[extents >= _LEAST])
    for extent in distinct.tolist():
        core, grid = extent, 1
        while core % 2 == 0:
            core //= 2
            grid *= 2
        step = max(grid // _GRID, 1)
        factor = scale * float(np.exp(-_SPREAD * key.uniform(f"extent {core}")))
        changed[extents == extent] = max(round(extent * factor / step), 1) * step
    return changed


def with_changed_extents(graph: OpGraph, key: Key, factor: FloatArray, scale: float) -> OpGraph:
    """Return a graph with other extents. ``factor`` is the factor by which the costs of each node change,
    shape ``(nodes,)``. The rows (``m``) of matmuls are chosen so that their work has that factor. Operations
    whose tensors would be larger than their memory traffic get more traffic.
    """
    types, builder = graph.types, TensorTypesBuilder()
    bounds: list[int] = types.dim_offsets.tolist()
    dims: list[int] = changed_extents(types.dims, key, scale).tolist()
    number = [
        builder.add(
            types.dtype_of(row),
            dims[bounds[row] : bounds[row + 1]],
            encoding=encoding,
            bounded=bool(types.bounded[row]),
        )
        for row, encoding in enumerate(types.encoding.tolist())
    ]
    new_row = np.array(number or [0], np.int32)
    table = graph.contractions
    batch, n, k = (changed_extents(extents, key, scale) for extents in (table.batch, table.n, table.k))
    row_factor = factor[table.node]
    work = row_factor * table.batch * table.m * table.n * table.k
    rows = work / np.maximum(batch.astype(np.float64) * n * k, 1.0)
    step = np.where(rows >= 2 * _LEAST, float(_GRID), 1.0)
    m = np.maximum(np.rint(rows / step), 1.0) * step
    new_types = builder.build()
    operands, results = (
        RaggedArray(lists.offsets, new_row[lists.values]) for lists in (graph.operands, graph.results)
    )

    def traffic(old: FloatArray, before: RaggedArray, after: RaggedArray) -> FloatArray:
        if not len(before.values):
            return old * factor
        own, new = before.segment_sum(types.bytes), after.segment_sum(new_types.bytes)
        least = np.divide(new, own, out=np.zeros(len(own)), where=own > 0)
        return old * np.fmax(factor, least)

    return replace(
        graph,
        bytes_read=traffic(graph.bytes_read, graph.operands, operands),
        bytes_written=traffic(graph.bytes_written, graph.results, results),
        types=new_types,
        operands=operands,
        results=results,
        contractions=replace(
            table,
            batch=batch,
            m=m.astype(np.int64),
            n=n,
            k=k,
            flops=table.flops * row_factor,
            useful_flops=table.useful_flops * row_factor,
        ),
    )
