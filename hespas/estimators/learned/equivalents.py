"""Operations that no learned model covers, rewritten as covered operations that take about the same time.

Products of float32 on TF32 units become products of bf16 with twice the depth: a tensor core instruction
multiplies matrices of as many *bytes* in either format, of half the depth in TF32, in as many cycles. So the
bytes read and the cycles equal a bf16 product's with 2 k; the bytes written are twice as many.

Source: PTX ISA, ``mma.sync.m16n8k8`` (tf32) and ``m16n8k16`` (bf16),
https://docs.nvidia.com/cuda/parallel-thread-execution; peaks of both in the data sheets, 1 : 2.

Convolutions in number formats without measurements become the products that libraries make of them. Implicit
products have the tiles and waves of a product with as many rows (images and positions), columns (output
channels) and depth (window and input channels). They read their input once, not every window of it, so the
product has the traffic of the convolution. On the convolutions in f32 of ``neusight_conv.parquet`` (split
``calib``) the median of measured over such an estimate is 1.00 on the A100, 0.94 on the P100 and 0.74 on the
T4, whose library saves multiplications for most of them; 90 % lie within a factor of e on the A100, from
which :data:`CONVOLUTION_WIDENING` follows. Implicit products step over the window and, for each of its
positions, over blocks of channels. The last block is computed in full: a convolution of 3 channels takes
as long as one of a whole block.

Source: Chetlur et al., "cuDNN: Efficient Primitives for Deep Learning", arXiv:1410.0759.

Matrix units load vectors of channels. If the channels of the images are not next to each other (NCHW), the
libraries of both vendors copy images to that order before the product, and results back after it
(``nchwToNhwcKernel`` of cuDNN, ``batched_transpose`` of MIOpen).

Source: NVIDIA, "Convolutional Layers User's Guide", tensor layouts in memory: NCHW vs NHWC.

Layers of experts with activations and weights of 4 bits, which no table has, become layers of 8 bits. Their
time beyond the roofline (routing, quantising, tiles of few tokens) is that of 8 bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose

import numpy as np

from hespas.estimators.rates import peak_times, rate_flops_per_s
from hespas.graph.columns import FloatArray, IntArray
from hespas.hardware import Device
from hespas.operations import CHANNELS, REORDERED, Labels, Operations, build, element_bytes

__all__ = [
    "CONVOLUTION_WIDENING",
    "EXPERTS_WIDENING",
    "as_8_bit_experts",
    "as_deeper_products",
    "as_products",
    "of_4_bit_experts",
    "reordering_ns",
    "roof_beyond_8_bits_ns",
    "runs_on_tf32",
    "wider_output_ns",
    "without_library",
]

_KIND, _SCHEME, _HALF = "matmul", "f32", "bf16"

_BLOCK_BYTES = {"NVIDIA": 64.0, "AMD": 16.0}
"""Bytes of input channels per step of the depth, by vendor (others: no blocks): 32 channels of 16 bits in
cuDNN's kernels (``fprop_optimized_bf16_256x64_32x4_nhwc_align8``), 8 in MIOpen's
(``igemm_fwd_gtcx3_nhwc_bf16_bt256x64x8``).
"""
_REORDERED_BITS = 16.0
"""Bits of the element types whose products always run on matrix units."""
_REORDERING_SHARE = 0.5
"""Share of the bandwidth of a transposing copy: tiles of it are read along one order and written along the
other, one of them in short runs. Recorded copies reach 0.53 on an H100 and 0.45 on an MI300X.
"""
_OLD_KERNELS: Mapping[str, float] = {"sm_90": 0.629}
"""Share of the peak that instructions of the previous architecture (``mma.sync``) reach, by architecture.
Convolutions whose channels do not fill blocks have only kernels with these.

