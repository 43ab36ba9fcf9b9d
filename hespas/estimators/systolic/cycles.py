"""Cycles, utilisation and buffer accesses of products on a systolic array, as SCALE-Sim v3 counts them.

A product of an (M, K) input by a (K, N) filter on ``rows`` x ``columns`` cells is cut into folds that run one
after another. The counts equal the output of scalesim 3.0.0 for runs that do not wait for memory (a word is
one byte there; the element type plays no part). The functions are vectorised: a million shapes take about a
tenth of a second.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hespas.graph.columns import FloatArray
from hespas.graph.errors import UsageError
from hespas.hardware import Device

__all__ = [
    "Array",
    "Backing",
    "Dataflow",
    "FoldCounts",
    "array_of",
    "fold_counts",
    "fold_cycles",
    "parse_array",
    "parse_dataflow",
    "shared_cycles",
    "stall_cycles",
]

Dataflow = Literal["os", "ws", "is"]
"""Operand that stays in the cells while the others stream through: outputs, weights (the filter)
or inputs.
"""

_SHAPE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Array:
    """Systolic array of ``rows`` x ``columns`` multiply-accumulate cells, with its dataflow."""

    rows: int
    columns: int
    dataflow: Dataflow

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} {self.dataflow}"


def array_of(device: Device, shape: str = "", dataflow: str = "") -> Array | None:
    """Return the systolic array to simulate. ``shape`` and ``dataflow`` replace the values of the device if
    they are not empty. None if neither options nor device describe an array. Raises ``UsageError`` for
    invalid options.
    """
    own = device.systolic
    if own is None and not shape:
        return None
    rows, columns = parse_array(shape) if shape or own is None else (own.rows, own.columns)
    return Array(rows, columns, parse_dataflow(dataflow or ("ws" if own is None else own.dataflow)))


def parse_array(text: str) -> tuple[int, int]:
    """Parse rows and columns of an array, ``RxC``. Raises ``UsageError``."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"systolic: '{text}' is not the shape of an array", hint="write rows x columns, as in 128x128"
        )
    return int(match[1]), int(match[2])


def parse_dataflow(text: str) -> Dataflow:
    """Parse a dataflow: ``os``, ``ws`` or ``is``. Raises ``UsageError``."""
    match text.lower():
        case "os":
            return "os"
        case "ws":
            return "ws"
        case "is":
            return "is"
        case _:
            raise UsageError(
                f"systolic: '{text}' is not a dataflow",
                hint="use os, ws or is: outputs, weights or inputs stay in the array",
            )


_BLOCK = 1 << 14
"""Shapes processed at a time, so that their columns fit the processor's cache."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FoldCounts:
    """Counts for each matmul on a systolic array, as columns of shape ``(products,)``; NaN if a size is
    unknown. A fold is one pass of data through the array.

    ``cycles`` is the total as SCALE-Sim prints it: the index of the last cycle, without stalls.
    ``overall_pct`` is the percentage of all multiply-accumulates that the array could do. ``mapping_pct`` is
    the percentage of cells that hold an operand. ``compute_pct`` is the utilisation that SCALE-Sim prints; it
    counts the skewed stationary operand twice. Reads and writes are words between the array and its buffers.
    ``ofmap_writes`` of an output-stationary array include (rows + columns) additional writes per fold, as in
    SCALE-Sim.
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
    """Matmul mapped to a systolic array: the size along its rows, the size along its columns, the size that
    is streamed through it, and the number and cycles of the resulting folds.
    """

    rows: FloatArray
    columns: FloatArray
    streamed: FloatArray
    row_folds: FloatArray
    column_folds: FloatArray
    fold_cycles: FloatArray


def fold_cycles(m: FloatArray, n: FloatArray, k: FloatArray, array: Array) -> FloatArray:
    """Return only the cycles of products on an array: column ``cycles`` of :class:`FoldCounts`."""
    mapped = _mapped(m, n, k, array)
    return _last_cycle(mapped.row_folds * mapped.column_folds * mapped.fold_cycles)


def fold_counts(
    m: FloatArray, n: FloatArray, k: FloatArray, array: Array, *, batch: FloatArray | None = None
) -> FoldCounts:
    """Return the counts of matmuls (m, k) by (k, n) on a systolic array, as columns.

    ``batch`` matmuls of each size run one after another, as SCALE-Sim runs layers. They multiply the number
    of folds and are not merged into ``m``.
    """
    times = np.ones_like(m) if batch is None else batch
    shapes = [column.shape for column in (m, n, k, times)]
    if len(set(shapes)) > 1:
        listed = ", ".join(map(str, shapes))
        raise UsageError(
            f"m, n, k and batch have different shapes: {listed}", hint="give one value of each per matmul"
        )
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
    """Return the index of the last of ``total`` cycles, which start at 0; 0 for an empty product."""
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


def shared_cycles(
    m: FloatArray,
    n: FloatArray,
    k: FloatArray,
    array: Array,
    *,
    arrays: int = 1,
    batch: FloatArray | None = None,
) -> FloatArray:
    """Return the cycles of each matmul if it is divided over ``arrays`` equal arrays in the fastest way. The
    array that takes longest determines the result.

    Each array takes a share of the batch, of M or of N, and all run at once. K is not divided, because
    partial sums would have to be added across arrays. A TPU that joins two cores (megacore) has the arrays of
    both.
    """
    times = np.ones_like(m) if batch is None else batch
    best = np.full(m.shape, np.nan)
    divisors = [share for share in range(1, arrays + 1) if arrays % share == 0]
    shares = [(batches, rows) for batches in divisors for rows in divisors if arrays % (batches * rows) == 0]
    for over_batch, over_m in shares:
        over_n = arrays // (over_batch * over_m)
        one = fold_cycles(np.ceil(m / over_m), np.ceil(n / over_n), k, array) + 1
        best = np.fmin(best, np.ceil(times / over_batch) * one - 1)
    empty = (m == 0) | (n == 0) | (k == 0) | (times == 0)
    return np.where(empty, 0.0, best)


@dataclass(frozen=True, slots=True)
class Backing:
    """Memory from which the operand buffers of a systolic array are filled. ``words_per_cycle`` is its rate,
    ``buffer_words`` the size of each operand buffer.
    """

    words_per_cycle: float
    buffer_words: float


def stall_cycles(m: FloatArray, n: FloatArray, k: FloatArray, array: Array, backing: Backing) -> FloatArray:
    """Return the approximate cycles for which each matmul waits for memory: at least 0, NaN if a size is
    unknown.

    An operand that fits its buffer is fetched once, any other operand each time the array reads it. The stall
    is the longer fetch time of the two operands, less the computation. Writes are assumed to overlap.
    SCALE-Sim prefetches in the order of its traces, so its stalls differ. For three quarters of 69 runs of
    scalesim 3.0.0, this model decides correctly if the run stalls. For the runs with stalls, the median total
    is a third of SCALE-Sim's (far less for buffers of a few rows).
    """
    counts = fold_counts(m, n, k, array)
    buffer = backing.buffer_words
    fetched = np.maximum(
        np.where(m * k <= buffer, m * k, counts.ifmap_reads),
        np.where(k * n <= buffer, k * n, counts.filter_reads),
    )
    return np.maximum(fetched / backing.words_per_cycle - counts.cycles, 0.0)
