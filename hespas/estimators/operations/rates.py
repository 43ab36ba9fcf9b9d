"""What published peaks say of operations: time of the arithmetic and of the memory traffic [ns]."""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np

from hespas.estimators.operations.model import Operations
from hespas.estimators.operations.schemes import find_scheme
from hespas.graph.columns import FloatArray
from hespas.graph.errors import UnsupportedError
from hespas.hardware import Device, peak_for
from hespas.hardware.model import Unit

__all__ = ["MATRIX_KINDS", "PeakTimes", "peak_times", "rate_flops_per_s"]

MATRIX_KINDS = frozenset(
    {"matmul", "convolution", "attention.context", "attention.generation", "attention.encoder", "moe"}
)
"""Kinds whose arithmetic is products of matrices."""


@dataclass(frozen=True, slots=True, eq=False)
class PeakTimes:
    """Columns of shape ``(ops,)`` [ns]; NaN where a cost or a peak is unknown."""

    arithmetic_ns: FloatArray
    memory_ns: FloatArray

    @property
    def roofline_ns(self) -> FloatArray:
        """The longer of the two, without any overhead; what is known where only one is."""
        return np.fmax(self.arithmetic_ns, self.memory_ns)


def rate_flops_per_s(device: Device, scheme: str, *, matrix: bool) -> float:
    """The peak that operations of a scheme run at; NaN where the device lists none."""
    found = find_scheme(scheme)
    if found is None:
        return nan
    try:
        unit: Unit = "matrix" if matrix else "vector"
        return peak_for(device, unit, found.rate_dtype, products=found.products).flops_per_s
    except UnsupportedError:
        return nan


def peak_times(ops: Operations, device: Device, *, transcendental_weight: float = 8.0) -> PeakTimes:
    """FLOPs over the peak of the scheme, bytes over the main memory's bandwidth. O(ops)."""
    matrix = np.array([name in MATRIX_KINDS for name in ops.kind.names], np.bool_)[ops.kind.row]
    rates = np.array(
        [
            [rate_flops_per_s(device, scheme, matrix=unit) for scheme in ops.scheme.names]
            for unit in (False, True)
        ]
    ).reshape(2, len(ops.scheme.names))
    flops = ops.flops + transcendental_weight * np.nan_to_num(ops.transcendentals)
    with np.errstate(invalid="ignore"):
        arithmetic = np.where(flops == 0, 0.0, flops / rates[matrix.astype(np.int64), ops.scheme.row] * 1e9)
    memory = ops.bytes_moved / device.main_memory.bandwidth_bytes_per_s * 1e9
    return PeakTimes(arithmetic, memory)
