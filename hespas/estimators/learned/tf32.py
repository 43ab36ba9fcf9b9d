"""Products of float32 that run on TF32 units, where no model speaks of them: as bf16's of twice the depth.

An instruction of a tensor core multiplies matrices of as many *bytes* in either format: half as deep ones of
TF32 in as many cycles. So what is read, multiplied and waited for is that of a bf16 product with 2 k; what is
written is twice as wide.

Source: PTX ISA, ``mma.sync.m16n8k8`` (tf32) and ``m16n8k16`` (bf16),
https://docs.nvidia.com/cuda/parallel-thread-execution; peaks of both in the data sheets, 1 : 2.
"""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import numpy as np

from hespas.estimators.rates import rate_flops_per_s
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device
from hespas.operations import Labels, Operations, build, element_bytes

__all__ = ["as_deeper_products", "runs_on_tf32", "wider_output_ns"]

_KIND, _SCHEME, _HALF = "matmul", "f32", "bf16"


def runs_on_tf32(ops: Operations, device: Device) -> IntArray:
    """The rows of products that name no library and that the device's TF32 units run at half the rate of
    bf16.
    """
    units = {peak.dtype for peak in device.peaks if peak.unit == "matrix"}
    if not {"tf32", _HALF} <= units:
        return np.zeros(0, np.int64)
    rates = [rate_flops_per_s(device, name, matrix=True) for name in (_SCHEME, _HALF)]
    if not isclose(2 * rates[0], rates[1], rel_tol=0.01):
        return np.zeros(0, np.int64)
    rows = ops.kind.where(_KIND)
    rows = rows[np.isin(rows, ops.scheme.where(_SCHEME))]
    return rows[np.isin(rows, ops.variant.where(""))]


def as_deeper_products(ops: Operations) -> Operations:
    """The bf16 products that take as long, but for what they write; none moves more than it is said to."""
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    products = build.matmuls(Labels.constant(_HALF, len(ops)), batch=batch, m=m, n=n, k=2 * k)
    return replace(products, bytes_moved=np.fmin(products.bytes_moved, ops.bytes_moved))


def wider_output_ns(ops: Operations, device: Device) -> FloatArray:
    """What writing float32 takes longer than writing bf16, at the memory's peak [ns], shape ``(ops,)``."""
    written = ops.dim("batch") * ops.dim("m") * ops.dim("n")
    wide, narrow = (element_bytes(Labels.constant(name, len(ops)), "output") for name in (_SCHEME, _HALF))
    return written * (wide - narrow) / device.main_memory.bandwidth_bytes_per_s * 1e9