Source: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking",
arXiv:2402.13499.
"""
CONVOLUTION_WIDENING = 1.0
"""Widening of the interval of a convolution that is estimated as a product, on both sides [log time]."""

_EXPERTS_OF_4_BITS, _EXPERTS_OF_8_BITS = "a4w4_mxfp4", "a8w8_fp8"
EXPERTS_WIDENING = 0.5
"""Widening of the interval of experts of 4 bits that are estimated by experts of 8 bits, on both sides [log
time]. No row tests it.
"""


def runs_on_tf32(ops: Operations, device: Device) -> IntArray:
    """Return the rows of f32 matmuls that run on TF32 units: matmuls that name no library, on devices whose
    TF32 rate is half the bf16 rate.
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
    """Return bf16 matmuls that take as long as the given f32 matmuls, so that learned models of bf16 can
    predict them. Their depth k is twice as large, because TF32 units have half the bf16 rate. Only the time
    to write the result differs. They move no more bytes than ``ops``.
    """
    batch, m, n, k = (ops.dim(name) for name in ("batch", "m", "n", "k"))
    products = build.matmuls(Labels.constant(_HALF, len(ops)), batch=batch, m=m, n=n, k=2 * k)
    return replace(products, bytes_moved=np.fmin(products.bytes_moved, ops.bytes_moved))


def wider_output_ns(ops: Operations, device: Device) -> FloatArray:
    """Return the extra time to write f32 results in place of bf16 results at the peak memory bandwidth [ns],
    shape ``(ops,)``.
    """
    written = ops.dim("batch") * ops.dim("m") * ops.dim("n")
    wide, narrow = (element_bytes(Labels.constant(name, len(ops)), "output") for name in (_SCHEME, _HALF))
    return written * (wide - narrow) / device.main_memory.bandwidth_bytes_per_s * 1e9


def without_library(ops: Operations) -> IntArray:
    """Return the rows of convolutions that name no library."""
    return np.intersect1d(ops.kind.where("convolution"), ops.variant.where(""))


def as_products(ops: Operations, device: Device) -> Operations:
    """Return convolutions as matrix products with the traffic of the convolutions. The depth of a product is
    that of all blocks of channels, over which the kernels of the device's vendor step, or deeper by the
    lower rate of old kernels.
    """
    block_bytes = _BLOCK_BYTES.get(device.vendor, 0.0)
    blocks = np.maximum(block_bytes / element_bytes(ops.scheme, "weight"), 1.0)
    channels = ops.dim(CHANNELS)
    with np.errstate(divide="ignore", invalid="ignore"):
        filled = np.ceil(channels / blocks) * blocks / channels
    filled = np.where(filled > 1.0, filled / _OLD_KERNELS.get(device.arch, 1.0), 1.0)
    depth = ops.dim("k") * filled
    return replace(ops, kind=Labels.constant("matmul", len(ops)), dims={**ops.dims, "k": depth})


def reordering_ns(ops: Operations, device: Device) -> FloatArray:
    """Return the time to copy the images of convolutions of 16 bits to contiguous channels, and their results
    back [ns], shape ``(ops,)``: 0 for other number formats and for vendors without such kernels.
    """
    bits = 8 * element_bytes(ops.scheme, "activation")
    copied = np.where(bits == _REORDERED_BITS, np.nan_to_num(ops.dim(REORDERED)), 0.0)
    if device.vendor not in _BLOCK_BYTES:
        copied[:] = 0.0
    return 2 * copied / (_REORDERING_SHARE * device.main_memory.bandwidth_bytes_per_s) * 1e9


def of_4_bit_experts(ops: Operations) -> IntArray:
    """Return the rows of experts with activations and weights of 4 bits in blocks with one scale."""
    return np.intersect1d(ops.kind.where("moe"), ops.scheme.where(_EXPERTS_OF_4_BITS))


def as_8_bit_experts(ops: Operations) -> Operations:
    """Return the same layers of experts with activations and weights of 8 bits, in any library."""
    return build.mixtures_of_experts(
        Labels.constant(_EXPERTS_OF_8_BITS, len(ops)),
        op=ops.op,
        tokens=ops.dim("tokens"),
        hidden=ops.dim("hidden"),
        inter=ops.dim("inter"),
        topk=ops.dim("topk"),
        experts=ops.dim("experts"),
        tensor_parallel=ops.dim("tensor_parallel"),
        expert_parallel=ops.dim("expert_parallel"),
        matrices=ops.dim("matrices"),
    )


def roof_beyond_8_bits_ns(ops: Operations, of_8_bits: Operations, device: Device) -> FloatArray:
    """Return the data-sheet time [ns] of experts of 4 bits less the time of the same experts of 8 bits, shape
    ``(ops,)``. The two are assumed to differ by this time. O(ops).
    """
    own, wider = (peak_times(each, device) for each in (ops, of_8_bits))
    return np.fmax(own.arithmetic_ns, own.memory_ns) - np.fmax(wider.arithmetic_ns, wider.memory_ns)
