"""Cycles, utilisation and buffer accesses of products on a systolic array, as SCALE-Sim v3 counts them.

A product of an (M, K) input by a (K, N) filter on ``rows`` x ``columns`` cells is cut into folds that run one
after another. Exact against runs of scalesim 3.0.0 that do not wait for memory (a word is one byte there; the
element type plays no part). Vectorised: a million shapes take about a tenth of a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hespas.estimators.systolic.array import Array
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError

__all__ = ["FoldCounts", "fold_counts", "fold_cycles"]

_BLOCK = 1 << 14
"""Shapes at a time: their columns stay in the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FoldCounts:
    """Columns of shape ``(products,)``; NaN where a size is unknown.

    ``cycles`` is the total as the simulator prints it: the index of the last cycle, without stalls. The three
    utilisations are percentages: ``overall_pct`` of all multiply-accumulates the array could do,
    ``mapping_pct`` of the cells that hold an operand, ``compute_pct`` as printed, where the simulator counts
    the skewed stationary operand twice. Reads and writes are words between the array and its buffers;
    ``ofmap_writes`` of an output-stationary array include the simulator's (rows + columns) more per fold.
    """

    cycles: FloatArray
    folds: FloatArray
    overall_pct: FloatArray
    mapping_pct: FloatArray
    compute_pct: FloatArray
    ifmap_reads: FloatArray
    filter_reads: FloatArray
    ofmap_writes: FloatArray


class _Mapped(NamedTuple):
    """A product as the array sees it: what lies along its rows and columns, and what streams through."""

    rows: FloatArray
    columns: FloatArray
    streamed: FloatArray
    row_folds: FloatArray
    column_folds: FloatArray
    fold_cycles: FloatArray


def fold_cycles(m: FloatArray, n: FloatArray, k: FloatArray, array: Array) -> FloatArray:
    """``cycles`` of :class:`FoldCounts` alone."""
    mapped = _mapped(m, n, k, array)
    return _last_cycle(mapped.row_folds * mapped.column_folds * mapped.fold_cycles)


def fold_counts(
    m: FloatArray, n: FloatArray, k: FloatArray, array: Array, *, batch: FloatArray | None = None
) -> FoldCounts:
    """All counts of (m, k) by (k, n) products, columns of one shape. ``batch`` products of each size run one
    after another, as SCALE-Sim runs layers: they multiply the folds, and are not folded into ``m``.
    """
    times = np.ones_like(m) if batch is None else batch
    lengths = {column.shape for column in (m, n, k, times)}
    if len(lengths) > 1:
        raise UsageError("the sizes of products differ in length")
    parts = [
        _block(*(column[first : first + _BLOCK] for column in (m, n, k, times)), array=array)
        for first in range(0, max(len(m), 1), _BLOCK)
    ]
    names = FoldCounts.__slots__
    if len(parts) == 1:
        return parts[0]
    return FoldCounts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


def _mapped(m: FloatArray, n: FloatArray, k: FloatArray, array: Array) -> _Mapped:
    skew = array.rows + array.columns - 2
    match array.dataflow:
        case "os":
            rows, columns, streamed = m, n, k
        case "ws":
            rows, columns, streamed = k, n, m
            skew += array.rows
        case "is":
            rows, columns, streamed = k, m, n
            skew += array.rows
    return _Mapped(
        rows,
        columns,
        streamed,
        np.ceil(rows / array.rows),
        np.ceil(columns / array.columns),
        np.where(streamed == 0, 0.0, streamed + skew),
    )


def _last_cycle(total: FloatArray) -> FloatArray:
    """The index of the last of ``total`` cycles; an empty product has none."""
    return np.maximum(total - 1, 0.0)


def _block(m: FloatArray, n: FloatArray, k: FloatArray, batch: FloatArray, *, array: Array) -> FoldCounts:
    mapped = _mapped(m, n, k, array)
    rows, columns, streamed, row_folds, column_folds, per_fold = mapped
    folds = row_folds * column_folds
    cells = array.rows * array.columns
    area = rows * columns
    cycles = _last_cycle(batch * folds * per_fold)
    through_rows = batch * column_folds * streamed * rows
    through_columns = batch * row_folds * streamed * columns
    counted = per_fold if array.dataflow == "os" else per_fold + (array.columns - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        overall = 100 * batch * m * n * k / (cycles * cells)
        mapping = 100 * area / (folds * cells)
        compute = mapping * streamed / counted
    match array.dataflow:
        case "os":
            ifmap, weights = through_rows, through_columns
            ofmap = batch * (area + folds * (array.rows + array.columns))
        case "ws":
            ifmap, weights, ofmap = through_rows, batch * area, through_columns
        case "is":
            ifmap, weights, ofmap = batch * area, through_rows, through_columns
    return FoldCounts(
        cycles=cycles,
        folds=batch * folds,
        overall_pct=overall,
        mapping_pct=mapping,
        compute_pct=compute,
        ifmap_reads=ifmap,
        filter_reads=weights,
        ofmap_writes=ofmap,
    )
