"""Costs of matrix products (``dot_general``, ``dot``, ``einsum``, ``ragged_dot``) and convolutions.

The operand types determine the rate, not the accumulator type: bf16 x bf16 -> f32 runs at the bf16 rate. An
explicit ``algorithm`` outranks ``precision_config``, which outranks the element types.

Quantised operands follow the StableHLO specification. With both quantised, the stored integers are multiplied
into a 32-bit accumulator, and a narrower quantised result is rescaled (two FLOPs an element). With only the
right-hand side quantised (hybrid), its elements are first converted to floats (two FLOPs each). These FLOPs
are added to the FLOPs of the product. Zero points cost nothing, because compilers fold them into the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import gcd, isfinite, nan, prod

import numpy as np

from hespas.costs.operation import (
    Contraction,
    ConvAttributes,
    Cost,
    DotAttributes,
    EinsumAttributes,
    Operation,
    Precision,
    RaggedDotAttributes,
    Tensor,
    WindowDim,
    is_complex,
    unknown_cost,
)
from hespas.graph import ACCUMULATOR_BITS, DYNAMIC, MAC_NOISE_SIGMA, DType, DTypeKind, OpClass, dtype

__all__ = [
    "config_precision",
    "contraction_cost",
    "convolution",
    "convolution_cost",
    "dot",
    "einsum",
    "named_algorithm",
    "ragged_dot",
    "valid_positions",
    "with_macs",
]

_COMPLEX_PRODUCTS = 4
_RESCALE_FLOPS = 2.0
"""FLOPs per element to multiply by the scale and add the zero point."""
_QUANTIZED_ACCUMULATOR_BITS = 32
"""Default width of the accumulator of quantised products."""
_LEVEL_PRODUCTS = {"HIGH": 3, "HIGHEST": 6}


def config_precision(levels: tuple[str, ...]) -> Precision:
    """Return the precision that a ``precision_config`` states: the most exact of its levels."""
    ranked = [level.upper() for level in levels]
    best = max(ranked, key=lambda level: _LEVEL_PRODUCTS.get(level, 1), default="DEFAULT")
    return Precision(level=best)


def named_algorithm(name: str) -> Precision:
    """Return the precision that an HLO algorithm name states, such as ``dot_bf16_bf16_f32_x3`` or
    ``dot_tf32_tf32_f32``.

    A name without types (``dot_any_f8_any_f8_f32``) uses the element types.
    """
    parts = name.removeprefix("dot_").split("_")
    products = 1
    if parts[-1].startswith("x") and parts[-1][1:].isdigit():
        products = int(parts.pop()[1:])
    if len(parts) != 3:
        return Precision(products=products, level="ALGORITHM")
    try:
        lhs, rhs, accumulator = (dtype(part) for part in parts)
    except KeyError:
        return Precision(products=products, level="ALGORITHM")
    return Precision(lhs, rhs, accumulator, products, "ALGORITHM")


def _products(precision: Precision, lhs: Tensor, rhs: Tensor) -> int:
    """Return the number of hardware products per multiplication. It is above 1 if a precision is emulated
    with narrower types.
    """
    if precision.level == "ALGORITHM":
        return precision.products
    emulated = all(tensor.dtype is not None and tensor.dtype.name == "f32" for tensor in (lhs, rhs))
    return _LEVEL_PRODUCTS.get(precision.level, 1) if emulated else 1


def contraction_cost(
    op: Operation,
    op_class: OpClass,
    extents: tuple[int, int, int, int],
    precision: Precision,
    *,
    macs: float,
    useful_macs: float,
    types: tuple[Tensor, Tensor, Tensor],
) -> Cost:
    """Return the cost of ``macs`` multiply-adds over ``extents`` (batch, M, N, K); all figures are known or
    NaN.
    """
    lhs, rhs, result = types
    rescaling = _rescaling_flops(types)
    factor = 2.0 * (_COMPLEX_PRODUCTS if is_complex(result) else 1)
    lhs_type, rhs_type = precision.lhs or lhs.dtype, precision.rhs or rhs.dtype
    rate = -1
    if lhs_type is not None and rhs_type is not None:  # the wider type sets the rate
        rate = (lhs_type if lhs_type.bits >= rhs_type.bits else rhs_type).code
    accumulator = precision.accumulator or _accumulator(types, precision.accumulator_bits)
    contraction = Contraction(
        *extents,
        flops=factor * macs,
        useful_flops=factor * useful_macs,
        lhs=-1 if lhs_type is None else lhs_type.code,
        rhs=-1 if rhs_type is None else rhs_type.code,
        accumulator=-1 if accumulator is None else accumulator.code,
        products=_products(precision, lhs, rhs),
        accumulator_bits=precision.accumulator_bits,
        mac_noise_sigma=precision.mac_noise_sigma,
    )
    return Cost(
        op_class,
        contraction.flops + rescaling,
        contraction.useful_flops + rescaling,
        0.0,
        op.read_bytes,
        op.written_bytes,
        rate,
        (contraction,),
    )


def _is_integer(tensor: Tensor) -> bool:
    return tensor.dtype is not None and tensor.dtype.kind in (DTypeKind.SIGNED, DTypeKind.UNSIGNED)


def _accumulator(types: tuple[Tensor, Tensor, Tensor], bits: int) -> DType | None:
    """Return the accumulator type: the smallest type with at least ``bits`` bits. If ``bits`` is -1, return
    the type of the result, but at least 32 bits for quantised operands.
    """
    lhs, rhs, result = types
    integer = _is_integer(lhs) and _is_integer(rhs)
    if bits >= 0:
        names = ("i8", "i16", "i32", "i64") if integer else ("f16", "f32", "f64")
        return next((entry for entry in map(dtype, names) if entry.bits >= bits), dtype(names[-1]))
    if (
        lhs.expressed is None
        or rhs.expressed is None
        or result.dtype is None
        or result.dtype.bits >= _QUANTIZED_ACCUMULATOR_BITS
    ):
        return result.dtype
    return dtype("i32" if integer else "f32")


def _rescaling_flops(types: tuple[Tensor, Tensor, Tensor]) -> float:
    """Return the FLOPs of converting quantised values to floats, or results back to quantised values."""
    lhs, rhs, result = types
    if rhs.expressed is None:
        return 0.0
    if lhs.expressed is None:
        return _RESCALE_FLOPS * rhs.elements
    is_narrow = result.dtype is not None and result.dtype.bits < _QUANTIZED_ACCUMULATOR_BITS
    return _RESCALE_FLOPS * result.elements if result.expressed is not None and is_narrow else 0.0


def _matrix_extents(lhs: Tensor, rhs: Tensor, attributes: DotAttributes) -> tuple[int, int, int, int]:
    """Return the extents batch, M, N and K of a matmul; -1 for an unknown extent."""
    lhs_fixed = {*attributes.lhs_batch, *attributes.lhs_contracting}
    rhs_fixed = {*attributes.rhs_batch, *attributes.rhs_contracting}
    parts = (
        [
            _known_extent(lhs.shape[i], rhs.shape[j])
            for i, j in zip(attributes.lhs_batch, attributes.rhs_batch, strict=True)
        ],
        [extent for dim, extent in enumerate(lhs.shape) if dim not in lhs_fixed],
        [extent for dim, extent in enumerate(rhs.shape) if dim not in rhs_fixed],
        [
            _known_extent(lhs.shape[i], rhs.shape[j])
            for i, j in zip(attributes.lhs_contracting, attributes.rhs_contracting, strict=True)
        ],
    )
    batch, m, n, k = map(_product, parts)
    return batch, m, n, k


def _is_product(lhs: Tensor, rhs: Tensor, attributes: DotAttributes) -> bool:
    """Return True if the dimension numbers fit the operands. Parsers do not check dimension numbers of
    library calls.
    """
    of_lhs, of_rhs = (
        (*attributes.lhs_batch, *attributes.lhs_contracting),
        (*attributes.rhs_batch, *attributes.rhs_contracting),
    )
    return (
        len(attributes.lhs_batch) == len(attributes.rhs_batch)
        and all(
            len(set(dims)) == len(dims) and all(0 <= dim < len(tensor.shape) for dim in dims)
            for dims, tensor in ((of_lhs, lhs), (of_rhs, rhs))
        )
        and len(of_lhs) == len(of_rhs)
    )


def _known_extent(left: int, right: int) -> int:
    """Return the extent of a dimension that both operands of a matmul have. It may be unknown (-1) in one of
    them.
    """
    return left if left >= 0 else right


def dot(op: Operation) -> Cost:
    """Return the cost of a matmul: 2 x batch x M x N x K FLOPs. By default the last dimension of lhs and the
    first of rhs are contracted.
    """
    lhs, rhs = op.operands[0], op.operands[1]
    attributes = op.attributes
    if attributes is None and lhs.shape and rhs.shape:
        attributes = DotAttributes((), (), (len(lhs.shape) - 1,), (0,))
    if not isinstance(attributes, DotAttributes) or not op.results or not _is_product(lhs, rhs, attributes):
        return unknown_cost(op, OpClass.CONTRACTION)
    return _matmul(op, _matrix_extents(lhs, rhs, attributes), attributes.precision)


def _matmul(op: Operation, extents: tuple[int, int, int, int], precision: Precision) -> Cost:
    """Return the cost of the matmul of the first two operands. Without padding, all FLOPs are useful."""
    macs = float(prod(extents)) if min(extents) >= 0 else nan
    types = (op.operands[0], op.operands[1], op.results[0])
    return contraction_cost(
        op, OpClass.CONTRACTION, extents, precision, macs=macs, useful_macs=macs, types=types
    )


def ragged_dot(op: Operation) -> Cost:
    """Return the cost of a grouped matmul, in which the ragged dimension of lhs is divided into groups.

    If the ragged dimension is among the rows of lhs (mixture of experts), each group of rows is multiplied
    with its own matrix of rhs. The group dimension of rhs then adds traffic but no FLOPs. If the ragged
    dimension is contracted, the partial matmuls of all groups together have the FLOPs of one matmul.
    """
    attributes = op.attributes
    if not isinstance(attributes, RaggedDotAttributes):
        return unknown_cost(op, OpClass.CONTRACTION)
    batch, m, n, k = _matrix_extents(op.operands[0], op.operands[1], attributes.dot)
    grouped_rhs = attributes.ragged_lhs not in {*attributes.dot.lhs_batch, *attributes.dot.lhs_contracting}
    groups = op.operands[2].shape[-1] if len(op.operands) > 2 and op.operands[2].shape else DYNAMIC
    if grouped_rhs:
        n = n // groups if n >= 0 and groups > 0 else DYNAMIC
    return _matmul(op, (batch, m, n, k), attributes.dot.precision)


def einsum(op: Operation) -> Cost:
    """Return the cost of an einsum: of a matmul for two operands, of a sum for one operand."""
    if not isinstance(op.attributes, EinsumAttributes):
        return unknown_cost(op, OpClass.CONTRACTION)
    left, arrow, output = op.attributes.equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if not arrow or "." in left or len(inputs) != len(op.operands):
        return unknown_cost(op, OpClass.CONTRACTION)
    extents: dict[str, int] = {}
    for labels, tensor in zip(inputs, op.operands, strict=True):
        extents.update(zip(labels, tensor.shape, strict=False))
    if len(inputs) == 1:
        steps = max(op.operands[0].elements - op.results[0].elements, 0.0)
        rate = op.operands[0].code
        return Cost(OpClass.REDUCTION, steps, steps, 0.0, op.read_bytes, op.written_bytes, rate)
    lhs, rhs = (set(labels) for labels in inputs)
    output_labels = set(output)
    parts = (lhs & rhs & output_labels, lhs - rhs, rhs - lhs, (lhs & rhs) - output_labels)
    batch, m, n, k = (_product([extents[label] for label in sorted(part)]) for part in parts)
    return _matmul(op, (batch, m, n, k), Precision())


_MOST_BITS = 1 << 16


def with_macs(precision: Precision, attributes: Mapping[str, str]) -> Precision:
    """Return ``precision`` with the accumulator that an operation's attributes state. Some networks are
    trained for narrow or analogue accumulators.

    FQ-Conv (arXiv 1912.09356) sets ``accumulator_bits`` (a whole number) and ``mac_noise_sigma`` (a number).
    Invalid numbers are ignored.
    """
    bits = _number(attributes.get(ACCUMULATOR_BITS, ""))
    sigma = _number(attributes.get(MAC_NOISE_SIGMA, ""))
    if bits is not None and bits.is_integer() and 0 < bits <= _MOST_BITS:
        precision = precision._replace(accumulator_bits=int(bits))
    if sigma is not None and sigma >= 0:
        precision = precision._replace(mac_noise_sigma=sigma)
    return precision


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None


_MAX_POSITIONS = 1 << 22
"""Maximum of the shorter of output and kernel, over which counting is vectorised."""


@lru_cache(maxsize=4096)
def valid_positions(extent: int, output: int, dim: WindowDim) -> float:
    """Count the pairs (output position, window position) of one dimension that multiply a stored input
    element.

    Padding and dilation holes are not stored. Output ``o`` and window position ``k`` read the input at ``p =
    o * stride + k * rhs_dilation - pad_low``, which is stored where ``0 <= p <= (extent - 1) * lhs_dilation``
    and ``p`` is a multiple of ``lhs_dilation``. The pairs of several dimensions are independent.

    O(min(output, window)). The result is NaN if an extent is unknown, or both are above four million.
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
    """Count, for each base, the integers x in [0, run) for which ``base + x * step`` is in [0, last] and a
    multiple of ``modulus``. With window positions as x, it is the number that reads a stored element.
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
    """Return the cost of ``convolution``; unknown without dimension numbers."""
    if not isinstance(op.attributes, ConvAttributes) or len(op.operands) < 2:
        return unknown_cost(op, OpClass.CONVOLUTION)
    return convolution_cost(op, op.attributes, op.operands[0], op.operands[1], op.results[0])


def convolution_cost(
    op: Operation, attributes: ConvAttributes, source: Tensor, kernel: Tensor, output: Tensor
) -> Cost:
    """Return the cost of ``source * kernel -> output`` as an implicit matmul.

    M is output positions, N output features per group, K input features per group times kernel positions. A
    dimension in which each output has its own input and kernel position is a batch dimension, as TPU
    compilers write batched matmuls. ``useful_flops`` excludes positions on padding and dilation holes. The
    bytes are of the operands and results of ``op``, whose order may differ (gradients).
    """
    sizes = [kernel.shape[dim] for dim in attributes.kernel_spatial]
    outputs = [output.shape[dim] for dim in attributes.output_spatial]
    inputs = [source.shape[dim] for dim in attributes.input_spatial]
    groups = attributes.feature_groups * attributes.batch_groups
    features = output.shape[attributes.output_feature]
    per_group = kernel.shape[attributes.kernel_in]
    m = positions = _product([output.shape[attributes.output_batch], *outputs])
    n = features // groups if features >= 0 and groups > 0 else DYNAMIC
    k = depth = _product([per_group, *sizes])
    pairs = [
        valid_positions(extent, out, dim)
        for extent, out, dim in zip(inputs, outputs, attributes.window, strict=True)
    ]
    batches = prod(
        out
        for extent, size, out, met in zip(inputs, sizes, outputs, pairs, strict=True)
        if extent == size == out == met and out > 1
    )
    if min(m, k) > 0 and batches > 1:
        groups, m, k = groups * batches, m // batches, k // batches
    channels = _product([output.shape[attributes.output_batch], features, per_group])
    useful = channels * prod(pairs) if channels >= 0 else nan
    cost = contraction_cost(
        op,
        OpClass.CONVOLUTION,
        (groups, m, n, k),
        attributes.precision,
        macs=positions * depth * float(features) if min(m, k, features) >= 0 else nan,
        useful_macs=useful,
        types=(source, kernel, output),
    )
    window = k // per_group if min(k, per_group) > 0 and k % per_group == 0 else 1
    return replace(cost, contractions=tuple(replace(row, window=window) for row in cost.contractions))


def _product(extents: list[int]) -> int:
    """Return the product of several extents; -1 if one of them is unknown."""
    return DYNAMIC if min(extents, default=1) < 0 else prod(extents)
