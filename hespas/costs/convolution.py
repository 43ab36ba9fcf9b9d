"""Costs of convolutions of any rank and layout, by dimension numbers.

Two figures: by the specification (every kernel position multiplies), and useful (positions that fall on
padding or on the holes of a dilated input left out). A position is separable, so each spatial dimension is
counted alone: output ``o`` and kernel position ``k`` meet the input at ``p = o * stride + k * rhs_dilation
- pad_low``, which is real where ``0 <= p <= (extent - 1) * lhs_dilation`` and ``p`` is a multiple of
``lhs_dilation``.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, nan, prod

import numpy as np

from hespas.costs.contraction import contraction_cost
from hespas.costs.cost import Cost, unknown_cost
from hespas.costs.facts import ConvFacts, Operation, Tensor, WindowDim
from hespas.graph import DYNAMIC, OpClass

__all__ = ["convolution", "convolution_cost", "valid_positions"]

_MAX_POSITIONS = 1 << 22
"""Counting is vectorised over the shorter of output and kernel; longer ones are not worth the memory."""


@lru_cache(maxsize=4096)
def valid_positions(extent: int, output: int, dim: WindowDim) -> float:
    """Pairs (output position, window position) of one dimension that meet a stored input element.

    O(min(output, window)); NaN where an extent is unknown or both are beyond four million.
    """
    if min(extent, output, dim.size) < 0 or min(output, dim.size) > _MAX_POSITIONS:
        return nan
    if min(extent, output, dim.size) == 0:
        return 0.0
    if dim.size <= output:
        listed, step, run, run_step = dim.size, dim.rhs_dilation, output, dim.stride
    else:
        listed, step, run, run_step = output, dim.stride, dim.size, dim.rhs_dilation
    base = np.arange(listed, dtype=np.int64) * step - dim.pad_low
    return float(_hits(base, run, run_step, (extent - 1) * dim.lhs_dilation, dim.lhs_dilation).sum())


def _hits(
    base: np.typing.NDArray[np.int64], run: int, step: int, last: int, modulus: int
) -> np.typing.NDArray[np.int64]:
    """For each base, how many x in [0, run) put ``base + x * step`` in [0, last] on a multiple of
    ``modulus``.
    """
    step = max(step, 1)
    low = np.maximum(-(base // step), 0)
    high = np.minimum((last - base) // step, run - 1)
    common = gcd(step, modulus)
    period = modulus // common
    if period == 1:
        count = np.maximum(high - low + 1, 0)
    else:
        inverse = pow(step // common, -1, period)
        first = (-base // common) % period * inverse % period
        start = low + (first - low) % period
        count = np.maximum((high - start) // period + 1, 0)
    return np.where(base % common == 0, count, 0)


def convolution(op: Operation) -> Cost:
    """Cost of ``convolution``; unknown without dimension numbers."""
    if not isinstance(op.facts, ConvFacts) or len(op.operands) < 2:
        return unknown_cost(op, OpClass.CONVOLUTION)
    return convolution_cost(op, op.facts, op.operands[0], op.operands[1], op.results[0])


def convolution_cost(op: Operation, facts: ConvFacts, source: Tensor, kernel: Tensor, output: Tensor) -> Cost:
    """Cost of the convolution ``source * kernel -> output`` as an implicit matrix product.

    M is output positions, N output features per group, K input features per group times kernel positions.
    The traffic is that of ``op``, whose operands may stand in another order (gradients).
    """
    sizes = [kernel.shape[dim] for dim in facts.kernel_spatial]
    outputs = [output.shape[dim] for dim in facts.output_spatial]
    inputs = [source.shape[dim] for dim in facts.input_spatial]
    groups = facts.feature_groups * facts.batch_groups
    features = output.shape[facts.output_feature]
    per_group = kernel.shape[facts.kernel_in]
    m = _product([output.shape[facts.output_batch], *outputs])
    n = features // groups if features >= 0 and groups > 0 else DYNAMIC
    k = _product([per_group, *sizes])
    pairs = [
        valid_positions(extent, out, dim)
        for extent, out, dim in zip(inputs, outputs, facts.window, strict=True)
    ]
    channels = _product([output.shape[facts.output_batch], features, per_group])
    useful = channels * prod(pairs) if channels >= 0 else nan
    return contraction_cost(
        op,
        OpClass.CONVOLUTION,
        (groups, m, n, k),
        facts.precision,
        macs=m * k * float(features) if min(m, k, features) >= 0 else nan,
        useful_macs=useful,
        types=(source, kernel, output),
    )


def _product(extents: list[int]) -> int:
    """The product of extents, -1 where one is unknown."""
    return DYNAMIC if min(extents, default=1) < 0 else prod(extents)
