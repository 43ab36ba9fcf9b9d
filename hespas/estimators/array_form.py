"""The form of products on systolic arrays: passes over them, and operands in the layout of a TPU.

An array keeps a block of one operand (or of the result) and streams the others by. What does not fill the
block is computed all the same, and every pass takes as long as the array is deep to fill and to drain; both
are counted as SCALE-Sim counts them (:mod:`hespas.estimators.systolic.cycles`), at the peak of all arrays.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from hespas.estimators.form_parts import Columns, Form, Machine, Parameter, Values
from hespas.graph.columns import FloatArray
from hespas.operations import Operations
from hespas.operations.tiles import SUBLANES, elements_in_tiles, padded

__all__ = ["ARRAYS"]


def _passes_flops(ops: Operations, machine: Machine) -> FloatArray:
    """What an array computes in whole passes, filling and draining included [FLOPs]: of the operands that the
    dataflow may keep in it, the one that takes least.
    """
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    array = machine.array
    if array is None:
        return np.full(len(ops), np.nan)
    fill = array.rows + array.columns - 2
    # Along the rows of the array, along its columns, streamed by.
    ways = [(m, n, k)]
    if array.dataflow != "os":
        ways = [(k, n, m), (k, m, n)]
        fill += array.rows  # what is kept must be loaded first
    tile = SUBLANES if machine.tiles else 1.0
    steps = [
        padded(rows, array.rows) * padded(columns, array.columns) * (padded(streamed, tile) + fill)
        for rows, columns, streamed in ways
    ]
    return 2 * batch * reduce(np.minimum, steps)


def _columns(ops: Operations, machine: Machine) -> Columns:
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))

    def elements(rows: FloatArray, columns: FloatArray) -> FloatArray:
        return batch * (elements_in_tiles(rows, columns) if machine.tiles else rows * columns)

    lhs = elements(m, k) * machine.activation_bytes
    # A convolution reads its input once, not every window of it: what its product reads beyond is not moved.
    others = batch * (n * k * machine.weight_bytes + m * n * machine.output_bytes)
    is_convolution = np.array([name == "convolution" for name in ops.kind.names])[ops.kind.row]
    lhs = np.where(is_convolution, np.fmin(np.maximum(ops.bytes_moved - others, 0.0), lhs), lhs)
    rhs = elements(k, n) * machine.weight_bytes
    result = elements(m, n) * machine.output_bytes
    return {
        "passes_ns": _passes_flops(ops, machine) / machine.flops_per_ns,
        "load_ns": (lhs + rhs) / machine.bytes_per_ns,
        "store_ns": result / machine.bytes_per_ns,
    }


def _time_ns(values: Values, columns: Columns) -> FloatArray:
    passes = columns["passes_ns"] / values["compute"]
    loads = columns["load_ns"] / values["memory"]
    pipelined = values["pipeline_ns"] + np.maximum(passes, loads)
    work = np.minimum(passes + loads, pipelined)
    return values["t0_ns"] + work + columns["store_ns"] / values["store"]


ARRAYS = Form(
    name="arrays",
    parameters=(
        Parameter(name="t0_ns", start=3000.0, low=50.0, high=1e6),
        Parameter(name="compute", start=0.7, low=0.02, high=1.0, width=0.5),
        Parameter(name="memory", start=0.75, low=0.02, high=1.0, width=0.3),
        Parameter(name="store", start=0.75, low=0.02, high=1.0, width=0.3),
        Parameter(name="pipeline_ns", start=5000.0, low=50.0, high=1e6),
    ),
    dims=("batch", "m", "n", "k"),
    columns=_columns,
    time_ns=_time_ns,
)
"""Products of devices whose matrix units are systolic arrays. ``compute``: the share of the peak that passes
reach; ``memory``, ``store``: shares of the bandwidth at which operands come and the result goes. Operands are
loaded whole before the first pass, or, after ``pipeline_ns`` more, beside the passes: whichever is faster.
"""
